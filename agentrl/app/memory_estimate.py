"""Predicts the memory of a run, process by process, before any weight is loaded; and chooses the longest context and
the micro-batches to fit."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.app.engines import weight_file_bytes
from agentrl.app.policies import (
    adapter_slots_needed,
    largest_lora_rank,
    merged_policies,
    serves_only_adapters,
)
from agentrl.config.devices import device_plan
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, InputError, PredictionError
from agentrl.core.machine import GIB, Gpu, machine_memory, process_memory_bytes
from agentrl.core.setting_paths import value_at
from agentrl.core.text import plural

if TYPE_CHECKING:
    from agentrl.config.devices import DevicePlan
    from agentrl.config.plans import BaseModelPlan, EnginePlan, TrainerPlan
    from agentrl.engines.weights.reading import EngineMemoryEstimate
    from agentrl.learn.memory_prediction import TrainerMemoryPredictor

USED_SHARE = 0.8
"""Share of the free memory that contexts and micro-batches may fill: allocators keep some, and other programs need
some."""
SAMPLED_SHARE = 0.2
"""Expected share of the sampling limit that is computed: agents end early, and equal replies of a
group are computed once. In first steps it was 0.17 in examples/16_qwen.toml and 0.36 in examples/07_smollm2.toml."""
TAUGHT_SHARE = 0.75
"""Share of a step's episodes that are expected to have an advantage; others take no memory. In first steps it was 0.5
in examples/16_qwen.toml and 0.63 in examples/07_smollm2.toml; it varies from step to step."""
MIN_CONTEXT = 256
"""Shortest context that is chosen to fit memory, in tokens."""
MAX_CONTEXT = 1 << 15
"""Longest context that is chosen for a model that states no number of positions, in tokens."""
FALLBACK_CONTEXT = 1 << 11
"""Context, and micro-batch, of a run whose memory cannot be predicted, in tokens."""
MAX_MICRO_BATCH = 1 << 14
"""Size in tokens beyond which a larger micro-batch is hardly faster on a GPU."""
CPU_MICRO_BATCH, CPU_ROWS = 1 << 11, 4
"""The same on CPUs, or this number of contexts of full length if that is more, rounded down to a power of two: rows
that share a prefix are cheaper in one micro-batch."""
_CONTEXTS = "fewer engine.slots, or a smaller engine.max_context"
_RANK = "a smaller policies.NAME.lora.rank"
_THIS = "this process"
_ENGINE = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One part of a process's memory."""

    process: str
    """Name of the process: `this process`, `trainer rank`, `engine`, or `engine of BASE` if there are several base
    models."""
    name: str
    bytes: int
    """Size in bytes in one such process."""
    user: str = ""
    """Part of the process that needs it, where trainer and engine share one."""
    processes: int = 1
    setting: str = ""
    """Setting that reduces the size; empty: there is none."""
    offloaded: bool = False
    """Whether it is in main memory although the process computes on a GPU."""
    is_exact: bool = False
    """Whether the size follows from shapes alone, so that the run cannot do with less."""
    grows_with_tokens: bool = False
    """Whether the size is proportional to the tokens of a micro-batch."""
    is_vllm_share: bool = False
    """Whether it is the share of its GPUs that vLLM reserves, and fits itself into."""
    file_bytes: int = 0
    """Size of the files that it is read from, at the start."""
    is_mapped: bool = False
    """Whether it is mapped from files, so that the system can take it back when memory is short."""
    expected: int | None = None
    """Size in a usual step; None: `bytes`."""

    @property
    def expected_bytes(self) -> int:
        """The size to expect."""
        return self.bytes if self.expected is None else self.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryNeed:
    """Memory that a trainer rank or a vLLM needs on one GPU, and what is there for it."""

    user: str
    gpu: Gpu
    needed: int
    """Needed bytes, as predicted."""
    least: int
    """Certain part of the needed bytes."""
    allowed: int
    """Bytes that the device plan and other processes leave."""
    setting: str
    """Settings that reduce the need."""

    def __str__(self) -> str:
        free, total, least, allowed = (
            f"{size / GIB:.1f}" for size in (self.gpu.memory.free, self.gpu.memory.total, self.least, self.allowed)
        )
        missing = f"{(self.least - self.allowed) / GIB:.1f}"
        return (
            f"GPU {self.gpu.id} ({total} GiB, {free} free) is too small for {self.user}, which needs at least {least} "
            f"GiB and may take {allowed}: {missing} GiB are missing. Set {self.setting}, or use a larger GPU"
        )


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
    def least(self) -> int:
        """Bytes of all processes together that are certain."""
        return sum(part.bytes * part.processes for part in self.parts if part.is_exact)

    @property
    def total(self) -> int:
        """Bytes of all processes together that must be free."""
        return sum(part.bytes * part.processes for part in self.parts if not part.is_mapped)

    @property
    def expected(self) -> int:
        """Expected bytes of all processes together, including mapped files."""
        return sum(part.expected_bytes * part.processes for part in self.parts)

    @property
    def sizes(self) -> str:
        """What is expected, what is certain, and what it may grow to."""
        largest = sum(part.bytes * part.processes for part in self.parts)
        expected, least, most = (f"{size / GIB:.1f} GiB" for size in (self.expected, self.least, largest))
        growth = f", up to {most} with contexts of full length" if largest > 1.05 * self.expected else ""
        return f"about {expected} at its peak, at least {least}{growth}"

    @property
    def fits(self) -> bool:
        """Whether the total is free."""
        return self.total <= self.free

    def settings_to_turn(self) -> list[str]:
        """Return the settings that reduce the total, those with the largest effect first."""
        bytes_by_setting: dict[str, int] = defaultdict(int)
        for part in self.parts:
            if part.setting:
                bytes_by_setting[part.setting] += part.bytes * part.processes
        return sorted(bytes_by_setting, key=lambda setting: -bytes_by_setting[setting])


