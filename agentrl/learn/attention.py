"""Attention along the paths of a prefix tree, in memory linear in tokens.

The tokens of a micro-batch lie in depth-first order, so the tokens that see token j are those from j up to its
`MicroBatch.visible_until`: two numbers per token replace a mask. On CPU, chunks of consecutive queries go through
torch's flash kernel with the keys that any of them sees. A chunk's mask is made when the chunk is computed, forward and
backward, and is bounded in size, so no stored tensor grows with the square of a row's length; a row without a shared
prefix is computed whole, without a mask. On CUDA the same rule is a block mask of flex_attention, which has not been
run on a GPU yet. Key and value heads shared by several query heads are not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from agentrl.core.errors import ModelError
from agentrl.learn.packing import MicroBatch

ATTENTION = "agentrl_tree"
"""Name under which `tree_attention` is registered with transformers."""

_CHUNK = (64, 256)
"""Smallest and largest number of queries in a chunk, if its mask allows it: short rows waste less in short chunks."""
_MASK = 1 << 21
"""Number of elements of the largest mask: longer contexts have shorter chunks."""
_KEPT_MASKS = 1 << 22
"""Number of mask elements that are kept for all layers; above it, each layer makes its own masks."""
_BLOCK = 128
"""Number of tokens in a block of flex_attention."""


@dataclass(slots=True)
class _Chunk:
    """Consecutive queries [start, stop) of a micro-batch, and the keys that any of them sees."""

    start: int
    stop: int
    keys: slice | Tensor
    is_causal: bool = False
    """Whether queries and keys are one row from its first token, which needs no mask."""
    mask: Tensor | None = None
    """Attention mask of the chunk; None if it is not kept."""


class Tree:
    """The visibility of tokens in a micro-batch, on a device."""

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        """See `MicroBatch.visible_until`."""
        self._batch = batch
        self._device = device
        self._until = torch.from_numpy(batch.visible_until).to(device)
        self._position = torch.from_numpy(batch.position_ids).to(device)
        self._order = torch.arange(len(batch.token_ids), device=device)
        self._chunks: dict[int | None, list[_Chunk]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}
        self._kept = 0

    def chunks(self, window: int | None) -> list[_Chunk]:
        """Return the queries in chunks; a token sees the `window` newest tokens of its path, or all of them."""
        if window not in self._chunks:
            self._chunks[window] = list(self._make_chunks(window))
        return self._chunks[window]

    def _make_chunks(self, window: int | None) -> Iterator[_Chunk]:
        until, position, starts = self._batch.visible_until, self._batch.position_ids, self._batch.starts
        count, at = len(until), 0
        fewest, most = _CHUNK
        size = min(most, max(fewest, count // len(starts)))
        ends = dict(zip(starts.tolist(), [*starts[1:].tolist(), count], strict=True))
        whole = {
            start: end for start, end in ends.items() if window is None and position[start] == 0 and end - start >= most
        }
        following = np.array([*sorted(whole), count])
        while at < count:
            if at in whole:
                yield _Chunk(at, whole[at], slice(at, whole[at]), is_causal=True)
                at = whole[at]
                continue
            stop = min(at + size, int(following[np.searchsorted(following, at)]))
            keys = np.flatnonzero(until[:stop] > at)
            if window is not None:
                keys = keys[position[keys] > position[at:stop].min() - window]
            stop = min(stop, at + max(1, _MASK // len(keys)))
            keys = keys[keys < stop]
            first, last = int(keys[0]), int(keys[-1])
            is_range = last - first + 1 == len(keys)
            yield _Chunk(at, stop, slice(first, last + 1) if is_range else torch.from_numpy(keys).to(self._device))
            at = stop

    def mask(self, chunk: _Chunk, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask of a chunk's scores, [1, 1, queries, keys], 0 or -inf; None if the kernel masks by
        itself."""
        if chunk.is_causal:
            return None
        if chunk.mask is not None and chunk.mask.dtype == dtype:
            return chunk.mask
        queries, keys = self._order[chunk.start : chunk.stop, None], self._order[chunk.keys]
        hidden = (keys > queries) | (self._until[chunk.keys] <= queries)
        if window is not None:
            hidden |= self._position[chunk.start : chunk.stop, None] - self._position[chunk.keys] >= window
        mask = torch.zeros((1, 1, *hidden.shape), dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        if self._kept + mask.numel() <= _KEPT_MASKS:
            self._kept += mask.numel()
            chunk.mask = mask
        return mask

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the same visibility for flex_attention: the blocks of keys that each block of queries sees, in part or
        in whole."""
        if window not in self._block_masks:
            self._block_masks[window] = self._make_block_mask(window)
        return self._block_masks[window]

    def _make_block_mask(self, window: int | None) -> BlockMask:
        until, position = self._until, self._position
        # A tensor, so that one kernel serves every window size, and none.
        before = torch.full_like(position, -1) if window is None else position - window

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < until[key]) & (position[key] > before[query])

        count = len(self._batch.token_ids)
        edges = np.arange(0, count, _BLOCK)
        latest = np.maximum.reduceat(self._batch.visible_until, edges)
        soonest = np.minimum.reduceat(self._batch.visible_until, edges)
        stops = np.minimum(edges + _BLOCK, count)
        earlier = np.tri(len(edges), dtype=np.bool_)
        some = earlier & (latest > edges[:, None])
        every = np.tri(len(edges), k=-1, dtype=np.bool_) & (soonest >= stops[:, None]) & (window is None)

        def listed(blocks: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
            order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
            counts = blocks.sum(axis=1).astype(np.int32)
            tensors = (torch.from_numpy(each[None, None]).to(self._device) for each in (counts, order))
            return next(tensors), next(tensors)

        return BlockMask.from_kv_blocks(
            *listed(some & ~every), *listed(every), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(count, count)
        )


class _ChunkedAttention(torch.autograd.Function):
    """Attention in chunks of a tree, on CPU. It saves queries, keys, values, outputs and one number per query and
    head.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: Tree, window: int | None, scale: float | None
    ) -> Tensor:
        _, heads, count, width = query.shape
        output = query.new_empty(1, count, heads, width).transpose(1, 2)
        normalisers = []
        for chunk in tree.chunks(window):
            attended, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, chunk.start : chunk.stop],
                key[:, :, chunk.keys],
                value[:, :, chunk.keys],
                0.0,
                chunk.is_causal,
                attn_mask=tree.mask(chunk, window, query.dtype),
                scale=scale,
            )
            output[:, :, chunk.start : chunk.stop] = attended
            normalisers.append(normaliser)
        ctx.save_for_backward(query, key, value, output, *normalisers)
        ctx.tree, ctx.window, ctx.scale = tree, window, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, *normalisers = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for chunk, normaliser in zip(ctx.tree.chunks(ctx.window), normalisers, strict=True):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, chunk.start : chunk.stop],
                query[:, :, chunk.start : chunk.stop],
                key[:, :, chunk.keys],
                value[:, :, chunk.keys],
                output[:, :, chunk.start : chunk.stop],
                normaliser,
                0.0,
                chunk.is_causal,
                attn_mask=ctx.tree.mask(chunk, ctx.window, query.dtype),
                scale=ctx.scale,
            )
            of_query[:, :, chunk.start : chunk.stop] = found[0]
            for total, part in ((of_key, found[1]), (of_value, found[2])):
                if isinstance(chunk.keys, slice):
                    total[:, :, chunk.keys] += part
                else:
                    total.index_add_(2, chunk.keys, part)
        return of_query, of_key, of_value, None, None, None


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, tree: Tree, window: int | None, scale: float | None
) -> Tensor:
    """Compute `tree_attention` with flex_attention, compiled on CUDA; the output is [1, heads, N, D]."""
    attend: Any = _compiled_flex() if query.is_cuda else flex_attention
    attended: Tensor = attend(query, key, value, block_mask=tree.block_mask(window), scale=scale, enable_gqa=True)
    return attended


