"""Draw the curves with which pages end, as SVGs: from runs of two examples, and from docs/anchors.json.

python docs/img/doors.py signalling RUN OUT.svg     # RUN: of examples/18_signalling.toml
python docs/img/doors.py kuhn_poker RUN OUT.svg     # RUN: of examples/17_kuhn_poker.toml
python docs/img/doors.py tool_call docs/anchors.json OUT.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from curves import Line
from self_play import framed

import agentrl


def signalling(run: Path) -> tuple[list[Line], str]:
    """The reward of the two policies, in training and on held-out rounds, and what blind guesses get."""
    with agentrl.open_run(run) as recorded:
        trained = [(each.step, each.value) for each in recorded.metrics("reward/mean") if each.policy == "speaker"]
        held_out = sorted({(each.step, each.metrics["reward"]) for each in recorded.evaluations()})  # of both policies
    lines = [
        line("training, 128 rounds a step", trained),
        line("held out", held_out, color=1, dots=True),
        line("blind guesses", [(0, 1 / 8), (trained[-1][0], 1 / 8)], color=2),
    ]
    return lines, "Share of rounds in which the listener names the speaker's state, by step"


def kuhn_poker(run: Path) -> tuple[list[Line], str]:
    """The exploitability of the versions of two players."""
    from agentrl.environments.kuhn_poker.__main__ import measure

    points = [(step, value) for step, value, _ in measure(run, 20)]
    for step, value in points:
        print(f"version {step}: {value:.4f}")
    return [line("both players", points, dots=True)], "Exploitability in chips a hand, by step"


def tool_call(records: Path) -> tuple[list[Line], str]:
    """Training and held-out rewards of three seeds of examples/16_qwen.toml: `docs/anchors.json` has them."""
    runs = [each for each in json.loads(records.read_text())["records"] if each["anchor"] == "tool_call"]
    trained = [sum(values) / len(values) for values in zip(*(each["training"]["agent"] for each in runs), strict=True)]
    held_out = [[(step, reward) for step, reward, *_ in each["curve"]] for each in runs]
    lines = [
        line("training, 16 episodes a step, mean of three seeds", list(enumerate(trained, start=1))),
        *(line("held out, each seed" if not n else "", each, color=1, dots=True) for n, each in enumerate(held_out)),
    ]
    return lines, "Reward of Qwen2.5-Coder-0.5B-Instruct with one tool, by step"


def line(label: str, points: list[tuple[int, float]], *, color: int = 0, dots: bool = False) -> Line:
    """A line through points."""
    return Line(label, [step for step, _ in points], [value for _, value in points], color=color, dots=dots)


PICTURES: Mapping[str, Callable[[Path], tuple[list[Line], str]]] = {
    "signalling": signalling,
    "kuhn_poker": kuhn_poker,
    "tool_call": tool_call,
}


def main() -> None:
    """Read and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    lines, title = PICTURES[options.picture](options.source)
    options.out.write_text(framed(lines, title=title, low=0.0, high=None if options.picture == "kuhn_poker" else 1.0))


if __name__ == "__main__":
    main()
