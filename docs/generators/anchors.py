"""Writes docs/results/anchors.md from the records of `python -m benchmarks.anchors`.

    python -m benchmarks.anchors --output docs/anchors.json
    python -m docs.generators.anchors

No number of its tables is put in by hand. The notes are text of `benchmarks.anchors.cases`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.intervals import half_width_of_few
from agentrl.core.text import plural
from benchmarks.anchors.cases import ANCHORS, Anchor

ROOT = Path(__file__).resolve().parents[2]
Record = Mapping[str, Any]

INTRODUCTION = """\
# Anchors

Small results that other projects published, reached here. The models are mostly smaller than the published ones, so
compare the shape of a curve, not its height. `python -m benchmarks.anchors --anchor NAME` repeats one;
`docs/anchors.json` has the command, curve, cost and digest of each run.

Held-out rewards: means over seeds with Student's 95% interval.
"""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return "\n".join([lines[0], "|---" * len(headings) + "|", *lines[1:]]) + "\n"


def interval(reward: float, half: float) -> str:
    """A reward with half its interval; without it if there is none."""
    return f"{reward:.2f} ± {half:.2f}" if half else f"{reward:.2f}"


def over_seeds(values: Sequence[float]) -> str:
    """The mean of runs with Student's interval; a dash without runs."""
    return interval(statistics.fmean(values), half_width_of_few(values)) if values else "–"


def rows(anchor: Anchor, records: Sequence[Record]) -> list[list[str]]:
    """A row per arm: its mean held-out rewards at the first and at the last step that all of its runs evaluated."""
    cells = []
    for name, arm in anchor.arms.items():
        own = [row for row in records if row["arm"] == name]
        curves = [{int(step): reward for step, reward, *_ in row["curve"]} for row in own if row["curve"]]
        failed = sum(bool(row["error"]) for row in own)
        seeds = f"{len(own)}, {failed} failed" if failed else f"{len(own)}"
        if curves:
            steps = sorted(set.intersection(*map(set, curves)))
            ends = [over_seeds([curve[step] for curve in curves]) for step in (steps[0], steps[-1])]
            cells.append([anchor.title, arm.title, seeds, str(steps[-1]), *ends])
        elif own:
            cells.append([anchor.title, arm.title, seeds, "–", "–", "–"])
    return cells


def verdict(anchor: Anchor) -> str:
    """The line of the page about one anchor."""
    published = f"Published: {anchor.published} ({anchor.source}). " if anchor.source else ""
    return f"* **{anchor.title}**: {anchor.task} ({anchor.reward}). {published}{anchor.notes}\n"


def page(records: Sequence[Record]) -> str:
    """All of docs/results/anchors.md."""
    count = sum(bool(row["curve"]) for row in records)
    machines = ", ".join(dict.fromkeys(row["machine"] for row in records))
    by_anchor = {name: [row for row in records if row["anchor"] == name] for name in ANCHORS}
    headings = ["task", "what learns", "seeds", "steps", "before", "after"]
    return (
        f"{INTRODUCTION}\n{plural(count, 'run')} on {machines}, shared with other work.\n\n"
        + table(headings, [row for name, anchor in ANCHORS.items() for row in rows(anchor, by_anchor[name])])
        + "\n"
        + "".join(map(verdict, ANCHORS.values()))
    )


def read_records() -> list[Record]:
    """The records that are published."""
    found: list[Record] = json.loads((ROOT / "docs" / "anchors.json").read_text(encoding="utf-8"))["records"]
    return found


def main() -> None:
    """Write the page."""
    (ROOT / "docs" / "results" / "anchors.md").write_text(page(read_records()), encoding="utf-8")


if __name__ == "__main__":
    main()
