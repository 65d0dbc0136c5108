"""The SQLite journal of a run: one control log, and a turn partition per worker, in one directory.

From an entry to the disk: `SqliteTurnLog.append` or `SqliteJournal.record` → `GroupCommitWriter.put`, which queues rows
for a `WriterDatabase` → the writer's thread takes the queue, once per round → one transaction per database, by
`write_turn_rows` or `write_control_rows`. The process of the run writes through `SqliteJournal`; a worker process
writes its one partition, by `SqliteTurnLog.open`.

Group commit: a process has one writer thread. Callers only append to a deque, which never blocks. A round takes all
queued rows, writes the turn partitions and syncs them, then the control log and syncs it, then resolves the waiters; so
a control row is never on disk before the entries it names, and waiters share their syncs. A commit round has a fixed
cost. If only commits are waiting, the writer waits longer the more callers shared the previous round. A round may begin
between any two calls: the rows of one `put` reach the disk together or not at all; the rows of two calls may not. A
failed round rolls back, and fails its waiters and every later one: nothing after it is ever written. Rows go in by
multi-row INSERTs: sqlite3 releases the interpreter lock at every statement, and regaining it from a busy event loop can
take milliseconds.

Owns: the locks, the write connections, the writer thread, the names of the files. Does not read entries' bodies.
Invariants: calls never block; `commit` returns after the episode's entries and then its record are on disk;
after a failed write nothing more is written and every later wait raises.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sqlite3
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.core.clock import Clock, SystemClock
from agentrl.core.errors import EpisodeError, InputError, JournalError, StorageError
from agentrl.core.ids import is_safe_name
from agentrl.journal import control_rows
from agentrl.journal.entries import entry_checksum
from agentrl.journal.port import AttemptPruning, EpisodeEnd, FilePruning
from agentrl.journal.pruning import prune
from agentrl.journal.reader import TurnLogReader, load_fork_prefix, missing_entries
from agentrl.journal.requests import REQUESTS_FILE, RequestLog, write_request_rows
from agentrl.journal.routing import RoutingStore
from agentrl.journal.run_log import START_KEY, RunJournal, RunStart, SqliteRunLog
from agentrl.journal.run_process import RunLock, find_writing_process
from agentrl.journal.schema import (
    CONTROL_FILE,
    MAX_VALUE_BYTES,
    open_database_to_read,
    open_database_to_write,
    private_directory,
    read_meta_table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentrl.core.records import (
        EpisodeSpec,
        ForkPoint,
    )
    from agentrl.core.tokens import RoutingReference
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.port import ControlRecord, PruneRule, PruneTotals
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

PartialKey = tuple[str, int, str | None]
"""Episode, attempt and call; without a call, the whole attempt."""


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
    """One worker's partition, `turns-<worker>.db`; implements `WorkerTurnLog`."""

    def __init__(
        self, directory: Path, worker: str, run: str, writer: GroupCommitWriter, lock: RunLock | None = None
    ) -> None:
        """Open or create the partition.

        Args:
            directory: the run's journal directory.
            worker: name of the worker.
            run: id of the run.
            writer: the process's writer.
            lock: the partition's lock, if the partition is all that this process writes; `close` then ends the writer.

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
        connection = open_database_to_write(path, "turns", {"run": run}, run=run)
        self.database = WriterDatabase(path, connection, write_turn_rows, order=0)
        self._run = run
        self._lock = lock
        self._discarded_attempts: dict[str, tuple[int, int] | None] = {}
        """`_log_state` of other partitions after their unpublished commits were discarded, keyed by partition."""
        self._taken_over: set[str] = set()
        self._advanced_episodes: list[str] = []
        self._writer = writer
        self._reader = TurnLogReader(directory)
        self._routing = RoutingStore.of_journal(directory)
        writer.add(self.database)

    @staticmethod
    def open(directory: Path, worker: str) -> SqliteTurnLog:
        """Open or create the partition of a worker process.

        Raises:
            RunDirectoryError: another process writes the partition.
            JournalError: the partition is damaged, of another run, or missing although committed episodes lie in it.
            StorageError: the partition cannot be created.
        """
        lock = RunLock(directory, f"turns-{worker}.lock")
        try:
            with closing(SqliteRunLog(directory)) as run_log:
                run_log.check_partition(f"turns-{worker}.db")
                run = str(run_log.info()["run"])
            return SqliteTurnLog(directory, worker, run, GroupCommitWriter("journal-writer"), lock)
        except BaseException:
            lock.release()
            raise

    def append(self, entry: JournalEntry) -> None:
        """Queue an entry.

        Raises:
            EpisodeError: the entry is too large (`too_large`).
        """
        check_entry_size(entry)
        self._writer.put(self.database, ("entries", entry))
        self._record_progress(entry.episode_id)

    def store_routing(self, episode_id: str, attempt: int, routing: bytes) -> RoutingReference:
        return self._routing.put(episode_id, attempt, routing)

    async def flush(self) -> None:
        """Wait until all appended entries are on disk."""
        await self._writer.wait()

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        return self._reader.read(self.name, episode_id, attempt)

    async def take_over(self, episode_id: str, attempt: int) -> None:
        self._taken_over.discard(episode_id)  # its entries are copies, not new ones
        if leftovers := self._left_by_killed_writers():
            await asyncio.to_thread(self._discard_unpublished, leftovers)
        source_name = self._reader.partition_of(episode_id, attempt)
        if source_name is not None and source_name != self.name:
            source = self._reader.read(source_name, episode_id, attempt)
            entries = self.read(episode_id, attempt)
            for entry in missing_entries(entries, source, partition=self.name, source_partition=source_name):
                self.append(entry)
            self.remove_partials(episode_id, attempt)
            await self.flush()  # flush so that the old rows are removed before new ones arrive
            for partial in self._reader.partials(source_name, episode_id, attempt):
                self.append_partial(partial)
            await self.flush()
        self._taken_over.add(episode_id)

    def _record_progress(self, episode_id: str) -> None:
        if episode_id in self._taken_over:
            self._taken_over.remove(episode_id)
            self._advanced_episodes.append(episode_id)

    async def advanced(self) -> list[str]:
        names, self._advanced_episodes = self._advanced_episodes, []
        if names:
            await self.flush()
        return names

    def _left_by_killed_writers(self) -> list[Path]:
        """Return the other partitions without a living writer that were written since `_discard_unpublished`."""
        return [
            path
            for path in sorted(self.database.path.parent.glob("turns-*.db"))
            if path.name != self.name
            and _log_state(path) != self._discarded_attempts.get(path.name)
            and find_writing_process(path.parent, path.with_suffix(".lock").name) is None
        ]

    def _discard_unpublished(self, partitions: Sequence[Path]) -> None:
        """Discard the unpublished commits that killed writers left (see `open_database_to_write`): their entries must
        not appear once an episode was taken over without them. A writer that lives did so when it opened its
        partition."""
        for path in partitions:
            open_database_to_write(path, "turns", {}, run=self._run).close()
            self._discarded_attempts[path.name] = _log_state(path)

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        return load_fork_prefix(self.database.path.parent, point)

    def append_partial(self, entry: JournalEntry) -> None:
        self._writer.put(self.database, ("partials", entry))
        self._record_progress(entry.episode_id)

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        self._writer.put(self.database, ("partials", (episode_id, attempt, call_id)))

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        return self._reader.partials(self.name, episode_id, attempt)

    def check(self) -> None:
        self._writer.check()

    async def close(self) -> None:
        self._reader.close()
        if self._lock is not None:
            try:
                await self._writer.close()
            finally:
                self._lock.release()


def _log_state(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a database's log; None if it has none."""
    try:
        status = path.with_name(path.name + "-wal").stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


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


