"""Replicas of one engine: where conversations go, who is fenced, and what a loss costs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

import agentrl
from agentrl.core.errors import (
    EngineError,
    EngineFailedError,
    EngineLostError,
    EngineStorageError,
    VersionNotServedError,
    VersionsRefusedError,
)
from agentrl.core.ids import opening_digest
from agentrl.core.ports import GenerateRequest, Refresh, SamplingParams, TokenScores
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.tokens import Completion
from agentrl.engines.router import FENCE_S, EngineRouter
from agentrl.engines.scripted import ScriptedEngine
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import SmallRun, guess

if TYPE_CHECKING:
    from agentrl.core.records import Int32Array

START = {name: PolicyVersion(name, 0, 0) for name in ("solver", "proposer")}


class Engine(ScriptedEngine):
    """Remembers what it was asked for; its updates take a time, or fail, and it may be gone for good."""

    update_s = 0.0
    has_failed = False
    refusal: type[EngineError] = EngineError

    def __init__(self, refresh: Refresh = "turn") -> None:
        super().__init__(lambda *_: [7] * 50, versions=START, seconds_per_token=0.01, refresh=refresh)
        self.asked: list[str] = []
        self.updates: list[PolicyVersion] = []
        self.refuses: set[PolicyVersion] = set()

    def start(self, request: GenerateRequest, *arguments: object, **options: object) -> object:
        self.check_not_failed()
        self.asked.append(request.request_id)
        return super().start(request, *arguments, **options)  # type: ignore[arg-type]

    async def load(self, weights: WeightsRef) -> None:
        await asyncio.sleep(self.update_s)
        self.check_not_failed()
        if weights.version in self.refuses or weights.sha256:
            raise self.refusal(f"{weights.version} refused")
        self.updates.append(weights.version)

    async def ping(self) -> None:
        self.check_not_failed()
        await super().ping()

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        self.check_not_failed()
        self.check_alive("score", self.life)
        self.asked.append("score")
        return await super().score(version, token_ids, temperature, top=top)

    def check_not_failed(self) -> None:
        if self.has_failed:
            raise EngineFailedError("it is not started again")

    def keeps(self, version: PolicyVersion) -> bool:
        """Whether a session can be pinned to a version that is not the newest."""
        try:
            self.open("pinned", version.policy, pin=version).close()
        except EngineError:
            return False
        return True


def request(name: str, context: Int32Array) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=context, sampling=SamplingParams(max_tokens=50), seed=1)


def context(number: int) -> Int32Array:
    return np.array([number, 5, 6], np.int32)


def weights(step: int, policy: str = "solver", kind: Literal["full", "adapter"] = "full") -> WeightsRef:
    return WeightsRef(version=PolicyVersion(policy, 0, step), path="", kind=kind, sha256="")


async def turns(engine: EngineRouter, name: str, policy: str = "solver") -> set[int]:
    """The steps of the versions that sampled a turn each of many conversations."""
    made = await asyncio.gather(*(turn(engine, f"{name}{number}", number, policy) for number in range(20)))
    return {span.version.step for completion in made for span in completion.spans}


async def turn(engine: EngineRouter, name: str, number: int = 0, policy: str = "solver") -> Completion:
    session = engine.open(name, policy)
    try:
        return await session.generate(request(name, context(number)))
    finally:
        session.close()


def test_conversations_with_the_same_opening_go_to_one_replica_whatever_followed_it() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(3)]
        engine = EngineRouter(engines)
        for number in range(12):
            first = context(number)
            for length in range(4):  # as its forks after so many turns
                longer = np.concatenate([first, np.full(length, 9, np.int32)])
                session = engine.open(f"{number}.{length}", "solver")
                await session.generate(
                    replace(request(f"{number}.{length}", longer), opening=opening_digest(first.tobytes()))
                )
                session.close()
        places = [{asked.partition(".")[0] for asked in each.asked} for each in engines]
        assert all(places), "twelve openings fell on fewer than three replicas"
        assert sum(map(len, places)) == 12
        await engine.close()

    simulate(main, seed=0)


class Rewritten(agentrl.Environment):
    """A conversation that begins a new row after two turns."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        for turn in range(6):
            if turn == 2:
                guesser.restart(agentrl.user("Summary"))
            await guesser.act(agentrl.user(f"Guess {ctx.task.data['digit']}, {turn}"))
            await ctx.sleep(0.3)
        guesser.reward(ctx.rng.random())


