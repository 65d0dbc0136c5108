"""A turn partition in memory; `MemoryJournal` has one for each worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.core.errors import JournalError, StorageError
from agentrl.journal.forks import prefix_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from agentrl.core.records import ForkPoint
    from agentrl.journal.entries import JournalEntry

    PartialItem = JournalEntry | tuple[str, int, str | None]
    """A partial, or the key of those to remove: episode, attempt and call, or all calls."""


@dataclass(slots=True)
class MemoryTurnLog:
    """One worker's partition.

    Example:
        >>> from agentrl.testing import MemoryJournal
        >>> log = MemoryJournal().turn_log("worker-0")
        >>> log.name, log.read("e0", 0)
        ('turns-worker-0.db', [])
    """

    name: str
    entries: list[JournalEntry] = field(default_factory=list)
    """Everything appended, in order."""
    on_disk: int = 0
    """How many of them would survive a crash."""
    failing_flushes: Collection[int] = ()
    """Which calls of `flush`, counted from 1, raise `StorageError`."""
    flushes: int = 0
    partials: list[PartialItem] = field(default_factory=list)
    """Every partial appended, and the key of every removal, in order."""
    partials_on_disk: int = 0
    """How many of those would survive a crash."""
    siblings: Mapping[str, MemoryTurnLog] = field(default_factory=dict)
    """The partitions of its journal, itself among them."""
    _keys: set[tuple[str, int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._keys = {(entry.episode_id, entry.attempt, entry.call_id) for entry in self.entries}

    def append(self, entry: JournalEntry) -> None:
        """Queue an entry.

        Raises:
            JournalError: a call of an attempt was journaled before.
        """
        key = (entry.episode_id, entry.attempt, entry.call_id)
        if key in self._keys:
            raise JournalError(f"episode {key[0]} attempt {key[1]}: call {key[2]} is journaled twice")
        self._keys.add(key)
        self.entries.append(entry)

    async def flush(self) -> None:
        """Yield, then put everything appended before the call on disk.

        Raises:
            StorageError: the test asked for it; nothing appended since the last success counts as written.
        """
        self.flushes += 1
        number, reached, partials = self.flushes, len(self.entries), len(self.partials)
        await asyncio.sleep(0)
        if number in self.failing_flushes:
            raise StorageError(f"no space left on the simulated disk (flush {number} of {self.name})")
        self.on_disk = max(self.on_disk, reached)
        self.partials_on_disk = max(self.partials_on_disk, partials)

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Entries on disk of an episode, in the order they were appended."""
        return [e for e in self.entries[: self.on_disk] if e.episode_id == episode_id and e.attempt == attempt]

    async def take_over(self, episode_id: str, attempt: int) -> None:
        """Copy what another partition holds of an attempt, where that is more than is here."""
        other = fullest(self.siblings, episode_id, attempt)
        if other is None or other is self:
            return
        for entry in other.read(episode_id, attempt)[len(self.read(episode_id, attempt)) :]:
            self.append(entry)
        self.remove_partials(episode_id, attempt)
        for partial in other.read_partials(episode_id, attempt):
            self.append_partial(partial)
        await self.flush()

    def append_partial(self, entry: JournalEntry) -> None:
        """Queue tokens of a turn that has not ended."""
        self.partials.append(entry)

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        """Queue the removal of a call's partials, or of all of an attempt."""
        self.partials.append((episode_id, attempt, call_id))

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Partials on disk of an episode, in the order they were appended."""
        found: list[JournalEntry] = []
        for item in self.partials[: self.partials_on_disk]:
            if not isinstance(item, tuple):
                if (item.episode_id, item.attempt) == (episode_id, attempt):
                    found.append(item)
            elif item[:2] == (episode_id, attempt):
                found = [entry for entry in found if item[2] not in (None, entry.call_id)]
        return found

    def remove(self, attempts: Collection[tuple[str, int]]) -> None:
        """Give up what is on disk of some attempts."""
        kept = [e for e in self.entries[: self.on_disk] if (e.episode_id, e.attempt) not in attempts]
        self.entries[: self.on_disk] = kept
        self.on_disk = len(kept)

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        """The entries before a fork point of this partition."""
        return prefix_of(".", point, lambda _, at: self.read(at.episode_id, at.attempt))


def fullest(logs: Mapping[str, MemoryTurnLog], episode_id: str, attempt: int) -> MemoryTurnLog | None:
    """The partition that holds most of an attempt; see `TurnReader.partition_of`."""

    def held(log: MemoryTurnLog) -> tuple[int, int]:
        return len(log.read(episode_id, attempt)), len(log.read_partials(episode_id, attempt))

    best = max(logs.values(), key=held, default=None)
    return best if best is not None and any(held(best)) else None
