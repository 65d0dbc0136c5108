"""What a version of a policy holds, and how it is made from the trained weights.

It is an adapter (`PublishedAdapter`), also if the engine merges it, or all weights, exact or rounded from float32
masters (`PublishedWeights`). `publish.py` writes it to disk.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from agentrl.config.fields import hub_commit
from agentrl.core.errors import ModelError
from agentrl.engines.stored_tensors import FLOAT_DTYPES, StoredTensor, checkpoint_tensors, layer_prefix
from agentrl.engines.weights.reading import count_numbers, map_weights_to_state, read_adapter_tensors, read_weights
from agentrl.learn.ranks import gather_tensor

if TYPE_CHECKING:
    from agentrl.core.records import WeightsRef
    from agentrl.learn.models import PolicyModel

_ADAPTER_MATRIX = re.compile(r"\.lora_[AB]\.")


class Publication(ABC):
    """The content of a policy's versions.

    Args:
        policy: the trained policy.
    """

    kind: ClassVar[Literal["full", "adapter"]]
    """What engines load: all weights, or an adapter."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy

    @property
    @abstractmethod
    def inexact_because(self) -> str:
        """How a version differs from the trained weights, such as "rounded"; empty: it holds them bit for bit."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a version's safetensors file by name, in the layout of `from_pretrained`, one at a time.
        Ranks with shards of the model iterate together."""

    @abstractmethod
    def layout(self) -> Mapping[str, Tensor]:
        """Return the tensors of `tensors` in its order, without data: names, shapes and dtypes."""

    def load(self, weights: WeightsRef) -> None:
        """Load the weights of a published version into the policy, bit for bit.

        Raises:
            EngineError: the file is damaged, or not the published one.
            ModelError: the version differs from the trained weights, or it belongs to another model.
        """
        read = self._read(weights)
        difference = self.inexact_because
        if not difference and any(tensor.dtype != torch.float32 for tensor in read.values()):
            difference = "rounded"
        if difference:
            raise ModelError(
                f"{weights.path}: {difference} when it was published, so it differs from the trained weights; use the "
                "weights of a checkpoint, which are float32"
            )
        self._copy(weights, read)
        self._policy.round_masters()

    @abstractmethod
    def _read(self, weights: WeightsRef) -> Mapping[str, Tensor]:
        """Read the tensors of a version."""

    @abstractmethod
    def _copy(self, weights: WeightsRef, read: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a version into the policy."""


class PublishedAdapter(Publication):
    """The policy's adapter, in float32, for an engine that serves it on the base."""

    kind = "adapter"
    inexact_because = ""

    def config(self) -> dict[str, Any]:
        """Return PEFT's `adapter_config.json` as a dictionary."""
        policy = self._policy
        assert policy.peft_model is not None
        assert policy.adapter is not None
        config: dict[str, Any] = policy.peft_model.peft_config[policy.adapter].to_dict()
        name, commit = hub_commit(str(policy.base))
        if name:  # a path into this machine's cache means nothing elsewhere
            config |= {"base_model_name_or_path": name, "revision": commit}
        config["inference_mode"] = True
        config["target_modules"] = sorted(config["target_modules"])
        return config

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.parameters().items():
            yield name, gather_tensor(tensor, tensor.dtype)

    def layout(self) -> Mapping[str, Tensor]:
        return {name: _without_data(tensor, tensor.dtype) for name, tensor in self.parameters().items()}

    def parameters(self) -> dict[str, Tensor]:
        """Return the adapter's matrices, keyed by name in the file; not copies."""
        mark = f".{self._policy.adapter}."  # PEFT's own method would touch the adapters of all policies
        parameters = self._policy.parameters.items()
        return {f"base_model.model.{name.replace(mark, '.')}": parameter for name, parameter in parameters}

    def _read(self, weights: WeightsRef) -> Mapping[str, Tensor]:
        return read_adapter_tensors(weights, max_numbers=sum(tensor.numel() for tensor in self.parameters().values()))

    @torch.no_grad()
    def _copy(self, weights: WeightsRef, read: Mapping[str, Tensor]) -> None:
        parameters = self.parameters()
        if {name: tensor.shape for name, tensor in read.items()} != {
            name: parameters[name].shape for name in parameters
        }:
            raise ModelError(f"{weights.path}: an adapter of different modules, or of a different rank")
        for name, tensor in read.items():
            parameters[name].copy_(tensor)


class PublishedWeights(Publication):
    """All weights of a policy that trains them, in the dtype in which the model computes."""

    kind = "full"

    @property
    def inexact_because(self) -> str:
        return "rounded" if self._policy.has_masters else ""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self._unique_tensors()
        for group in self._conversion_groups:
            group_tensors = {name: self._gather(name, tensors[name]) for name in group}
            yield from self._convert(group_tensors).items()
            group_tensors.clear()
        for name, tensor in self._carried.items():
            yield name, tensor[...]

    def layout(self) -> Mapping[str, Tensor]:
        tensors = self._unique_tensors()
        groups = [self._without_data(tensors, group) for group in self._conversion_groups]
        trained = {name: tensor for group in groups for name, tensor in self._convert(group).items()}
        return trained | {
            name: torch.empty(tensor.get_shape(), dtype=FLOAT_DTYPES[tensor.get_dtype()], device="meta")
            for name, tensor in self._carried.items()
        }

    @torch.no_grad()
    def _gather(self, name: str, tensor: Tensor) -> Tensor:
        """Gather a tensor of the model from all ranks."""
        return gather_tensor(tensor, self._dtype(tensor))

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a tensor is published: a model trained in full is sharded as float32 masters, and
        published in its compute dtype."""
        policy = self._policy
        rounds = policy.sharded and policy.kind == "full" and tensor.is_floating_point()
        return policy.dtype if rounds and isinstance(tensor, DTensor) else tensor.dtype

    @cached_property
    def _carried(self) -> Mapping[str, StoredTensor]:
        """Tensors that the checkpoint has and the text model does not, such as those of a vision tower: a version has
        them as they are."""
        state = dict(self._model_tensors())
        known = self._convert(self._without_data(state, state)).keys()  # those of tied weights, too
        stored = {
            name: tensor
            for name, tensor in checkpoint_tensors(self._policy.base).items()
            if tensor.get_dtype() in FLOAT_DTYPES
        }
        if not self._convert(self._without_data(tensors := self._unique_tensors(), tensors)).keys() <= stored.keys():
            return {}  # the names of another layout do not tell what the text model lacks
        return {name: tensor for name, tensor in stored.items() if name not in known}

    def _unique_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that make up a version, those with large elements first; not copies."""
        state: dict[str, Tensor] = {}
        storages: set[int] = set()
        for name, tensor in self._model_tensors():
            place = id(tensor) if isinstance(tensor, DTensor) else tensor.data_ptr()
            if place not in storages:  # otherwise it is tied to a parameter that is already included
                storages.add(place)
                state[name] = tensor.detach()
        return dict(sorted(state.items(), key=lambda item: -item[1].element_size()))

    def _model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the model without its adapters, by the names of a model without any."""
        for name, tensor in self._policy.model.state_dict(keep_vars=True).items():
            if not _ADAPTER_MATRIX.search(name):
                yield name.replace(".base_layer", ""), tensor

    @cached_property
    def _conversion_groups(self) -> list[list[str]]:
        """Return the names of `_unique_tensors` in groups that can be converted to a checkpoint's layout independently.

        In most architectures each tensor is a group, so that no two have to be gathered at once.
        """
        tensors = self._unique_tensors()
        expected = _shapes(self._convert(self._without_data(tensors, tensors)))
        ways: tuple[Callable[[str], str], ...] = (str, layer_prefix, lambda _: "")
        for group_of in ways:
            groups: dict[str, list[str]] = {}
            for name in tensors:
                groups.setdefault(group_of(name), []).append(name)
            converted = [self._convert(self._without_data(tensors, group)) for group in groups.values()]
            if _shapes(chain.from_iterable(tensors.items() for tensors in converted)) == expected:
                break
        return list(groups.values())

    def _without_data(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        return {name: _without_data(tensors[name], self._dtype(tensors[name])) for name in names}

    def _convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors of the model to the layout of a checkpoint."""
        converted: dict[str, Tensor] = revert_weight_conversion(self._policy.model, tensors)
        return converted

    def _read(self, weights: WeightsRef) -> Mapping[str, Tensor]:
        return read_weights(weights, max_numbers=count_numbers(self._policy.model)).tensors

    @torch.no_grad()
    def _copy(self, weights: WeightsRef, read: Mapping[str, Tensor]) -> None:
        policy = self._policy
        state = dict(policy.model.state_dict())
        for name, tensor in map_weights_to_state(weights, read, state, policy.model).items():
            state[name].copy_(tensor)
        for name, compute_tensor in policy.compute_tensors.items():
            policy.parameters[name].copy_(compute_tensor)


def _without_data(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _shapes(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in dict(tensors).items()}
