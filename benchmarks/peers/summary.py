"""From the records of single runs to medians, quartiles and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

MEASURED = (
    "wall_s",
    "cpu_s",
    "steps_to_goal",
    "wall_per_step",
    "cpu_per_step",
    "tokens_sampled",
    "tokens_wasted",
    "peak_mib",
    "killed_s",
    "killed_tokens",
    "rollout_cpu_ms",
)
"""Numbers of a record that are summarized; absent or None where a run did not measure one."""
RATIOS = {
    "wall_over_trl_async_same_server": ("wall_s", "agentrl_vllm", "trl_async"),
    "wall_over_trl_shipped": ("wall_s", "agentrl_embedded", "trl_sync"),
    "wall_over_naive": ("wall_s", "agentrl_embedded", "naive"),
    "cpu_over_trl": ("cpu_s", "agentrl_vllm", "trl_async"),
    "orchestration_cpu_over_verifiers": ("rollout_cpu_ms", "agentrl_embedded", "verifiers"),
}
"""Figure: what is divided, for whom, by the same of whom, seed by seed."""


def quartiles(values: Sequence[float]) -> list[float] | None:
    """First quartile, median and third quartile; the extremes for fewer than four values, None for none."""
    if not values:
        return None
    if len(values) < 4:
        return [min(values), statistics.median(values), max(values)]
    return statistics.quantiles(values, n=4, method="inclusive")


def ratios(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A figure, seed by seed; seeds in which one side has no value are left out."""
    measure, above, below = RATIOS[name]
    values: dict[tuple[Any, str], float] = {
        (record["seed"], record["contender"]): record[measure]
        for record in records
        if record.get(measure) is not None and record["contender"] in (above, below)
    }
    seeds = sorted({seed for seed, _ in values})
    pairs = [(values.get((seed, above)), values.get((seed, below))) for seed in seeds]
    return [a / b for a, b in pairs if a is not None and b]


def table(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Contestant: its constants, the quartiles of what was measured, runs, and in how many it reached the goal."""
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(record["contender"] for record in records):
        own = [record for record in records if record["contender"] == name]
        row = {key: own[-1][key] for key in ("title", "lines", "packages", "megabytes", "proposer_and_solver")}
        for measure in MEASURED:
            values = [record[measure] for record in own if record.get(measure) is not None]
            row[measure] = quartiles(values)
        trained = [record for record in own if "wall_s" in record]
        rows[name] = {**row, "runs": len(own), "reached": sum(record["wall_s"] is not None for record in trained)}
    return rows


def report(part: str, *, quick: bool, goal: float | None, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the last line says."""
    spread = {name: quartiles(ratios(records, name)) for name in RATIOS}
    return {
        "benchmark": "peers",
        "part": part,
        "quick": quick,
        "goal": goal,
        "repeats": len({record["seed"] for record in records}),
        "figures": {name: None if values is None else round(values[1], 4) for name, values in spread.items()},
        "quartiles": {name: values and [round(value, 4) for value in values] for name, values in spread.items()},
        "table": table(records),
        "records": list(records),
    }
