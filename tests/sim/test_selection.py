"""Selection: groups without a signal are replaced, tasks follow the results, and kills change neither."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import CheckFailedError, ConfigError, InputError
from agentrl.core.records import Task
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import StepRow
from agentrl.orchestrator import scheduler
from agentrl.orchestrator.tasks import Curriculum, GroupResult
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import TASKS, Guess, SmallRun, config_for
from tests.sim.test_deterministic import guess, trained_by
from tests.support.dispatched import dispatched, members

pytestmark = pytest.mark.sim
SELECTION = {"low": 0.1, "high": 0.6, "replay": 0.5, "retire_after": 1}


def config(*, deterministic: bool = False, steps: int = 6) -> Any:
    policy = {"step_size": 8, "max_staleness": 1, "lora": {"rank": 2}}
    return config_for(
        steps=steps,
        deterministic=deterministic,
        policies={"guesser": policy},
        credit={"group_size": 4, "dynamic_sampling": True},
        environment={"id": "unused", "selection": SELECTION},
    )


def tasks_of(journal: MemoryJournal) -> dict[str, str]:
    """The task of every root episode that was admitted."""
    return {spec.episode_id: spec.task.id for spec, _ in dispatched(journal)}


def drops_of(run: SmallRun) -> Counter[str]:
    return Counter(dict(run.orchestrator.buffer.ledger.dropped))


def test_groups_without_a_signal_are_replaced_and_counted(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config(), script=guess)
        await run.run()
        sizes = [len(batch.units) for batch in run.trainer.batches]
        assert sizes == [8] * 6
        groups: dict[str, list[float]] = {}
        for units in trained_by(run).values():
            for episode, _, advantage in units:
                groups.setdefault(f"g{int(episode[1:]) // 4}", []).append(advantage)
        assert all(any(advantages) for advantages in groups.values())
        ledger = run.orchestrator.buffer.ledger
        assert ledger.dropped["no_signal"] > 0
        assert ledger.dropped["no_signal"] % 4 == 0
        counted = sum(values.get("groups/no_signal", 0.0) for _, _, values in run.seen.steps)
        assert 0 < counted <= ledger.dropped["no_signal"] / 4
        assert all(values.get("advantage/zero_share", 0.0) < 1 for _, _, values in run.seen.steps)

    simulated_loop.run(main)


def test_a_run_whose_groups_never_differ_ends_by_name(
    simulated_loop: SeededSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "WITHOUT_SIGNAL_IN_A_ROW", 40)

    async def main() -> None:
        run = SmallRun(config=config(), script=lambda *_: [0])
        with pytest.raises(CheckFailedError, match="no_signal"):
            await run.run()

    simulated_loop.run(main)


class Fragile(Guess):
    """Four of ten episodes break."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.rng.random() < 0.4:
            raise RuntimeError("broken")
        await super().run(ctx)


def pass_at(k: int) -> Any:
    return config_for(steps=6, credit={"group_size": 4, "advantage": {"name": "pass_at_k", "k": k}})


def test_groups_of_too_few_members_are_dropped_and_the_run_continues(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=pass_at(2), environment=Fragile, script=guess)
        await run.stop_after(6.0)
        at = {"guesser": run.orchestrator.board.current("guesser")}
        journal = run.journal.after_crash()
        resumed = SmallRun(
            config=run.config,
            environment=Fragile,
            script=guess,
            journal=journal,
            resumed_at=at,
            lineage=2,
        )
        await resumed.run()
        ledger = resumed.orchestrator.buffer.ledger
        ledger.check()
        assert ledger.dropped["too_few_members"] > 0
        assert resumed.orchestrator.board.step("guesser") == 6
        batches = (*run.trainer.batches, *resumed.trainer.batches)
        trained = {unit.episode_id for batch in batches for unit in batch.units}
        committed = Counter(spec.group_id for spec, _ in members(journal))
        groups = {spec.group_id for spec, _ in members(journal) if spec.episode_id in trained}
        assert groups
        assert all(committed[group] > 2 for group in groups)

    simulated_loop.run(main)