class SqliteJournal(RunJournal):
    """The journal of a run in a directory."""

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
            super().__init__(path, open_database_to_read(path, "control"))
            self._clock = clock or NonDecreasingClock(self.newest_label())
            self._next_seq = self.next_seq()
        except BaseException:
            self._lock.release()
            raise
        self._database = WriterDatabase(path, connection, write_control_rows, order=1)
        self._writer = GroupCommitWriter("journal-writer")
        self._writer.add(self._database)
        self._turn_logs: dict[str, SqliteTurnLog] = {}
        self._turns = TurnLogReader(self.directory)
        self._learners = control_rows.learning_policies(self.info())

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

    def request_log(self) -> RequestLog:
        """Open the requests of the clients of a server, created if missing; once.

        Raises:
            JournalError: they are missing although clients have trained.
        """
        path = self.directory / REQUESTS_FILE
        if not path.exists() and self.rows("SELECT 1 FROM versions LIMIT 1"):
            raise JournalError(
                f"{path} is missing, and it contains the clients' sessions, models and results; restore it"
            )
        connection = open_database_to_write(path, "requests", {"run": self._run}, run=self._run)
        database = WriterDatabase(path, connection, write_request_rows, order=2)  # results name rows of the others
        self._writer.add(database)
        put = functools.partial(self._writer.put, database)
        return RequestLog(path, self._run, put=put, flush=self._writer.wait, clock=self._clock)

    def write(self, *records: ControlRecord) -> None:
        now = self._clock.wall()
        rows, self._next_seq = control_rows.encode_records(records, self._next_seq, now, self._learners)
        self._writer.put(self._database, *rows)

    async def commit(self, end: EpisodeEnd) -> None:
        self.record(end)
        await self._writer.wait(urgent=False)

    async def describe(self, **values: Any) -> None:
        """Add to the data that the journal was created with, or replace it, and wait until it is on disk."""
        info = {name: value for name, value in {**self.info(), **values}.items() if name not in ("format", "run")}
        self._writer.put(self._database, ("meta", ("info", msgspec.json.encode(info).decode())))
        self._learners = control_rows.learning_policies(info)
        await self._writer.wait()

    def record_start(self, start: RunStart) -> None:
        """Record a start of the run."""
        row = (f"{START_KEY}{start.lineage}", msgspec.json.encode(start).decode())
        self._writer.put(self._database, ("meta", row))

    async def prune(self, rule: PruneRule, *, should_stop: Callable[[], bool] = lambda: False) -> PruneTotals:
        """Remove the data that a rule allows, in a thread; see `journal.pruning`.

        Raises:
            JournalError: a database cannot be read.
            StorageError: writing failed.
        """
        loop = asyncio.get_running_loop()

        def record(attempts: Sequence[AttemptKey], files: Sequence[str]) -> None:
            records: list[ControlRecord] = [
                *(AttemptPruning(episode_id=name, attempt=number, rule=str(rule)) for name, number in attempts),
                *(FilePruning(file=name, rule=str(rule)) for name in files),
            ]
            asyncio.run_coroutine_threadsafe(self._record_and_flush(records), loop).result()

        def work() -> PruneTotals:
            with closing(SqliteRunLog(self.directory)) as log:
                return prune(self.directory, log, rule, record, should_stop=should_stop)

        return await asyncio.to_thread(work)

    async def _record_and_flush(self, records: Sequence[ControlRecord]) -> None:
        self.record(*records)
        await self.flush()

    async def flush(self) -> None:
        await self._writer.wait()

    async def close(self) -> None:
        for log in self._turn_logs.values():
            await log.close()
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

    async def read_attempts(self, attempts: Sequence[tuple[EpisodeSpec, int]]) -> list[list[JournalEntry]]:
        def read() -> list[list[JournalEntry]]:
            with closing(TurnLogReader(self.directory)) as reader:
                entry_lists = []
                for spec, attempt in attempts:
                    inherited = [] if spec.fork is None else load_fork_prefix(self.directory, spec.fork)
                    partition = reader.partition_of(spec.episode_id, attempt)
                    entries = [] if partition is None else reader.read(partition, spec.episode_id, attempt)
                    entry_lists.append([*inherited, *entries])
                return entry_lists

        return await asyncio.to_thread(read)


