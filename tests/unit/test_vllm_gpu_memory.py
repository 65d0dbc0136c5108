"""Sizes of a vLLM on a GPU, by arithmetic: no GPU is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from agentrl.app import engines as app_engines
from agentrl.app.engines import slots
from agentrl.config.run import RunConfig
from agentrl.core.machine import Gpu, Memory
from agentrl.engines.vllm.gpu_memory import batch_tokens, block_size, kv_bytes_beside_trainer
from agentrl.engines.weights.files import EngineMemoryEstimate

if TYPE_CHECKING:
    import pytest

GB = 10**9
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1000,
}
HELD = EngineMemoryEstimate(dtype="bfloat16", weights=2 * GB, adapters=GB, keys_and_values=0, logits=GB)


def model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_beside_a_trainer_the_cache_is_the_share_without_everything_else() -> None:
    shapes = model(Qwen3Config(**SHAPE))

    def bytes_of(total: int = 24 * GB, share: float = 0.45, **arguments: int) -> int:
        return kv_bytes_beside_trainer(shapes, HELD, share=share, total=total, arguments=arguments)

    activations = 2048 * (4 * 1024 + 3 * 3072) * 2
    assert bytes_of() == int(0.45 * 24 * GB) - 4 * GB - activations - (1 << 30)
    assert bytes_of(tensor_parallel_size=2) - bytes_of() == int(1.5 * GB)
    assert bytes_of(max_num_batched_tokens=4096) - bytes_of() == -activations
    assert bytes_of(total=10 * GB) < 0, "engine_arguments refuses it"


def test_the_experts_of_a_token_count_as_its_activations() -> None:
    experts = {"moe_intermediate_size": 1024, "num_experts": 8, "num_experts_per_tok": 4}
    dense, sparse = (
        kv_bytes_beside_trainer(model(config), HELD, share=0.45, total=24 * GB, arguments={})
        for config in (Qwen3Config(**SHAPE), Qwen3MoeConfig(**SHAPE, **experts))
    )
    assert dense - sparse == 2048 * 3 * (4096 - 3072) * 2


def test_a_large_gpu_gets_larger_passes_and_more_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [batch_tokens(total) for total in (24 * GB, 80 * GB)] == [2048, 8192]
    settings = {"environment": {"id": "calculator"}, "model": {"path": "m"}}
    engines: list[dict[str, Any]] = [{"vllm": {}}, {}, {"vllm": {}, "slots": 8}]
    configs = [RunConfig.model_validate({**settings, "engine": engine}) for engine in engines]
    found = []
    for size in (24, 80):
        card = Memory(size * GB, size * GB)
        monkeypatch.setattr(app_engines, "gpus", lambda card=card: (Gpu("0", "card", card),))
        found.append([slots(config) for config in configs])
    assert found == [[64, 64, 8], [256, 64, 8]]


def test_only_an_engine_on_a_rank_s_gpu_is_beside_a_trainer() -> None:
    from tests.unit.test_device_plan import planned

    assert planned(1, 1, 1, 1, 0).shares_gpu(0)
    assert not planned(1, 1, 1, 2, 0).shares_gpu(0)


def test_vllm_chooses_the_block_size_for_latent_attention_on_a_gpu() -> None:
    grouped = model(Qwen3Config(**SHAPE))
    latent = model(DeepseekV3Config(**SHAPE | {"num_key_value_heads": 16}, kv_lora_rank=64, first_k_dense_replace=2))
    assert block_size(latent, on_gpu=True) == {}
    assert block_size(latent, on_gpu=False) == block_size(grouped, on_gpu=True) == {"block_size": 32}
