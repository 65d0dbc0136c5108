"""The check at the start finds lengths at which a model changes its computation, under any name and at multiples.

Each planted architecture computes a row alone in one way, and in another way in some micro-batches: beyond a number in
its configuration, or once weights are trained that begin as zeros or ones. Families that are computed right are
accepted as they were.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DogeConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from agentrl.core.errors import ModelError
from agentrl.core.tokens import TrainingSample
from agentrl.engines.embedded.forward import check_slots_match_forward, prepare_for_sampling
from agentrl.engines.models import check_cost, check_lengths, configured_integers, longest_context
from agentrl.learn.forward import token_logprobs
from agentrl.learn.forward_check import why_unshared
from agentrl.learn.models import load_models
from agentrl.learn.packing import pack
from tests.learn_cases import run_config
from tests.model_families import (
    FAMILIES,
    MAX_CONTEXT,
    VOCABULARY,
    WRAPPED,
    family_config,
    forward_as,
    logprobs_of,
    long_run,
    plain_logprobs,
    sharp_model,
    trained_logprobs,
    ways,
    write_family,
)

pytestmark = pytest.mark.full_start_check

Change = Callable[["PlantedAttention", Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class PlantedAttention(LlamaAttention):
    """Llama's attention with changed queries, keys and values, [rows, heads, tokens, width]."""

    change: Change

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = self.head_dim
        self.scalar = nn.Parameter(torch.zeros(()))
        self.gains = nn.Parameter(torch.ones(4))
        self.sink = nn.Parameter(torch.zeros(width))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **other: Any,
    ) -> Any:
        """Compute the layer's output, and its weights."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        query, key, value = type(self).change(self, query, key, value)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **other)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


def _index(tokens: Tensor) -> Tensor:
    """The place of each token in its tensor, [tokens, 1], which a model may take for its position."""
    return torch.arange(tokens.shape[2], dtype=torch.float32)[:, None]


def _beyond(limit: Callable[[Any], float]) -> Change:
    """Other queries in tensors of more tokens than `limit` of the configuration."""

    def change(module: PlantedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query * (3.0 if query.shape[2] > limit(module.config) else 1.0), key, value

    return change


def _selected(module: PlantedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Doge's kind: only the keys with the highest scores count, padding and other rows included."""
    count = cast("Any", module.config).keys_that_stay
    if key.shape[2] > count:
        scores = value.sum(-1, keepdim=True)
        chosen = torch.zeros_like(scores).scatter(2, scores.topk(count, dim=2).indices, 1.0)
        value = value * chosen
    return query, key, value


