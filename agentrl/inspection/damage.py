"""Damage in a journal, found and named: wrong types in the control log, wrong checksums, content that cannot be shown.

SQLite keeps any type in any column. Queries trust the types that the tables declare; only where one of them fails is
every row checked (`damage_named`), so that reading pays nothing for it. `checked_rows` leaves out rows whose checksum
is wrong and says so. `check_showable` refuses an entry that is neither text nor JSON: msgpack holds more than either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import AgentRLError, JournalError
from agentrl.core.records import ForkPoint
from agentrl.journal.checksums import row_checksum
from agentrl.journal.control import all_rows

if TYPE_CHECKING:
    from agentrl.journal.entries import EntryBody
    from agentrl.journal.run_log import SqliteRunLog

_TYPES = {"TEXT": "'text'", "INTEGER": "'integer'", "REAL": "'real', 'integer'", "BLOB": "'blob'"}
MAX_DEPTH = 100
"""Deepest nesting that is shown; far from where recursive printers end."""
Row = dict[str, Any]


@contextmanager
def damage_named(log: SqliteRunLog) -> Iterator[None]:
    """An unexpected error in here becomes a `JournalError`, if the control log is damaged."""
    try:
        yield
    except AgentRLError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        check_types(log)
        try:
            log.verify()
        except JournalError as damage:
            raise damage from error
        raise


def check_types(log: SqliteRunLog) -> None:
    """Look at every row of the control log.

    Raises:
        JournalError: a value is not of the type its column declares; the message names table, row and column.
    """
    for (table,) in log.rows("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"):
        columns = log.rows(f"PRAGMA table_info({table})")
        odd = {}
        for _, name, kind, required, *_ in columns:
            types = _TYPES[kind] if required else f"{_TYPES[kind]}, 'null'"
            odd[name] = f"typeof({name}) NOT IN ({types})"
        named = ", ".join(f"CASE WHEN {condition} THEN '{name}' END" for name, condition in odd.items())
        first = columns[0][1]
        found = log.rows(f"SELECT {first}, coalesce({named}) FROM {table} WHERE {' OR '.join(odd.values())} LIMIT 1")
        for key, name in found:
            raise JournalError(
                f"{log.path.name}: `{name}` of {str(key)[:100]!r} in `{table}` is of another type than a run writes "
                "there; the record was altered or is damaged"
            )


def check_showable(body: EntryBody, where: str) -> None:
    """Refuse content that no JSON writer takes: keys that are neither text nor numbers, extension types, great depth.

    Raises:
        JournalError: the content is such; the message begins with `where`.
    """
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                odd = [type(key).__name__ for key in value if not isinstance(key, str | int | float | None)]
                if odd:
                    raise JournalError(f"{where}: a key of type {odd[0]}, which cannot be shown")
                below += value.values()
            elif isinstance(value, msgspec.Struct):
                below += [getattr(value, name) for name in value.__struct_fields__]
            elif isinstance(value, ForkPoint):
                below += [value.journal, value.partition, value.episode_id, value.attempt, value.call_id]
                below += value.messages
            elif isinstance(value, list | tuple):
                below += value
            elif not isinstance(value, str | int | float | bytes | datetime | None):
                raise JournalError(f"{where}: a value of type {type(value).__name__}, which cannot be shown")
        if not below:
            return
        level = below
    raise JournalError(f"{where}: nested deeper than {MAX_DEPTH}, which cannot be shown")


def checked_rows(
    log: SqliteRunLog, table: str, condition: str, *parameters: Any, problems: list[str] | None = None
) -> list[Row]:
    """The rows of a table that pass a condition and match their checksums.

    Args:
        log: the run's control log.
        table: one of `journal.control.CHECKED`.
        condition: SQL, perhaps with an ORDER BY or a LIMIT; ours, never anyone's content.
        parameters: bound to its placeholders.
        problems: told of rows that do not match.

    Raises:
        JournalError: the database cannot be read.
    """
    names = [row[1] for row in all_rows(log.connection, log.path, f"PRAGMA table_info({table})")]
    found = []
    for row in log.rows(f"SELECT * FROM {table} WHERE {condition}", *parameters):
        if row_checksum(table, row[:-1]) == row[-1]:
            found.append(dict(zip(names, row, strict=True)))
        elif problems is not None:
            problems.append(
                f"{log.path.name}: a record in `{table}` ({str(row[0])[:100]!r}, …) does not match its checksum"
            )
    return found
