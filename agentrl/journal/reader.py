"""Reads entries and verifies their checksums, also while another process writes them.

A fork's recorded prefix is read from the parent's journal: nothing is copied. A fork of a fork refers to its parent's
own entries, which refer to theirs. A reference gives the parent's journal directory relative to its own, so both may be
moved together.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.core.choices import run_root
from agentrl.core.errors import EntriesError, JournalError, PrunedDataError
from agentrl.core.ids import is_safe_name
from agentrl.core.text import escape_line, plural
from agentrl.journal.entries import (
    BeginEntry,
    BranchEntry,
    JournalEntry,
    decode_entries,
    encode_body,
    entry_checksum,
    episode_digest,
)
from agentrl.journal.schema import CONTROL_FILE, DAMAGE, all_rows, database_error, open_database_to_read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from agentrl.core.records import ForkPoint

_SELECT_COLUMNS = "SELECT episode, attempt, call, asked, body, checksum"
_SELECT_ENTRIES = _SELECT_COLUMNS + " FROM entries WHERE episode IN ({}) ORDER BY id"
_SELECT_PARTIALS = _SELECT_COLUMNS + " FROM partials WHERE episode = ? AND attempt = ? ORDER BY id"
_COUNT = "SELECT count(*) FROM {} WHERE episode = ? AND attempt = ?"
_BULK = 256
"""Number of episodes that one statement reads."""
ReadAttempt = Callable[[str, "ForkPoint"], "list[JournalEntry]"]
"""Reads the own entries of the attempt that a fork point names, in a journal directory."""


class AttemptLocation(NamedTuple):
    """An attempt to read, with entry count and digest of its commit, if known."""

    partition: str
    episode_id: str
    attempt: int
    entries: int | None = None
    """Number of entries; None: unknown."""
    digest: bytes = b""
    """`episode_digest` of the entries; empty if unknown."""


class TurnLogReader:
    """Reads the turn partitions of one run; keeps connections open. Use it in one thread at a time."""

    def __init__(self, journal_directory: str | Path) -> None:
        self._directory = Path(journal_directory)
        self._connections: dict[str, sqlite3.Connection] = {}

    def read(
        self, partition: str, episode_id: str, attempt: int, *, entries: int | None = None, digest: bytes = b""
    ) -> list[JournalEntry]:
        """Return the entries of an episode on disk, in the order in which they were appended.

        Raises:
            PrunedDataError: the entries were pruned.
            JournalError: the partition cannot be read, an entry does not match its checksum, or the entries do not fit
                `entries` or `digest`.
        """
        return self.read_many([AttemptLocation(partition, episode_id, attempt, entries, digest)])[0]

    def read_many(self, keys: Sequence[AttemptLocation]) -> list[list[JournalEntry]]:
        """Return the entries of several episodes, in the order of `keys`; raises as `read`."""
        by_partition: dict[str, set[str]] = {}
        for key in keys:
            by_partition.setdefault(key.partition, set()).add(key.episode_id)
        entries_of: dict[tuple[str, str, int], list[JournalEntry]] = {
            (key.partition, key.episode_id, key.attempt): [] for key in keys
        }
        for partition, episodes in by_partition.items():
            names = sorted(episodes)
            for start in range(0, len(names), _BULK):
                for entry in self._entries(partition, names[start : start + _BULK]):
                    rows = entries_of.get((partition, entry.episode_id, entry.attempt))
                    if rows is not None:
                        rows.append(entry)
        answer = [entries_of[key.partition, key.episode_id, key.attempt] for key in keys]
        for key, rows in zip(keys, answer, strict=True):
            if key.entries and not rows:
                self.check_pruned(key.episode_id, key.attempt)
            _check_committed(key, rows)
        return answer

    def beginnings(self, keys: Sequence[AttemptLocation]) -> list[JournalEntry]:
        """Return the first entries of episodes, as far as they can be read; unordered."""
        attempts = {(key.partition, key.episode_id): key.attempt for key in keys}
        bodies = []
        for (partition, episode_id), attempt in attempts.items():
            with suppress(JournalError, *DAMAGE):
                path, connection = self._open(partition)
                statement = f"{_SELECT_COLUMNS} FROM entries WHERE episode = ? AND attempt = ? AND call = 'begin'"
                bodies += [verified_entry(path, row) for row in connection.execute(statement, (episode_id, attempt))]
        return bodies

    def partials(self, partition: str, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Return the undamaged partials of an episode on disk, in order; lost tokens are sampled again."""
        path, connection = self._open(partition)
        entries = []
        try:
            for row in connection.execute(_SELECT_PARTIALS, (episode_id, attempt)):
                with suppress(JournalError):
                    entries.append(verified_entry(path, row))
        except DAMAGE:  # rows before a damaged page are still valid
            return entries
        return entries

    def partition_of(self, episode_id: str, attempt: int) -> str | None:
        """Return the partition with most entries of an attempt; None if no partition has any.

        Several may have some: a worker that continues an attempt of another copies it first (`TurnLog.take_over`). Each
        has a prefix of the same attempt, so the longest is complete.

        Raises:
            JournalError: a partition cannot be read.
        """
        best = max(self._partitions_holding(episode_id, attempt), default=(0, 0, ""), key=lambda count: count[:2])
        return best[2] if best[0] or best[1] else None

    def progress(self, episode_id: str, attempt: int) -> tuple[int, int]:
        """Return the number of entries and of partials of an attempt on disk.

        Raises:
            JournalError: a partition cannot be read.
        """
        entries, partials, _ = max(
            self._partitions_holding(episode_id, attempt), default=(0, 0, ""), key=lambda count: count[:2]
        )
        return entries, partials

    def _partitions_holding(self, episode_id: str, attempt: int) -> list[tuple[int, int, str]]:
        """Return the number of entries and of partials of an attempt in each partition, with the partition's name."""
        counts: list[tuple[int, int, str]] = []
        for name in sorted(path.name for path in self._directory.glob("turns-*.db")):
            path, connection = self._open(name)
            try:
                entries, partials = (
                    connection.execute(_COUNT.format(table), (episode_id, attempt)).fetchone()[0]
                    for table in ("entries", "partials")
                )
            except DAMAGE as error:
                raise database_error(path, error) from error
            counts.append((entries, partials, name))
        return counts

    def check_pruned(self, episode_id: str, attempt: int) -> None:
        """Check that an attempt without entries was not pruned.

        Raises:
            PrunedDataError: the attempt was pruned.
            JournalError: the control log cannot be read.
        """
        error = pruned_attempt_error(self._directory, episode_id, attempt)
        if error is not None:
            raise error

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _entries(self, partition: str, episodes: Sequence[str]) -> Iterable[JournalEntry]:
        path, connection = self._open(partition)
        try:
            for row in connection.execute(_SELECT_ENTRIES.format(",".join("?" * len(episodes))), episodes):
                yield verified_entry(path, row)
        except DAMAGE as error:
            raise database_error(path, error, damage=EntriesError) from error

    def _open(self, partition: str) -> tuple[Path, sqlite3.Connection]:
        if not isinstance(partition, str) or not is_safe_name(partition):  # SQLite columns may hold values of any type
            raise JournalError(
                f"{partition!r} is not the name of a turn partition; the record that names it is damaged"
            )
        path = self._directory / partition
        connection = self._connections.get(partition)
        if connection is None:
            connection = self._connections[partition] = open_database_to_read(path, "turns")
        return path, connection


