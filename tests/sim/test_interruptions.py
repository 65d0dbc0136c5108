"""Whatever interrupts it, every episode ends with the turns it would have had, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import MappingProxyType
from typing import Any

import pytest

import agentrl
from agentrl.core.records import PolicyVersion, Task, WeightsRef
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.entries import TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import EpisodeEnd
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.rollout.episode import GRACE_S
from agentrl.testing.execution import PARTITION, POLICY, plain_rollout_settings, wire_dispatcher
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.sim.interrupted_run import POLICIES, TOKEN_S, Life, WatchedEngine, check_schedule, request_name
from tests.support.builders import no_lost_group

pytestmark = pytest.mark.sim


def test_interrupted_turns_are_those_of_the_undisturbed_run(simulated_loop: SeededSimulation) -> None:
    did: Counter[str] = Counter()
    for seed in simulated_loop.seeds():
        did += check_schedule(seed).did
    assert len(did) == 8 or len(simulated_loop.seeds()) < 20, f"the schedules did only {did}"


def life(journal: MemoryJournal | None = None, engine_options: Any = MappingProxyType({}), **options: Any) -> Life:
    """The first process of a run; called in the loop."""
    engine = WatchedEngine({policy: PolicyVersion(policy, 0, 0) for policy in POLICIES}, {}, **engine_options)
    return Life(journal=journal or MemoryJournal(), engine=engine, run_seed=0, **options)


def test_an_engine_that_stays_away_costs_its_episodes_after_two_minutes(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        one = life()
        await asyncio.sleep(0.5)
        one.engine.lose()
        await one.worker.drain()
        ends = one.journal.of_kind(EpisodeEnd)
        assert {end.header.drop_reason for end in ends} == {"engine_lost"}
        assert asyncio.get_running_loop().time() >= 0.5 + 1 + 2 + 4 + 8 + 16 + 3 * 30

    simulated_loop.run(main)


def test_a_conversation_that_keeps_its_version_begins_again_where_that_is_gone(
    simulated_loop: SeededSimulation,
) -> None:
    """Refresh `episode`: the engine dies, or the episode is parked, while newer weights come."""

    async def main() -> None:
        one = life(engine_options={"refresh": "episode"})
        await asyncio.sleep(0.5)
        one.worker.park("e0")
        one.engine.lose()
        for policy in POLICIES:
            await one.engine.serve(
                [WeightsRef(version=PolicyVersion(policy, 0, 1), path="", kind="adapter", sha256="")]
            )
        await asyncio.sleep(1.0)
        one.engine.restore()
        one.worker.unpark()
        await one.worker.drain()
        ends = one.journal.of_kind(EpisodeEnd)
        assert {end.header.drop_reason for end in ends} == {None}
        assert any(end.header.attempt for end in ends), "those that were under way have begun again"
        log = one.journal.turn_log(PARTITION)
        for end in ends:
            turns = [entry.decode() for entry in log.read(end.header.episode_id, end.header.attempt)]
            for policy in POLICIES:
                steps = {
                    span.version.step
                    for turn in turns
                    if isinstance(turn, TurnEntry) and turn.policy == policy
                    for span in turn.tokens.spans
                }
                assert len(steps) <= 1, (end.header.episode_id, steps)

    simulated_loop.run(main)


def test_the_time_of_a_parked_episode_and_of_a_slow_engine_is_not_its_own(simulated_loop: SeededSimulation) -> None:
    async def main() -> Counter[str | None]:
        one = life(episode_timeout_s=30.0)
        await asyncio.sleep(0.5)
        assert one.worker.park("e0")
        await asyncio.sleep(100.0)
        assert one.engine.in_flight == 0
        assert one.worker.unpark() == ("e0",)
        await asyncio.sleep(1.0)
        one.engine.hold_calls()
        await asyncio.sleep(100.0)
        assert one.engine.in_flight > 0
        one.engine.release_held()
        await one.worker.drain()
        return Counter(end.header.drop_reason for end in one.journal.of_kind(EpisodeEnd))

    for ends in simulated_loop.run(main):
        assert ends == {None: 10}


def test_the_time_without_an_engine_is_not_the_episodes(simulated_loop: SeededSimulation) -> None:
    async def main() -> set[str | None]:
        one = life(episode_timeout_s=30.0)
        await asyncio.sleep(0.5)
        one.engine.lose()
        await asyncio.sleep(60.0)
        assert one.worker.park("e0"), "both at once"
        one.engine.restore()
        await asyncio.sleep(60.0)
        one.worker.unpark()
        await one.worker.drain()
        return {end.header.drop_reason for end in one.journal.of_kind(EpisodeEnd)}

    for ends in simulated_loop.run(main):
        assert ends == {None}


def test_turns_that_end_at_once_write_no_partials(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        one = life()
        await one.worker.drain()
        log = one.journal.turn_log("0")
        await log.flush()
        written = {request_name(item) for item in log.partials if not isinstance(item, tuple)}
        seconds = {request_name(e): b.seconds for e in log.entries if isinstance(b := e.decode(), TurnEntry)}
        assert {name for name, taken in seconds.items() if taken > 0.4 + TOKEN_S} <= written
        assert written <= {name for name, taken in seconds.items() if taken > 0.2 - TOKEN_S}
        assert len(written) < len(seconds)
        assert {item[2] for item in log.partials if isinstance(item, tuple)} == {
            name.rpartition(".0.")[2] for name in written
        }

    simulated_loop.run(main)


def test_a_failed_attempt_leaves_no_partials(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        one = life(episode_timeout_s=1.3)
        await one.worker.drain()
        log = one.journal.turn_log("0")
        await log.flush()
        assert any(not isinstance(item, tuple) for item in log.partials)
        for end in one.journal.of_kind(EpisodeEnd):
            assert not log.read_partials(end.header.episode_id, 0)

    simulated_loop.run(main)


LAST_TURN_S = 3.0


class Swallowing(agentrl.Environment):
    """Ends when it is cancelled, as if it were over."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        for _ in range(3):
            try:
                await agent.act(agentrl.user("?"))
            except asyncio.CancelledError:
                return
        agent.reward(1.0)


