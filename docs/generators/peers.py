"""Writes the tables of `python -m benchmarks.peers` from its saved line: no number of them is put in by hand.

    python -m benchmarks.peers --output docs/peers.json
    python -m docs.generators.peers [docs/peers.json]

Rewrites what stands between the two `peers` comments in README.md, and all of docs/results/benchmarks.md. A quick run
is refused, since its goal is low and its steps are few.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.text import plural
from benchmarks.peers import summary

ROOT = Path(__file__).resolve().parents[2]
MARKERS = re.compile(r"(<!-- peers -->\n).*?(<!-- /peers -->\n)", re.DOTALL)
COLUMNS = {
    "wall_per_step": "seconds per step",
    "wall_s": "seconds to {goal}",
    "reached": "runs that reached it",
    "cpu_s": "CPU seconds to {goal}",
    "share_wasted": "tokens wasted",
    "peak_mib": "peak MiB",
}
"""Column of a summary's table: its heading."""
SPREAD = {"wall_per_step", "wall_s"}
"""Columns with quartiles; those of the others are in docs/peers.json."""
PART_TITLES = {
    "calculator": "Calculator",
    "curves": "The same algorithm in two trainers",
    "tools": "Slow tools: waits of 0.5 s (median) and 2.5 s (P90)",
    "word_problems": "Word problems with SmolLM2-135M-Instruct: one turn, about 100 tokens",
}
"""Part of the result that the page shows: its heading."""
TITLES = {
    "agentrl_embedded": "agentrl, embedded",
    "agentrl_lockstep": "agentrl, embedded, lockstep",
    "agentrl_process": "agentrl, embedded, own process",
    "agentrl_vllm": "agentrl, vLLM, merged LoRA",
    "agentrl_vllm_adapter": "agentrl, vLLM, adapter",
    "agentrl_vllm_unbounded": "agentrl, vLLM, merged LoRA, no bound",
    "trl_async": "TRL async, vLLM, adapter",
    "trl_async_merged": "TRL async, vLLM, merged LoRA",
    "trl_sync": "TRL sync, transformers",
    "naive": "naive loop",
}
"""Contestant: its name in the tables."""
PAIRS = {
    "trl_async": "vllm-cpu, over TRL asynchronous, both with an adapter",
    "trl_async_merged": "vllm-cpu, over TRL asynchronous, both with a merged LoRA",
    "trl_async_unbounded": "vllm-cpu without a bound on staleness, over TRL asynchronous with it, merged LoRA",
    "trl_sync": "embedded, over TRL synchronous",
    "naive": "embedded, over the naive loop",
    "lockstep": "embedded, over itself in lockstep",
}
"""Pair of `benchmarks.peers.summary` that the page shows: what it calls it."""
MEASURES = {"step": "seconds per step", "wall": "seconds to the goal", "cpu": "CPU seconds to the goal"}
README_ROWS = (
    ("calculator", "Calculator, 0.84 M parameters", "trl_async_merged"),
    ("word_problems", "Word problems, SmolLM2-135M", "trl_async_merged"),
    ("tools", "Slow tools", "trl_async_merged"),
)


HOW = """\
* **Seconds per step** are the mean after the third step. Seconds and CPU seconds (of all processes) **to the goal** run
  from the start of training to the first snapshot with that held-out reward.
* Every recorded run counts. A run that misses the goal counts as slower than all others. A ratio of 0 means that only
  agentrl reached the goal, "not reached" that only the other side did.
* A **wasted** token was sampled but not trained by the last step.
* **Ratios differ between machines.** On two cores of an Intel Xeon, "embedded" took about as long as the naive loop.
  Rows of one table were measured hours or days apart, on shared hosts. Nothing was measured on a GPU.
* **TRL 1.16** was the newest version that the package index had. Its asynchronous trainer has a patch of ours, without
  which it does not start on a CPU. "Merged" has a transfer of weights through a file, since TRL's own is NCCL.
  TRL's default is twice as many conversations in flight.
* "In lockstep" is `max_staleness = 0`; "own process" is the default, and the others set `engine.replicas = 0`.
  Rows with vLLM train a LoRA.
* With slow tools, TRL drops samples beyond its bound on staleness; `max_lag` leaves out the older tokens. TRL's
  synchronous trainer makes the tool calls of a step one after another.
* agentrl's authors chose the settings, in `docs/peers.json`. Nobody of the other projects reviewed them.
"""


