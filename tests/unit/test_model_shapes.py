"""Which contexts a model directory can serve and train, and what its configuration says of it, weights apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import Gemma3Config, MistralConfig

from agentrl.core.errors import ModelError
from agentrl.core.tokens import TrainingSample
from agentrl.engines.embedded.forward import check_slots_match_forward, load_model
from agentrl.engines.models import kv_bytes_per_token, read_meta_model
from agentrl.learn.forward import ATTENTION, token_logprobs
from agentrl.learn.forward_check import why_unshared
from agentrl.learn.models import load_models
from agentrl.learn.packing import pack
from tests.learn_cases import run_config

pytestmark = pytest.mark.full_start_check

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 16,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture(params=["flat", "nested"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Attends to 16 of 64 positions; the decoder's shape on top, or in a part of the configuration."""
    nested = Gemma3Config(text_config=_SHAPE, vision_config=_VISION)
    config = MistralConfig(**_SHAPE) if request.param == "flat" else nested
    config.save_pretrained(tmp_path)
    return tmp_path


def test_weights_beside_the_models_are_refused_where_vllm_would_load_them(model: Path) -> None:
    for name in ("model.safetensors", "consolidated.safetensors"):
        (model / name).touch()
    with pytest.raises(ModelError, match=r"consolidated\.safetensors"):
        read_meta_model(model, max_context=64)
    (model / "model.safetensors.index.json").touch()
    read_meta_model(model, max_context=64)


def test_a_window_bounds_the_embedded_engine_only_and_positions_bound_all(model: Path) -> None:
    config = read_meta_model(model, max_context=64).config
    assert config.get_text_config().vocab_size == 97
    assert kv_bytes_per_token(config) == 2 * 1 * 16 * 2 * 4
    with pytest.raises(ModelError, match="window"):
        load_model(str(model), max_context=17, dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match="max_context"):
        read_meta_model(model, max_context=65)


# --- lengths at which a model computes otherwise ----------------------------------------------------------------------

_TINY = {
    **_SHAPE,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + 2 * n for n in range(8)]}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {**_TINY, "sliding_window": None, "rope_parameters": {**_ROPE, "rope_type": kind, **more}}


_MODELS: dict[str, Any] = {
    "phi3 longrope": lambda: transformers.Phi3Config(**{**_rope("longrope", **_LONG), **_original(32)}),
    "llama dynamic": lambda: transformers.LlamaConfig(**{**_rope("dynamic"), "max_position_embeddings": 32}),
    "llama longrope": lambda: transformers.LlamaConfig(**_rope("longrope", **_LONG)),
    "llama linear": lambda: transformers.LlamaConfig(**_rope("linear")),
    "llama yarn": lambda: transformers.LlamaConfig(**_rope("yarn")),
    "llama llama3": lambda: transformers.LlamaConfig(**_rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "mistral window": lambda: transformers.MistralConfig(**_TINY),
    "gemma3 windows": lambda: transformers.Gemma3TextConfig(**{**_TINY, "layer_types": _KINDS}),
    "gemma2 windows": lambda: transformers.Gemma2Config(**{**_TINY, "layer_types": _KINDS}),
    "qwen2 window": lambda: transformers.Qwen2Config(**{**_TINY, "use_sliding_window": True, "max_window_layers": 1}),
    "llama4 chunks": lambda: transformers.Llama4TextConfig(**{**_TINY, **_CHUNKS}),
    "mamba2 chunks": lambda: transformers.Mamba2Config(**_MAMBA),
}
_KINDS = ["sliding_attention", "full_attention"]
_CHUNKS = {
    "attention_chunk_size": 16,
    "layer_types": ["chunked_attention", "full_attention"],
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "moe_layers": [],
    "no_rope_layers": [1, 1],
}
_MAMBA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "initializer_range": 0.2,
}


def _original(positions: int) -> dict[str, Any]:
    return {"original_max_position_embeddings": positions}


def _write(kind: str, directory: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(_MODELS[kind](), dtype=torch.float32).save_pretrained(directory)
    return directory


def _loaded(path: Path, max_context: int) -> Any:
    config = run_config(path)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"max_context": max_context})})
    return load_models(config.trainer_plan, torch.device("cpu"))["policy"]


