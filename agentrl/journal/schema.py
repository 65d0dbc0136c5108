"""The three kinds of databases: their tables, and functions to open and read them.

Invariants: a database this module opens has exactly the tables below, byte for byte, in this format, or opening it is a
`JournalError`; so a hostile file cannot bring a view, trigger or virtual table. Neither the file nor its directory may
be a symbolic link. Nothing needs a newer SQLite than 3.40.
"""

from __future__ import annotations

import functools
import os
import re
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from agentrl.core.errors import JournalError, StorageError
from agentrl.core.files import LOCAL, refuse_links
from agentrl.journal.entries import FORMAT, LAST_READERS

if TYPE_CHECKING:
    from pathlib import Path

Kind = Literal["control", "turns", "requests"]

CONTROL_FILE = "control.db"
MAX_VALUE_BYTES = 64 << 20
"""Maximum size in bytes of a text or blob, written or read."""
BUSY_MS = 5000
"""Milliseconds to wait for the lock of another process."""
DAMAGE = (sqlite3.Error, UnicodeDecodeError)
"""Errors of reading a damaged database; the second if SQLite's own message quotes invalid text."""

_META = "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"

_TURNS = (
    _META,
    "CREATE TABLE entries (id INTEGER PRIMARY KEY, episode TEXT NOT NULL, attempt INTEGER NOT NULL, call TEXT NOT NULL,"
    " asked BLOB NOT NULL, body BLOB NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE INDEX entries_by_episode ON entries (episode)",
    "CREATE TABLE partials (id INTEGER PRIMARY KEY, episode TEXT NOT NULL, attempt INTEGER NOT NULL,"
    " call TEXT NOT NULL, asked BLOB NOT NULL, body BLOB NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE INDEX partials_by_call ON partials (episode, attempt, call)",
)

_REQUESTS = (
    _META,
    "CREATE TABLE requests (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, route TEXT NOT NULL,"
    " subject TEXT NOT NULL, sequence INTEGER NOT NULL, body BLOB NOT NULL,"
    " received_at REAL NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE INDEX requests_by_subject ON requests (subject, sequence)",
    "CREATE TABLE results (id TEXT PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL, finished_at REAL NOT NULL,"
    " checksum INTEGER NOT NULL)",
)

