"""`max_staleness = "auto"` in the production loop in virtual time: the bound that runs choose."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.core.records import PolicyVersion, Task
from agentrl.journal.memory import MemoryJournal
from agentrl.observe.metrics import STALENESS_BOUND, TIMED_STEP
from agentrl.observe.pace import choose_staleness
from agentrl.orchestrator.loop import Orchestrator
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_bottleneck import LimitedEngine
from tests.sim.test_schedules import Trio
from tests.simulation.pace import BOUNDS, WORKLOADS, seen, simulated

pytestmark = pytest.mark.sim


@pytest.mark.parametrize(
    "workload",
    [pytest.param(name, marks=() if "trainer" in name else pytest.mark.exhaustive) for name in WORKLOADS],
)
def test_a_run_keeps_the_bound_whose_steps_take_less_time(workload: str) -> None:
    seconds = {bound: seen(workload, bound) for bound in BOUNDS}
    controller = simulated(workload, "auto")[1]
    assert controller is not None
    assert controller.bound == choose_staleness(seconds), seconds
    assert seen(workload, "auto") <= 1.1 * min(seconds.values())


def test_lockstep_is_kept_unless_its_steps_take_a_tenth_longer() -> None:
    assert choose_staleness({0: 1.09, 1: 1.0}) == 0
    assert choose_staleness({0: 1.11, 1: 1.0}) == 1
    assert choose_staleness({1: 1.0}) == 1


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
        run = slow_run(MemoryJournal(), steps=12)

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.say, orchestrator.tell = said.append, warned.append

        run.during = listen
        await run.run()
        bounds = [metrics[STALENESS_BOUND] for _, _, metrics in run.seen.steps]
        assert bounds[0] == 0
        assert bounds[-1] > 0
        assert {f"{TIMED_STEP}{bound}" for bound in BOUNDS} <= run.seen.steps[-1][2].keys()
        assert "s a step in lockstep, its steps are being timed" in said[0]
        assert "s a step with staleness 1" in said[1]
        assert not warned, "nobody needs to do anything"
        recorded = [
            row[0]
            for row in run.journal.rows("SELECT value FROM metrics WHERE name = ? ORDER BY step", STALENESS_BOUND)
        ]
        assert recorded == bounds

        resumed = slow_run(run.journal.after_crash(), steps=13)
        resumed.resumed_at = {"guesser": PolicyVersion("guesser", 0, 12)}
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
        ({}, (0, 1)),
        ({"credit": {"group_size": 4, "release": "late"}}, (1,)),
        ({"step_size": 6}, (1,)),
        ({"step_size": 2}, (1,)),
    ],
    ids=["all", "late members need overlap", "groups do not fill a step", "groups are larger than a step"],
)
def test_auto_chooses_between_the_numbers_that_would_not_be_refused(
    changes: dict[str, Any], choices: tuple[int, ...], simulated_loop: SeededSimulation
) -> None:
    async def main() -> None:
        run = slow_run(MemoryJournal(), steps=3, **changes)
        await run.run()
        assert tuple(run.orchestrator.staleness["guesser"]._choices) == choices
        assert run.seen.steps[0][2][STALENESS_BOUND] in choices

    simulated_loop.run(main)


def test_a_run_with_phases_keeps_the_smallest_bound(simulated_loop: SeededSimulation) -> None:
    """Their pauses would count as slow steps."""

    async def main() -> None:
        policies = {name: {"step_size": 8, "max_staleness": "auto"} for name in "abc"}
        run = SmallRun(
            config=config_for(policies=policies, freeze=[("a", 2), ("b", 2), ("c", 2)], steps=4), environment=Trio
        )
        await run.run()
        assert {metrics[STALENESS_BOUND] for _, _, metrics in run.seen.steps} == {0.0}
        assert not [name for _, _, metrics in run.seen.steps for name in metrics if name.startswith(TIMED_STEP)]

    simulated_loop.run(main)


def test_steps_beside_an_evaluation_are_not_timed(simulated_loop: SeededSimulation) -> None:
    """Its episodes take places in the engine."""

    async def main() -> None:
        timed = []
        for every in (0, 3):
            tasks = [Task(id=f"held-out {number}", data={"digit": str(number % 10)}) for number in range(64)]
            changes = {"evaluation": {"tasks": 64 if every else 0, "every": every}}
            run = slow_run(MemoryJournal(), steps=24, **changes)
            run.held_out = tasks if every else []
            await run.run()
            timed.append(run.orchestrator.staleness["guesser"]._timed)
            assert bool(run.orchestrator.dispatcher.evaluated.number) == bool(every)
        without, beside = timed
        assert beside == pytest.approx(without, rel=0.3)

    simulated_loop.run(main)


def test_a_run_that_ended_before_it_chose_times_the_other_bounds(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = slow_run(MemoryJournal(), steps=5)
        await run.run()
        assert run.seen.steps[-1][2][STALENESS_BOUND] == 1
        resumed = slow_run(run.journal.after_crash(), steps=6)
        resumed.resumed_at = {"guesser": PolicyVersion("guesser", 0, 5)}
        await resumed.run()
        assert resumed.seen.steps[0][2][STALENESS_BOUND] == 1

    simulated_loop.run(main)
