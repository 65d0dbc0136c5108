"""Predicts the memory of a run, process by process, before any weight is loaded; and chooses the longest context and
the micro-batches to fit."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.app.engines import device_plan, slots
from agentrl.app.policies import adapter_slots_needed, largest_lora_rank
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, InputError, PredictionError
from agentrl.core.machine import machine_memory, process_anonymous_memory_bytes

if TYPE_CHECKING:
    from agentrl.config.devices import DevicePlan
    from agentrl.engines.weights.files import EngineMemoryEstimate

USED_SHARE = 0.8
"""Share of the free memory that contexts and micro-batches may fill: allocators keep some, and other programs need
some."""
MIN_CONTEXT = 256
"""Shortest context that is chosen to fit memory, in tokens."""
MAX_CONTEXT = 1 << 15
"""Longest context that is chosen for a model that states no number of positions, in tokens."""
FALLBACK_CONTEXT = 1 << 11
"""Context, and micro-batch, of a run whose memory cannot be predicted, in tokens."""
MAX_CHOSEN = 10**8
"""Largest number in a run's files that may come from this module."""
MAX_MICRO_BATCH = 1 << 14
"""Size in tokens beyond which a larger micro-batch is hardly faster."""
_CONTEXTS = "fewer engine.slots, or a smaller engine.max_context"
_DTYPE = "model.dtype = 'bfloat16'"
_THIS = "this process"
_ENGINE = "engine"
_ACTIVATIONS = "activations"
_VLLM = "vLLM"
_GAPS = "gaps between them in the heap"
_FRAGMENTATION = 0.2
"""Gaps in glibc's heap, as a share of the activations: 2 to 34 % in `benchmarks.real_models --part doctor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One part of a process's memory."""

    process: str
    """Name of the process: `this process`, `trainer rank`, `engine`, or `engine of BASE` if there are several base
    models."""
    name: str
    bytes: int
    """Size in bytes in one such process."""
    processes: int = 1
    setting: str = ""
    """Setting that reduces the size; empty: there is none."""
    offloaded: bool = False
    """Whether it is in main memory although the process computes on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryNeed:
    """Minimum memory that a trainer rank or a vLLM needs on one GPU, and its share."""

    user: str
    gpu: str
    """Number of the GPU."""
    needed: int
    """Needed bytes."""
    allowed: int
    """Bytes of the share in the device plan."""
    setting: str
    """Settings that reduce the need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """A run's peak memory, and the memory available."""

    parts: tuple[MemoryPart, ...]
    """Parts of memory on the devices that the run computes on."""
    free: int
    """Free bytes on the devices of the run."""
    offloaded: MemoryEstimate | None = None
    """Main memory of a run that computes on GPUs with `trainer.sharding` "offload"; None: nothing is offloaded."""
    of_rank: tuple[MemoryPart, ...] = ()
    """The `parts` on a trainer rank's GPU; empty without GPUs."""

    @property
    def total(self) -> int:
        """Bytes of all processes together."""
        return sum(part.bytes * part.processes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the total is free."""
        return self.total <= self.free

    def settings_to_turn(self) -> list[str]:
        """Return the settings that reduce the total, those with the largest effect first."""
        saved: dict[str, int] = defaultdict(int)
        for part in self.parts:
            if part.setting:
                saved[part.setting] += part.bytes * part.processes
        return sorted(saved, key=lambda setting: -saved[setting])


def estimate_memory(config: RunConfig) -> MemoryEstimate:
    """Predict the memory of a run's trainer and engines, with the longest rows and all slots full.

    Raises:
        ModelError: the directory holds no model that can be trained and served.
        ConfigError: an adapter targets a layer that cannot be both trained and served.
    """
    devices = device_plan(config)
    trainer = _trainer(config, on_gpu=bool(devices.gpus))
    parts = list(trainer)
    for number, base in enumerate(config.bases):
        engine_parts = _engine(base, devices, number * config.engine.count)
        parts += engine_parts if len(config.bases) == 1 else [_of_base(part, base.base_name) for part in engine_parts]
    if devices.gpus:
        used = {*devices.ranks, *(at for gpus_of_engine in devices.engines for at in gpus_of_engine)}
        free = sum(devices.gpus[at].memory.free for at in used)
        loaded = tuple(part for part in parts if not part.offloaded)
        elsewhere = tuple(part for part in parts if part.offloaded)
        offloaded = MemoryEstimate(parts=elsewhere, free=machine_memory().free) if elsewhere else None
        of_rank = tuple(part for part in trainer if not part.offloaded)
        return MemoryEstimate(parts=loaded, free=free, offloaded=offloaded, of_rank=of_rank)
    return MemoryEstimate(parts=(*parts, *_programs(parts)), free=machine_memory().free)


def gpu_memory_needs(config: RunConfig, plan: MemoryEstimate) -> list[GpuMemoryNeed]:
    """Return the needs of a run's trainer ranks and vLLMs, GPU by GPU; empty without GPUs.

    Args:
        config: configuration of the run.
        plan: its memory; to predict it again would compute another step of each model.

    Raises:
        ModelError: the directory holds no model that can be trained and served.
        ConfigError: there are too few GPUs.
    """
    devices = device_plan(config)
    if not devices.gpus or not config.bases:
        return []
    needs = []
    trainer = plan.of_rank
    for rank, at in enumerate(devices.ranks):
        allowed = int(devices.share_of_rank(rank) * devices.gpus[at].memory.total)
        settings = "; or ".join(part.setting for part in sorted(trainer, key=lambda part: -part.bytes))
        user, needed = f"trainer rank {rank}", sum(part.bytes for part in trainer)
        needs.append(
            GpuMemoryNeed(user=user, gpu=devices.gpus[at].id, needed=needed, allowed=allowed, setting=settings)
        )
    if config.engine.kind != "vllm":
        return needs
    devices_each, replicas = config.engine.devices, config.engine.count
    engine_needs = [_engine_memory(base) for base in config.bases]
    least = [
        (one.weights + one.adapters + one.keys_and_values // slots(config)) // devices_each for one in engine_needs
    ]
    settings = "a larger tensor_parallel_size in [engine.vllm]; or a larger engine.memory_share"
    for number, (engine, share) in enumerate(zip(devices.engines, devices.shares, strict=True)):
        for at in engine:
            gpu = devices.gpus[at]
            allowed = int(share * gpu.memory.total)
            user, needed = devices.name_of_engine(number), least[number // replicas]
            needs.append(GpuMemoryNeed(user=user, gpu=gpu.id, needed=needed, allowed=allowed, setting=settings))
    return needs


def _of_base(part: MemoryPart, base: str) -> MemoryPart:
    process = f"engine of {base}" if part.process == _ENGINE else part.process
    return replace(part, process=process, name=f"{part.name} ({base})")


def with_chosen_token_limits(config: RunConfig, before: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with `engine.max_context` and `trainer.micro_batch_tokens` chosen if they are 0.

    Both are powers of two, or the bounds set by the model or each other, so that other programs on the machine hardly
    change them. A prediction that fails is a warning: both are then at most `FALLBACK_CONTEXT`, unless set.

    Args:
        config: configuration of the run.
        before: the configuration with which the run was started, as data, whose choices are kept; empty for a new run.

    Raises:
        ModelError: a directory holds no model that can be trained and served.
        ConfigError: not even short contexts fit into memory.
    """
    context = config.engine.max_context or _chosen_before(before, "engine", "max_context")
    tokens = config.trainer.micro_batch_tokens or _chosen_before(before, "trainer", "micro_batch_tokens")
    if not config.bases or (context and (tokens or not config.trained)):
        return _with_sizes(config, context, tokens)
    try:
        return _fitting_sizes(config, context, tokens)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - no failed prediction may stop a run
        context = context or min(_longest_context(config), FALLBACK_CONTEXT)
        tokens = tokens or (context if config.trained else 0)
        reason = (
            error if isinstance(error, PredictionError) else f"the memory of this run cannot be predicted ({error!r})"
        )
        warnings.warn(
            f"{reason}: it starts with engine.max_context = {context} and trainer.micro_batch_tokens = {tokens}, which "
            "may be too much or too little; set them to choose",
            stacklevel=2,
        )
        return _with_sizes(config, context, tokens)


def _chosen_before(before: Mapping[str, Any], section: str, name: str) -> int:
    values = before.get(section)
    value = values.get(name) if isinstance(values, Mapping) else None
    return value if type(value) is int and 0 < value <= MAX_CHOSEN else 0


def _with_sizes(config: RunConfig, context: int, tokens: int) -> RunConfig:
    engine = config.engine.model_copy(update={"max_context": context})
    trainer = config.trainer.model_copy(update={"micro_batch_tokens": tokens})
    return config.model_copy(update={"engine": engine, "trainer": trainer})


def _longest_context(config: RunConfig) -> int:
    """Return the longest context for which every model has positions."""
    from agentrl.engines.models import longest_context

    embedded = config.engine.kind == "embedded"
    return min(longest_context(base.model.path, embedded=embedded) or MAX_CONTEXT for base in config.bases)


def _fitting_sizes(config: RunConfig, context: int, tokens: int) -> RunConfig:
    """Return the configuration with the longest context, and the largest micro-batches of it, that fit into memory.

    Args:
        config: configuration of the run.
        context: `engine.max_context`; 0: the longest for which a micro-batch of one row fits.
        tokens: `trainer.micro_batch_tokens`; 0: at least one row of full length.
    """
    shortest = context or min(MIN_CONTEXT, _longest_context(config))
    length = context or _longest_context(config)
    plan = estimate_memory(_with_sizes(config, length, length))
    while length > shortest and _needed_bytes(plan) > _limit(plan):
        # No part grows faster than the square of the context, so no context between the two fits.
        fitting = int(length * math.sqrt(_limit(plan) / _needed_bytes(plan)))
        length = max(shortest, 1 << (max(fitting, 1).bit_length() - 1))
        plan = estimate_memory(_with_sizes(config, length, length))
    if not context and _needed_bytes(plan) > _limit(plan):
        raise ConfigError(
            f"not enough memory: with contexts of {length} tokens the run would need "
            f"{_needed_bytes(plan) >> 20:,} MiB, and it may take {_limit(plan) >> 20:,}, {USED_SHARE:.0%} of the free "
            "memory. Set "
            f"{', or '.join(plan.settings_to_turn())}"
        )
    if not tokens and config.trained:
        tokens = _fitting_tokens(plan, length)
    return _with_sizes(config, length, tokens)


def _fitting_tokens(plan: MemoryEstimate, context: int) -> int:
    """Return the tokens of a micro-batch that fit next to everything else; at least one row of full length.

    Args:
        plan: memory of the run with micro-batches of one row.
        context: length of that row.
    """
    rows = [part for part in plan.parts if part.name.startswith((_ACTIVATIONS, _GAPS))]
    per_token = sum(part.bytes * part.processes for part in rows) / context
    fitting = context + int((_limit(plan) - _needed_bytes(plan)) / max(per_token, 1.0))
    return max(context, min(MAX_MICRO_BATCH, 1 << (max(fitting, 1).bit_length() - 1)))


def _needed_bytes(plan: MemoryEstimate) -> int:
    """Return the bytes of all processes except vLLM on a GPU, which sizes itself to its reserved share."""
    return sum(part.bytes * part.processes for part in plan.parts if not part.name.startswith(_VLLM))


def _limit(plan: MemoryEstimate) -> int:
    """Return the bytes that may be filled, on all devices of the run."""
    return int(USED_SHARE * plan.free)


def _trainer(config: RunConfig, *, on_gpu: bool) -> list[MemoryPart]:
    if not config.trained:
        return []
    from agentrl.learn.memory_prediction import predict_trainer_memory

    prediction = predict_trainer_memory(config)
    if config.trains_in_process:
        part = partial(MemoryPart, process=_THIS)
    else:
        part = partial(MemoryPart, process="trainer rank", processes=config.trainer.ranks)
    offloads = on_gpu and config.trainer.sharding == "offload"
    tokens = "a smaller trainer.micro_batch_tokens, down to engine.max_context"
    if not config.trainer.recompute:
        tokens = f"trainer.recompute = true, or {tokens}"
    optimized = "trained parameters, their gradients and AdamW's moments in float32"
    shard = f"1/{prediction.shards} of " if prediction.shards > 1 else ""
    fewer = ["a smaller policies.NAME.lora.rank, or a lora if there is none"]
    if on_gpu and not offloads:
        fewer.insert(0, "trainer.sharding = 'offload'")
    if prediction.shards == 1 and config.trainer.ranks > 1:
        fewer.insert(0, "trainer.sharding = 'full'")
    moved = offloads and prediction.shards > 1
    parts = [
        part(name=f"{shard}weights in {prediction.dtype}", bytes=prediction.weights, setting=_DTYPE, offloaded=moved),
        part(name=f"{shard}{optimized}", bytes=prediction.trained, setting=", ".join(fewer), offloaded=offloads),
        part(name=f"{_ACTIVATIONS} of {prediction.tokens:,} tokens", bytes=prediction.activations, setting=tokens),
    ]
    if (copies := prediction.copies - prediction.activations) > 0:
        name = "in addition to activations, while gradients are summed or weights are sent"
        parts.append(part(name=name, bytes=copies, setting=", ".join(fewer)))
    if prediction.shards > 1:
        parts.append(part(name="layers that are whole while they compute", bytes=prediction.gathered, setting=_DTYPE))
    if not on_gpu:
        gaps = int(_FRAGMENTATION * prediction.activations)
        parts.append(part(name=f"{_GAPS}, about", bytes=gaps, setting=tokens))
    return parts


def _engine(config: RunConfig, devices: DevicePlan, first: int) -> list[MemoryPart]:
    """Predict the engines of one base model, whose numbers in the device plan begin at `first`."""
    section = config.engine
    if config.engine_in_process:
        part = partial(MemoryPart, process=_THIS)
    else:
        part = partial(MemoryPart, process=_ENGINE, processes=section.count)
    if section.kind == "vllm" and devices.gpus:
        reserved = []
        for number in range(first, first + section.count):
            gpus, share = devices.engines[number], devices.shares[number]
            count = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}"
            reserved.append(
                MemoryPart(
                    process=f"engine {number}",
                    name=f"{_VLLM}: {share:.0%} of {count} for weights, keys and values",
                    bytes=sum(int(share * devices.gpus[at].memory.total) for at in gpus),
                    setting="a smaller engine.memory_share",
                )
            )
        return reserved
    adapters, needed = adapter_slots_needed(config), _engine_memory(config)
    contexts = f"keys and values of {slots(config)} contexts of {section.max_context:,} tokens"
    parts = [
        part(name=f"weights in {needed.dtype}", bytes=needed.weights, setting=_DTYPE),
        part(name=contexts, bytes=needed.keys_and_values, setting=_CONTEXTS),
        part(name="logits", bytes=needed.logits, setting=_CONTEXTS),
    ]
    if adapters:
        name = f"{adapters} adapters"
        parts.append(part(name=name, bytes=needed.adapters, setting="a smaller policies.NAME.lora.rank"))
    if copies := sum(policy.lora is None for policy in config.trained.values()):
        name = f"{copies} more of the weights, for the next version of a policy that trains all of them"
        parts.append(part(name=name, bytes=copies * needed.weights, setting="a policies.NAME.lora"))
    return parts


def _engine_memory(config: RunConfig) -> EngineMemoryEstimate:
    from agentrl.engines.weights.files import predict_engine_memory

    return predict_engine_memory(
        Path(config.model.path).resolve(),
        dtype=config.model.dtype,
        slots=slots(config),
        max_context=config.engine.max_context,
        adapter_slots=adapter_slots_needed(config),
        max_rank=largest_lora_rank(config),
    )


def _programs(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """Predict the memory of Python and its libraries in each process from this process, which has imported the same.

    Code does not count: it is mapped from files, shared by all processes, and read again when memory is short.
    """
    process_bytes = process_anonymous_memory_bytes()
    processes = {part.process: part.processes for part in parts} | {_THIS: 1}
    return [
        MemoryPart(process=process, name="Python and its libraries", bytes=process_bytes, processes=count)
        for process, count in processes.items()
    ]
