"""Reward models: scores in pieces and in company equal the model's own; what has no trained, causal head is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from agentrl.core.errors import ModelError, Unscorable
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import Message, ScoreRequest, ToolCall
from agentrl.core.tokens import Completion
from agentrl.engines.reward_model import RewardModelEngine
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.rollout.scoring.reward_model import RewardModelScorer
from tests.sim.test_judges import scored
from tests.support.reward_models import BASE, save_reward_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

CAUSAL = [
    ("Qwen3ForTokenClassification", 2, {}),
    ("Qwen3ForSequenceClassification", 1, {}),
    ("LlamaForSequenceClassification", 2, {}),
    ("MistralForSequenceClassification", 1, {"sliding_window": 16}),
    ("GPT2ForSequenceClassification", 1, {}),
    ("GPT2ForTokenClassification", 2, {}),
]


def load(path: Path, **changes: Any) -> RewardModelEngine:
    arguments = {"device": "cpu", "cache_tokens": 4096, "fixed_shapes": False, "threads": 1}
    return RewardModelEngine.load(versions={}, model_path=str(path), **{**arguments, **changes})


def own_scores(path: Path, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Scores by a plain forward pass: at every token, or, of a sequence classifier, at the last one."""
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    model: Any = getattr(transformers, name).from_pretrained(path).eval()
    with torch.inference_mode():
        logits = model(torch.from_numpy(token_ids[None].astype(np.int64))).logits
    values = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
    found: NDArray[np.float32] = values.reshape(-1).numpy()
    return found


def contexts(count: int = 5, length: int = 40) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 430, size=length).astype(np.int32) for _ in range(count)]


async def score(engine: RewardModelEngine, token_ids: NDArray[np.int32]) -> Completion:
    request = GenerateRequest(request_id="r", token_ids=token_ids, sampling=SamplingParams(max_tokens=0), seed=0)
    return await engine.open("e0", "prm").generate(request)


async def together(engine: RewardModelEngine, rows: Sequence[NDArray[np.int32]]) -> list[Completion]:
    return await asyncio.gather(*(score(engine, row) for row in rows))


@pytest.mark.parametrize(("architecture", "labels", "shape"), CAUSAL)
def test_scores_in_pieces_and_in_company_are_those_of_the_model(
    tmp_path: Path, architecture: str, labels: int, shape: dict[str, Any]
) -> None:
    path = save_reward_model(tmp_path / "model", architecture, labels=labels, **shape)
    engine, rows = load(path), contexts()

    async def main() -> list[Completion]:
        for length in (10, 17):
            await together(engine, [row[: length + number] for number, row in enumerate(rows)])
        return await together(engine, rows)

    completions = asyncio.run(main())
    assert [completion.cached_tokens for completion in completions] == [17, 18, 19, 20, 21]
    for row, completion in zip(rows, completions, strict=True):
        assert completion.values is not None
        own = own_scores(path, row)
        np.testing.assert_allclose(completion.values[-len(own) :], own, atol=2e-5)
    assert np.std([own_scores(path, row)[-1] for row in rows]) > 0.01, "the model does not tell contexts apart"


def test_a_context_that_left_is_computed_from_its_start_and_scored_alike(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path / "model")
    engine, rows = load(path, cache_tokens=50), contexts(3)

    async def main() -> list[list[Completion]]:
        return [[await score(engine, row) for row in rows] for _ in range(2)]

    first, second = asyncio.run(main())
    assert [completion.cached_tokens for completion in (*first, *second)] == [0] * 6
    kept = asyncio.run(score(engine, rows[-1]))
    assert kept.cached_tokens == 40
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a.values, b.values, atol=1e-6)


def test_with_fixed_shapes_a_score_depends_on_nothing_else(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path / "model")
    rows = contexts()
    alone = [asyncio.run(score(load(path, fixed_shapes=True), row)) for row in rows]
    engine = load(path, fixed_shapes=True)

    async def main() -> list[Completion]:
        await together(engine, [row[:20] for row in rows])
        return await together(engine, rows)

    for one, many in zip(alone, asyncio.run(main()), strict=True):
        assert one.values is not None
        assert many.values is not None
        assert one.values.tobytes() == many.values.tobytes()


def test_a_cancelled_call_does_not_disturb_the_others(tmp_path: Path) -> None:
    engine, rows = load(save_reward_model(tmp_path / "model")), contexts()

    async def main() -> Completion:
        cancelled, kept = (asyncio.create_task(score(engine, row)) for row in rows[:2])
        await asyncio.sleep(0)
        cancelled.cancel()
        completion = await kept
        await engine.close()
        return completion

    assert asyncio.run(main()).values is not None


def spoil(path: Path, *, without: str = "", **config: Any) -> Path:
    if without:
        tensors = load_file(path / "model.safetensors")
        save_file({name: value for name, value in tensors.items() if without not in name}, path / "model.safetensors")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