def test_a_resumed_conversation_has_the_opening_of_its_first_prompt(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        asked: dict[str, set[int]] = {}

        def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
            asked.setdefault(request.request_id.partition(".")[0], set()).add(request.opening)
            return guess(request, policy, version)

        first = SmallRun(environment=Rewritten, script=script)
        journal = await first.cut_after(2.0)
        before = {episode: set(openings) for episode, openings in asked.items()}
        asked.clear()
        at = {"guesser": PolicyVersion("guesser", 0, len(first.trainer.batches))}
        second = SmallRun(environment=Rewritten, script=script, journal=journal, resumed_at=at)
        await second.run()
        assert all(len(openings) == 1 for openings in [*before.values(), *asked.values()])
        resumed = before.keys() & asked.keys()
        assert all(asked[episode] == before[episode] for episode in resumed)
        groups: dict[int, set[int]] = {}
        for episode, openings in before.items():
            groups.setdefault(int(episode[1:]) // 4, set()).update(openings)
        assert all(len(openings) == 1 for openings in groups.values()), "members of a group stay together"
        assert len({opening for openings in before.values() for opening in openings}) > 1
        return len(resumed)

    assert min(simulated_loop.run(main)) > 0


def test_conversations_that_begin_alike_go_to_one_replica_until_it_has_too_many() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(3)]
        engine = EngineRouter(engines)
        for number in range(30):
            await turn(engine, f"a{number}", number=4)
        assert sorted(len(each.asked) for each in engines) == [0, 0, 30]
        await asyncio.gather(*(turn(engine, f"b{number}", number=4) for number in range(30)))
        assert min(len(each.asked) for each in engines) >= 8
        await engine.close()

    simulate(main, seed=0)


def test_what_replicas_hold_and_compute_adds_up() -> None:
    def together(*held: int | None) -> tuple[int | None, float]:
        engines = [Engine() for _ in held]
        for engine, tokens in zip(engines, held, strict=True):
            engine.capabilities = replace(engine.capabilities, kv_tokens=tokens, prefill_rate=500.0)
        found = EngineRouter(engines).capabilities
        assert replace(found, kv_tokens=held[0], prefill_rate=500.0) == engines[0].capabilities, (
            "the rest is the first's"
        )
        return found.kv_tokens, found.prefill_rate

    async def main() -> None:
        assert together(8000) == (8000, 500.0)
        assert together(8000, 6000, 8000) == (22000, 1500.0)
        assert together(8000, None) == (None, 1000.0)

    simulate(main, seed=0)


def test_a_replica_that_does_not_take_a_version_is_fenced_until_it_has() -> None:
    async def main() -> None:
        engines, told = [Engine() for _ in range(2)], list[str]()
        engine = EngineRouter(engines, tell=told.append)
        engines[1].update_s = 3 * FENCE_S
        await engine.serve([weights(1)])
        told_why = "it is behind at solver@0.1 (no answer within 30 s); 1 of 2 replicas take calls"
        assert told == [f"engine replica 1 gets no calls: {told_why}"]
        assert await turns(engine, "a") == {1}
        assert engines[1].asked == []
        await engine.serve([weights(2)])
        assert engines[0].updates[-1].step == 2
        await asyncio.sleep(6 * FENCE_S)
        assert [version.step for version in engines[1].updates] == [1, 2]
        assert told[1:] == [
            f"engine replica 1 still gets no calls: {told_why}",
            "engine replica 1 has caught up",
        ]
        assert await turns(engine, "b") == {2}
        assert engines[1].asked
        await engine.close()

    simulate(main, seed=0)


def test_what_the_first_replica_refuses_reaches_none() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(3)]
        engine = EngineRouter(engines)
        engines[0].refuses.add(weights(1).version)
        with pytest.raises(EngineError, match=r"solver@0\.1 refused"):
            await engine.serve([weights(1)], [weights(1)])
        assert [each.updates for each in engines] == [[], [], []]
        assert await turns(engine, "a") == {0}
        assert all(each.asked for each in engines)
        await engine.close()

    simulate(main, seed=0)


