"""Full-text search over messages, tool calls and observations, in an index that each search brings up to date.

Owns `search.db` in the run's directory: built from the turn partitions, and rebuilt if its schema is out of date. It
holds words, not text, and returns only ids of episodes. A row of the index is an entry; its number combines the
episode's and its own. Needs FTS5 in Python's SQLite, from version 3.40 on.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import InputError, JournalError
from agentrl.journal.entries import (
    BeginEntry,
    EffectEntry,
    EntryBody,
    JournalEntry,
    NondeterministicValueEntry,
    ResourceCallEntry,
    ToolEntry,
    TurnEntry,
)
from agentrl.journal.reader import verified_entry
from agentrl.journal.schema import DAMAGE, open_database_to_read

if TYPE_CHECKING:
    from agentrl.inspection.reader import RunReader

FILE = "search.db"
MAX_TEXT = 100_000
"""Maximum characters of one entry that are indexed."""
_SHIFT = 20
_TABLES = (
    "CREATE TABLE partitions (name TEXT PRIMARY KEY, indexed INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE episodes (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, entries INTEGER NOT NULL)",
    "CREATE VIRTUAL TABLE words USING fts5(text, content='', columnsize=0)",
)


def episodes_with_words(reader: RunReader, text: str) -> set[str]:
    """Find the episodes, as `EPISODE.ATTEMPT`, with an act that contains all the words; words `"in quotes"` in
    sequence.

    Raises:
        InputError: the text has no words, or the index cannot be created here.
        JournalError: a partition cannot be read.
    """
    question = _question(text)
    connection = _open(reader.path / FILE)
    try:
        _bring_up_to_date(connection, reader.journal)
        statement = (
            f"SELECT name FROM episodes WHERE number IN (SELECT rowid >> {_SHIFT} FROM words WHERE words MATCH ?)"
        )
        return {name for (name,) in connection.execute(statement, (question,))}
    except DAMAGE as error:
        raise InputError(
            f"{reader.path / FILE}: the index cannot be read ({error}); remove it and search again"
        ) from error
    finally:
        connection.close()


def _question(text: str) -> str:
    """Split a text into words and quoted phrases, none of them an operator."""
    terms = []
    for number, part in enumerate(text.split('"')):
        terms += [part] if number % 2 else part.split()
    phrases = ['"' + term.replace("\0", " ") + '"' for term in terms if any(map(str.isalnum, term))]
    if not phrases:
        raise InputError("--match: give words to search for")
    return " ".join(phrases)


def _open(path: Path) -> sqlite3.Connection:
    """Open the index; rebuild it if it is absent or out of date."""
    if path.is_symlink():
        raise InputError(f"{path}: a symbolic link, which is not followed; remove it and search again")
    for attempt in range(2):
        connection = None
        try:
            connection = sqlite3.connect(path, isolation_level=None)
            connection.execute("PRAGMA trusted_schema = OFF")
            if _schema(connection) == _expected():
                return connection
            if not _schema(connection):
                connection.execute("PRAGMA synchronous = OFF")  # the index can be rebuilt at any time
                for statement in _TABLES:
                    connection.execute(statement)
                return connection
            connection.close()
        except DAMAGE as error:
            if connection is not None:
                connection.close()
            if attempt or "readonly" in str(error) or "unable to open" in str(error):
                raise InputError(
                    f"{path}: the search index cannot be created ({error}); copy the run to a directory that you may "
                    "write"
                ) from error
        path.unlink(missing_ok=True)
    raise InputError(f"{path}: the search index cannot be created; remove the file")


def _schema(connection: sqlite3.Connection) -> set[str]:
    return {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}


def _expected() -> set[str]:
    """Return the schema of the tables above, including FTS5's.

    Raises:
        InputError: this SQLite has no FTS5.
    """
    connection = sqlite3.connect(":memory:")
    try:
        for statement in _TABLES:
            connection.execute(statement)
        return _schema(connection)
    except sqlite3.OperationalError as error:
        raise InputError(
            f"--match needs SQLite with FTS5, and this Python's ({sqlite3.sqlite_version}) lacks it ({error}); "
            "filter by columns with --where"
        ) from error
    finally:
        connection.close()


def _bring_up_to_date(index: sqlite3.Connection, journal: Path) -> None:
    for path in sorted(journal.glob("turns-*.db")):
        partition = open_database_to_read(path, "turns")
        try:
            row = index.execute("SELECT indexed FROM partitions WHERE name = ?", (path.name,)).fetchone()
            last = row[0] if row is not None else 0
            while rows := partition.execute(
                "SELECT episode, attempt, call, asked, body, checksum, id FROM entries"
                " WHERE id > ? ORDER BY id LIMIT ?",
                (last, 20_000),
            ).fetchall():
                last = rows[-1][6]
                _add(index, path, rows, last)
        except DAMAGE as error:
            raise JournalError(f"{path}: cannot be read ({error}); the rest of it cannot be searched") from error
        finally:
            partition.close()


def _add(index: sqlite3.Connection, path: Path, rows: list[Any], last: int) -> None:
    index.execute("BEGIN")
    words = []
    for name, texts in _texts(path, rows).items():
        row = index.execute("SELECT number, entries FROM episodes WHERE name = ?", (name,)).fetchone()
        if row is None:
            row = (index.execute("INSERT INTO episodes VALUES (NULL, ?, 0)", (name,)).lastrowid, 0)
        number, entries = row
        room = (1 << _SHIFT) - 1 - entries
        words += [((number << _SHIFT) + entries + place, text) for place, text in enumerate(texts[:room])]
        index.execute("UPDATE episodes SET entries = ? WHERE number = ?", (entries + len(texts[:room]), number))
    # FTS5 is fast only for ascending row ids.
    index.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", sorted(words))
    index.execute("INSERT OR REPLACE INTO partitions VALUES (?, ?)", (path.name, last))
    index.execute("COMMIT")


def _texts(path: Path, rows: list[Any]) -> dict[str, list[str]]:
    """Return the texts of journal entries, keyed by episode and attempt; damaged entries are left out."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        try:
            entry: JournalEntry = verified_entry(path, row[:6])
            text = " ".join(_words(entry.decode()))[:MAX_TEXT]
        except (JournalError, msgspec.MsgspecError, RecursionError, ValueError):
            continue
        if text:
            texts.setdefault(f"{entry.episode_id}.{entry.attempt}", []).append(text)
    return texts


def _words(body: EntryBody) -> Iterator[str]:
    match body:
        case TurnEntry():
            yield from (str(message.get("content", "")) for message in body.messages)
            yield body.text
        case ToolEntry():
            yield from (body.name, _json(body.arguments), body.observation, body.outcome)
        case EffectEntry():
            yield from (body.name, _json(body.value), body.error or "")
        case ResourceCallEntry():
            yield from (body.method, _json(body.arguments), _json(body.value), body.error or "")
        case NondeterministicValueEntry(kind="reasoning" | "message"):
            yield body.value if isinstance(body.value, str) else _json(body.value)
        case BeginEntry():
            yield from (body.task_id, _json(body.task))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