def _floor(module: PlantedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Llama 4's kind: the temperature of a layer without positions grows by steps, here by the place in the tensor."""
    floor = cast("Any", module.config).tuning["floor"]
    return query * (1 + 2 * torch.log1p((_index(query) / floor).floor())), key, value


def _pieces(module: PlantedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of every other piece of the tensor count less."""
    odd = (_index(key) / cast("Any", module.config).layout[1][0]).floor() % 2
    return query, key * (1 - 0.8 * odd), value


def _capacity(module: PlantedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a whole micro-batch, so many tokens are computed: more than a context has."""
    capacity = cast("Any", module.config).capacity
    scores = value.sum((1, 3)).flatten()
    if len(scores) > capacity:
        least = scores.topk(capacity).values[-1]
        value = value * (value.sum((1, 3)) >= least)[:, None, :, None]
    return query, key, value


def _length(module: PlantedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entropy of the attention is held beyond the trained length, by the length of the tensor."""
    trained = cast("Any", module.config).scaling["entropy"]["trained"]
    return query * max(1.0, np.log(query.shape[2] / trained) + 1), key, value


def _mean(module: PlantedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A share of the mean value of all rows, which is 0 before training."""
    return query, key, value + module.scalar * value.mean((0, 2), keepdim=True)


def _gains(module: PlantedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A gain for each quarter of the tensor, which is 1 before training."""
    quarter = (_index(value)[:, 0] * 4 / value.shape[2]).long()
    return query, key, value * module.gains[quarter][:, None]


def _sink(module: PlantedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first token of the tensor has a value of its own, which is 0 before training."""
    return query, key, value + module.sink * (_index(value) == 0)


PLANTED: dict[str, tuple[dict[str, Any], Change]] = {
    "selected keys": ({"keys_that_stay": 24}, _selected),
    "temperature floor": ({"tuning": {"floor": 40}}, _floor),
    "rope switch": ({"rope_extra": {"before": 32}}, _beyond(lambda config: config.rope_extra["before"])),
    "two levels deep": ({"a": {"b": {"limit": 48}}}, _beyond(lambda config: config.a["b"]["limit"])),
    "twice": ({"stride": 21}, _beyond(lambda config: 2 * config.stride)),
    "four times": ({"stride": 14}, _beyond(lambda config: 4 * config.stride)),
    "whole float": ({"reach": 53.0}, _beyond(lambda config: config.reach)),
    "in a list": ({"layout": [[0], [20, 1]]}, _pieces),
    "capacity of a micro-batch": ({"capacity": 900}, _capacity),
    "entropy": ({"scaling": {"entropy": {"trained": 37}}}, _length),
    "scalar of zero": ({}, _mean),
    "gains of one": ({}, _gains),
    "sink of zero": ({}, _sink),
}


def planted_model(kind: str, *, initial: float = 0.2, context: int = MAX_CONTEXT) -> LlamaForCausalLM:
    """A small random model whose attention has a planted change; without `kind`, none."""
    settings, change = PLANTED.get(kind, ({}, lambda module, query, key, value: (query, key, value)))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=60,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        initializer_range=initial,
        **settings,
    )
    attention = type("Planted", (PlantedAttention,), {"change": staticmethod(change)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            before, layer.self_attn = layer.self_attn, attention(config, layer.self_attn.layer_idx)
            layer.self_attn.load_state_dict(before.state_dict(), strict=False)
    model.set_attn_implementation("sdpa")
    return model.train(False)


def some_rows(seed: int, *, count: int, longest: int = MAX_CONTEXT) -> list[TrainingSample]:
    """Rows of random lengths, every token but the first trained."""
    random = np.random.default_rng(seed)
    rows = []
    for length in random.integers(4, longest + 1, count):
        zeros = np.zeros(length, np.float32)
        rows.append(
            TrainingSample(
                token_ids=random.integers(3, VOCABULARY, length).astype(np.int32),
                loss_mask=np.arange(length) > 0,
                logprobs=zeros,
                advantages=zeros,
            )
        )
    return rows


@torch.no_grad()
def largest_error(model: LlamaForCausalLM, *, tree: bool) -> float:
    """Of a log-probability in a micro-batch of few or of many rows, from that of its row alone; of weights that are no
    longer initial."""
    for layer in model.model.layers:
        layer.self_attn.scalar.fill_(0.7)
        layer.self_attn.gains.copy_(torch.tensor([0.5, 1.0, 1.5, 2.0]))
        layer.self_attn.sink.fill_(0.6)
    worst = 0.0
    for count in (3, 40):
        rows = some_rows(count, count=count)
        with forward_as(model, tree=False):
            alone = [each.tolist() for each in logprobs_of(model, rows)]
        model.set_attn_implementation("agentrl_tree" if tree else "sdpa")
        for batch in pack(rows, max_tokens=1 << 20, share=tree):
            found = token_logprobs(model, batch, shared=tree).logprob.tolist()
            pairs = zip(batch.sample, batch.position, found, strict=True)
            worst = max(worst, *(abs(value - alone[row][at - 1]) for row, at, value in pairs))
    return worst


@cache
def effect(kind: str) -> float:
    """Of the change, in micro-batches of rows packed as trees."""
    return largest_error(planted_model(kind), tree=True)


@pytest.mark.parametrize("initial", [pytest.param(0.2, marks=pytest.mark.exhaustive), 0.02])
@pytest.mark.parametrize("kind", PLANTED)
def test_planted(kind: str, initial: float) -> None:
    """The change is refused, or the model is computed in a way in which it changes nothing."""
    model = planted_model(kind, initial=initial)
    assert effect(kind) > 0.1
    try:
        reason = why_unshared(model, MAX_CONTEXT)
    except ModelError as error:
        assert "differ from the model's own" in str(error)  # noqa: PT017
        return
    assert reason
    assert largest_error(model, tree=False) < 1e-4


@pytest.mark.parametrize("initial", [0.2, 0.02])
def test_sound_without_a_change(initial: float) -> None:
    model = planted_model("", initial=initial)
    assert why_unshared(model, MAX_CONTEXT) == ""
    assert largest_error(model, tree=True) < 1e-4


_SEEN = json.loads((Path(__file__).parents[2] / "docs/families.json").read_text(encoding="utf-8"))["families"]
_USUAL = ("Qwen3", "Llama, YaRN", "Gemma 2", "Phi-3, LongRoPE", "Llama 4", "gpt-oss", "OLMoE", "Falcon", "Gemma 4")


@pytest.mark.parametrize(
    "name",
    [
        name if name in _USUAL else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in (*FAMILIES, *WRAPPED)
        if not _SEEN[name]["refused"]
    ],
)
def test_sound(name: str, tmp_path: Path) -> None:
    """A family is computed in the ways in which it was, and its window, if it has one, is found."""
    policy = load_models(long_run(write_family(name, tmp_path)).trainer_plan, torch.device("cpu"))["policy"]
    assert list(ways(policy)) == _SEEN[name]["ways"]


@pytest.mark.parametrize("kind", ["", "temperature floor", "two levels deep", "four times", "in a list", "entropy"])
def test_slots_of_the_embedded_engine(kind: str) -> None:
    """The same changes, where a context is computed in pieces over slots; without one, it is accepted."""
    model = prepare_for_sampling(planted_model(kind), "cpu")
    if not kind:
        check_slots_match_forward(model, "here", max_context=MAX_CONTEXT)
        return
    with pytest.raises(ModelError, match="different logits"):
        check_slots_match_forward(model, "here", max_context=MAX_CONTEXT)


def test_positions_of_a_batch_that_are_counted_from_its_longest_context_are_refused() -> None:
    """Llama 4's temperature counts positions by the cache's length, which several slots share."""
    config = FAMILIES["Llama 4"][1]
    assert config["floor_scale"] == 16
    model = prepare_for_sampling(sharp_model(family_config("Llama 4", max_position_embeddings=64)), "cpu")
    check_slots_match_forward(model, "here", max_context=15)
    with pytest.raises(ModelError, match="different logits"):
        check_slots_match_forward(model, "here", max_context=MAX_CONTEXT)


@pytest.mark.parametrize("max_context", [63, 65])
def test_doge_beyond_the_keys_that_it_keeps_is_refused_by_name(max_context: int, tmp_path: Path) -> None:
    config = DogeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        keep_window_size=64,
    )
    sharp_model(config).save_pretrained(tmp_path)
    run = run_config(tmp_path)
    run = run.model_copy(update={"engine": run.engine.model_copy(update={"max_context": max_context})})
    assert longest_context(tmp_path, embedded=False) == 64
    if max_context > 64:
        with pytest.raises(ModelError, match=r"doge.*keep_window_size = 64.*engine\.max_context"):
            load_models(run.trainer_plan, torch.device("cpu"))
        return
    policy = load_models(run.trainer_plan, torch.device("cpu"))["policy"]
    rows = some_rows(1, count=9, longest=max_context)
    expected = np.concatenate(plain_logprobs(tmp_path, rows))
    np.testing.assert_allclose(np.concatenate(trained_logprobs(policy, rows, way="padded")), expected, atol=1e-4)


def test_every_integer_is_a_candidate() -> None:
    config = LlamaConfig(deep={"er": [1, {"limit": 300.0}]}, flag=True, share=0.5, far=math.inf)
    found = configured_integers(config)
    assert found["deep.er[1].limit"] == 300
    assert not {"flag", "share", "far"} & found.keys()
    for multiple in (1, 2, 4, 8):
        lengths = check_lengths(config, 4096, 1 << 20)
        assert any(250 * multiple < length < 300 * multiple for length in lengths)
        assert max(lengths) > 300 * multiple


@pytest.mark.parametrize("max_tokens", [0, 300, 3000, 1 << 20])
def test_the_check_takes_bounded_time_but_for_lengths_with_a_name(max_tokens: int) -> None:
    """A window is always checked on both sides, which costs less than a step with such contexts."""
    config = LlamaConfig(sliding_window=1000, max_position_embeddings=1 << 17)
    lengths = check_lengths(config, 1 << 15, max_tokens)
    assert {999, 1005} <= set(lengths)
    others = [length for length in lengths if length not in (999, 1005)]
    assert check_cost(others) <= max_tokens
    assert lengths == sorted(set(lengths))
    assert (1 << 15 in lengths) is (max_tokens == 1 << 20)