def test_a_turn_of_a_lost_replica_goes_on_elsewhere() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(2)]
        engine = EngineRouter(engines)
        session = engine.open("a", "solver")
        running = asyncio.ensure_future(session.generate(request("a", context(1))))
        await asyncio.sleep(0.1)
        (busy,) = [each for each in engines if each.asked]
        busy.lose()
        with pytest.raises(EngineLostError):
            await running
        session.close()
        again = await asyncio.gather(*(turn(engine, f"b{number}", number) for number in range(8)))
        assert {len(each.token_ids) for each in again} == {50}
        assert busy.asked == ["a"]
        busy.restore()
        await asyncio.sleep(5)
        await asyncio.gather(*(turn(engine, f"c{number}", number) for number in range(20)))
        assert len(busy.asked) > 1
        await engine.close()

    simulate(main, seed=0)


@pytest.mark.parametrize("is_updated", [False, True])
def test_a_conversation_that_keeps_its_version_goes_on_elsewhere_only_with_that_version(is_updated: bool) -> None:
    async def main() -> None:
        engines = [Engine("episode") for _ in range(2)]
        engine = EngineRouter(engines)
        session = engine.open("a", "solver")
        await session.generate(request("a", context(1)))
        (own,) = [each for each in engines if each.asked]
        own.lose()
        with pytest.raises(EngineLostError):
            await session.generate(request("b", context(1)))
        if is_updated:
            await engine.serve([weights(1)])
            with pytest.raises(VersionNotServedError, match=r"solver@0\.0"):
                await session.generate(request("c", context(1)))
        else:
            completion = await session.generate(request("c", context(1)))
            assert [span.version.step for span in completion.spans] == [0]
            await engine.serve([weights(1)])
            completion = await session.generate(request("d", context(1)))
            assert [span.version.step for span in completion.spans] == [0]
        assert await turns(engine, "e") == {1}
        await engine.close()

    simulate(main, seed=0)


def test_a_replica_that_missed_a_version_is_not_back_when_it_takes_one_of_another_policy() -> None:
    async def main() -> None:
        engines, told = [Engine() for _ in range(2)], list[str]()
        engine = EngineRouter(engines, tell=told.append)
        engines[1].refuses.add(weights(1).version)
        await engine.serve([weights(1)])
        await engine.serve([weights(1, "proposer")])
        why = "it is behind at solver@0.1 (solver@0.1 refused); 1 of 2 replicas take calls"
        assert told == [f"engine replica 1 gets no calls: {why}"]
        assert (await turns(engine, "a"), await turns(engine, "b", "proposer")) == ({1}, {1})
        assert engines[1].asked == []
        engines[1].refuses.clear()
        await engine.serve([weights(2, "proposer")])
        await asyncio.sleep(1)
        assert told[1:] == ["engine replica 1 has caught up"]
        assert (await turns(engine, "c"), await turns(engine, "d", "proposer")) == ({1}, {2})
        assert engines[1].asked
        await engine.close()

    simulate(main, seed=0)


def test_a_pinned_version_is_given_before_newer_ones_and_unpinned_everywhere() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(2)]
        engine = EngineRouter(engines)
        kept = weights(1).version
        engines[1].refuses.add(kept)
        for step in (1, 2):
            await engine.serve([weights(step)], [weights(1)])
        assert [each.keeps(kept) for each in engines] == [True, False]
        session = engine.open("pinned", "solver", pin=kept)
        for number in range(20):
            completion = await session.generate(request(f"p{number}", context(number)))
            assert completion.spans[0].version == kept
        session.close()
        assert engines[1].asked == []
        engines[1].refuses.clear()
        await engine.serve([weights(3)], [weights(1)])
        await asyncio.sleep(1)
        assert [version.step for version in engines[1].updates] == [2, 1, 3]
        assert [each.keeps(kept) for each in engines] == [True, True]
        assert await turns(engine, "a") == {3}
        await engine.serve([weights(3)])
        assert [each.keeps(kept) for each in engines] == [False, False]
        await engine.close()

    simulate(main, seed=0)


def test_a_pinned_version_that_comes_again_with_other_weights_is_refused_and_stays_as_it_was() -> None:
    async def main() -> None:
        engines, told = [Engine() for _ in range(2)], list[str]()
        engine = EngineRouter(engines, tell=told.append)
        await engine.serve([weights(1)], [weights(1)])
        with pytest.raises(EngineError, match=r"solver@0\.1 refused"):
            await engine.serve([replace(weights(1), sha256="another")], [weights(1)])
        await engine.serve([weights(2)], [weights(1)])
        assert [each.keeps(weights(1).version) for each in engines] == [True, True]
        assert (await turns(engine, "a"), told) == ({2}, [])
        await engine.serve([weights(2)])
        assert [each.keeps(weights(1).version) for each in engines] == [False, False]
        await engine.close()

    simulate(main, seed=0)


