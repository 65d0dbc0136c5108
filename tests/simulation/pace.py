"""Workloads for `max_staleness = "auto"` in virtual time: what a run measures of itself, and how fast it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from agentrl.observe.pace import LoopTimings, predict_step_seconds
from agentrl.orchestrator.last_steps import LastSteps, expected_wait_s
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.staleness import StalenessController, StalenessRules
from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, SimulationResult, simulate_run

BOUNDS = (0, 1, 2, 4)
STEP_SIZE = 16
SLOW_TOOLS = {"p50": 0.5, "p90": 1.5, "cap": 6}
WORKLOADS: dict[str, dict[str, Any]] = {
    "slow tools": {"tool_seconds": SLOW_TOOLS},
    "engine and trainer": {},
    "trainer": {"step_s": 1.0},
    "few places": {"slots": 8},
    "bounded lag": {"tool_seconds": SLOW_TOOLS, "max_lag": 4},
}


def plan_of(
    max_staleness: Any,
    *,
    tool_seconds: dict[str, float] | None = None,
    step_s: float = 0.2,
    slots: int = 64,
    max_lag: int | None = None,
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
            "policies": {"policy": {"step_size": STEP_SIZE, "max_staleness": max_staleness, "max_lag": max_lag}},
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

    def watch(orchestrator: Orchestrator) -> None:
        loops.append(orchestrator)
        for controller in orchestrator.staleness.values():  # in virtual time, nothing shares cores
            controller._together = 1.0

    plan = plan_of(max_staleness, **WORKLOADS[workload])
    result = simulate_run(Scenario(plan=plan, steps=steps, skipped=20, alter=watch))
    return result, loops[0].staleness.get("policy")


def seen(workload: str, max_staleness: Any) -> float:
    """Seconds per step of a run, once its pipeline is full."""
    return 3600 / simulated(workload, max_staleness)[0].steps_per_hour["policy"]


def predicted(timings: LoopTimings) -> Mapping[int, float]:
    """Predicted seconds per step by bound."""
    return {bound: predict_step_seconds(timings, bound) for bound in BOUNDS}


def predict_error(workload: str, timings: LoopTimings) -> float:
    """Largest relative error of the predictions of a workload."""
    return max(abs(seconds / seen(workload, bound) - 1) for bound, seconds in predicted(timings).items())


@cache
def timings_of(workload: str) -> LoopTimings:
    """What a run in lockstep measures of itself."""
    loops: list[StalenessController] = []

    def never_change(orchestrator: Orchestrator) -> None:
        rules = StalenessRules(choices=(0,), max_lag=WORKLOADS[workload].get("max_lag"))
        controller = orchestrator.staleness["policy"]
        controller._rules = rules
        loops.append(controller)

    simulate_run(Scenario(plan=plan_of("auto", **WORKLOADS[workload]), steps=36, skipped=12, alter=never_change))
    alone = loops[0]._alone
    assert alone is not None
    return alone[0]


class End(NamedTuple):
    """The end of a short run."""

    seconds: float
    """Seconds of the whole run."""
    dropped: int
    """Number of episodes in flight at the end."""
    wait_s: float
    """Seconds from the time at which the last steps had all their episodes."""
    expected_wait_s: float


def end_of_run(seed: int, *, sample_until_end: bool, steps: int = 27) -> End:
    """Play a run with slow tools at staleness 4."""

    class TimedLastSteps(LastSteps):
        began_s = expected_s = 0.0

        def may_start_more(self, left: Mapping[str, int], taken: Mapping[str, int], in_flight: int) -> bool:
            if not self.began_s:
                self.began_s = asyncio.get_running_loop().time()
                self.expected_s = expected_wait_s(self._durations, in_flight)
            return sample_until_end

    last_steps, loops = TimedLastSteps(sample_until_end), list[Orchestrator]()

    def alter(orchestrator: Orchestrator) -> None:
        orchestrator.scheduler._last_steps = last_steps
        loops.append(orchestrator)

    plan = plan_of(4, **WORKLOADS["slow tools"]).model_copy(update={"seed": seed})
    result = simulate_run(Scenario(plan=plan, steps=steps, skipped=2, is_closed=True, alter=alter))
    seconds = result.step_times[-1]
    dropped = loops[0].buffer.ledger.dropped["run_ended"]
    return End(seconds, dropped, seconds - last_steps.began_s, last_steps.expected_s)


def exchanged(timings: LoopTimings) -> LoopTimings:
    """The same run with engine and trainer exchanged: a fast trainer waits for a slow engine, or the reverse."""
    passes = sum(pace.work for group in timings.groups for pace in group) / sum(map(len, timings.groups))
    engine_s = passes * timings.episodes_per_step * timings.row_s + passes * timings.pass_s
    factor = timings.step_s / engine_s
    return replace(timings, step_s=engine_s, pass_s=timings.pass_s * factor, row_s=timings.row_s * factor)