class SlowDisk(MemoryJournal):
    """Takes a commit at once, as the writer's queue does, and is long about it."""

    SECONDS = 2 * GRACE_S

    async def commit(self, end: EpisodeEnd) -> None:
        await super().commit(end)
        await asyncio.sleep(self.SECONDS)


@pytest.mark.parametrize("moment", [0.5, 1.2, 2.2, 3.2, 9.0, 14.0])
def test_a_worker_that_is_stopped_neither_loses_nor_doubles_a_commit(moment: float) -> None:
    """In a turn, while the commit is on its way (from 3 s on; the next life finds it), and when it has been told."""

    async def main() -> None:
        journal, told, failures = SlowDisk(), list[Counter[str]](), list[BaseException]()
        for is_first in (True, False):
            engine = ScriptedEngine(
                lambda *_: [STOP_TOKEN], versions={POLICY: PolicyVersion(POLICY, 0, 0)}, seconds_per_token=1.0
            )
            dispatcher, _ = wire_dispatcher(Swallowing, engine, journal, plain_rollout_settings(), failures)
            dispatcher.resume(PastRun(journal, {}, group_size=1), no_lost_group)
            if is_first:
                dispatcher.admit_group(Task(id="t", data={}))
                await asyncio.sleep(moment)
                await dispatcher.worker.cancel()
                await journal.turn_log(PARTITION).flush()
                await journal.flush()
            await dispatcher.worker.drain()
            told.append(dispatcher.buffer.counts)
        await asyncio.sleep(SlowDisk.SECONDS)
        assert told[-1].of("episodes") == 1
        [end] = journal.of_kind(EpisodeEnd)
        assert (end.header.committed, end.header.turns, end.header.reward) == (True, 3, 1.0)
        assert not failures

    simulate(main, seed=0)
