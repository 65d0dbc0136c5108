"""Workloads for `max_staleness = "auto"` in virtual time, and how fast a run is."""

from __future__ import annotations

from functools import cache
from typing import Any

from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.staleness import StalenessController
from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, SimulationResult, simulate_run

BOUNDS = (0, 1)
STEP_SIZE = 16
SLOW_TOOLS = {"p50": 0.5, "p90": 1.5, "cap": 6}
WORKLOADS: dict[str, dict[str, Any]] = {
    "slow tools": {"tool_seconds": SLOW_TOOLS},
    "engine and trainer": {},
    "trainer": {"step_s": 1.0},
    "few places": {"slots": 8},
}


def plan_of(
    max_staleness: Any,
    *,
    tool_seconds: dict[str, float] | None = None,
    step_s: float = 0.2,
    slots: int = 64,
) -> SimulationPlan:
    """A small run with short turns, whose engine takes 10 ms a token alone and 33 ms with 32 turns."""
    environment: dict[str, Any] = {
        "seats": {"solver": {"tokens": {"p50": 21, "p90": 30, "cap": 60}, "turns": {"p50": 3, "p90": 4, "cap": 6}}},
        "prompt": 60,
    }
    if tool_seconds is not None:
        environment["tool_seconds"] = tool_seconds
    return SimulationPlan.model_validate(
        {
            "max_in_flight": 96,
            "environments": {"Solve": environment},
            "policies": {"policy": {"step_size": STEP_SIZE, "max_staleness": max_staleness}},
            "credit": {"group_size": 4},
            "engine": {"slots": slots, "rates": {1: 100.0, 32: 30.0}},
            "trainer": {"step_seconds": step_s},
        }
    )


@cache
def simulated(
    workload: str, max_staleness: Any, steps: int = 36
) -> tuple[SimulationResult, StalenessController | None]:
    """Simulate a run; returns its controller too, as it was at the end."""
    loops: list[Orchestrator] = []
    plan = plan_of(max_staleness, **WORKLOADS[workload])
    result = simulate_run(Scenario(plan=plan, steps=steps, skipped=20, alter=loops.append))
    return result, loops[0].staleness.get("policy")


def seen(workload: str, max_staleness: Any) -> float:
    """Seconds per step of a run, once its pipeline is full."""
    return 3600 / simulated(workload, max_staleness)[0].steps_per_hour["policy"]
