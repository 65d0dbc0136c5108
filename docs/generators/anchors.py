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
from benchmarks.anchors.cases import ANCHORS, NOT_RUN, Anchor

ROOT = Path(__file__).resolve().parents[2]
Record = Mapping[str, Any]

INTRODUCTION = """\
# Anchors

Small results that other projects published, reached here on two shared CPU cores with models that fit. The models are
mostly smaller than the published ones, so compare the shape of a curve, not its height.
`python -m benchmarks.anchors --anchor NAME` repeats one. It trains with `agentrl train` and is resumable; a recipe of
tinker-cookbook trains through `agentrl serve tinker`, and starts over. This page is generated from the records in
`docs/anchors.json` by `python -m docs.generators.anchors`.

* Every reward is held out: tasks that no training step saw, sampled as in training.
* An interval of one run is the 95% interval over its tasks. An interval over seeds is Student's, over the runs' means;
  it says how much runs differ. One seed has none.
* Every seed that was run to its end is here, the failed ones too. CPU minutes count all processes of
  `agentrl train`, evaluations included, or server and recipe; peak MiB is the memory of the largest. Neither
  is known for a run that was stopped and resumed.
* A digest is the start of a SHA-256 over the names and contents of all files of the run directory
  (`benchmarks.anchors.recording.digest`).
* The same algorithm from the same start in TRL gives [the same curve, step by
  step](benchmarks.md#the-calculator-step-by-step-the-same-algorithm-in-three-trainers).
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


def curves(anchor: Anchor, records: Sequence[Record]) -> str:
    """Mean held-out rewards of each arm over the steps that all of its runs evaluated."""
    by_arm = {}
    for name in anchor.arms:
        runs = [{int(step): reward for step, reward, *_ in row["curve"]} for row in records if row["arm"] == name]
        by_arm[name] = [run for run in runs if run]
    steps = sorted({step for runs in by_arm.values() for run in runs for step in run})
    rows = [
        [anchor.arms[name].title, str(len(runs))]
        + [over_seeds([run[step] for run in runs]) if all(step in run for run in runs) else "–" for step in steps]
        for name, runs in by_arm.items()
        if runs
    ]
    return table(["held-out reward at step", "seeds", *map(str, steps)], rows)


def runs(records: Sequence[Record]) -> str:
    """A row per run."""
    return table(
        [
            "arm",
            "seed",
            "start",
            "end",
            "tasks",
            "CPU minutes",
            "peak MiB",
            "date, commit of `agentrl/`",
            "digest",
            "command",
        ],
        [_run(row) for row in records],
    )


def _run(row: Record) -> list[str]:
    start, end, tasks = "–", "–", "–"
    if row["curve"]:
        (_, first, first_half, count), (_, last, last_half, _) = row["curve"][0], row["curve"][-1]
        start, end, tasks = interval(first, first_half), interval(last, last_half), f"{count:.0f}"
    if row["error"]:
        end = f"failed: {row['error']}"
    return [
        row["arm"],
        str(row["seed"]),
        start,
        end,
        tasks,
        "–" if row["cpu_s"] is None else f"{row['cpu_s'] / 60:.1f}",
        "–" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}",
        f"{row['date']}, {row['commit']}",
        f"`{row['digest'][:12]}`" if row.get("digest") else "–",
        f"`{row['command']}`",
    ]


def section(anchor: Anchor, records: Sequence[Record]) -> str:
    """The part of the page about one anchor."""
    text = (
        f"\n## {anchor.title}\n\n{anchor.task} Reward: {anchor.reward}.\n\n"
        f"**Published:** {anchor.published} ({anchor.source}).\n\n"
    )
    if not records:
        return f"{text}No run was recorded.\n{_notes(anchor)}"
    return f"{text}{curves(anchor, records)}{_notes(anchor)}\n{runs(records)}"


def _notes(anchor: Anchor) -> str:
    return "".join(f"\n* {line}" for line in anchor.notes) + "\n" if anchor.notes else ""


def page(records: Sequence[Record]) -> str:
    """All of docs/results/anchors.md."""
    count = sum(bool(row["curve"]) for row in records)
    machines = ", ".join(dict.fromkeys(row["machine"] for row in records))
    text = f"{INTRODUCTION}\n{plural(count, 'run')} on {machines}, shared with other work.\n"
    for name, anchor in ANCHORS.items():
        text += section(anchor, [row for row in records if row["anchor"] == name])
    return f"{text}\n## Not finished\n\n" + "".join(f"* {line}\n" for line in NOT_RUN)


def read_records() -> list[Record]:
    """The records that are published."""
    found: list[Record] = json.loads((ROOT / "docs" / "anchors.json").read_text(encoding="utf-8"))["records"]
    return found


def main() -> None:
    """Write the page."""
    (ROOT / "docs" / "results" / "anchors.md").write_text(page(read_records()), encoding="utf-8")


if __name__ == "__main__":
    main()
