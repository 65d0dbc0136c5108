"""The journal of a run in memory, for simulations, tests and replays.

Control records are kept in a list, with the number of them that are on the simulated disk. The queries of `RunLog` are
those of the SQLite journal, over an in-memory database to which the records on disk are written before each query.
Records that are not flushed are invisible to readers and lost in a crash.

1. `flush` and `commit` yield to the loop before they take effect, so that interleavings exist.
2. A commit puts the entries on disk before itself; one that names entries which were never appended is refused.
3. Readers see only data on disk.
"""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core.errors import JournalError, StorageError
from agentrl.journal import control_rows
from agentrl.journal.port import AttemptPruning, EpisodeEnd, PruneTotals, VersionPublication
from agentrl.journal.pruning import PruningSelection
from agentrl.journal.reader import missing_entries, read_fork_prefix
from agentrl.journal.run_log import RunJournal
from agentrl.journal.schema import CONTROL_FILE, open_database_in_memory
from agentrl.journal.store import write_control_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, WeightsRef
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.port import ControlRecord, PruneRule

    PartialItem = JournalEntry | tuple[str, int, str | None]
    """A partial, or the key of partials to remove: episode, attempt and call (None: all calls)."""

R = TypeVar("R")


@dataclass(slots=True)
class MemoryTurnLog:
    """Partition of one worker.

    Example:
        >>> from agentrl.journal.memory import MemoryJournal
        >>> log = MemoryJournal().turn_log("worker-0")
        >>> log.name, log.read("e0", 0)
        ('turns-worker-0.db', [])
    """

    name: str
    entries: list[JournalEntry] = field(default_factory=list)
    """All appended entries, in order."""
    on_disk: int = 0
    """Number of entries that would survive a crash."""
    failing_flushes: Collection[int] = ()
    """Numbers of the calls of `flush`, counted from 1, that raise `StorageError`."""
    flushes: int = 0
    partials: list[PartialItem] = field(default_factory=list)
    """Every appended partial, and the key of every removal, in order."""
    partials_on_disk: int = 0
    """Number of partials that would survive a crash."""
    siblings: Mapping[str, MemoryTurnLog] = field(default_factory=dict)
    """All partitions of the journal, including this one."""
    keeps: bool = True
    """Whether anything is stored; otherwise entries and partials are discarded."""
    _keys: set[tuple[str, int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._keys = {(entry.episode_id, entry.attempt, entry.call_id) for entry in self.entries}

    def append(self, entry: JournalEntry) -> None:
        """Queue an entry.

        Raises:
            JournalError: the call was journaled before.
        """
        if not self.keeps:
            return
        key = (entry.episode_id, entry.attempt, entry.call_id)
        if key in self._keys:
            raise JournalError(f"episode {key[0]} attempt {key[1]}: call {key[2]} was journaled twice")
        self._keys.add(key)
        self.entries.append(entry)

    def store_routing(self, episode_id: str, attempt: int, routing: bytes) -> None:
        """Leave the routing in its entry: there is no directory beside this journal."""

    async def flush(self) -> None:
        """Yield, then put all entries appended before the call on disk.

        Raises:
            StorageError: the test requested it; entries appended since the last success do not count as written.
        """
        self.flushes += 1
        number, num_entries, partials = self.flushes, len(self.entries), len(self.partials)
        await asyncio.sleep(0)
        if number in self.failing_flushes:
            raise StorageError(f"no space left on the simulated disk (flush {number} of {self.name})")
        self.on_disk = max(self.on_disk, num_entries)
        self.partials_on_disk = max(self.partials_on_disk, partials)

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Return the entries on disk of an attempt, in the order they were appended."""
        return [e for e in self.entries[: self.on_disk] if e.episode_id == episode_id and e.attempt == attempt]

    async def take_over(self, episode_id: str, attempt: int) -> None:
        """Copy the entries of an attempt from another partition if it holds more than this one."""
        source_log = fullest_partition(self.siblings, episode_id, attempt)
        if source_log is None or source_log is self:
            return
        entries, source = self.read(episode_id, attempt), source_log.read(episode_id, attempt)
        for entry in missing_entries(entries, source, partition=self.name, source_partition=source_log.name):
            self.append(entry)
        self.remove_partials(episode_id, attempt)
        for partial in source_log.read_partials(episode_id, attempt):
            self.append_partial(partial)
        await self.flush()

    def append_partial(self, entry: JournalEntry) -> None:
        """Queue the tokens of a turn that has not ended."""
        if self.keeps:
            self.partials.append(entry)

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        """Queue the removal of a call's partials, or of all partials of an attempt."""
        if self.keeps:
            self.partials.append((episode_id, attempt, call_id))

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Return the partials on disk of an attempt, in the order they were appended."""
        partials: list[JournalEntry] = []
        for item in self.partials[: self.partials_on_disk]:
            if not isinstance(item, tuple):
                if (item.episode_id, item.attempt) == (episode_id, attempt):
                    partials.append(item)
            elif item[:2] == (episode_id, attempt):
                partials = [entry for entry in partials if item[2] not in (None, entry.call_id)]
        return partials

    def remove(self, attempts: Collection[tuple[str, int]]) -> None:
        """Delete the entries of some attempts from disk."""
        remaining_entries = [e for e in self.entries[: self.on_disk] if (e.episode_id, e.attempt) not in attempts]
        self.entries[: self.on_disk] = remaining_entries
        self.on_disk = len(remaining_entries)

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        """Return the entries of this partition before a fork point."""
        return read_fork_prefix(".", point, lambda _, at: self.read(at.episode_id, at.attempt))


def fullest_partition(logs: Mapping[str, MemoryTurnLog], episode_id: str, attempt: int) -> MemoryTurnLog | None:
    """Return the partition with the most entries of an attempt; see `TurnLogReader.partition_of`."""

    def buffer_size(log: MemoryTurnLog) -> tuple[int, int]:
        return len(log.read(episode_id, attempt)), len(log.read_partials(episode_id, attempt))

    best = max(logs.values(), key=buffer_size, default=None)
    return best if best is not None and any(buffer_size(best)) else None


class MemoryJournal(RunJournal):
    """The journal of a run in memory.

    Args:
        info: identity of the run, returned by `RunLog.info`.
        keeps: whether anything is stored; False discards every record and entry.
        failing_commits: numbers of the calls of `commit`, counted from 1, that raise `StorageError` and record
            nothing.
        failing_flushes: numbers of the calls of `flush` of every turn log that raise `StorageError`.

    Example:
        >>> journal = MemoryJournal(failing_commits={3})
        >>> journal.next_number("e"), journal.highest_lineage()
        (0, -1)
    """

    def __init__(
        self,
        *,
        info: Mapping[str, Any] | None = None,
        keeps: bool = True,
        failing_commits: Collection[int] = (),
        failing_flushes: Collection[int] = (),
    ) -> None:
        super().__init__(Path(CONTROL_FILE), open_database_in_memory("control"))
        weakref.finalize(self, self.connection.close)
        self.records: list[ControlRecord] = []
        """All records of the control log, in order."""
        self.turn_logs: dict[str, MemoryTurnLog] = {}
        """Turn logs, keyed by the worker's name."""
        self.closed = False
        self._keeps = keeps
        self._on_disk = 0
        self._queryable = 0
        """Number of records that are in the database of the queries."""
        self._next_seq = 0
        self._ended_attempts: set[tuple[str, int]] = set()
        self._info = dict(info or {})
        self._learners = control_rows.learning_policies(self._info)
        self._failing_commits = frozenset(failing_commits)
        self._failing_flushes = frozenset(failing_flushes)
        self._commits = 0

    def turn_log(self, worker: str) -> MemoryTurnLog:
        """Return the partition of a worker; created if missing."""
        if worker not in self.turn_logs:
            self.turn_logs[worker] = MemoryTurnLog(
                f"turns-{worker}.db", failing_flushes=self._failing_flushes, siblings=self.turn_logs, keeps=self._keeps
            )
        return self.turn_logs[worker]

    def write(self, *records: ControlRecord) -> None:
        if self.closed:
            raise JournalError(f"the journal is closed; refused records: {records}")
        if self._keeps:
            self.records.extend(records)

    async def commit(self, end: EpisodeEnd) -> None:
        """Record a committed or dropped episode once its entries are on disk, and wait for the disk.

        Raises:
            StorageError: the test requested it; nothing is recorded.
            JournalError: the header names entries that were never appended, or an episode that already ended.
        """
        self._commits += 1
        number = self._commits
        await asyncio.sleep(0)
        if not self._keeps:
            self.record(end)
            return
        for log in self.turn_logs.values():
            await log.flush()
        if number in self._failing_commits:
            raise StorageError(f"no space left on the simulated disk (commit {number}, episode {end.spec.episode_id})")
        self._check_entries(end.header)
        key = (end.spec.episode_id, end.spec.attempt)
        if key in self._ended_attempts:
            raise JournalError(f"episode {end.spec.episode_id} attempt {end.spec.attempt} ended twice")
        self.record(end)
        self._ended_attempts.add(key)
        self._on_disk = len(self.records)

    async def prune(self, rule: PruneRule, *, should_stop: Callable[[], bool] = lambda: False) -> PruneTotals:
        """Remove the entries that a rule allows, one partition after another."""
        totals = PruneTotals(rule=str(rule), last=rule.last)
        if not rule.sealed:
            return totals
        selection = PruningSelection(self, rule, frozenset())
        for log in self.turn_logs.values():
            written_attempts = {(entry.episode_id, entry.attempt) for entry in log.entries[: log.on_disk]}
            attempts = written_attempts & selection.among([episode_id for episode_id, _ in written_attempts])
            if attempts and not should_stop():
                totals.episodes += len(attempts)
                self.record(
                    *[
                        AttemptPruning(episode_id=name, attempt=number, rule=str(rule))
                        for name, number in sorted(attempts)
                    ]
                )
                await self.flush()
                self._remove(log, attempts)
        return totals

    def _remove(self, log: MemoryTurnLog, attempts: Collection[tuple[str, int]]) -> None:
        log.remove(attempts)

    async def flush(self) -> None:
        """Yield, then put all records made before the call on disk."""
        num_records = len(self.records)
        await asyncio.sleep(0)
        self._on_disk = max(self._on_disk, num_records)

    async def close(self) -> None:
        """Flush; later records are refused. Idempotent."""
        for log in self.turn_logs.values():
            await log.flush()
        await self.flush()
        self.closed = True

    # --- reading what is on disk --------------------------------------------------------------------------------------

    def rows(self, statement: str, *parameters: Any) -> list[Any]:
        self._make_queryable()
        return super().rows(statement, *parameters)

    def verify(self, tables: Iterable[str] = control_rows.CHECKED_TABLES) -> None:
        self._make_queryable()
        super().verify(tables)

    def _make_queryable(self) -> None:
        """Write the records on disk to the database of the queries. Their time labels are their places."""
        rows: dict[str, list[Any]] = {}
        for place, record in enumerate(self.records[self._queryable : self._on_disk], self._queryable):
            encoded, self._next_seq = control_rows.encode_records(
                [record], self._next_seq, float(place), self._learners
            )
            for table, row in encoded:
                rows.setdefault(table, []).append(row)
        for table, of_table in rows.items():
            write_control_rows(self.connection, table, of_table)
        self._queryable = max(self._queryable, self._on_disk)

    def _highest_in_turns(self, prefix: str, highest: int) -> int:
        episodes = {entry.episode_id for log in self.turn_logs.values() for entry in log.entries[: log.on_disk]}
        numbers = [name.removeprefix(prefix) for name in episodes if name.startswith(prefix)]
        return max([highest, *(int(number) for number in numbers if number.isdecimal())])

    def published(self, version: PolicyVersion, *, outside: bool = False) -> WeightsRef | None:
        """Return a version's weights at their recorded path: there is no run directory to search."""
        publications = (record for record in self.on_disk() if isinstance(record, VersionPublication))
        return next((record.weights for record in publications if record.weights.version == version), None)

    def recorded(self, episode_id: str, attempt: int) -> tuple[list[JournalEntry], list[JournalEntry]]:
        log = fullest_partition(self.turn_logs, episode_id, attempt)
        return ([], []) if log is None else (log.read(episode_id, attempt), log.read_partials(episode_id, attempt))

    async def read_attempts(self, attempts: Sequence[tuple[EpisodeSpec, int]]) -> list[list[JournalEntry]]:
        inherited = [
            []
            if spec.fork is None
            else read_fork_prefix(".", spec.fork, lambda _, at: self.recorded(at.episode_id, at.attempt)[0])
            for spec, _ in attempts
        ]
        entry_lists = [self.recorded(spec.episode_id, attempt)[0] for spec, attempt in attempts]
        return [[*before, *after] for before, after in zip(inherited, entry_lists, strict=True)]

    def info(self) -> Mapping[str, Any]:
        return self._info

    # --- for tests ----------------------------------------------------------------------------------------------------

    def on_disk(self) -> list[ControlRecord]:
        """Return the control records that would survive a crash."""
        return self.records[: self._on_disk]

    def of_kind(self, kind: type[R]) -> list[R]:
        """Return all control records of one class, in order."""
        return [record for record in self.records if isinstance(record, kind)]

    def after_crash(self) -> MemoryJournal:
        """Return the journal that a new process would open: the records on disk, without further failures."""
        survivor = MemoryJournal(info=self._info)
        survivor.records = self.on_disk()
        survivor._on_disk = len(survivor.records)
        ends = (record for record in survivor.records if isinstance(record, EpisodeEnd))
        survivor._ended_attempts = {(end.spec.episode_id, end.spec.attempt) for end in ends}
        for worker, log in self.turn_logs.items():
            entries = log.entries[: log.on_disk]
            partials = log.partials[: log.partials_on_disk]
            survivor.turn_logs[worker] = MemoryTurnLog(
                log.name,
                entries=entries,
                on_disk=len(entries),
                partials=partials,
                partials_on_disk=len(partials),
                siblings=survivor.turn_logs,
            )
        return survivor

    def _check_entries(self, header: EpisodeHeader) -> None:
        if header.location is None:
            return
        logs = [log for log in self.turn_logs.values() if log.name == header.location.partition]
        count = sum(len(log.read(header.episode_id, header.attempt)) for log in logs)
        if count != header.location.entries:
            raise JournalError(
                f"episode {header.episode_id} attempt {header.attempt}: {header.location.entries} entries named in "
                f"{header.location.partition}, {count} are there"
            )
