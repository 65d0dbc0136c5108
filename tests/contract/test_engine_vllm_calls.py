"""vLLM's calls: filters, priorities, and the time it works."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.engines.embedded.engine import EmbeddedEngine
from tests.contract.engine_kinds import START, ModelZoo, prompt, request
from tests.contract.test_engine_filters import PENALTIES
from tests.contract.test_engine_vllm import in_flight
from tests.contract.vllm_server import SLOTS, MakeVllm


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_leave_no_kept_sets_unless_they_are_captured(make_vllm: MakeVllm, filters: dict[str, Any]) -> None:
    async def main() -> None:
        engine = make_vllm()
        completion = await engine.open("s", "solver").generate(request("r", prompt(5), **filters))
        assert (len(completion), completion.kept) == (8, None)
        await engine.close()

    make_vllm.run(main)


def test_greedy_and_penalized_calls_agree_with_the_embedded_engine(make_vllm: MakeVllm, zoo: ModelZoo) -> None:
    calls = ({"temperature": 0.0}, {"temperature": 0.0, **PENALTIES})

    async def main() -> None:
        engine = make_vllm()
        other = EmbeddedEngine.load(versions=START, model_path=str(zoo.directory()), max_context=256)
        for number, sampling in enumerate(calls):
            call = request(f"r{number}", prompt(9), max_tokens=20, **sampling)
            one = await engine.open(f"s{number}", "solver").generate(call)
            two = await other.open(f"s{number}", "solver").generate(call)
            assert one.token_ids.tolist() == two.token_ids.tolist()
            assert not one.logprobs.any()
        await engine.close()
        await other.close()

    make_vllm.run(main)


def test_a_session_of_lower_priority_is_served_first(make_vllm: MakeVllm) -> None:
    async def main() -> None:
        engine = make_vllm()
        ended: list[str] = []

        async def call(name: str, priority: int, tokens: int) -> None:
            await engine.open(name, "solver").generate(request(name, prompt(5), max_tokens=tokens, priority=priority))
            ended.append(name)

        places = SLOTS + 1  # that of a canary, too
        running = [asyncio.ensure_future(call(f"r{each}", 0, 150)) for each in range(places)]
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(call(f"w{each}", 2, 60)) for each in range(SLOTS)]
        await asyncio.sleep(0)
        waiting.append(asyncio.ensure_future(call("late", 1, 60)))
        await asyncio.gather(*running, *waiting)
        assert ended.index("late") < min(ended.index(f"w{each}") for each in range(SLOTS))
        await engine.close()

    make_vllm.run(main)


def test_busy_seconds_stand_still_while_no_call_is_in_flight(make_vllm: MakeVllm) -> None:
    async def main() -> None:
        engine = make_vllm()
        await in_flight(engine)
        busy = engine.busy_seconds()
        assert busy > 0
        await asyncio.sleep(0.01)
        assert engine.busy_seconds() == busy
        await in_flight(engine)
        assert engine.busy_seconds() > busy
        await engine.close()

    make_vllm.run(main)
