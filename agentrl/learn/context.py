"""Context parallelism: the tokens of a micro-batch are divided among the ranks of a group.

Most layers compute each token of a packed prefix tree by itself, so a rank computes a slice of the tokens, and the head
of its trained ones. Attention exchanges: a rank receives all tokens of its share of the heads, and returns their
outputs (Ulysses, arXiv:2309.14509). Recurrent layers compute all tokens on each rank. Losses see the columns of the
whole micro-batch on every rank.

Owns: the division of tokens and heads. Does not own: attention and head (`forward.py`), the groups (`ranks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agentrl.core.tokens import KeptSets
from agentrl.learn.exchange import exchange_rows, gather_rows
from agentrl.learn.packing import MicroBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """This rank's group: consecutive ranks that divide the tokens of each micro-batch."""

    rank: int
    """Number of this rank within the group."""
    size: int
    processes: Any = None
    """The torch.distributed group; None for tensors without data."""

    def slice(self, batch: MicroBatch) -> ContextSlice:
        """Return this rank's part of a micro-batch."""
        return ContextSlice(self, batch)


class ContextSlice:
    """A rank's part of a micro-batch: consecutive tokens, and the trained tokens that their hidden states predict."""

    def __init__(self, group: ContextGroup, batch: MicroBatch) -> None:
        self._group = group
        count = max(len(batch.token_ids), group.size)  # models do not compute 0 tokens
        bounds = [count * rank // group.size for rank in range(group.size + 1)]
        self._counts = [stop - start for start, stop in pairwise(bounds)]
        start, stop = bounds[group.rank : group.rank + 2]
        self.tokens = slice(start, stop)
        self.trained = np.flatnonzero((batch.hidden_index >= start) & (batch.hidden_index < stop))
        """Indices of this rank's trained tokens among those of the micro-batch."""
        ends = np.empty(0, np.int64) if batch.end_index is None else batch.end_index
        self.ends = np.flatnonzero((ends >= start) & (ends < stop))
        """Indices of this rank's entries of `MicroBatch.end_index`."""

    def predictions(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with all tokens, at least one per rank, but only this rank's trained tokens, whose
        `hidden_index` and `end_index` count within its slice."""
        here, start = self.trained, self.tokens.start
        kept_counts, kept_ids = batch.kept_counts, batch.kept_ids
        if kept_counts is not None and kept_ids is not None:
            is_here = np.isin(np.arange(len(kept_counts)), here)
            kept_ids = kept_ids[np.repeat(is_here, KeptSets.sizes_of(kept_counts))]
            kept_counts = kept_counts[here]
        return replace(
            batch.with_min_tokens(self._group.size),
            hidden_index=batch.hidden_index[here] - start,
            targets=batch.targets[here],
            temperature=batch.temperature[here],
            end_index=None if batch.end_index is None else batch.end_index[self.ends] - start,
            kept_counts=kept_counts,
            kept_ids=kept_ids,
        )

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange this rank's tokens of all heads, [1, heads, n, D] each, for all N tokens of its heads."""
        size, tokens = self._group.size, query.shape[2]
        parts = [states[0].unflatten(0, (size, -1)) for states in (query, key, value)]
        rows = torch.cat(parts, dim=1).transpose(1, 2).flatten(0, 1)  # [ranks * n, heads of a rank, D]
        whole = exchange_rows(rows, [tokens] * size, self._counts, self._group.processes)
        heads = [part.shape[1] for part in parts]
        query, key, value = whole.transpose(0, 1)[None].split(heads, dim=1)
        return query, key, value

    def to_all(self, hidden: Tensor) -> Tensor:
        """Exchange the hidden states of this rank's tokens, [1, n, H], for those of all, [1, N, H]."""
        size, tokens = self._group.size, hidden.shape[1]
        rows = hidden[0].repeat(size, 1)
        return exchange_rows(rows, [tokens] * size, self._counts, self._group.processes)[None]

    def to_tokens(self, output: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads, [1, heads, N, D], for its tokens of all heads."""
        size, tokens = self._group.size, self._counts[self._group.rank]
        rows = output[0].transpose(0, 1)
        returned = exchange_rows(rows, self._counts, [tokens] * size, self._group.processes)
        return returned.view(size, tokens, *rows.shape[1:]).transpose(1, 2).flatten(0, 1)[None]

    def gather(self, column: Tensor, places: NDArray[np.int64], count: int) -> Tensor:
        """Return a column [count, ...] on every rank; `column` has the rows at `places`, which this rank computed."""
        return gather_rows(column, torch.from_numpy(places).to(column.device), count, self._group.processes)
