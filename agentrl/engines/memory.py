"""Predicts the memory of an engine from the shapes in a model directory, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.core.machine import Memory, memory
from agentrl.engines.models import dtype_name, kv_bytes_per_token, model_dtype, read_shapes
from agentrl.engines.weights import adaptable_layers

_LOGIT_COPIES = 3
"""Number of float32 copies of a pass's logits that exist at once during sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The memory of one engine, in bytes."""

    dtype: str
    """Dtype that the model computes in, such as `bfloat16`."""
    weights: int
    adapters: int
    """Bytes of all adapter slots, filled."""
    keys_and_values: int
    """Bytes of the KV of all slots with contexts of full length."""
    logits: int
    """Bytes of the logits of a pass over all slots."""


def engine_memory(
    path: Path, *, dtype: str, slots: int, max_context: int, adapter_slots: int, max_rank: int
) -> EngineMemory:
    """Predict the memory of an engine that serves the model of a directory.

    Args:
        path: directory of the model.
        dtype: `model.dtype` of the configuration.
        slots: number of contexts at once.
        max_context: longest context in tokens.
        adapter_slots: number of adapters at once; 0: none.
        max_rank: largest rank of an adapter.

    Raises:
        ModelError: the directory holds no model, or one with fewer positions.
    """
    computed = model_dtype(path, dtype, torch.device("cpu"))
    shapes = read_shapes(path, max_context=max_context, dtype=computed)
    sizes = 0
    if adapter_slots:
        named = dict(shapes.named_modules())
        sizes = sum(sum(named[name].weight.shape) for name in adaptable_layers(shapes))
    vocabulary = int(shapes.config.get_text_config().vocab_size)
    return EngineMemory(
        dtype=dtype_name(computed),
        weights=sum(parameter.nbytes for parameter in shapes.parameters()),
        adapters=adapter_slots * max_rank * sizes * computed.itemsize,
        keys_and_values=slots * (max_context + 1) * kv_bytes_per_token(shapes.config),
        logits=_LOGIT_COPIES * slots * vocabulary * torch.float32.itemsize,
    )


def device_memory() -> tuple[Memory, bool]:
    """Return the memory of this process's device, and whether it is a GPU."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Memory(free, total), True
    return memory(), False
