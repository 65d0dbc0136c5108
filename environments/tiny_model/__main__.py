"""`python -m agentrl.environments.tiny_model ENVIRONMENT --out DIR`: build a tiny model from demonstrations."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.app.stops import SAME_PRESS_S
from agentrl.core.clock import SystemClock
from agentrl.core.errors import AgentRLError
from agentrl.core.text import plural
from agentrl.environments.tiny_model.warm_up import build_tiny_model
from agentrl.observe.progress import ProgressLine


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the model, print its rewards and the next command, and return the exit code."""
    options = _parser().parse_args(arguments)
    end = "when this reward reaches its goal, or " if options.demonstrations is None else ""
    print(
        "The held-out reward usually stays low until the loss is small. "
        f"The warm-up ends {end}after {plural(options.steps, 'step')}. Ctrl-C or SIGTERM ends it earlier and keeps the "
        "model.",
        file=sys.stderr,
    )
    try:
        with (
            _interrupted_by(signal.SIGINT, signal.SIGTERM),
            contextlib.closing(ProgressLine(f"warming up {options.out}", sys.stderr)) as progress,
        ):
            result = build_tiny_model(
                options.environment,
                options.out,
                demonstrations=options.demonstrations,
                steps=options.steps,
                early=options.early,
                until=options.until,
                seed=options.seed,
                on_progress=progress,
            )
    except AgentRLError as error:
        print(f"tiny_model: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        kept = f"{options.out} holds the trained model" if options.out.exists() else "nothing was written"
        print(f"tiny_model: interrupted; {kept}", file=sys.stderr)
        return 130
    note = "" if result.demonstrated is None else f"; demonstrations: {result.demonstrated:.3f}"
    if note and options.early:
        note += f" (up to {options.early:.0%} of them answer too early, which leaves something to learn)"
    print(f"{result.path}: {result.parameters:,} parameters, {result.vocabulary} tokens, {result.steps} training steps")
    print(f"held-out reward: {result.before:.3f} before, {result.reward:.3f} after{note}")
    if result.interrupted:
        print("interrupted: the model is that of its last step")
    if result.explanation:
        print(f"the held-out reward did not rise: {result.explanation}")
    elif result.interrupted:
        print("more steps may raise its reward")
    elif result.steps == options.steps and result.goal is not None and result.reward < result.goal:
        print(
            "the held-out reward did not reach its goal. Reinforcement learning can start from this model; to start "
            "higher, raise --steps, or let a tool compute what replies cannot copy from the messages"
        )
    print(f"next: agentrl train {result.path}/train.toml")
    return 0


@contextlib.contextmanager
def _interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Let signals raise `KeyboardInterrupt`, even if they are ignored, as a background job ignores SIGINT.

    Several within `SAME_PRESS_S` count as one.
    """
    pressed_at = -math.inf

    def press(*_: object) -> None:
        nonlocal pressed_at
        now = SystemClock.monotonic()
        if now - pressed_at > SAME_PRESS_S:
            pressed_at = now
            raise KeyboardInterrupt

    before = {number: signal.signal(number, press) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agentrl.environments.tiny_model", description=__doc__)
    parser.add_argument("environment", help="registered name, module:Class, or path/to/env.py:Class")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory for the model")
    text = "conversations to learn from, one JSON object per line; default: the environment's `demonstrate`"
    parser.add_argument("--demonstrations", type=Path, metavar="FILE.jsonl", help=text)
    parser.add_argument("--steps", type=_positive, default=600, help="maximum number of training steps (default 600)")
    text = "share of demonstrations cut short, to leave something for reinforcement learning (default 0.5)"
    parser.add_argument("--early", type=float, default=0.5, metavar="SHARE", help=text)
    text = "stop at this share of the way from the random model's reward to the demonstrations' (default 0.8)"
    parser.add_argument("--until", type=float, default=0.8, metavar="SHARE", help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks, weights and random draws (default 0)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