def read_whole_partition(path: Path, run: str) -> Iterator[JournalEntry]:
    """Iterate over every entry of a partition of a run, in the order in which they were appended.

    Raises:
        JournalError: the partition cannot be read, or an entry does not match its checksum.
    """
    connection = open_database_to_read(path, "turns", run)
    try:
        for row in connection.execute(_SELECT_COLUMNS + " FROM entries ORDER BY id"):
            yield verified_entry(path, row)
    except DAMAGE as error:
        raise database_error(path, error) from error
    finally:
        connection.close()


def missing_entries(
    entries: list[JournalEntry], source: list[JournalEntry], *, partition: str, source_partition: str
) -> list[JournalEntry]:
    """Return the entries of an attempt that a partition lacks.

    Raises:
        JournalError: the partition's entries are not the first of the source's.
    """
    if source[: len(entries)] != entries:
        raise JournalError(f"{partition} and {source_partition} hold different entries of the same attempt")
    return source[len(entries) :]


AT_END = "end"
"""Call id of a fork point behind all entries of its parent: the first call that the parent did not make."""


def read_fork_prefix(journal: str, point: ForkPoint, read: ReadAttempt, *, depth: int = 0) -> list[JournalEntry]:
    """Read the entries before a fork point in order, including each ancestor's `begin`. Those of a branch end with the
    call that started it.

    Args:
        journal: directory to which the point's journal directory is relative.
        point: end of the prefix.
        read: reads an attempt.
        depth: number of references that led here.

    Raises:
        JournalError: the parent's entries cannot be read, or the point is not among them.
    """
    parent_journal = os.path.normpath(os.path.join(journal, point.journal))
    name = f"episode {point.episode_id}, attempt {point.attempt}, in {parent_journal}"
    entries = read(parent_journal, point)
    if not entries or depth == 64:  # more forks of forks mean that the references form a cycle
        raise JournalError(f"a fork refers to {name}, which cannot be found; was the run moved without its forks?")
    begin = decode_entries(entries[:1])[0]
    calls = [entry.call_id for entry in entries]
    is_at_end = point.call_id == AT_END and not point.branch
    if not isinstance(begin, BeginEntry) or not (is_at_end or point.call_id in calls):
        raise JournalError(f"a fork refers to call {point.call_id} of {name}, which does not exist")
    end = len(entries) if is_at_end else calls.index(point.call_id)
    prefix = entries[:end]
    if point.branch:  # the branch recalls the call that started it, with another result
        body = encode_body(BranchEntry((), point.branch))
        prefix.append(msgspec.structs.replace(entries[end], body=body))
    return (
        prefix
        if begin.fork is None
        else [*read_fork_prefix(parent_journal, begin.fork, read, depth=depth + 1), *prefix]
    )


