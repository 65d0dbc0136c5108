"""The survey's case: 512 rollouts of up to 32K tokens a step, on a 32B model; a barrier, and ours, on the same GPUs.

Four engines of two H100 each sample, four H100 train: by the roofline of `tests/simulation/plan.py`, which makes
sampling the bottleneck.
"""

from __future__ import annotations

from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, SimulationResult, simulate_run

RULES = {"barrier": (0, "group"), "agentrl": (2, "late")}
"""Staleness and release."""


def plan(rule: str) -> SimulationPlan:
    """The GPUs and the rollouts."""
    staleness, release = RULES[rule]
    return SimulationPlan.model_validate(
        {
            "max_in_flight": 4096,
            "environments": {
                "Reason": {
                    "seats": {"solver": {"tokens": {"p50": 3200, "p90": 16_000, "cap": 32_000}}},
                    "prompt": 500,
                }
            },
            "policies": {"solver": {"step_size": 512, "max_staleness": staleness}},
            "credit": {"group_size": 8, "release": release},
            "engine": {"model": "32B", "gpu": "H100", "gpus": 2, "replicas": 4, "slots": 32},
            "trainer": {"gpus": 4},
        }
    )


def measured(rule: str, *, steps: int = 12) -> SimulationResult:
    """After the first six steps."""
    return simulate_run(Scenario(plan=plan(rule), steps=6 + steps, skipped=6))


def figures(quick: bool) -> dict[str, float | None]:
    """The share of the time in which ours has its bottleneck busy."""
    if quick:
        return {}
    found = {rule: measured(rule) for rule in RULES}
    for rule, line in found.items():
        print(
            f"  {rule}: engines busy {line.engine_busy:.3f}, trainer {line.trainer_busy:.3f}, "
            f"{line.steps_per_hour['solver']:.2f} steps an hour, token lag {line.token_lag:.2f}, "
            f"{line.preemptions} calls pushed out, {line.cpu_seconds:.0f} s CPU",
            flush=True,
        )
    return {"survey_bottleneck_busy": max(found["agentrl"].engine_busy, found["agentrl"].trainer_busy)}
