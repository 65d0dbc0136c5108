"""Fixed shapes: a token is the same bit for bit whoever else is there, and however its conversation came about."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agentrl.core.errors import EngineCapabilityError
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.forward import check_row_independence
from agentrl.learn.publish import Publisher
from tests.contract.engine_kinds import START, ModelZoo, prompt, request, version, write_adapter
from tests.contract.test_engine_to_trainer import fill_adapter, lora_model

if TYPE_CHECKING:
    from agentrl.core.tokens import Completion

TURN = 40


def load(zoo: ModelZoo, architecture: str = "qwen3", **options: Any) -> EmbeddedEngine:
    settings = {"versions": START, "slots": 8, "max_context": 128, "fixed_shapes": True, **options}
    return EmbeddedEngine.load(str(zoo.directory(architecture)), **settings)


async def in_company(engine: EmbeddedEngine, others: int, policy: str = "proposer") -> Completion:
    """The turn asked about, begun among other conversations of many lengths."""
    company = [
        asyncio.ensure_future(
            engine.open(f"o{n}", policy).generate(request(f"o{n}", prompt(3 + n, n), seed=n, max_tokens=5 * n + 1))
        )
        for n in range(others)
    ]
    while engine.stats.passes < 3 and company:
        await asyncio.sleep(0)
    completion = await engine.open("s", "solver").generate(request("r", prompt(20), seed=4, max_tokens=TURN))
    await asyncio.gather(*company)
    return completion


async def cut_and_continued(engine: EmbeddedEngine, after: int) -> Completion:
    """The same turn in two calls of two sessions: what the second is sent, it has to compute again."""
    first = await engine.open("a", "solver").generate(request("a", prompt(20), seed=4, max_tokens=after))
    context = np.concatenate([prompt(20), first.token_ids])
    second = await engine.open("b", "solver").generate(
        request("b", context, seed=4, max_tokens=TURN - after, sampled_before=after)
    )
    tokens = np.concatenate([first.token_ids, second.token_ids])
    logprobs = np.concatenate([first.logprobs, second.logprobs])
    return type(first)(token_ids=tokens, logprobs=logprobs, finish_reason="length", spans=_one_span(first, len(tokens)))


def _one_span(first: Completion, count: int) -> Any:
    return (first.spans[0]._replace(stop=count),)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", pytest.param("qwen3_5", marks=pytest.mark.exhaustive)])
def test_a_turn_is_bit_equal_alone_in_company_and_continued(zoo: ModelZoo, architecture: str) -> None:
    async def outcome(kind: str) -> tuple[list[int], bytes]:
        engine = load(zoo, architecture)
        found = await (cut_and_continued(engine, 13) if kind == "cut" else in_company(engine, int(kind)))
        await engine.close()
        return found.token_ids.tolist(), found.logprobs.tobytes()

    alone = asyncio.run(outcome("0"))
    assert len(alone[0]) == TURN
    for kind in ("5", "12", "cut"):
        assert asyncio.run(outcome(kind)) == alone, kind


def test_the_place_of_an_adapter_changes_no_bit(zoo: ModelZoo, tmp_path: Path) -> None:
    async def outcome(published_before: int) -> tuple[list[int], bytes]:
        engine = load(zoo, versions={"solver": version(0)}, adapter_slots=4, refresh="episode")
        pinned = []
        for step in range(1, published_before + 1):
            other = write_adapter(tmp_path / f"{published_before}-{step}", version(step), zoo.load(), seed=step, rank=4)
            pinned.append(other)
            await engine.serve([other], pinned)
        target = version(published_before + 1)
        mine = write_adapter(tmp_path / f"{published_before}-mine", target, zoo.load(), seed=99, rank=4)
        await engine.serve([mine], pinned)
        completion = await engine.open("s", "solver", pin=target).generate(request("r", prompt(20), max_tokens=TURN))
        await engine.close()
        return completion.token_ids.tolist(), completion.logprobs.tobytes()

    assert asyncio.run(outcome(0)) == asyncio.run(outcome(3))


def test_a_turn_under_an_adapter_of_a_mixture_is_bit_equal_alone_and_in_company(zoo: ModelZoo, tmp_path: Path) -> None:
    model = lora_model(zoo, "qwen3_moe")
    fill_adapter(model, 1)
    weights = Publisher(tmp_path).publish(version(1), model)

    async def outcome(others: int) -> tuple[list[int], bytes]:
        engine = load(zoo, "qwen3_moe", versions={"solver": version(0)}, adapter_slots=2, refresh="episode")
        await engine.serve([weights])
        completion = await in_company(engine, others, policy="solver")
        await engine.close()
        return completion.token_ids.tolist(), completion.logprobs.tobytes()

    alone = asyncio.run(outcome(0))
    assert [asyncio.run(outcome(others)) == alone for others in (3, 5, 7)] == [True] * 3


def test_a_model_whose_rows_see_one_another_is_refused(zoo: ModelZoo) -> None:
    model = zoo.load()
    forward = model.forward

    def leaking(*arguments: Any, **named: Any) -> Any:
        out = forward(*arguments, **named)
        out.logits = out.logits + out.logits.mean() * 1e-6
        return out

    model.forward = leaking
    with pytest.raises(EngineCapabilityError, match="depend on which of the"):
        check_row_independence(model, "a model", slots=4)
