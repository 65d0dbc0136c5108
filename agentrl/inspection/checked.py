"""Rows of the control log as dictionaries, each checked against its checksum: what is damaged is told, never shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentrl.journal.checksums import row_checksum
from agentrl.journal.control import all_rows

if TYPE_CHECKING:
    from agentrl.journal.run_log import SqliteRunLog

Row = dict[str, Any]


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
