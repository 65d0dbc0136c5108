"""Steps per second of whole simulated runs, over what engine or trainer could do at most: ours, and others' rules.

Jobs are those of the survey: four proposals a task, eight child episodes each, P90 five times the median, siblings'
log-lengths correlated by one half, the longest 40 medians. Time is counted in medians: one slot samples one a second.
The bound is the engine's with all slots busy, the trainer taking 0.8 of that. All rules get the same jobs.

Every rule is production's loop, with the small change that `benchmarks/release_rules.py` says. Of so few tasks those of
one window are longer or shorter by some percent, whoever schedules: `late` and `fifo` are measured over 80 steps and
four seeds, the others over 28 steps of one.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.orchestrator.loop import Orchestrator
from benchmarks.release_rules import PROPOSALS, by_whole_tasks, one_step_off, race, without_stale
from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, SimulationResult, simulate_run

MEDIAN = 32
"""Tokens."""
MEAN = 2.16
"""Of a job, in medians."""
JOBS = 256 + 32
"""Of a step: children and proposals."""
FILLING, LONG, SHORT = 12, 80, 28
"""Steps: the first, which are not measured; those that are."""
SEEDS = 4
COLUMNS = ((1, 64), (2, 64), (2, 256))
"""Staleness and slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When something is trained."""

    release: str = "group"
    alter: Callable[[int], Callable[[Orchestrator], None]] | None = None
    """From the staleness."""
    children: int = 8
    staleness: int | None = None
    """The only one that it has."""


RULES = {
    "late": Rule(release="late"),
    "fifo": Rule(alter=lambda staleness: by_whole_tasks),
    "episode": Rule(release="episode"),
    "group": Rule(),
    "drop stale": Rule(alter=without_stale),
    "race": Rule(alter=lambda staleness: race, children=10),
    "one step off": Rule(alter=lambda staleness: one_step_off, staleness=1),
    "barrier": Rule(staleness=0),
}


def plan(
    rule: str,
    *,
    staleness: int,
    slots: int,
    law: str = "lognormal",
    seed: int = 0,
    rates: dict[int, float] | None = None,
    max_lag: int | None = None,
) -> SimulationPlan:
    """The survey's jobs; a slot samples a median job in a second."""
    tail = {"p50": MEDIAN, "p90": 5 * MEDIAN, "cap": 40 * MEDIAN, "law": law}
    return SimulationPlan.model_validate(
        {
            "seed": seed,
            "max_in_flight": 1 << 20,
            "environments": {
                "Propose": {"seats": {"proposer": {"tokens": tail}}, "fan_out": {"Solve": RULES[rule].children}},
                "Solve": {"seats": {"solver": {"tokens": tail}}},
            },
            "policies": {
                "solver": {"step_size": 256, "max_staleness": staleness, "max_lag": max_lag},
                "proposer": {"kind": "frozen"},
            },
            "credit": {"group_size": PROPOSALS, "release": RULES[rule].release},
            "engine": {"slots": slots, "rates": rates or {1: float(MEDIAN)}},
            "trainer": {"step_seconds": 0.8 * JOBS * MEAN / slots},
        }
    )


def scenario(
    rule: str, *, staleness: int, slots: int, law: str = "lognormal", seed: int = 0, steps: int = SHORT
) -> Scenario:
    """One run."""
    made = plan(rule, staleness=staleness, slots=slots, law=law, seed=seed)
    return altered(Scenario(plan=made, steps=FILLING + steps, skipped=FILLING), rule, staleness)


def altered(made: Scenario, rule: str, staleness: int) -> Scenario:
    """With what the rule changes."""
    alter = RULES[rule].alter
    return made if alter is None else dataclasses.replace(made, alter=alter(staleness))


def run(name: str, made: Scenario) -> SimulationResult:
    """Simulate, and print a line."""
    measured = simulate_run(made)
    print(
        f"  {name}: {measured.steps_per_bound:.3f} of the bound, slots busy {measured.slots_busy:.2f}, trainer "
        f"{measured.trainer_busy:.2f}, token lag {measured.token_lag:.2f}, older than S {measured.older:.2f}, p99 "
        f"{measured.lag_p99:.0f}, longest {measured.lag_max:.0f}, length {measured.length_ratio:.3f}, waste "
        f"{measured.waste:.2f}, {measured.cpu_seconds:.0f} s CPU",
        flush=True,
    )
    return measured


def figures(quick: bool) -> dict[str, float | None]:
    """Means over the seeds; lag, lengths and waste at S = 2 with 64 slots."""
    if quick:
        made = dataclasses.replace(scenario("late", staleness=1, slots=64), steps=16, skipped=6)
        return {"s1_c64": run("late S=1 C=64", made).steps_per_bound}
    ours, theirs = over_seeds("late"), over_seeds("fifo")
    others()
    lags = fifo_lags(theirs[2, 64][0])
    at_work = ours[2, 64]
    return {
        "s1_c64": fmean(measured.steps_per_bound for measured in ours[1, 64]),
        "s2_c64": fmean(measured.steps_per_bound for measured in at_work),
        "s2_c256": fmean(measured.steps_per_bound for measured in ours[2, 256]),
        "lag_over_fifo": at_work[0].token_lag / lags,
        "length_ratio": fmean(measured.length_ratio for measured in at_work),
        "waste": max(measured.waste for found in ours.values() for measured in found),
        "lag_p99": fmean(measured.lag_p99 for measured in at_work),
    }


def over_seeds(rule: str) -> dict[tuple[int, int], Sequence[SimulationResult]]:
    """A rule at every column, several seeds each."""
    found: dict[tuple[int, int], list[SimulationResult]] = defaultdict(list)
    for staleness, slots in COLUMNS:
        for seed in range(SEEDS):
            made = scenario(rule, staleness=staleness, slots=slots, seed=seed, steps=LONG)
            found[staleness, slots].append(run(f"{rule} S={staleness} C={slots} seed {seed}", made))
        mean = fmean(measured.steps_per_bound for measured in found[staleness, slots])
        print(f"{rule} S={staleness} C={slots}: {mean:.3f}", flush=True)
    return dict(found)


def others() -> None:
    """The other rules, and the other tail; one seed each."""
    for rule, settings in RULES.items():
        if rule in ("late", "fifo"):
            columns = [(staleness, slots, "pareto") for staleness, slots in COLUMNS]
        elif settings.staleness is not None:
            columns = [(settings.staleness, slots, "lognormal") for slots in (64, 256)]
        else:
            columns = [(staleness, slots, "lognormal") for staleness, slots in COLUMNS]
        for staleness, slots, law in columns:
            made = scenario(rule, staleness=staleness, slots=slots, law=law)
            run(f"{rule} S={staleness} C={slots} {law}", made)


def fifo_lags(at_two: SimulationResult) -> float:
    """The token lag of `fifo` with 64 slots at its best staleness: the least at which it is as fast as it gets."""
    found = [at_two]
    for staleness in (3, 4):
        made = scenario("fifo", staleness=staleness, slots=64, steps=LONG)
        found.append(run(f"fifo S={staleness} C=64 seed 0", made))
    fastest = max(measured.steps_per_bound for measured in found)
    return next(measured.token_lag for measured in found if measured.steps_per_bound >= fastest - 0.02)
