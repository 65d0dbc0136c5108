"""The embedded engine against plain forward passes of the same model: sampling, prefix reuse, eviction, failures."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from agentrl.core.errors import EngineCapabilityError, EngineError, ModelError
from agentrl.core.records import PolicyVersion
from agentrl.core.tokens import Tokens
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.forward import likeliest
from tests.contract.engine_kinds import (
    START,
    VOCABULARY,
    ModelZoo,
    StepClock,
    plain_logprobs,
    prompt,
    request,
    update_after,
)
from tests.support.likeliest import check_likeliest

if TYPE_CHECKING:
    from agentrl.core.records import Float32Array, Int32Array
    from agentrl.core.tokens import Completion

HYBRID = pytest.param("qwen3_5", marks=pytest.mark.exhaustive)
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def load(zoo: ModelZoo, architecture: str = "qwen3", **options: Any) -> EmbeddedEngine:
    settings = {"versions": START, "slots": 8, "max_context": 256, **options}
    return EmbeddedEngine.load(str(zoo.directory(architecture)), **settings)


def filtered_logprobs(
    scores: Float32Array, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0
) -> Float32Array:
    """The processed distribution of one token, spelled out: temperature, min-p, top-k, top-p."""
    logits = scores.astype(np.float64) / temperature
    order = np.argsort(-logits, kind="stable")
    kept = order[np.exp(logits[order] - logits.max()) >= min_p][: top_k or len(order)]
    mass = np.exp(logits[kept]) / np.exp(logits[kept]).sum()
    if top_p < 1:
        kept = kept[: int(np.searchsorted(np.cumsum(mass), top_p)) + 1]
    processed = np.full(len(logits), -np.inf)
    processed[kept] = logits[kept] - np.log(np.exp(logits[kept]).sum())
    return processed.astype(np.float32)


def check_logprobs(model: Any, context: Int32Array, completion: Completion, sampling: dict[str, Any]) -> None:
    scores = plain_logprobs(model, np.concatenate([context, completion.token_ids]))[len(context) - 1 :]
    expected = [
        filtered_logprobs(row, **sampling)[token] for row, token in zip(scores, completion.token_ids, strict=True)
    ]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(("architecture", "threads"), [("qwen3", 1), ("wide", 2)])
def test_small_models_are_sampled_by_one_thread(zoo: ModelZoo, architecture: str, threads: int) -> None:
    """Whatever another part of the process sets after the engine has been loaded."""

    async def run() -> int:
        engine, seen = load(zoo, architecture, threads=2), []
        torch.set_num_threads(3 - threads)
        try:
            await engine.on_worker(lambda: seen.append(torch.get_num_threads()))
        finally:
            await engine.close()
        return seen[0]

    before = torch.get_num_threads()
    try:
        assert asyncio.run(run()) == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe", "mixtral", "gpt2", HYBRID])
def test_turns_of_many_conversations_match_plain_forward_passes(zoo: ModelZoo, architecture: str) -> None:
    model = zoo.load(architecture)

    async def conversation(engine: EmbeddedEngine, number: int) -> None:
        session, context = engine.open(f"s{number}", "solver"), prompt(4 + 5 * number, number)
        sampling = FILTERS[number % len(FILTERS)]
        for turn in range(3):
            name = f"{number}-{turn}"
            completion = await session.generate(request(name, context, seed=number, max_tokens=6, **sampling))
            check_logprobs(model, context, completion, sampling)
            context = np.concatenate([context, completion.token_ids, prompt(3 + turn, 50 + number)])

    async def main() -> None:
        engine = load(zoo, architecture, prefill_tokens=48)
        await asyncio.gather(*(conversation(engine, number) for number in range(12)))
        assert engine.stats.cached_tokens > 0
        await engine.close()

    asyncio.run(main())


def test_samples_follow_the_distribution(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo, slots=64)
        context, sampling = prompt(10), {"temperature": 2.0, "top_k": 6}
        sessions = [engine.open(f"s{i}", "solver") for i in range(64)]
        counts = np.zeros(VOCABULARY)
        for repeat in range(32):
            calls = [
                session.generate(request(f"{repeat}-{i}", context, seed=64 * repeat + i, max_tokens=1, **sampling))
                for i, session in enumerate(sessions)
            ]
            for completion in await asyncio.gather(*calls):
                counts[completion.token_ids[0]] += 1
        scores = plain_logprobs(zoo.load(), np.append(context, np.int32(0)))[-1]
        expected = np.exp(filtered_logprobs(scores, **sampling)) * counts.sum()
        assert (counts[expected == 0] == 0).all()
        found = expected > 0
        chi_square = ((counts[found] - expected[found]) ** 2 / expected[found]).sum()
        assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001
        await engine.close()

    asyncio.run(main())


def test_a_next_turn_computes_only_what_is_new(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo)
        session, context = engine.open("s", "solver"), prompt(40)
        first = await session.generate(request("a", context))
        longer = np.concatenate([context, first.token_ids, prompt(5, 1)])
        second = await session.generate(request("b", longer))
        assert (first.cached_tokens, second.cached_tokens) == (0, 40 + 8 - 1)
        rewritten = np.concatenate([longer[:20], prompt(10, 2)])
        third = await session.generate(request("c", rewritten))
        assert third.cached_tokens == 20
        check_logprobs(zoo.load(), rewritten, third, {})
        await engine.close()

    asyncio.run(main())


def test_conversations_that_begin_alike_share_the_beginning(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo)
        begin = prompt(30)
        contexts = [np.concatenate([begin, prompt(4, i)]) for i in range(6)]
        calls = [engine.open(f"s{i}", "solver").generate(request(f"r{i}", c, seed=i)) for i, c in enumerate(contexts)]
        completions = await asyncio.gather(*calls)
        assert sorted(c.cached_tokens for c in completions)[:2] == [0, 30]
        assert engine.stats.prefill_tokens == 33 + 5 * 3  # the last token of each is computed with those of others
        for context, completion in zip(contexts, completions, strict=True):
            check_logprobs(zoo.load(), context, completion, {})
        await engine.close()

    asyncio.run(main())


def test_an_evicted_conversation_is_computed_again(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo, slots=2)
        sessions = [engine.open(f"s{i}", "solver") for i in range(3)]
        contexts = [prompt(20, i) for i in range(3)]
        first = [await s.generate(request(f"a{i}", contexts[i])) for i, s in enumerate(sessions)]
        longer = np.concatenate([contexts[0], first[0].token_ids, prompt(4, 9)])
        again = await sessions[0].generate(request("b", longer))
        assert again.cached_tokens == 0
        check_logprobs(zoo.load(), longer, again, {})
        await engine.close()

    asyncio.run(main())


def test_many_more_conversations_than_slots_all_end(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo, slots=3)
        calls = [
            engine.open(f"s{i}", "solver").generate(request(f"r{i}", prompt(5, i), seed=i, priority=i % 2))
            for i in range(40)
        ]
        completions = await asyncio.gather(*calls)
        assert {len(c.token_ids) for c in completions} == {8}
        assert engine.stats.sampled_tokens == 320
        await engine.close()

    asyncio.run(main())


def test_lower_priority_numbers_are_served_first(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo, slots=1)
        ended: list[str] = []

        async def call(name: str, priority: int) -> None:
            await engine.open(name, "solver").generate(request(name, prompt(5), priority=priority))
            ended.append(name)

        await asyncio.gather(call("late", 2), call("normal", 1), call("soon", 0))
        assert ended == ["soon", "normal", "late"]
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("sessions", "episodes_end"), [(10, True), (5, False)])
def test_a_call_of_low_priority_is_served_beside_sessions_that_never_rest(
    zoo: ModelZoo, sessions: int, episodes_end: bool
) -> None:
    async def main() -> None:
        engine = load(zoo, slots=4)
        served, calls = False, 0

        async def train(number: int) -> None:
            nonlocal calls
            session = engine.open(f"s{number}", "solver")
            while not served and calls < 300:
                calls += 1
                await session.generate(request(f"r{calls}", prompt(5, number), max_tokens=1))
                if episodes_end:
                    session.close()
                    session = engine.open(f"s{number}-{calls}", "solver")

        async def evaluate() -> None:
            nonlocal served
            while calls < 20:
                await asyncio.sleep(0)
            await engine.open("e", "solver").generate(request("e", prompt(5, 99), priority=2))
            served = True

        await asyncio.gather(evaluate(), *(train(number) for number in range(sessions)))
        assert 128 < calls < 300  # its priority lets 2 x 16 calls for each of the slots go ahead
        await engine.close()

    asyncio.run(main())


def test_a_continuation_after_an_interruption_is_bit_equal(zoo: ModelZoo) -> None:
    async def generate(interruptions: int) -> Completion:
        engine = load(zoo)
        running = asyncio.ensure_future(
            engine.open("s", "solver").generate(request("r", prompt(30), seed=4, max_tokens=100))
        )
        for number in range(interruptions):
            while engine.stats.passes < 12 * (number + 1) and not running.done():
                await asyncio.sleep(0)
            engine.interrupt()
            async with engine.between_passes:
                pass
        completion = await running
        await engine.close()
        return completion

    undisturbed, interrupted = asyncio.run(generate(0)), asyncio.run(generate(5))
    assert interrupted.token_ids.tolist() == undisturbed.token_ids.tolist()
    assert interrupted.logprobs.tobytes() == undisturbed.logprobs.tobytes()


def test_deltas_add_up_to_what_was_sampled(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo, clock=StepClock())
        pieces: list[tuple[list[int], list[float], PolicyVersion]] = []
        newer = PolicyVersion("solver", 0, 1)

        def on_delta(name: str, tokens: Tokens) -> None:
            assert name == "r"
            pieces.append((tokens.token_ids.tolist(), tokens.logprobs.tolist(), tokens.spans[0].version))

        running = asyncio.ensure_future(
            engine.open("s", "solver").generate(request("r", prompt(5), max_tokens=30), on_delta)
        )
        await update_after(engine, 10, zoo.full(newer))
        completion = await running
        tokens = [token for piece in pieces for token in piece[0]]
        assert tokens == completion.token_ids.tolist()[: len(tokens)]
        assert [p for piece in pieces for p in piece[1]] == completion.logprobs.tolist()[: len(tokens)]
        assert len(tokens) >= 28
        boundary = completion.spans[0].stop
        assert sum(len(piece[0]) for piece in pieces if piece[2] == START["solver"]) == boundary
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ([], {}, "context"),
        ([5, VOCABULARY], {}, "must lie in"),
        ([-1], {}, "must lie in"),
        ([5], {"temperature": -0.5}, "temperature"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    zoo: ModelZoo, ids: list[int], sampling: dict[str, Any], message: str
) -> None:
    async def main() -> None:
        engine = load(zoo)
        with pytest.raises(EngineError, match=message):
            await engine.open("s", "solver").generate(request("r", ids, **sampling))
        await engine.close()

    asyncio.run(main())


def test_a_session_has_one_call_at_a_time(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo)
        session = engine.open("s", "solver")
        running = asyncio.ensure_future(session.generate(request("a", prompt(5))))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="one call at a time"):
            await session.generate(request("b", prompt(5)))
        session.close()
        assert (await running).finish_reason == "abort"
        with pytest.raises(EngineError, match="session is closed"):
            await session.generate(request("c", prompt(5)))
        await engine.close()

    asyncio.run(main())


def test_a_pass_in_progress_counts_as_busy(zoo: ModelZoo) -> None:
    """The first pass of a large model may take ten seconds, in which the engine is not idle."""

    async def main() -> None:
        engine = load(zoo)
        began, ends = threading.Event(), threading.Event()

        def slow(*arguments: object) -> None:
            began.set()
            ends.wait(60)

        engine.versions.base.model.get_output_embeddings().register_forward_hook(slow)
        call = asyncio.create_task(engine.open("s", "solver").generate(request("r", prompt(5))))
        await asyncio.to_thread(began.wait)
        before = engine.busy_seconds()
        async with asyncio.timeout(60):
            while engine.busy_seconds() <= before:
                await asyncio.sleep(0.01)
        ends.set()
        await call
        await engine.close()

    asyncio.run(main())


def test_an_error_in_a_pass_fails_the_calls_and_the_engine_by_name(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo)

        def broken(*arguments: object) -> None:
            raise RuntimeError("out of memory")

        engine.versions.base.model.get_output_embeddings().register_forward_hook(broken)
        with pytest.raises(EngineError, match="out of memory"):
            await engine.open("s", "solver").generate(request("r", prompt(5)))
        with pytest.raises(EngineError, match="dead"):
            await engine.open("t", "solver").generate(request("t", prompt(5)))
        await engine.close()

    asyncio.run(main())


def test_directories_that_hold_no_usable_model_are_refused(zoo: ModelZoo, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        EmbeddedEngine.load(str(tmp_path), versions=START)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        EmbeddedEngine.load(str(tmp_path), versions=START)
    with pytest.raises(ModelError, match="512 positions"):
        load(zoo, max_context=513)
    without_weights = tmp_path / "bare"
    without_weights.mkdir()
    (without_weights / "config.json").write_bytes((zoo.directory() / "config.json").read_bytes())
    with pytest.raises(ModelError, match="cannot be loaded"):
        EmbeddedEngine.load(str(without_weights), versions=START)


def test_a_model_whose_attention_does_not_fit_slots_is_refused(zoo: ModelZoo) -> None:
    with pytest.raises(ModelError, match=r"cannot sample from .bloom.: its layers add positions"):
        load(zoo, "bloom")


def test_what_the_engine_cannot_give_is_refused_at_start(zoo: ModelZoo) -> None:
    with pytest.raises(EngineCapabilityError, match="router"):
        load(zoo, capture_routing=True)
    with pytest.raises(EngineCapabilityError, match="lazy"):
        load(zoo, refresh="lazy", adapter_slots=0)


def test_scores_match_a_plain_forward_pass(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo)
        context = prompt(25)
        scored = await engine.score("solver", context, temperature=0.8)
        plain = plain_logprobs(zoo.load(), context, 0.8)
        expected = np.take_along_axis(plain, context[1:, None].astype(np.int64), 1)[:, 0]
        np.testing.assert_allclose(scored.logprobs[1:], expected, atol=1e-5)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("top", [1, 5, VOCABULARY, VOCABULARY + 7])
def test_likeliest_tokens_match_a_plain_forward_pass(zoo: ModelZoo, top: int) -> None:
    async def main() -> None:
        engine = load(zoo)
        context = prompt(25)
        scored = await engine.score("solver", context, top=top)
        plain = plain_logprobs(zoo.load(), context)
        assert scored.top_ids.shape[1] == min(top, VOCABULARY)
        for expected, ids, values in zip(plain, scored.top_ids[1:], scored.top_logprobs[1:], strict=True):
            check_likeliest(expected, ids.tolist(), values.tolist(), atol=1e-5)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("top", range(8))
def test_ties_among_the_likeliest_tokens_are_broken_by_id(top: int) -> None:
    """A whole row of equal values, the last place shared, and the first."""
    logprobs = torch.tensor([[0.0] * 7, [-2.0, -1, -2, -1, -3, -2, -1], [-1.0, -2, -3, -3, -3, -3, -1]])
    ids, values = likeliest(logprobs, top)
    expected = np.argsort(-logprobs.numpy(), axis=1, kind="stable")[:, :top]
    assert ids.tolist() == expected.tolist()
    assert values.tolist() == logprobs.gather(1, ids).tolist()


def test_loading_leaves_the_global_random_state_alone(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load(zoo)
        first = zoo.full(PolicyVersion("solver", 0, 1))  # draws weights, so before the state is read
        state = torch.random.get_rng_state()
        await engine.serve([first], [first])
        await engine.open("s", "solver").generate(request("r", prompt(5)))
        assert torch.equal(state, torch.random.get_rng_state())
        await engine.close()

    asyncio.run(main())
