"""What the journal of an attempt holds already: each recorded call until it has come back, and whose randomness it has.

Owns: the entries, their bodies, what a fork took over and what is said in it instead. Does not know in which order
calls come back (`branches.ReplayOrder`), nor what is compared with them (`calls.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentrl.core import ids
from agentrl.journal.entries import Begin
from agentrl.journal.forks import edits_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from agentrl.journal.entries import EntryBody, JournalEntry
    from agentrl.rollout.branches import StreamKey

BEGIN = "begin"
"""Call id of the first entry."""
_NONE: dict[Any, Any] = {}
"""What of most episodes is not there; only what is there is ever changed."""


class RecordedCalls:
    """The recorded calls of an attempt, by id.

    Args:
        episode_id: of the episode.
        key: seed and attempt of the episode, with which new calls are made.
        own: the attempt's entries on disk.
        inherited: of a fork: the entries before the fork point, each ancestor's own `begin` among them.
        edits: of a fork: what the policy is told at a call instead of what the code says there.
        answers: recorded calls to be remembered whenever they are asked for, in no order.
    """

    __slots__ = ("_answers", "_decoded", "_edits", "_entries", "_keys", "forked_from", "is_empty", "key")

    def __init__(
        self,
        episode_id: str,
        key: StreamKey,
        own: Iterable[JournalEntry],
        inherited: Iterable[JournalEntry],
        edits: Mapping[str, Sequence[Mapping[str, Any]]],
        answers: Iterable[JournalEntry],
    ) -> None:
        self.key = key
        keys: dict[str, StreamKey] = {}
        entries: dict[str, JournalEntry] = {}
        edits = dict(edits)
        self._decoded: tuple[JournalEntry, EntryBody] | None = None
        self.forked_from: Begin | None = None
        """The beginning of what the episode was forked from."""
        for entry in inherited:
            if entry.call_id == BEGIN:
                begin = entry.decode()
                assert isinstance(begin, Begin)
                keys[entry.episode_id] = (begin.seed, entry.attempt)
                edits |= edits_of(begin.fork)
                self.forked_from = begin
            else:
                entries[entry.call_id] = entry
        for entry in own:
            entries[entry.call_id] = entry
        self._keys: Mapping[str, StreamKey] = keys or _NONE
        """Of the ancestors of a fork."""
        self._edits: Mapping[str, Sequence[Mapping[str, Any]]] = edits or _NONE
        self._entries = entries or _NONE
        self._answers = {entry.call_id: entry for entry in answers} or _NONE
        self.is_empty = not (self._entries or self._answers)
        """Nothing was recorded before: every call is new."""

    def numbered(self) -> Iterator[str]:
        """Ids of the calls that come back in order, in the order they were appended."""
        return filter(ids.is_numbered, self._entries)

    def get(self, call_id: str) -> JournalEntry | None:
        """The entry of a call that has not come back yet; answers left out."""
        return self._entries.get(call_id)

    def answer(self, call_id: str) -> JournalEntry | None:
        """What the outside world answered to a call."""
        return self._answers.get(call_id)

    def key_of(self, entry: JournalEntry | None) -> StreamKey:
        """Seed and attempt with which a call was made; those of the episode where it is new."""
        return self.key if entry is None else self._keys.get(entry.episode_id, self.key)

    def body(self, entry: JournalEntry) -> EntryBody:
        """The body of an entry, decoded once by whoever looks ahead and then makes the call."""
        if self._decoded is None or self._decoded[0] is not entry:
            self._decoded = (entry, entry.decode())
        return self._decoded[1]

    @property
    def has_edits(self) -> bool:
        """Whether anything is said instead at any call."""
        return bool(self._edits)

    def told_instead(self, call_id: str) -> Sequence[Mapping[str, Any]]:
        """What the policy is told at a call instead; mostly nothing."""
        return self._edits.get(call_id, ())

    def take(self, call_id: str) -> bool:
        """A call has come back; whether it was recorded."""
        self._decoded = None
        return self._entries.pop(call_id, None) is not None

    def take_answer(self, call_id: str) -> JournalEntry | None:
        """An answer was given."""
        return self._answers.pop(call_id, None)
