"""The SQLite journal of a run: one control log, and a turn partition per worker, in one directory.

The process of the run writes through `SqliteJournal`; a worker process writes its one partition, through
`WorkerJournal`.

Group commit: one thread per process, `GroupCommitWriter`, writes all rows that were queued since its last round.
Callers only append to a deque, which never blocks. A round takes all queued rows, writes the turn partitions and syncs
them, then the control log and syncs it, then resolves the waiters; so a control row is never on disk before the entries
it names, and waiters share their syncs. Half of a round's cost does not depend on its rows, so that a round for which
only commits wait begins the later the more callers shared the last one. A round may begin between any two calls: the
rows of one `put` reach the disk together or not at all, those of two may not. A failed round rolls back, fails its
waiters and every later one: nothing after it is ever written. Rows go in by multi-row INSERTs: sqlite3 releases the
interpreter lock at every statement, and regaining it from a busy event loop can take milliseconds.

Owns: the run lock, the write connections, the writer thread, the names of the files. Does not read entries' bodies.
Invariants: calls never block; `commit_episode` returns after the episode's entries and then its record are on disk;
after a failed write nothing more is written and every later wait raises.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections import defaultdict, deque
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from agentrl.core.clock import Clock, SystemClock
from agentrl.core.errors import EpisodeError, InputError, StorageError
from agentrl.core.ids import is_safe_name
from agentrl.journal import control_rows
from agentrl.journal.entries import entry_checksum
from agentrl.journal.pruning import prune
from agentrl.journal.reader import TurnLogReader, load_fork_prefix
from agentrl.journal.run_log import START_KEY, ControlLogReader, RunStart, SqliteRunLog
from agentrl.journal.run_process import RunLock, find_writing_process
from agentrl.journal.schema import (
    CONTROL_FILE,
    MAX_VALUE_BYTES,
    open_database_to_write,
    private_directory,
    read_meta_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentrl.core.records import (
        EpisodeHeader,
        EpisodeSpec,
        ForkPoint,
        FrozenGroupBaselines,
        PolicyVersion,
        Proposal,
        WeightsRef,
    )
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.port import PruneRule, PruneTotals, StepRow
    from agentrl.journal.pruning import AttemptKey

FLUSH_SECONDS = 0.2
"""Seconds that a queued row waits for a round at most, if no caller waits for it."""
LINGER_SECONDS = 0.004
"""Seconds that a round waits for more rows once a caller waits for it."""
LONGEST_LINGER_SECONDS = 0.05
"""Seconds that a round waits at most if only commits wait for it: `LINGER_SECONDS` for each caller that shared the last
round."""

_CHUNK = 32
"""Maximum number of rows in one INSERT."""

_COLUMNS = " (episode, attempt, call, asked, body, checksum) VALUES "

PartialKey = tuple[str, int, str | None]
"""Episode, attempt and call; without a call, the whole attempt."""


class PartialTurnTableWriter:
    """The partials of a partition, as a target of the writer: an item is a partial, or the key of partials to
    remove.
    """

    def __init__(self, database: WriterDatabase) -> None:
        self.database = database

    def write(self, connection: sqlite3.Connection, items: list[JournalEntry | PartialKey]) -> None:
        """Insert, then remove; partials that are removed in the round in which they were queued never reach the
        disk.
        """
        removed = {item for item in items if isinstance(item, tuple)}
        rows = [
            _row(item)
            for item in items
            if not isinstance(item, tuple) and (item.episode_id, item.attempt, item.call_id) not in removed
        ]
        insert_rows(connection, "INSERT INTO partials" + _COLUMNS, 6, rows)
        for episode_id, attempt, call_id in removed:
            if call_id is None:
                connection.execute("DELETE FROM partials WHERE episode = ? AND attempt = ?", (episode_id, attempt))
            else:
                connection.execute(
                    "DELETE FROM partials WHERE episode = ? AND attempt = ? AND call = ?",
                    (episode_id, attempt, call_id),
                )


def _row(entry: JournalEntry) -> Sequence[Any]:
    asked, body = entry.asked, entry.body
    checksum = entry_checksum(entry.episode_id, entry.attempt, entry.call_id, asked, body)
    return (entry.episode_id, entry.attempt, entry.call_id, asked, body, checksum)


def check_entry_size(entry: JournalEntry) -> None:
    """Refuse an entry that is too large for the journal.

    Raises:
        EpisodeError: the entry is too large (`too_large`).
    """
    if len(entry.body) > MAX_VALUE_BYTES:
        raise EpisodeError(
            f"episode {entry.episode_id}, call {entry.call_id}: an entry of {len(entry.body)} bytes; at most "
            f"{MAX_VALUE_BYTES} are allowed. Shorten the observation or the value",
            reason="too_large",
        )


class SqliteTurnLog:
    """One worker's partition, `turns-<worker>.db`; implements `TurnLog`."""

    def __init__(self, directory: Path, worker: str, run: str, writer: GroupCommitWriter) -> None:
        """Open or create the partition.

        Raises:
            InputError: `worker` cannot be part of a file name.
            JournalError: the file is damaged, of another format, or of another run.
            StorageError: the file cannot be created.
        """
        if not is_safe_name(worker):
            raise InputError(
                f"worker {worker!r}: a name may have up to 64 letters, digits, dots, dashes and underscores"
            )
        self.name = f"turns-{worker}.db"
        path = directory / self.name
        self.database = WriterDatabase(path, open_database_to_write(path, "turns", {"run": run}, run=run), order=0)
        self._partials = PartialTurnTableWriter(self.database)
        self._run = run
        self._discarded: dict[str, tuple[int, int] | None] = {}
        """`_log_state` of other partitions after their unpublished commits were discarded, keyed by partition."""
        self._writer = writer
        self._reader = TurnLogReader(directory)
        writer.add(self.database)

    def append(self, entry: JournalEntry) -> None:
        """Queue an entry.

        Raises:
            EpisodeError: the entry is too large (`too_large`).
        """
        check_entry_size(entry)
        self._writer.put((self, entry))

    async def flush(self) -> None:
        """Wait until all appended entries are on disk."""
        await self._writer.wait()

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        return self._reader.read(self.name, episode_id, attempt)

    async def take_over(self, episode_id: str, attempt: int) -> None:
        if left := self._left_by_killed_writers():
            await asyncio.to_thread(self._discard_unpublished, left)
        other = self._reader.partition_of(episode_id, attempt)
        if other is None or other == self.name:
            return
        for entry in self._reader.read(other, episode_id, attempt)[len(self.read(episode_id, attempt)) :]:
            self.append(entry)
        self.remove_partials(episode_id, attempt)
        await self.flush()  # flush so that the old rows are removed before new ones arrive
        for partial in self._reader.partials(other, episode_id, attempt):
            self.append_partial(partial)
        await self.flush()

    def _left_by_killed_writers(self) -> list[Path]:
        """Return the other partitions without a living writer that were written since `_discard_unpublished`."""
        own = self.database.path
        return [
            path
            for path in sorted(own.parent.glob("turns-*.db"))
            if path.name != own.name
            and _log_state(path) != self._discarded.get(path.name)
            and find_writing_process(path.parent, path.with_suffix(".lock").name) is None
        ]

    def _discard_unpublished(self, partitions: Sequence[Path]) -> None:
        """Discard the unpublished commits that killed writers left (see `open_database_to_write`): their entries must
        not appear once an episode was taken over without them. A writer that lives did so when it opened its
        partition."""
        for path in partitions:
            open_database_to_write(path, "turns", {}, run=self._run).close()
            self._discarded[path.name] = _log_state(path)

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        return load_fork_prefix(self.database.path.parent, point)

    def append_partial(self, entry: JournalEntry) -> None:
        self._writer.put((self._partials, entry))

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        self._writer.put((self._partials, (episode_id, attempt, call_id)))

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        return self._reader.partials(self.name, episode_id, attempt)

    def write(self, connection: sqlite3.Connection, items: list[JournalEntry]) -> None:
        """Insert entries; called by the writer."""
        insert_rows(connection, "INSERT INTO entries" + _COLUMNS, 6, [_row(entry) for entry in items])

    def close_reader(self) -> None:
        """Close the connections of `read`; the writer closes the others."""
        self._reader.close()


