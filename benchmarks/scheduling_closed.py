"""How long 16 steps take where nothing is admitted beyond them, over the least any schedule needs; S = 2, 64 slots."""

from __future__ import annotations

import dataclasses

from agentrl.simulation.run import Scenario, simulate_run
from benchmarks.scheduling_simulated import MEDIAN, scenario


def interfering(count: int) -> float:
    """Tokens per second of each of `count` calls that run together: a call alone is twice as fast as one among 64."""
    return MEDIAN * 2 / (1 + count / 64)


def figures(quick: bool) -> dict[str, float | None]:
    """One seed each, with an engine whose rate does not depend on who runs, and with one where it does."""
    if quick:
        return {}
    found: dict[str, float | None] = {}
    for release in ("late", "fifo", "group"):
        for name, rate in (("makespan_over_bound", None), ("with_interference", interfering)):
            made: Scenario = dataclasses.replace(
                scenario(release, staleness=2, slots=64), is_closed=True, steps=16, skipped=4
            )
            measured = simulate_run(made if rate is None else dataclasses.replace(made, rate=rate))
            print(f"  {release}, {name}: {measured.makespan_over_bound:.3f}", flush=True)
            if release == "late":
                found[f"closed_{name}"] = measured.makespan_over_bound
    return found
