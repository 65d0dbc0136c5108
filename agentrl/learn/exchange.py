"""Rows that travel between ranks in a forward pass, and their gradients back.

Owns: the collective operations that autograd sees. Does not own: what is sent (`experts.py`, `context.py`), sums of
gradients (`ranks.py`). On the meta device nothing is sent; only shapes are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send `sent[i]` consecutive rows of `rows`, [sum(sent), ...], to rank i of a group; return what the ranks send to
    this one, [sum(received), ...], with `received[i]` rows from rank i."""
    exchanged: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


def gather_rows(rows: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
    """Return [count, ...] on every rank of a group; `rows` are those at `places`, which this rank computed.

    Every rank must compute the same loss from them: the gradient of this rank's rows is taken from its own loss alone.
    """
    gathered: Tensor = _Gather.apply(rows, places, count, group)  # type: ignore[no-untyped-call]
    return gathered


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        context.sent, context.received, context.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, context.received, context.sent, context.group), None, None, None


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    if not rows.is_meta:
        dist.all_to_all_single(output, rows.contiguous(), list(received), list(sent), group=group)
    return output


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
        context.save_for_backward(places)
        gathered = rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, places, rows)
        if not rows.is_meta:
            dist.all_reduce(gathered, group=group)  # each row is one rank's, plus zeros
        return gathered

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = context.saved_tensors
        return gradient[places], None, None, None
