"""Experts that stay where their shards are: each rank computes those it holds, and tokens travel to them (expert
parallelism), instead of weights to every token.

A rank sorts the pairs of a token and a chosen expert by expert, sends each to the rank that holds the expert, and adds
up what comes back, weighted by the router. An expert sees the tokens of all ranks, so its gradient is whole where the
expert is; only copies of a hybrid mesh are added up.

Owns: what is sent where, the choice by bytes, and PEFT's modules for adapters on experts, whose matrices are gathered
like other weights: they are small, and B has no rows by expert. Does not own the experts' computation (transformers',
or `engines.experts` under an adapter), the exchange (`exchange`), storage or gathering of shards (`ranks`).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from peft.tuners.lora import layer as peft_layers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.engines.experts import ExpertFactors, compute_adapted
from agentrl.learn.exchange import exchange_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh


class LayerBytes(NamedTuple):
    """Bytes that a rank sends for the experts of a layer and a micro-batch, forward and backward."""

    gathered: float
    dispatched: float


def predict_layer_bytes(
    *, weights: int, width: int, top_k: int, tokens: int, ranks: int, itemsize: int, trained: bool
) -> LayerBytes:
    """Predict the bytes without recomputation: weights are gathered twice and their float32 gradients reduced once;
    tokens and their gradients travel to the experts and back.

    Args:
        weights: number of weights in the experts of a layer.
        width: hidden size.
        top_k: number of experts per token.
        tokens: number of tokens that a rank computes per micro-batch.
        ranks: number of ranks that share the experts.
        itemsize: bytes per number in the dtype of the computation.
        trained: whether the experts are trained.
    """
    share = (ranks - 1) / ranks
    gathered = weights * (2 * itemsize + 4 * trained)
    return LayerBytes(gathered=gathered * share, dispatched=4 * tokens * top_k * width * itemsize * share)


def dispatch_experts(modules: Mapping[str, Any], mesh: DeviceMesh, dtype: torch.dtype | None) -> set[nn.Parameter]:
    """Make each rank compute only the experts that it holds; return their parameters, which are not to be gathered.

    Args:
        modules: experts (`find_experts`), whose number the ranks divide.
        mesh: ranks over which the parameters are sharded by rows (`ranks.shard_tensor`).
        dtype: in which the experts compute; None: that of the shards.
    """
    for module in modules.values():
        module.forward = _DispatchedForward(module, mesh, dtype)
    return {parameter for module in modules.values() for parameter in module.parameters()}


class _DispatchedForward:
    """The forward pass of experts in shards. Whole experts, as in a check before the first step, compute as usual."""

    def __init__(self, module: Any, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self._module = module
        self._forward = module.forward
        self._experts: int = self._module.num_experts
        dimension = mesh.ndim - 1
        self._group, self._ranks = mesh.get_group(dimension), mesh.size(dimension)
        self._rank = mesh.get_local_rank(dimension)
        self._copies = mesh.get_group(0) if dimension else None
        self._dtype = dtype

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts' output.

        Args:
            hidden: [tokens, width].
            chosen: [tokens, top_k], the experts of each token.
            weights: [tokens, top_k], their weights.
        """
        shards: dict[str, Any] = dict(self._module._parameters)
        if not all(isinstance(shard, DTensor) for shard in shards.values()):
            return self._forward(hidden, chosen, weights)  # type: ignore[no-any-return]
        held = self._experts // self._ranks
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=self._experts).view(self._ranks, held)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        tokens = exchange_rows(hidden[order // chosen.shape[1]], sent, received, self._group)
        experts = torch.arange(held, device=hidden.device).repeat(self._ranks)
        experts = experts.repeat_interleave(arriving.reshape(-1), output_size=sum(received))
        if not sum(received):  # stays a part of the graph: the others wait for its gradients
            tokens, experts = tokens.sum(0, keepdim=True), experts.new_zeros(1)
        self._module._parameters.update({name: self._held(shard) for name, shard in shards.items()})
        self._module.num_experts = held
        adapters: dict[str, ExpertFactors] = getattr(self._forward, "adapters", {})
        active, mine = dict(adapters), slice(self._rank * held, (self._rank + 1) * held)
        adapters.update({name: ExpertFactors(down[mine], up[mine]) for name, (down, up) in active.items()})
        try:
            output = self._forward(tokens, experts[:, None], torch.ones_like(tokens[:, :1]))
        finally:
            self._module._parameters.update(shards)
            self._module.num_experts = self._experts
            adapters.update(active)
        returned = exchange_rows(output[: sum(received)], received, sent, self._group)
        by_token = self._in_token_order(returned, order).view(*chosen.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _in_token_order(self, rows: Tensor, order: Tensor) -> Tensor:
        return torch.empty_like(rows).index_copy(0, order, rows)

    def _held(self, shard: DTensor) -> Tensor:
        """Return this rank's experts, as they compute."""
        held = shard.to_local()
        if self._copies is not None and held.requires_grad and torch.is_grad_enabled():
            held.register_hook(self._sum_over_copies)
        return held if self._dtype is None else held.to(self._dtype)

    def _sum_over_copies(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self._copies)
        return total


class ParamWrapper(peft_layers.ParamWrapper):  # PEFT recognizes wrappers by this name
    """PEFT's adapters on one tensor of experts. While it computes, PEFT replaces the tensor by the sum of the tensor
    and B A; here the experts multiply by A and B instead."""

    def __init__(self, base_layer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(base_layer, *args, **kwargs)
        experts = self.get_base_layer()
        if not isinstance(experts.forward, _AdaptedForward):  # not adapted by the wrapper of the other tensor
            experts.forward = _AdaptedForward(experts)
        self._active: dict[str, ExpertFactors] = experts.forward.adapters

    forward = torch.compiler.disable(peft_layers.ParamWrapper.forward)  # grouped products compile in bfloat16 alone

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        for adapter in active_adapters:  # one, which may be on other layers alone
            if adapter in self.lora_A:
                down: Any = self.lora_A[adapter].weight
                up: Any = self.lora_B[adapter].weight
                self._active[self.parameter_name] = self.factors(down, up, adapter)
        try:
            yield
        finally:
            self._active.pop(self.parameter_name, None)

    def factors(self, down: Tensor, up: Tensor, adapter: str) -> ExpertFactors:
        """Return the matrices A and B of an adapter, scaled, in the dtype of the experts."""
        dtype = getattr(self.get_base_layer(), self.parameter_name).dtype
        return ExpertFactors.from_peft(down.to(dtype), (up * self.scaling[adapter]).to(dtype), self.num_experts)


class _AdaptedForward:
    """The forward pass of experts that may have an active adapter."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self._forward = experts.forward
        self.adapters: dict[str, ExpertFactors] = {}
        """Matrices of the active adapter, by the name of the tensor that they adapt."""

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if not self.adapters:
            return self._forward(hidden, chosen, weights)  # type: ignore[no-any-return]
        return compute_adapted(self._experts, hidden, chosen, weights, self.adapters)
