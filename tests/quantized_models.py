"""Checkpoints in the quantized formats that models are released in, written by the definitions of these formats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = (24, 20)
"""Block of FP8 weights; it divides no side of a model of 32 and 64."""


def write_fp8(
    source: Path, target: Path, *, block: tuple[int, int] | None = BLOCK, names: str = "_proj.weight"
) -> Path:
    """Write a model's matrices whose names end in `names` as FP8, with a scale per block, or one each."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith(names):
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensor.float(), block or tuple(tensor.shape))
            if block is None:
                tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"][0, 0]
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    return write_quantized(source, target, tensors, quantization)


def to_fp8(matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Quantize a matrix: numbers of E4M3, whose largest is 448, and a scale per block."""
    grid = [math.ceil(size / side) for size, side in zip(matrix.shape, block, strict=True)]
    numbers, scales = torch.zeros(matrix.shape, dtype=torch.float8_e4m3fn), torch.zeros(grid)
    for row in range(grid[0]):
        for column in range(grid[1]):
            at = part(block, row, column)
            scales[row, column] = matrix[at].abs().max() / 448
            numbers[at] = (matrix[at] / scales[row, column]).to(torch.float8_e4m3fn)
    return numbers, scales


def from_fp8(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the float32 matrix that an FP8 weight stands for."""
    matrix = torch.zeros(numbers.shape)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = part(block, row, column)
            matrix[at] = numbers[at].float() * scales[row, column]
    return matrix


def part(block: tuple[int, int], row: int, column: int) -> tuple[slice, slice]:
    """Return the place of a block in a matrix."""
    return slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1])


def write_mxfp4(source: Path, target: Path) -> Path:
    """Write a model of gpt-oss with random experts in MXFP4."""
    tensors, random = {}, torch.Generator().manual_seed(1)
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.randint(119, 124, shape, generator=random, dtype=torch.uint8)
        else:
            tensors[name] = tensor
    return write_quantized(source, target, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 experts `[experts, inputs, outputs]` that blocks and scales stand for."""
    numbers = np.array([sign * value for sign in (1, -1) for value in FP4])
    experts, outputs, groups, size = blocks.shape
    weights = np.zeros((experts, groups * 2 * size, outputs), np.float32)
    for at, byte in np.ndenumerate(blocks.numpy()):
        expert, output, group, index = at
        factor = 2.0 ** (int(scales[expert, output, group]) - 127)
        first = (group * size + index) * 2
        weights[expert, first, output] = numbers[byte % 16] * factor
        weights[expert, first + 1, output] = numbers[byte // 16] * factor
    return torch.from_numpy(weights)


def write_quantized(source: Path, target: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    """Write a copy of a model directory with other tensors, and a quantization in its configuration."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return target


def write_copy(quantized: Path, target: Path) -> Path:
    """Write the float32 copy of a quantized model: what its weights stand for."""
    target.mkdir()
    config = json.loads((quantized / "config.json").read_text())
    quantization = config.pop("quantization_config")
    stored, tensors = load_file(quantized / "model.safetensors"), {}
    for name, tensor in stored.items():
        if f"{name}_scale_inv" in stored:
            scales = stored[f"{name}_scale_inv"]
            block = quantization["weight_block_size"] or tuple(tensor.shape)
            tensors[name] = from_fp8(tensor, scales.reshape(1, 1) if scales.ndim < 2 else scales, block)
        elif name.endswith("_blocks"):
            weight = name.removesuffix("_blocks")
            tensors[weight] = from_mxfp4(tensor, stored[f"{weight}_scales"])
        elif not name.endswith(("_scale_inv", "_scales")):
            tensors[name] = tensor.float()
    config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target
