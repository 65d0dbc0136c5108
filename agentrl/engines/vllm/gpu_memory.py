"""Sizes of a vLLM on GPUs: tokens per pass, and the bytes that it needs besides its KV cache.

vLLM sizes its KV cache by measuring the whole GPU while it starts. A process that allocates or frees memory in the
meantime falsifies the measurement, or makes vLLM stop. So on a GPU that a trainer or another vLLM uses, the cache is
the engine's share of the memory without the amounts computed here.
The figures are estimates that no GPU has confirmed yet.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from agentrl.core.machine import LARGE_GPU
from agentrl.engines.models import model_dtype, read_meta_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedModel

    from agentrl.engines.weights.reading import EngineMemoryEstimate


BLOCK = 32
"""Number of tokens per KV block; vLLM's attention on CPU needs multiples of 32."""


def block_size(shapes: PreTrainedModel, *, on_gpu: bool) -> dict[str, int]:
    """Return vLLM's block size. On a GPU, vLLM chooses it for latent attention: FlashMLA needs blocks of 64 tokens."""
    latent = getattr(shapes.config.get_text_config(), "kv_lora_rank", None) is not None
    return {} if latent and on_gpu else {"block_size": BLOCK}


def batch_tokens(total: int) -> int:
    """Return the maximum number of tokens of a pass on a GPU with `total` bytes of memory."""
    # vLLM's own server sets 8,192 on large GPUs; its engine in process always gets 2,048
    return 8192 if total >= LARGE_GPU else 2048


def parts(arguments: Mapping[str, Any]) -> int:
    """Return the number of GPUs over which a model and its KV cache are divided."""
    return math.prod(arguments.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size"))


def bytes_besides_cache(
    shapes: PreTrainedModel, held: EngineMemoryEstimate, *, total: int, arguments: Mapping[str, Any]
) -> int:
    """Return the bytes that an engine needs on each of its GPUs for everything but its KV cache.

    Args:
        shapes: the model without its weights.
        held: memory of the whole engine.
        total: memory of the smallest of its GPUs, in bytes.
        arguments: arguments of vLLM, with its parallel sizes.
    """
    config: Any = shapes.config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None) or 0
    routed_width = experts * (getattr(config, "moe_intermediate_size", None) or 0)
    width: int = 4 * config.hidden_size + 3 * max(getattr(config, "intermediate_size", None) or 0, routed_width)
    tokens = arguments.get("max_num_batched_tokens", batch_tokens(total))
    activations: int = int(tokens) * width * shapes.dtype.itemsize
    graphs = 1 << 30  # CUDA graphs, and the workspaces of libraries
    return (held.weights + held.adapters) // parts(arguments) + held.logits + activations + graphs


def least_bytes_of_share(
    path: Path,
    held: EngineMemoryEstimate,
    *,
    dtype: str,
    slots: int,
    max_context: int,
    total: int,
    arguments: Mapping[str, Any],
) -> int:
    """Return the smallest share of a shared GPU, in bytes, with which an engine starts: its cache holds one context.

    Args:
        path: directory of the model.
        held: memory of the whole engine, with full caches of `slots` contexts.
        dtype: `model.dtype` of the configuration.
        slots: number of contexts at once.
        max_context: longest context in tokens.
        total: memory of the smallest of its GPUs, in bytes.
        arguments: arguments of vLLM, with its parallel sizes.

    Raises:
        ModelError: the directory holds no model.
    """
    shapes = read_meta_model(path, max_context=max_context, dtype=model_dtype(path, dtype, torch.device("cpu")))
    context = held.keys_and_values // slots // parts(arguments)
    return bytes_besides_cache(shapes, held, total=total, arguments=arguments) + context
