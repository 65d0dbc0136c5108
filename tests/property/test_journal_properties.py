"""Entries come back as they were encoded, and one flipped bit never passes for an entry."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.records import PolicyVersion, VersionSpan
from agentrl.core.tokens import EncodedTokens
from agentrl.journal.entries import (
    ChildResultEntry,
    EntryBody,
    JournalEntry,
    RewardEntry,
    ToolEntry,
    TurnEntry,
    encode_body,
    entry_checksum,
)

pytestmark = pytest.mark.property

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
number = st.floats(allow_nan=False)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
versions = st.builds(PolicyVersion, text, st.integers(0, 2**31), st.integers(0, 2**31))
spans = st.lists(st.builds(VersionSpan, st.integers(0, 2**31), st.integers(0, 2**31), versions), max_size=3).map(tuple)
tokens = st.builds(
    EncodedTokens,
    token_ids=st.binary(max_size=64),
    spans=spans,
    columns=st.dictionaries(text, st.binary(max_size=64), max_size=3),
)
turns = st.builds(
    TurnEntry,
    seat=text,
    index=st.integers(0, 9),
    policy=text,
    row=st.integers(0, 9),
    turn=st.integers(0, 99),
    context_ids=st.binary(max_size=64),
    tokens=tokens,
    finish_reason=text,
    text=text,
    messages=st.lists(st.dictionaries(text, json_value, max_size=2), max_size=2).map(tuple),
    temperature=number,
    seconds=number,
    started=number,
    drift=st.none() | text,
)
bodies: st.SearchStrategy[EntryBody] = st.one_of(
    turns,
    st.builds(ToolEntry, text, json_value, text, text, st.booleans(), number),
    st.builds(ChildResultEntry, text, st.none() | text, st.dictionaries(text, number, max_size=3)),
    st.builds(RewardEntry, text, st.integers(0, 9), number, st.none() | st.integers(0, 99)),
)


@given(bodies)
def test_decode_undoes_encode(body: EntryBody) -> None:
    assert JournalEntry("e", 0, "r#0", b"", encode_body(body)).decode() == body


@settings(max_examples=300)
@given(
    text, st.integers(0, 9), text, st.sampled_from([b"", b"12345678"]), st.binary(min_size=1, max_size=200), st.data()
)
def test_a_flipped_bit_changes_the_checksum(
    episode: str, attempt: int, call: str, asked: bytes, body: bytes, data: st.DataObject
) -> None:
    bit = data.draw(st.integers(0, 8 * len(body) - 1))
    flipped = bytearray(body)
    flipped[bit // 8] ^= 1 << (bit % 8)
    assert entry_checksum(episode, attempt, call, asked, body) != entry_checksum(
        episode, attempt, call, asked, bytes(flipped)
    )


@given(text, text)
def test_a_checksum_belongs_to_its_episode_and_call(one: str, other: str) -> None:
    first, second = entry_checksum(one, 0, other, b"", b"body"), entry_checksum(other, 0, one, b"", b"body")
    assert (first == second) == (one == other)
