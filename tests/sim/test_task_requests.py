"""The task of a root group is drawn once, when the rules let the group start."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from agentrl.core.records import Task
from agentrl.orchestrator.loop import Orchestrator
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, SmallRun, config_for
from tests.sim.test_selection import tasks_of
from tests.support.dispatched import dispatched

pytestmark = pytest.mark.sim


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
        config = config_for(max_staleness=0 if deterministic else 1, deterministic=deterministic, steps=6)
        run = SmallRun(config=config, tasks=source)
        run.during = lambda orchestrator: setattr(source, "orchestrator", orchestrator)
        await run.run()
        groups = len({spec.group_id for spec, _ in dispatched(run.journal)})
        assert source.drawn[:groups] == list(range(groups))
        assert len(source.drawn) <= groups + 1, "a request that was not admitted"
        assert {int(episode[1:]): task for episode, task in tasks_of(run.journal).items()} == {
            number: TASKS[number // 4 // 2 % len(TASKS)].id for number in range(4 * groups)
        }

    simulated_loop.run(main)