def estimate_memory(engine: EnginePlan, trainer: TrainerPlan, prompts: Sequence[Sequence[int]] = ()) -> MemoryEstimate:
    """Predict the memory of a run's engines and trainer, with the longest rows and all slots full.

    Args:
        engine: engines of the run.
        trainer: its trainer.
        prompts: tokens of the first training tasks' prompts, from which the rows to expect follow.

    Raises:
        ModelError: the directory holds no model that can be trained and served.
        ConfigError: an adapter targets a layer that cannot be both trained and served.
    """
    devices = device_plan(engine.demand)
    trainer_parts = _trainer(trainer, prompts, on_gpu=bool(devices.gpus))
    parts = list(trainer_parts)
    prompt = _mean_length(prompts)
    filled = min((prompt + _expected_sampled(trainer, prompt)) / trainer.max_context, 1.0)
    for number, base in enumerate(engine.bases):
        engine_parts = _engine(engine, base, devices, number * engine.engine.count, filled)
        parts += engine_parts if len(engine.bases) == 1 else [_of_base(part, base.name) for part in engine_parts]
    if devices.gpus:
        gpu_indices = {*devices.ranks, *(at for gpus_of_engine in devices.engines for at in gpus_of_engine)}
        free = sum(devices.gpus[at].memory.free for at in gpu_indices)
        gpu_parts = tuple(part for part in parts if not part.offloaded)
        elsewhere = tuple(part for part in parts if part.offloaded)
        host_estimate = MemoryEstimate(parts=elsewhere, free=machine_memory().free) if elsewhere else None
        of_rank = tuple(part for part in trainer_parts if not part.offloaded)
        return MemoryEstimate(parts=gpu_parts, free=free, offloaded=host_estimate, of_rank=of_rank)
    return MemoryEstimate(parts=(*parts, *_programs(parts), *_mapped_weights(parts)), free=machine_memory().free)