@cache
def _compiled_flex() -> Any:
    # fullgraph: exceeding torch's limit of recompilations is an error, instead of a fallback that materializes all
    # scores.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def tree_attention(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: Tree | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Compute attention along the paths of a prefix tree; registered with transformers, which fixes this signature.

    Args:
        module: the attention layer.
        query: [1, heads, N, D].
        key: [1, key heads, N, D].
        value: [1, key heads, N, D].
        attention_mask: ignored: the tree determines visibility.
        dropout: must be 0.
        scaling: factor on the scores; None: 1 / sqrt(D).
        sliding_window: number of tokens that a token sees, counted backwards; None: all.
        tree: visibility in the micro-batch, passed through the model's keyword arguments.
        other: further arguments from the model.

    Raises:
        ModelError: the model asks attention for something else than a causal softmax.
    """
    strange = [name for name in ("s_aux", "softcap", "position_bias") if other.get(name) is not None]
    if tree is None or strange or dropout or query.shape[-1] != value.shape[-1]:
        raise ModelError(f"{type(module).__name__} needs attention with {', '.join(strange) or 'other arguments'}")
    if query.is_cuda:
        output = flex_tree_attention(query, key, value, tree, sliding_window, scaling)
    else:
        output = _ChunkedAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, tree, sliding_window, scaling
        )
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, tree_attention)
