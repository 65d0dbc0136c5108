"""From the records of single runs to medians, quartiles and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.core.intervals import half_width_of_few

MEASURED = (
    "wall_s",
    "cpu_s",
    "steps_to_goal",
    "wall_per_step",
    "cpu_per_step",
    "tokens_sampled",
    "tokens_wasted",
    "staleness_mean",
    "staleness_max",
    "episodes_dropped",
    "peak_mib",
    "killed_s",
    "killed_tokens",
    "rollout_cpu_ms",
    "cores_of_others",
)
"""Numbers of a record that are summarized. One that is absent was not measured; None is what a run never reached."""
MEASURES = {"step": "wall_per_step", "wall": "wall_s", "cpu": "cpu_s"}
PAIRS = {
    "trl_async": ("agentrl_vllm_adapter", "trl_async"),
    "trl_async_merged": ("agentrl_vllm", "trl_async_merged"),
    "trl_async_unbounded": ("agentrl_vllm_unbounded", "trl_async_merged"),
    "trl_sync": ("agentrl_embedded", "trl_sync"),
    "trl_sync_lockstep": ("agentrl_lockstep", "trl_sync"),
    "naive": ("agentrl_embedded", "naive"),
    "naive_process": ("agentrl_process", "naive"),
    "naive_lockstep": ("agentrl_lockstep", "naive"),
    "lockstep": ("agentrl_embedded", "agentrl_lockstep"),
}
"""Contestants that are compared, seed by seed."""
RATIOS = {
    **{
        f"{name}_over_{pair}": (measure, above, below)
        for pair, (above, below) in PAIRS.items()
        for name, measure in MEASURES.items()
    },
    "orchestration_cpu_over_verifiers": ("rollout_cpu_ms", "agentrl_scripted", "verifiers"),
}
"""Figure: what is divided, for whom, by the same of whom, seed by seed."""


def quartiles(values: Sequence[float]) -> list[float | None] | None:
    """First quartile, median and third quartile; the extremes for fewer than four values, None for no values.

    Of runs that never reached the goal, whose values are infinite, a quartile is None.
    """
    if not values:
        return None
    ordered = sorted(values)
    if len(ordered) < 4:
        found = [ordered[0], statistics.median(ordered), ordered[-1]]
    else:
        found = [_quantile(ordered, share) for share in (0.25, 0.5, 0.75)]
    return [value if math.isfinite(value) else None for value in found]


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolated as `statistics.quantiles(method="inclusive")` does, also between infinite values."""
    below, weight = divmod(share * (len(ordered) - 1), 1)
    low = ordered[int(below)]
    return low if weight == 0 or low == math.inf else low + weight * (ordered[int(below) + 1] - low)


def reached(record: Mapping[str, Any], measure: str) -> float:
    """A measured value; infinite if the run was stopped before it reached the goal, since it was the slowest."""
    value = record[measure]
    return math.inf if value is None else float(value)


def ratios(records: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    """Return a figure by seed, for the seeds that both sides ran. Where neither reached the goal, the ratio is 1."""
    measure, above, below = RATIOS[name]
    values = {
        (record["seed"], record["contender"]): reached(record, measure)
        for record in records
        if measure in record and record["contender"] in (above, below)
    }
    seeds = sorted(seed for seed, contender in values if contender == above and (seed, below) in values)
    pairs = {seed: (values[seed, above], values[seed, below]) for seed in seeds}
    return {seed: 1.0 if a == b == math.inf else a / b for seed, (a, b) in pairs.items()}


def table(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Contestant: its constants, the quartiles of what was measured, and the number of its runs."""
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(record["contender"] for record in records):
        own = [record for record in records if record["contender"] == name]
        row = {key: own[-1][key] for key in ("title", "lines", "packages", "megabytes", "proposer_and_solver")}
        row["commit"] = ", ".join(dict.fromkeys(record["commit"] for record in own))
        for measure in MEASURED:
            is_whole = all(measure in record for record in own)
            row[measure] = quartiles([reached(record, measure) for record in own]) if is_whole else None
        if all("tokens_wasted" in record for record in own):
            row["share_wasted"] = quartiles([record["tokens_wasted"] / record["tokens_sampled"] for record in own])
        if all("steps_to_goal" in record for record in own):
            row["reached"] = sum(record["steps_to_goal"] is not None for record in own)
        rows[name] = {**row, "runs": len(own)}
    return rows


def curves(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Contestant: by step, the mean held-out reward of its seeds, and half its 95 % interval."""
    steps = set.intersection(*(set(record["curve"]) for record in records))
    found: dict[str, dict[str, list[float]]] = {}
    for name in dict.fromkeys(record["contender"] for record in records):
        own = [record["curve"] for record in records if record["contender"] == name]
        rewards = {step: [curve[step] for curve in own] for step in sorted(steps, key=int)}
        found[name] = {step: [statistics.fmean(values), half_width_of_few(values)] for step, values in rewards.items()}
    return found


def report(
    part: str,
    *,
    quick: bool,
    goal: float | None,
    records: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return what the last line says. Every recorded run counts in its row, and every seed of both sides in a ratio.

    `records` keeps all runs, so that later ones can be added.
    """
    by_seed = {name: ratios(records, name) for name in RATIOS}
    spread = {name: quartiles(list(values.values())) for name, values in by_seed.items()}
    return {
        "benchmark": "peers",
        "part": part,
        "quick": quick,
        "goal": goal,
        "conditions": {
            name: ", ".join(dict.fromkeys(record[name] for record in records)) for name in ("date", "machine")
        },
        "repeats": len({record["seed"] for record in records}),
        "figures": {name: values and _short(values[1]) for name, values in spread.items()},
        "quartiles": {name: values and [_short(value) for value in values] for name, values in spread.items()},
        "seeds": {name: list(values) for name, values in by_seed.items()},
        "table": table(records),
        **({"curves": curves(records)} if part == "curves" else {}),
        "records": list(records),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
