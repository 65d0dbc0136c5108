"""The models of the policies that learn: base models from local directories, with an adapter per policy or full
weights.

Policies with adapters on one base share it; a policy that trains full weights has its own copy. Models compute in
`model.dtype`; trained parameters and their gradients are float32. In bfloat16 these are masters, and the model computes
with their rounded values. An adapter is published unrounded, and engines round it in the same way; a merged one is
rounded with the weights. Nothing is fetched: no network, no remote code.

Owns: loading, the check that the trainer's forward pass reproduces the model's own, the parameters of each policy, the
active adapter, the content of a published version. Invariants: the shared base never requires a gradient; a policy's
initial weights do not depend on the other policies.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import peft
import torch
import torch.nn.functional as F
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.config.combinations import COMPILED, DISPATCHED, OFFLOADED, SHARDED
from agentrl.config.fields import hub_commit
from agentrl.config.plans import BaseModelPlan, TrainerPlan
from agentrl.config.policies import LoraConfig
from agentrl.config.sections import TrainerConfig
from agentrl.core.errors import ConfigError, ModelError
from agentrl.core.ids import stable_hash64
from agentrl.core.machine import finds_compiler
from agentrl.core.model_layers import SELECTED_KEYS
from agentrl.core.parts import check_compatible
from agentrl.core.tokens import TrainingSample
from agentrl.engines.experts import ExpertFactors, adaptable_experts, expert_tensors, find_experts
from agentrl.engines.models import (
    THRESHOLD_MULTIPLES,
    affordable_tokens,
    check_cost,
    check_finite_logits,
    check_lengths,
    check_sparse_attention,
    computing_in_float32,
    configured_integers,
    lacks_initial_state,
    model_dtype,
    native_attention,
    num_layers_with_state,
    outermost_layers,
    quote_first_names,
    random_tokens,
    read_meta_model,
    read_model,
    varied,
    with_few_layers,
)
from agentrl.engines.stored_tensors import FLOAT_DTYPES, StoredTensor, checkpoint_tensors
from agentrl.engines.weights.reading import (
    adaptable_layers,
    count_numbers,
    map_weights_to_state,
    read_adapter_tensors,
    read_weights,
)
from agentrl.learn.context import ContextGroup
from agentrl.learn.experts import ParamWrapper, predict_layer_bytes
from agentrl.learn.forward import (
    ATTENTION,
    UNFUSED_TOKENS,
    HeadOutput,
    RoutingReplay,
    compiles_attention,
    guesses_lengths,
    logits_after,
    sharing_pays,
    token_logprobs,
    tree_attention,
)
from agentrl.learn.packing import MicroBatch, TreeSize, pack, padded_together
from agentrl.learn.ranks import ShardedForward, gather_tensor, shard_tensor
from agentrl.learn.recurrence import follow_trees

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from agentrl.core.records import WeightsRef

_CHECK_LENGTH = 11
"""Number of tokens at the end of each row of the check whose log-probabilities are compared."""

ROUTERS = {"router", "gate", "shared_expert_gate", "indexer"}
"""Name parts of modules that choose experts, or the keys of sparse attention; adapted only if named explicitly."""

_REASON_LENGTH = 300
"""Maximum number of characters of an error that is shown as a reason."""

_FORWARD_ERRORS = (ModelError, TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError)
"""Errors raised by models in unsupported forward passes."""

_ADAPTER_MATRIX = re.compile(r"\.lora_[AB]\.")

SHARING_TOLERANCE = 2e-3
"""Largest difference in log-probabilities between the model's own forward pass and the trainer's, in nats."""
_ROUNDED_TOLERANCE = 0.1
"""Largest mean difference in log-probabilities between two kernels in 16 bits, in nats: rounding makes about .01, a
token that sees another's context about 1."""

# Not in the function's own module: `refuse_monkeypatches` executes that a second time, for a copy that is not used.
AttentionInterface.register(ATTENTION, tree_attention)


