"""The experts of a mixture as transformers stores them, and adapters on them in the layout of PEFT.

transformers stores the experts of a layer in two tensors with a row for each expert. PEFT adapts both with nested
modules (`LoraConfig.target_parameters`): `experts.base_layer` has the adapter of the first tensor, `experts` that of
the second. The matrices of all experts are stacked: A is [experts * rank, inputs], its rows by expert and then by rank;
B is [outputs, rank * experts], its columns by rank and then by expert.

Computed is y = W x + B (A x) for the expert of each row, by grouped matrix products over rows sorted by expert. The
product B A, which is as large as W, is never formed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping


def padded_rank(rank: int) -> int:
    """Return the rank with which experts compute: on GPUs, grouped matrix products need rows of whole 16-byte units."""
    return rank + -rank % 8


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules that hold the weights of several experts, a row for each, as transformers stores them."""
    experts = {}
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        parameters = [each for each in module._parameters.values() if each is not None]
        if count and all(len(each) == count for each in parameters) and any(each.ndim > 2 for each in parameters):
            experts[name] = module
    return experts


def adaptable_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules of `find_experts` that `compute_adapted` supports; transformers marks them."""
    return {name: experts for name, experts in find_experts(model).items() if hasattr(experts, "is_transposed")}


def expert_tensors(experts: Any) -> tuple[str, str]:
    """Return the names of the two tensors of experts, in the order in which they are applied."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def find_expert_tensor(model: nn.Module, name: str) -> tuple[Any, str] | None:
    """Return the experts, and the name of their tensor, that PEFT's module `name` adapts; None if it adapts none."""
    path = name.removesuffix(".base_layer")
    try:
        experts = adaptable_experts(model.get_submodule(path)).get("")
    except AttributeError:
        return None
    if experts is None:
        return None
    first, second = expert_tensors(experts)
    return experts, second if path == name else first


def adapter_module(path: str, experts: Any, tensor: str) -> str:
    """Return the name of PEFT's module that adapts a tensor of the experts at `path`."""
    return path if tensor == expert_tensors(experts)[1] else f"{path}.base_layer"


def expert_sizes(experts: Any, tensor: str) -> tuple[int, int, int]:
    """Return the number of experts, of inputs and of outputs of a tensor."""
    count, *sizes = getattr(experts, tensor).shape
    inputs, outputs = sizes if experts.is_transposed else reversed(sizes)
    return count, inputs, outputs


class ExpertFactors(NamedTuple):
    """The matrices of adapters on one tensor, a group for each expert and adapter, ordered by expert."""

    down: Tensor  # [groups, rank, inputs]
    up: Tensor  # [groups, rank, outputs], scaled

    @classmethod
    def from_peft(cls, down: Tensor, up: Tensor, experts: int) -> ExpertFactors:
        """Rearrange the stacked matrices A and B of one adapter; B is scaled."""
        a = down.reshape(experts, -1, down.shape[1])
        b = up.reshape(len(up), -1, experts).permute(2, 1, 0)
        missing = (0, 0, 0, padded_rank(a.shape[1]) - a.shape[1])
        return cls(functional.pad(a, missing), functional.pad(b, missing).contiguous())

    @classmethod
    def zeros(cls, experts: Any, tensor: str, adapters: int, rank: int) -> ExpertFactors:
        """Return the matrices of adapters that change nothing."""
        count, inputs, outputs = expert_sizes(experts, tensor)
        shape, weight = (count * adapters, padded_rank(rank)), getattr(experts, tensor)
        return cls(weight.new_zeros(*shape, inputs), weight.new_zeros(*shape, outputs))

    def product(self, experts: Any) -> Tensor:
        """Return B A of each expert, for one adapter, in the layout of the tensor that it adapts."""
        first, second = (self.down, self.up) if experts.is_transposed else (self.up, self.down)
        return torch.bmm(first.transpose(1, 2), second)


def compute_adapted(
    experts: Any,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    factors: Mapping[str, ExpertFactors],
    adapters: Tensor | None = None,
    *,
    row_by_row: bool = False,
) -> Tensor:
    """Compute the output of experts under adapters.

    Args:
        experts: module of the experts.
        hidden: [tokens, width].
        chosen: [tokens, top_k], the experts of each token.
        weights: [tokens, top_k], their weights.
        factors: matrices of the adapters, by the name of the tensor that they adapt.
        adapters: [tokens], the adapter of each token; None: there is one.
        row_by_row: whether to multiply each row alone, so that its bits do not depend on the other rows of its expert.
    """
    multiply: Any = _multiply_rows if row_by_row else functional.grouped_mm
    count = experts.num_experts
    per_expert = len(next(iter(factors.values())).down) // count if factors else 1
    groups = chosen if adapters is None else chosen * per_expert + adapters[:, None]
    sorted_groups, order = torch.sort(groups.reshape(-1), stable=True)
    ends = torch.searchsorted(
        sorted_groups, torch.arange(count * per_expert, device=hidden.device), right=True, out_int32=True
    )
    expert_ends = ends[per_expert - 1 :: per_expert].contiguous()

    def product(rows: Tensor, tensor: str) -> Tensor:
        weight = getattr(experts, tensor)
        output: Tensor = multiply(rows, weight if experts.is_transposed else weight.transpose(1, 2), offs=expert_ends)
        if experts.has_bias:
            output += getattr(experts, f"{tensor}_bias")[sorted_groups // per_expert]
        if tensor in factors:
            down, up = factors[tensor]
            output += multiply(multiply(rows, down.transpose(1, 2), offs=ends), up, offs=ends)
        return output

    first, second = expert_tensors(experts)
    inner = product(hidden[order // chosen.shape[1]], first)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    output = product(inner, second)
    by_token = torch.empty_like(output).index_copy(0, order, output).view(*chosen.shape, -1)
    return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def compute_row_by_row(model: nn.Module) -> None:
    """Make the experts of a model multiply each row alone; see `compute_adapted`."""
    for experts in adaptable_experts(model).values():
        experts.forward = partial(compute_adapted, experts, factors={}, row_by_row=True)


def _multiply_rows(rows: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
    """Compute what `grouped_mm` does, one row at a time."""
    groups = torch.searchsorted(offs, torch.arange(len(rows), device=rows.device), right=True)
    return torch.cat([rows[at : at + 1] @ matrices[group] for at, group in enumerate(groups.tolist())])
