"""The recorded prefix of a fork, read where it was written: nothing of an episode is copied into its forks.

A fork of a fork refers to its parent's own entries, which refer to theirs. A reference names the parent's journal
directory relative to its own, so that directories may be moved together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import JournalError
from agentrl.journal.entries import Begin
from agentrl.journal.reader import TurnReader
from agentrl.journal.rows import decode_entries

if TYPE_CHECKING:
    from agentrl.core.records import ForkPoint
    from agentrl.journal.entries import JournalEntry

ReadAttempt = Callable[[str, "ForkPoint"], "list[JournalEntry]"]
"""Own entries of the attempt a point names, in a journal directory."""

MAX_FORK_DEPTH = 64
"""Forks of forks, at most; more means that references go round in a circle."""


def prefix_of(journal: str, point: ForkPoint, read: ReadAttempt, *, depth: int = 0) -> list[JournalEntry]:
    """The entries before a fork point in order, each ancestor's `begin` among them.

    Args:
        journal: directory the point's own is relative to.
        point: where the prefix ends.
        read: reads an attempt.
        depth: how many references led here.

    Raises:
        JournalError: the parent's entries cannot be read, or the point is not among them.
    """
    where = os.path.normpath(os.path.join(journal, point.journal))
    name = f"episode {point.episode_id}, attempt {point.attempt}, in {where}"
    entries = read(where, point)
    if not entries or depth == MAX_FORK_DEPTH:
        raise JournalError(f"a fork refers to {name}, which cannot be found; was the run moved without its forks?")
    begin = decode_entries(entries[:1])[0]
    calls = [entry.call_id for entry in entries]
    if not isinstance(begin, Begin) or point.call_id not in calls:
        raise JournalError(f"a fork refers to call {point.call_id} of {name}, which is not there")
    own = entries[: calls.index(point.call_id)]
    return own if begin.fork is None else [*prefix_of(where, begin.fork, read, depth=depth + 1), *own]


def read_prefix(journal: str | Path, point: ForkPoint) -> list[JournalEntry]:
    """`prefix_of` from the databases on disk; `journal` is the directory the fork itself lies in."""

    def read(where: str, at: ForkPoint) -> list[JournalEntry]:
        reader = TurnReader(where)
        try:
            entries = reader.read(at.partition, at.episode_id, at.attempt)
            if not entries:
                reader.check_pruned(at.episode_id, at.attempt)
            return entries
        finally:
            reader.close()

    return prefix_of(str(journal), point, read)


def edits_of(point: ForkPoint | None) -> dict[str, Sequence[Mapping[str, Any]]]:
    """What a fork's policy is told at its fork point, by call id, where that was edited."""
    return {} if point is None or not point.messages else {point.call_id: point.messages}
