"""Which contexts a model directory can serve, and what its configuration says of it, weights apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, MistralConfig

from agentrl.core.errors import ModelError
from agentrl.engines.weight_files import kv_bytes_per_token, load_model, read_shapes

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
    with pytest.raises(ModelError, match=r"vLLM would load 'consolidated\.safetensors' over model\.safetensors"):
        read_shapes(model, max_context=64)
    (model / "model.safetensors.index.json").touch()
    read_shapes(model, max_context=64)


def test_a_window_bounds_the_embedded_engine_only_and_positions_bound_all(model: Path) -> None:
    config = read_shapes(model, max_context=64).config
    assert config.get_text_config().vocab_size == 97
    assert kv_bytes_per_token(config) == 2 * 1 * 16 * 2 * 4
    with pytest.raises(ModelError, match=r"attends to a window of 16 tokens.*engine.kind to vllm"):
        load_model(str(model), max_context=17, dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match="max_context is 65, but the model has 64 positions"):
        read_shapes(model, max_context=65)