@pytest.mark.parametrize("kind", ["phi3 longrope", "llama longrope", "llama dynamic"])
def test_positions_that_depend_on_the_whole_context_are_those_of_the_longest(tmp_path: Path, kind: str) -> None:
    """In the embedded engine, across the 32 original positions: a token's probability does not change as rows grow."""
    path = _write(kind, tmp_path)
    model = load_model(str(path), max_context=64, dtype=torch.float32, device="cpu")
    check_slots_match_forward(model, "here", max_context=64)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (1, 64)))
    with torch.no_grad():
        whole, alone = plain(input_ids=ids).logits, model(input_ids=ids).logits
        torch.testing.assert_close(alone, whole)
        torch.testing.assert_close(model(input_ids=ids[:, :20]).logits, whole[:, :20])
        assert (plain(input_ids=ids[:, :20]).logits - whole[:, :20]).abs().max() > 0.1


def test_vllm_is_given_no_context_that_only_dynamic_positions_reach(tmp_path: Path) -> None:
    path = _write("llama dynamic", tmp_path)
    read_meta_model(path, max_context=32)
    with pytest.raises(ModelError, match="max_context"):
        read_meta_model(path, max_context=33)
    with pytest.raises(ModelError, match="max_context"):
        load_model(str(path), max_context=129, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("kind", _MODELS)
def test_what_is_trained_is_what_the_model_itself_gives_at_every_length(tmp_path: Path, kind: str) -> None:
    """Rows shorter and longer than whatever the architecture treats specially, packed together."""
    path = _write(kind, tmp_path)
    policy = _loaded(path, 64)
    model, random = policy.model, np.random.default_rng(3)
    rows = []
    for length in (5, 15, 16, 17, 18, 31, 32, 33, 47, 64):
        nothing = np.zeros(length, np.float32)
        ids = np.concatenate([[7, 8, 9], random.integers(0, 97, length - 3)]).astype(np.int32)
        mask = np.arange(length) > 0
        rows.append(TrainingSample(token_ids=ids, loss_mask=mask, logprobs=nothing, advantages=nothing))
    (batch,) = pack(rows, max_tokens=1 << 20, share=policy.shared_prefixes)
    trained_with = model.config._attn_implementation
    with torch.no_grad():
        found = token_logprobs(model, batch, shared=policy.shared_prefixes).logprob
        model.set_attn_implementation("eager")
        for number, row in enumerate(rows):
            ids = torch.from_numpy(row.token_ids.astype(np.int64))
            alone = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
            mine = torch.from_numpy(batch.sample == number)
            at = torch.from_numpy(batch.position[batch.sample == number])
            torch.testing.assert_close(found[mine], alone[at - 1, 0], atol=2e-3, rtol=0)
    assert (trained_with == ATTENTION) is policy.shared_prefixes


def test_the_check_at_start_sees_what_only_long_rows_show() -> None:
    """A longrope model whose positions are not held fails where rows cross the original ones."""
    torch.manual_seed(0)
    for kind in ("phi3 longrope", "llama longrope"):
        model = transformers.AutoModelForCausalLM.from_config(_MODELS[kind](), dtype=torch.float32).eval()
        assert not why_unshared(model, 32)
        with pytest.raises(ModelError, match=r"original_max_position_embeddings = 32") as refusal:
            why_unshared(model, 128)
        assert "set engine.max_context to at most 31" in str(refusal.value)
        check_slots_match_forward(model, "here", max_context=32)
        with pytest.raises(ModelError, match="logits"):
            check_slots_match_forward(model, "here", max_context=128)


def test_attention_in_chunks_is_refused_over_slots_beyond_a_chunk() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(_MODELS["llama4 chunks"](), dtype=torch.float32).eval()
    check_slots_match_forward(model, "here", max_context=16)
    with pytest.raises(ModelError, match=r"different logits|cannot run in the embedded engine"):
        check_slots_match_forward(model, "here", max_context=64)
