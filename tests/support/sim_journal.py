"""A journal in memory that commits as the real one does, on a disk that crashes.

Owns: the rounds of group commit. A round takes all that is queued and commits every turn partition, then the control
log: one transaction each, one operation of the disk each. A queued row waits at most `flush_seconds` for a round, a
waiter `LINGER_SECONDS`. After a refused transaction nothing more is written, and every wait raises.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import JournalError, StorageError
from agentrl.core.ids import random_stream
from agentrl.journal.memory import MemoryJournal, MemoryTurnLog
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.store import FLUSH_SECONDS, LINGER_SECONDS
from tests.support.sim_disk import SimDisk

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.memory import PartialItem
    from agentrl.journal.port import ControlRecord
    from tests.support.sim_disk import Fate

_CONTROL = "control.db"


class SimTurnLog(MemoryTurnLog):
    """One worker's partition of a `SimJournal`."""

    journal: SimJournal

    def append(self, entry: JournalEntry) -> None:
        """Queue an entry."""
        super().append(entry)
        self.journal.round_within(self.journal.flush_seconds)

    def append_partial(self, entry: JournalEntry) -> None:
        """Queue tokens of a turn that has not ended."""
        super().append_partial(entry)
        self.journal.round_within(self.journal.flush_seconds)

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        """Queue the removal of a call's partials, or of all of an attempt."""
        super().remove_partials(episode_id, attempt, call_id)
        self.journal.round_within(self.journal.flush_seconds)

    async def flush(self) -> None:
        """Wait until everything appended before the call is on disk."""
        await self.journal.flush()


class SimJournal(MemoryJournal):
    """See `MemoryJournal`, and the module.

    Args:
        disk: counts the transactions, and crashes.
        flush_seconds: how long a queued row waits for a round where nobody waits for it.

    Example:
        >>> journal = SimJournal(SimDisk())
        >>> journal.after_crash("lost", SimDisk()).highest_lineage()
        -1
    """

    turn_log_type: type[SimTurnLog] = SimTurnLog

    def __init__(self, disk: SimDisk, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        super().__init__()
        self.flush_seconds = flush_seconds
        self.acknowledged: list[tuple[str, int]] = []
        """Episode and attempt of every commit that was reported as being on disk, in order."""
        self._disk = disk
        self._waiters: list[asyncio.Future[None]] = []
        self._round: asyncio.TimerHandle | None = None
        self._landing: str | None = None
        self._failure: str | None = None
        self._removing: tuple[str, Collection[tuple[str, int]]] | None = None
        """The transaction of a pruning that is under way."""

    def turn_log(self, worker: str) -> SimTurnLog:
        """The partition of a worker; created if missing."""
        log = self.turn_logs.get(worker)
        if log is None:
            log = self.turn_logs[worker] = self._turn_log(f"turns-{worker}.db")
        assert isinstance(log, SimTurnLog)
        return log

    async def commit(self, end: EpisodeEnd) -> None:
        key = (end.spec.episode_id, end.spec.attempt)
        if key in self._ended_attempts:
            raise JournalError(f"episode {key[0]} attempt {key[1]} ended twice")
        self._ended_attempts.add(key)
        self.record(end)
        await self.flush()
        self.acknowledged.append(key)

    async def flush(self) -> None:
        """Wait until everything recorded before the call is on disk.

        Raises:
            StorageError: the disk refused, now or before.
        """
        if self._failure is not None:
            raise StorageError(self._failure)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self.round_within(LINGER_SECONDS)
        await future

    def _remove(self, log: MemoryTurnLog, attempts: Collection[tuple[str, int]]) -> None:
        self._removing = (log.name, attempts)
        try:
            self._disk.operate(f"prune {log.name}")
        except OSError as error:
            raise StorageError(
                f"{log.name}: could not be pruned ({error.strerror}); free space, then resume"
            ) from error
        super()._remove(log, attempts)
        self._removing = None

    async def close(self) -> None:
        """Flush; later records are refused. Idempotent."""
        await self.flush()
        self.closed = True

    def round_within(self, seconds: float) -> None:
        """Something is queued: commit it within `seconds`."""
        loop = asyncio.get_running_loop()
        if self._round is not None:
            if self._round.when() <= loop.time() + seconds:
                return
            self._round.cancel()
        self._round = loop.call_later(seconds, self._commit_all)

    def after_crash(self, fate: Fate = "kill", disk: SimDisk | None = None, *, seed: int = 0) -> SimJournal:
        """The journal another process opens, on the disk it finds; `seed` draws whether a transaction landed."""
        survivor = type(self)(disk or SimDisk(), flush_seconds=self.flush_seconds)
        may_land = fate != "kill" and random_stream("landed", seed).random() < 0.5
        lands = self._landing if may_land else None
        survivor.records = self.records[: None if lands == _CONTROL else self._on_disk]
        survivor._on_disk = len(survivor.records)
        ends = (record for record in survivor.records if isinstance(record, EpisodeEnd))
        survivor._ended_attempts = {(end.spec.episode_id, end.spec.attempt) for end in ends}
        for worker, log in self.turn_logs.items():
            landed = lands == log.name
            kept = log.entries[: None if landed else log.on_disk]
            partials = log.partials[: None if landed else log.partials_on_disk]
            survivor.turn_logs[worker] = survivor._turn_log(log.name, kept, partials)
            if may_land and self._removing is not None and self._removing[0] == log.name:
                survivor.turn_logs[worker].remove(self._removing[1])
        return survivor

    def _turn_log(
        self, name: str, entries: Sequence[JournalEntry] = (), partials: Sequence[PartialItem] = ()
    ) -> SimTurnLog:
        log = self.turn_log_type(
            name,
            entries=list(entries),
            on_disk=len(entries),
            partials=list(partials),
            partials_on_disk=len(partials),
            siblings=self.turn_logs,
        )
        log.journal = self
        return log

    def write(self, *records: ControlRecord) -> None:
        super().write(*records)
        self.round_within(self.flush_seconds)

    def _commit_all(self) -> None:
        self._round = None
        waiters, self._waiters = self._waiters, []
        try:
            if self._failure is None:
                for log in self.turn_logs.values():
                    if log.on_disk < len(log.entries) or log.partials_on_disk < len(log.partials):
                        self._commit(log.name)
                        log.on_disk, log.partials_on_disk = len(log.entries), len(log.partials)
                if self._on_disk < len(self.records):
                    self._commit(_CONTROL)
                    self._on_disk = len(self.records)
                self._landing = None
        except OSError as error:
            self._failure = f"{self._landing}: could not be written ({error.strerror}); free space, then resume"
        for waiter in waiters:
            if not waiter.done():
                _settle(waiter, self._failure)

    def _commit(self, name: str) -> None:
        self._landing = name
        self._disk.operate(f"commit {name}")


def _settle(waiter: asyncio.Future[Any], failure: str | None) -> None:
    if failure is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(StorageError(failure))
