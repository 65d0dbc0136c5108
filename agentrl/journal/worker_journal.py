"""A worker's partition of a run's journal, written by a process that does not write the control log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.journal.lock import RunLock
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.store import SqliteTurnLog
from agentrl.journal.writer import GroupCommitWriter

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.journal.entries import JournalEntry


class WorkerTurnLog(SqliteTurnLog):
    """Knows which of the episodes that were begun elsewhere have got on here."""

    def __init__(self, directory: Path, worker: str, run: str, writer: GroupCommitWriter) -> None:
        """See `SqliteTurnLog`."""
        super().__init__(directory, worker, run, writer)
        self._taken_over: set[str] = set()
        self._advanced: list[str] = []

    async def take_over(self, episode_id: str, attempt: int) -> None:
        """See `TurnLog.take_over`."""
        self._taken_over.discard(episode_id)  # what is copied is not new
        await super().take_over(episode_id, attempt)
        self._taken_over.add(episode_id)

    def append(self, entry: JournalEntry) -> None:
        """See `TurnLog.append`."""
        super().append(entry)
        self._gets_on(entry.episode_id)

    def append_partial(self, entry: JournalEntry) -> None:
        """See `TurnLog.append_partial`."""
        super().append_partial(entry)
        self._gets_on(entry.episode_id)

    def _gets_on(self, episode_id: str) -> None:
        if episode_id in self._taken_over:
            self._taken_over.remove(episode_id)
            self._advanced.append(episode_id)

    async def advanced(self) -> list[str]:
        """Episodes that were taken over and of which something new is on disk; each is named once.

        Raises:
            StorageError: see `flush`.
        """
        advanced, self._advanced = self._advanced, []
        if advanced:
            await self.flush()
        return advanced


class WorkerJournal:
    """Holds the partition's lock, writer thread and log from construction to `close`."""

    def __init__(self, directory: Path, worker: str) -> None:
        """Open the partition, or make it.

        Raises:
            RunDirectoryError: another process writes it.
            JournalError: it is damaged, of another run, or missing although committed episodes lie in it.
            StorageError: it cannot be made.
        """
        self._lock = RunLock(directory, f"turns-{worker}.lock")
        run_log = SqliteRunLog(directory)
        try:
            run_log.check_partition(f"turns-{worker}.db")
            self._writer = GroupCommitWriter("journal-writer")
            self.log = WorkerTurnLog(directory, worker, str(run_log.info()["run"]), self._writer)
        except BaseException:
            self._lock.release()
            raise
        finally:
            run_log.close()

    def check(self) -> None:
        """See `GroupCommitWriter.check`."""
        self._writer.check()

    async def close(self) -> None:
        """Flush and release. Idempotent."""
        self.log.close_reader()
        try:
            await self._writer.close()
        finally:
            self._lock.release()