class PolicyModel:
    """One policy's view of its model."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        base: Path,
        peft_model: peft.PeftModel | None,
        adapter: str | None,
        unshared: str = "",
        replay: RoutingReplay | None = None,
        described: str = "",
        merges: bool = False,
    ) -> None:
        self.model = model
        """Causal LM, with the adapters of all policies on its base injected."""
        self.base = base
        """Directory of the base model."""
        self.dtype = model.dtype
        """Dtype in which the model computes and is published, but for the few weights that it keeps in float32."""
        self.unshared = unshared
        """Why the model cannot be forwarded over a prefix tree (`why_unshared`); empty if it can."""
        self.chooses_sharing = False
        """Whether a micro-batch is a prefix tree only where that is faster; otherwise all are."""
        self.replay = replay
        """Routing replay of the model's routers, if the engine records experts."""
        self.experts = ""
        """How the experts are computed, if there are any and the weights are sharded."""
        self.described = described
        """Layers with an adapter, and their share of the model; empty for full weights."""
        self.kind: Literal["full", "adapter"] = "full" if adapter is None else "adapter"
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters that an optimizer step changes, keyed by name; float32. After changing their values, call
        `round_masters`."""
        self._compute_tensors: dict[str, nn.Parameter] = {}
        """Parameters that the model computes with, rounded or on another device, for those with a master in
        `parameters`."""
        self._sharded_forward: ShardedForward | None = None
        self._peft = peft_model
        self.adapter = adapter
        """PEFT's name of the adapter; None: full weights."""
        self._merges = merges

    @property
    def shared_prefixes(self) -> bool:
        """Whether the model is forwarded over a prefix tree."""
        return not self.unshared

    @property
    def sharing(self) -> bool | Callable[[TreeSize], bool]:
        """How `pack` packs rows for this model."""
        if not self.chooses_sharing or self.unshared:
            return self.shared_prefixes
        return partial(sharing_pays, hidden_size=self.model.config.get_text_config().hidden_size)

    def activate(self) -> None:
        """Make this policy's adapter the active one."""
        if self._peft is not None and self.adapter is not None and self._peft.active_adapter != self.adapter:
            self._peft.set_adapter(self.adapter)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Compute as the base model under the adapter within the context; without an adapter nothing changes."""
        if self._peft is None:
            yield
            return
        with self._peft.disable_adapter():
            yield
        self.activate()

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a shard of every tensor, so that all ranks must call this model together."""
        return self._sharded_forward is not None

    def shard(self, forward: ShardedForward) -> None:
        """Compute with sharded weights from now on; call it before `train`."""
        self._sharded_forward = forward

    def token_logprobs(
        self,
        batch: MicroBatch,
        *,
        entropy_gradient: bool = False,
        replay: RoutingReplay | None = None,
        top: int = 0,
        reference: HeadOutput | None = None,
        value_head: nn.Module | None = None,
        context: ContextGroup | None = None,
    ) -> HeadOutput:
        forward = self._sharded_forward or partial(token_logprobs, self.model)
        is_tree = batch.is_tree and self.shared_prefixes  # a canary's row may be either
        attention = ATTENTION if is_tree else native_attention(self.model)
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        return forward(
            batch,
            shared=is_tree,
            entropy_gradient=entropy_gradient,
            replay=replay,
            top=top,
            reference=reference,
            value_head=value_head,
            context=context,
        )

    def train(self, *, offload: bool = False) -> None:
        """Make this policy's parameters trainable; `offload`: their masters and gradients are in main memory."""
        self.activate()
        mark = None if self.adapter is None else f".{self.adapter}."
        parameters = self.model.named_parameters()
        trained_parameters = {name: parameter for name, parameter in parameters if mark is None or mark in name}
        for name, parameter in trained_parameters.items():
            parameter.requires_grad_(True)
            exact = parameter.detach()
            if self.kind == "adapter" and not self.sharded:  # PEFT makes float32 adapters; products are slow in it
                parameter.data = exact.to(self.dtype)
            if parameter.dtype == torch.float32 and not offload:
                self.parameters[name] = parameter
            else:
                self._compute_tensors[name] = parameter
                home = torch.device("cpu") if offload and not parameter.is_meta else parameter.device
                self.parameters[name] = master = nn.Parameter(exact.to(home, torch.float32, copy=True))
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))

    @property
    def published_kind(self) -> Literal["full", "adapter"]:
        """What `published` yields: all weights, which an adapter may be merged into, or an adapter."""
        return "full" if self._merges else self.kind

    @property
    def is_published_exactly(self) -> bool:
        """Whether a published version holds what is trained: no rounded masters, and no merged adapter."""
        return not (self._merges or self.has_masters)

    @property
    def has_masters(self) -> bool:
        """Whether the model computes with rounded values of full weights."""
        return self.kind == "full" and any(
            parameter.dtype != torch.float32 for parameter in self._compute_tensors.values()
        )

    @torch.no_grad()
    def round_masters(self) -> None:
        """Round the current values of `parameters` into the model."""
        for name, parameter in self._compute_tensors.items():
            parameter.copy_(self.parameters[name])

    def adapter_config(self) -> dict[str, Any] | None:
        """Return PEFT's `adapter_config.json` as a dictionary; None if full weights are published."""
        if self._peft is None or self.adapter is None or self._merges:
            return None
        config = self._peft.peft_config[self.adapter].to_dict()
        name, commit = hub_commit(str(self.base))
        if name:  # a path into this machine's cache means nothing elsewhere
            config |= {"base_model_name_or_path": name, "revision": commit}
        config["inference_mode"] = True
        config["target_modules"] = sorted(config["target_modules"])
        if config["target_parameters"]:
            config["target_parameters"] = sorted(config["target_parameters"])
        return config

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a version's safetensors file by name, in the layout of `from_pretrained`, one at a
        time.
        """
        tensors = self._unique_tensors()
        for piece in self._conversion_groups:
            piece_tensors = {name: self._publish_tensor(name, tensors[name]) for name in piece}
            yield from self._convert(piece_tensors).items()
            piece_tensors.clear()
        for name, tensor in self._carried.items():
            yield name, tensor[...]

    @torch.no_grad()
    def _publish_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Gather a tensor, and add the product of the adapter's matrices if there is one to be merged."""
        whole = gather_tensor(tensor, self._published_dtype(tensor))
        layer = self._merged_layers.get(name)
        if layer is None:
            return whole
        module: Any = self.model.get_submodule(layer)
        down, up = (
            gather_tensor(self.parameters[f"{layer}.{matrix}.{self.adapter}.weight"]).to(whole.device)
            for matrix in ("lora_A", "lora_B")
        )
        if isinstance(module, ParamWrapper):
            factors = ExpertFactors.from_peft(down, up * module.scaling[self.adapter], module.num_experts)
            return factors.add_product(whole.float(), module.get_base_layer()).to(whole.dtype)
        return torch.addmm(whole.float(), up, down, alpha=module.scaling[self.adapter]).to(whole.dtype)

    @cached_property
    def _merged_layers(self) -> dict[str, str]:
        """Modules whose adapter is merged, by the name of their published weight."""
        if not self._merges:
            return {}
        mark = f".lora_A.{self.adapter}.weight"
        layers = {}
        for layer in (name.removesuffix(mark) for name in self.parameters if name.endswith(mark)):
            module = self.model.get_submodule(layer)
            weight = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            layers[f"{layer.replace('.base_layer', '')}.{weight}"] = layer
        return layers

    def published_layout(self) -> Mapping[str, Tensor]:
        """Return tensors without data, with the names, shapes and dtypes of those that `published` yields, in its
        order."""
        tensors = self._unique_tensors()
        pieces = [self._without_data(tensors, piece) for piece in self._conversion_groups]
        trained = {name: tensor for piece in pieces for name, tensor in self._convert(piece).items()}
        return trained | {
            name: torch.empty(tensor.get_shape(), dtype=FLOAT_DTYPES[tensor.get_dtype()], device="meta")
            for name, tensor in self._carried.items()
        }

    @cached_property
    def _carried(self) -> Mapping[str, StoredTensor]:
        """Tensors that the checkpoint has and the text model does not, such as those of a vision tower: a version of
        all weights has them as they are, or dequantized."""
        if self.published_kind == "adapter":
            return {}
        state = dict(self._model_tensors())
        known = self._convert(self._without_data(state, state)).keys()  # those of tied weights, too
        stored = {
            name: tensor
            for name, tensor in checkpoint_tensors(self.base, self.dtype).items()
            if tensor.get_dtype() in FLOAT_DTYPES
        }
        if not self._convert(self._without_data(tensors := self._unique_tensors(), tensors)).keys() <= stored.keys():
            return {}  # the names of another layout do not tell what the text model lacks
        return {name: tensor for name, tensor in stored.items() if name not in known}

    def _unique_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that make up a version, those with large elements first; not copies."""
        if self.published_kind == "adapter":  # PEFT's own method would touch the adapters of all policies
            mark = f".{self.adapter}."
            return {
                f"base_model.model.{name.replace(mark, '.')}": parameter for name, parameter in self.parameters.items()
            }
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
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if not _ADAPTER_MATRIX.search(name):
                yield name.replace(".base_layer", ""), tensor

    @cached_property
    def _conversion_groups(self) -> list[list[str]]:
        """Return the names of `_unique_tensors` in groups that can be converted to a checkpoint's layout independently.

        In most architectures each tensor is a group, so that no two have to be gathered at once.
        """
        tensors = self._unique_tensors()
        expected = _shapes(self._convert(self._without_data(tensors, tensors)))
        ways: tuple[Callable[[str], str], ...] = (str, _layer, lambda _: "")
        for part_of in ways:
            pieces: dict[str, list[str]] = {}
            for name in tensors:
                pieces.setdefault(part_of(name), []).append(name)
            checkpoint_parts = [self._convert(self._without_data(tensors, piece)) for piece in pieces.values()]
            if _shapes(chain.from_iterable(tensors.items() for tensors in checkpoint_parts)) == expected:
                break
        return list(pieces.values())

    def _published_dtype(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a tensor is published: a model trained in full is sharded as float32 masters, and
        published in its compute dtype."""
        rounds = self._sharded_forward is not None and self.kind == "full" and tensor.is_floating_point()
        return self.dtype if rounds and isinstance(tensor, DTensor) else tensor.dtype

    def _without_data(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors without data that have the names, shapes and dtypes of the published ones."""
        named_tensors = {name: tensors[name] for name in names}
        return {
            name: torch.empty(tensor.shape, dtype=self._published_dtype(tensor), device="meta")
            for name, tensor in named_tensors.items()
        }

    def _convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors of the model to the layout of a checkpoint."""
        return tensors if self.published_kind == "adapter" else revert_weight_conversion(self.model, tensors)

    def load_published(self, weights: WeightsRef) -> None:
        """Load the weights of a published version, bit for bit.

        Raises:
            EngineError: the file is damaged, or not the published one.
            ModelError: the version was rounded, or its adapter merged, when it was published, or it belongs to another
                model.
        """
        if self.published_kind == "full":
            read: Mapping[str, Tensor] = read_weights(weights, max_numbers=count_numbers(self.model)).tensors
        else:
            count = sum(tensor.numel() for tensor in self._unique_tensors().values())
            read = read_adapter_tensors(weights, max_numbers=count)
        if not self.is_published_exactly or any(tensor.dtype != torch.float32 for tensor in read.values()):
            raise ModelError(
                f"{weights.path}: {'merged' if self._merges else 'rounded'} when it was published, so it differs from "
                "the trained weights; use the weights of a checkpoint, which are float32"
            )
        if self.adapter is None:
            state = dict(self.model.state_dict())
            read = map_weights_to_state(weights, read, state, self.model)
        else:
            state = self._unique_tensors()
            if {name: tensor.shape for name, tensor in read.items()} != {name: state[name].shape for name in state}:
                raise ModelError(f"{weights.path}: an adapter of different modules, or of a different rank")
        with torch.no_grad():
            for name, tensor in read.items():
                state[name].copy_(tensor)
            if self.kind == "full":
                for name, compute_tensor in self._compute_tensors.items():
                    self.parameters[name].copy_(compute_tensor)
            self.round_masters()


def _shapes(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in dict(tensors).items()}


def _layer(name: str) -> str:
    """Return the layer of a parameter: its name up to the first number."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else ""


def load_models(
    plan: TrainerPlan,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    *,
    trim: Callable[[PreTrainedModel], object] | None = None,
) -> dict[str, PolicyModel]:
    """Load a model for every policy of the run that learns, in the order of the configuration.

    Policies with adapters on one base model share it; every other policy has a copy of its base.

    Args:
        plan: the trainer's part of the run.
        device: device of the models. On `meta` they have shapes and no weights, and are assumed to share prefixes.
        mesh: ranks over which the models are sharded, on that kind of device; each rank reads only its shards. None:
            each rank holds all weights.
        trim: removes layers of each base model before it gets adapters.

    Raises:
        ModelError: the directory is not a causal LM that can be trained, or routing is recorded and the model's routers
            cannot replay it.
        ConfigError: an adapter targets a layer that cannot be both trained and served, or layers cannot be compiled.
    """
    if plan.trainer.compile:
        _check_compilable(sharded=mesh is not None)
    models: dict[str, PolicyModel] = {}
    for base in plan.bases:
        models |= _load_on_base(plan, base, device, mesh, trim)
    if plan.trainer.compile and device.type != "meta":
        for model in {id(policy_model.model): policy_model.model for policy_model in models.values()}.values():
            _compile_layers(model)
    return {name: models[name] for name in plan.policies}


def load_references(
    plan: TrainerPlan, models: Mapping[str, PolicyModel], device: torch.device, mesh: DeviceMesh | None = None
) -> dict[str, PolicyModel]:
    """Load the frozen model of every policy with a `reference`; policies with the same reference share it.

    Args:
        plan: the trainer's part of the run.
        models: the result of `load_models`.
        device: as in `load_models`.
        mesh: as in `load_models`.

    Raises:
        ModelError: the directory holds no model that can compute the policy's micro-batches.
    """
    models_by_key: dict[str, PolicyModel] = {}
    references: dict[str, PolicyModel] = {}
    for name, policy in plan.policies.items():
        if not policy.reference:
            continue
        key = f"{Path(policy.reference).resolve()} {models[name].base.resolve()}"
        if key not in models_by_key:
            models_by_key[key] = _load_reference(plan, Path(policy.reference), models[name].base, device, mesh)
        references[name] = models_by_key[key]
        size, base_size = (
            policy.model.config.get_text_config().vocab_size for policy in (references[name], models[name])
        )
        if references[name].shared_prefixes < models[name].shared_prefixes:
            raise ModelError(
                f"policies.{name}.reference: {type(references[name].model).__name__} cannot compute rows packed by "
                f"their shared prefixes ({references[name].unshared}), as {type(models[name].model).__name__} does; "
                "choose a reference of its architecture"
            )
        if size < base_size and not (Path(policy.reference) / "tokenizer.json").is_file():
            raise ModelError(
                f"policies.{name}.reference: {policy.reference} has {size} tokens and the policy's base {base_size}: a "
                "reference scores the policy's own tokens, so both need one tokenizer"
            )
    return references


def _load_reference(
    plan: TrainerPlan, path: Path, base: Path, device: torch.device, mesh: DeviceMesh | None
) -> PolicyModel:
    """Load a frozen model: a model directory, or an adapter merged into `base`."""
    is_adapter = (path / "adapter_model.safetensors").is_file()
    directory = base if is_adapter else path
    dtype = model_dtype(directory, plan.model.dtype, device)
    offload = mesh is not None and plan.trainer.sharding == "offload"
    if offload or (mesh is not None and is_adapter):  # an adapter is merged into the whole weights
        device = torch.device("cpu")
    model = _load(directory, device, dtype, plan.max_context, None if is_adapter else mesh)
    if is_adapter and model.device.type != "meta":
        try:
            with warnings.catch_warnings(action="ignore"):  # PEFT warns of missing names, and ignores the others
                adapter_model: Any = peft.PeftModel.from_pretrained(model, str(path))
                report = adapter_model.load_adapter(str(path), "default")  # a second load, which returns the names
            for problem, names in {
                "has no tensors for layers that it targets": report.missing_keys,
                "has tensors of other layers than those of the model": report.unexpected_keys,
            }.items():
                if names:
                    raise ValueError(f"it {problem}: {quote_first_names(names)}")
            merged_model = adapter_model.merge_and_unload()
        except (ValueError, RuntimeError, OSError, TypeError) as error:
            raise ModelError(f"{path}: is not an adapter of {base} ({error})") from error
        model = merged_model
    model.requires_grad_(False)
    unshared_reason = why_unshared(model, plan.max_context)
    reference = PolicyModel(model=model, base=directory, peft_model=None, adapter=None, unshared=unshared_reason)
    if mesh is not None:
        reference.shard(ShardedForward(model, mesh, masters=False, offload=offload))
    return reference


def _load_on_base(
    plan: TrainerPlan,
    base_plan: BaseModelPlan,
    device: torch.device,
    mesh: DeviceMesh | None,
    trim: Callable[[PreTrainedModel], object] | None,
) -> dict[str, PolicyModel]:
    """Load the models of the policies on one base; see `load_models`."""
    path = Path(base_plan.path)
    dtype = model_dtype(path, plan.model.dtype, device)
    offload = mesh is not None and plan.trainer.sharding == "offload"
    if offload:
        device = torch.device("cpu")
    adapter_configs = {name: policy.lora for name, policy in base_plan.trained.items() if policy.lora is not None}
    result: dict[str, PolicyModel] = {}
    if adapter_configs:
        base = LoadedBase(plan, path, partial(_load, path, device, dtype, plan.max_context, mesh, trim), dtype)
        result = {name: base.add(name, lora) for name, lora in adapter_configs.items()}
    for name in base_plan.trained:
        if name not in result:
            model = _load(path, device, dtype, plan.max_context, mesh, trim)
            replay = _replay(model, captured=plan.capture_routing)
            unshared_reason = why_unshared(model, plan.max_context)
            result[name] = PolicyModel(
                model=model, base=path, peft_model=None, adapter=None, unshared=unshared_reason, replay=replay
            )
    sharded_forwards: dict[int, ShardedForward] = {}
    for policy_model in result.values():
        if mesh is not None:
            if id(policy_model.model) not in sharded_forwards:
                masters = policy_model.kind == "full"
                experts, policy_model.experts = _dispatched_experts(
                    plan.trainer, policy_model.model, mesh, trained=masters
                )
                sharded_forwards[id(policy_model.model)] = ShardedForward(
                    policy_model.model, mesh, masters=masters, offload=offload, experts=experts
                )
            policy_model.shard(sharded_forwards[id(policy_model.model)])
        policy_model.train(offload=plan.offloads_masters)
        if plan.trainer.recompute:
            _recompute_layers(policy_model.model, policy_model.replay)
    return result


class LoadedBase:
    """A base model in memory, on which adapters are put and from which they are removed, or whose weights one policy
    trains.

    Args:
        plan: the trainer's part of the run.
        path: directory of the base model.
        read: reads the model.
        dtype: dtype in which it computes.
        recompute: whether its layers are computed again in the backward pass.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        path: Path,
        read: Callable[[], PreTrainedModel],
        dtype: torch.dtype,
        *,
        recompute: bool = False,
    ) -> None:
        self._plan = plan
        self._path = path
        self._read = read
        self._dtype = dtype
        self._recompute = recompute
        self._model: PreTrainedModel | None = None
        model = self.model
        self._matrices = _matrices(model)
        self.adaptable = _adaptable(model)
        """Layers that can be trained and served under an adapter."""
        experts = adaptable_experts(model).items()
        self._expert_names = [f"{at}.{tensor}" for at, each in experts for tensor in expert_tensors(each)]
        self._unshared = why_unshared(model, plan.max_context)
        self._peft: peft.PeftModel | None = None
        self._number = 0

    @property
    def model(self) -> PreTrainedModel:
        """The model, which is read again after `remove` of a policy that trained its weights."""
        if self._model is None:
            self._model = self._read()
            self._model.requires_grad_(False)
            follow_trees(self._model)
            self._replay = _replay(self._model, captured=self._plan.capture_routing)
            if self._recompute:
                _recompute_layers(self._model, self._replay)
        return self._model

    @staticmethod
    def load(plan: TrainerPlan, path: Path, device: torch.device) -> LoadedBase:
        """Load a base model without adapters.

        Raises:
            ModelError: the directory is not a causal LM that can be trained.
        """
        dtype = model_dtype(path, plan.model.dtype, device)
        read = partial(_load, path, device, dtype, plan.max_context)
        return LoadedBase(plan, path, read, dtype, recompute=plan.trainer.recompute)

    def bare(self) -> PolicyModel:
        """Return the view of the base model itself, of which `PolicyModel.train` makes all weights trainable; there may
        be no adapters."""
        return PolicyModel(
            model=self.model,
            base=self._path,
            peft_model=None,
            adapter=None,
            unshared=self._unshared,
            replay=self._replay,
        )

    def add(self, name: str, lora: LoraConfig, *, seed: int | None = None) -> PolicyModel:
        """Put the adapter of a policy on the model; `PolicyModel.train` makes it trainable.

        Args:
            name: name of the policy, which determines the initial weights unless `seed` is given.
            lora: shape of the adapter.
            seed: seed of the initial weights.

        Raises:
            ConfigError: a named layer cannot be both trained and served.
            ModelError: PEFT cannot put an adapter on a layer.
        """
        model = self.model
        targets = _targets(f"policies.{name}.lora", lora, self.adaptable, model)
        if lora.experts and not self._expert_names:
            raise ConfigError(
                f"policies.{name}.lora.experts = true: {type(model).__name__} has no experts on which an adapter can "
                "be trained and served. Remove the setting"
            )
        experts = self._expert_names if lora.experts else []
        description = f"{name}: {_describe_adapter(lora, [*targets, *experts], self._matrices)}"
        if lora.merge and self._dtype != torch.float32:
            description += f"; merged into {str(self._dtype).removeprefix('torch.')}, which loses small updates"
        # Generated names, because PEFT matches names as substrings: a policy called "a" would match every adapter.
        adapter = f"adapter{self._number}x"
        self._number += 1
        # PEFT puts an adapter where its layer's weights are, but not beside ones without data.
        place = torch.device("meta") if model.device.type == "meta" else nullcontext()
        with torch.random.fork_rng(devices=[]), place:
            torch.manual_seed(stable_hash64(self._plan.seed, name, "adapter") >> 1 if seed is None else seed)
            self._peft = _add_adapter(model, self._peft, adapter, lora, _short(targets, model), experts, self._path)
        model.requires_grad_(False)
        return PolicyModel(
            model=model,
            base=self._path,
            peft_model=self._peft,
            adapter=adapter,
            unshared=self._unshared,
            replay=self._replay,
            described=description,
            merges=lora.merge,
        )

    def remove(self, policy_model: PolicyModel) -> None:
        """Remove the adapter or the trained weights of a policy, whose view may no longer be used."""
        if policy_model.adapter is None:
            self._model = None
            return
        assert self._peft is not None
        others = self._peft.peft_config.keys() - {policy_model.adapter}
        if others:
            self._peft.set_adapter(min(others))  # PEFT fails later if the active adapter is gone
            self._peft.delete_adapter(policy_model.adapter)
        else:
            self._peft.unload()
            self._peft = None


