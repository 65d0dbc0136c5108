"""What a hard limit on lag costs: jobs of the survey, P90 at five medians, with `max_lag` of 1, 2 and 4 steps and none.

With `over_lag = "wait"` the limit is kept by admission alone, so nothing is left out; what it costs is slots that stay
empty while the policy waits for a straggler. `max_lag_exceeded` counts trajectories that were trained whole although
their oldest token was older than the limit: 0.

With `"mask"`, older tokens are left out: `late_mask_1` has the steps per hour with a limit of 1 and `release = "late"`
over those without a limit, and `mask_1_share` the share of the tokens left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.scheduling_simulated import FILLING, SHORT, plan, run
from tests.simulation.run import Scenario, SimulationResult

STALENESS, SLOTS = 1, 64
LIMITS: Sequence[int | None] = (None, 1, 2, 4)
SEEDS = 3


def lagging(release: str, limit: int | None, seed: int, steps: int, over_lag: str = "wait") -> SimulationResult:
    """A run of the survey's jobs with a limit."""
    made = plan(release, staleness=STALENESS, slots=SLOTS, seed=seed, max_lag=limit, over_lag=over_lag)
    filling = min(FILLING, steps // 2)
    said = "no limit" if limit is None else f"max_lag {limit} {over_lag}"
    return run(f"{release} {said} seed {seed}", Scenario(plan=made, steps=filling + steps, skipped=filling))


def figures(quick: bool) -> dict[str, float | None]:
    """`max_lag_exceeded` over all runs with a limit; steps per hour with it over those without, by release."""
    found: dict[str, float | None] = {}
    exceeded = 0
    for release in ("late",) if quick else ("group", "late"):
        rates: dict[int | None, list[float]] = {limit: [] for limit in LIMITS}
        for limit in (1,) if quick else LIMITS:
            for seed in range(1 if quick else SEEDS):
                measured = lagging(release, limit, seed, 8 if quick else SHORT)
                rates[limit].append(measured.steps_per_hour["solver"])
                exceeded += measured.max_lag_exceeded
        for limit in () if quick else (1, 2, 4):
            found[f"{release}_max_lag_{limit}"] = fmean(rates[limit]) / fmean(rates[None])
    if not quick:  # `rates` belongs to `late`, the last release
        masked = [lagging("late", STALENESS, seed, SHORT, "mask") for seed in range(SEEDS)]
        exceeded += sum(measured.max_lag_exceeded for measured in masked)
        found["late_mask_1"] = fmean(measured.steps_per_hour["solver"] for measured in masked) / fmean(rates[None])
        found["mask_1_share"] = fmean(measured.older for measured in masked)
    return {"max_lag_exceeded": float(exceeded), **found}
