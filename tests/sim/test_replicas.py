"""Replicas of one engine: where conversations go, who is fenced, and what a loss costs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from agentrl.core.errors import EngineError, EngineLostError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import Completion, PolicyVersion, WeightsRef
from agentrl.engines.replicas import FENCE_S, ReplicatedEngine
from agentrl.engines.scripted import ScriptedEngine
from agentrl.testing import simulate

if TYPE_CHECKING:
    from agentrl.core.records import Int32Array

START = PolicyVersion("solver", 0, 0)


class Engine(ScriptedEngine):
    """Remembers what it was asked for; its updates take a time, or fail."""

    update_s = 0.0
    refusal: Exception | None = None

    def __init__(self) -> None:
        super().__init__(lambda *_: [7] * 50, versions={"solver": START}, seconds_per_token=0.01, refresh="turn")
        self.asked: list[str] = []
        self.updates: list[PolicyVersion] = []

    def start(self, request: GenerateRequest, *arguments: object, **options: object) -> object:
        self.asked.append(request.request_id)
        return super().start(request, *arguments, **options)  # type: ignore[arg-type]

    async def update(self, weights: WeightsRef, *, keep: bool = False) -> None:
        await asyncio.sleep(self.update_s)
        if self.refusal is not None:
            raise self.refusal
        self.updates.append(weights.version)
        await super().update(weights, keep=keep)

    async def resume(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        await super().resume()


def request(name: str, context: Int32Array) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=context, sampling=SamplingParams(max_tokens=50), seed=1)


def context(number: int) -> Int32Array:
    return np.array([number, 5, 6], np.int32)


def weights(step: int) -> WeightsRef:
    return WeightsRef(version=PolicyVersion("solver", 0, step), path="", kind="full", sha256="")


async def turn(engine: ReplicatedEngine, name: str, number: int = 0) -> Completion:
    session = engine.open(name, "solver")
    try:
        return await session.generate(request(name, context(number)))
    finally:
        session.close()


def test_conversations_that_begin_alike_go_to_one_replica_until_it_has_too_many() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(3)]
        engine = ReplicatedEngine(engines)
        for number in range(30):
            await turn(engine, f"a{number}", number=4)
        assert sorted(len(each.asked) for each in engines) == [0, 0, 30]
        await asyncio.gather(*(turn(engine, f"b{number}", number=4) for number in range(30)))
        assert min(len(each.asked) for each in engines) >= 8
        await engine.close()

    simulate(main, seed=0)


def test_a_replica_that_does_not_take_a_version_is_fenced_until_it_has() -> None:
    async def main() -> None:
        engines, told = [Engine() for _ in range(2)], list[str]()
        engine = ReplicatedEngine(engines, tell=told.append)
        engines[1].update_s = 3 * FENCE_S
        await engine.update(weights(1))
        assert told == ["engine replica 1 is behind at solver@0.1; it gets no calls for now"]
        completions = await asyncio.gather(*(turn(engine, f"a{number}", number) for number in range(20)))
        assert {span.version.step for each in completions for span in each.spans} == {1}
        assert engines[1].asked == []
        await engine.update(weights(2))
        assert engines[0].updates[-1].step == 2
        await asyncio.sleep(6 * FENCE_S)
        assert [version.step for version in engines[1].updates] == [1, 2]
        assert told[1:] == ["engine replica 1 has caught up"]
        await asyncio.gather(*(turn(engine, f"b{number}", number) for number in range(20)))
        assert engines[1].asked
        await engine.close()

    simulate(main, seed=0)


def test_what_the_first_replica_refuses_reaches_none() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(3)]
        engine = ReplicatedEngine(engines)
        engines[0].refusal = EngineError("its rank is 99")
        with pytest.raises(EngineError, match="its rank is 99"):
            await engine.update(weights(1))
        assert [each.updates for each in engines] == [[], [], []]
        completion = await turn(engine, "a")
        assert completion.spans[0].version == START
        await engine.close()

    simulate(main, seed=0)


def test_a_turn_of_a_lost_replica_goes_on_elsewhere() -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(2)]
        engine = ReplicatedEngine(engines)
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


def test_where_no_replica_will_ever_be_back_nobody_waits_for_one() -> None:
    async def main() -> None:
        engines, told = [Engine() for _ in range(2)], list[str]()
        engine = ReplicatedEngine(engines, tell=told.append)
        session = engine.open("a", "solver")
        turns = [asyncio.ensure_future(turn(engine, f"b{number}", number)) for number in range(8)]
        await asyncio.sleep(0.1)
        for each in engines:
            assert each.asked
            each.lose()
            each.refusal = EngineError("its process died 5 times")
        assert {type(error) for error in await asyncio.gather(*turns, return_exceptions=True)} == {EngineLostError}
        async with asyncio.timeout(60):
            with pytest.raises(EngineError, match="died 5 times"):
                await session.generate(request("c", context(1)))
            with pytest.raises(EngineError, match="died 5 times"):
                await engine.update(weights(1))
        assert told[-1] == "engine replica 1 is gone for good: its process died 5 times"
        await engine.close()

    simulate(main, seed=0)
