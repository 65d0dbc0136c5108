"""The tensors of a model directory by name, each read when it is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.core.files import WEIGHT_FILES, read_whole
from agentrl.core.quantization import check_quantization

WEIGHTS_INDEX = "model.safetensors.index.json"
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating-point dtypes of weights that are not quantized, by their names in a safetensors header."""

QUANTIZATION_SUFFIXES = (
    *("_scale_inv", "activation_scale", "input_scale"),
    *("weight_scale", "._scale", "scales", "_blocks", "zero_point", "qzeros", "absmax"),
)
"""Ends of names of tensors that belong to quantized weights of any format."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint that is read by `[...]`, such as a slice of safetensors."""

    def get_shape(self) -> list[int]:
        """Return its shape."""

    def get_dtype(self) -> str:
        """Return its dtype, as a safetensors header names it."""

    def __getitem__(self, index: Any) -> Tensor: ...


def layer_prefix(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number; "": it is in none."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else ""


def weight_files(path: Path) -> list[Path]:
    """Return the weight files of a model directory: those of its index, or the only one."""
    index = path / WEIGHTS_INDEX
    if not index.is_file():
        return [path / WEIGHT_FILES["full"][0]]
    weight_map = json.loads(read_whole(index))["weight_map"]
    return [path / name for name in sorted({str(name) for name in weight_map.values()})]


def checkpoint_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model directory by name, without reading any.

    Raises:
        ModelError: the weights are quantized.
    """
    check_quantization(path)
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        handle: Any = safe_open(file, framework="pt")
        stored |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
    return stored
