"""A run that is stopped, or killed, goes on from its checkpoint: nothing is lost and nothing is trained twice."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import agentrl
from agentrl.core import ids
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.journal.entries import BeginEntry, TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import Admission, EpisodeEnd, StepRow
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.rollout.worker import AsyncioWorker
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, Ask, SmallRun, config_for
from tests.support.dispatched import members

pytestmark = pytest.mark.sim


def trained_in(run: SmallRun) -> Counter[str]:
    return Counter(unit.episode_id for batch in run.trainer.batches for unit in batch.units)


def second_life(first: SmallRun, journal: MemoryJournal, step: int) -> SmallRun:
    """The run as it is resumed from a checkpoint at `step`."""
    version = PolicyVersion("guesser", 0, step)
    return SmallRun(
        config=first.config,
        environment=first.environment,
        journal=journal,
        resumed_at={"guesser": version},
    )


class FiveTurns(agentrl.Environment):
    """Five turns of 40 tokens, each 2 seconds."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for _ in range(5):
            await ctx.agent("guesser").act(agentrl.user("Continue."))
        ctx.agent("guesser").reward(ctx.rng.random())


@pytest.mark.parametrize("killed_at", [9.0, 3.0])
def test_tokens_sampled_before_a_kill_do_not_count_in_the_rate_after_it(
    killed_at: float, simulated_loop: SeededSimulation
) -> None:
    """Eight conversations at once, each of 20 tokens per second, give at most 160."""

    def forty(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        return [*b"." * 39, STOP_TOKEN]

    async def main() -> None:
        config = config_for(steps=3, max_staleness=0)
        first = SmallRun(config=config, environment=FiveTurns, script=forty)
        second = second_life(first, await first.cut_after(killed_at), 0)
        second.script = forty
        await second.run()
        rates = [values["tokens/sampled_per_s"] for _, _, values in second.seen.steps]
        assert len(rates) == 3
        assert max(rates) <= 160
        assert min(rates) > 40

    simulated_loop.run(main)


def test_a_stopped_run_trains_every_episode_once(simulated_loop: SeededSimulation) -> None:
    moments = itertools.count(2.0, 0.4)

    async def main() -> int:
        moment = next(moments)
        first = SmallRun(config=config_for(steps=8))
        first.during = lambda orchestrator: asyncio.get_running_loop().call_later(moment, orchestrator.stop)
        await first.run()
        journal = first.journal.after_crash()
        second = second_life(first, journal, len(first.trainer.batches))
        await second.run()
        trained = trained_in(first) + trained_in(second)
        assert max(trained.values()) == 1
        assert sum(trained.values()) == 8 * 8
        assert [batch.step_id for batch in first.trainer.batches + second.trainer.batches] == list(range(1, 9))
        return len(first.trainer.batches)

    stopped_after = set(simulated_loop.run(main, seeds=10))
    assert len(stopped_after) > 1 or len(simulated_loop.seeds(10)) == 1, "every schedule stopped at the same step"


def test_steps_after_the_checkpoint_are_taken_again(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        first = SmallRun(config=config_for(steps=4))
        await first.run()
        journal = first.journal.after_crash()
        second = second_life(first, journal, 2)
        await second.run()
        kept = Counter(unit.episode_id for batch in first.trainer.batches[:2] for unit in batch.units)
        assert max((kept + trained_in(second)).values()) == 1
        lost = {unit.episode_id for batch in first.trainer.batches[2:] for unit in batch.units}
        assert lost <= set(trained_in(second)), "what was trained after the checkpoint is trained again"
        assert all(batch.units for batch in second.trainer.batches)

    simulated_loop.run(main)


def test_a_group_keeps_the_task_with_which_it_began(simulated_loop: SeededSimulation) -> None:
    """Also members whose admission never reached the disk, although the rows have changed since."""

    async def main() -> None:
        first = SmallRun(config=config_for(steps=8))
        journal = await first.cut_after(0.5)
        kept = next(spec for spec in journal.unfinished() if not ids.root_episode_number(spec.episode_id) % 4)
        begin = ids.root_episode_number(kept.episode_id)
        members = {*range(begin + 1, begin + 4)}
        changed = [Task(id=task.id, data={**task.data, "edited": True}) for task in TASKS]
        second = SmallRun(config=first.config, tasks=changed)
        second.journal.admit(kept)
        await second.journal.flush()
        await second.run()
        tasks = {
            ids.root_episode_number(record.spec.episode_id): record.spec.task
            for record in second.journal.of_kind(Admission)
            if record.spec.purpose == "train"
        }
        assert [tasks[number] for number in sorted(members)] == [kept.task] * 3
        assert tasks[begin + 4].data["edited"]

    simulated_loop.run(main)


def without_admissions(journal: MemoryJournal, group: str) -> MemoryJournal:
    """What a kill leaves if worker processes were faster than the control log: only the entries of a group."""
    left = journal.after_crash()
    left.records = [
        each for each in left.records if not (isinstance(each, Admission | EpisodeEnd) and each.spec.group_id == group)
    ]
    left._on_disk = len(left.records)
    return left.after_crash()


def test_entries_without_an_admission_keep_their_task(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        first = SmallRun(config=config_for(steps=8), engine_options={"seconds_per_token": 0.5})
        journal = await first.cut_after(0.5)
        begun = [(entry.episode_id, entry.decode()) for entry in journal.turn_log("0").entries]
        tasks = {episode: body.task_id for episode, body in begun if isinstance(body, BeginEntry)}
        second = second_life(first, without_admissions(journal, "g4"), 0)
        second.tasks = TASKS[::-1]
        await second.run()
        admitted = {each.spec.episode_id: each.spec.task for each in second.journal.of_kind(Admission)}
        assert {f"e{number}" for number in range(4, 8)} <= tasks.keys()
        assert {name: admitted[name].id for name in tasks} == tasks
        assert not second.orchestrator.buffer.ledger.dropped.get("nondeterminism")

        third = second_life(first, without_admissions(journal, "g4"), 0)
        third.tasks, third.refusal = TASKS[::-1], lambda spec: "foreign" if spec.group_id == "g4" else ""
        await third.run()
        foreign = next(each.spec for each in third.journal.of_kind(Admission) if each.spec.episode_id == "e4")
        assert foreign.task.id != tasks["e4"], "a task that only the journal names"

    simulated_loop.run(main)


class Counted(list[Task]):
    """A source that notes how many results it has when it selects the task of a group."""

    results = 0

    def __init__(self) -> None:
        super().__init__(TASKS)
        self.known: dict[int, int] = {}
        self.selections: Counter[int] = Counter()

    def select(self, group: int, rng: random.Random) -> Task:
        self.known[group] = self.results
        self.selections[group] += 1
        return self[group % len(self)]

    def record_result(self, task: Task, rewards: Sequence[float]) -> None:
        self.results += 1


def test_a_lost_task_is_selected_by_the_results_of_the_groups_that_had_ended(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        first = SmallRun(config=config_for(steps=8), tasks=Counted())
        journal = await first.cut_after(4.0)
        last = max(journal.unfinished(), key=lambda spec: ids.root_episode_number(spec.episode_id)).group_id
        left = without_admissions(journal, last)
        group = int(last[1:]) // 4
        ended = Counter(spec.group_id for spec, _ in members(left))
        source = Counted()
        second = second_life(first, left, 0)
        second.tasks = source
        await second.run()
        assert source.known[group] == sum(count == 4 for count in ended.values())
        assert source.selections[group] == 1, "one task for the whole group"
        return source.known[group]

    assert min(simulated_loop.run(main)) > 0


def test_turns_that_were_recorded_are_not_sampled_again(simulated_loop: SeededSimulation, tmp_path: Path) -> None:
    async def main() -> int:
        first = SmallRun(config=config_for(steps=8), engine_options={"seconds_per_token": 0.2})
        journal = await first.cut_after(2.5)
        before = {
            (entry.episode_id, entry.call_id): entry.body
            for entry in journal.turn_log("0").entries
            if isinstance(entry.decode(), TurnEntry)
        }
        second = second_life(first, journal, len(first.trainer.batches))
        await second.run()
        seen = Counter(
            (entry.episode_id, entry.call_id)
            for entry in journal.turn_log("0").entries
            if isinstance(entry.decode(), TurnEntry)
        )
        assert max(seen.values()) == 1
        return sum(1 for key in before if key[0] in {spec.episode_id for spec in second.past.unfinished})

    assert sum(simulated_loop.run(main)) > 0, "no episode was stopped between two turns"


def test_children_whose_admission_was_lost_go_on_from_their_entries(simulated_loop: SeededSimulation) -> None:
    """Turns of a worker's process reach the disk before the run's control log: a kill in between leaves entries of
    unadmitted children. Here a worker without the wait for admissions stands for it."""
    moments = itertools.count(2.0, 0.3)

    async def main() -> None:
        moment = next(moments)
        first = SmallRun(config=config_for(steps=12, step_size=12), environment=Ask)
        survivors: list[MemoryJournal] = []

        async def crash(orchestrator: Orchestrator) -> None:
            await asyncio.sleep(moment)
            while not _unadmitted(first.journal):
                await first.journal.flush()
                await asyncio.sleep(0.03)
            log = first.journal.turn_log("0")
            log.on_disk = len(log.entries)
            survivors.append(first.journal.after_crash())
            orchestrator.stop()

        tasks: list[asyncio.Task[None]] = []

        def during(orchestrator: Orchestrator) -> None:
            assert isinstance(orchestrator.dispatcher.worker, AsyncioWorker)
            orchestrator.dispatcher.worker._admitted = None
            tasks.append(asyncio.get_running_loop().create_task(crash(orchestrator)))

        first.during = during
        await first.run()
        [journal] = survivors
        steps = [record for record in journal.records if isinstance(record, StepRow)]
        trained = Counter(unit.episode_id for record in steps for unit in record.batch.units)
        second = second_life(first, journal, len(steps))
        second.environment = Ask
        await second.run()  # its journal refuses a call that is journaled twice
        assert max((trained + trained_in(second)).values()) == 1
        assert len(steps) + len(second.trainer.batches) == 12

    simulated_loop.run(main)


def _unadmitted(journal: MemoryJournal) -> set[str]:
    """Children with entries, whose admission is not on disk."""
    admitted = {record.spec.episode_id for record in journal.on_disk() if isinstance(record, Admission)}
    entries = journal.turn_log("0").entries
    return {entry.episode_id for entry in entries if "~" in entry.episode_id} - admitted
