"""The laws of the table of tokens: parts joined are the whole, and what is decoded is what was encoded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.records import PolicyVersion, VersionSpan
from agentrl.core.tokens import (
    COLUMNS,
    Completion,
    EncodedTokens,
    ExpertRouting,
    KeptCount,
    KeptSets,
    Tokens,
)

pytestmark = pytest.mark.property

VERSIONS = [PolicyVersion("solver", 0, 1), PolicyVersion("solver", 1, 1), PolicyVersion("past", 0, 1)]
KINDS = {column.name: np.dtype(column.dtype) for column in COLUMNS if column.fill is not None}
"""Columns that joined and sliced tables keep, and their types."""


@st.composite
def routings(draw: st.DrawFn) -> ExpertRouting | None:
    kind = draw(st.sampled_from([np.uint8, np.uint16]))
    starts = draw(st.lists(st.integers(0, 9), max_size=3))
    lengths = [draw(st.integers(1, 4)) for _ in starts]
    stretches = [
        (start, np.full((length, 2, 1), np.iinfo(kind).max - at, kind))
        for at, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    return ExpertRouting.of_stretches(stretches)


@st.composite
def tables(draw: st.DrawFn, *, with_routing: bool = False) -> Tokens:
    """Tables of up to eight tokens, some columns unknown."""
    count = draw(st.integers(0, 8))

    def numbers(kind: Any) -> Any:
        return np.array([draw(st.integers(0, 99)) for _ in range(count)]).astype(kind)

    edges = sorted(draw(st.sets(st.integers(0, count), max_size=4)))
    spans = tuple(
        VersionSpan(start, stop, draw(st.sampled_from(VERSIONS)))
        for start, stop in pairwise(edges)
        if draw(st.booleans())
    )
    columns = {name: numbers(kind) for name, kind in KINDS.items() if name == "logprobs" or draw(st.booleans())}
    kept = None
    if draw(st.booleans()):
        counts = np.array([draw(st.integers(-4, 3)) for _ in range(count)], np.int32)
        kept = KeptSets(counts, np.arange(sum(map(_size, counts.tolist())), dtype=np.int32))
    experts = draw(routings()) if with_routing else None
    return Tokens(token_ids=numbers(np.int32), spans=spans, kept=kept, experts=experts, **columns)


def _size(count: int) -> int:
    """Number of ids of a count of kept sets, as docs/reference/journal_format.md defines it."""
    return count if count >= 0 else -1 - count


def content(table: Tokens) -> dict[str, Any]:
    """All columns as lists, and the version of each token."""
    found: dict[str, Any] = {"token_ids": table.token_ids.tolist()}
    for column in COLUMNS:
        values = getattr(table, column.name)
        found[column.name] = None if values is None else (values.dtype.str, values.tolist())
    kept, experts = table.kept, table.experts
    found["kept"] = None if kept is None else (kept.counts.tolist(), kept.ids.tolist())
    found["experts"] = None if experts is None else (experts.rows.tolist(), experts.start, experts.restarts)
    found["versions"] = [
        next((version for start, stop, version in table.spans if start <= at < stop), None) for at in range(len(table))
    ]
    return found


@given(tables(), st.data())
def test_slices_joined_are_the_whole(table: Tokens, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(table)))
    assert content(Tokens.join([table.slice(0, cut), table.slice(cut, len(table))])) == content(table)


@given(tables(), st.data())
def test_a_slice_takes_the_same_tokens_and_keeps_their_versions(table: Tokens, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(table)))
    stop = data.draw(st.integers(start, len(table)))
    part = content(table.slice(start, stop))
    assert part.pop("versions") == content(table)["versions"][start:stop]
    taken = content(table.take(np.arange(start, stop)))
    del taken["versions"]
    assert part == taken


@given(st.lists(tables(with_routing=True), min_size=3, max_size=3))
def test_joining_is_associative_and_fills_what_a_part_lacks(parts: list[Tokens]) -> None:
    first, second, third = parts
    whole = Tokens.join(parts)
    assert content(Tokens.join([Tokens.join([first, second]), third])) == content(whole)
    assert content(Tokens.join([first, Tokens.join([second, third])])) == content(whole)
    for column in COLUMNS:
        values, lacking = getattr(whole, column.name), [getattr(part, column.name) is None for part in parts]
        assert (values is None) == all(lacking)
        if values is not None and lacking[0]:
            assert set(values[: len(first)].tolist()) <= {column.fill}
    if whole.kept is not None and first.kept is None:
        assert set(whole.kept.counts[: len(first)].tolist()) <= {KeptCount.NONE}


@given(tables(with_routing=True))
def test_decode_undoes_encode_and_the_bytes_pass_the_wire(table: Tokens) -> None:
    wire = msgspec.msgpack.encode(table.encode())
    assert content(msgspec.msgpack.decode(wire, type=EncodedTokens).decode()) == content(table)


@given(
    st.binary(max_size=24),
    st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6)), max_size=2),
    st.dictionaries(
        st.sampled_from(["logprobs", "kept", "experts", "loss_mask", "values", "taste"]), st.binary(max_size=40)
    ),
)
def test_any_bytes_are_a_valid_table_or_a_value_error(
    token_ids: bytes, spans: list[tuple[int, int]], columns: dict[str, bytes]
) -> None:
    encoded = EncodedTokens(token_ids, tuple(VersionSpan(*span, VERSIONS[0]) for span in spans), columns)
    try:
        table = encoded.decode()
    except ValueError:
        return
    count = len(token_ids) // 4
    assert len(table) == len(table.logprobs) == count
    assert all(token >= 0 for token in table.token_ids)
    assert all(0 <= start < stop <= count for start, stop, _ in table.spans)
    if table.kept is not None:
        assert sum(map(_size, table.kept.counts.tolist())) == len(table.kept.ids)
    if table.experts is not None:
        assert sum(len(rows) for _, rows in table.experts.stretches()) == len(table.experts.rows)
    assert table.encode() == encoded


def test_a_table_whose_columns_differ_in_length_is_refused() -> None:
    ids = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        Tokens(token_ids=ids, logprobs=np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="2 tokens but 1 kept"):
        Tokens(token_ids=ids, logprobs=np.zeros(2, np.float32), kept=KeptSets.missing(1))
    span = VersionSpan(0, 1, VERSIONS[0])
    with pytest.raises(ValueError, match="cover 1 of 2"):
        Completion(token_ids=ids, logprobs=np.zeros(2, np.float32), spans=(span,), finish_reason="stop")
    with pytest.raises(ValueError, match="does not follow the one before"):
        Tokens(token_ids=ids, logprobs=np.zeros(2, np.float32), spans=(span, span))
