"""What a run will hold in memory, said before any weight is loaded.

The trainer's share is not estimated: one step on the longest rows is computed with tensors that have shapes and no data
(torch's `FakeTensorMode`), and every allocation and release is counted. The engine's share is arithmetic. Only shapes
are read from the model directory, so the plan of a large model takes seconds and little memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.app.policies import adapter_slots_needed, largest_rank
from agentrl.config.run import RunConfig
from agentrl.core.machine import memory
from agentrl.core.records import TrainingSample
from agentrl.engines.models import computable, kv_bytes_per_token, model_dtype, read_shapes
from agentrl.engines.weights import adaptable_layers
from agentrl.learn.forward import token_logprobs
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.packing import pack

_OPTIMIZER_STATES = 2
"""AdamW's moments, float32 as what they belong to."""
_LOGIT_COPIES = 3
"""Of a pass's logits, in float32, that exist at once while the embedded engine samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One thing that a process holds."""

    process: str
    """`this process`, `engine` or `trainer rank`."""
    name: str
    bytes: int
    """In one such process."""
    processes: int = 1
    setting: str = ""
    """What makes it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a run holds, and what there is."""

    parts: tuple[MemoryPart, ...]
    free: int
    """Bytes that this machine has free; of the GPU's memory if the run computes on one."""

    @property
    def total(self) -> int:
        """Bytes that all processes hold together."""
        return sum(part.bytes * part.processes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether it is free."""
        return self.total <= self.free

    def settings_to_turn(self) -> list[str]:
        """What makes the plan smaller, the largest part's setting first."""
        saved: dict[str, int] = defaultdict(int)
        for part in self.parts:
            if part.setting:
                saved[part.setting] += part.bytes * part.processes
        return sorted(saved, key=lambda setting: -saved[setting])


def memory_plan(config: RunConfig) -> MemoryPlan:
    """The memory of a run's trainer and engines.

    Raises:
        ModelError: the directory holds no model that can be trained.
        ConfigError: an adapter is to be on what cannot be both trained and served.
    """
    parts = [*_trainer(config), *_engine(config)]
    if torch.cuda.is_available():
        return MemoryPlan(parts=tuple(parts), free=torch.cuda.mem_get_info()[0])
    return MemoryPlan(parts=(*parts, *_programs(parts)), free=memory().free)


def _programs(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """Python, torch and transformers of each process: what this one, which has imported the same, holds now."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    resident = int(fields[1]) * _PAGE
    processes = {part.process: part.processes for part in parts} | {"this process": 1}
    return [
        MemoryPart(process=process, name="Python and its libraries", bytes=resident, processes=count)
        for process, count in processes.items()
    ]


_PAGE = 4096


# --- trainer ----------------------------------------------------------------------------------------------------------


def _trainer(config: RunConfig) -> list[MemoryPart]:
    """Weights, what the optimizer holds, and a step's activations."""
    if not config.trained:
        return []
    own = config.trainer.kind == "in_process"
    part = MemoryPart(
        process="this process" if own else "trainer rank",
        processes=1 if own else config.trainer.workers,
        name="",
        bytes=0,
    )
    models = load_models(config, torch.device("meta"))
    computed = {id(parameter): parameter for model in models.values() for parameter in model.model.parameters()}
    trained = {id(parameter): parameter for model in models.values() for parameter in model.parameters.values()}
    held = _bytes(trained.values())
    dtype = next(iter(models.values())).model.dtype
    weights = _bytes(parameter for identity, parameter in computed.items() if identity not in trained)
    largest = max((_activations(config, name, model) for name, model in models.items()), default=0)
    described = "adapters" if all(model.kind == "adapter" for model in models.values()) else "trained weights"
    tokens = _micro_batch_tokens(config)
    return [
        replace(part, name=f"weights in {_named(dtype)}", bytes=weights, setting="model.dtype = 'bfloat16'"),
        replace(
            part,
            name=f"{described} in float32, gradients, optimizer",
            bytes=held * (2 + _OPTIMIZER_STATES),
            setting="a smaller policies.NAME.lora.rank, or a lora where there is none",
        ),
        replace(
            part,
            name=f"activations of {tokens:,} tokens",
            bytes=largest,
            setting="a smaller trainer.micro_batch_tokens, down to engine.max_context",
        ),
    ]


def _micro_batch_tokens(config: RunConfig) -> int:
    """Tokens of the largest micro-batch: full, or one row that is longer."""
    return max(config.trainer.micro_batch_tokens, config.engine.max_context)


def _activations(config: RunConfig, policy: str, model: PolicyModel) -> int:
    """Bytes that a step of a policy allocates beyond weights and gradients, at its peak."""
    (batch,) = pack(longest_rows(config, policy, model), max_tokens=_micro_batch_tokens(config), share=False)
    module: nn.Module = model.model
    model.activate()
    with computable(model.model), AllocationCounter([*module.parameters(), *module.buffers()]) as counted:
        output = token_logprobs(
            model.model,
            batch,
            shared=model.shared_prefixes,
            entropy_gradient=bool(config.trainer.entropy_bonus),
            replay=model.replay,
        )
        (output.logprob.sum() + output.entropy.sum()).backward()
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return counted.peak - _bytes(gradients)


def longest_rows(config: RunConfig, policy: str, model: PolicyModel) -> list[TrainingSample]:
    """As many rows of `engine.max_context` random tokens as fit into a micro-batch of a step of a policy.

    As many tokens as an episode can sample are trained, at the end of each row.
    """
    context = config.engine.max_context
    count = min(max(1, config.trainer.micro_batch_tokens // context), config.trained[policy].step_size)
    sampled = min(context - 1, config.sampling.max_tokens * config.sampling.max_turns)
    vocabulary = int(model.model.config.get_text_config().vocab_size)
    drawn = np.random.default_rng(0).integers(0, vocabulary, (count, context)).astype(np.int32)
    mask, nothing = np.arange(context) >= context - sampled, np.zeros(context, np.float32)
    return [
        TrainingSample(token_ids=row, loss_mask=mask, behavior_logprobs=nothing, advantages=nothing) for row in drawn
    ]


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside it allocate, until each is released.

    Args:
        known: tensors whose storages are not counted.
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        """Bytes allocated and not yet released."""
        self.peak = 0
        """The most there were."""
        self._counted: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it allocated."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._counted:
            return
        self._counted[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._counted.pop(key, 0)


# --- engine -----------------------------------------------------------------------------------------------------------


def _engine(config: RunConfig) -> list[MemoryPart]:
    """Weights, versions of adapters, keys and values."""
    section = config.engine
    own = section.kind == "embedded" and section.placement == "here" and config.workers == 1
    part = MemoryPart(
        process="this process" if own else "engine", processes=1 if own else section.replicas, name="", bytes=0
    )
    path = Path(config.model.path).resolve()
    dtype = model_dtype(path, config.model.dtype, torch.device("cpu"))
    shapes = read_shapes(path, max_context=section.max_context, dtype=dtype)
    weights = _bytes(shapes.parameters())
    text = shapes.config.get_text_config()
    copies = sum(policy.lora is None for policy in config.trained.values())
    parts = [
        replace(part, name=f"weights in {_named(dtype)}", bytes=weights, setting="model.dtype = 'bfloat16'"),
        replace(
            part,
            name=f"keys and values of {section.slots} contexts of {section.max_context:,} tokens",
            bytes=section.slots * (section.max_context + 1) * kv_bytes_per_token(shapes.config),
            setting="fewer engine.slots, or a smaller engine.max_context",
        ),
        replace(
            part,
            name="logits",
            bytes=_LOGIT_COPIES * section.slots * int(text.vocab_size) * torch.float32.itemsize,
            setting="fewer engine.slots, or a smaller engine.max_context",
        ),
    ]
    if copies:
        name = "a copy of the weights for each policy that trains all of them, which the next version is read into"
        parts.append(replace(part, name=name, bytes=weights * copies, setting="policies.NAME.lora"))
    if slots := adapter_slots_needed(config):
        named = dict(shapes.named_modules())
        sizes = [sum(named[name].weight.shape) for name in adaptable_layers(shapes)]
        adapters = slots * largest_rank(config) * sum(sizes) * dtype.itemsize
        parts.append(
            replace(part, name=f"{slots} adapters", bytes=adapters, setting="a smaller policies.NAME.lora.rank")
        )
    return parts


def _bytes(tensors: Any) -> int:
    """The bytes of tensors, each once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(each): each for each in tensors}.values())


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
