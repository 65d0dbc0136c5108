"""The requests of a server's clients and their results, in a database of the run's journal, `requests.db`.

A request is on disk before its client is told that it was accepted, and its result before the client can see it. So a
process that was killed answers for every accepted request: it reads back the results, and executes the others again.
Rows are written once. The bodies are the clients' own bytes: JSON, or protocol buffers.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.core.errors import JournalError
from agentrl.journal.schema import all_rows, open_database_to_read

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

    from agentrl.core.clock import Clock

REQUESTS_FILE = "requests.db"
_ENCODER = msgspec.msgpack.Encoder()


class ClientRequest(NamedTuple):
    """An accepted request."""

    id: str
    """Id of the request, the same for every repetition of it."""
    route: str
    subject: str
    """Id of what the request acts on, such as a model; requests on one subject are executed by their sequence."""
    sequence: int
    body: bytes
    received_at: float = 0.0
    """Wall-clock time of the acceptance, written by the log."""


class RequestResult(NamedTuple):
    """The answer to a request."""

    id: str
    kind: str
    """`json`, `protobuf`, or `error`: a JSON object with the sentence."""
    body: bytes
    finished_at: float = 0.0
    """Wall-clock time of the result, written by the log."""


class RequestLog:
    """Writes and reads the requests of a run; `SqliteJournal.request_log` makes one.

    Args:
        path: the database.
        run: id of the run.
        put: queues rows, each with its table, to be written in one transaction.
        flush: waits until everything queued is on disk.
        clock: clock of the labels.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        *,
        put: Callable[..., None],
        flush: Callable[[], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._path = path
        self._put = put
        self._flush = flush
        self._clock = clock
        self._reader = open_database_to_read(path, "requests", run)
        self._reading = threading.Lock()
        """Held while a statement reads: one that begins within another, in another thread, sees what the database held
        when that began, and so not the newest request."""

    def receive(self, request: ClientRequest) -> None:
        """Queue an accepted request."""
        self._put(("requests", request._replace(received_at=self._clock.wall())))

    def record(self, request: ClientRequest, result: RequestResult) -> None:
        """Queue a request with its result; both reach the disk, or neither."""
        now = self._clock.wall()
        rows = (("requests", request._replace(received_at=now)), ("results", result._replace(finished_at=now)))
        self._put(*rows)

    def finish(self, result: RequestResult) -> None:
        """Queue a result."""
        self._put(("results", result._replace(finished_at=self._clock.wall())))

    async def flush(self) -> None:
        """Wait until everything queued is on disk.

        Raises:
            StorageError: writing failed.
        """
        await self._flush()

    def requests(self, *routes: str) -> Iterator[ClientRequest]:
        """Yield the requests of some routes on disk, in the order in which they were accepted.

        Raises:
            JournalError: a row is damaged.
        """
        marks = ", ".join("?" * len(routes))
        statement = f"SELECT id FROM requests WHERE route IN ({marks}) ORDER BY number"
        yield from self._read(self._rows(statement, *routes))

    def finished(self, *routes: str) -> Iterator[tuple[ClientRequest, RequestResult]]:
        """Yield the finished requests of some routes with their results, in the order in which they finished.

        Raises:
            JournalError: a row is damaged.
        """
        marks = ", ".join("?" * len(routes))
        statement = f"SELECT q.id FROM requests q JOIN results r ON r.id = q.id WHERE q.route IN ({marks})"
        for request in self._read(self._rows(f"{statement} ORDER BY r.rowid", *routes)):
            result = self.result(request.id)
            assert result is not None
            yield request, result

    def of_subject(self, subject: str, after: int) -> Iterator[ClientRequest]:
        """Yield the requests on a subject with a larger sequence number than `after`, by that number.

        Raises:
            JournalError: a row is damaged.
        """
        statement = "SELECT id FROM requests WHERE subject = ? AND sequence > ? ORDER BY sequence"
        yield from self._read(self._rows(statement, subject, after))

    def unfinished(self) -> Iterator[ClientRequest]:
        """Yield the requests without a result, in the order in which they were accepted.

        Raises:
            JournalError: a row is damaged.
        """
        statement = "SELECT id FROM requests q WHERE NOT EXISTS (SELECT 1 FROM results r WHERE r.id = q.id)"
        yield from self._read(self._rows(f"{statement} ORDER BY number"))

    def _read(self, ids: Iterable[tuple[str]]) -> Iterator[ClientRequest]:
        for (request_id,) in ids:
            request = self.request(request_id)
            assert request is not None
            yield request

    def request(self, request_id: str) -> ClientRequest | None:
        """Return a request on disk; None if there is none.

        Raises:
            JournalError: the row is damaged.
        """
        rows = self._rows(f"{_SELECT_REQUEST} WHERE id = ?", request_id)
        return ClientRequest(*self._verified("requests", rows[0])) if rows else None

    def last_received(self, subject: str) -> float:
        """Return the wall-clock time of the last request on a subject."""
        newest = "(SELECT max(number) FROM requests WHERE subject = ?)"  # by the index, without reading bodies
        statement = f"SELECT received_at FROM requests WHERE number = {newest}"
        ((at,),) = self._rows(statement, subject)
        return float(at)

    def finished_through(self, subject: str) -> int:
        """Return the largest sequence number of a finished request on a subject; -1 without one."""
        statement = (
            "SELECT coalesce(max(sequence), -1) FROM requests q WHERE subject = ? AND route NOT IN"
            " ('delete_checkpoint', 'set_checkpoint_ttl') AND EXISTS (SELECT 1 FROM results r WHERE r.id = q.id)"
        )
        ((number,),) = self._rows(statement, subject)
        return int(number)

    def result(self, request_id: str) -> RequestResult | None:
        """Return a result on disk; None if there is none.

        Raises:
            JournalError: the row is damaged.
        """
        statement = "SELECT id, kind, body, finished_at, checksum FROM results WHERE id = ?"
        rows = self._rows(statement, request_id)
        return RequestResult(*self._verified("results", rows[0])) if rows else None

    def close(self) -> None:
        """Close the connection that reads."""
        self._reader.close()

    def _rows(self, statement: str, *parameters: Any) -> list[Any]:
        with self._reading:
            return all_rows(self._reader, self._path, statement, *parameters)

    def _verified(self, table: str, row: Any) -> Any:
        """Return a row without its checksum."""
        *values, checksum = row
        if _checksum(table, values) != checksum:
            raise JournalError(
                f"{self._path}: the row of {str(row[0])[:100]!r} in `{table}` does not match its checksum; restore the "
                "file from a copy"
            )
        return values


_SELECT_REQUEST = "SELECT id, route, subject, sequence, body, received_at, checksum FROM requests"


def write_request_rows(connection: sqlite3.Connection, table: str, items: list[tuple[Any, ...]]) -> None:
    """Insert requests or results; of two with one id the first stays."""
    names = {
        "requests": "id, route, subject, sequence, body, received_at",
        "results": "id, kind, body, finished_at",
    }[table]
    marks = ", ".join("?" * (names.count(",") + 2))
    connection.executemany(
        f"INSERT OR IGNORE INTO {table} ({names}, checksum) VALUES ({marks})",
        [(*item, _checksum(table, item)) for item in items],
    )


def _checksum(table: str, values: Any) -> int:
    return zlib.crc32(_ENCODER.encode(list(values)), zlib.crc32(table.encode()))
