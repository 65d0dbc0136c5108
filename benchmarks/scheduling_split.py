"""How to divide a cluster between trainer and engines, and how stale its samples are: our loop beside theory.

The cluster is the one of a published run of prime-rl (SemiAnalysis, 16 June 2026): 64 GPUs train up to 2.75 samples a
second, and 192 sample 1.95, so the trainer waits 29% of the time. Both rates grow with the number of GPUs. No schedule
trains more samples a second than the slower side does; the best division has both sides equally fast.

While engines are always full and the trainer is faster, the number of steps from the start of a sample to its training
follows from Little's law. Its mean is C/B · τ + ρ - n/2B: C samples at once, B per step in groups of n, τ the mean
longest duration in a group over the mean duration, ρ the share of time in which the trainer is busy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import NormalDist, fmean

from tests.simulation.plan import QuantileDistribution, SimulationPlan
from tests.simulation.run import Scenario, simulate_run

GPUS, TRAINERS = 256, 64
"""Of the published run: all, and those that train."""
TRAINED_PER_S, SAMPLED_PER_S = 2.75 / TRAINERS, 1.95 / (GPUS - TRAINERS)
"""Samples per second of a GPU."""
CONVERSATIONS = 2
"""At once on a sampling GPU."""
STEP, GROUP = 256, 8
TRIED = (40, 44, 46, 48, 49, 50, 52, 56, 64)
"""Numbers of GPUs that train."""
TOKENS = QuantileDistribution(p50=32, p90=96, cap=640)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A division of the GPUs, and the bound on staleness."""

    trainers: int
    max_staleness: int
    likeness: float = 0.5
    """Correlation of the lengths in a group."""

    @property
    def conversations(self) -> int:
        return CONVERSATIONS * (GPUS - self.trainers)

    @property
    def sampled_per_s(self) -> float:
        return SAMPLED_PER_S * (GPUS - self.trainers)

    @property
    def trained_per_s(self) -> float:
        return TRAINED_PER_S * self.trainers

    def plan(self) -> SimulationPlan:
        """The same as a simulation; every conversation has a slot."""
        return SimulationPlan.model_validate(
            {
                "max_in_flight": self.conversations,
                "environments": {"Solve": {"seats": {"solver": {"tokens": TOKENS}}, "likeness": self.likeness}},
                "policies": {"solver": {"step_size": STEP, "max_staleness": self.max_staleness}},
                "credit": {"group_size": GROUP, "release": "group"},
                "engine": {
                    "slots": self.conversations + GROUP,
                    "rates": {1: TOKENS.mean * self.sampled_per_s / self.conversations},
                },
                "trainer": {"step_seconds": STEP / self.trained_per_s},
            }
        )


def samples_per_s(cluster: Cluster, steps: int) -> float:
    """Simulate; print the samples per second and the trainer's waiting."""
    found = simulate_run(Scenario(plan=cluster.plan(), steps=8 + steps, skipped=8))
    seconds = found.steps_per_hour["solver"] * STEP / 3600
    print(
        f"  {cluster.trainers} GPUs train, {GPUS - cluster.trainers} sample: {seconds:.3f} samples/s of at most "
        f"{min(cluster.trained_per_s, cluster.sampled_per_s):.3f}, trainer waits {1 - found.trainer_busy:.2f}, mean "
        f"staleness {found.unit_lag:.2f}",
        flush=True,
    )
    return seconds


def staleness_error(conversations: int, steps: int) -> float:
    """Simulate full engines and a faster trainer; return how far the mean staleness is from the closed form."""
    cluster = Cluster(trainers=GPUS - conversations // CONVERSATIONS, max_staleness=64, likeness=0.0)
    found = simulate_run(Scenario(plan=cluster.plan(), steps=12 + steps, skipped=12))
    expected = conversations / STEP * tailness() + found.trainer_busy - GROUP / (2 * STEP)
    print(f"  {conversations} at once: mean staleness {found.unit_lag:.3f}, closed form {expected:.3f}", flush=True)
    return abs(found.unit_lag / expected - 1)


def tailness(draws: int = 20_000) -> float:
    """The mean longest of a group of independent durations, over the mean."""
    normal, draw = NormalDist(), random.Random(0)

    def group() -> list[float]:
        return [TOKENS.value(normal.inv_cdf(draw.random())) for _ in range(GROUP)]

    groups = [group() for _ in range(draws)]
    return fmean(map(max, groups)) / fmean(map(fmean, groups))


def figures(quick: bool) -> dict[str, float | None]:
    """The best division, and the largest error of the closed form."""
    steps = 8 if quick else 60
    published, *tried = (
        (count, samples_per_s(Cluster(trainers=count, max_staleness=8), steps))
        for count in ((TRAINERS, 49) if quick else (TRAINERS, *TRIED))
    )
    best, fastest = max(tried, key=lambda each: each[1])
    return {
        "split_trainers": float(best),
        "split_gain": fastest / published[1],
        "split_trainer_waits": 1 - published[1] / (TRAINED_PER_S * TRAINERS),
        "staleness_error": max(staleness_error(count, steps) for count in ((256,) if quick else (128, 256, 384))),
    }
