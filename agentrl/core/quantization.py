"""Quantized checkpoints, as their directories describe them. Reads JSON and imports no torch, so that a run that cannot
use one is refused at once.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.core.errors import ModelError
from agentrl.core.files import read_json
from agentrl.core.model_layers import config_parts

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Names of the quantization in `config.json`; the second is that of old files of compressed-tensors."""


def check_quantization(path: Path) -> None:
    """Refuse a checkpoint whose weights are quantized, as its files describe it.

    Raises:
        ModelError: the message names the method; or a file holds no JSON object.
    """
    parts = config_parts(read_json(path / "config.json"))
    quantization = next((part[key] for part in parts for key in CONFIG_KEYS if part.get(key)), None)
    if quantization is None and read_json(path / "hf_quant_config.json"):
        quantization = {"quant_method": "modelopt"}  # older files of NVIDIA's Model Optimizer
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        name = ascii(method)[1:-1][:40] if isinstance(method, str) else "a method that config.json does not name"
        raise ModelError(
            f"{path}: its weights are quantized ({name}), and training and the embedded engine read 16 and 32 bits. "
            "Convert it to bfloat16; vLLM can serve it to policies that do not learn"
        )