def _dispatched_experts(
    trainer: TrainerConfig, model: PreTrainedModel, mesh: DeviceMesh, *, trained: bool
) -> tuple[Mapping[str, Any], str]:
    """Choose the experts to which tokens travel; return them with a sentence on the choice.

    Raises:
        ConfigError: `trainer.experts` is "dispatched", and they cannot be.
    """
    choice, ranks = trainer.experts, mesh.size(mesh.ndim - 1)
    experts = find_experts(model)
    counts = {module.num_experts for module in experts.values()}
    refusal = ""
    if not experts:
        refusal = f"{type(model).__name__} has no experts whose weights lie in one tensor"
    elif trainer.sharding == "offload":
        if choice == "dispatched":
            check_compatible([DISPATCHED, OFFLOADED])
        refusal = "trainer.sharding is 'offload', and each rank computes experts where their weights are"
    elif any(count % ranks for count in counts):
        refusal = f"{ranks} ranks do not divide {' or '.join(map(str, sorted(counts)))} experts"
    if refusal and choice == "dispatched":
        raise ConfigError(f"trainer.experts = 'dispatched': {refusal}")
    if not experts:
        return {}, ""
    shape = model.config.get_text_config()
    module = next(iter(experts.values()))
    sent = predict_layer_bytes(
        weights=sum(parameter.numel() for parameter in module.parameters()),
        width=shape.hidden_size,
        top_k=getattr(shape, "num_experts_per_tok", None) or 1,
        tokens=trainer.micro_batch_tokens // trainer.context_ranks,
        ranks=ranks,
        itemsize=model.dtype.itemsize,
        trained=trained,
    )
    if refusal or choice == "gathered" or (choice == "auto" and sent.gathered <= sent.dispatched):
        return {}, f"experts: gathered, {_sent_text(sent.gathered, sent.dispatched)}{refusal and f' ({refusal})'}"
    return experts, f"experts: dispatched, {_sent_text(sent.dispatched, sent.gathered)}"