# --- group commit: the writer thread of a process ---------------------------------------------------------------------


class CommitWaiter(NamedTuple):
    """A caller that waits for a round, and its event loop."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


WriteRows = Callable[[sqlite3.Connection, str, list[Any]], None]
"""Writes the queued items of a table inside the round's transaction; called in the writer's thread."""


class WriterDatabase:
    """A write connection, the function that writes queued rows to its tables, and its place in the commit order."""

    def __init__(self, path: Path, connection: sqlite3.Connection, write: WriteRows, *, order: int) -> None:
        self.path = path.absolute()
        self.connection = connection
        self.write = write
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
        self._queue: deque[tuple[WriterDatabase, Sequence[tuple[str, Any]]] | CommitWaiter] = deque()
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

    def put(self, database: WriterDatabase, *rows: tuple[str, Any]) -> None:
        """Queue rows, each with its table, to be written in one transaction."""
        self._queue.append((database, rows))

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
            raise StorageError("the journal is closed and cannot be written to")
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
        """Write the queue, close the databases, end the thread. Idempotent.

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
                for database in sorted(rows, key=lambda database: database.order):
                    self._failure = self._commit(database, rows[database])
                    if self._failure is not None:
                        break
        except BaseException as error:
            self._failure = f"the journal's writer failed: {type(error).__name__}: {error}; this is a bug of agentrl"
            raise
        finally:  # wake all waiters, even after an error
            self._resolve(waiters)

    def _resolve(self, waiters: Sequence[CommitWaiter]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for loop, future in waiters:
            by_loop.setdefault(loop, []).append(future)
        for loop, futures in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, futures, self._failure)

    def _take(self) -> tuple[dict[WriterDatabase, dict[str, list[Any]]], list[CommitWaiter]]:
        rows: defaultdict[WriterDatabase, dict[str, list[Any]]] = defaultdict(dict)
        waiters: list[CommitWaiter] = []
        queue = self._queue
        for _ in range(len(queue)):
            queue_item = queue.popleft()
            if isinstance(queue_item, CommitWaiter):
                waiters.append(queue_item)
                continue
            database, items = queue_item
            for table, item in items:
                rows[database].setdefault(table, []).append(item)
        return rows, waiters

    def _commit(self, database: WriterDatabase, rows: dict[str, list[Any]]) -> str | None:
        """Commit one transaction; returns the reason if it failed."""
        connection = database.connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for table, items in rows.items():
                database.write(connection, table, items)
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


