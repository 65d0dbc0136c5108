"""Group commit: one thread per process writes all rows that were queued since its last round.

Owns: the write connections and the thread. Callers only append to a deque, which never blocks. A round takes all queued
rows, writes the turn partitions and syncs them, then the control log and syncs it, then resolves the waiters; so a
control row is never on disk before the entries it names, and waiters share their syncs. A round may begin between any
two calls: the rows of one `put` reach the disk together or not at all, those of two may not. A failed round rolls back,
fails its waiters and every later one: nothing after it is ever written. Rows go in by multi-row INSERTs: sqlite3
releases the interpreter lock at every statement, and regaining it from a busy event loop can take milliseconds.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from agentrl.core.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

FLUSH_SECONDS = 0.2
"""Seconds that a queued row waits for a round at most, if no caller waits for it."""
LINGER_SECONDS = 0.004
"""Seconds that a round waits for more rows once a caller waits for it."""
_CHUNK = 32
"""Maximum number of rows in one INSERT."""

Row = Sequence[Any]


class Waiter(NamedTuple):
    """A caller that waits for a round, and its event loop."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class Target(Protocol):
    """A table of a database, with the conversion of queued items to rows."""

    database: Database

    def write(self, connection: sqlite3.Connection, items: list[Any]) -> None:
        """Insert queued items into the table, inside the round's transaction; called in the writer thread."""
        ...


class Database:
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
        self._queue: deque[Sequence[tuple[Target, Any]] | Waiter] = deque()
        self._urgent = threading.Event()
        self._closing = threading.Event()
        self._failure: str | None = None
        self._failure_seen = False
        self._databases: list[Database] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, database: Database) -> None:
        """Add a database; only the thread uses and closes its connection."""
        self._databases.append(database)

    def put(self, *rows: tuple[Target, Any]) -> None:
        """Queue rows; those of one database are written in one transaction."""
        self._queue.append(rows)

    def check(self) -> None:
        """Check whether a write has failed, without waiting.

        Raises:
            StorageError: a write failed; nothing queued since the last success counts as written.
        """
        if self._failure is not None:
            raise self._error()

    async def wait(self) -> None:
        """Wait until everything queued before this call is on disk.

        Raises:
            StorageError: a write failed, now or before; nothing queued since the last success counts as written.
        """
        self.check()
        if self._closing.is_set():
            raise StorageError("the journal is closed; nothing can be written to it any more")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._queue.append(Waiter(loop, future))
        if not self._urgent.is_set():  # setting takes a lock, and a thousand callers may wait for the same round
            self._urgent.set()
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
                if self._urgent.wait(FLUSH_SECONDS):
                    self._closing.wait(LINGER_SECONDS)
                self._urgent.clear()
                closing = self._closing.is_set()
                self._round()
        finally:
            if not self._closing.is_set() and self._failure is None:
                self._failure = "the journal's writer thread ended unexpectedly; this is a bug of agentrl"
            self._round()
            for database in self._databases:
                database.connection.close()

    def _round(self) -> None:
        rows, waiters = self._take()
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

    def _resolve(self, waiters: Sequence[Waiter]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for loop, future in waiters:
            by_loop.setdefault(loop, []).append(future)
        for loop, futures in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, futures, self._failure)

    def _take(self) -> tuple[dict[Target, list[Any]], list[Waiter]]:
        rows: defaultdict[Target, list[Any]] = defaultdict(list)
        waiters: list[Waiter] = []
        queue = self._queue
        for _ in range(len(queue)):
            queued = queue.popleft()
            if isinstance(queued, Waiter):
                waiters.append(queued)
                continue
            for target, item in queued:
                rows[target].append(item)
        return rows, waiters

    def _commit(self, database: Database, rows: dict[Target, list[Any]]) -> str | None:
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
