"""vLLM holds as many tokens as it reports, is refused before it starts where they cannot fit, and is measured for speed
without leaving anything behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EngineCapabilityError, ModelError
from tests.contract.engine_kinds import ModelZoo, prompt, request
from tests.contract.vllm_server import MakeVllm, vllm_settings

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


@pytest.mark.parametrize(
    ("settings", "kv_memory", "words"),
    [
        ({"slots": 8}, 1000, r"lower engine\.max_context"),
        ({"slots": 1 << 30}, 0, r"are free; lower engine\.slots"),
        ({"max_rank": 4096}, 0, "up to rank 512, not 4096"),
    ],
)
def test_what_cannot_be_held_is_refused_before_vllm_starts(
    make_vllm: MakeVllm, zoo: ModelZoo, settings: dict[str, Any], kv_memory: int, words: str
) -> None:
    from agentrl.engines.vllm.startup import start_vllm

    with pytest.raises(EngineCapabilityError, match=words) as raised:
        start_vllm(str(zoo.directory()), vllm_settings(adapter_slots=3, **settings), kv_memory=kv_memory)
    assert "\n" not in str(raised.value)


def test_a_model_of_an_unknown_type_is_refused_before_vllm_starts(make_vllm: MakeVllm, tmp_path: Path) -> None:
    from agentrl.engines.vllm.startup import start_vllm

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    with pytest.raises(ModelError, match="nobody") as raised:
        start_vllm(str(tmp_path), vllm_settings(adapter_slots=0))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("measurable_s", "lengths"), [(0.0, [64]), (math.inf, [64, 256])])
def test_a_slow_engine_is_measured_over_a_short_context(
    make_vllm: MakeVllm, monkeypatch: pytest.MonkeyPatch, measurable_s: float, lengths: list[int]
) -> None:
    from agentrl.engines.vllm import startup

    generate, measured = make_vllm.llm.generate, []

    def generate_counted(prompt: Any, *arguments: Any, **named: Any) -> Any:
        measured.append(len(prompt["prompt_token_ids"]))
        return generate(prompt, *arguments, **named)

    monkeypatch.setattr(make_vllm.llm, "generate", generate_counted)
    monkeypatch.setattr(startup, "_MEASURABLE_S", measurable_s)

    async def main() -> None:
        assert 0 < await startup.prefill_rate(make_vllm.llm, "Qwen3") < math.inf

    make_vllm.run(main)
    assert sorted(set(measured)) == lengths


def test_measuring_leaves_neither_contexts_nor_an_adapter(make_vllm: MakeVllm) -> None:
    from agentrl.engines.vllm.startup import prefill_rate  # imports vLLM, which these tests have only in its suite

    async def main() -> None:
        engine = make_vllm()
        assert engine.capabilities.prefill_rate == math.inf, "nobody has measured"
        assert 0 < await prefill_rate(make_vllm.llm, "Qwen3") < math.inf
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
