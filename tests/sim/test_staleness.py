"""`max_staleness = "auto"`: predictions against the production loop in virtual time, and the bound that runs choose."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from agentrl.core.records import PolicyVersion, Task
from agentrl.journal.memory import MemoryJournal
from agentrl.observe.bottleneck import PASSES
from agentrl.observe.metrics import PREDICTED_STEP, STALENESS_BOUND
from agentrl.observe.pace import NO_LIMIT, choose_staleness, fit_together, predict_step_seconds
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.staleness import StalenessController, StalenessRules
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_bottleneck import LimitedEngine
from tests.sim.test_schedules import Trio
from tests.simulation.pace import (
    BOUNDS,
    WORKLOADS,
    exchanged,
    predict_error,
    predicted,
    seen,
    simulated,
    timings_of,
)

if TYPE_CHECKING:
    from agentrl.core.records import EpisodeHeader

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_predicted_time_per_step_is_the_time_of_the_loop(workload: str) -> None:
    for bound, seconds in predicted(timings_of(workload)).items():
        assert seconds == pytest.approx(seen(workload, bound), rel=0.15), bound


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_run_chooses_the_smallest_bound_that_is_about_as_fast_as_the_best(workload: str) -> None:
    fastest = min(seen(workload, bound) for bound in BOUNDS)
    controller = simulated(workload, "auto")[1]
    assert controller is not None
    chosen = seen(workload, controller.bound)
    assert seen(workload, "auto") == pytest.approx(chosen, rel=0.1)
    if controller.bound:
        assert chosen < 1.2 * fastest
        assert chosen < 0.85 * seen(workload, 0)
    else:
        assert fastest > 0.7 * chosen


def test_with_engine_and_trainer_exchanged_the_choice_is_wrong() -> None:
    timings = timings_of("trainer")
    assert choose_staleness(predicted(exchanged(timings))) != choose_staleness(predicted(timings))
    assert predict_error("trainer", exchanged(timings)) > 0.15 > predict_error("trainer", timings)


def test_what_engine_and_trainer_share_is_found_from_the_time_of_a_step() -> None:
    timings = timings_of("engine and trainer")
    slow = predict_step_seconds(replace(timings, together=0.5), 2)
    lockstep = predict_step_seconds(replace(timings, together=0.5), 0)
    assert fit_together(timings, 2, slow / lockstep) == pytest.approx(0.5, abs=0.03)
    assert lockstep == pytest.approx(predict_step_seconds(timings, 0), rel=0.01)


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
        said, warned = list[str](), list[str]()
        run = slow_run(MemoryJournal(), steps=8)

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.say, orchestrator.tell = said.append, warned.append

        run.during = listen
        await run.run()
        bounds = [metrics[STALENESS_BOUND] for _, _, metrics in run.seen.steps]
        assert bounds[0] == 0
        assert bounds[-1] > 0
        assert {f"{PREDICTED_STEP}{bound}" for bound in BOUNDS} <= run.seen.steps[-1][2].keys()
        assert f"staleness {bounds[-1]:.0f}: a step takes" in said[0]
        assert not warned, "nobody needs to do anything"
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


def controller_after(
    num_steps: int,
    *,
    sharing: float = 1.0,
    engine_sharing: float | None = None,
    together: float = 1.0,
    groups: int = 8,
    unknown: float = 1.0,
) -> Any:
    """A controller that was given steps of 8 episodes per group: 10 s of engine and 10 s of trainer, no waits, which
    slow each other down to `sharing`, the engine to `engine_sharing`, while both compute. Steps take `unknown` times as
    long as that."""
    controller = StalenessController(StalenessRules(choices=(0, 1, 2, 4), together=together))
    now, totals = 0.0, dict.fromkeys((*PASSES, "engine", "engine/any"), 0.0)
    header = SimpleNamespace(turns=1, tokens=9, seconds=10.0)
    for _ in range(num_steps):
        overlaps = bool(controller.bound)
        step_s = 10.0 / sharing if overlaps else 20.0
        now += step_s * unknown
        trainer_s = 10.0 / (sharing if overlaps else 1.0)
        turn_s = 10.0 / (engine_sharing or sharing) if overlaps else 10.0
        for _ in range(8 * groups):
            passes = 10.0
            rows = 8.0 * groups
            for key, value in zip(PASSES, (passes**2, passes**2 * rows, (passes * rows) ** 2, 0.0, 0.0), strict=True):
                totals[key] += value
            totals["passes/1s"] += passes * turn_s
            totals["passes/2s"] += passes * rows * turn_s
        totals["engine"] += 8 * groups * turn_s
        totals["engine/any"] += turn_s
        for _ in range(groups):
            controller.record_group([cast("EpisodeHeader", header)] * 8)
        controller.step_ended(now, dict(totals), trainer_s, places=0, max_in_flight=NO_LIMIT)
    return controller


@pytest.mark.parametrize("groups", [8, 16, 32])
def test_a_prediction_counts_all_episodes_of_its_window_also_where_it_draws_from_fewer(groups: int) -> None:
    """Of 64 groups and windows of up to eight steps, those of some episodes are not kept."""
    controller = controller_after(40, groups=groups)
    assert controller.bound == 1
    assert controller.predicted[0] == pytest.approx(20.0, rel=0.1)
    assert controller.predicted[1] == pytest.approx(10.0, rel=0.15)


@pytest.mark.parametrize("num_steps", [2, 40])
def test_what_no_timing_knows_makes_each_bound_slower(num_steps: int) -> None:
    """The loop's own work, and waits that are left out."""
    controller = controller_after(num_steps, unknown=1.5)
    assert controller.predicted[0] == pytest.approx(30.0, rel=0.1)
    assert controller.predicted[1] == pytest.approx(15.0, rel=0.15)