def number(value: float) -> str:
    """Three significant digits, whole from 100 on, with thousands separated."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"


def spread(values: Sequence[float | None] | None) -> str:
    """`median (first quartile to third)`; a dash where nothing was measured."""
    if values is None:
        return "–"
    low, median, high = ("not reached" if value is None else number(value) for value in values)
    return median if low == high else f"{median} ({low} to {high})"


def middle(values: Sequence[float | None] | None) -> str:
    """The median alone; a dash where nothing was measured."""
    return spread(None if values is None else [values[1]] * 3)


def share(values: Sequence[float]) -> str:
    """The median in percent."""
    return f"{values[1]:.0%}" if values[1] else "0"


def cell(row: Mapping[str, Any], column: str) -> str:
    if column == "reached":
        return f"{row['reached']} of {row['runs']}"
    if column == "share_wasted":
        return share(row[column])
    return (spread if column in SPREAD else middle)(row[column])


def table(report: Mapping[str, Any]) -> str:
    """A table of one part in Markdown: a row per contestant, and no column that is empty throughout."""
    rows = report["table"]
    shown = [column for column in COLUMNS if any(row.get(column) is not None for row in rows.values())]
    headings = ["", *(COLUMNS[column].format(goal=report["goal"]) for column in shown)]
    body = [
        [TITLES[name], *("–" if row.get(column) is None else cell(row, column) for column in shown)]
        for name, row in rows.items()
    ]
    return markdown(headings, body)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return "\n".join([lines[0], "|---" * len(headings) + "|", *lines[1:]]) + "\n"


def ratios(report: Mapping[str, Any]) -> str:
    """A table of a part's ratios in Markdown: a row per pair."""
    rows = [
        [words, ", ".join(map(str, report["seeds"][f"wall_over_{pair}"]))]
        + [
            (middle if measure == "cpu" else spread)(report["quartiles"][f"{measure}_over_{pair}"])
            for measure in MEASURES
        ]
        for pair, words in PAIRS.items()
        if report["quartiles"][f"wall_over_{pair}"]
    ]
    return markdown(["agentrl, with …", "seeds", *MEASURES.values()], rows)


def curves(report: Mapping[str, Any]) -> str:
    """Return how far agentrl's mean held-out reward is from TRL's, at the step at which they differ most."""
    ours, theirs = (report["curves"][name] for name in ("agentrl_lockstep", "trl_sync"))
    step = max(ours, key=lambda step: abs(ours[step][0] - theirs[step][0]))
    difference, half = ours[step][0] - theirs[step][0], math.hypot(ours[step][1], theirs[step][1])
    return (
        f"Up to step {max(ours, key=int)}, the mean held-out reward of {plural(report['repeats'], 'seed')} of agentrl "
        f"in lockstep differs from that of TRL's synchronous trainer by at most {abs(difference):.3f} ± {half:.3f}, at "
        f"step {step}.\n"
    )


def readme_section(line: Mapping[str, Any]) -> str:
    """The table in README.md, with what goes against agentrl."""
    parts: Mapping[str, Any] = line["parts"]
    rows = []
    for part, title, pair in README_ROWS:
        report = parts.get(part)
        if report is None or not report["quartiles"][f"step_over_{pair}"]:
            continue
        ours, theirs = (report["table"][contestant] for contestant in summary.PAIRS[pair])
        both = [number(side["wall_per_step"][1]) for side in (ours, theirs)]
        wasted = [share(side["share_wasted"]) for side in (ours, theirs)]
        rows.append([f"{title} ({plural(len(report['seeds'][f'step_over_{pair}']), 'seed')})", *both, *wasted])
    conditions = parts["calculator"]["conditions"]
    headings = [
        f"{' '.join(conditions['date'].split()[-2:])}, {conditions['machine']}",
        "s/step, agentrl",
        "s/step, TRL",
        "tokens thrown away, agentrl",
        "TRL",
    ]
    return (
        markdown(headings, rows)
        + "\nMedians. TRL 1.16's asynchronous trainer, patched to run without a GPU, both with the same vLLM and a "
        "merged LoRA. TRL drops episodes more than four steps behind; with slow tools, agentrl leaves out "
        "their older tokens. TRL 1.18 and 1.19 were not measured. [All figures](docs/results/benchmarks.md).\n"
    )


def page(line: Mapping[str, Any]) -> str:
    """All of docs/results/benchmarks.md."""
    text = (
        "# agentrl and its peers\n\n"
        "`python -m benchmarks.peers` gives each library, pinned, the same task, and `python -m docs.generators.peers` "
        "writes this page. Cells are medians, of times with quartiles; of fewer than four runs, with the extremes. In "
        f"tables of ratios, seed by seed, agentrl needs less where a number is below 1.\n\n{HOW}"
    )
    for part, title in PART_TITLES.items():
        if (report := line["parts"].get(part)) is None:
            continue
        dates, machine = report["conditions"]["date"], report["conditions"]["machine"]
        text += f"\n## {title}\n\n{dates}, {machine}.\n\n"
        text += curves(report) if part == "curves" else f"{table(report)}\n{ratios(report)}"
    return text


def main() -> None:
    """Write both files."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "peers.json"
    if not path.exists():
        raise SystemExit(f"{path} does not exist; write it with `python -m benchmarks.peers --output {path}`")
    line = json.loads(path.read_text(encoding="utf-8"))
    if line["quick"]:
        raise SystemExit(f"{path} is of a quick run; run `python -m benchmarks.peers --output {path}` without --quick")
    readme = ROOT / "README.md"
    text, replaced = MARKERS.subn(lambda found: found[1] + readme_section(line) + found[2], readme.read_text("utf-8"))
    if replaced != 1:
        raise SystemExit("README.md needs one line `<!-- peers -->` and after it one line `<!-- /peers -->`")
    readme.write_text(text, encoding="utf-8")
    (ROOT / "docs/results/benchmarks.md").write_text(page(line), encoding="utf-8")


if __name__ == "__main__":
    main()
