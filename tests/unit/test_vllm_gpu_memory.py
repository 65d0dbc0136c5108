"""Sizes of a vLLM on a GPU, by arithmetic: no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from agentrl.config.devices import plan_devices
from agentrl.config.run import RunConfig
from agentrl.core.errors import EngineCapabilityError
from agentrl.core.machine import Gpu, Memory
from agentrl.engines.vllm.gpu_memory import batch_tokens, block_size, bytes_besides_cache
from agentrl.engines.weights.reading import EngineMemoryEstimate, predict_engine_memory
from tests.contract.vllm_suite import MISSING

if TYPE_CHECKING:
    from pathlib import Path

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
HELD = EngineMemoryEstimate(dtype="bfloat16", weights=2 * GB, adapters=GB, merged=0, keys_and_values=0, logits=GB)


def model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_an_engine_needs_weights_logits_activations_and_graphs_besides_its_cache() -> None:
    shapes = model(Qwen3Config(**SHAPE))

    def bytes_of(total: int = 24 * GB, **arguments: int) -> int:
        return bytes_besides_cache(shapes, HELD, total=total, arguments=arguments)

    activations = 2048 * (4 * 1024 + 3 * 3072) * 2
    assert bytes_of() == 4 * GB + activations + (1 << 30)
    assert bytes_of() - bytes_of(tensor_parallel_size=2) == int(1.5 * GB)
    assert bytes_of(max_num_batched_tokens=4096) - bytes_of() == activations


def test_the_experts_of_a_token_count_as_its_activations() -> None:
    experts = {"moe_intermediate_size": 1024, "num_experts": 8, "num_experts_per_tok": 4}
    dense, sparse = (
        bytes_besides_cache(model(config), HELD, total=24 * GB, arguments={})
        for config in (Qwen3Config(**SHAPE), Qwen3MoeConfig(**SHAPE, **experts))
    )
    assert sparse - dense == 2048 * 3 * (4096 - 3072) * 2


@pytest.mark.exhaustive
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_cache_of_a_shared_gpu_is_the_share_without_everything_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason=MISSING)
    from agentrl.engines.vllm import startup

    Qwen3Config(**SHAPE, dtype="bfloat16").save_pretrained(tmp_path)
    card = Memory(24 * GB, 24 * GB)
    monkeypatch.setattr(startup, "gpus", lambda: (Gpu("0", "card", card),))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    settings = {"slots": 8, "max_context": 512, "refresh": "token", "keep_kv": True, "adapter_slots": 0}
    shared = startup.VllmSettings(**settings, max_rank=0, max_staleness={}, memory_share=0.45, shares_gpu=True)
    held = predict_engine_memory(tmp_path, dtype="auto", slots=8, max_context=512, adapter_slots=0, max_rank=0)
    shapes = startup.read_engine_meta_model(str(tmp_path), shared)
    others = bytes_besides_cache(shapes, held, total=card.total, arguments={})
    arguments = startup.engine_arguments(str(tmp_path), shared)
    assert arguments["kv_cache_memory_bytes"] == int(0.45 * card.total) - others
    alone = startup.engine_arguments(str(tmp_path), replace(shared, shares_gpu=False))
    assert "kv_cache_memory_bytes" not in alone
    assert (alone["gpu_memory_utilization"], alone["max_num_batched_tokens"]) == (0.45, 2048)
    assert not torch.cuda.is_initialized(), "nothing here may open a CUDA context"
    with pytest.raises(EngineCapabilityError, match=r"raise engine\.memory_share"):
        startup.engine_arguments(str(tmp_path), replace(shared, memory_share=0.01))


def test_a_large_gpu_gets_larger_passes_and_more_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [batch_tokens(total) for total in (24 * GB, 80 * GB)] == [2048, 8192]
    settings = {"environment": {"id": "calculator"}, "model": {"path": "m"}}
    engines: list[dict[str, Any]] = [{"vllm": {}}, {}, {"vllm": {}, "slots": 8}]
    configs = [RunConfig.model_validate({**settings, "engine": engine}) for engine in engines]
    found = []
    for size in (24, 80):
        card = Memory(size * GB, size * GB)
        monkeypatch.setattr("agentrl.core.machine.gpus", lambda card=card: (Gpu("0", "card", card),))
        found.append([config.slots for config in configs])
    assert found == [[64, 64, 8], [256, 64, 8]]


def test_an_engine_shares_its_gpu_with_a_rank_or_another_engine() -> None:
    from tests.unit.test_device_plan import machine, of_two_full_policies, planned

    assert planned(1, 1, 1, 1, 0).shares_gpu(0)
    assert not planned(1, 1, 1, 2, 0).shares_gpu(0)
    plan = plan_devices(of_two_full_policies(2).device_demand, machine(1), ranks=False)
    assert [plan.shares_gpu(number) for number in range(2)] == [True, True]


def test_vllm_chooses_the_block_size_for_latent_attention_on_a_gpu() -> None:
    grouped = model(Qwen3Config(**SHAPE))
    latent = model(DeepseekV3Config(**SHAPE | {"num_key_value_heads": 16}, kv_lora_rank=64, first_k_dense_replace=2))
    assert block_size(latent, on_gpu=True) == {}
    assert block_size(latent, on_gpu=False) == block_size(grouped, on_gpu=True) == {"block_size": 32}
