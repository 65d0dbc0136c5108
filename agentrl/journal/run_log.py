"""Reads a run's control log: pure functions of the records on disk, for resume and for readers.

The tree of versions decides what survives a rollback: the manifest names a version, and the steps along its ancestors
count. Units of any other step are ready again.
"""

from __future__ import annotations

import bisect
import itertools
import json
import operator
import sqlite3
from abc import abstractmethod
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core import ids
from agentrl.core.errors import ConfigError, JournalError
from agentrl.core.masking import mask_secrets
from agentrl.core.records import Lines, PolicyVersion, WeightsRef
from agentrl.core.setting_paths import set_value
from agentrl.journal.control_rows import (
    CHECKED_TABLES,
    IGNORED_KEY,
    NUMBERED_TABLES,
    decode_admission_row,
    decode_baselines_row,
    decode_drop_row,
    decode_end_row,
    decode_episode_row,
    decode_evaluation_row,
    decode_group_scores_row,
    decode_proposal_row,
    decode_version_row,
    verify_row,
    verify_tables,
)
from agentrl.journal.port import Admission, JournalStore, Repinning
from agentrl.journal.reader import verified_entry
from agentrl.journal.schema import (
    CONTROL_FILE,
    all_rows,
    open_database_to_read,
    read_meta_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from agentrl.core.records import (
        EpisodeHeader,
        EpisodeSpec,
        FrozenGroupBaselines,
        Purpose,
    )
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.port import ControlRecord, EpisodeEnd, EvaluationBegun

START_KEY = "life."
"""Key prefix of the starts of the run in `meta`; the lineage follows."""


class SettingChange(msgspec.Struct, frozen=True):
    """A setting that differs between a start of the run and the start before it."""

    path: tuple[str, ...]
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = (mask_secrets(value, ".".join(self.path)) for value in (self.before, self.now))
        return f"{'.'.join(self.path)} {before!r} → {now!r}"


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """A start of the run: the first, a resume, or a restart after a process was lost. Begins a lineage of versions."""

    lineage: int
    began_at: float
    """Time of the start, in seconds since the epoch."""
    checkpoint: str = ""
    """Name of the checkpoint; empty: the run started with its initial weights."""
    steps: dict[str, int] = {}
    """Step of each policy at the start."""
    again: dict[str, int] = {}
    """Newest step taken earlier, for policies that had taken more steps than `steps`."""
    changed: tuple[SettingChange, ...] = ()
    """Settings changed since the previous start."""
    code: dict[str, str] = {}
    """Digest of the source of environments and bots, by file, and of the user's loss and advantage, by
    `file.py:function` or `module:function`."""
    code_changed: tuple[str, ...] = ()
    """Files and functions whose code differs from that of the previous start."""
    reward_code_changed: tuple[str, ...] = ()
    """The part of `code_changed` that rewards depend on: all but losses and advantages."""
    libraries: dict[str, str] = {}
    """Versions of Python, agentrl, torch, transformers, peft and vLLM, as far as they are installed."""
    tasks_changed: tuple[str, ...] = ()
    """Clauses about the tasks that differ from those of the previous start, such as "4 of 16 held-out tasks
    changed"."""

    def digests_of(self, place: str) -> set[str]:
        """Return the digest recorded for a file or function. If it was moved, return those of all files with its name,
        and for an `__init__.py`, with its directory's name, too."""
        if place in self.code:
            return {self.code[place]}
        return self.digests_by_name.get(_file_name(place), set())

    @property
    def digests_by_name(self) -> dict[str, set[str]]:
        """Digests by the names of files and functions, without their directories, except for `__init__.py`."""
        digests: dict[str, set[str]] = {}
        for place, digest in self.code.items():
            digests.setdefault(_file_name(place), set()).add(digest)
        return digests

    @property
    def words(self) -> str:
        """Description of the changes, for a mark on a curve."""
        origin = f"resumed from {self.checkpoint}" if self.checkpoint else "restarted without a checkpoint"
        code = [f"code changed: {', '.join(self.code_changed)}"] if self.code_changed else []
        return "; ".join([origin, *code, *map(str, self.changed), *self.tasks_changed])


def _file_name(place: str) -> str:
    return "/".join(PurePath(place).parts[-2 if place.endswith("__init__.py") else -1 :])


UnitKey = tuple[str, int, str]
"""Episode id, attempt and policy."""


_SUPERSEDED = "SELECT 1 FROM admissions b WHERE b.episode = {0}.episode AND b.attempt > {0}.attempt"
_NUMBERS = (
    f" FROM ({' UNION ALL '.join(f'SELECT seq FROM {table}' for table in NUMBERED_TABLES)} UNION ALL"
    f" SELECT CAST(substr(key, {len(IGNORED_KEY) + 1}) AS INTEGER) FROM meta WHERE key GLOB '{IGNORED_KEY}*')"
)
"""The numbers of the log, as `seq`: those of its rows, and of records whose key had a row."""
_NUMBER = "CAST(substr(episode, ?) AS INTEGER)"
_IS_ROOT = "episode GLOB ? AND substr(episode, ?) NOT GLOB '*[^0-9]*'"


def _root(prefix: str) -> tuple[Any, ...]:
    """Return the parameters of `_NUMBER`, then of `_IS_ROOT`."""
    return (len(prefix) + 1, f"{prefix}[0-9]*", len(prefix) + 1)


class RunLog:
    """The queries of a control log, over a read-only connection. Every journal and every reader of a run answers them.

    Args:
        path: file of the control log, in the journal's directory.
        connection: connection to it.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    def rows(self, statement: str, *parameters: Any) -> list[Any]:
        """Return all rows of a query.

        Raises:
            JournalError: the database is damaged.
        """
        return all_rows(self.connection, self.path, statement, *parameters)

    def verify(self, tables: Iterable[str] = CHECKED_TABLES) -> None:
        """Check the structure of the file, and every row of some tables against its checksum.

        Raises:
            JournalError: a row, or the structure of the file, is damaged.
        """
        verify_tables(self.connection, self.path, tables)

    def check_partition(self, name: str) -> None:
        """Refuse to re-create a missing partition that held committed episodes.

        Raises:
            JournalError: the partition held committed episodes.
        """
        path = self.path.parent / name
        if not path.exists():
            ((num_lost,),) = self.rows("SELECT count(*) FROM episodes WHERE partition = ?", name)
            if num_lost:
                raise JournalError(f"{path} is missing, and it contains {num_lost} committed episodes; restore it")

    def next_number(self, prefix: str) -> int:
        """Return one more than the largest number of a root episode `<prefix><number>` in admissions or turn logs.

        Turn logs count because a kill may leave entries of an episode whose admission was not yet on disk.
        """
        ((highest,),) = self.rows(f"SELECT max({_NUMBER}) FROM admissions WHERE {_IS_ROOT}", *_root(prefix))
        return self._highest_in_turns(prefix, -1 if highest is None else int(highest)) + 1

    def _highest_in_turns(self, prefix: str, highest: int) -> int:
        """Return the largest number of a root episode in the turn logs, or `highest` if that is larger."""
        for partition in sorted(self.path.parent.glob("turns-*.db")):
            connection = open_database_to_read(partition, "turns")
            try:
                statement = f"SELECT DISTINCT episode FROM entries WHERE {_IS_ROOT} AND {_NUMBER} > ?"
                rows = all_rows(connection, partition, statement, *_root(prefix)[1:], len(prefix) + 1, highest)
                for (name,) in rows:
                    _check_is_there(connection, partition, name)
                    highest = max(highest, int(name.removeprefix(prefix)))
            finally:
                connection.close()
        return highest

    def lost_numbers(self, prefix: str, stop: int) -> list[int]:
        """Return the numbers below `stop` of root episodes `<prefix><number>` whose admission never reached the
        disk.
        """
        below = f"{_IS_ROOT} AND {_NUMBER} < ?"
        values = (*_root(prefix)[1:], len(prefix) + 1, stop)
        ((admitted_count,),) = self.rows(f"SELECT count(DISTINCT episode) FROM admissions WHERE {below}", *values)
        if admitted_count == stop:  # the usual case, in which nothing needs to be listed
            return []
        rows = self.rows(f"SELECT DISTINCT episode FROM admissions WHERE {below}", *values)
        numbers = {int(name.removeprefix(prefix)) for (name,) in rows}
        return [number for number in range(stop) if number not in numbers]

    def published(self, version: PolicyVersion, *, outside: bool = False) -> WeightsRef | None:
        """Return the location of a version's weights in the run, even after it was moved; None if the version was never
        published. With `outside`, also the recorded path of weights that a user gave (lineages below 0), which a run
        from others cannot choose.

        Raises:
            JournalError: the record was altered, or its path leads out of the run.
        """
        root = self.path.parent.parent / "versions"
        directory = root / version.policy / f"{version.lineage}.{version.step}"
        statement = "SELECT path, kind, sha256 FROM versions WHERE policy = ? AND lineage = ? AND step = ?"
        for path, kind, sha256 in self.rows(statement, *version):
            if kind not in ("full", "adapter") or not isinstance(path, str) or not isinstance(sha256, str):
                raise JournalError(f"{self.path}: the record of {version} was altered or is damaged")
            if version.lineage < 0:
                if not outside:
                    return None
                return WeightsRef(version=version, path=path, kind=kind, sha256=sha256)
            if not directory.resolve().is_relative_to(root.parent.resolve() / root.name):
                raise JournalError(
                    f"{self.path}: the weights of {version} are outside the run, in {directory.resolve()}; the record "
                    "was altered"
                )
            return WeightsRef(version=version, path=str(directory), kind=kind, sha256=sha256)
        return None

    def admitted(self, episode_id: str, attempt: int) -> EpisodeSpec | None:
        """Return the spec of an attempt; None if it was not admitted.

        Raises:
            JournalError: the record was altered or is damaged.
        """
        rows = self.rows("SELECT * FROM admissions WHERE episode = ? AND attempt = ?", episode_id, attempt)
        return decode_admission_row(rows[0]) if rows else None

    def repinning(self, spec: EpisodeSpec) -> Repinning:
        """Return the record that gives the admission of an attempt the pins of `spec`."""
        statement = "SELECT admitted_at, seq FROM admissions WHERE episode = ? AND attempt = ?"
        ((admitted_at, seq),) = self.rows(statement, spec.episode_id, spec.attempt)
        return Repinning(spec=spec, admitted_at=admitted_at, seq=seq)

    def unfinished(self, purpose: Purpose = "train") -> Sequence[EpisodeSpec]:
        """Return the episodes of a purpose, children included, whose newest attempt has not ended, in order of
        admission.

        Raises:
            JournalError: a record was altered or is damaged.
        """
        statement = (
            "SELECT * FROM admissions a WHERE a.purpose = ?"
            " AND NOT EXISTS (SELECT 1 FROM episodes e WHERE e.episode = a.episode AND e.attempt = a.attempt)"
            f" AND NOT EXISTS ({_SUPERSEDED.format('a')}) ORDER BY a.seq"
        )
        specs = [decode_admission_row(row) for row in self.rows(statement, purpose)]
        for spec in specs:
            number = ids.root_episode_id(spec.episode_id)[1:]
            if not (number.isascii() and number.isdecimal()):
                raise JournalError(f"{self.path}: {spec.episode_id[:100]!r} is no name of an episode; it was altered")
        return specs

    def ended_children(self, parent: str) -> dict[str, EpisodeHeader]:
        """Return the headers of the ended children of an episode, by id; unfinished ones are left out."""
        is_child = f"e.parent = ? AND NOT EXISTS ({_SUPERSEDED.format('e')})"
        rows = self.rows(f"SELECT e.* FROM episodes e WHERE {is_child} ORDER BY e.seq", parent)
        trajectories = self.rows(
            "SELECT t.* FROM episodes e JOIN trajectories t ON t.episode = e.episode AND t.attempt = e.attempt"
            f" WHERE {is_child} ORDER BY t.episode, t.seat, t.agent",
            parent,
        )
        return {row[0]: decode_episode_row(row, [each for each in trajectories if each[0] == row[0]]) for row in rows}

    def evaluations(self) -> list[tuple[int, EvaluationBegun, bool]]:
        """Return number and record of the beginnings of evaluations, in order, and whether each was played to its end.

        Raises:
            JournalError: a record was altered or is damaged.
        """
        ended = {first for (first,) in self.rows("SELECT first FROM evaluation_ends")}
        rows = self.rows("SELECT * FROM evaluations ORDER BY seq")
        return [(row[-2], decode_evaluation_row(row), row[0] in ended) for row in rows]

    def baselines(self) -> dict[str, FrozenGroupBaselines]:
        """Return the baselines of groups, keyed by group."""
        rows = self.rows("SELECT * FROM baselines")
        return {row[0]: decode_baselines_row(row) for row in rows}

    def recorded_metric(self, policy: str, name: str, step: int) -> float | None:
        """Return the newest value of a policy's metric at a step or before it; None if there is none."""
        rows = self.rows(
            "SELECT value FROM metrics WHERE policy = ? AND name = ? AND step <= ? ORDER BY step DESC, id DESC LIMIT 1",
            *(policy, name, step),
        )
        return next((value for (value,) in rows), None)

    def resolved_units(self, consumed_through: Mapping[str, PolicyVersion]) -> dict[UnitKey, str | None]:
        """Map each resolved unit to None if it was consumed along the surviving lineage of `consumed_through`, the
        manifest's version of each trainable policy, else to its drop reason."""
        rows = self.rows("SELECT episode, attempt, policy, reason FROM unit_drops")
        reasons: dict[UnitKey, str | None] = {tuple(unit): reason for *unit, reason in rows}
        line = "policy = ? AND lineage = ? AND step > ? AND step <= ?"
        for policy, version in consumed_through.items():
            for part in self.surviving(version):
                consumed = self.rows(f"SELECT DISTINCT episode, attempt FROM step_units WHERE {line}", policy, *part)
                reasons |= {(episode, attempt, policy): None for episode, attempt in consumed}
        return reasons

    def pruned(self, episodes: Collection[str]) -> set[tuple[str, int]]:
        """Return the attempts of these episodes whose entries were pruned."""
        statement = "SELECT episode, attempt FROM pruned WHERE episode IN (SELECT value FROM json_each(?))"
        return set(map(tuple, self.rows(statement, json.dumps(sorted(episodes)))))

    def surviving(self, version: PolicyVersion) -> list[tuple[int, int, int]]:
        """Return the line of steps that led to `version`; see `Lines.line`.

        Raises:
            JournalError: no version of its lineage was published, although steps were taken.
        """
        of_lineage = "policy = ?1 AND lineage = ?2"
        unknown = f"{of_lineage} AND NOT EXISTS (SELECT 1 FROM versions WHERE {of_lineage}) LIMIT 1"
        if self.rows(f"SELECT 1 FROM step_units WHERE {unknown}", version.policy, version.lineage):
            raise JournalError(f"{self.path}: version {version} was never published in this run")
        return self.lines().line(version)

    def lines(self) -> Lines:
        """Return the tree of the run's lineages.

        Raises:
            JournalError: a version has no numbers.
        """
        statement = "SELECT policy, lineage, step, parent_lineage, parent_step, sha256 FROM versions"
        lines = Lines()
        for policy, lineage, step, *parent, sha256 in self.rows(f"{statement} ORDER BY lineage, step"):
            self._check_numbers(policy, lineage, step, *(number for number in parent if number is not None))
            before = None if parent[0] is None else PolicyVersion(policy, *parent)
            lines.add(PolicyVersion(policy, lineage, step), before, sha256)
        return lines

    def _check_numbers(self, policy: str, *numbers: Any) -> None:
        """Check the types of numbers: SQLite accepts any type in any column, and this reads without checksums."""
        odd = [number for number in numbers if not isinstance(number, int)]
        if odd:
            raise JournalError(
                f"{self.path}: a version of {policy} has {str(odd[0])[:40]!r} where a number belongs; "
                "the versions table was altered or is damaged"
            )

    def history(self, purpose: Purpose = "train", since: int = 0) -> Iterator[ControlRecord]:
        """Yield what the state of the run's loop is made of, in the order of the log: admissions and ends of training
        episodes, scores of groups, dropped units, proposals and published versions, after a check of all rows of
        `HISTORY_TABLES`; of another purpose, admissions and ends, from the record with the number `since`. The end of a
        superseded attempt is left out.

        Raises:
            JournalError: a record was altered or is damaged, or an episode ended before it was admitted.
        """
        newest: dict[str, EpisodeSpec] = {}
        trajectories: dict[tuple[str, int], list[Any]] = {}

        def admission(row: Any) -> Admission | None:
            if row[2] != purpose:
                verify_row("admissions", row)
                return None
            spec = newest[row[0]] = decode_admission_row(row)
            return Admission(spec=spec)

        def end(row: Any) -> EpisodeEnd | None:
            spec = newest.get(row[0])
            if spec is not None and spec.attempt == row[1]:
                return decode_end_row(spec, row, trajectories.pop((row[0], row[1]), ()))
            verify_row("episodes", row)
            if row[2] == purpose and not since and (spec is None or spec.attempt < row[1]):
                raise JournalError(f"record {row[-2]} is the end of {row[0]}, which was not admitted yet")
            return None

        ended = "(episode, attempt) IN (SELECT episode, attempt FROM episodes WHERE purpose = ?1 AND seq >= ?2)"
        for row in self.rows(f"SELECT * FROM trajectories WHERE ?1 = 'train' OR {ended}", purpose, since):
            trajectories.setdefault((row[0], row[1]), []).append(row)  # sorted by seat and agent, as their key is
        decoders: Mapping[str, Callable[[Any], ControlRecord | None]] = {
            "admissions WHERE (?1 = 'train' OR purpose = ?1) AND": admission,
            "episodes WHERE (?1 = 'train' OR purpose = ?1) AND": end,
            "unit_drops WHERE ?1 = 'train' AND": decode_drop_row,
            "proposals WHERE ?1 = 'train' AND": decode_proposal_row,
            "group_scores WHERE ?1 = 'train' AND": decode_group_scores_row,
            "versions WHERE ?1 = 'train' AND": decode_version_row,
        }
        rows = [
            (row[-2], decode, row)
            for table, decode in decoders.items()
            for row in self.rows(f"SELECT * FROM {table} seq >= ?2", purpose, since)
        ]
        rows.sort(key=operator.itemgetter(0))
        for _, decode, row in rows:
            if (record := decode(row)) is not None:
                yield record
        for row in itertools.chain(*trajectories.values()):
            verify_row("trajectories", row)

    def next_seq(self) -> int:
        """Return the number of the next record of the log.

        Raises:
            JournalError: a number before it has no record, or two.
        """
        rows = self.rows(f"SELECT seq{_NUMBERS} ORDER BY seq")
        for number, (seq,) in enumerate(rows):
            if type(seq) is not int or seq != number:
                problem = f"two records have the number {seq}" if seq == number - 1 else f"record {number} is missing"
                raise JournalError(f"{self.path}: {problem}; the log was altered or is damaged, restore it from a copy")
        return len(rows)

    def newest_label(self) -> float:
        """Return the latest time label of admissions, ends, versions and steps; 0 before the first."""
        columns = {
            "admissions": "admitted_at",
            "episodes": "committed_at",
            "versions": "published_at",
            "steps": "stepped_at",
        }
        maxima = [self.rows(f"SELECT max({column}) FROM {table}")[0][0] for table, column in columns.items()]
        return max((at for at in maxima if isinstance(at, float)), default=0.0)

    def highest_lineage(self) -> int:
        """Return the largest lineage of a published version, or of a start that died before publishing one; -1 before
        the first."""
        ((highest,),) = self.rows("SELECT coalesce(max(lineage), -1) FROM versions")
        self._check_numbers("some policy", highest)
        return max([int(highest), *(start.lineage for start in self.starts())])

    def newest_steps(self) -> dict[str, int]:
        """Return the step of each policy's newest version, on the line that a rollback left."""
        statement = (
            "SELECT policy, max(step) FROM versions v WHERE lineage >= 0 AND lineage ="
            " (SELECT max(lineage) FROM versions o WHERE o.policy = v.policy) GROUP BY policy"
        )
        return {str(policy): int(step) for policy, step in self.rows(statement)}

    def starts(self) -> list[RunStart]:
        """Return the starts of the run, in order; older versions of agentrl recorded none.

        Raises:
            JournalError: a record cannot be read.
        """
        rows = self.rows("SELECT value FROM meta WHERE key GLOB ?", f"{START_KEY}*")
        try:
            return sorted(
                (msgspec.json.decode(value, type=RunStart) for (value,) in rows), key=lambda start: start.lineage
            )
        except (msgspec.MsgspecError, TypeError, RecursionError, ValueError) as error:
            raise JournalError(f"{self.path}: a start of the run cannot be read ({error}); it is damaged") from error

    def span(self) -> tuple[float, float] | None:
        """Return the wall-clock times of the first admission and of the last write; None before there is one."""
        ((first, admitted, committed, stepped),) = self.rows(
            "SELECT (SELECT min(admitted_at) FROM admissions), (SELECT max(admitted_at) FROM admissions),"
            " (SELECT max(committed_at) FROM episodes), (SELECT max(stepped_at) FROM steps)"
        )
        times = [float(time) for time in (first, admitted, committed, stepped) if time is not None]
        return (min(times), max(times)) if times else None

    def stops(self) -> list[tuple[float, float]]:
        """Return the wall-clock times in which the run was stopped: from the last admission, end of an episode or step
        before a resume until the resume."""
        resumes = self.starts()[1:]
        if not resumes:
            return []
        rows = self.rows(
            "SELECT admitted_at FROM admissions UNION SELECT committed_at FROM episodes"
            " UNION SELECT stepped_at FROM steps"
        )
        times = sorted(float(time) for (time,) in rows if time is not None)
        stops: dict[float, float] = {}  # a resume without an event until the next one belongs to the same stop
        for start in resumes:
            events_before = bisect.bisect_left(times, start.began_at)
            if events_before and start.began_at < times[-1]:
                stops[times[events_before - 1]] = start.began_at
        return list(stops.items())

    def seconds(self) -> float | None:
        """Return the duration of the run: from its first admission to its last write, without the times in which it was
        stopped; None before its first admission."""
        span = self.span()
        if span is None:
            return None
        stopped = sum(until - since for since, until in self.stops())
        return max(span[1] - span[0] - stopped, 0.0)  # a machine's clock may have been set back

    def config(self, lineage: int | None = None) -> dict[str, Any]:
        """Return the configuration of the start that began a lineage, as data: that of the first start, with the
        changes since.

        Args:
            lineage: lineage of versions; None: the newest.
        """
        config = self.info().get("config")
        if not isinstance(config, dict):
            return {}
        for start in self.starts():
            if lineage is not None and start.lineage > lineage:
                break
            for change in start.changed:
                try:
                    set_value(config, change.path, change.now)
                except ConfigError as error:
                    raise JournalError(
                        f"{self.path}: a start of the run cannot be read: {change}; it is damaged"
                    ) from error
        return config

    def info(self) -> Mapping[str, Any]:
        """Return `format`, `run` (an id), and the data that the journal was created with: the run's name and resolved
        configuration."""
        try:
            values = read_meta_table(self.connection)
            info = json.loads(values.get("info", "{}"))
            return {**info, "format": int(values["format"]), "run": values["run"]}
        except (sqlite3.Error, ValueError, TypeError, KeyError, RecursionError) as error:
            raise JournalError(f"{self.path}: the run's identity cannot be read ({error}); it is damaged") from error


class SqliteRunLog(RunLog):
    """The control log in a journal directory, opened read-only, in any process."""

    def __init__(self, directory: str | Path) -> None:
        """Open the control log.

        Raises:
            JournalError: there is no journal in `directory`, or this version cannot read it.
        """
        path = Path(directory) / CONTROL_FILE
        super().__init__(path, open_database_to_read(path, "control"))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.connection.close()


class RunJournal(RunLog, JournalStore):
    """The journal of a run, for writing and for reading back what is on disk."""

    @abstractmethod
    def recorded(self, episode_id: str, attempt: int) -> tuple[list[JournalEntry], list[JournalEntry]]:
        """Return the entries and partials of an attempt on disk, from whichever partition holds them.

        Raises:
            JournalError: the entries cannot be read.
        """

    @abstractmethod
    async def read_attempts(self, attempts: Sequence[tuple[EpisodeSpec, int]]) -> list[list[JournalEntry]]:
        """Return the entries of attempts on disk, after those that a fork inherited, without blocking the event loop.

        Raises:
            JournalError: the entries cannot be read.
        """


def _check_is_there(connection: sqlite3.Connection, partition: Path, episode_id: str) -> None:
    """Check that an episode named by an index has an entry with a valid checksum: indexes have no checksums.

    Raises:
        JournalError: there is no such entry.
    """
    statement = (
        "SELECT episode, attempt, call, asked, body, checksum FROM entries NOT INDEXED WHERE episode = ? LIMIT 1"
    )
    rows = all_rows(connection, partition, statement, episode_id)
    if not rows:
        raise JournalError(
            f"{partition}: its index names an episode {episode_id[:100]!r} without entries; the file is "
            "damaged, restore it from a copy"
        )
    verified_entry(partition, rows[0])