def referred_journal(journal: Path, reference: str) -> Path:
    """Return the journal directory to which a fork point in `journal` refers.

    Raises:
        JournalError: it is outside of the run.
    """
    path = Path(os.path.normpath(journal / reference))
    root = run_root(journal.parent)
    if path.resolve() not in (journal.resolve(), root / "journal", root / "forks" / "journal"):
        raise JournalError(
            f"{journal}: an episode begins with turns in {escape_line(str(path))}, which is no journal of this run"
        )
    return path


def load_fork_prefix(journal: str | Path, point: ForkPoint) -> list[JournalEntry]:
    """Read `read_fork_prefix` from the databases on disk; `journal` is the fork's own directory."""
    directory = Path(os.path.abspath(journal))

    def read(journal_path: str, at: ForkPoint) -> list[JournalEntry]:
        nonlocal directory
        directory = referred_journal(directory, journal_path)
        reader = TurnLogReader(journal_path)
        try:
            entries = reader.read(at.partition, at.episode_id, at.attempt)
            if not entries:
                reader.check_pruned(at.episode_id, at.attempt)
            return entries
        finally:
            reader.close()

    return read_fork_prefix(str(directory), point, read)


def _check_committed(key: AttemptLocation, rows: Sequence[JournalEntry]) -> None:
    """Refuse entries that do not fit the commit: each may be valid while one is missing or stems from another time."""
    if key.entries is not None and len(rows) != key.entries:
        difference = f"but it was committed with {key.entries}; the partition is damaged or was replaced"
    elif key.digest and episode_digest(rows) != key.digest:
        difference = (
            "but not those it was committed with, or not in their order: their digest is another; "
            "the partition was altered or replaced"
        )
    else:
        return
    location_text = f"{plural(len(rows), 'entry', 'entries')} in {key.partition}"
    raise EntriesError(f"episode {key.episode_id} attempt {key.attempt}: {location_text}, {difference}")


def verified_entry(path: Path, row: tuple[str, int, str, bytes, bytes, int]) -> JournalEntry:
    """Make the entry of a row, and verify its checksum.

    Raises:
        EntriesError: the checksum does not match.
    """
    episode, attempt, call, request_digest, body, checksum = row
    types = (type(episode), type(attempt), type(call), type(request_digest), type(body))
    if (
        types != (str, int, str, bytes, bytes)
        or entry_checksum(episode, attempt, call, request_digest, body) != checksum
    ):
        raise EntriesError(
            f"{path}: episode {episode!r}, call {call!r}: the entry does not match its checksum; it was altered or the "
            "disk damaged it; restore the file from a copy. Other episodes can still be read"
        )
    return JournalEntry(episode, attempt, call, request_digest, body)


def pruned_attempt_error(journal: Path, episode_id: str, attempt: int) -> PrunedDataError | None:
    """Return the error for an attempt without entries, if they were pruned; else None.

    Raises:
        JournalError: the control log cannot be read.
    """
    statement = "SELECT pruned_at, rule FROM pruned WHERE episode = ? AND attempt = ?"
    reason = _words_of_pruning(journal, statement, episode_id, attempt)
    return None if reason is None else PrunedDataError(f"episode {episode_id} attempt {attempt}: its tokens {reason}")


def pruned_file_error(run: Path, name: str) -> PrunedDataError | None:
    """Return the error for a missing file of step columns, if it was pruned; `name` is as in the step's record."""
    journal = run / "journal" if (run / "journal").is_dir() else run
    reason = _words_of_pruning(journal, "SELECT pruned_at, rule FROM pruned_files WHERE file = ?", name)
    return None if reason is None else PrunedDataError(f"{name}: the step's columns {reason}")


def _words_of_pruning(journal: Path, statement: str, *key: Any) -> str | None:
    """Return when and by which rule something was pruned, for a message; None if it was not."""
    if not (journal / CONTROL_FILE).is_file():
        return None
    with closing(open_database_to_read(journal / CONTROL_FILE, "control")) as connection:
        rows = all_rows(connection, journal / CONTROL_FILE, statement, *key)
    for pruned_at, rule in rows:
        on = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(pruned_at))
        return f"were pruned on {on} by the rule journal.{rule}; its records are kept"
    return None