@pytest.mark.parametrize(
    ("architecture", "labels", "spoiled", "message"),
    [
        ("Qwen3ForTokenClassification", 2, {"without": "score"}, r"lacks the head .*'score\.bias', 'score\.weight'"),
        ("Qwen3ForTokenClassification", 2, {"without": "layers.0.mlp"}, "3 weights are missing"),
        ("Qwen3ForTokenClassification", 3, {}, "this one has 3 outputs"),
        ("BertForSequenceClassification", 1, {}, "it is no causal model"),
        ("Qwen3ForSequenceClassification", 1, {"auto_map": {"AutoModel": "code.Model"}}, "agentrl never runs"),
        ("Qwen3ForSequenceClassification", 1, {"architectures": ["Qwen3ForCausalLM"]}, "ForSequenceClassification"),
    ],
)
def test_what_is_no_trained_reward_model_is_refused(
    tmp_path: Path, architecture: str, labels: int, spoiled: dict[str, Any], message: str
) -> None:
    path = spoil(save_reward_model(tmp_path / "model", architecture, labels=labels), **spoiled)
    with pytest.raises(ModelError, match=message):
        load(path)


# --- the scorer -------------------------------------------------------------------------------------------------------


def scorer(path: Path = BASE, engine: Any = None, **settings: Any) -> RewardModelScorer:
    chat_format = TemplateChatFormat.load(path)
    return RewardModelScorer(name="prm", engine=engine, model="prm", chat_format=chat_format, **settings)


def conversation(*contents: str) -> list[Message]:
    roles = ("user", "assistant") * len(contents)
    return [Message(role=role, content=content) for role, content in zip(roles, contents, strict=False)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("per", "contents", "steps"),
    [
        ("turn", ("a", "one\n\ntwo\n\n"), ["one\n\n", "two\n\n"]),
        ("turn", ("a", "one\n\ntwo"), ["one\n\n", "two\n\n"]),
        ("turn", ("a", "\n\none\n\n\n\n"), ["one\n\n", "\n\n"]),
        ("turn", ("a\n\nb", "one\n\ntwo", "c", "three"), ["three\n\n"]),
        ("episode", ("a\n\nb", "one\n\ntwo", "c", "three"), ["one\n\n", "two\n\n", "three\n\n"]),
    ],
)
def test_a_step_is_scored_at_the_token_that_ends_it(per: Any, contents: tuple[str, ...], steps: list[str]) -> None:
    judge = scorer(per=per, steps="\n\n")
    token_ids, ends = judge.positions(conversation(*contents))
    decode = TemplateChatFormat.load(BASE).decode
    assert [decode(token_ids[: end + 1])[-len(step) :] for end, step in zip(ends, steps, strict=True)] == steps


def test_a_turn_without_text_has_no_steps_and_no_score() -> None:
    call = ToolCall(id="c", name="calculate", arguments={"a": 1})
    messages = [*conversation("a"), Message(role="assistant", content="", tool_calls=(call,))]
    assert scorer(steps="\n\n").positions(messages)[1] == []
    token_ids, ends = scorer().positions(messages)
    assert ends == [len(token_ids) - 1]


@pytest.mark.parametrize(("combine", "pick"), [("mean", np.mean), ("min", np.min), ("last", lambda each: each[-1])])
def test_a_turns_score_is_made_of_its_steps(tmp_path: Path, combine: Any, pick: Any) -> None:
    path = save_reward_model(tmp_path / "model")
    judge = scorer(path, load(path), steps="\n\n", combine=combine)
    what = scored("a", "one\n\ntwo\n\nthree")
    token_ids, ends = judge.positions(what.messages)
    answer = asyncio.run(judge.judge(ScoreRequest(call_id="c", where="e0", seed=0, scored=what), 0))
    own = own_scores(path, np.array(token_ids, np.int32))[ends]
    assert answer.value == pytest.approx(pick(own), abs=1e-5)
    assert answer.note == ", ".join(f"{value:.4g}" for value in own)
    assert answer.tokens == len(token_ids)


def test_a_growing_conversation_costs_its_own_tokens_only(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path / "model")
    judge = scorer(path, load(path), steps="\n\n")

    async def main() -> tuple[int, int]:
        computed, contents = 0, list[str]()
        for number in range(8):
            contents += [f"question {number}", f"first {number}\n\nthen {number}"]
            request = ScoreRequest(call_id="c", where="e0", seed=0, scored=scored(*contents))
            computed += (await judge.judge(request, 0)).tokens
        return computed, len(judge.positions(conversation(*contents))[0])

    computed, whole = asyncio.run(main())
    assert computed == whole


def test_a_conversation_longer_than_the_context_is_unscorable(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path / "model", max_position_embeddings=32)
    judge = scorer(path, load(path))
    request = ScoreRequest(call_id="c", where="e0", seed=0, scored=scored("a", "b " * 100))
    with pytest.raises(Unscorable, match="more than the reward model's context holds"):
        asyncio.run(judge.judge(request, 0))