def _sent_text(chosen: float, other: float) -> str:
    return f"about {chosen / 1e6:,.1f} MB sent per layer and micro-batch instead of {other / 1e6:,.1f} MB"


def _load(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_context: int,
    mesh: DeviceMesh | None = None,
    trim: Callable[[PreTrainedModel], object] | None = None,
) -> PreTrainedModel:
    """Load the model of a directory; with a mesh, this rank's shards of it."""
    if device.type == "meta":
        model = read_meta_model(path, max_context=max_context, dtype=dtype)
        check_sparse_attention(model.config, max_context, path)
    else:
        keep = None if mesh is None else partial(_shard_of, mesh=mesh, device=device)
        model = read_model(path, dtype=dtype, max_context=max_context, to_sample=False, keep=keep)
    if trim is not None:
        trim(model)
    module: nn.Module = model
    # No dropout: the ratio to the recorded log-probabilities must not be noise.
    module.train(False)
    module.to(device)
    return model


def _shard_of(parameter: nn.Parameter, *, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    return nn.Parameter(shard_tensor(parameter, mesh, device), requires_grad=parameter.is_floating_point())


def _to_float32(parameter: Tensor) -> Tensor:
    return gather_tensor(parameter, torch.float32).float()


def _recompute_layers(model: PreTrainedModel, replay: RoutingReplay | None) -> None:
    """Make each layer keep only its input for the backward pass, and recompute the rest there.

    Raises:
        ModelError: the architecture does not support it.
    """
    # Layers draw no random numbers, so no random state has to be restored.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if replay is not None:
        settings["context_fn"] = replay.contexts
    try:
        model.gradient_checkpointing_enable(settings)
    except ValueError as error:
        raise ModelError(
            f"{type(model).__name__} cannot recompute its layers ({error}); set trainer.recompute = false"
        ) from error
    module: nn.Module = model
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # transformers recomputes only layers in training. While a layer computes, it is not: no dropout.
            layer.training = True
            layer.register_forward_pre_hook(partial(_set_training, False), with_kwargs=True)
            layer.register_forward_hook(partial(_set_training, True), with_kwargs=True, always_call=True)


def _check_compilable(*, sharded: bool) -> None:
    """Refuse `trainer.compile` where it cannot work.

    Raises:
        ConfigError: the message says what to change.
    """
    if sharded:
        check_compatible([COMPILED, SHARDED])
    if not finds_compiler():
        raise ConfigError(
            "trainer.compile = true needs a C compiler, and there is none: apt install g++, or set compile = false"
        )


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile the forward pass of each layer, around its attention: a kernel serves all layers and lengths."""
    module: nn.Module = model
    for layer in outermost_layers(module):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _set_training(training: bool, layer: nn.Module, *_: object) -> None:
    layer.training = training


@torch.no_grad()
def _move_gradient(master: nn.Parameter, parameter: nn.Parameter) -> None:
    """Add the gradient of a parameter that the model computes with to that of its float32 master."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(master.device, torch.float32)
    else:
        master.grad += parameter.grad.to(master.device)
    parameter.grad = None


def _replay(model: PreTrainedModel, *, captured: bool) -> RoutingReplay | None:
    """Return the routing replay of a model; None on the meta device, where no router chooses experts."""
    if not captured or model.device.type == "meta":
        return None
    with computing_in_float32(model, _to_float32):  # shards are gathered in float32
        return RoutingReplay(model)


def _matrices(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Return the shapes of the weights between embeddings and output projection, by module; norms and biases are left
    out. Modules that share a weight, as in Zamba2, count it each, because each has an adapter."""
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {id(module.weight) for module in (*ends, model.get_output_embeddings()) if module is not None}
    parameters = model.named_parameters(remove_duplicate=False)
    return {
        name.removesuffix(".weight"): parameter.shape
        for name, parameter in parameters
        if parameter.ndim > 1 and id(parameter) not in tables and not name.endswith("bias")
    }


def _adaptable(model: PreTrainedModel) -> list[str]:
    """List the layers that can be served under an adapter, and that PEFT does not take for experts.

    Raises:
        ModelError: the model cannot be forwarded. On the meta device, any error of a pass that needs data.
    """
    mistaken: dict[str, bool] = {}
    try:
        with computing_in_float32(model, _to_float32):  # shards are gathered in float32
            layers = adaptable_layers(model)
    except _FORWARD_ERRORS as error:
        if model.device.type == "meta":
            raise
        raise ModelError(f"{type(model).__name__} cannot be forwarded as a causal LM: {error!r}") from error
    for last in {_last(name) for name in layers}:
        adapter = peft.LoraConfig(target_modules=[last])
        try:
            convert_peft_config_for_transformers(adapter, model, None)
        except ValueError:  # PEFT tried to adapt the experts' tensors, or did not find some names
            mistaken[last] = True
        else:
            mistaken[last] = set(adapter.target_modules or ()) != {last}
    return [name for name in layers if not (mistaken[_last(name)] or _read_by_kernel(model, name))]


def _read_by_kernel(model: PreTrainedModel, name: str) -> bool:
    """Whether a fused state-space kernel reads a layer's weight directly, bypassing an adapter; PEFT refuses those."""
    parent, _, last = name.rpartition(".")
    return last == "out_proj" and hasattr(model.get_submodule(parent), "ssm_state_size")


def _targets(key: str, lora: LoraConfig, can: Sequence[str], model: PreTrainedModel) -> list[str]:
    """Return the layers that get an adapter.

    Raises:
        ConfigError: there are none, or a named layer cannot be trained and served; the message lists those that can.
    """
    kind, names = type(model).__name__, [name for name, _ in model.named_modules()]
    if not can:
        raise ConfigError(
            f"{key}: {kind} has no linear layers on which an adapter can be trained and served. Remove the section to "
            "train all weights"
        )
    matches = {
        target: [name for name in names if name == target or name.endswith(f".{target}")]
        for target in lora.target_modules
    }
    for target, layers in matches.items():
        strange = [name for name in layers if name not in can]
        if strange or not layers:
            problem = (
                f"is {strange[0]}, on which no adapter can be both trained and served" if layers else "is not a layer"
            )
            raise ConfigError(
                f"{key}.target_modules: {target!r} {problem} of {kind}; adaptable layers: "
                f"{', '.join(dict.fromkeys(map(_last, can)))}. Remove target_modules to adapt all of them"
            )
    layer_names = {name for layers in matches.values() for name in layers}
    if not matches:
        layer_names = {name for name in can if not ROUTERS.intersection(name.split("."))}
    return [name for name in can if name in layer_names]


def _describe_adapter(lora: LoraConfig, targets: Sequence[str], matrices: Mapping[str, torch.Size]) -> str:
    # Two factors for each matrix, of which experts have several: rank by inputs, outputs by rank.
    trained = sum(lora.rank * math.prod(matrices[name][:-2]) * sum(matrices[name][-2:]) for name in targets)
    text = f"adapters of rank {lora.rank}: {trained:,} trained parameters on "
    without = dict.fromkeys(".".join(name.split(".")[-2:]) for name in matrices if name not in set(targets))
    if not without:
        return f"{text}all linear layers"
    share = sum(matrices[name].numel() for name in targets) / sum(shape.numel() for shape in matrices.values())
    experts = [".".join(name.split(".")[-2:]) for name in targets if len(matrices[name]) > 2]
    names = ", ".join(dict.fromkeys([*(_last(name) for name in targets if len(matrices[name]) == 2), *experts]))
    return f"{text}{names}, {share:.1%} of the linear weights; not on {', '.join(without)}"


def _short(targets: Sequence[str], model: PreTrainedModel) -> list[str]:
    """Shorten targets to their last names if no other module has that name."""
    other_names = {_last(name) for name, _ in model.named_modules() if name not in set(targets)}
    return list(dict.fromkeys(name if _last(name) in other_names else _last(name) for name in targets))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


class _AdaptedProduct(torch.autograd.Function):
    """Computes x W' + bias + s x A' B' of rows x, with frozen W and bias. The matrix products apply the scale s and add
    the terms up, also in the backward pass, so no further pass over inputs or outputs is needed."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
    ) -> Tensor:
        inner = rows @ down.t()
        ctx.save_for_backward(rows, weight, down, up, inner)
        ctx.scaling = scaling
        return F.linear(rows, weight, bias).addmm_(inner, up.t(), alpha=scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, inner = ctx.saved_tensors
        by_inner = outputs @ up
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = (outputs @ weight).addmm_(by_inner, down, alpha=ctx.scaling)
        # beta = 0: the first argument is not read.
        of_down = torch.addmm(torch.empty_like(down), by_inner.t(), rows, beta=0, alpha=ctx.scaling)
        of_up = torch.addmm(torch.empty_like(up), outputs.t(), inner, beta=0, alpha=ctx.scaling)
        return of_inputs, None, None, of_down, of_up, None


class _AdaptedLinear(peft.tuners.lora.Linear):
    """PEFT's linear layer with an adapter, computed by `_AdaptedProduct`."""

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        """Add an adapter of the whole layer, whose weights may be shards: PEFT takes those of a mesh of two dimensions
        for tensor parallelism, and would make an adapter of one shard."""
        base: Any = self.get_base_layer()
        self.in_features, self.out_features = base.in_features, base.out_features
        super().update_layer(*args, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the outputs, [..., outputs], of inputs, [..., inputs]."""
        (adapter,) = self.active_adapters
        base: Any = self.get_base_layer()
        if self.disable_adapters or adapter not in self.lora_A:  # it may be on other layers alone
            bare: Tensor = base(x, *args, **kwargs)
            return bare
        down: Any = self.lora_A[adapter].weight
        up: Any = self.lora_B[adapter].weight
        if down.dtype != x.dtype or type(base) is not nn.Linear or base.weight.requires_grad:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        product: Any = _AdaptedProduct.apply
        # Some models change a layer's output in place, which a function's own view does not allow.
        output: Tensor = product(x.flatten(0, -2), base.weight, base.bias, down, up, self.scaling[adapter])
        return output.view(*x.shape[:-1], -1)


def _add_adapter(
    base: PreTrainedModel,
    peft_model: peft.PeftModel | None,
    adapter: str,
    lora: LoraConfig,
    targets: list[str],
    experts: list[str],
    path: Path,
) -> peft.PeftModel:
    config = peft.LoraConfig(
        r=lora.rank,
        use_rslora=lora.rank_stabilized,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT divides it by the rank; fractions are fine
        target_modules=targets,
        target_parameters=list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in experts)) or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(path),
    )
    expert_classes = {type(module): ParamWrapper for module in adaptable_experts(base).values()}
    config._register_custom_module({nn.Linear: _AdaptedLinear, **expert_classes})
    try:
        if peft_model is None:
            return peft.get_peft_model(base, config, adapter_name=adapter)
        peft_model.add_adapter(adapter, config)
    except ValueError as error:
        raise ModelError(
            f"{path}: PEFT cannot put an adapter on {', '.join(targets)} ({error}); name fewer of them in "
            "policies.NAME.lora.target_modules"
        ) from error
    return peft_model


def why_unshared(model: PreTrainedModel, max_context: int) -> str:
    """Return why the prefix tree does not reproduce the model's own log-probabilities, so that padded rows are used;
    empty if it does.

    Rows of many lengths (`check_lengths`) are computed together as a step would, in two packings, and each alone by the
    model's own forward pass. Weights that are still at a constant initial value get noise (`varied`). Both passes
    compute in float32, layer by layer, because rounding would hide a wrong position. What all layers would take too
    long for is computed with two layers of each kind. The function sets the model's attention according to the result.
    A model without weights, on the meta device, is assumed to share.

    The reference is the attention with which the model computes a row alone, `native_attention`, because transformers'
    `eager` is wrong for some models: it adds the ALiBi of Falcon twice.

    Raises:
        ModelError: neither reproduces them, or the model cannot be forwarded at all.
    """
    attention = native_attention(model)
    reason = ""
    if follow_trees(model) < num_layers_with_state(model.config) or lacks_initial_state(model.config):
        reason = "its recurrent or convolution layers, which cannot start from a state"
    elif any(
        value for name, value in model.config.get_text_config().to_dict().items() if name.startswith(SELECTED_KEYS)
    ):
        reason = "its indexer, which selects keys among those of a whole row"
    if model.device.type == "meta":
        model.set_attn_implementation(attention if reason else ATTENTION)
        return reason
    stages = _check_stages(model, max_context)
    mismatch = _Mismatch()
    for is_shared in (False,) if reason else (True, False):
        mismatch = _first_mismatch(model, stages, is_shared=is_shared)
        model.set_attn_implementation(ATTENTION if is_shared else attention)
        if not mismatch.text:
            return reason
        reason = mismatch.text
    raise ModelError(_refusal(model, stages, mismatch))


class _CheckStage(NamedTuple):
    """Rows of the check at the start that are computed with the same layers."""

    lengths: tuple[int, ...]
    layers: Callable[[PreTrainedModel], AbstractContextManager[None]]
    """Returns a context in which the model computes with those layers."""
    max_tokens: int
    """Number of tokens up to which a second packing may be filled with further rows; 0: there is one packing."""


class _Mismatch(NamedTuple):
    """How a pass of the trainer differs from the model's own; the text is empty if it does not."""

    text: str = ""
    difference: float = math.nan


_ROUNDING = 1e-5
"""Difference in log-probabilities that rounding in float32 makes near the uniform distribution, in nats."""
_SHORT_ROWS = (12, 13, 15)
"""Lengths of rows that are always checked, with all layers: several, so that padding and masks are tested."""
_LARGEST_PACKING = 1 << 12
"""Number of tokens up to which the check fills a packing: a model may count the tokens of a whole micro-batch."""
_LONGEST_FILLER = 256
"""Largest length of a row that fills a packing, so that attention stays cheap."""
_MANY_LOGITS = 1 << 25
"""Number of logits above which a row's are only computed where they are compared."""
_WIDE_HEAD = 1 << 24
"""Weights of an output projection from which only the last tokens of a row are compared."""


def _all_layers(_: PreTrainedModel) -> AbstractContextManager[None]:
    return nullcontext()


def _check_stages(model: PreTrainedModel, max_context: int) -> list[_CheckStage]:
    """Choose the rows of the check at the start: with all layers, if that takes seconds, otherwise with few."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    max_context = min(max_context, positions or max_context)  # beyond its positions, a model may have no table
    passes = 4  # alone, in two packings, and again if the first way of computing them is wrong
    tokens = affordable_tokens(model, max_context, passes)
    unfused = UNFUSED_TOKENS if compiles_attention(model.device) else None  # no wait for a compiler
    lengths = check_lengths(model.config, max_context, tokens, unfused)
    if not lengths:
        return [_CheckStage(_SHORT_ROWS, _all_layers, 0)]
    if (unfused is not None or max_context in lengths) and check_cost(lengths) <= tokens:
        return [_CheckStage(tuple({*_SHORT_ROWS, *lengths}), _all_layers, min(tokens, _LARGEST_PACKING))]
    try:
        with with_few_layers(model), torch.no_grad(), computing_in_float32(model, _to_float32):
            (row,) = _check_rows(model, [max(_SHORT_ROWS)])
            _reference_logprobs(model, row)
            few_tokens = affordable_tokens(model, max_context, passes)
    except _FORWARD_ERRORS:  # layers of some models need others
        return [_CheckStage(tuple({*_SHORT_ROWS, *lengths}), _all_layers, 0)]
    few_lengths = tuple(check_lengths(model.config, max_context, few_tokens, unfused))
    return [
        _CheckStage(_SHORT_ROWS, _all_layers, 0),
        _CheckStage(few_lengths, with_few_layers, min(few_tokens, _LARGEST_PACKING)),
    ]


def _first_mismatch(model: PreTrainedModel, stages: Sequence[_CheckStage], *, is_shared: bool) -> _Mismatch:
    mismatches = (_mismatch(model, stage, is_shared=is_shared) for stage in stages)
    return next((mismatch for mismatch in mismatches if mismatch.text), _Mismatch())


def _mismatch(model: PreTrainedModel, stage: _CheckStage, *, is_shared: bool) -> _Mismatch:
    """Compare the trainer's log-probabilities of rows, packed in two ways, with the model's own of each row alone.

    Raises:
        ModelError: the model cannot be forwarded, by itself or over padded rows.
    """
    attention = native_attention(model)
    rows = _check_rows(model, stage.lengths, many=_head_size(model) < _WIDE_HEAD)
    fillers = _filler_rows(model, stage)
    on_device = 1 << 30
    if compiles_attention(model.device) and is_shared:
        on_device = UNFUSED_TOKENS  # no wait for a compiler, but for a longer row
    kind = type(model).__name__
    with (
        stage.layers(model),
        torch.no_grad(),
        computing_in_float32(model, lambda parameter: varied(_to_float32(parameter))),
    ):
        model.set_attn_implementation(attention)
        try:
            expected = {id(row): _reference_logprobs(model, row) for row in rows}
        except _FORWARD_ERRORS as error:
            raise ModelError(f"{kind} cannot be forwarded as a causal LM: {error!r}") from error
        model.set_attn_implementation(ATTENTION if is_shared else attention)
        largest = 0.0
        packings = [[*rows, *fillers]]
        if stage.max_tokens:
            packings += [rows[::2]] if is_shared else _padded_pairs(rows)
        for packed in packings:
            for batch in pack(packed, max_tokens=on_device, share=is_shared):
                try:
                    logprobs = token_logprobs(model, batch, shared=is_shared).logprob
                except Exception as error:
                    if is_shared:  # of the architecture, or of the attention kernel's compiler; the start names it
                        return _Mismatch(f"{type(error).__name__}: {' '.join(str(error).split())[:_REASON_LENGTH]}")
                    raise ModelError(f"{kind} cannot be forwarded by the trainer: {error!r}") from error
                for sample, at, logprob in zip(batch.sample, batch.position, logprobs.tolist(), strict=True):
                    row = packed[sample]
                    if id(row) in expected:  # NumPy's maximum, because Python's max ignores NaN
                        largest = float(np.maximum(largest, abs(logprob - expected[id(row)][int(at)])))
    # A model that has learned nothing yet is near the uniform distribution, where a large fault changes little.
    spread = float(np.std([logprob for of_row in expected.values() for logprob in of_row.values()]))
    if largest <= max(_ROUNDING, SHARING_TOLERANCE * min(1.0, spread) ** 2):
        return _Mismatch()
    with_prefixes = " with shared prefixes" if is_shared else ""
    return _Mismatch(f"log-probabilities differ by {largest:.2g}{with_prefixes}", largest)


def _padded_pairs(rows: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    """Return pairs of rows next to each other in length that are padded together, so that each length between them is
    once exceeded by padding alone."""
    by_length = sorted(rows, key=lambda row: len(row.token_ids))
    return [
        [shorter, longer]
        for shorter, longer in pairwise(by_length)
        if padded_together(len(longer.token_ids), len(shorter.token_ids))
    ]


def _refusal(model: PreTrainedModel, stages: Sequence[_CheckStage], mismatch: _Mismatch) -> str:
    """Return the message that refuses a model, with the length up to which it would match."""
    text = (
        f"{type(model).__name__}: log-probabilities recomputed from hidden states, rows of "
        f"{', '.join(map(str, sorted({length for stage in stages for length in stage.lengths})))} tokens together, "
        f"differ from the model's own by {mismatch.difference:.2g} (allowed: {SHARING_TOLERANCE}), so it cannot be "
        "trained"
    )
    stage = stages[-1]
    lengths = sorted(stage.lengths)
    right, wrong = 0, len(lengths)  # numbers of the shortest rows that match together, and that do not
    while wrong - right > 1:
        count = (right + wrong) // 2
        shorter = stage._replace(lengths=tuple(lengths[:count]))
        if _mismatch(model, shorter, is_shared=False).text:
            wrong = count
        else:
            right = count
    if not right:
        return text
    changes = sorted(
        (multiple, f"{path} = {value}")
        for path, value in configured_integers(model.config).items()
        for multiple in THRESHOLD_MULTIPLES
        if lengths[right - 1] <= value * multiple <= lengths[right]
    )
    names = ", ".join(dict.fromkeys(name for _, name in changes[:4]))
    return (
        f"{text}; set engine.max_context to at most {lengths[right - 1]}, where it matches"
        + f" (config.json may say why: {names})" * bool(changes)
    )


def _head_size(model: PreTrainedModel) -> int:
    text = model.config.get_text_config()
    return int(text.vocab_size) * int(getattr(text, "hidden_size", 0) or 0)


def _filler_rows(model: PreTrainedModel, stage: _CheckStage) -> list[TrainingSample]:
    """Make further rows, whose results are not compared, so that a packing exceeds the integers in the configuration
    that it may exceed."""
    tokens = sum(stage.lengths)
    thresholds = [
        value * multiple
        for value in configured_integers(model.config).values()
        for multiple in THRESHOLD_MULTIPLES
        if value * multiple < stage.max_tokens
    ]
    missing = max(thresholds, default=0) + _CHECK_LENGTH - tokens
    short = [length for length in stage.lengths if length <= _LONGEST_FILLER]
    lengths: list[int] = []
    while short and missing > 0:
        lengths.append(short[len(lengths) % len(short)])
        missing -= lengths[-1]
    return _check_rows(model, lengths, seed=1) if lengths else []


def why_compiled_attention_fails(model: PolicyModel) -> str:
    """Return why attention as a step on CUDA computes it, compiled and in the model's dtype, cannot replace the unfused
    attention that `why_unshared` has checked; empty if it can. Compiling takes seconds."""
    try:
        with torch.no_grad():
            unfused = _check_logprobs(model, share=True)
        compiled = _check_logprobs(model, share=True)
        compiled.sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of the attention kernel's compiler
        return f"{type(error).__name__}: {' '.join(str(error).split())[:_REASON_LENGTH]}"
    finally:
        for parameter in model.parameters.values():
            parameter.grad = None
    difference = float((compiled.detach() - unfused).abs().mean())
    allowed = SHARING_TOLERANCE if model.model.dtype == torch.float32 else _ROUNDED_TOLERANCE
    return "" if difference <= allowed else f"log-probabilities of the compiled attention differ by {difference:.2g}"


@torch.no_grad()
def rows_are_exact(model: PolicyModel) -> bool:
    """Whether padded rows reproduce the prefix tree, which `why_unshared` has checked, in the model's dtype."""
    try:
        difference = float((_check_logprobs(model, share=True) - _check_logprobs(model, share=False)).abs().mean())
    except _FORWARD_ERRORS:
        return False
    return difference <= (SHARING_TOLERANCE if model.model.dtype == torch.float32 else _ROUNDED_TOLERANCE)


def _check_logprobs(model: PolicyModel, *, share: bool) -> Tensor:
    """Compute the log-probabilities of a few rows that share a prefix."""
    (batch,) = pack(_check_rows(model.model, [12, 13, 15, 140]), max_tokens=1 << 30, share=share)
    return model.token_logprobs(batch).logprob


def _check_rows(
    model: PreTrainedModel, lengths: Sequence[int], *, many: bool = False, seed: int = 0
) -> list[TrainingSample]:
    """Make random rows, every other one of which begins like the first; the last tokens of each are trained, or with
    `many` also some in every part of it."""
    draws = random_tokens(model.config, (len(lengths), max(lengths)), seed)
    draws[1::2, :7] = draws[0, :7]
    rows = []
    for row_ids, length in zip(draws.astype(np.int32), lengths, strict=True):
        zeros = np.zeros(length, np.float32)
        mask = np.arange(length) >= max(1, length - _CHECK_LENGTH)
        if many:
            mask[1 :: max(1, length // 32)] = True
        rows.append(TrainingSample(token_ids=row_ids[:length], loss_mask=mask, logprobs=zeros, advantages=zeros))
    return rows


def _reference_logprobs(model: PreTrainedModel, row: TrainingSample) -> dict[int, float]:
    """Return the model's own log-probabilities of a row's trained tokens, keyed by position: the row alone, with its
    own attention."""
    ids = torch.from_numpy(row.token_ids.astype(np.int64)).to(model.device)
    positions = np.flatnonzero(row.loss_mask)
    places = torch.from_numpy(positions - 1).to(model.device)
    inputs: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
    if guesses_lengths(model):
        inputs["attention_mask"] = torch.ones_like(ids)[None]
    if len(ids) * int(model.config.get_text_config().vocab_size) <= _MANY_LOGITS:
        logits = model(**inputs).logits[0, places]
    else:
        logits = logits_after(model, inputs, places)
    logprobs = logits.float().log_softmax(-1)
    check_finite_logits(model, logprobs)
    values = logprobs.gather(1, ids[places + 1, None])[:, 0].tolist()
    return dict(zip(positions.tolist(), values, strict=True))
