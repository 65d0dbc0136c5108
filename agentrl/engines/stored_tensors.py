"""The tensors of a model directory by name, each read when it is needed, and dequantized if it is stored quantized.

A quantized weight is multiplied by its scales in float32 and rounded once. So models, adapters and published versions
are those of a dequantized copy of the checkpoint. Two formats are read: FP8 with a scale per block (Qwen3-…-FP8,
DeepSeek-V3) or per tensor, and the MXFP4 experts of gpt-oss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.core.errors import ModelError
from agentrl.core.files import WEIGHT_FILES, read_whole
from agentrl.core.quantization import check_quantization, read_quantization

WEIGHTS_INDEX = "model.safetensors.index.json"
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating-point dtypes of weights that are not quantized, by their names in a safetensors header."""

_SCALE = "_scale_inv"
"""End of the name of an FP8 weight's scales; a weight is its numbers times its scales."""
_FP8_SUFFIXES = (_SCALE, "activation_scale", "input_scale")
"""Ends of names of tensors that belong to FP8 weights."""
QUANTIZATION_SUFFIXES = (
    *_FP8_SUFFIXES,
    *("weight_scale", "._scale", "scales", "_blocks", "zero_point", "qzeros", "absmax"),
)
"""Ends of names of tensors that belong to quantized weights of any format."""
_GROUP = 32
"""Number of weights that share a scale in MXFP4."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of FP4 (E2M1) by their four bits."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint that is read by `[...]`, such as a slice of safetensors."""

    def get_shape(self) -> list[int]:
        """Return its shape."""

    def get_dtype(self) -> str:
        """Return its dtype, as a safetensors header names it."""

    def __getitem__(self, index: Any) -> Tensor: ...


class _Dequantized:
    """A quantized weight, dequantized when it is read."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        self._shape = list(shape)
        self._dtype = dtype
        self._read = read

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return next(name for name, dtype in FLOAT_DTYPES.items() if dtype == self._dtype)

    def __getitem__(self, index: Any) -> Tensor:
        return self._read().to(self._dtype)[index]


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


def checkpoint_tensors(path: Path, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Return the tensors of a model directory by name, without reading any.

    Args:
        path: the directory.
        dtype: dtype of the weights that are stored quantized; the others have the checkpoint's.

    Raises:
        ModelError: the weights are quantized by another method, or their description or scales do not fit them.
    """
    check_quantization(path)
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        handle: Any = safe_open(file, framework="pt")
        stored |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
    quantization = read_quantization(path)
    if not quantization:
        return stored
    read = _read_fp8 if quantization["quant_method"] == "fp8" else _read_mxfp4
    return read(path, stored, dtype, quantization)


def _read_fp8(
    path: Path, stored: Mapping[str, StoredTensor], dtype: torch.dtype, quantization: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    block = quantization.get("weight_block_size")
    if block is not None and not _is_block(block):
        raise ModelError(
            f"{path}/config.json: weight_block_size must be two positive integers or null, not {ascii(block)[:40]}. "
            "Copy the directory again, or give a 16-bit copy of the model"
        )
    weights = {name: tensor for name, tensor in stored.items() if not name.endswith(_FP8_SUFFIXES)}
    for name, numbers in weights.items():
        scales = stored.get(name + _SCALE)
        if scales is None and numbers.get_dtype() not in FLOAT_DTYPES and numbers.get_dtype()[0] == "F":
            problem = (
                f"{path}: {name!a} is stored in {numbers.get_dtype()}, and its scales {name + _SCALE!a} are missing"
            )
            if name + "_scale" in stored:
                raise ModelError(
                    f"{problem}. Scales named {name + '_scale'!a}, as AutoFP8 writes them, are not supported. Give a "
                    "16-bit copy of the model"
                )
            raise ModelError(f"{problem}. Copy the directory again, or give a 16-bit copy of the model")
        if scales is None:
            continue
        shape, scale_shape = numbers.get_shape(), scales.get_shape()
        if block is not None and len(shape) < 2:
            raise ModelError(
                f"{path}: {name!a} of shape {shape} has scales, but only matrices are quantized in blocks. The files "
                "do not belong to config.json; copy the directory again"
            )
        blocks = [max(size, 1) for size in shape[-2:]] if block is None else block
        grid = [*shape[:-2], *(-(-size // side) for size, side in zip(shape[-2:], blocks, strict=True))]
        if scale_shape not in ([grid] if block is not None else [grid, [1], []]):
            raise ModelError(
                f"{path}: {name!a} of shape {shape} has scales of shape {scale_shape}, but in blocks of {blocks} they "
                f"have shape {grid}. The files do not belong to config.json; copy the directory again"
            )
        weights[name] = _Dequantized(shape, dtype, partial(_scale, numbers, scales, blocks))
    return weights


def _is_block(value: object) -> bool:
    """Whether a value is the two sides of a block."""
    return isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)


def _scale(numbers: StoredTensor, scales: StoredTensor, block: Sequence[int]) -> Tensor:
    """Multiply each block of a matrix, or of each of several, by its scale. The last blocks may be incomplete."""
    values, factors = numbers[...].float(), scales[...].float()
    if factors.numel() > 1:
        for dim, side in zip((-2, -1), block, strict=True):
            factors = factors.repeat_interleave(side, dim).narrow(dim, 0, values.shape[dim])
    return values.mul_(factors)


def _read_mxfp4(
    path: Path, stored: Mapping[str, StoredTensor], dtype: torch.dtype, _quantization: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    weights: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        weight = name.removesuffix("_blocks")
        if name == weight:
            if not name.endswith("_scales"):
                weights[name] = tensor
            continue
        scales, shape = stored.get(f"{weight}_scales"), tensor.get_shape()
        if scales is None or len(shape) < 3 or shape[-1] != _GROUP // 2 or scales.get_shape() != shape[:-1]:
            raise ModelError(
                f"{path}: {name!a} of shape {shape} has scales of shape {scales and scales.get_shape()}; MXFP4 has one "
                f"per {_GROUP // 2} bytes. Copy the directory again"
            )
        *count, outputs, groups, _size = shape
        unpacked_shape = (*count, groups * _GROUP, outputs)
        weights[weight] = _Dequantized(unpacked_shape, dtype, partial(_unpack_mxfp4, tensor, scales))
    return weights


def _unpack_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> Tensor:
    """Return weights `[..., inputs, outputs]` of gpt-oss, whose rows are stored as outputs: two numbers per byte, the
    first in the low bits, and an exponent of two per group, biased by 127."""
    numbers, packed = torch.tensor(_FP4), blocks[...].int()
    values = numbers[torch.stack((packed & 15, packed >> 4), dim=-1)].flatten(-2)
    scaled = torch.ldexp(values, scales[...].int()[..., None] - 127)
    return scaled.flatten(-2).transpose(-1, -2).contiguous()
