"""Checksums against torn and rotten bytes: not against an attacker, who can recompute them.

A checksum covers the key as well as the content, so that a whole, valid entry found under another episode, attempt or
call id is an error too.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agentrl.journal.entries import JournalEntry

_ENCODER = msgspec.msgpack.Encoder()


def entry_checksum(episode_id: str, attempt: int, call_id: str, asked: bytes, body: bytes) -> int:
    """CRC-32 over an entry's key, its `asked` hash and its body."""
    key = f"{episode_id}\x1f{attempt}\x1f{call_id}\x1f{len(asked)}".encode()
    return zlib.crc32(body, zlib.crc32(asked, zlib.crc32(key)))


def row_checksum(table: str, values: Sequence[Any]) -> int:
    """CRC-32 over a control row: its table and all its other columns."""
    return zlib.crc32(_ENCODER.encode(values), zlib.crc32(table.encode()))


def code_digest(source: str) -> str:
    """8-byte blake2b over source code, in hexadecimal."""
    return hashlib.blake2b(source.encode("utf-8", "replace"), digest_size=8).hexdigest()


class EpisodeDigest:
    """16-byte blake2b over call id and body of an attempt's entries, in the order they were appended."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, entry: JournalEntry) -> None:
        """Take in the next entry."""
        self._hash.update(entry.call_id.encode() + entry.body)

    @property
    def value(self) -> bytes:
        """Of the entries so far: what a commit names."""
        return self._hash.digest()


def episode_digest(entries: Iterable[JournalEntry]) -> bytes:
    """The `EpisodeDigest` of all entries of an attempt."""
    digest = EpisodeDigest()
    for entry in entries:
        digest.add(entry)
    return digest.value
