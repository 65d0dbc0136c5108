"""Packs training samples into micro-batches that forward the tokens shared by several rows only once.

Rows of a step share long prefixes: the tool preamble, the task within a group, often the first sampled tokens too. Rows
are sorted by their tokens; each then *owns* the tokens after its longest common prefix with the previous row and
borrows the others, so a micro-batch holds every node of the prefix tree once. A token is trained from the hidden state
of its predecessor, which may be in another row, so two rows may share a hidden state. The gradient is exactly that of
separate rows.

Owns: order, sharing, splitting, which positions are trained. Does not own: tensors on a device, the forward pass
(`forward.py`). Pure numpy. Invariant: the set of (row, trained token) does not depend on order, splitting or sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.core.tokens import Tokens, TrainingSample
from agentrl.credit.samples import trained_positions

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]

LONGEST_PADDED = 2048
"""Maximum length of a row that may be padded, or to which others may be padded, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows packed for one forward pass: N tokens, of which n predict a trained token."""

    token_ids: Int64Array  # [N]
    position_ids: Int64Array  # [N]
    visible_until: Int64Array  # [N], token j is seen by the tokens i with j <= i < visible_until[j]: depth-first order
    starts: Int64Array  # [R], the first token that each row owns; rows that own none are left out
    hidden_index: Int64Array  # [n], which of the N hidden states predicts the trained token
    targets: Int64Array  # [n]
    temperature: Float32Array  # [n]
    sample: Int64Array  # [n], index of the sample in the list that was packed
    position: Int64Array  # [n], position of the trained token in its row
    kept_counts: Int64Array | None = None  # [n], as in `KeptSets`
    kept_ids: Int32Array | None = None  # [sum of the sets' sizes]
    expert_routing: NDArray[np.int16] | None = None  # [N, layers, top_k], -1: not recorded
    is_tree: bool = True
    """Whether it is forwarded as a prefix tree, or else row by row."""

    @property
    def members(self) -> list[int]:
        """Indices of the packed samples, in the order of their trained tokens."""
        indices: list[int] = self.sample[np.flatnonzero(np.diff(self.sample, prepend=-1))].tolist()
        return indices

    @property
    def unrouted_tokens(self) -> int:
        """Number of tokens without recorded routing."""
        if self.expert_routing is None:
            return len(self.token_ids)
        return int((self.expert_routing < 0).any(axis=(1, 2)).sum())


class TreeSize(NamedTuple):
    """Work of some rows as a prefix tree and row by row. A pair is a token and one that it sees."""

    tree_tokens: int
    tree_pairs: int
    row_tokens: int
    row_pairs: int


def pack(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    share: bool | Callable[[TreeSize], bool] = True,
    one_pass: bool = False,
) -> Iterator[MicroBatch]:
    """Pack samples into micro-batches of at most `max_tokens` tokens (a longer row stands alone).

    Args:
        samples: rows in any order; a row without trained tokens is left out.
        max_tokens: bound on the tokens forwarded at once.
        share: forward common prefixes once; otherwise forward every row whole. A function decides for each micro-batch.
        one_pass: whether each micro-batch must be one forward pass, although whole rows are padded in blocks of similar
            length. The ranks of a sharded model need equally many passes.
    """
    samples_with_positions = zip(samples, trained_positions(samples), strict=True)
    rows = [_PackedRow(index, sample, positions) for index, (sample, positions) in enumerate(samples_with_positions)]
    in_blocks = one_pass and share is False
    rows = sorted((row for row in rows if row.length), key=lambda row: -row.length if in_blocks else row.order)
    at = 0
    while at < len(rows):
        is_tree = share is not False
        members, prefix_lengths = _take(rows, at, max_tokens=max_tokens, share=is_tree, one_block=in_blocks)
        if callable(share) and not share(_tree_size(members, prefix_lengths)):
            is_tree = False
            members, prefix_lengths = _take(rows, at, max_tokens=max_tokens, share=False)
        yield _micro_batch(members, prefix_lengths, is_tree=is_tree)
        at += len(members)


def _tree_size(members: Sequence[_PackedRow], prefix_lengths: Sequence[int]) -> TreeSize:
    lengths, shared = np.array([row.length for row in members]), np.array(prefix_lengths)
    row_tokens, row_pairs = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
    shared_pairs = int((shared * (shared + 1) // 2).sum())
    return TreeSize(row_tokens - int(shared.sum()), row_pairs - shared_pairs, row_tokens, row_pairs)


class _PackedRow:
    """A sample, cut after the last token that matters, with the bytes that determine the prefix it can share."""

    __slots__ = ("index", "length", "order", "positions", "routing", "sample", "signature")

    def __init__(self, index: int, sample: TrainingSample, positions: Int64Array) -> None:
        self.index = index
        self.sample = sample
        self.positions = positions
        # The last trained token is only a target; nothing is predicted from it.
        self.length = int(positions[-1]) if len(positions) else 0
        self.routing = None if sample.experts is None else _whole_routing(sample.experts.rows, self.length)
        signature = sample.token_ids[: self.length].astype(">i4").view(np.uint8).reshape(self.length, 4)
        if self.routing is not None:
            # Prefixes with different recorded experts cannot be shared.
            routing = np.ascontiguousarray(self.routing, np.int16).view(np.uint8)
            signature = np.concatenate([signature, routing.reshape(self.length, -1)], axis=1)
        self.signature = signature  # [length, width], uint8
        self.order = signature.tobytes()

    def common(self, other: _PackedRow) -> int:
        """Length of the longest common prefix."""
        shorter = min(self.length, other.length)
        if self.signature.shape[1] != other.signature.shape[1]:
            return 0
        different = np.flatnonzero((self.signature[:shorter] != other.signature[:shorter]).any(axis=1))
        return int(different[0]) if len(different) else shorter


def _take(
    rows: Sequence[_PackedRow], at: int, *, max_tokens: int, share: bool, one_block: bool = False
) -> tuple[list[_PackedRow], list[int]]:
    """Return the rows from `at` on that fit into one micro-batch, or into one block of it, and how many tokens each
    borrows from the previous one."""
    members, prefix_lengths = [rows[at]], [0]
    tokens = rows[at].length
    for row in rows[at + 1 :]:
        common = row.common(members[-1]) if share else 0
        tokens += row.length - common
        if tokens > max_tokens or (one_block and not padded_together(members[0].length, row.length)):
            break
        members.append(row)
        prefix_lengths.append(common)
    return members, prefix_lengths


def _micro_batch(members: Sequence[_PackedRow], prefix_lengths: Sequence[int], *, is_tree: bool) -> MicroBatch:
    paths: list[Int64Array] = []
    tokens, total = 0, sum(row.length for row in members) - sum(prefix_lengths)
    visible_until = np.full(total, total, np.int64)
    starts: list[int] = []
    for row, common in zip(members, prefix_lengths, strict=True):
        new = np.arange(tokens, tokens + row.length - common, dtype=np.int64)
        if paths:
            visible_until[paths[-1][common:]] = tokens
        if len(new):
            starts.append(tokens)
        paths.append(np.concatenate([paths[-1][:common], new]) if common else new)
        tokens += len(new)
    rows = list(zip(members, prefix_lengths, strict=True))
    trained = Tokens.join([row.sample.take(row.positions) for row in members])
    counts = [len(row.positions) for row in members]
    temperatures = np.ones(len(trained)) if trained.temperatures is None else trained.temperatures

    return MicroBatch(
        token_ids=np.concatenate([row.sample.token_ids[at : row.length] for row, at in rows]).astype(np.int64),
        position_ids=np.concatenate([np.arange(at, row.length, dtype=np.int64) for row, at in rows]),
        visible_until=visible_until,
        starts=np.array(starts, np.int64),
        hidden_index=np.concatenate([path[row.positions - 1] for path, row in zip(paths, members, strict=True)]),
        targets=trained.token_ids.astype(np.int64),
        temperature=temperatures.astype(np.float32),
        sample=np.repeat(np.array([row.index for row in members], np.int64), counts),
        position=np.concatenate([row.positions for row in members]),
        kept_counts=None if trained.kept is None else trained.kept.counts.astype(np.int64),
        kept_ids=None if trained.kept is None else trained.kept.ids,
        expert_routing=_routing(rows),
        is_tree=is_tree,
    )


def _whole_routing(routing: NDArray[Any], length: int) -> NDArray[Any]:
    """Return the experts of the first `length` tokens, -1 where they were not recorded."""
    missing = np.full((max(0, length - len(routing)), *routing.shape[1:]), -1, np.int16)
    return np.concatenate([routing[:length], missing]) if len(missing) else routing[:length]


def _routing(rows: Sequence[tuple[_PackedRow, int]]) -> NDArray[np.int16] | None:
    """Return the recorded experts of the tokens that each row owns, -1 for rows without; None if no row has any."""
    routings = [row.routing for row, _ in rows if row.routing is not None]
    if not routings:
        return None
    parts = []
    for row, common in rows:
        part = np.full((row.length - common, *routings[0].shape[1:]), -1, np.int16)
        if row.routing is not None:
            part[:] = row.routing[common:]
        parts.append(part)
    return np.concatenate(parts)


def padded_rows(batch: MicroBatch) -> Iterator[tuple[Int64Array, NDArray[np.bool_]]]:
    """Yield the whole rows of a batch packed without sharing, in blocks of similar length, padded on the right.

    Yields:
        Indices [B, Q] of tokens in the batch, and a mask [B, Q] that is False for padding. There are few blocks,
        because each costs a forward pass, but padding stays below the real work. Rows of more than `LONGEST_PADDED`
        tokens are only put with rows of the same length: padding needs a mask, which grows with the square of the
        length.
    """
    stops = np.append(batch.starts[1:], len(batch.token_ids))
    lengths = stops - batch.starts
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        stop = start
        while stop < len(order) and padded_together(longest, int(lengths[order[stop]])):
            stop += 1
        members = order[start:stop]
        valid = np.arange(longest) < lengths[members, None]
        yield np.where(valid, batch.starts[members, None] + np.arange(longest), 0), valid
        start = stop


def padded_together(longest: int, length: int) -> bool:
    """Whether a row is padded to the length of a longer one."""
    return length == longest if longest > LONGEST_PADDED else 4 * longest <= 5 * length + 16