def write_control_rows(connection: sqlite3.Connection, table: str, items: list[Sequence[Any]]) -> None:
    """Insert rows into a table of the control log. A row is written once: of two with the same key the first stays.
    The run's own data may be replaced, and the versions to which an admission is pinned."""
    names = control_rows.COLUMNS[table].split()
    if table in control_rows.CHECKED_TABLES:
        names = [*names, "checksum"]
        items = [control_rows.with_checksum(table, item) for item in items]
    verb = {"metrics": "INSERT", "meta": "REPLACE", "admissions": "REPLACE"}.get(table, "INSERT OR IGNORE")
    before = connection.total_changes
    insert_rows(connection, f"{verb} INTO {table} ({', '.join(names)}) VALUES ", len(names), items)
    if connection.total_changes - before < len(items) and table in control_rows.NUMBERED_TABLES:
        written = {seq for (seq,) in connection.execute(f"SELECT seq FROM {table}")}
        ignored: list[Sequence[Any]] = [
            (f"{control_rows.IGNORED_KEY}{item[-2]}", table) for item in items if item[-2] not in written
        ]
        write_control_rows(connection, "meta", ignored)


def write_turn_rows(connection: sqlite3.Connection, table: str, items: list[JournalEntry | PartialKey]) -> None:
    """Insert entries or partials, then remove the partials of the queued keys; partials that are removed in the round
    in which they were queued never reach the disk."""
    removed_keys = {item for item in items if isinstance(item, tuple)}
    rows = [
        (
            *(item.episode_id, item.attempt, item.call_id, item.request_hash, item.body),
            entry_checksum(item.episode_id, item.attempt, item.call_id, item.request_hash, item.body),
        )
        for item in items
        if not isinstance(item, tuple) and (item.episode_id, item.attempt, item.call_id) not in removed_keys
    ]
    insert_rows(connection, f"INSERT INTO {table} (episode, attempt, call, asked, body, checksum) VALUES ", 6, rows)
    for episode_id, attempt, call_id in removed_keys:
        condition, key = "episode = ? AND attempt = ?", (episode_id, attempt)
        if call_id is None:
            connection.execute(f"DELETE FROM {table} WHERE {condition}", key)
        else:
            connection.execute(f"DELETE FROM {table} WHERE {condition} AND call = ?", (*key, call_id))


def insert_rows(connection: sqlite3.Connection, insert: str, width: int, rows: Sequence[Sequence[Any]]) -> None:
    """Insert rows of `width` columns; `insert` is `INSERT … VALUES `, without the placeholders."""
    placeholders = "(" + ",".join("?" * width) + ")"
    num_chunked = len(rows) - len(rows) % _CHUNK
    if num_chunked:
        statement = insert + ",".join([placeholders] * _CHUNK)
        for start in range(0, num_chunked, _CHUNK):
            connection.execute(statement, [value for row in rows[start : start + _CHUNK] for value in row])
    remainder = rows[num_chunked:]
    size = 1
    while remainder:  # batches are powers of two, so that few distinct statements are prepared
        if len(remainder) & size:
            statement = insert + ",".join([placeholders] * size)
            connection.execute(statement, [value for row in remainder[:size] for value in row])
            remainder = remainder[size:]
        size *= 2


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _resolve(futures: Sequence[asyncio.Future[None]], failure: str | None) -> None:
    for future in futures:
        if not future.done():
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(StorageError(failure))
