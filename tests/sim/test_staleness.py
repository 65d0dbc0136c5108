"""`max_staleness = "auto"`: predictions against the production loop in virtual time, and the bound that runs choose."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from agentrl.core.records import PolicyVersion
from agentrl.journal.memory import MemoryJournal
from agentrl.observe.metrics import PREDICTED_STEP, STALENESS_BOUND
from agentrl.observe.pace import LoopTimings, choose_staleness, fit_together, predict_step_seconds
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.staleness import StalenessController, StalenessRules
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_bottleneck import LimitedEngine
from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, simulate_run

pytestmark = pytest.mark.sim

BOUNDS = (0, 1, 2, 4)
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
            "policies": {"policy": {"step_size": 16, "max_staleness": max_staleness, "max_lag": max_lag}},
            "credit": {"group_size": 4},
            "engine": {"slots": slots, "rates": {1: 100.0, 32: 30.0}},
            "trainer": {"step_seconds": step_s},
        }
    )


@cache
def seen(workload: str, max_staleness: Any, steps: int = 36) -> tuple[float, StalenessController | None]:
    """Seconds per step of a run, and its controller at the end."""
    loops: list[Orchestrator] = []

    def watch(orchestrator: Orchestrator) -> None:
        loops.append(orchestrator)
        for controller in orchestrator.staleness.values():  # in virtual time, nothing shares cores
            controller._together = 1.0

    plan = plan_of(max_staleness, **WORKLOADS[workload])
    result = simulate_run(Scenario(plan=plan, steps=steps, skipped=20, alter=watch))
    return 3600 / result.steps_per_hour["policy"], loops[0].staleness.get("policy")


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
    timings = loops[0]._alone
    assert timings is not None
    return timings


def exchanged(timings: LoopTimings) -> LoopTimings:
    """The same run with engine and trainer exchanged: a fast trainer waits for a slow engine, or the reverse."""
    passes = sum(pace.work for group in timings.groups for pace in group) / sum(map(len, timings.groups))
    engine_s = passes * timings.episodes_per_step * timings.row_s + passes * timings.pass_s
    factor = timings.step_s / engine_s
    return replace(timings, step_s=engine_s, pass_s=timings.pass_s * factor, row_s=timings.row_s * factor)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_predicted_time_per_step_is_the_time_of_the_loop(workload: str) -> None:
    timings = timings_of(workload)
    for bound in BOUNDS:
        assert predict_step_seconds(timings, bound) == pytest.approx(seen(workload, bound)[0], rel=0.15), bound


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_run_chooses_the_smallest_bound_that_is_about_as_fast_as_the_best(workload: str) -> None:
    fastest = min(seen(workload, bound)[0] for bound in BOUNDS)
    seconds, controller = seen(workload, "auto")
    assert controller is not None
    chosen = seen(workload, controller.bound)[0]
    assert seconds == pytest.approx(chosen, rel=0.1)
    if controller.bound:
        assert chosen < 1.2 * fastest
        assert chosen < 0.85 * seen(workload, 0)[0]
    else:
        assert fastest > 0.7 * chosen


def test_with_engine_and_trainer_exchanged_the_prediction_is_wrong() -> None:
    timings = exchanged(timings_of("trainer"))
    predicted, right = (
        {bound: predict_step_seconds(each, bound) for bound in BOUNDS} for each in (timings, timings_of("trainer"))
    )
    assert choose_staleness(predicted) != choose_staleness(right)
    assert max(abs(predicted[bound] / seen("trainer", bound)[0] - 1) for bound in BOUNDS) > 0.15


def test_what_engine_and_trainer_share_is_found_from_the_time_of_a_step() -> None:
    timings = timings_of("engine and trainer")
    slow = predict_step_seconds(replace(timings, together=0.5), 2)
    assert fit_together(timings, 2, slow) == pytest.approx(0.5, abs=0.03)
    predicted = {bound: predict_step_seconds(replace(timings, together=0.5), bound) for bound in BOUNDS}
    assert predicted[0] == pytest.approx(predict_step_seconds(timings, 0), rel=0.01)


def slow_run(journal: MemoryJournal, **changes: Any) -> SmallRun:
    """A run whose episodes mostly think, so that asynchrony saves most of the time."""
    return SmallRun(
        config=config_for(max_staleness="auto", **changes),
        engine_class=LimitedEngine,
        engine_options={"places": 16, "seconds_per_call": 0.01},
        trainer_options={"step_seconds": 0.1, "publish_seconds": 0.0},
        journal=journal,
    )


def test_every_bound_is_in_the_journal_and_a_resumed_run_continues_with_it(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        told: list[str] = []
        run = slow_run(MemoryJournal(), steps=8)
        run.during = lambda orchestrator: setattr(orchestrator, "tell", told.append)
        await run.run()
        bounds = [metrics[STALENESS_BOUND] for _, _, metrics in run.seen.steps]
        assert bounds[0] == 0
        assert bounds[-1] > 0
        assert {f"{PREDICTED_STEP}{bound}" for bound in BOUNDS} <= run.seen.steps[-1][2].keys()
        assert f"staleness {bounds[-1]:.0f}: a step takes" in told[0]
        recorded = [
            row[0]
            for row in run.journal.rows("SELECT value FROM metrics WHERE name = ? ORDER BY step", STALENESS_BOUND)
        ]
        assert recorded == bounds

        resumed = slow_run(run.journal.after_crash(), steps=9)
        resumed.resumed_at = {"guesser": PolicyVersion("guesser", 0, 8)}
        await resumed.run()
        assert resumed.orchestrator.scheduler.max_staleness("guesser") == bounds[-1]
        assert resumed.seen.steps[0][2][STALENESS_BOUND] == bounds[-1]

        rolled_back = slow_run(run.journal.after_crash(), steps=2)
        rolled_back.resumed_at = {"guesser": PolicyVersion("guesser", 0, 1)}
        await rolled_back.run()
        assert rolled_back.seen.steps[0][2][STALENESS_BOUND] == bounds[0]

    simulated_loop.run(main)


def test_admission_follows_the_bound(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = slow_run(MemoryJournal(), steps=12)
        await run.run()
        for (_, _, before), (_, _, metrics) in zip(run.seen.steps, run.seen.steps[1:], strict=False):
            if not before[STALENESS_BOUND]:
                assert metrics["staleness/max"] == 0
        assert 0 < run.mean_lag("guesser") <= 4

    simulated_loop.run(main)


@pytest.mark.parametrize(
    ("changes", "choices"),
    [
        ({}, (0, 1, 2, 4)),
        ({"credit": {"group_size": 4, "release": "late"}}, (1, 2, 4)),
        ({"step_size": 6}, (1, 2, 4)),
        ({"step_size": 2}, (1, 2, 4)),
    ],
    ids=["all", "late members need overlap", "groups do not fill a step", "groups are larger than a step"],
)
def test_auto_chooses_between_the_numbers_that_would_not_be_refused(
    changes: dict[str, Any], choices: tuple[int, ...], simulated_loop: SeededSimulation
) -> None:
    async def main() -> None:
        run = slow_run(MemoryJournal(), steps=3, **changes)
        await run.run()
        assert tuple(run.orchestrator.staleness["guesser"]._rules.choices) == choices
        assert run.seen.steps[0][2][STALENESS_BOUND] in choices

    simulated_loop.run(main)


def test_the_bound_stays_while_predictions_are_close_to_each_other() -> None:
    assert choose_staleness({0: 1.0, 1: 0.79, 2: 0.79}) == 1
    assert choose_staleness({0: 1.0, 1: 0.79, 2: 0.79}, current=0) == 0
    assert choose_staleness({0: 1.0, 1: 0.87, 2: 0.87}, current=1) == 0
    assert choose_staleness({0: 1.0, 1: 0.5, 2: 0.46}, current=2) == 2
    assert choose_staleness({0: 1.0, 1: 0.5, 2: 0.44}, current=1) == 1