def gpu_memory_needs(engine: EnginePlan, memory: MemoryEstimate) -> list[GpuMemoryNeed]:
    """Return the needs of a run's trainer ranks and vLLMs, GPU by GPU; empty without GPUs.

    Args:
        engine: engines of the run.
        memory: memory of the run.

    Raises:
        ModelError: the directory holds no model that can be trained and served.
        ConfigError: there are too few GPUs.
    """
    devices = device_plan(engine.demand)
    if not devices.gpus or not engine.bases:
        return []
    needs = []
    is_vllm = engine.engine.kind == "vllm"
    for rank, at in enumerate(devices.ranks):
        gpu = devices.gpus[at]
        limit = 1.0 if engine.demand.engine_in_process else devices.share_of_rank(rank)
        # Held by other processes, outside the shares that vLLM reserves.
        used_bytes = gpu.memory.total - gpu.memory.free if is_vllm else 0
        settings = "; or ".join(
            part.setting for part in sorted(memory.of_rank, key=lambda part: -part.bytes) if part.setting
        )
        needs.append(
            GpuMemoryNeed(
                user=f"trainer rank {rank}",
                gpu=gpu,
                needed=sum(part.bytes for part in memory.of_rank),
                least=sum(part.bytes for part in memory.of_rank if part.is_exact),
                allowed=int(limit * gpu.memory.total) - used_bytes,
                setting=settings,
            )
        )
    if not is_vllm:
        return needs
    settings = "a larger tensor_parallel_size in [engine.vllm]; or a larger engine.memory_share"
    for number, (indices, share) in enumerate(zip(devices.engines, devices.shares, strict=True)):
        total = min(devices.gpus[at].memory.total for at in indices)
        base = engine.bases[number // engine.engine.count]
        needed_bytes = _vllm_least(engine, base, total, shared=devices.shares_gpu(number))
        for at in indices:
            gpu = devices.gpus[at]
            user, limit_bytes = devices.name_of_engine(number), int(share * gpu.memory.total)
            needs.append(
                GpuMemoryNeed(
                    user=user, gpu=gpu, needed=needed_bytes, least=needed_bytes, allowed=limit_bytes, setting=settings
                )
            )
    return needs


def _vllm_least(plan: EnginePlan, base: BaseModelPlan, total: int, *, shared: bool) -> int:
    """Return the minimum bytes with which a base model's vLLM starts, on each of its GPUs.

    Args:
        plan: engines of the run.
        base: the base model.
        total: memory of the smallest of its GPUs.
        shared: whether other processes of the run compute there, so that agentrl chooses the size of the KV cache.
    """
    from agentrl.engines.vllm.gpu_memory import least_bytes_of_share

    footprint, arguments = _engine_memory(plan, base), plan.engine.vllm or {}
    if shared:
        path, limit = Path(base.path).resolve(), plan.engine.max_context
        return least_bytes_of_share(
            path,
            footprint,
            dtype=plan.dtype,
            slots=plan.slots,
            max_context=limit,
            total=total,
            arguments=arguments,
        )
    return (footprint.weights + footprint.adapters + footprint.keys_and_values // plan.slots) // plan.engine.devices


def memory_line(engine: EnginePlan, trainer: TrainerPlan, prompts: Sequence[Sequence[int]] = ()) -> str:
    """Describe the memory that a run will take, for its start; see `estimate_memory`.

    Raises:
        ConfigError: what is certain is more than this machine has. `check_gpu_memory` checks GPUs.
    """
    try:
        memory = estimate_memory(engine, trainer, prompts)
    except Exception as error:  # noqa: BLE001 - no failed prediction may stop a run
        return f"memory: cannot be predicted ({error})"
    total = machine_memory().total
    if memory.least > total and not (device_plan(engine.demand).gpus or engine.demand.cluster.ray_address):
        raise ConfigError(
            f"the run needs at least {memory.least / GIB:.1f} GiB, and this machine has {total / GIB:.1f}: set "
            f"{'; or '.join(memory.settings_to_turn())}"
        )
    line = f"memory: {memory.sizes}, of the {memory.free / GIB:.1f} GiB that are free"
    if memory.fits:
        return line
    return f"{line}, so the run may be killed: set {'; or '.join(memory.settings_to_turn())}"


def check_gpu_memory(engine: EnginePlan, trainer: TrainerPlan) -> list[str]:
    """Refuse a run if a GPU is certainly too small for it, or too full; call it before anything is loaded.

    Returns:
        Warnings for GPUs that are probably too small; they do not stop the run.

    Raises:
        ConfigError: the message says what is needed, what is there, and what to change.
    """
    devices = device_plan(engine.demand)
    if not devices.gpus or not engine.bases:
        return []
    if engine.engine.kind == "vllm" and (gpu_conflicts := devices.memory_conflicts()):
        raise ConfigError("\n  ".join(gpu_conflicts))
    try:
        memory = estimate_memory(engine, trainer)
        needs = gpu_memory_needs(engine, memory)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - no failed prediction may stop a run
        return [f"whether the run fits its GPUs cannot be predicted ({error!r})"]
    if too_small := [str(need) for need in needs if need.least > need.allowed]:
        raise ConfigError("\n  ".join(too_small))
    if memory.least > memory.free:
        raise ConfigError(
            f"the run needs at least {memory.least / GIB:.1f} GiB of its GPUs, and {memory.free / GIB:.1f} are free: "
            f"{(memory.least - memory.free) / GIB:.1f} GiB are missing. Set {'; or '.join(memory.settings_to_turn())}, "
            "stop what else computes there, or use a larger GPU"
        )
    return [
        f"{need.user} may need {need.needed / GIB:.1f} GiB of GPU {need.gpu.id}, and may take "
        f"{need.allowed / GIB:.1f}. If it runs out of memory, set {need.setting}"
        for need in needs
        if need.needed > need.allowed
    ]


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
        ConfigError: not even short contexts fit into memory, or turns are longer than the contexts.
    """
    context = config.engine.max_context or _chosen_before(before, "engine", "max_context")
    tokens = config.trainer.micro_batch_tokens or _chosen_before(before, "trainer", "micro_batch_tokens")
    if config.bases and not (context and (tokens or not config.trained)):
        context, tokens = _token_limits(config.engine_plan, config.trainer_plan, context, tokens)
    chosen_config = config.with_token_limits(context, tokens)
    chosen_config.check_turns_fit()
    return chosen_config


def _token_limits(engine: EnginePlan, trainer: TrainerPlan, context: int, tokens: int) -> tuple[int, int]:
    """Return the sizes of `_fitting_sizes`; if they cannot be predicted, small ones, with a warning."""
    try:
        return _fitting_sizes(engine, trainer, context, tokens)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - no failed prediction may stop a run
        context = context or min(_longest_context(engine), FALLBACK_CONTEXT)
        tokens = tokens or (context if trainer.policies else 0)
        reason = (
            error if isinstance(error, PredictionError) else f"the memory of this run cannot be predicted ({error!r})"
        )
        warnings.warn(
            f"{reason}: it starts with engine.max_context = {context} and trainer.micro_batch_tokens = {tokens}, which "
            "may be too much or too little; set them to choose",
            stacklevel=2,
        )
        return context, tokens


def _chosen_before(before: Mapping[str, Any], section: str, name: str) -> int:
    value = value_at(before, section, name)
    # larger numbers in a run's files do not come from this module
    return value if type(value) is int and 0 < value <= 10**8 else 0


def _longest_context(engine: EnginePlan) -> int:
    """Return the longest context for which every model has positions."""
    from agentrl.engines.models import longest_context

    embedded = engine.engine.kind == "embedded"
    return min(longest_context(base.path, embedded=embedded) or MAX_CONTEXT for base in engine.bases)


def _fitting_sizes(engine: EnginePlan, trainer: TrainerPlan, context: int, tokens: int) -> tuple[int, int]:
    """Return the longest context, and the largest micro-batches of it, that fit into memory.

    Args:
        engine: engines of the run.
        trainer: its trainer.
        context: `engine.max_context`; 0: the longest for which a micro-batch of one row fits.
        tokens: `trainer.micro_batch_tokens`; 0: at least one row of full length.
    """

    def estimate(length: int) -> MemoryEstimate:
        return estimate_memory(engine.with_max_context(length), trainer.with_token_limits(length, length))

    shortest = context or min(MIN_CONTEXT, _longest_context(engine))
    length = context or _longest_context(engine)
    memory = estimate(length)
    while length > shortest and _needed_bytes(memory) > _limit(memory):
        # No part grows faster than the square of the context, so no context between the two fits.
        max_length = int(length * math.sqrt(_limit(memory) / _needed_bytes(memory)))
        length = max(shortest, 1 << (max(max_length, 1).bit_length() - 1))
        memory = estimate(length)
    if not context and _needed_bytes(memory) > _limit(memory):
        raise ConfigError(
            f"not enough memory: with contexts of {length} tokens the run would need "
            f"{_needed_bytes(memory) >> 20:,} MiB, and it may take {_limit(memory) >> 20:,}, {USED_SHARE:.0%} of the "
            f"free memory. Set {', or '.join(memory.settings_to_turn())}"
        )
    if not tokens and trainer.policies:
        tokens = _fitting_tokens(memory, length)
    return length, tokens


_predictors: dict[tuple[object, ...], TrainerMemoryPredictor] = {}
"""The newest predictor, keyed by what it depends on: a start asks several times."""


def _predictor(trainer: TrainerPlan) -> TrainerMemoryPredictor:
    from agentrl.learn.memory_prediction import TrainerMemoryPredictor

    files = (Path(base.path, "config.json") for base in trainer.bases)
    key = (repr(trainer.with_token_limits(0, 0)), *(os.stat(file).st_mtime_ns for file in files))
    if key not in _predictors:
        predictor = TrainerMemoryPredictor(trainer)
        _predictors.clear()
        _predictors[key] = predictor
    return _predictors[key]


def _fitting_tokens(plan: MemoryEstimate, context: int) -> int:
    """Return the tokens of a micro-batch that fit next to everything else; at least one row of full length.

    Args:
        plan: memory of the run with micro-batches of one row.
        context: length of that row.
    """
    rows = [part for part in plan.parts if part.grows_with_tokens]
    per_token = sum(part.bytes * part.processes for part in rows) / context
    max_tokens = context + int((_limit(plan) - _needed_bytes(plan)) / max(per_token, 1.0))
    if not plan.of_rank:
        max_tokens = min(max_tokens, max(CPU_MICRO_BATCH, CPU_ROWS * context))
    return max(context, min(MAX_MICRO_BATCH, 1 << (max(max_tokens, 1).bit_length() - 1)))


def _needed_bytes(plan: MemoryEstimate) -> int:
    """Return the bytes of all processes except vLLM on a GPU, which sizes itself to its reserved share."""
    return sum(part.bytes * part.processes for part in plan.parts if not (part.is_vllm_share or part.is_mapped))


def _limit(plan: MemoryEstimate) -> int:
    """Return the bytes that may be filled, on all devices of the run, outside the shares that vLLM reserves."""
    vllm_bytes = sum(part.bytes for part in plan.parts if part.is_vllm_share)
    return int(USED_SHARE * (plan.free - vllm_bytes))


def _smaller_dtype(dtype: str) -> str:
    """Return the setting that makes weights of a dtype smaller; empty if there is none."""
    return "model.dtype = 'bfloat16'" if dtype == "float32" else ""


def _expected_activations(plan: TrainerPlan, prompts: Sequence[Sequence[int]]) -> int:
    """Return the bytes of activations in a step with prompts like the given ones.

    Rows of a group share their prompt, and prompts share their beginning, if the model computes shared prefixes once.
    Without known prompts, one as long as contexts allow counts once.
    """
    predictor, ordered = _predictor(plan), sorted(map(tuple, prompts))
    size = TAUGHT_SHARE * max(policy.step_size for policy in plan.policies.values())
    longest = max(plan.max_context - plan.max_sampled, 1)
    prompt = _mean_length(prompts) or longest
    sampled = _expected_sampled(plan, prompt)
    further = [len(tokens) - _shared_length(before, tokens) for before, tokens in itertools.pairwise(ordered)]
    per_group = sum(further) / len(further) if further else 0
    prompts_once = prompt + per_group * (max(size / plan.credit.group_size, 1) - 1)
    is_shared = not any(model.unshared for model in predictor.models.values())
    tokens = (prompts_once if is_shared else size * prompt) + size * sampled
    at_once = min(tokens, max(plan.trainer.micro_batch_tokens, plan.max_context))
    rows = max(round(size * at_once / tokens), 1)
    length = max(round(at_once / rows), 2)
    return predictor.predict(length, rows * length).activations


def _mean_length(prompts: Sequence[Sequence[int]]) -> float:
    return sum(map(len, prompts)) / len(prompts) if prompts else 0.0


def _expected_sampled(plan: TrainerPlan, prompt: float) -> float:
    """Return the tokens that an agent is expected to sample after a prompt of a length."""
    return SAMPLED_SHARE * min(plan.max_sampled, max(plan.max_context - prompt, 1))


def _shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _trainer(plan: TrainerPlan, prompts: Sequence[Sequence[int]], *, on_gpu: bool) -> list[MemoryPart]:
    if not plan.policies:
        return []
    prediction = _predictor(plan).predict(plan.max_context, plan.trainer.micro_batch_tokens)
    expected = min(_expected_activations(plan, prompts), prediction.activations)
    if plan.in_process:
        part = partial(MemoryPart, process=_THIS, user="trainer")
    else:
        part = partial(MemoryPart, process="trainer rank", processes=plan.trainer.ranks)
    offloads = on_gpu and plan.trainer.sharding == "offload"
    tokens = "a smaller trainer.micro_batch_tokens, down to engine.max_context"
    if not plan.trainer.recompute:
        tokens = f"trainer.recompute = true, or {tokens}"
    label = "trained parameters, their gradients and AdamW's moments in float32"
    shard = f"1/{prediction.shards} of " if prediction.shards > 1 else ""
    kinds = {policy.lora is None for policy in plan.policies.values()}
    fewer = ["a policies.NAME.lora" if is_full else _RANK for is_full in sorted(kinds)]
    if on_gpu and not offloads:
        fewer.insert(0, "trainer.sharding = 'offload'")
    if prediction.shards == 1 and plan.trainer.ranks > 1:
        fewer.insert(0, "trainer.sharding = 'full'")
    is_offloaded = offloads and prediction.shards > 1
    exact = partial(part, is_exact=True)
    parts = [
        exact(
            name=f"{shard}weights in {prediction.dtype}",
            bytes=prediction.weights,
            setting=_smaller_dtype(prediction.dtype),
            offloaded=is_offloaded,
            file_bytes=max(weight_file_bytes(base.path) for base in plan.bases),
        ),
        exact(name=f"{shard}{label}", bytes=prediction.trained, setting=", ".join(fewer), offloaded=offloads),
        part(
            name=f"activations of {prediction.tokens:,} tokens",
            bytes=prediction.activations,
            setting=tokens,
            grows_with_tokens=True,
            expected=expected,
        ),
    ]
    if (copies := prediction.copies - prediction.activations) > 0:
        name = "in addition to activations, while gradients are summed or weights are sent"
        parts.append(part(name=name, bytes=copies, setting=", ".join(fewer)))
    if prediction.shards > 1:
        parts.append(
            part(
                name="layers that are whole while they compute",
                bytes=prediction.gathered,
                setting=_smaller_dtype(prediction.dtype),
            )
        )
    if not on_gpu:
        # glibc's heap had gaps of 2 to 34 % of the activations in measured runs
        gaps = partial(part, name="heap fragmentation (estimate)", setting=tokens, grows_with_tokens=True)
        parts.append(gaps(bytes=int(0.2 * prediction.activations), expected=int(0.2 * expected)))
    return parts


def _engine(plan: EnginePlan, base: BaseModelPlan, devices: DevicePlan, first: int, filled: float) -> list[MemoryPart]:
    """Predict the engines of one base model, whose numbers in the device plan begin at `first`; contexts are expected
    to reach the share `filled` of their length."""
    section = plan.engine
    if plan.demand.engine_in_process:
        part = partial(MemoryPart, process=_THIS, user="engine")
    else:
        part = partial(MemoryPart, process=_ENGINE, processes=section.count)
    if section.kind == "vllm" and devices.gpus:
        vllm_parts = []
        for number in range(first, first + section.count):
            gpus, share = devices.engines[number], devices.shares[number]
            count = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}"
            vllm_parts.append(
                MemoryPart(
                    process=f"engine {number}",
                    is_vllm_share=True,
                    name=f"vLLM: {share:.0%} of {count} for weights, keys and values",
                    bytes=sum(int(share * devices.gpus[at].memory.total) for at in gpus),
                    setting="a smaller engine.memory_share",
                    is_exact=True,
                )
            )
        return vllm_parts
    adapters, memory = adapter_slots_needed(base.policies), _engine_memory(plan, base)
    weights = part(
        name=f"weights in {memory.dtype}",
        bytes=memory.weights,
        setting=_smaller_dtype(memory.dtype),
        is_exact=True,
        file_bytes=weight_file_bytes(base.path),
    )
    uses_trainers = (
        plan.demand.engine_in_process
        and plan.demand.ranks == 1
        and not devices.gpus
        and serves_only_adapters(base.policies)
    )
    contexts = part(
        name=f"keys and values of {plan.slots} contexts of {section.max_context:,} tokens",
        bytes=memory.keys_and_values,
        setting=_CONTEXTS,
        is_exact=True,
    )
    if section.kind == "embedded" and not devices.gpus:  # they take memory as they are written
        contexts = replace(contexts, is_exact=False, expected=int(filled * memory.keys_and_values))
    parts = [
        *([] if uses_trainers else [weights]),
        contexts,
        part(name="logits", bytes=memory.logits, setting=_CONTEXTS),
    ]
    if adapters:
        name = plural(adapters, "adapter")
        parts.append(part(name=name, bytes=memory.adapters, setting=_RANK))
    if copies := sum(policy.lora is None for policy in base.trained.values()):
        name = f"{plural(copies, 'copy', 'copies')} of the weights, for the next version of a fully trained policy"
        parts.append(part(name=name, bytes=copies * memory.weights, setting="a policies.NAME.lora"))
    if section.kind == "embedded" and (merged := len(merged_policies(base))):  # vLLM reads the base from its files
        name = f"{plural(merged, 'copy', 'copies')} of the weights with adapters merged in"
        parts.append(part(name=name, bytes=merged * memory.merged, setting="policies.NAME.lora.merge = false"))
    return parts


def _engine_memory(plan: EnginePlan, base: BaseModelPlan) -> EngineMemoryEstimate:
    path = Path(base.path).resolve()
    return _predicted_engine_memory(
        path,
        os.stat(path / "config.json").st_mtime_ns if (path / "config.json").is_file() else 0,
        dtype=plan.dtype,
        slots=plan.slots,
        max_context=plan.engine.max_context,
        adapter_slots=adapter_slots_needed(base.policies),
        max_rank=largest_lora_rank(base.policies.values()),
    )


@lru_cache(maxsize=8)
def _predicted_engine_memory(path: Path, changed_at: int, **sizes: Any) -> EngineMemoryEstimate:
    """Predict an engine's memory, once per start: with adapters, the model is called without data."""
    from agentrl.engines.weights.reading import predict_engine_memory

    return predict_engine_memory(path, **sizes)


def _programs(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """Predict the memory of Python and its libraries in each process from this process, which has imported the same.

    Code is mapped from files, and shared by all processes.
    """
    process_bytes = process_memory_bytes()
    processes = {part.process: part.processes for part in parts} | {_THIS: 1}
    return [
        *(
            MemoryPart(process=process, name="Python and its libraries", bytes=process_bytes.anonymous, processes=count)
            for process, count in processes.items()
        ),
        MemoryPart(process=_THIS, name="their code, mapped from files", bytes=process_bytes.mapped, is_mapped=True),
    ]


def _mapped_weights(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """Predict the mapped checkpoint of each process that converts its weights, beyond its later allocations."""
    mapped = []
    for process in dict.fromkeys(part.process for part in parts):
        of_process = [part for part in parts if part.process == process]
        later = sum(part.expected_bytes for part in of_process if not part.file_bytes)
        # Weights in the checkpoint's dtype are the mapped file itself.
        is_file = [math.isclose(part.file_bytes, part.bytes, rel_tol=0.1) for part in of_process]
        converted = [part.file_bytes for part, same in zip(of_process, is_file, strict=True) if not same]
        beyond = max(converted, default=0) - later
        if beyond > 0:
            name = "the checkpoint, mapped while it is converted, beyond what is allocated later"
            mapped.append(MemoryPart(process=process, name=name, bytes=beyond, is_mapped=True))
    return mapped