def _log_state(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a database's log; None if it has none."""
    try:
        found = path.with_name(path.name + "-wal").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


class NonDecreasingClock(SystemClock):
    """The machine's clock with a wall time that never goes back, because readers of a journal rely on the order of its
    labels.

    After the machine's clock jumps ahead and back, labels continue from the latest one and stay ahead of it. Not
    thread-safe.

    Args:
        latest: newest label of earlier processes.
    """

    def __init__(self, latest: float) -> None:
        self._label, self._at = latest, self.monotonic()

    def wall(self) -> float:
        """Return a wall time that advances at least as much as the monotonic clock since the last call."""
        now = self.monotonic()
        self._label, self._at = max(super().wall(), self._label + now - self._at), now
        return self._label


class ControlTableWriter:
    """A table of the control log as a target of the writer."""

    def __init__(
        self, database: WriterDatabase, name: str, columns: str, *, checksum: bool = False, once: bool = False
    ) -> None:
        """Create the target. With `once`, writing leaves an existing row with the same key unchanged."""
        self.database = database
        self.name = name
        self.checksum = checksum
        names = columns.split() + (["checksum"] if checksum else [])
        self._width = len(names)
        self._insert = f"INSERT {'OR IGNORE ' if once else ''}INTO {name} ({', '.join(names)}) VALUES "

    def write(self, connection: sqlite3.Connection, items: list[Sequence[Any]]) -> None:
        """Insert rows, each with its checksum last if the table has one; called by the writer."""
        if self.checksum:
            items = [control_rows.with_checksum(self.name, item) for item in items]
        insert_rows(connection, self._insert, self._width, items)


class ControlTables:
    """The tables of one control log."""

    def __init__(self, database: WriterDatabase) -> None:
        def record(name: str, columns: str) -> ControlTableWriter:
            return ControlTableWriter(database, name, columns, checksum=True, once=True)

        self.admissions = record("admissions", control_rows.ADMISSION_COLUMNS)
        self.episodes = record("episodes", control_rows.EPISODE_COLUMNS)
        self.trajectories = record("trajectories", control_rows.TRAJECTORY_COLUMNS)
        self.unit_drops = record("unit_drops", "episode attempt policy reason dropped_at")
        self.proposals = record("proposals", "number episode attempt call environment key structure")
        self.baselines = record("baselines", "group_id finishers earlier")
        self.versions = record(
            "versions", "policy lineage step parent_lineage parent_step path kind sha256 published_at"
        )
        self.steps = record(
            "steps",
            "policy lineage step started_lineage started_step loss grad_norm fed samples tokens seconds normaliser"
            " input_digest columns_file metrics stepped_at",
        )
        self.step_units = record(
            "step_units",
            "policy lineage step position episode attempt seat agent reward advantage baseline turn_advantages",
        )
        self.pruned = record("pruned", "episode attempt rule pruned_at")
        self.pruned_files = record("pruned_files", "file rule pruned_at")
        self.metrics = ControlTableWriter(database, "metrics", "policy step name value recorded_at")
        self.meta = ControlTableWriter(database, "meta", "key value", once=True)


class SqliteJournal(ControlLogReader):
    """The journal of a run, for writing and reading; implements `JournalStore` and, for resume, `RunLog`."""

    def __init__(
        self, directory: str | Path, *, info: Mapping[str, Any] | None = None, clock: Clock | None = None
    ) -> None:
        """Open the journal in `directory`, or create it.

        Args:
            directory: the run's journal directory.
            info: identity of a new journal, stored as JSON: the run's name, its resolved configuration.
            clock: clock of wall-time labels; default: a `NonDecreasingClock`.

        Raises:
            RunDirectoryError: another process is writing this run.
            JournalError: the journal is damaged, of another format, or of another run.
            StorageError: the directory or its files cannot be created.
        """
        self.directory = Path(directory)
        private_directory(self.directory)
        self._lock = RunLock(self.directory)
        try:
            path = self.directory / CONTROL_FILE
            identity = {"info": msgspec.json.encode(dict(info or {})).decode(), "run": os.urandom(8).hex()}
            connection = open_database_to_write(path, "control", identity)
            self._run = read_meta_table(connection)["run"]
            super().__init__(self.directory)
            self._clock = clock or NonDecreasingClock(self.newest_label())
        except BaseException:
            self._lock.release()
            raise
        database = WriterDatabase(path, connection, order=1)
        self._tables = ControlTables(database)
        self._writer = GroupCommitWriter("journal-writer")
        self._writer.add(database)
        self._turn_logs: dict[str, SqliteTurnLog] = {}
        self._turns = TurnLogReader(self.directory)
        self._learning = control_rows.learning_policies(self.info())

    def turn_log(self, worker: str) -> SqliteTurnLog:
        """Return the partition of a worker, created if missing.

        Raises:
            JournalError: the partition is missing although committed episodes lie in it; or see `SqliteTurnLog`.
        """
        log = self._turn_logs.get(worker)
        if log is None:
            self.check_partition(f"turns-{worker}.db")
            log = self._turn_logs[worker] = SqliteTurnLog(self.directory, worker, self._run, self._writer)
        return log

    def admit(self, *specs: EpisodeSpec) -> None:
        """Record the admission of episodes, atomically.

        Raises:
            InputError: the data of a task cannot be serialised; none is admitted.
        """
        now = self._clock.wall()
        self._writer.put(*[(self._tables.admissions, control_rows.encode_admission_row(spec, now)) for spec in specs])

    async def commit_episode(
        self, spec: EpisodeSpec, header: EpisodeHeader, digest: bytes, metrics: Mapping[str, float], detail: str = ""
    ) -> None:
        """Record a committed or dropped episode once its entries are on disk; waits for the disk."""
        tables = self._tables
        row = control_rows.encode_episode_row(spec, header, digest, metrics, detail, self._clock.wall(), self._learning)
        trajectories = [(tables.trajectories, trajectory) for trajectory in control_rows.encode_trajectory_rows(header)]
        self._writer.put((tables.episodes, row), *trajectories)
        await self._writer.wait(urgent=False)

    def record_drop(self, episode_id: str, attempt: int, policy: str, reason: str) -> None:
        self._writer.put((self._tables.unit_drops, (episode_id, attempt, policy, reason, self._clock.wall())))

    def record_proposal(self, proposal: Proposal) -> None:
        self._writer.put((self._tables.proposals, proposal))

    def record_baselines(self, baselines: FrozenGroupBaselines) -> None:
        self._writer.put((self._tables.baselines, control_rows.encode_baselines_row(baselines)))

    def record_version(self, weights: WeightsRef, parent: PolicyVersion | None) -> None:
        self._writer.put((self._tables.versions, control_rows.encode_version_row(weights, parent, self._clock.wall())))

    def record_step(self, row: StepRow) -> None:
        units = [(self._tables.step_units, unit) for unit in control_rows.encode_step_unit_rows(row)]
        self._writer.put((self._tables.steps, control_rows.encode_step_row(row, self._clock.wall())), *units)

    def record_metrics(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        """Record metric values at a step; NaN and infinity become NULL."""
        rows = control_rows.encode_metric_rows(policy, step, values, self._clock.wall())
        self._writer.put(*[(self._tables.metrics, row) for row in rows])

    def record_start(self, start: RunStart) -> None:
        """Record a start of the run."""
        self._writer.put((self._tables.meta, (f"{START_KEY}{start.lineage}", msgspec.json.encode(start).decode())))

    async def prune(self, rule: PruneRule, *, stopped: Callable[[], bool] = lambda: False) -> PruneTotals:
        """Remove the data that a rule allows, in a thread; see `journal.pruning`.

        Raises:
            JournalError: a database cannot be read.
            StorageError: writing failed.
        """
        loop = asyncio.get_running_loop()

        def record(attempts: Sequence[AttemptKey], files: Sequence[str]) -> None:
            asyncio.run_coroutine_threadsafe(self._record_pruned(str(rule), attempts, files), loop).result()

        def work() -> PruneTotals:
            with closing(SqliteRunLog(self.directory)) as log:
                return prune(self.directory, log, rule, record, stopped=stopped)

        return await asyncio.to_thread(work)

    async def _record_pruned(self, rule: str, attempts: Sequence[AttemptKey], files: Sequence[str]) -> None:
        now, tables = self._clock.wall(), self._tables
        self._writer.put(
            *[(tables.pruned, (*key, rule, now)) for key in attempts],
            *[(tables.pruned_files, (name, rule, now)) for name in files],
        )
        await self._writer.wait()

    async def flush(self) -> None:
        """Wait until everything recorded is on disk."""
        await self._writer.wait()

    async def close(self) -> None:
        """Flush and release. Idempotent."""
        for log in self._turn_logs.values():
            log.close_reader()
        self._turns.close()
        # Closed before the writer, because the last connection to close merges the write-ahead log into the database.
        self.connection.close()
        try:
            await self._writer.close()
        finally:
            self._lock.release()

    # --- reading back for resume --------------------------------------------------------------------------------------

    def progress(self, episode_id: str, attempt: int) -> tuple[int, int]:
        return self._turns.progress(episode_id, attempt)

    def recorded(self, episode_id: str, attempt: int) -> tuple[list[JournalEntry], list[JournalEntry]]:
        partition = self._turns.partition_of(episode_id, attempt)
        if partition is None:
            return [], []
        return (
            self._turns.read(partition, episode_id, attempt),
            self._turns.partials(partition, episode_id, attempt),
        )


class TakeoverTrackingTurnLog(SqliteTurnLog):
    """A partition that knows which of the episodes begun elsewhere have progressed here."""

    def __init__(self, directory: Path, worker: str, run: str, writer: GroupCommitWriter) -> None:
        super().__init__(directory, worker, run, writer)
        self._taken_over: set[str] = set()
        self._advanced: list[str] = []

    async def take_over(self, episode_id: str, attempt: int) -> None:
        self._taken_over.discard(episode_id)  # its entries are copies, not new ones
        await super().take_over(episode_id, attempt)
        self._taken_over.add(episode_id)

    def append(self, entry: JournalEntry) -> None:
        super().append(entry)
        self._gets_on(entry.episode_id)

    def append_partial(self, entry: JournalEntry) -> None:
        super().append_partial(entry)
        self._gets_on(entry.episode_id)

    def _gets_on(self, episode_id: str) -> None:
        if episode_id in self._taken_over:
            self._taken_over.remove(episode_id)
            self._advanced.append(episode_id)

    async def advanced(self) -> list[str]:
        """Return the episodes that were taken over and have new entries on disk; each is returned once.

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
        """Open the partition, or create it.

        Raises:
            RunDirectoryError: another process writes the partition.
            JournalError: the partition is damaged, of another run, or missing although committed episodes lie in it.
            StorageError: the partition cannot be created.
        """
        self._lock = RunLock(directory, f"turns-{worker}.lock")
        run_log = SqliteRunLog(directory)
        try:
            run_log.check_partition(f"turns-{worker}.db")
            self._writer = GroupCommitWriter("journal-writer")
            self.log = TakeoverTrackingTurnLog(directory, worker, str(run_log.info()["run"]), self._writer)
        except BaseException:
            self._lock.release()
            raise
        finally:
            run_log.close()

    def check(self) -> None:
        self._writer.check()

    async def close(self) -> None:
        """Flush and release. Idempotent."""
        self.log.close_reader()
        try:
            await self._writer.close()
        finally:
            self._lock.release()


# --- group commit: the writer thread of a process ---------------------------------------------------------------------


class CommitWaiter(NamedTuple):
    """A caller that waits for a round, and its event loop."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class TableWriter(Protocol):
    """A table of a database, with the conversion of queued items to rows."""

    database: WriterDatabase

    def write(self, connection: sqlite3.Connection, items: list[Any]) -> None:
        """Insert queued items into the table, inside the round's transaction; called in the writer thread."""
        ...


class WriterDatabase:
    """A write connection and its place in the commit order."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, order: int) -> None:
        self.path = path.absolute()
        self.connection = connection
        self.order = order
        """Place in the commit order: lower reaches the disk first."""
        self._identity = _identity(self.path)

    def check_not_moved(self) -> None:
        """Raise `FileNotFoundError` if the file was moved: SQLite would continue to write to it."""
        if _identity(self.path) != self._identity:
            raise FileNotFoundError(f"{self.path}: the file was moved, removed or replaced while it was being written")


class GroupCommitWriter:
    """The writer thread of a process. `put`, `check`, `wait` and `close` are called from the event loop's thread."""

    def __init__(self, name: str) -> None:
        self._queue: deque[Sequence[tuple[TableWriter, Any]] | CommitWaiter] = deque()
        self._awaited = threading.Event()
        """Set when a caller waits for a round."""
        self._urgent = threading.Event()
        """Set when a caller waits for a round that must not linger for more commits."""
        self._sharers = 1
        """Number of callers that waited for the last round which anybody waited for."""
        self._closing = threading.Event()
        self._failure: str | None = None
        self._failure_seen = False
        self._databases: list[WriterDatabase] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, database: WriterDatabase) -> None:
        """Add a database; only the thread uses and closes its connection."""
        self._databases.append(database)

    def put(self, *rows: tuple[TableWriter, Any]) -> None:
        """Queue rows; those of one database are written in one transaction."""
        self._queue.append(rows)

    def check(self) -> None:
        """Check whether a write has failed, without waiting.

        Raises:
            StorageError: a write failed; nothing queued since the last success counts as written.
        """
        if self._failure is not None:
            raise self._error()

    async def wait(self, *, urgent: bool = True) -> None:
        """Wait until everything queued before this call is on disk; unless `urgent`, the round may linger for more
        commits.

        Raises:
            StorageError: a write failed, now or before; nothing queued since the last success counts as written.
        """
        self.check()
        if self._closing.is_set():
            raise StorageError("the journal is closed; nothing can be written to it any more")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._queue.append(CommitWaiter(loop, future))
        for event in (self._urgent, self._awaited) if urgent else (self._awaited,):
            if not event.is_set():  # setting takes a lock, and a thousand callers may wait for the same round
                event.set()
        try:
            await future
        except StorageError:
            raise self._error() from None

    async def close(self) -> None:
        """Write what is queued, close the databases, end the thread. Idempotent.

        Raises:
            StorageError: the last round failed, and no caller was informed.
        """
        self._closing.set()
        self._urgent.set()
        self._awaited.set()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        if self._failure is not None and not self._failure_seen:
            raise self._error()

    def _error(self) -> StorageError:
        self._failure_seen = True
        return StorageError(self._failure or "the journal's writer ended unexpectedly")

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                self._linger()
                self._awaited.clear()
                self._urgent.clear()
                closing = self._closing.is_set()
                self._round()
        finally:
            if not self._closing.is_set() and self._failure is None:
                self._failure = "the journal's writer thread ended unexpectedly; this is a bug of agentrl"
            self._round()
            for database in self._databases:
                database.connection.close()

    def _linger(self) -> None:
        """Return when a round is due."""
        if not self._awaited.wait(FLUSH_SECONDS - LONGEST_LINGER_SECONDS):
            return
        self._urgent.wait(min(self._sharers * LINGER_SECONDS, LONGEST_LINGER_SECONDS))
        if self._urgent.is_set():
            self._closing.wait(LINGER_SECONDS)

    def _round(self) -> None:
        rows, waiters = self._take()
        if waiters:
            self._sharers = len(waiters)
        try:
            if self._failure is None:
                for database in sorted({target.database for target in rows}, key=lambda database: database.order):
                    self._failure = self._commit(database, rows)
                    if self._failure is not None:
                        break
        except BaseException as error:
            self._failure = f"the journal's writer failed: {type(error).__name__}: {error}; this is a bug of agentrl"
            raise
        finally:  # wake all waiters whatever happened
            self._resolve(waiters)

    def _resolve(self, waiters: Sequence[CommitWaiter]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for loop, future in waiters:
            by_loop.setdefault(loop, []).append(future)
        for loop, futures in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, futures, self._failure)

    def _take(self) -> tuple[dict[TableWriter, list[Any]], list[CommitWaiter]]:
        rows: defaultdict[TableWriter, list[Any]] = defaultdict(list)
        waiters: list[CommitWaiter] = []
        queue = self._queue
        for _ in range(len(queue)):
            queued = queue.popleft()
            if isinstance(queued, CommitWaiter):
                waiters.append(queued)
                continue
            for target, item in queued:
                rows[target].append(item)
        return rows, waiters

    def _commit(self, database: WriterDatabase, rows: dict[TableWriter, list[Any]]) -> str | None:
        """Commit one transaction; returns the reason if it failed."""
        connection = database.connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for target, items in rows.items():
                if target.database is database:
                    target.write(connection, items)
            connection.execute("COMMIT")
            database.check_not_moved()
        except FileNotFoundError as error:
            return f"{error}. Put the run directory back, then start again with --resume"
        except (sqlite3.Error, OSError, ValueError, TypeError, OverflowError) as error:
            if connection.in_transaction:
                connection.rollback()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                return f"{database.path}: the file is damaged ({error}); restore it from a copy, with its -wal file"
            return (
                f"{database.path}: could not be written ({error}). What was committed before is safe. "
                "Free space or repair the disk, then start again with --resume"
            )
        return None


def insert_rows(connection: sqlite3.Connection, insert: str, width: int, rows: Sequence[Sequence[Any]]) -> None:
    """Insert rows of `width` columns; `insert` is `INSERT … VALUES `, without the placeholders."""
    placeholders = "(" + ",".join("?" * width) + ")"
    whole = len(rows) - len(rows) % _CHUNK
    if whole:
        statement = insert + ",".join([placeholders] * _CHUNK)
        for start in range(0, whole, _CHUNK):
            connection.execute(statement, [value for row in rows[start : start + _CHUNK] for value in row])
    rest = rows[whole:]
    size = 1
    while rest:  # batches are powers of two, so that few distinct statements are prepared
        if len(rest) & size:
            statement = insert + ",".join([placeholders] * size)
            connection.execute(statement, [value for row in rest[:size] for value in row])
            rest = rest[size:]
        size *= 2


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _resolve(futures: Sequence[asyncio.Future[None]], failure: str | None) -> None:
    for future in futures:
        if not future.done():
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(StorageError(failure))
