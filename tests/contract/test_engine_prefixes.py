"""The embedded engine computes each distinct position once under each version, and samples as if it shared nothing."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agentrl.engines.embedded.engine import EmbeddedEngine
from tests.contract.engine_kinds import (
    START,
    ModelZoo,
    StepClock,
    plain_logprobs,
    prompt,
    request,
    update_after,
    version,
)
from tests.support.computed_tokens import ComputedTokens, counted, unshared

if TYPE_CHECKING:
    from agentrl.core.records import Int32Array
    from agentrl.core.tokens import Completion

GROUPS, EPISODES, TURNS = 4, 5, 3
Turns = list[tuple["Int32Array", "Completion"]]


def load(zoo: ModelZoo, architecture: str, **options: Any) -> EmbeddedEngine:
    settings = {"versions": START, "slots": 24, "max_context": 256, **options}
    return EmbeddedEngine.load(str(zoo.directory(architecture)), **settings)


async def episode(engine: EmbeddedEngine, group: int, number: int) -> Turns:
    """A conversation whose prompt opens like all others', and whose tools give the group the same results."""
    session = engine.open(f"s{group}-{number}", "solver")
    context = np.concatenate([prompt(30), prompt(5 + 4 * group, 10 + group)])
    turns = []
    for turn in range(TURNS):
        # Half of a group samples greedily, so those episodes stay equal for as long as they last.
        sampling = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": 100 * group + number}
        completion = await session.generate(request(f"{group}-{number}-{turn}", context, max_tokens=6, **sampling))
        turns.append((context, completion))
        context = np.concatenate([context, completion.token_ids, prompt(7, 50 + turn)])
    session.close()
    return turns


async def play(engine: EmbeddedEngine) -> list[Turns]:
    episodes = await asyncio.gather(*(episode(engine, g, n) for g in range(GROUPS) for n in range(EPISODES)))
    await engine.close()
    return episodes


def measure(zoo: ModelZoo, architecture: str, *, shares: bool, **options: Any) -> tuple[list[Turns], ComputedTokens]:
    with counted() as counts, nullcontext() if shares else unshared():
        episodes = asyncio.run(play(load(zoo, architecture, **options)))
    return episodes, counts


def error(model: Any, context: Int32Array, completion: Completion, temperature: float) -> float:
    """The largest difference of the logprobs from those of a plain forward pass."""
    tokens = np.concatenate([context, completion.token_ids])
    if temperature == 0:
        return float(np.abs(completion.logprobs).max())
    scores = plain_logprobs(model, tokens)[len(context) - 1 :] / temperature
    scores = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    own = scores[np.arange(len(completion.token_ids)), completion.token_ids]
    return float(np.abs(completion.logprobs - own).max())


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "qwen3_moe"])
def test_each_distinct_position_is_computed_once(zoo: ModelZoo, architecture: str) -> None:
    model = zoo.load(architecture)
    episodes, counts = measure(zoo, architecture, shares=True)
    assert counts.over_distinct <= 1.1
    for number, turns in enumerate(episodes):
        temperature = 0.0 if number % EPISODES % 2 else 0.8
        assert max(error(model, *turn, temperature) for turn in turns) <= 1e-4
    alone, control = measure(zoo, architecture, shares=False)
    assert control.over_distinct > 2 * counts.over_distinct
    for turns, expected in zip(episodes, alone, strict=True):
        assert [t.token_ids.tolist() for _, t in turns] == [t.token_ids.tolist() for _, t in expected]
        for (_, one), (_, other) in zip(turns, expected, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_prefixes_are_shared_within_a_small_budget_and_few_slots(zoo: ModelZoo) -> None:
    """Contexts that take several steps are waited for, and slots hold what they can."""
    model = zoo.load("qwen3")
    episodes, counts = measure(zoo, "qwen3", shares=True, prefill_tokens=16, slots=7)
    for number, turns in enumerate(episodes):
        assert max(error(model, *turn, 0.0 if number % EPISODES % 2 else 0.8) for turn in turns) <= 1e-4
    _, control = measure(zoo, "qwen3", shares=False, prefill_tokens=16, slots=7)
    assert counts.over_distinct < 0.6 * control.over_distinct


def test_the_experts_of_shared_positions_are_those_that_computed_them(zoo: ModelZoo) -> None:
    episodes, _ = measure(zoo, "mixtral", shares=True, capture_routing=True)
    alone, _ = measure(zoo, "mixtral", shares=False, capture_routing=True)
    for turns, expected in zip(episodes, alone, strict=True):
        for (_, one), (_, other) in zip(turns, expected, strict=True):
            assert one.experts.start == other.experts.start
            assert np.array_equal(one.experts.rows, other.experts.rows)


def test_an_aborted_call_leaves_equal_ones_unchanged(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine, context = load(zoo, "qwen3"), prompt(20)
        calls = [
            asyncio.ensure_future(
                engine.open(f"s{i}", "solver").generate(request(f"r{i}", context, max_tokens=40, temperature=0.0))
            )
            for i in range(3)
        ]
        while engine.stats.passes < 10:
            await asyncio.sleep(0)
        engine.abort("r0")
        first, *others = await asyncio.gather(*calls)
        assert first.finish_reason == "abort"
        expected = await engine.open("t", "solver").generate(request("t", context, max_tokens=40, temperature=0.0))
        assert {tuple(other.token_ids.tolist()) for other in others} == {tuple(expected.token_ids.tolist())}
        assert expected.cached_tokens == 19
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("keep_kv", [True, False])
def test_nothing_computed_under_older_weights_is_shared(zoo: ModelZoo, keep_kv: bool) -> None:
    """Equal calls in flight, some over keys and values of older weights, and one that begins under the new weights."""

    async def main() -> None:
        engine, context = load(zoo, "qwen3", keep_kv=keep_kv, clock=StepClock()), prompt(20)
        calls = [
            asyncio.ensure_future(engine.open(f"s{i}", "solver").generate(request(f"r{i}", context, max_tokens=40)))
            for i in range(3)
        ]
        await update_after(engine, 30, zoo.full(version(1), seed=1))
        completions = await asyncio.gather(*calls)
        assert len({completion.logprobs.tobytes() for completion in completions}) == 1
        boundary = completions[0].spans[0].stop
        late_context = np.concatenate([context, completions[0].token_ids[:-1]])
        with counted() as counts:
            late = await engine.open("t", "solver").generate(request("t", late_context, max_tokens=1))
        shared = 0 if keep_kv else len(late_context) - 1
        assert late.cached_tokens == shared
        assert counts.computed == len(late_context) - shared
        expected = plain_logprobs(zoo.load("qwen3", 1), np.concatenate([late_context, late.token_ids]))[-1]
        np.testing.assert_allclose(late.logprobs, expected[late.token_ids], atol=1e-4)
        assert 0 < boundary < 40
        await engine.close()

    asyncio.run(main())
