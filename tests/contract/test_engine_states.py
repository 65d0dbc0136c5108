"""Recurrent layers in the embedded engine: a slot's state is copied at forks, and turns continue from it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import peft
import pytest

from agentrl.core.errors import ModelError
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.slots import SlotKvCache
from agentrl.engines.models import read_meta_model
from agentrl.engines.weights.reading import predict_engine_memory
from tests.contract.engine_kinds import (
    START,
    ModelZoo,
    StepClock,
    load_engine,
    prompt,
    request,
    token_logprobs,
    update_after,
    version,
    write_adapter,
)

pytestmark = pytest.mark.full_start_check

if TYPE_CHECKING:
    from typing import Any

    from agentrl.core.records import Int32Array
    from agentrl.core.tokens import Completion

MOST = 1e-4


def error(model: Any, context: Int32Array, completion: Completion) -> float:
    """The largest difference of the sampled tokens' log-probabilities from a plain forward pass."""
    return float(np.abs(completion.logprobs - token_logprobs(model, context, completion)).max())


async def fork_a_group(zoo: ModelZoo) -> tuple[list[Completion], float]:
    """Conversations that begin together with one prompt, one that begins later, and one that goes on from a turn of
    another: their replies, and the largest error of any."""
    engine, model = load_engine(zoo, "qwen3_5", prefill_tokens=32), zoo.load("qwen3_5")
    context = prompt(75)
    sessions = [engine.open(f"s{i}", "solver") for i in range(5)]
    group = await asyncio.gather(
        *(session.generate(request(f"r{i}", context, seed=i)) for i, session in enumerate(sessions[:4]))
    )
    late = await sessions[4].generate(request("late", context, seed=9))
    branched = np.concatenate([context, group[0].token_ids, prompt(5, 1)])
    branch = await engine.open("branch", "solver").generate(request("branch", branched))
    await engine.close()
    errors = [error(model, context, completion) for completion in (*group, late)]
    return [*group, late, branch], max(*errors, error(model, branched, branch))


def test_forks_continue_from_a_copy_of_the_state(zoo: ModelZoo) -> None:
    completions, worst = asyncio.run(fork_a_group(zoo))
    assert [completion.cached_tokens for completion in completions] == [0, 74, 74, 74, 74, 75 + 8 - 1]
    assert worst <= MOST


def test_a_fork_that_starts_from_no_state_differs(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(SlotKvCache, "set_state", lambda *arguments, **options: None)
    _, worst = asyncio.run(fork_a_group(zoo))
    assert worst > 100 * MOST


@pytest.mark.parametrize("architecture", ["qwen3_5", "mamba2"])
def test_turns_continue_from_the_state_that_fits_their_context(zoo: ModelZoo, architecture: str) -> None:
    """After the last turn, from the prompt of a rewritten one, or from nothing."""

    async def main() -> None:
        engine, model = load_engine(zoo, architecture, slots=2), zoo.load(architecture)
        session, context = engine.open("s", "solver"), prompt(40)
        first = await session.generate(request("a", context))
        longer = np.concatenate([context, first.token_ids, prompt(5, 1)])
        second = await session.generate(request("b", longer))
        rewritten = np.concatenate([longer, prompt(3, 2)])
        third = await session.generate(request("c", rewritten))
        changed = np.concatenate([context[:20], prompt(10, 3)])
        fourth = await session.generate(request("d", changed))
        others = [engine.open(f"o{i}", "solver") for i in range(3)]
        for number, other in enumerate(others):
            await other.generate(request(f"o{number}", prompt(12, 10 + number)))
        evicted = np.concatenate([changed, fourth.token_ids])
        fifth = await session.generate(request("e", evicted))
        turns = [(context, first), (longer, second), (rewritten, third), (changed, fourth), (evicted, fifth)]
        assert [turn.cached_tokens for _, turn in turns] == [0, 40 + 8 - 1, len(longer) - 1, 0, 0]
        assert max(error(model, *turn) for turn in turns) <= MOST
        await engine.close()

    asyncio.run(main())


def test_a_turn_continues_under_new_weights_from_a_recomputed_state(zoo: ModelZoo) -> None:
    async def main() -> None:
        engine = load_engine(zoo, "qwen3_5", clock=StepClock(), versions={"solver": START["solver"]})
        context = prompt(30)
        running = asyncio.ensure_future(engine.open("s", "solver").generate(request("a", context, max_tokens=40)))
        await update_after(engine, 12, zoo.full(version(1), "qwen3_5", seed=1))
        completion = await running
        boundary = completion.spans[1].start
        for seed, part in ((0, slice(0, boundary)), (1, slice(boundary, None))):
            expected = token_logprobs(zoo.load("qwen3_5", seed), context, completion)
            assert np.abs(completion.logprobs - expected)[part].max() <= MOST
        assert np.abs(completion.logprobs - expected)[:boundary].max() > 100 * MOST
        late = await engine.open("t", "solver").generate(request("b", context))
        assert late.cached_tokens == len(context) - 1
        assert error(zoo.load("qwen3_5", 1), context, late) <= MOST
        await engine.close()

    asyncio.run(main())


def test_adapters_on_recurrent_layers_serve_in_one_pass(zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = load_engine(zoo, "qwen3_next", capture_routing=True)
        targets = ("in_proj_qkvz", "out_proj", "q_proj")
        for seed, policy in enumerate(START):
            made = write_adapter(
                tmp_path / policy, version(1, policy), zoo.load("qwen3_next"), seed=seed, targets=targets
            )
            await engine.serve([made])
        context = prompt(20)
        calls = [engine.open(policy, policy).generate(request(policy, context)) for policy in START]
        for policy, completion in zip(START, await asyncio.gather(*calls), strict=True):
            adapted = peft.PeftModel.from_pretrained(zoo.load("qwen3_next"), str(tmp_path / policy))
            assert error(adapted, context, completion) <= MOST
            assert completion.experts is not None
        await engine.close()

    asyncio.run(main())


def test_states_are_in_the_memory_plan(zoo: ModelZoo) -> None:
    """Two of each slot, and keys and values of the attention layers alone."""
    path = zoo.directory("qwen3_next")
    plan = predict_engine_memory(path, dtype="float32", slots=3, max_context=63, adapter_slots=0, max_rank=4)
    layers = read_meta_model(path, max_context=63).config.layer_types
    window, state = (2 * 32 + 64) * 4, 4 * 16 * 16
    kv = 2 * 2 * 32 * layers.count("full_attention")
    assert plan.keys_and_values == 3 * 4 * (64 * kv + 2 * (window + state) * layers.count("linear_attention"))


def test_recurrent_layers_that_take_no_state_are_refused_before_loading(zoo: ModelZoo, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((zoo.directory("recurrent_gemma") / "config.json").read_bytes())
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"recurrent_gemma cannot continue.*engine\.vllm"):
        EmbeddedEngine.load(str(tmp_path), versions=START)
