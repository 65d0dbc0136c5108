"""The task of a root group is drawn once, before its admission is decided, and rules may look at it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentrl.app.plan import resolve
from agentrl.core.errors import ConfigError
from agentrl.core.records import EpisodeSpec, Task
from agentrl.journal.port import StepRow
from agentrl.orchestrator.loop import Orchestrator
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import TASKS, Guess, SmallRun, config_for
from tests.sim.test_deterministic import guess, trained_by
from tests.sim.test_live_changes import ChangedRun
from tests.sim.test_selection import tasks_of

pytestmark = pytest.mark.sim
CAP = "max_in_flight_per_task"


def watch_tasks(run: SmallRun) -> Counter[str]:
    """Largest number of episodes in flight of each task, filled while the run runs."""
    most: Counter[str] = Counter()

    def during(orchestrator: Orchestrator) -> None:
        in_flight = orchestrator.dispatcher.in_flight
        add = in_flight.add

        def added(spec: EpisodeSpec) -> None:
            add(spec)
            specs = (in_flight.get(episode_id) for episode_id in in_flight)
            for task, count in Counter(spec.task.id for spec in specs if spec is not None).items():
                most[task] = max(most[task], count)

        in_flight.add = added  # type: ignore[method-assign]

    run.during = during
    return most


def rules(run: SmallRun) -> list[set[str]]:
    """The rules that each root episode waited for, as `episode why` shows them."""
    return [{wait.hold.kind for wait in spec.waited} for spec, _ in run.journal.dispatched() if spec.waited]


def test_a_cap_per_task_bounds_its_episodes_and_is_booked_under_its_name(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        most, seconds = {}, {}
        for cap in (0, 4):
            config = config_for(max_in_flight_per_task=cap, max_staleness=3)
            run = SmallRun(config=config, tasks=TASKS[:1])
            most[cap] = watch_tasks(run)
            await run.run()
            assert len(run.trainer.batches) == 4
            seconds[cap] = run.orchestrator.activity_totals().get(CAP, 0.0)
            assert any(CAP in kinds for kinds in rules(run)) == bool(cap)
        assert most[4] == {"digit-0": 4}
        assert most[0]["digit-0"] > 4
        assert seconds[4] > 10 * seconds[0] == 0.0

    simulated_loop.run(main)


def test_other_tasks_are_not_held(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(max_in_flight_per_task=4, max_staleness=3))
        most = watch_tasks(run)
        await run.run()
        assert max(most.values()) == 4
        assert run.orchestrator.dispatcher.in_flight.activity.totals()["episodes/most"] > 4

    simulated_loop.run(main)


class Hardest(list[Task]):
    """A source of a user's own: the same task twice in a row, and what the run was doing when it was drawn."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        super().__init__(tasks)
        self.drawn: list[int] = []
        self.orchestrator: Orchestrator | None = None

    def select(self, group: int, rng: random.Random) -> Task:
        assert self.orchestrator is not None
        assert self.orchestrator.scheduler.why_not() is None, "drawn before the other rules let a group start"
        self.drawn.append(group)
        return self[group // 2 % len(self)]

    def record_result(self, task: Task, rewards: Sequence[float]) -> None:
        pass


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_task_is_drawn_once_and_late_and_is_the_next_to_start(
    simulated_loop: SeededSimulation, *, deterministic: bool
) -> None:
    async def main() -> None:
        source = Hardest(TASKS)
        config = config_for(
            max_in_flight_per_task=4, max_staleness=0 if deterministic else 1, deterministic=deterministic, steps=6
        )
        run = SmallRun(config=config, tasks=source)
        run.during = lambda orchestrator: setattr(source, "orchestrator", orchestrator)
        await run.run()
        groups = len({spec.group_id for spec, _ in run.journal.dispatched()})
        assert source.drawn[:groups] == list(range(groups))
        assert len(source.drawn) <= groups + 1, "a request that was not admitted"
        assert {int(episode[1:]): task for episode, task in tasks_of(run.journal).items()} == {
            number: TASKS[number // 4 // 2 % len(TASKS)].id for number in range(4 * groups)
        }
        assert run.orchestrator.activity_totals()[CAP] > 0

    simulated_loop.run(main)


def test_a_wait_for_two_rules_is_booked_under_both(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(max_in_flight_per_task=4, max_staleness=0, steps=6)
        run = SmallRun(config=config, tasks=TASKS[:1], trainer_options={"step_seconds": 20.0})
        await run.run()
        totals = run.orchestrator.activity_totals()
        assert totals["max_staleness"] > 5 * 20.0
        assert 0.0 < totals[CAP] < totals["max_staleness"]
        # the second group of each step waits for the first alone
        assert all(len(kinds) == 1 for kinds in rules(run))

    simulated_loop.run(main)


@pytest.mark.parametrize("kill_again", [1, 3])
def test_a_killed_run_draws_the_held_task_again(simulated_loop: SeededSimulation, kill_again: int) -> None:
    def config() -> Any:
        return config_for(
            steps=6,
            deterministic=True,
            max_in_flight_per_task=4,
            policies={"guesser": {"step_size": 8, "max_staleness": 1, "lora": {"rank": 2}}},
            environment={"id": "unused", "selection": {"low": 0.1, "high": 0.6, "replay": 0.5, "retire_after": 1}},
        )

    async def undisturbed() -> tuple[Any, dict[str, str]]:
        run = SmallRun(config=config(), script=guess, tasks=TASKS[:2])
        await run.run()
        assert run.orchestrator.activity_totals()[CAP] > 0
        return trained_by(run), tasks_of(run.journal)

    expected, tasks = simulate(undisturbed, seed=0)
    moments = itertools.count(1.3, 0.61)
    held = Counter[bool]()

    async def killed() -> None:
        run = SmallRun(config=config(), script=guess, tasks=TASKS[:2])
        seen: Any = {}
        lives, moment = 0, next(moments)
        while True:
            lives += 1
            await run.stop_after(moment if lives <= kill_again else 1e6)
            seen.update(trained_by(run))
            if not run.orchestrator.outcome.interrupted:
                break
            held[run.orchestrator.next_start is not None] += 1
            journal = run.journal.after_crash()
            board = run.orchestrator.board
            on_disk = [row.version for row in journal.on_disk() if isinstance(row, StepRow)]
            newest = max((version.step for version in on_disk if board.survives(version)), default=0)
            at = {"guesser": board.at("guesser", newest)}
            run = SmallRun(
                config=run.config,
                script=guess,
                tasks=TASKS[:2],
                journal=journal,
                resumed_at=at,
                lineage=board.current("guesser").lineage + 1,
            )
        assert seen == expected
        assert tasks_of(run.journal) == tasks

    for seed in simulated_loop.seeds():
        simulate(killed, seed=seed)
    assert held[True], "no run was killed while a task was held"


def test_a_cap_below_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=CAP):
        resolve(config_for(max_in_flight_per_task=3), Guess)


def test_the_cap_changes_while_the_run_runs(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        changes: Mapping[tuple[str, int], Mapping[str, Any]] = {("guesser", 2): {CAP: 8}}
        run = ChangedRun(config=config_for(max_in_flight_per_task=4, max_staleness=3), tasks=TASKS[:1], changes=changes)
        most = watch_tasks(run)
        async with asyncio.timeout(10_000):
            await run.run()
        assert most == {"digit-0": 8}

    simulated_loop.run(main)