_CONTROL = (
    _META,
    "CREATE TABLE admissions (episode TEXT NOT NULL, attempt INTEGER NOT NULL, purpose TEXT NOT NULL,"
    " environment TEXT NOT NULL, task TEXT NOT NULL, data TEXT NOT NULL, parent TEXT, group_id TEXT NOT NULL,"
    " spec BLOB NOT NULL, admitted_at REAL NOT NULL, seq INTEGER NOT NULL, checksum INTEGER NOT NULL,"
    " PRIMARY KEY (episode, attempt)) WITHOUT ROWID",
    "CREATE TABLE episodes (episode TEXT NOT NULL, attempt INTEGER NOT NULL, purpose TEXT NOT NULL,"
    " environment TEXT NOT NULL, task TEXT NOT NULL, parent TEXT, group_id TEXT NOT NULL, seats TEXT NOT NULL,"
    " policies TEXT NOT NULL, oldest_step INTEGER, lineage INTEGER, reward REAL, stop_reason TEXT, drop_reason TEXT,"
    " turns INTEGER NOT NULL, tokens INTEGER NOT NULL, seconds REAL NOT NULL, partition TEXT, entries INTEGER,"
    " digest BLOB NOT NULL, metrics TEXT NOT NULL, detail TEXT NOT NULL, committed_at REAL NOT NULL,"
    " measured_against TEXT, counts TEXT, seq INTEGER NOT NULL, checksum INTEGER NOT NULL,"
    " PRIMARY KEY (episode, attempt)) WITHOUT ROWID",
    "CREATE TABLE trajectories (episode TEXT NOT NULL, attempt INTEGER NOT NULL, seat TEXT NOT NULL,"
    " agent INTEGER NOT NULL, policy TEXT NOT NULL, reward REAL, tokens INTEGER NOT NULL, oldest_step INTEGER NOT NULL,"
    " lineage INTEGER NOT NULL, turn_rewards TEXT, named_rewards TEXT, turn_states BLOB,"
    " checksum INTEGER NOT NULL, PRIMARY KEY (episode, attempt, seat, agent)) WITHOUT ROWID",
    "CREATE TABLE unit_drops (episode TEXT NOT NULL, attempt INTEGER NOT NULL, policy TEXT NOT NULL,"
    " reason TEXT NOT NULL, dropped_at REAL NOT NULL, seq INTEGER NOT NULL, checksum INTEGER NOT NULL,"
    " PRIMARY KEY (episode, attempt, policy)) WITHOUT ROWID",
    "CREATE TABLE evaluations (first INTEGER NOT NULL, began_lineage INTEGER NOT NULL, versions TEXT NOT NULL,"
    " tasks INTEGER NOT NULL, seq INTEGER NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (first)) WITHOUT ROWID",
    "CREATE TABLE evaluation_ends (first INTEGER NOT NULL, seq INTEGER NOT NULL, checksum INTEGER NOT NULL,"
    " PRIMARY KEY (first)) WITHOUT ROWID",
    "CREATE TABLE proposals (number INTEGER NOT NULL, episode TEXT NOT NULL, attempt INTEGER NOT NULL,"
    " call TEXT NOT NULL, environment TEXT NOT NULL, key TEXT NOT NULL, structure TEXT NOT NULL,"
    " seq INTEGER NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (episode, attempt, call)) WITHOUT ROWID",
    "CREATE INDEX proposals_by_number ON proposals (number)",
    "CREATE TABLE baselines (group_id TEXT NOT NULL, finishers TEXT NOT NULL, earlier TEXT NOT NULL,"
    " seq INTEGER NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (group_id)) WITHOUT ROWID",
    "CREATE TABLE group_scores (group_id TEXT NOT NULL, scorer TEXT NOT NULL, weight REAL, scores TEXT NOT NULL,"
    " note TEXT NOT NULL, seconds REAL NOT NULL, seq INTEGER NOT NULL, checksum INTEGER NOT NULL,"
    " PRIMARY KEY (group_id, scorer)) WITHOUT ROWID",
    "CREATE TABLE versions (policy TEXT NOT NULL, lineage INTEGER NOT NULL, step INTEGER NOT NULL,"
    " parent_lineage INTEGER, parent_step INTEGER, path TEXT NOT NULL, kind TEXT NOT NULL, sha256 TEXT NOT NULL,"
    " published_at REAL NOT NULL, seq INTEGER NOT NULL, checksum INTEGER NOT NULL,"
    " PRIMARY KEY (policy, lineage, step)) WITHOUT ROWID",
    "CREATE TABLE steps (policy TEXT NOT NULL, lineage INTEGER NOT NULL, step INTEGER NOT NULL,"
    " started_lineage INTEGER NOT NULL, started_step INTEGER NOT NULL, loss REAL, grad_norm REAL,"
    " fed INTEGER NOT NULL, samples INTEGER NOT NULL, tokens INTEGER NOT NULL, seconds REAL NOT NULL,"
    " normaliser REAL NOT NULL,"
    " input_digest TEXT NOT NULL, columns_file TEXT, metrics TEXT NOT NULL, stepped_at REAL NOT NULL,"
    " seq INTEGER NOT NULL, checksum INTEGER NOT NULL,"
    " PRIMARY KEY (policy, lineage, step)) WITHOUT ROWID",
    "CREATE TABLE step_units (policy TEXT NOT NULL, lineage INTEGER NOT NULL, step INTEGER NOT NULL,"
    " position INTEGER NOT NULL, episode TEXT NOT NULL, attempt INTEGER NOT NULL, seat TEXT NOT NULL,"
    " agent INTEGER NOT NULL, reward REAL, advantage REAL, baseline REAL, turn_advantages TEXT,"
    " checksum INTEGER NOT NULL,"
    " PRIMARY KEY (policy, lineage, step, position)) WITHOUT ROWID",
    "CREATE INDEX step_units_by_episode ON step_units (episode)",
    "CREATE TABLE pruned (episode TEXT NOT NULL, attempt INTEGER NOT NULL, rule TEXT NOT NULL, pruned_at REAL NOT NULL,"
    " checksum INTEGER NOT NULL, PRIMARY KEY (episode, attempt)) WITHOUT ROWID",
    "CREATE TABLE pruned_files (file TEXT NOT NULL, rule TEXT NOT NULL, pruned_at REAL NOT NULL,"
    " checksum INTEGER NOT NULL, PRIMARY KEY (file)) WITHOUT ROWID",
    "CREATE TABLE metrics (id INTEGER PRIMARY KEY, policy TEXT NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL,"
    " value REAL, recorded_at REAL NOT NULL)",
    "CREATE INDEX metrics_by_name ON metrics (name, step)",
    "CREATE VIEW units AS SELECT DISTINCT t.policy, t.episode, t.attempt, s.lineage AS consumed_lineage,"
    " s.step AS consumed_step, d.reason AS drop_reason FROM trajectories t"
    " LEFT JOIN step_units s ON s.episode = t.episode AND s.attempt = t.attempt AND s.policy = t.policy"
    " LEFT JOIN unit_drops d ON d.episode = t.episode AND d.attempt = t.attempt AND d.policy = t.policy",
)

