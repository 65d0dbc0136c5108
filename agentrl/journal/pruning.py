"""Pruning of old journal data: which data is removed, in which order, and how readers learn of it.

Control rows always stay (admissions, ends, rewards, steps, credits), so ledger and exactly-once do not depend on pruned
data. Entries, partials and expert routing of training attempts, and files of step columns, may go. An attempt is
removed when it

* is settled: it was dropped or replaced by a later attempt, or each of its units was dropped, or trained by a step that
  every resumable checkpoint counts as taken; so no rollback makes it ready again;
* was an input of no step that is kept: the newest `keep` before the newest checkpoint, and all after the oldest one;
* is referred to by no fork in `RUN/forks`, and by no unfinished branch.

Invariant: a row in `pruned` or `pruned_files` is on disk before its data is removed, and the entries of an attempt are
removed in one transaction. A kill therefore leaves them complete or absent, and a reader that finds none can give the
reason; the next pruning completes a killed one. Incremental vacuum returns space to the file system, in small
transactions that leave half of the time to the partition's other writer.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.clock import SystemClock
from agentrl.core.errors import StorageError
from agentrl.core.files import refuse_links, resume_advice
from agentrl.journal.control_rows import ADMISSION_COLUMNS, LINE, UNRESOLVED_QUERY, decode_admission_row
from agentrl.journal.port import PruneTotals
from agentrl.journal.routing import RoutingStore
from agentrl.journal.schema import (
    CONTROL_FILE,
    DAMAGE,
    all_rows,
    database_error,
    open_database_to_read,
    open_database_to_write,
)

if TYPE_CHECKING:
    from agentrl.core.records import EpisodeSpec
    from agentrl.journal.port import PruneRule
    from agentrl.journal.run_log import RunLog

FORKS = "forks"
"""Directory of a run's forks, inside the run directory."""
DELETE_BYTES = 8 << 20
"""Maximum bytes of entries removed in one transaction, unless a single attempt has more."""
VACUUM_PAGES = 512
"""Number of pages moved in one transaction."""
_CHUNK = 500
_CLOCK = SystemClock()

AttemptKey = tuple[str, int]
"""Episode id and attempt."""


Record = Callable[[Sequence[AttemptKey], Sequence[str]], None]
"""Inserts attempts and files into `pruned` and `pruned_files`, and waits for the disk."""


