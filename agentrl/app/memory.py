"""Predicts the memory of a run, process by process, before any weight is loaded."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.app.policies import adapter_slots_needed, largest_rank
from agentrl.config.run import RunConfig

_CONTEXTS = "fewer engine.slots, or a smaller engine.max_context"
_DTYPE = "model.dtype = 'bfloat16'"
_THIS = "this process"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One part of a process's memory."""

    process: str
    """`this process`, `engine` or `trainer rank`."""
    name: str
    bytes: int
    """Bytes in one such process."""
    processes: int = 1
    setting: str = ""
    """The setting that reduces it; empty: none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """A run's peak memory, and the memory available."""

    parts: tuple[MemoryPart, ...]
    free: int
    """Bytes that are free on the device that the run computes on."""

    @property
    def total(self) -> int:
        """Bytes that all processes hold together."""
        return sum(part.bytes * part.processes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether so much is free."""
        return self.total <= self.free

    def settings_to_turn(self) -> list[str]:
        """The settings that reduce it, those with the largest effect first."""
        saved: dict[str, int] = defaultdict(int)
        for part in self.parts:
            if part.setting:
                saved[part.setting] += part.bytes * part.processes
        return sorted(saved, key=lambda setting: -saved[setting])


def memory_plan(config: RunConfig) -> MemoryPlan:
    """The memory of a run's trainer and engines, at the longest rows and with every slot full.

    Raises:
        ModelError: the directory holds no model that can be trained and served.
        ConfigError: an adapter is to be on what cannot be both trained and served.
    """
    from agentrl.engines.memory import device_memory

    there, on_gpu = device_memory()
    parts = [*_trainer(config), *_engine(config, on_gpu=on_gpu, device_bytes=there.total)] if config.model.path else []
    if not on_gpu:
        parts += _programs(parts)
    return MemoryPlan(parts=tuple(parts), free=there.free)


def _trainer(config: RunConfig) -> list[MemoryPart]:
    if not config.trained:
        return []
    from agentrl.learn.memory import trainer_memory

    held = trainer_memory(config)
    if config.trainer.kind == "in_process":
        part = partial(MemoryPart, process=_THIS)
    else:
        part = partial(MemoryPart, process="trainer rank", processes=config.trainer.workers)
    rank = "a smaller policies.NAME.lora.rank, or a lora where there is none"
    tokens = "a smaller trainer.micro_batch_tokens, down to engine.max_context"
    if not config.trainer.recompute:
        tokens = f"trainer.recompute = true, or {tokens}"
    optimized = "trained parameters, their gradients and AdamW's moments in float32"
    return [
        part(name=f"weights in {held.dtype}", bytes=held.weights, setting=_DTYPE),
        part(name=optimized, bytes=held.trained, setting=rank),
        part(name=f"activations of {held.tokens:,} tokens", bytes=held.activations, setting=tokens),
    ]


def _engine(config: RunConfig, *, on_gpu: bool, device_bytes: int) -> list[MemoryPart]:
    from agentrl.engines.memory import VLLM_SHARE, engine_memory

    section = config.engine
    if config.engine_in_process:
        part = partial(MemoryPart, process=_THIS)
    else:
        part = partial(MemoryPart, process="engine", processes=section.replicas)
    if section.kind == "vllm" and on_gpu:
        name = f"vLLM: {VLLM_SHARE:.0%} of the GPU for weights, keys and values"
        return [part(name=name, bytes=int(VLLM_SHARE * device_bytes))]
    adapters = adapter_slots_needed(config)
    held = engine_memory(
        Path(config.model.path).resolve(),
        dtype=config.model.dtype,
        slots=section.slots,
        max_context=section.max_context,
        adapter_slots=adapters,
        max_rank=largest_rank(config),
    )
    contexts = f"keys and values of {section.slots} contexts of {section.max_context:,} tokens"
    parts = [
        part(name=f"weights in {held.dtype}", bytes=held.weights, setting=_DTYPE),
        part(name=contexts, bytes=held.keys_and_values, setting=_CONTEXTS),
        part(name="logits", bytes=held.logits, setting=_CONTEXTS),
    ]
    if adapters:
        name = f"{adapters} adapters"
        parts.append(part(name=name, bytes=held.adapters, setting="a smaller policies.NAME.lora.rank"))
    if copies := sum(policy.lora is None for policy in config.trained.values()):
        name = f"{copies} more of the weights, for the next version of a policy that trains all of them"
        parts.append(part(name=name, bytes=copies * held.weights, setting="a policies.NAME.lora"))
    return parts


def _programs(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """Python and its libraries in each process: what this one, which has imported the same, holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    processes = {part.process: part.processes for part in parts} | {_THIS: 1}
    return [
        MemoryPart(process=process, name="Python and its libraries", bytes=resident, processes=count)
        for process, count in processes.items()
    ]
