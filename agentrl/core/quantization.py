"""Quantized checkpoints, as their directories describe them. Reads JSON and imports no torch, so that a run that cannot
use one is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.core.errors import ModelError
from agentrl.core.files import read_json
from agentrl.core.model_layers import config_parts

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Names of the quantization in `config.json`; the second is that of old files of compressed-tensors."""


def read_quantization(path: Path) -> Mapping[str, Any]:
    """Return how the weights of a model directory are quantized, as its files describe it; empty if they are not.

    Raises:
        ModelError: a file holds no JSON object.
    """
    settings = read_json(path / "config.json")
    for part in config_parts(settings):
        for key in CONFIG_KEYS:
            if isinstance(quantization := part.get(key), dict) and quantization:
                return {"model_type": settings.get("model_type"), **quantization}
    other_file = read_json(path / "hf_quant_config.json")  # older files of NVIDIA's Model Optimizer
    return {"quant_method": "modelopt"} if other_file else {}


def quantization_method(quantization: Mapping[str, Any]) -> str:
    """Return the name of a quantization method for people."""
    method = quantization.get("quant_method")
    return ascii(method)[1:-1][:40] if isinstance(method, str) else "a method that config.json does not name"


def check_quantization(path: Path) -> None:
    """Refuse a checkpoint whose weights neither trainer nor embedded engine can dequantize.

    Raises:
        ModelError: the message names the method.
    """
    quantization = read_quantization(path)
    method = quantization.get("quant_method")
    is_known = method == "fp8" or (method == "mxfp4" and quantization["model_type"] == "gpt_oss")
    if quantization and not is_known:
        raise ModelError(
            f"{path}: its weights are quantized ({quantization_method(quantization)}), and only FP8 with "
            "weight_scale_inv and the MXFP4 of gpt-oss can be read for training and for the embedded engine. Give a "
            "16-bit copy of the model; vLLM can serve others to policies that do not learn"
        )
