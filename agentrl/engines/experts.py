"""The experts of a mixture as transformers stores them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules that hold the weights of several experts, a row for each, as transformers stores them."""
    experts = {}
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        parameters = [each for each in module._parameters.values() if each is not None]
        if count and all(len(each) == count for each in parameters) and any(each.ndim > 2 for each in parameters):
            experts[name] = module
    return experts


def compute_row_by_row(model: nn.Module) -> None:
    """Make the experts of a model multiply each row alone, so that its bits do not depend on the other rows of its
    expert. Experts in another layout than transformers marks stay as they are."""
    for experts in find_experts(model).values():
        if hasattr(experts, "is_transposed"):
            experts.forward = partial(_compute_row_by_row, experts)


def _compute_row_by_row(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute the output of experts.

    Args:
        experts: module of the experts.
        hidden: [tokens, width].
        chosen: [tokens, top_k], the experts of each token.
        weights: [tokens, top_k], their weights.
    """
    sorted_experts, order = torch.sort(chosen.reshape(-1), stable=True)

    def product(rows: Tensor, tensor: str) -> Tensor:
        weight = getattr(experts, tensor)
        matrices = weight if experts.is_transposed else weight.transpose(1, 2)
        numbers = sorted_experts.tolist()
        output = torch.cat([rows[at : at + 1] @ matrices[number] for at, number in enumerate(numbers)])
        return output + getattr(experts, f"{tensor}_bias")[sorted_experts] if experts.has_bias else output

    inner = product(hidden[order // chosen.shape[1]], "gate_up_proj" if experts.has_gate else "up_proj")
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    output = product(inner, "down_proj")
    by_token = torch.empty_like(output).index_copy(0, order, output).view(*chosen.shape, -1)
    return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
