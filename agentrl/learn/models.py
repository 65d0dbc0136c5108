"""The models of the policies that learn: base models from local directories, with an adapter per policy or full
weights.

Policies with adapters on one base share it; a policy that trains full weights has its own copy. Models compute in
`model.dtype`; trained parameters and their gradients are float32. In bfloat16 these are masters, and the model computes
with their rounded values. An adapter is published unrounded, and engines round it in the same way, or round the weights
into which they merge it. Nothing is fetched: no network, no remote code.

Owns: loading, the parameters of each policy, the active adapter. Does not own: the content of a published version
(`publication.py`), whether the forward pass is right (`forward_check.py`), what an adapter changes (`adapters.py`),
recomputation of layers (`layers.py`). Invariants: the shared base never requires a gradient; a
policy's initial weights do not depend on the other policies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import peft
import torch
from torch import nn
from transformers import AttentionInterface

from agentrl.config.plans import BaseModelPlan, TrainerPlan
from agentrl.config.policies import LoraConfig
from agentrl.core.errors import ModelError
from agentrl.core.ids import stable_hash64
from agentrl.engines.models import (
    check_sparse_attention,
    computing_in_float32,
    model_dtype,
    native_attention,
    quote_first_names,
    read_meta_model,
    read_model,
    share_frozen_weights,
)
from agentrl.learn.adapters import (
    adaptable_modules,
    adapter_targets,
    add_adapter,
    describe_adapter,
    short_names,
    weight_matrices,
)
from agentrl.learn.forward import (
    ATTENTION,
    HeadOutput,
    RoutingReplay,
    SamplerDistributions,
    sharing_pays,
    token_logprobs,
    tree_attention,
)
from agentrl.learn.forward_check import why_unshared
from agentrl.learn.layers import recompute_layers
from agentrl.learn.packing import MicroBatch, TreeSize
from agentrl.learn.publication import Publication, PublishedAdapter, PublishedWeights
from agentrl.learn.ranks import ShardedForward, gather_float32, shard_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


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
        self.described = described
        """Layers with an adapter, and their share of the model; empty for full weights."""
        self.kind: Literal["full", "adapter"] = "full" if adapter is None else "adapter"
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters that an optimizer step changes, keyed by name; float32. After changing their values, call
        `round_masters`."""
        self.compute_tensors: dict[str, nn.Parameter] = {}
        """Parameters that the model computes with, rounded or on another device, for those with a master in
        `parameters`."""
        self._sharded_forward: ShardedForward | None = None
        self.peft_model = peft_model
        """PEFT's view of the model, with the adapters of all policies."""
        self.adapter = adapter
        """PEFT's name of the adapter; None: full weights."""

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
        if self.peft_model is not None and self.adapter is not None and self.peft_model.active_adapter != self.adapter:
            self.peft_model.set_adapter(self.adapter)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Compute as the base model under the adapter within the context; without an adapter nothing changes."""
        if self.peft_model is None:
            yield
            return
        with self.peft_model.disable_adapter():
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
        reference: HeadOutput | SamplerDistributions | None = None,
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
                self.compute_tensors[name] = parameter
                home = torch.device("cpu") if offload and not parameter.is_meta else parameter.device
                self.parameters[name] = master = nn.Parameter(exact.to(home, torch.float32, copy=True))
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))

    @cached_property
    def publication(self) -> Publication:
        """What a version of this policy holds."""
        return PublishedWeights(self) if self.adapter is None else PublishedAdapter(self)

    @property
    def has_masters(self) -> bool:
        """Whether the model computes with rounded values of full weights."""
        return self.kind == "full" and any(
            parameter.dtype != torch.float32 for parameter in self.compute_tensors.values()
        )

    @torch.no_grad()
    def round_masters(self) -> None:
        """Round the current values of `parameters` into the model."""
        for name, parameter in self.compute_tensors.items():
            parameter.copy_(self.parameters[name])


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
        ConfigError: an adapter targets a layer that cannot be both trained and served.
    """
    models: dict[str, PolicyModel] = {}
    for base in plan.bases:
        models |= _load_on_base(plan, base, device, mesh, trim)
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
    load_base = partial(
        LoadedBase, plan, path, partial(_load, path, device, dtype, plan.max_context, mesh, trim), dtype
    )
    adapters = {name: policy.lora for name, policy in base_plan.trained.items() if policy.lora is not None}
    result: dict[str, PolicyModel] = {}
    if adapters:
        shared = load_base()
        if plan.demand.engine_in_process and mesh is None:
            share_frozen_weights(path, shared.model, dtype)
        result = {name: shared.add(name, lora) for name, lora in adapters.items()}
    for name in base_plan.trained:
        if name not in result:
            result[name] = load_base(takes_adapters=False).bare()
    sharded_forwards: dict[int, ShardedForward] = {}
    for policy_model in result.values():
        if mesh is not None:
            if id(policy_model.model) not in sharded_forwards:
                masters = policy_model.kind == "full"
                sharded_forwards[id(policy_model.model)] = ShardedForward(
                    policy_model.model, mesh, masters=masters, offload=offload
                )
            policy_model.shard(sharded_forwards[id(policy_model.model)])
        policy_model.train(offload=plan.offloads_masters)
        if plan.trainer.recompute:
            recompute_layers(policy_model.model, policy_model.replay)
    return result


