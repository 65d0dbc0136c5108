"""What vLLM says it holds is what it holds, and measuring how fast it computes leaves nothing behind."""

from __future__ import annotations

import math

from tests.contract.engine_kinds import prompt, request
from tests.contract.vllm_suite import MakeVllm

LENGTH = 480
"""Of a context, in whole blocks."""
FOUND = 448
"""Of these as many as vLLM may find again: the last token's block is always computed."""


def test_contexts_that_fit_are_found_again_and_one_more_costs_the_oldest(make_vllm: MakeVllm) -> None:
    async def main() -> None:
        engine = make_vllm()
        room = engine.capabilities.kv_tokens
        assert room is not None
        count = room // LENGTH
        asked = 0

        async def cached(number: int) -> int:
            nonlocal asked
            asked += 1
            session = engine.open(f"s{asked}", "solver")
            completion = await session.generate(request(f"r{asked}", prompt(LENGTH, number), max_tokens=1))
            session.close()
            return completion.cached_tokens

        assert [await cached(number) for number in range(count)] == [0] * count
        assert [await cached(number) for number in range(count)] == [FOUND] * count
        assert await cached(count) == 0
        assert await cached(0) < FOUND
        assert await cached(count) == FOUND
        await engine.close()

    make_vllm.run(main)


def test_measuring_leaves_neither_contexts_nor_an_adapter(make_vllm: MakeVllm) -> None:
    from agentrl.engines.vllm.startup import prefill_rate  # imports vLLM, which these tests have only in its suite

    async def main() -> None:
        engine = make_vllm()
        assert engine.capabilities.prefill_rate == math.inf, "nobody has measured"
        assert 0 < await prefill_rate(make_vllm.llm) < math.inf
        assert not (engine.capabilities.adapters and await make_vllm.llm.list_loras())
        assert engine.busy_seconds() == 0
        room = engine.capabilities.kv_tokens or 0
        for again in range(2):
            for number in range(room // LENGTH):
                session = engine.open(f"{again}/{number}", "solver")
                call = request(f"{again}/{number}", prompt(LENGTH, number), max_tokens=1)
                assert (await session.generate(call)).cached_tokens == again * FOUND
                session.close()
        await engine.close()

    make_vllm.run(main)