_TYPES = {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}

_STATEMENTS: dict[Kind, tuple[str, ...]] = {"control": _CONTROL, "turns": _TURNS, "requests": _REQUESTS}


def column_types(table: str) -> tuple[frozenset[type], ...]:
    """Return the types that values of each column of a control table have in Python."""
    (statement,) = (text for text in _CONTROL if text.startswith(f"CREATE TABLE {table} "))
    columns = re.findall(r"(\w+) (INTEGER|REAL|TEXT|BLOB)( NOT NULL)?", statement)
    return tuple(frozenset({_TYPES[kind]} if needed else {_TYPES[kind], type(None)}) for _, kind, needed in columns)


def private_directory(directory: Path) -> None:
    """Make `directory` for its owner alone (0700) if it is missing, durably.

    Raises:
        JournalError: the directory is a symbolic link.
        StorageError: the directory cannot be created.
    """
    refuse_links(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        LOCAL.sync(directory.parent)
    except OSError as error:
        raise StorageError(
            f"{directory}: cannot be created ({error.strerror}); choose another run directory"
        ) from error


def open_database_to_write(
    path: Path, kind: Kind, identity: dict[str, str], *, run: str | None = None
) -> sqlite3.Connection:
    """Open a database, creating it with `identity` in its meta table if it is missing.

    Discards a commit that a killed writer wrote to the log without publishing it in the log's index. Such a commit is
    hidden while anybody has the database open, and SQLite finds it again once all have closed it: then others may have
    continued without it.

    Raises:
        JournalError: the file is damaged, a symbolic link, of another format, or of another run than `run`, if that is
            given.
        StorageError: the file cannot be opened or created.
    """
    refuse_links(path.parent, *_files(path))
    try:
        if not path.exists():
            _make(path, kind, {"format": str(FORMAT), "kind": kind, **identity})
        connection = _connect_to_write(path)
    except (OSError, sqlite3.Error) as error:
        raise _write_error(path, error) from error
    try:
        _harden(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 2000")
        _check(connection, path, kind, run)
        _discard_unpublished_commit(connection, path)
    except DAMAGE as error:
        connection.close()
        raise database_error(path, error) from error
    except (JournalError, StorageError):
        connection.close()
        raise
    return connection


def open_database_to_read(path: Path, kind: Kind, run: str | None = None) -> sqlite3.Connection:
    """Open a database read-only, also while another process writes it; file and content are treated as hostile.

    Raises:
        JournalError: the file is missing, damaged, a symbolic link, of another format, or of another run than `run`.
    """
    refuse_links(path.parent, *_files(path))
    if not path.is_file():
        raise JournalError(f"{path}: there is no such file; is this the directory of a run?")
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    wal = path.with_name(path.name + "-wal")
    try:
        connection = _connect_to_read(uri)
    except sqlite3.OperationalError as error:
        if wal.exists() and wal.stat().st_size:
            if os.access(path, os.R_OK) and not os.access(path.parent, os.W_OK):
                raise JournalError(
                    f"{path}: cannot be read here: its newest records are in {wal.name}, which SQLite reads only in a "
                    "directory that can be written to; copy the run to one"
                ) from error
            raise database_error(path, error) from error
        try:  # the directory is read-only and the log is empty, so the file alone is the whole database
            connection = _connect_to_read(uri + "&immutable=1")
        except DAMAGE as second:
            raise database_error(path, second) from second
    except DAMAGE as error:
        raise database_error(path, error) from error
    try:
        _check(connection, path, kind, run)
    except DAMAGE as error:
        connection.close()
        raise database_error(path, error) from error
    except JournalError:
        connection.close()
        raise
    return connection


def open_database_in_memory(kind: Kind) -> sqlite3.Connection:
    """Open an empty database in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.deserialize(_empty_database(kind))
    _harden(connection)
    return connection


@functools.cache
def control_columns(table: str) -> tuple[str, ...]:
    """Return the names of the columns of a table of the control log."""
    with closing(open_database_in_memory("control")) as connection:
        return tuple(name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})"))


@functools.cache
def _empty_database(kind: Kind) -> bytes:
    """Return the file of an empty database: copying it takes a twentieth of the time of creating its tables."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for statement in _STATEMENTS[kind]:
            connection.execute(statement)
        return connection.serialize()


def _discard_unpublished_commit(connection: sqlite3.Connection, path: Path) -> None:
    """Write a commit in the place of one that a killed writer left; see `open_database_to_write`."""
    try:
        connection.execute("PRAGMA user_version = 0")  # it changes nothing, and is written all the same
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            return  # a living writer's commit takes that place
        raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError | sqlite3.Error) -> StorageError:
    return StorageError(
        f"{path}: cannot be opened to write ({error}); check its owner, the free space and the disk. Then "
        "resume the run with --resume"
    )


def read_meta_table(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the meta table: format, kind, run, and the data that the run was created with."""
    return dict(connection.execute("SELECT key, value FROM meta"))


def _files(path: Path) -> list[Path]:
    """Return the files of a database: the main file, and those that SQLite adds."""
    return [path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")]


def _connect_to_read(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    try:
        _harden(connection)
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except DAMAGE:
        connection.close()
        raise
    return connection


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")  # the row's checksum detects damaged text; a query must not fail on it


def _harden(connection: sqlite3.Connection) -> None:
    connection.text_factory = _text
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES + (1 << 16))
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)


def _connect_to_write(path: Path) -> sqlite3.Connection:
    """Open a database that exists. Nothing but SQLite may open and close its file: that would drop the locks of this
    process's other connections to it."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


def _make(path: Path, kind: Kind, values: dict[str, str]) -> None:
    """Create a database under another name, then rename it: a kill leaves a complete database or none."""
    partial = path.with_name(f".{path.name}.new")
    for leftover in (partial, *(partial.with_name(partial.name + end) for end in ("-wal", "-shm"))):
        leftover.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = _connect_to_write(partial)
    try:
        _harden(connection)
        # Lets pruning return space; must be set before any table is created.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in _STATEMENTS[kind]:
            connection.execute(statement)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", list(values.items()))
        connection.execute("COMMIT")
    finally:
        connection.close()  # closing merges the write-ahead log into the file and syncs it
    partial.rename(path)
    LOCAL.sync(path.parent)


def _check(connection: sqlite3.Connection, path: Path, kind: Kind, run: str | None) -> None:
    schema = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if _META not in schema:
        raise JournalError(f"{path}: not a journal of agentrl")
    values = read_meta_table(connection)
    written = values.get("format", "")
    if written != str(FORMAT):
        newer = written.isdecimal() and int(written[:9]) > FORMAT
        remedy = "install a newer version of agentrl" if newer else "use the version of agentrl that wrote it"
        if written in LAST_READERS:
            remedy = f"use agentrl at {LAST_READERS[written]}, the last that reads that format,"
        raise JournalError(
            f"{path}: journal format {written!r}, but this version of agentrl reads format {FORMAT}; "
            f"{remedy} to read it"
        )
    if schema != set(_STATEMENTS[kind]) or values.get("kind") != kind:
        raise JournalError(
            f"{path}: the tables are not those of a {kind} database of format {FORMAT}; the file was altered or is "
            "damaged"
        )
    if run is not None and values.get("run") != run:
        raise JournalError(
            f"{path}: belongs to run {values.get('run')!r}, not to {run!r}; files of two runs were mixed"
        )


def database_error(
    path: Path, error: sqlite3.Error | UnicodeDecodeError, *, damage: type[JournalError] = JournalError
) -> JournalError:
    """Make the error of a failure to read `path`; it is `damage` if neither the disk nor a permission caused the
    failure."""
    if path.exists() and not os.access(path, os.R_OK):  # SQLite does not report missing permissions
        return JournalError(f"{path}: cannot be read (Permission denied); let your user read it")
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        # Readers need disk space too, for the index of the write-ahead log.
        return JournalError(f"{path}: the disk failed ({error}); free space or repair the disk, then try again")
    return damage(f"{path}: cannot be read ({error}); it is damaged, or not a database of agentrl")


def all_rows(connection: sqlite3.Connection, path: Path, statement: str, *parameters: Any) -> list[Any]:
    """Return all rows of a query; raise `JournalError` if the file is damaged."""
    for text_factory in (str, _text):  # the first is faster, and fails for damaged text
        connection.text_factory = text_factory
        try:
            return connection.execute(statement, parameters).fetchall()
        except DAMAGE as error:
            failure = error
        finally:
            connection.text_factory = _text
    raise database_error(path, failure) from failure
