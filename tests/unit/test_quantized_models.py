"""Quantized checkpoints are refused by the name of their method."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.app.policies import check_quantized_models
from agentrl.config.policies import FrozenPolicy, PolicyConfig
from agentrl.config.sections import EngineConfig
from agentrl.core.errors import ModelError
from agentrl.engines.models import read_model
from tests.learn_cases import run_config, write_model

LORA: dict[str, Any] = {"lora": {"rank": 2}}


def change(directory: Path, **values: object) -> None:
    """Change settings of a model's configuration."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("suffix", ["_scale_inv", "_blocks"])
def test_quantized_weights_without_a_description_are_named(tmp_path: Path, suffix: str) -> None:
    """Removing `quantization_config` leaves numbers without their scales."""
    path = write_model(tmp_path / "model", kind="qwen3")
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file({**tensors, name + suffix: torch.ones(1, 1)}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"quantiz.*{suffix}"):
        read_model(path, dtype=torch.float32, max_context=8)


def test_further_tensors_may_be_scales_of_other_things(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", kind="qwen3")
    tensors = {**load_file(path / "model.safetensors"), "vision.logit_scale": torch.ones(())}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="'vision.logit_scale'"):
        read_model(path, dtype=torch.float32, max_context=8)


METHODS: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
    ({"quantization_config": {"load_in_8bit": True}}, "does not name"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    ({"text_config": {"quantization_config": {"quant_method": "fbgemm_fp8"}}}, "fbgemm_fp8"),
    ({"quantization_config": {"quant_method": ["fp8"]}}, "does not name"),
    ({}, "modelopt"),
]


@pytest.mark.parametrize(("settings", "method"), METHODS, ids=[method for _, method in METHODS])
def test_methods_are_refused_by_name_before_anything_is_loaded(
    tmp_path: Path, repository: Path, settings: dict[str, Any], method: str
) -> None:
    base = repository / "environments/calculator/model"
    path = Path(shutil.copytree(base, tmp_path / "model"))
    (path / "model.safetensors").unlink()
    change(path, **settings)
    if not settings:
        (path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    lora, vllm = PolicyConfig.model_validate(LORA), EngineConfig(vllm={})
    policies = {"policy": lora, "other": FrozenPolicy(kind="frozen", model=str(path))}
    frozen = run_config(base, policies=policies)
    for config in (
        run_config(path, policies={"policy": lora}),
        run_config(path, policies={"policy": lora}).model_copy(update={"engine": vllm}),
        run_config(base, policies={"policy": lora.model_copy(update={"reference": str(path)})}),
        frozen,
    ):
        with pytest.raises(ModelError, match=rf"{path}.* \([^)]*{method}[^)]*\).*to bfloat16"):
            check_quantized_models(config)
    with pytest.raises(ModelError, match=method):
        read_model(path, dtype=torch.float32, max_context=8)
    check_quantized_models(frozen.model_copy(update={"engine": vllm}))