def test_a_version_that_is_unpinned_while_a_replica_loads_it_does_not_stay() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(2)]
        engine = EngineRouter(engines)
        engines[1].update_s = 3 * FENCE_S
        await engine.serve([weights(1)], [weights(1)])
        assert engines[1].updates == []
        await engine.serve([weights(1)])
        await engine.serve([weights(2)])
        await asyncio.sleep(9 * FENCE_S)
        assert [version.step for version in engines[1].updates] == [1, 2]
        assert [each.keeps(weights(1).version) for each in engines] == [False, False]
        assert await turns(engine, "a") == {2}
        assert engines[1].asked
        await engine.close()

    simulate(main, seed=0)


def test_a_pin_that_is_confirmed_stays_pinned() -> None:
    """An earlier request's task may ask a replica for the pin before the pin's request unpins what it dropped."""

    async def main() -> None:
        replica, pin = Engine(), weights(2)
        engine = EngineRouter([replica])
        await engine.serve([weights(1)], [weights(1)])
        first = asyncio.ensure_future(engine.serve([weights(1)], [weights(1), weights(3)]))
        while weights(3) not in engine.fleets[0].versions.requested.pinned:
            await asyncio.sleep(0)
        await engine.serve([weights(1)], [pin])
        await first
        await asyncio.sleep(1.0)
        assert (replica.keeps(pin.version), replica.keeps(weights(3).version)) == (True, False)
        await engine.close()

    for seed in range(10):
        simulate(main, seed=seed)


def test_what_a_cancelled_caller_asked_for_is_replaced_everywhere_by_what_is_asked_for_next() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(2)]
        engine = EngineRouter(engines)
        engines[1].update_s = 1.0
        updating = asyncio.ensure_future(engine.serve([weights(1)], [weights(1)]))
        await asyncio.sleep(0.5)
        updating.cancel()
        await asyncio.wait({updating})
        await engine.serve([weights(2)])
        assert [version.step for version in engines[1].updates] == [1, 2]
        assert [each.keeps(weights(1).version) for each in engines] == [False, False]
        await engine.close()

    simulate(main, seed=0)


def test_a_replica_that_takes_too_late_what_others_refused_waits_for_the_next_version() -> None:
    async def main() -> None:
        engines, told = [Engine() for _ in range(2)], list[str]()
        engine = EngineRouter(engines, tell=told.append)
        engines[0].update_s = 3 * FENCE_S
        engines[1].refuses.add(weights(1).version)
        with pytest.raises(EngineError, match=r"solver@0\.1 refused"):
            await engine.serve([weights(1)], [weights(1)])
        await asyncio.sleep(4 * FENCE_S)
        assert engines[0].updates == [weights(1).version]
        assert await turns(engine, "a") == {0}
        assert engines[0].asked == []
        await engine.serve([weights(2)])
        await asyncio.sleep(4 * FENCE_S)
        assert not engines[0].keeps(weights(1).version)
        assert told[-1] == "engine replica 0 has caught up"
        assert await turns(engine, "b") == {2}
        assert engines[0].asked
        await engine.close()

    simulate(main, seed=0)


def test_an_adapter_may_wait_for_its_place_and_conversations_stay_meanwhile() -> None:
    async def main() -> None:
        engines, told = [Engine() for _ in range(2)], list[str]()
        engine = EngineRouter(engines, tell=told.append)
        session = engine.open("a", "solver")
        await session.generate(request("a", context(1)))
        (own,) = [each for each in engines if each.asked]
        own.update_s = 3 * FENCE_S
        updating = asyncio.ensure_future(engine.serve([weights(1, kind="adapter")]))
        await asyncio.sleep(2 * FENCE_S)
        await session.generate(request("b", context(1)))
        assert own.asked == ["a", "b"]
        await updating
        assert [each.updates[-1].step for each in engines] == [1, 1]
        (line,) = told
        assert line.endswith("not taken solver@0.1 (no answer within 30 s: it waits for a free adapter slot, or hangs)")
        await engine.close()

    simulate(main, seed=0)