def prune(
    journal: Path,
    log: RunLog,
    rule: PruneRule,
    record: Record | None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> PruneTotals:
    """Remove the data that a rule allows. Blocking: call it in a thread; the partitions' writers may keep writing.

    Args:
        journal: the run's journal directory.
        log: its control log, for this thread alone.
        rule: determines what may be removed.
        record: called before anything is removed; None: nothing is removed, only counted.
        should_stop: checked between transactions; the next pruning removes the rest.

    Raises:
        JournalError: a database cannot be read.
        StorageError: writing failed.
    """
    totals = PruneTotals(rule=str(rule), last=rule.last)
    if not rule.sealed:
        return totals
    branch_keys = filter(None, map(_main_of, log.unfinished()))
    selection = PruningSelection(log, rule, _with_mains(log, [*_find_forked(journal), *branch_keys]))
    routing = RoutingStore.of_journal(journal)
    for path in sorted(journal.glob("turns-*.db")):
        run = str(log.info()["run"])
        database = (
            open_database_to_read(path, "turns", run)
            if record is None
            else open_database_to_write(path, "turns", {}, run=run)
        )
        with closing(database) as connection:
            try:
                for attempts in _batches(connection, selection):
                    if should_stop():
                        return totals
                    totals.episodes += len(attempts)
                    totals.bytes += sum(attempts.values()) + sum(routing.size(*attempt) for attempt in attempts)
                    if record is not None:
                        record(list(attempts), ())
                        for attempt in attempts:  # before the entries, by which the next pruning finds the rest
                            routing.remove(*attempt)
                        _remove(connection, list(attempts))
                if record is not None:
                    _shrink(connection, should_stop)
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                    raise _pruning_error(path, error) from error
                # Its writer was busy for too long: the next pruning continues here.
            except DAMAGE as error:
                raise database_error(path, error) from error
    _prune_files(journal.parent, selection, record, totals, should_stop)
    return totals


# --- what may go ------------------------------------------------------------------------------------------------------


class PruningSelection:
    """The attempts and files that a rule removes."""

    def __init__(self, log: RunLog, rule: PruneRule, forked_keys: frozenset[AttemptKey]) -> None:
        self._log = log
        self._forked_keys = forked_keys
        self.last = rule.last
        lineages = [{policy: log.surviving(version) for policy, version in cut.items()} for cut in rule.sealed]
        lines = [
            [policy, lineage, first, min(last, self.last[policy])]
            for policy in self.last
            for lineage, first, last in _common([cut.get(policy, []) for cut in lineages])
        ]
        policies = sorted({policy for cut in rule.sealed for policy in cut})
        self._before = self._last_removable_at()
        """Time before which attempts that no step trained on are removable."""
        self._lines = json.dumps(lines)
        """Steps that every resumable checkpoint counts as taken and that may be removed; a parameter of `LINE`."""
        self._cut = json.dumps([[name, step] for name, step in self.last.items()])
        self._policies_json = json.dumps(policies)

    def _last_removable_at(self) -> float | None:
        """Return when a policy's last removable step was taken, of the policy where that is longest ago; None if no
        step may be removed."""
        versions = []
        for policy, step in self.last.items():
            statement = "SELECT max(stepped_at) FROM steps WHERE policy = ? AND step = ? AND step > 0"
            versions += [at for (at,) in self._log.rows(statement, policy, step) if at is not None]
        return min(versions, default=None)

    def among(self, episodes: Sequence[str]) -> set[AttemptKey]:
        """Return the attempts of some episodes that may be removed."""
        statement = (
            f"WITH {LINE}, cut AS (SELECT json_extract(value, '$[0]') AS policy, json_extract(value, '$[1]') AS step"
            " FROM json_each(?)), trained AS (SELECT value AS policy FROM json_each(?))"
            " SELECT a.episode, a.attempt FROM json_each(?) asked JOIN admissions a ON a.episode = asked.value"
            " LEFT JOIN episodes e ON e.episode = a.episode AND e.attempt = a.attempt"
            " WHERE a.purpose = 'train'"
            # The attempt has ended or was replaced.
            " AND (e.episode IS NOT NULL OR EXISTS"
            " (SELECT 1 FROM admissions b WHERE b.episode = a.episode AND b.attempt > a.attempt))"
            # None of its units can become ready again.
            " AND NOT EXISTS (SELECT 1 FROM trajectories t WHERE t.episode = a.episode AND t.attempt = a.attempt"
            f" AND e.drop_reason IS NULL AND t.policy IN (SELECT policy FROM trained) AND{UNRESOLVED_QUERY})"
            # No kept step trained on it.
            " AND NOT EXISTS (SELECT 1 FROM step_units s LEFT JOIN cut c ON c.policy = s.policy"
            " WHERE s.episode = a.episode AND s.attempt = a.attempt AND s.step > coalesce(c.step, 0))"
            # Attempts that no step trained on must be as old as the steps that may be pruned.
            " AND (EXISTS (SELECT 1 FROM step_units s WHERE s.episode = a.episode AND s.attempt = a.attempt)"
            " OR coalesce(e.committed_at, a.admitted_at) < ?)"
        )
        episodes_json = json.dumps(list(episodes))
        rows = self._log.rows(
            statement, self._lines, self._cut, self._policies_json, episodes_json, self._before or -1.0
        )
        return {(episode, attempt) for episode, attempt in rows} - self._forked_keys

    def files(self) -> Iterator[str]:
        """Yield the files of step columns that may be removed, relative to the run."""
        for policy, step in self.last.items():
            statement = "SELECT columns_file FROM steps WHERE policy = ? AND step <= ? AND columns_file IS NOT NULL"
            for (name,) in self._log.rows(statement, policy, step):
                yield name


def _common(lines: Sequence[Sequence[tuple[int, int, int]]]) -> list[tuple[int, int, int]]:
    """Return the steps that all of some lines have in common, as (lineage, first, last): first < step <= last."""
    common = list(lines[0])
    for line in lines[1:]:
        common = [
            (lineage, max(first, other_first), min(last, other_last))
            for lineage, first, last in common
            for other_lineage, other_first, other_last in line
            if lineage == other_lineage
        ]
    return [(lineage, first, last) for lineage, first, last in common if first < last]


def _find_forked(journal: Path) -> frozenset[AttemptKey]:
    """Return the attempts of this journal to which the run's forks refer."""
    path = journal.parent / FORKS / "journal" / CONTROL_FILE
    refuse_links(journal.parent / FORKS)
    if not path.is_file():
        return frozenset()
    columns = ", ".join([*ADMISSION_COLUMNS.split(), "checksum"])
    with closing(open_database_to_read(path, "control")) as connection:
        points = [
            decode_admission_row(row).fork for row in all_rows(connection, path, f"SELECT {columns} FROM admissions")
        ]
    return frozenset((point.episode_id, point.attempt) for point in points if point is not None)


def _main_of(spec: EpisodeSpec) -> AttemptKey | None:
    """Return the attempt that holds a branch's first turns; None for other episodes."""
    return None if spec.fork is None or spec.branched_from is None else (spec.branched_from, spec.fork.attempt)


def _with_mains(log: RunLog, keys: Iterable[AttemptKey]) -> frozenset[AttemptKey]:
    """Add the attempts at which those among `keys` that are branches begin."""
    pending, found = list(keys), set(keys)
    while pending:
        spec = log.admitted(*pending.pop())
        main = None if spec is None else _main_of(spec)
        if main is not None and main not in found:
            found.add(main)
            pending.append(main)
    return frozenset(found)


# --- removing ---------------------------------------------------------------------------------------------------------

_SIZES = (
    # 64: allowance for a row's other columns
    "SELECT episode, attempt, sum(length(body) + length(asked) + 64) FROM"
    " (SELECT episode, attempt, body, asked FROM entries WHERE episode IN (SELECT value FROM json_each(?1))"
    " UNION ALL SELECT episode, attempt, body, asked FROM partials WHERE episode IN (SELECT value FROM json_each(?1)))"
    " GROUP BY episode, attempt"
)


def _batches(connection: sqlite3.Connection, selection: PruningSelection) -> Iterator[dict[AttemptKey, int]]:
    """Yield batches of removable attempts in a partition, with their bytes; one batch per transaction."""
    statement = "SELECT DISTINCT episode FROM entries UNION SELECT DISTINCT episode FROM partials"
    names = [str(episode) for (episode,) in connection.execute(statement)]
    batch: dict[AttemptKey, int] = {}
    total = 0
    for start in range(0, len(names), _CHUNK):
        settled_names = selection.among(names[start : start + _CHUNK])
        sizes = connection.execute(_SIZES, (json.dumps(sorted({episode for episode, _ in settled_names})),)).fetchall()
        for episode, attempt, size in sizes:
            if (episode, attempt) not in settled_names:
                continue
            if batch and total + size > DELETE_BYTES:
                yield batch
                batch, total = {}, 0
            batch[episode, attempt] = size
            total += size
    if batch:
        yield batch


def _remove(connection: sqlite3.Connection, attempts: Sequence[AttemptKey]) -> None:
    """Delete the data of some attempts from a partition, in one transaction."""
    connection.execute("PRAGMA secure_delete = OFF")  # deleted content need not be overwritten
    # Losing a deletion in a crash is harmless: the next pruning repeats it.
    connection.execute("PRAGMA synchronous = NORMAL")
    began = _CLOCK.monotonic()
    connection.execute("BEGIN IMMEDIATE")
    try:
        for table in ("entries", "partials"):
            connection.executemany(f"DELETE FROM {table} WHERE episode = ? AND attempt = ?", attempts)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise
    _leave_to_others(began)


def _shrink(connection: sqlite3.Connection, should_stop: Callable[[], bool]) -> None:
    """Move the file's last pages into its free ones and truncate it, piece by piece."""
    while not should_stop():
        ((free,),) = connection.execute("PRAGMA freelist_count").fetchall()
        if not free:
            break
        began = _CLOCK.monotonic()
        connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        _leave_to_others(began)
        ((free_pages,),) = connection.execute("PRAGMA freelist_count").fetchall()
        if free_pages >= free:  # a file created before incremental vacuum keeps its free pages and reuses them
            break
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _leave_to_others(began: float) -> None:
    """Leave a database's write lock to its writer for as long as it was held here, since `began`."""
    threading.Event().wait(_CLOCK.monotonic() - began)


def _prune_files(
    run: Path, selection: PruningSelection, record: Record | None, totals: PruneTotals, should_stop: Callable[[], bool]
) -> None:
    refuse_links(run / "steps")
    root = (run / "steps").resolve()
    files = {}
    for name in selection.files():
        if not isinstance(name, str) or "\0" in name:
            continue  # not a valid file name
        path = run / name
        if path.resolve().is_relative_to(root):  # an altered record must not name a file outside the run
            with suppress(FileNotFoundError, NotADirectoryError):
                files[name] = path.lstat().st_size
    totals.files += len(files)
    totals.bytes += sum(files.values())
    if record is None or not files or should_stop():
        return
    record((), list(files))
    for name in files:
        try:
            os.unlink(run / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError(f"{run / name}: cannot be removed ({error.strerror}); {resume_advice(error)}") from error


def _pruning_error(path: Path, error: sqlite3.Error) -> StorageError:
    return StorageError(
        f"{path}: could not be pruned ({error}). What was committed before is safe. Free space or repair the disk, "
        "then start again with --resume"
    )
