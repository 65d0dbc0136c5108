"""How long 16 steps take where nothing is admitted beyond them, over the least any schedule needs; S = 2, 64 slots."""

from __future__ import annotations

from benchmarks.scheduling_simulated import MEDIAN, RULES, altered, plan
from benchmarks.simulation.run import Scenario, simulate_run

INTERFERING = {1: MEDIAN * 2 / (1 + 1 / 64), 64: float(MEDIAN)}
"""Tokens per second of each call: alone it is twice as fast as among 64."""


def figures(quick: bool) -> dict[str, float | None]:
    """One seed each, with an engine whose rate does not depend on who runs, and with one where it does."""
    if quick:
        return {}
    found: dict[str, float | None] = {}
    for rule in ("late", "fifo", "group", "barrier"):
        for name, rates in (("makespan_over_bound", None), ("with_interference", INTERFERING)):
            staleness = 2 if RULES[rule].staleness is None else 0
            made = Scenario(
                plan=plan(rule, staleness=staleness, slots=64, rates=rates), is_closed=True, steps=16, skipped=4
            )
            measured = simulate_run(altered(made, rule, staleness))
            print(f"  {rule}, {name}: {measured.makespan_over_bound:.3f}", flush=True)
            if rule == "late":
                found[f"closed_{name}"] = measured.makespan_over_bound
    return found