def test_lockstep_takes_what_it_took_where_only_the_trainer_is_slowed_down() -> None:
    controller = controller_after(40, sharing=0.7, engine_sharing=1.0)
    assert controller.bound == 1
    assert controller.predicted[0] == pytest.approx(20.0, rel=0.03)
    assert controller.predicted[1] == pytest.approx(10.0 / 0.7, rel=0.03)


def test_asynchrony_that_does_not_pay_ends_and_is_tried_again() -> None:
    bounds = [controller_after(steps, sharing=0.5).bound for steps in range(2, 120, 3)]
    first = bounds.index(1)
    assert 0 in bounds[first:], "engine and trainer share the cores"
    assert 1 in bounds[first + bounds[first:].index(0) :], "another load may have ended"


def test_a_run_with_phases_keeps_the_smallest_bound(simulated_loop: SeededSimulation) -> None:
    """Their pauses would count as slow steps."""

    async def main() -> None:
        policies = {name: {"step_size": 8, "max_staleness": "auto"} for name in "abc"}
        run = SmallRun(
            config=config_for(policies=policies, freeze=[("a", 2), ("b", 2), ("c", 2)], steps=4), environment=Trio
        )
        await run.run()
        assert {metrics[STALENESS_BOUND] for _, _, metrics in run.seen.steps} == {0.0}
        assert not [name for _, _, metrics in run.seen.steps for name in metrics if name.startswith(PREDICTED_STEP)]

    simulated_loop.run(main)


def test_an_evaluation_beside_training_changes_no_prediction(simulated_loop: SeededSimulation) -> None:
    """Its episodes are in the engine's totals, and in no group."""

    async def main() -> None:
        predictions = []
        for every in (0, 3):
            tasks = [Task(id=f"held-out {number}", data={"digit": str(number % 10)}) for number in range(64)]
            changes = {"evaluation": {"tasks": 64 if every else 0, "every": every}}
            run = slow_run(MemoryJournal(), steps=16, **changes)
            run.held_out = tasks if every else []
            await run.run()
            predictions.append(run.orchestrator.staleness["guesser"].predicted)
            assert bool(run.orchestrator.dispatcher.evaluated.number) == bool(every)
        without, beside = predictions
        assert beside == pytest.approx(without, rel=0.3)

    simulated_loop.run(main)
