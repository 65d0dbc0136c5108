"""The table of tokens that goes from an engine's reply to the trainer: ids, versions, and typed columns.

`Completion`, `TrajectoryRow` and `TrainingSample` are such tables with a few values beside them; the wire between
processes and the journal carry `Tokens.encode()`. A new column with one number per token is one line in `COLUMNS` and
one field of `Tokens`: joins, slices, the wire, the journal, digests, losses, exports and the viewer follow the line.

Invariants, checked where a table is made:
1. All columns have one entry per token; logprobs are those of the *processed* distribution.
2. `VersionSpan`s are in order and do not overlap; those of a completion cover its tokens exactly.
Encoded tables are untrusted: `EncodedTokens.decode` checks lengths, types and ranges.

Columns are numpy arrays; functions that need numpy import it, so that importing this module does not. Readers that only
list a run's tokens decode `plain` columns (`array.array`): loading numpy takes longer than reading an episode.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from agentrl.core.records import PolicyVersion, VersionSpan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import (  # noqa: TC004 - columns are never decoded by their annotations
        BoolArray,
        ExpertArray,
        FinishReason,
        Float32Array,
        Float64Array,
        Int32Array,
        RoutingArray,
    )

TokensT = TypeVar("TokensT", bound="Tokens")


class Column(NamedTuple):
    """A column with one number per token."""

    name: str
    dtype: str
    """Type on the wire and on disk."""
    fill: float | None
    """Value of joined tokens that have none; None: a joined or sliced table has no such column."""
    is_recorded: bool = False
    """Whether engines record it for sampled tokens, so that the journal has it, and exports and the viewer show it."""
    in_loss: str = ""
    """Name in a `LossBatch`; "": losses do not see it."""


COLUMNS = (
    Column("logprobs", "<f4", 0.0, is_recorded=True, in_loss="behavior_logprobs"),
    Column("turn_index", "<i4", -1),
    Column("loss_mask", "|b1", False),
    Column("advantages", "<f4", 0.0, in_loss="advantages"),
    Column("values", "<f4", None),
    Column("temperatures", "<f8", 1.0),
)
"""The columns of `Tokens`, besides the ragged `kept` and the `experts` of the context's positions."""
RECORDED_COLUMNS = tuple(column for column in COLUMNS if column.is_recorded)
LOSS_COLUMNS = tuple(column for column in COLUMNS if column.in_loss)
_values_of_columns = attrgetter(*[column.name for column in COLUMNS])
_PER_TOKEN = tuple(column.name for column in COLUMNS if column.fill is not None)
_values_per_token = attrgetter(*_PER_TOKEN)


class KeptCount(enum.IntEnum):
    """Values of `KeptSets.counts` that are not the size of a kept set."""

    NONE = 0
    """Count of a token sampled from the full vocabulary, without a mask."""
    MISSING = -1
    """Count of a token from a distribution that is not recorded, as of a lost call: it must not be trained."""


class ExcludedTokens(NamedTuple):
    """A kept set, as the tokens that it lacks: within a string, a grammar of JSON excludes few tokens."""

    ids: Int32Array
    """At least one."""