def test_a_full_disk_of_one_replica_does_not_keep_a_version_from_the_others() -> None:
    async def main() -> None:
        engines, told = [Engine() for _ in range(2)], list[str]()
        engine = EngineRouter(engines, tell=told.append)
        for each in engines:
            each.refusal = EngineStorageError
        engines[0].refuses.add(weights(1).version)
        await engine.serve([weights(1)])
        assert told == [
            "engine replica 0 gets no calls: it is behind at solver@0.1 (solver@0.1 refused); 1 of 2 replicas take "
            "calls"
        ]
        assert await turns(engine, "a") == {1}
        await engine.serve([weights(2)])
        assert told[1:] == ["engine replica 0 has caught up"]
        for each in engines:
            each.refuses.add(weights(3).version)
        with pytest.raises(VersionsRefusedError, match=r"solver@0\.3 refused") as refusal:
            await engine.serve([weights(3)])
        assert [type(error) for error in refusal.value.refused.values()] == [EngineStorageError]
        assert await turns(engine, "b") == {2}
        await engine.close()

    simulate(main, seed=0)


def test_a_replica_that_failed_for_good_is_left_out_and_when_none_is_left_all_hear_why() -> None:
    async def main() -> None:
        engines, told = [Engine() for _ in range(2)], list[str]()
        engine = EngineRouter(engines, tell=told.append)
        sessions = [engine.open(f"a{number}", "solver") for number in range(20)]
        engines[0].has_failed = True
        for number, session in enumerate(sessions):
            assert len((await session.generate(request(f"a{number}", context(number)))).token_ids) == 50
        why = "it has failed for good: it is not started again; 1 of 2 replicas take calls"
        assert told == [f"engine replica 0 gets no calls: {why}"]
        await engine.serve([weights(1)])
        assert (await engine.score("solver", context(1))).logprobs.tolist() == [0, -1, -1]
        await engine.ping()
        waiting = asyncio.ensure_future(turn(engine, "b"))
        await asyncio.sleep(0.1)
        engines[1].has_failed = True
        engines[1].lose()
        with pytest.raises(EngineLostError):
            await waiting
        why = "all replicas of the engine are lost; replica 0: it is not started again; replica 1: it is not"
        with pytest.raises(EngineFailedError, match=why):
            await sessions[0].generate(request("c", context(0)))
        with pytest.raises(EngineFailedError, match=why):
            await engine.serve([weights(2)])
        with pytest.raises(EngineFailedError, match=why):
            engine.open("d", "solver")
        await engine.close()

    simulate(main, seed=0)


def test_an_engine_whose_replicas_failed_without_a_call_does_not_answer() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(2)]
        engine = EngineRouter(engines)
        for each in engines:
            await engine.ping()
            each.has_failed = True
        with pytest.raises(EngineFailedError, match="all replicas of the engine are lost"):
            await engine.ping()
        await engine.close()

    simulate(main, seed=0)


def test_all_replicas_fail_while_an_update_and_calls_wait_for_them() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(2)]
        engine = EngineRouter(engines)
        session = engine.open("a", "solver")
        for each in engines:
            each.update_s = 3 * FENCE_S
        updating = asyncio.ensure_future(engine.serve([weights(1)]))
        await asyncio.sleep(2 * FENCE_S + 1)  # now both are behind
        calling = asyncio.ensure_future(session.generate(request("a", context(0))))
        await asyncio.sleep(0)
        for each in engines:
            each.has_failed = True
        for waiting in (updating, calling):
            with pytest.raises(EngineFailedError, match="all replicas"):
                await waiting
        await engine.close()

    simulate(main, seed=0)


def test_when_those_that_took_a_version_fail_nobody_waits_for_those_that_refused_it() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(2)]
        engine = EngineRouter(engines)
        engines[1].refuses.add(weights(1).version)
        await engine.serve([weights(1)])
        engines[0].has_failed = True
        with pytest.raises(
            EngineFailedError, match=r"replica 0: it is not started again; replica 1: solver@0\.1 refused"
        ):
            await turn(engine, "a")
        await engine.serve([weights(2)])
        assert await turns(engine, "b") == {2}
        await engine.close()

    simulate(main, seed=0)


def test_a_score_is_asked_again_of_another_replica() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(2)]
        engine = EngineRouter(engines)
        await engine.score(START["solver"], context(1))
        (own,) = [each for each in engines if each.asked]
        own.lose()
        assert (await engine.score(START["solver"], context(1))).logprobs.tolist() == [0, -1, -1]
        assert [each.asked for each in engines] == [["score"], ["score"]]
        await engine.close()

    simulate(main, seed=0)