class _AdaptableLayers(NamedTuple):
    """The layers of a base model that can be trained and served under an adapter."""

    modules: Sequence[str] = ()
    matrices: Mapping[str, torch.Size] = MappingProxyType({})
    """Shapes of all weight matrices."""

    @staticmethod
    def of(model: PreTrainedModel) -> _AdaptableLayers:
        """Find the layers of a model without adapters."""
        return _AdaptableLayers(adaptable_modules(model), weight_matrices(model))


class LoadedBase:
    """A base model in memory, on which adapters are put and from which they are removed, or whose weights one policy
    trains.

    Args:
        plan: the trainer's part of the run.
        path: directory of the base model.
        read: reads the model.
        dtype: dtype in which it computes.
        recompute: whether its layers are computed again in the backward pass.
        takes_adapters: whether adapters are put on it; if not, its layers are not examined.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        path: Path,
        read: Callable[[], PreTrainedModel],
        dtype: torch.dtype,
        *,
        recompute: bool = False,
        takes_adapters: bool = True,
    ) -> None:
        self._plan = plan
        self._path = path
        self._read = read
        self._dtype = dtype
        self._recompute = recompute
        self._model: PreTrainedModel | None = None
        model = self.model
        # Before `why_unshared`, which changes the attention.
        self._layers = _AdaptableLayers.of(model) if takes_adapters else _AdaptableLayers()
        self._unshared = why_unshared(model, plan.max_context, path)
        self._peft: peft.PeftModel | None = None
        self._number = 0

    @property
    def adaptable(self) -> Sequence[str]:
        """Layers that can be trained and served under an adapter; none without `takes_adapters`."""
        return self._layers.modules

    @property
    def model(self) -> PreTrainedModel:
        """The model, which is read again after `remove` of a policy that trained its weights."""
        if self._model is None:
            self._model = self._read()
            self._model.requires_grad_(False)
            self._replay = _replay(self._model, captured=self._plan.capture_routing)
            if self._recompute:
                recompute_layers(self._model, self._replay)
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
        model, layers = self.model, self._layers
        targets = adapter_targets(f"policies.{name}.lora", lora, layers.modules, model)
        description = f"{name}: {describe_adapter(lora, targets, layers.matrices)}"
        if lora.merge and self._dtype != torch.float32:
            description += f"; merged into {str(self._dtype).removeprefix('torch.')}, which loses small updates"
        # Generated names, because PEFT matches names as substrings: a policy called "a" would match every adapter.
        adapter = f"adapter{self._number}x"
        self._number += 1
        # PEFT puts an adapter where its layer's weights are, but not beside ones without data.
        place = torch.device("meta") if model.device.type == "meta" else nullcontext()
        with torch.random.fork_rng(devices=[]), place:
            torch.manual_seed(stable_hash64(self._plan.seed, name, "adapter") >> 1 if seed is None else seed)
            self._peft = add_adapter(model, self._peft, adapter, lora, short_names(targets, model), self._path)
        model.requires_grad_(False)
        return PolicyModel(
            model=model,
            base=self._path,
            peft_model=self._peft,
            adapter=adapter,
            unshared=self._unshared,
            replay=self._replay,
            described=description,
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
    with computing_in_float32(model, gather_float32):  # shards are gathered in float32
        return RoutingReplay(model)
