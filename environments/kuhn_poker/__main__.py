"""`python -m agentrl.environments.kuhn_poker RUN [--every 20]`: the exploitability of a run's versions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import agentrl
from agentrl.environments.kuhn_poker.env import QUESTIONS, exploitability, read_strategy
from agentrl.observe.run_screen import plot_curve


def measure(path: str | Path, every: int) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield the step, the exploitability and the probabilities of betting of every `every`-th version and the last.

    A question that no game of a version reached keeps the probability of the version before.
    """
    bets: dict[str, float] = {}
    with agentrl.open_run(path) as run:
        last = max((value.step for value in run.metrics("reward/mean")), default=0) - 1
        for step in sorted({*range(0, last + 1, every), last}):
            bets |= read_strategy(run, step)
            if len(bets) == len(QUESTIONS):
                yield step, exploitability(bets), bets


def main() -> int:
    """Print the exploitability of the versions, its curve, and the last strategy."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.environments.kuhn_poker", description=__doc__)
    parser.add_argument("run", help="directory of a run of Kuhn poker")
    parser.add_argument("--every", type=int, default=20, help="number of steps between two measured versions")
    options = parser.parse_args()
    steps, values, bets = [], [], dict[str, float]()
    try:
        for step, value, bets in measure(options.run, options.every):  # noqa: B007 (the last is printed)
            print(f"version {step}: {value:.4f}")
            steps.append(step)
            values.append(value)
    except agentrl.AgentRLError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(plot_curve(values, steps=steps, title="exploitability, in chips a hand"))
    print("probability of a bet:", ", ".join(f"{question} {bet:.2f}" for question, bet in bets.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