@pytest.mark.parametrize("kill_again", [1, 3])
def test_a_killed_deterministic_run_trains_and_selects_the_same(
    simulated_loop: SeededSimulation, kill_again: int
) -> None:
    async def undisturbed() -> tuple[Any, dict[str, str]]:
        run = SmallRun(config=config(deterministic=True), script=guess)
        await run.run()
        assert drops_of(run)["no_signal"]
        return trained_by(run), tasks_of(run.journal)

    expected, tasks = simulate(undisturbed, seed=0)
    assert len(tasks) > 4 * len(TASKS)
    assert len(set(tasks.values())) < len(TASKS), "tasks were replayed before all had their turn"
    moments = itertools.count(1.3, 0.61)

    async def killed() -> None:
        run = SmallRun(config=config(deterministic=True), script=guess)
        seen: Any = {}
        lives, moment = 0, next(moments)
        while True:
            lives += 1
            await run.stop_after(moment if lives <= kill_again else 1e6)
            seen.update(trained_by(run))
            if not run.orchestrator.outcome.interrupted:
                break
            journal = run.journal.after_crash()
            board = run.orchestrator.board
            lineage = board.current("guesser").lineage
            on_disk = [row.version for row in journal.on_disk() if isinstance(row, StepRow)]
            newest = max((version.step for version in on_disk if board.survives(version)), default=0)
            at = {"guesser": board.at("guesser", max(0, newest - lives % 3))}
            run = SmallRun(
                config=run.config,
                script=guess,
                journal=journal,
                resumed_at=at,
                lineage=lineage + 1,
            )
        assert seen == expected
        assert tasks_of(run.journal) == tasks

    for seed in simulated_loop.seeds():
        simulate(killed, seed=seed)


class Counting(list[Task]):
    """A source of a user's own: the task that was tried least."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        super().__init__(tasks)
        self.tried: Counter[str] = Counter()

    def select(self, group: int, rng: random.Random) -> Task:
        return min(self, key=lambda task: (self.tried[task.id], task.id))

    def record_result(self, task: Task, rewards: Sequence[float]) -> None:
        self.tried[task.id] += 1


def test_a_source_of_ones_own_selects() -> None:
    curriculum = Curriculum(Counting(TASKS[:3]), seed=0)
    chosen = []
    for group in range(6):
        task = curriculum.task(group)
        chosen.append(task.id)
        curriculum.record_group(GroupResult(group, task, (1.0, 0.0)))
    assert chosen == ["digit-0", "digit-1", "digit-2"] * 2

    class Wrong(Counting):
        def select(self, group: int, rng: random.Random) -> Any:
            return 3

    with pytest.raises(InputError, match="select returned int"):
        Curriculum(Wrong(TASKS), seed=0).task(0)


def test_solved_tasks_are_retired_and_hard_ones_replayed() -> None:
    curriculum = Curriculum(TASKS, seed=0, selection={"replay": 0.5, "retire_after": 1})
    seen: Counter[str] = Counter()
    for group in range(400):
        task = curriculum.task(group)
        rewards = {"digit-0": (1.0, 1.0), "digit-1": (1.0, 0.0)}.get(task.id, (0.0, 0.0))
        curriculum.record_group(GroupResult(group, task, rewards))
        seen[task.id] += 1
    assert seen["digit-0"] == 1
    assert 150 < seen["digit-1"] < 300
    assert min(seen.values()) >= 1
    assert len(seen) == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"credit": {"dynamic_sampling": True, "advantage": "none"}}, "dynamic_sampling"),
        ({"credit": {"dynamic_sampling": True}, "trainer": {"loss": {"name": "distillation"}}}, "distillation"),
        ({"environment": {"id": "x", "selection": {"lowest": 1}}}, "there is no such argument"),
        ({"environment": {"id": "x", "selection": {"low": 0.9, "high": 0.1}}}, "above high"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        config_for(**changes)


class OneBroken(agentrl.Environment):
    """A task whose episodes all fail, among others."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        await agent.act(agentrl.user("x"))
        if ctx.task.id == "digit-0":
            raise ValueError("this one task is broken")
        agent.reward(ctx.rng.random())


def test_a_source_hears_of_a_group_whose_members_all_failed(simulated_loop: SeededSimulation) -> None:
    """Otherwise the task that was tried least would be the broken one forever."""
    source = Counting(TASKS[:4])

    async def main() -> None:
        await SmallRun(config=config_for(steps=8, max_staleness=0), environment=OneBroken, tasks=source).run()
        assert min(source.tried.values()) >= 2
        assert len(source.tried) == 4

    simulated_loop.run(main)