class KeptSets(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The kept set of each token after a grammar, top-k, top-p and min-p, as a ragged array.

    `counts[t]` of `ids` belong to token t; a forced token has the set `{token}` (count 1); see `KeptCount`. A count of
    −1 − n has n of `ids`, the tokens that the set lacks; see `ExcludedTokens`.
    """

    counts: Int32Array  # [n]
    ids: Int32Array  # [sum of the sizes]

    @staticmethod
    def of(sets: Sequence[Int32Array | ExcludedTokens | KeptCount]) -> KeptSets:
        """Make the ragged array of a set per token, or of the reason why it has none."""
        import numpy as np

        parts: list[Int32Array] = []
        counts: list[int] = []
        for part in sets:
            match part:
                case KeptCount():
                    counts.append(part)
                case ExcludedTokens(ids):
                    counts.append(KeptCount.MISSING - len(ids))
                    parts.append(ids)
                case _:
                    counts.append(len(part))
                    parts.append(part)
        return KeptSets(np.array(counts, np.int32), np.concatenate(parts) if parts else np.zeros(0, np.int32))

    @staticmethod
    def sizes_of(counts: NDArray[Any]) -> NDArray[Any]:
        """Return the number of ids of each token, given `counts`."""
        import numpy as np

        return np.where(counts < 0, KeptCount.MISSING - counts, counts).astype(np.int64)

    @staticmethod
    def missing(count: int) -> KeptSets:
        """Return the sets of tokens of a lost call: they are lost with it."""
        import numpy as np

        return KeptSets(np.full(count, KeptCount.MISSING, np.int32), np.zeros(0, np.int32))

    @staticmethod
    def join(parts: Sequence[Tokens]) -> KeptSets | None:
        """Join the sets of consecutive tokens; tokens without any were sampled without filters."""
        import numpy as np

        if all(part.kept is None for part in parts):
            return None
        counts = [
            np.full(len(part), KeptCount.NONE, np.int32) if part.kept is None else part.kept.counts for part in parts
        ]
        sets = [part.kept.ids for part in parts if part.kept is not None]
        return KeptSets(np.concatenate(counts), np.concatenate(sets))

    def slice(self, start: int, stop: int) -> KeptSets:
        """Return the sets of tokens `[start, stop)`."""
        first = int(self.sizes_of(self.counts[:start]).sum())
        inside = self.counts[start:stop]
        return KeptSets(inside, self.ids[first : first + int(self.sizes_of(inside).sum())])

    def take(self, at: NDArray[Any]) -> KeptSets:
        """Return the sets of tokens at ascending positions."""
        import numpy as np

        is_taken = np.zeros(len(self.counts), np.bool_)
        is_taken[at] = True
        return KeptSets(self.counts[at], self.ids[np.repeat(is_taken, self.sizes_of(self.counts))])

    def encode(self) -> bytes:
        """Serialize the counts, then the ids."""
        return self.counts.astype("<i4", copy=False).tobytes() + self.ids.astype("<i4", copy=False).tobytes()

    @staticmethod
    def decode(data: bytes, count: int, *, plain: bool) -> KeptSets:
        """Decode the sets of `count` tokens.

        Raises:
            ValueError: the bytes are not such sets.
        """
        numbers = _decode_column(data, "<i4", plain=plain)
        counts, sets = numbers[:count], numbers[count:]
        sizes = [KeptCount.MISSING - size if size < 0 else size for size in counts.tolist()]
        if len(sizes) != count or _least(sets) < 0 or sum(sizes) != len(sets):
            raise ValueError("the kept sets and their sizes differ")
        return KeptSets(counts, sets)


class ExpertRoutingRestart(NamedTuple):
    """A restart of routing positions: from `row` of a routing on, positions count from `position` again.

    It occurs if the context was recomputed (newer weights, a resume) through other experts. Earlier tokens keep the
    routing they were sampled with.
    """

    row: int
    position: int


class ExpertRoutingSpan(NamedTuple):
    """Tokens `[start, stop)` of a row, and the experts at the positions before them when they were sampled."""

    start: int
    stop: int
    experts: RoutingArray  # [stop - 1, layers, top_k], -1 where none was recorded


class ExpertRouting(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The experts that a mixture-of-experts model used at positions of the whole context, in the order of computation.

    They are no column: a call computes positions of its context too, and some of them twice.
    """

    rows: ExpertArray | RoutingArray  # [positions, layers, top_k]; -1 in a `TrainingSample`: not recorded
    start: int = 0
    """Position of row 0."""
    restarts: tuple[ExpertRoutingRestart, ...] = ()

    @staticmethod
    def join(parts: Sequence[Tokens]) -> ExpertRouting | None:
        """Join the routing of consecutive tokens; the rows repeat positions that a call computed again."""
        return ExpertRouting.of_stretches(
            stretch for part in parts if part.experts is not None for stretch in part.experts.stretches()
        )

    @staticmethod
    def of_stretches(stretches: Iterable[tuple[int, ExpertArray | RoutingArray]]) -> ExpertRouting | None:
        """Make the routing of stretches of consecutive positions, each with its first position; None without rows."""
        import numpy as np

        rows: list[Any] = []
        restarts: list[ExpertRoutingRestart] = []
        first = end = count = 0
        for position, stretch in stretches:
            if not len(stretch):
                continue
            if not rows:
                first = position
            elif position != end:
                restarts.append(ExpertRoutingRestart(count, position))
            rows.append(stretch)
            end, count = position + len(stretch), count + len(stretch)
        return ExpertRouting(np.concatenate(rows), first, tuple(restarts)) if rows else None

    def stretches(self) -> Iterator[tuple[int, ExpertArray | RoutingArray]]:
        """Yield (first position, experts) for each stretch of consecutive positions, in the order of computation."""
        begins = [(0, self.start), *self.restarts, (len(self.rows), 0)]
        for (row, position), (stop, _) in pairwise(begins):
            yield position, self.rows[row:stop]

    @property
    def end(self) -> int:
        """Position after the last one that it holds."""
        return max(position + len(rows) for position, rows in self.stretches())

    def spans(self, length: int) -> Iterator[ExpertRoutingSpan]:
        """Yield the experts used to sample the tokens of a row of `length`, with a span per run of tokens that share
        them.

        A position that was recomputed through other experts (the KV was lost, or newer weights took over) has two
        routings: tokens predicted before it were sampled with the first, later ones with the second. No span is longer
        than the row, and there is only one unless a prefix's routing changed.
        """
        import numpy as np

        latest = np.full((length, *self.rows.shape[1:]), -1, dtype=np.int16)
        first, end = 0, 0  # first token of the current span; positions below `end` have predicted a token
        for start, part in self.stretches():
            stop = start + len(part)
            overlap = latest[start : min(stop, end)]
            if end + 1 > first and ((overlap >= 0) & (overlap != part[: len(overlap)])).any():
                yield ExpertRoutingSpan(first, end + 1, latest[:end].copy())
                first = end + 1
            latest[start:stop] = part
            end = max(end, stop)
        if first < length:
            yield ExpertRoutingSpan(first, length, latest[: length - 1])

    def encode(self) -> bytes:
        """Serialize the shape, the start and the restarts, then the experts, one byte each, or two if the rows have."""
        import numpy as np

        header = [*self.rows.shape, self.start, *(number for restart in self.restarts for number in restart)]
        numbers = np.array([len(header), *header], "<i4")
        rows = np.ascontiguousarray(self.rows, f"<u{self.rows.itemsize}")
        return b"".join((numbers.data, rows.data))  # one copy: it may have many megabytes

    @staticmethod
    def decode(data: bytes, *, plain: bool) -> ExpertRouting:
        """Decode what `encode` serialized; with `plain`, rows are a memoryview, `[positions, bytes]`.

        Raises:
            ValueError: the bytes are not a routing.
        """
        size = int.from_bytes(data[:4], "little")
        header = _decode_column(data[4 : 4 + 4 * size], "<i4", plain=True).tolist()
        if len(header) != size or size < 4 or size % 2 or min(header) < 0:
            raise ValueError("the header of its expert routing is damaged")
        content, width = data[4 + 4 * size :], header[1] * header[2]
        itemsize = 2 if len(content) == 2 * header[0] * width else 1
        if len(content) != itemsize * header[0] * width or not width:
            raise ValueError("its expert routing has another shape than its header says")
        rows: Any
        if plain:
            rows = memoryview(content).cast("B", (header[0], itemsize * width)) if content else []
        else:
            rows = _decode_column(content, f"<u{itemsize}", plain=False).reshape(header[:3])
        restarts = tuple(ExpertRoutingRestart(*pair) for pair in zip(header[4::2], header[5::2], strict=True))
        if any(row >= stop for (row, _), (stop, _) in pairwise([(0, 0), *restarts, (len(rows), 0)])):
            raise ValueError("the restarts of its expert routing are not in order")
        return ExpertRouting(rows, header[3], restarts)


class RoutingReference(msgspec.Struct, frozen=True, array_like=True):
    """The name of a turn's encoded `ExpertRouting`, which is stored beside the journal (`journal.routing`)."""

    digest: bytes
    """SHA-256 of the content."""
    folder: str
    """Name of the attempt's directory."""
    host: str = ""
    """Address of the node that has it; "" for the run's host."""


class RecordedRouting(NamedTuple):
    """The routing of a turn of a row, not yet read."""

    turn: int
    end: int
    """Length of the row after the turn, which its routing does not exceed."""
    reference: RoutingReference


class Tokens(msgspec.Struct, frozen=True, kw_only=True, gc=False, eq=False):
    """Consecutive tokens with their columns, [n] each; a column that is None is unknown."""

    token_ids: Int32Array
    logprobs: Float32Array
    """Log-probabilities under the weights that sampled the tokens, natural, 0 for context."""
    spans: tuple[VersionSpan, ...] = ()
    """Versions that sampled the tokens."""
    kept: KeptSets | None = None
    experts: ExpertRouting | None = None
    """Experts at positions of the whole context; of a `TrainingSample`, at all positions before its trained tokens."""
    turn_index: Int32Array | None = None
    """Number of the agent's turn that sampled the token; -1: context."""
    loss_mask: BoolArray | None = None
    """Whether the policy sampled the token; of a `TrainingSample`, whether it is trained."""
    advantages: Float32Array | None = None
    """Advantages, 0 where `loss_mask` is False."""
    values: Float32Array | None = None
    """Of a reward model, which samples nothing: its score of the context up to each of the context's tokens."""
    temperatures: Float64Array | None = None
    """Divisor of the logits from which each token was sampled; None: 1 for all. Calls of one row may differ."""

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        for name, column in self._columns():
            if len(column) != count:
                raise ValueError(f"{count} tokens but {len(column)} {name}")
        if self.kept is not None and len(self.kept.counts) != count:
            raise ValueError(f"{count} tokens but {len(self.kept.counts)} kept sets")
        at = 0
        for start, stop, _ in self.spans:
            if not at <= start < stop <= count:
                raise ValueError(f"version span {start} to {stop} does not follow the one before within {count} tokens")
            at = stop

    def __len__(self) -> int:
        return len(self.token_ids)

    def with_column(self: TokensT, name: str, values: object) -> TokensT:
        """Return the table with another column."""
        return msgspec.structs.replace(self, **{name: values})

    @staticmethod
    def context(token_ids: Int32Array) -> Tokens:
        """Make a table of tokens that nothing sampled."""
        zeros = _decode_column(bytes(4 * len(token_ids)), "<f4", plain=isinstance(token_ids, array))
        return Tokens(token_ids=token_ids, logprobs=zeros)

    @staticmethod
    def of_version(token_ids: Int32Array, version: PolicyVersion) -> Tokens:
        """Make a table of tokens that a version took part in, but did not sample: their logprobs are 0."""
        spans = (VersionSpan(0, len(token_ids), version),) if len(token_ids) else ()
        return Tokens.context(token_ids).with_column("spans", spans)

    @staticmethod
    def join(parts: Sequence[Tokens]) -> Tokens:
        """Join consecutive tables, at least one; adjacent spans of one version become one.

        Raises:
            ValueError: the parts hold the experts of different layers.
        """
        import numpy as np

        if len(parts) == 1:
            return parts[0]
        columns: dict[str, Any] = {}
        for name, dtype, fill, *_ in COLUMNS:
            values = [getattr(part, name) for part in parts]
            if fill is not None and any(column is not None for column in values):
                columns[name] = np.concatenate(
                    [
                        np.full(len(part), fill, dtype) if column is None else column
                        for part, column in zip(parts, values, strict=True)
                    ]
                )
        spans: list[VersionSpan] = []
        at = 0
        for part in parts:
            for start, stop, version in part.spans:
                begin = at + start
                if spans and spans[-1].stop == begin and spans[-1].version == version:
                    begin = spans.pop().start
                spans.append(VersionSpan(begin, at + stop, version))
            at += len(part)
        return Tokens(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            spans=tuple(spans),
            kept=KeptSets.join(parts),
            experts=ExpertRouting.join(parts),
            **columns,
        )

    def lost(self: TokensT, *, masked: bool) -> TokensT:
        """Return the tokens as those of a call that never returned: with `masked`, their kept sets are lost with it."""
        return self.with_column("kept", KeptSets.missing(len(self))) if masked else self

    def fits(self, length: int) -> bool:
        """Whether a row of `length` has all positions whose experts are known."""
        return self.experts is None or self.experts.end <= length

    def slice(self, start: int, stop: int) -> Tokens:
        """Return tokens `[start, stop)`, without routing: that belongs to a whole call."""
        spans = ((max(span.start, start) - start, min(span.stop, stop) - start, span.version) for span in self.spans)
        return Tokens(
            token_ids=self.token_ids[start:stop],
            spans=tuple(VersionSpan(*span) for span in spans if span[0] < span[1]),
            kept=None if self.kept is None else self.kept.slice(start, stop),
            **{name: column[start:stop] for name, column in self._columns()},
        )

    def take(self, at: NDArray[Any]) -> Tokens:
        """Return the tokens at ascending positions, without versions and routing."""
        return Tokens(
            token_ids=self.token_ids[at],
            kept=None if self.kept is None else self.kept.take(at),
            **{name: column[at] for name, column in self._columns()},
        )

    def _columns(self) -> list[tuple[str, Any]]:
        """Return the columns that parts of the table have."""
        columns = zip(_PER_TOKEN, _values_per_token(self), strict=True)
        return [(name, column) for name, column in columns if column is not None]

    def encode(self) -> EncodedTokens:
        """Serialize the table for another process or the journal."""
        columns = {
            column.name: values.astype(column.dtype, copy=False).tobytes()
            for column, values in zip(COLUMNS, _values_of_columns(self), strict=True)
            if values is not None
        }
        if self.kept is not None:
            columns["kept"] = self.kept.encode()
        if self.experts is not None:
            columns["experts"] = self.experts.encode()
        return EncodedTokens(self.token_ids.astype("<i4", copy=False).tobytes(), self.spans, columns)


class EncodedTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A table of tokens as bytes."""

    token_ids: bytes  # <i4
    spans: tuple[VersionSpan, ...]
    columns: dict[str, bytes]
    """Column by name; only those that are known."""

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    def decode(self, *, plain: bool = False) -> Tokens:
        """Decode the table; unless they are `plain`, its columns share memory with the bytes.

        Raises:
            ValueError: lengths, types or ranges are not those of a table.
        """
        token_ids, columns = decode_token_ids(self.token_ids, plain=plain), dict(self.columns)
        count = len(token_ids)
        decoded: dict[str, Any] = {}
        for name, dtype, fill, *_ in COLUMNS:
            if name in columns:
                decoded[name] = column = _decode_column(columns.pop(name), dtype, plain=plain)
                if fill is not None and len(column) != count:
                    raise ValueError(f"{count} tokens but {len(column)} {name}")
        if "logprobs" not in decoded:
            raise ValueError("its tokens have no logprobs")
        if "kept" in columns:
            decoded["kept"] = KeptSets.decode(columns.pop("kept"), count, plain=plain)
        if "experts" in columns:
            decoded["experts"] = ExpertRouting.decode(columns.pop("experts"), plain=plain)
        if columns:
            raise ValueError(f"unknown columns {', '.join(sorted(columns))[:100]}")
        return Tokens(token_ids=token_ids, spans=_shared(self.spans), **decoded)


def decode_token_ids(data: bytes, *, plain: bool = False) -> Int32Array:
    """Decode token ids.

    Raises:
        ValueError: the bytes are not whole ids, or one is negative.
    """
    token_ids: Int32Array = _decode_column(data, "<i4", plain=plain)
    if _least(token_ids) < 0:
        raise ValueError("a token id is negative")
    return token_ids


def _decode_column(data: bytes, dtype: str, *, plain: bool) -> Any:
    if not plain:
        import numpy as np

        return np.frombuffer(data, dtype)
    column: array[Any] = array({"<i4": "i", "<f4": "f", "<f8": "d", "|b1": "b"}[dtype])
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _least(column: Any) -> int:
    """Return the least number of a column; 0 of an empty one."""
    if isinstance(column, array):
        return min(column, default=0)
    return int(column.min()) if len(column) else 0


@lru_cache(maxsize=4096)
def _shared(spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Return equal spans, shared: most turns have one span, with few different lengths and versions."""
    return spans


class Completion(Tokens, frozen=True, kw_only=True, gc=False, eq=False):
    """The engine's reply to one call: the sampled tokens, with the version that sampled each."""

    finish_reason: FinishReason
    cached_tokens: int = 0
    """Number of context tokens served from the session's KV cache."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (covered := sum([stop - start for start, stop, _ in self.spans])) != len(self.token_ids):
            raise ValueError(f"version spans cover {covered} of {len(self.token_ids)} tokens")

    @staticmethod
    def of(tokens: Tokens, finish_reason: FinishReason, cached_tokens: int = 0) -> Completion:
        """Make a completion of tokens."""
        columns = {name: getattr(tokens, name) for name in Tokens.__struct_fields__}
        return Completion(**columns, finish_reason=finish_reason, cached_tokens=cached_tokens)


class TrajectoryRow(Tokens, frozen=True, kw_only=True, gc=False, eq=False):
    """One token sequence of a trajectory, with `turn_index` and `loss_mask`. An agent has one row, and one more for
    each rewrite of its context.
    """

    turn_index: Int32Array
    loss_mask: BoolArray
    recorded_routing: tuple[RecordedRouting, ...] = ()
    """Routing of its turns that was not read yet; `experts` is then unknown."""
    lost_routing: int = 0
    """Number of turns whose recorded routing could not be read."""

    def trainable(self) -> Iterator[TrajectoryRow]:
        """Yield the row once for each routing of its tokens, with its `experts` at all positions before them, and a
        `loss_mask` of the tokens that were sampled under it and whose kept sets are not missing."""
        import numpy as np

        loss_mask = self.loss_mask
        if self.kept is not None:
            loss_mask = loss_mask & (self.kept.counts != KeptCount.MISSING)
        spans = [] if self.experts is None else list(self.experts.spans(len(self)))
        for start, stop, experts in spans:
            here = np.arange(len(self))
            mask = loss_mask if len(spans) == 1 else loss_mask & (start <= here) & (here < stop)
            lost = self.lost_routing if stop == len(self) else 0  # counted once
            yield msgspec.structs.replace(self, loss_mask=mask, experts=ExpertRouting(experts), lost_routing=lost)
        if not spans:
            yield self.with_column("loss_mask", loss_mask)


class TrainingSample(Tokens, frozen=True, kw_only=True, gc=False, eq=False):
    """One row of training data."""

    loss_mask: BoolArray
    advantages: Float32Array
    episode_id: str = ""
    row_index: int = 0
    seat: str = ""
    agent: int = 0
    """Number of the agent within its seat."""
    lost_routing: int = 0
    """Number of turns of the row whose recorded routing could not be read; 0 in all but one sample of a row."""
