"""Reads a run's control log: pure functions of the records on disk, for resume and for readers.

The tree of versions decides what survives a rollback: the manifest names a version, and the steps along its ancestors
count. Units of any other step are ready again.
"""

from __future__ import annotations

import bisect
import json
import sqlite3
from abc import abstractmethod
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core import ids
from agentrl.core.errors import SCORER_FAILED, VERSION_GONE, ConfigError, JournalError
from agentrl.core.masking import mask_secrets
from agentrl.core.records import PolicyVersion, Proposal, WeightsRef
from agentrl.core.setting_paths import set_value
from agentrl.journal.control_rows import (
    ADMISSION_COLUMNS,
    EPISODE_COLUMNS,
    LINE,
    TRAJECTORY_COLUMNS,
    UNRESOLVED_QUERY,
    decode_admission_row,
    decode_baselines_row,
    decode_episode_row,
    decode_group_scores_row,
    task_data,
    verify_tables,
)
from agentrl.journal.port import JournalStore
from agentrl.journal.reader import verified_entry
from agentrl.journal.schema import CONTROL_FILE, all_rows, open_database_to_read, read_meta_table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from agentrl.core.records import (
        EpisodeHeader,
        EpisodeSpec,
        FrozenGroupBaselines,
        GroupScores,
        Purpose,
        Score,
    )
    from agentrl.journal.entries import JournalEntry

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


def _columns(table: str, columns: str) -> str:
    return ", ".join(f"{table}.{name}" for name in [*columns.split(), "checksum"])


_ADMISSION = _columns("a", ADMISSION_COLUMNS)
_EPISODE = _columns("e", EPISODE_COLUMNS)
_TRAJECTORY = _columns("t", TRAJECTORY_COLUMNS)
_ADMISSION_WIDTH = len(_ADMISSION.split(","))
_CHUNK = 500

_KEY_CONDITION = "{0}.episode = json_extract(asked.value, '$[0]') AND {0}.attempt = json_extract(asked.value, '$[1]')"
"""Join condition of a table with a JSON parameter of keys."""
_IN_ORDER_OF_COMMIT = " ORDER BY committed_at, length(episode), episode"
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

    def verify(self) -> None:
        """Check every row against its checksum before a run resumes from them.

        Raises:
            JournalError: a row, or the structure of the file, is damaged.
        """
        verify_tables(self.connection, self.path)

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
        statement = f"SELECT {_ADMISSION} FROM admissions a WHERE a.episode = ? AND a.attempt = ?"
        rows = self.rows(statement, episode_id, attempt)
        return decode_admission_row(rows[0]) if rows else None

    def unfinished(self, purpose: Purpose = "train") -> Sequence[EpisodeSpec]:
        """Return the episodes of a purpose, children included, whose newest attempt has not ended, in order of
        admission.

        Raises:
            JournalError: a record was altered or is damaged.
        """
        statement = (
            f"SELECT {_ADMISSION} FROM admissions a WHERE a.purpose = ?"
            " AND NOT EXISTS (SELECT 1 FROM episodes e WHERE e.episode = a.episode AND e.attempt = a.attempt)"
            " AND NOT EXISTS (SELECT 1 FROM admissions b WHERE b.episode = a.episode AND b.attempt > a.attempt)"
            " ORDER BY a.admitted_at, length(a.episode), a.episode"
        )
        specs = [decode_admission_row(row) for row in self.rows(statement, purpose)]
        for spec in specs:
            if not ids.is_numbered(spec.episode_id):
                raise JournalError(f"{self.path}: {spec.episode_id[:100]!r} is no name of an episode; it was altered")
        return specs

    def ended_children(self, parents: Collection[str]) -> dict[str, EpisodeHeader]:
        """Return the headers of the ended children of some episodes, by id; unfinished ones are left out."""
        if not parents:
            return {}
        statement = (
            "SELECT e.episode, e.attempt FROM episodes e WHERE e.parent IN (SELECT value FROM json_each(?)) AND NOT"
            " EXISTS (SELECT 1 FROM admissions b WHERE b.episode = e.episode AND b.attempt > e.attempt)"
        )
        children = self._read_ended_attempts(self.rows(statement, json.dumps(sorted(parents))))
        return {header.episode_id: header for _, header in children}

    def ready_units(self, consumed_through: Mapping[str, PolicyVersion]) -> Iterator[tuple[EpisodeSpec, EpisodeHeader]]:
        """Yield committed training episodes with a unit neither consumed along the surviving lineage nor dropped.

        Args:
            consumed_through: the manifest's version of each trainable policy; units of other policies are frozen and
                never ready. Empty if there is no manifest yet, so that nothing was consumed.

        Yields:
            Specs and headers in order of commit; `resolved_units` tells which of an episode's units are ready.
        """
        lines = [[policy, *part] for policy, version in consumed_through.items() for part in self.surviving(version)]
        trainable = " AND t.policy IN (SELECT value FROM json_each(?))" if consumed_through else ""
        statement = (
            f"WITH {LINE} SELECT DISTINCT t.episode, t.attempt FROM trajectories t JOIN episodes e"
            " ON e.episode = t.episode AND e.attempt = t.attempt"
            f" WHERE e.purpose = 'train' AND e.drop_reason IS NULL{trainable} AND{UNRESOLVED_QUERY}"
        )
        values = [json.dumps(lines), *([json.dumps(sorted(consumed_through))] if consumed_through else [])]
        yield from self._read_ended_attempts(self.rows(statement, *values))

    def members(
        self, group_ids: Collection[str] | None = None, purpose: Purpose = "train"
    ) -> Iterator[tuple[EpisodeSpec, EpisodeHeader]]:
        """Yield committed episodes of a purpose and some groups, or all, in order of commit, regardless of the fate of
        their units.

        A resumed run compares the rest of a group with all its members again.
        """
        statement = "SELECT episode, attempt FROM episodes WHERE purpose = ? AND drop_reason IS NULL"
        if group_ids is None:
            yield from self._read_ended_attempts(self.rows(statement + _IN_ORDER_OF_COMMIT, purpose), ordered=True)
            return
        among = " AND group_id IN (SELECT value FROM json_each(?))"
        yield from self._read_ended_attempts(self.rows(statement + among, purpose, json.dumps(sorted(group_ids))))

    def ended_evaluations(self) -> Iterator[tuple[EpisodeSpec, EpisodeHeader]]:
        """Yield the newest attempts of the evaluation episodes that ended, dropped ones included, in order of
        commit."""
        statement = (
            "SELECT episode, attempt FROM episodes e WHERE purpose = 'evaluate' AND NOT EXISTS"
            " (SELECT 1 FROM admissions b WHERE b.episode = e.episode AND b.attempt > e.attempt)"
        )
        yield from self._read_ended_attempts(self.rows(statement + _IN_ORDER_OF_COMMIT), ordered=True)

    def dispatched(self, newest: int | None = None) -> Iterator[tuple[EpisodeSpec, EpisodeHeader | None]]:
        """Yield the newest training episodes, or all, in order of admission, at their newest attempts, with their
        headers; None if one has not ended."""
        order = "(SELECT min(b.admitted_at) FROM admissions b WHERE b.episode = a.episode)"
        statement = (
            f"SELECT a.episode, a.attempt FROM admissions a WHERE a.purpose = 'train'"
            " AND NOT EXISTS (SELECT 1 FROM admissions b WHERE b.episode = a.episode AND b.attempt > a.attempt)"
            f" ORDER BY {order} DESC, length(a.episode) DESC, a.episode DESC LIMIT ?"
        )
        keys = self.rows(statement, -1 if newest is None else newest)[::-1]
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            headers = {(header.episode_id, header.attempt): header for _, header in self._read_ended_attempts(chunk)}
            for spec in self._specs(chunk):
                yield spec, headers.get((spec.episode_id, spec.attempt))

    def baselines(self) -> dict[str, FrozenGroupBaselines]:
        """Return the baselines of groups, keyed by group."""
        rows = self.rows("SELECT group_id, finishers, earlier, checksum FROM baselines")
        return {row[0]: decode_baselines_row(row) for row in rows}

    def group_scores(self) -> dict[str, list[GroupScores]]:
        """Return the scores of groups, keyed by group, sorted by scorer."""
        scores_by_group: dict[str, list[GroupScores]] = {}
        columns = "group_id, scorer, weight, scores, note, spread, judged_by, tokens, requests, seconds, checksum"
        for row in self.rows(f"SELECT {columns} FROM group_scores ORDER BY group_id, scorer"):
            scores_by_group.setdefault(row[0], []).append(decode_group_scores_row(row))
        return scores_by_group

    def unscored(self) -> dict[tuple[str, int], str]:
        """Map committed episodes that were dropped with a group that could not be scored, by id and attempt, to the
        drop reason."""
        statement = "SELECT DISTINCT episode, attempt, reason FROM unit_drops WHERE reason IN (?, ?)"
        return {
            (episode, attempt): reason for episode, attempt, reason in self.rows(statement, SCORER_FAILED, VERSION_GONE)
        }

    def metric_total(self, name: str) -> float:
        """Return the sum of a metric over all episodes that ended."""
        path = f'$."{name}"'
        return float(self.rows("SELECT coalesce(sum(json_extract(metrics, ?)), 0) FROM episodes", path)[0][0])

    def recorded_metric(self, policy: str, name: str, step: int) -> float | None:
        """Return the newest value of a policy's metric at a step or before it; None if there is none."""
        rows = self.rows(
            "SELECT value FROM metrics WHERE policy = ? AND name = ? AND step <= ? ORDER BY step DESC, id DESC LIMIT 1",
            *(policy, name, step),
        )
        return None if not rows else rows[0][0]

    def metric_rows(self, policy: str, name: str) -> list[tuple[int, Any]]:
        """Return step and value of all records of a policy's metric, oldest first, records that a resume has undone
        included."""
        return self.rows("SELECT step, value FROM metrics WHERE policy = ? AND name = ? ORDER BY id", policy, name)

    def episode_metrics(self, episode_ids: Collection[str]) -> dict[str, dict[str, float]]:
        """Return the metrics of committed episodes, by id."""
        statement = (
            "SELECT episode, metrics FROM episodes WHERE drop_reason IS NULL"
            " AND episode IN (SELECT value FROM json_each(?)) ORDER BY attempt"
        )
        metrics = {}
        for episode_id, text in self.rows(statement, json.dumps(sorted(episode_ids))):
            try:
                values = msgspec.json.decode(text, type=dict[str, float | None])
            except msgspec.MsgspecError as error:
                raise JournalError(f"{self.path}: the metrics of {episode_id} are damaged: {error}") from error
            metrics[episode_id] = {name: value for name, value in values.items() if value is not None}
        return metrics

    def headers_against(self, policies: Collection[str]) -> Iterator[EpisodeHeader]:
        """Yield committed training episodes in which one of these policies acted, in order of commit."""
        if policies:
            statement = (
                "SELECT episode, attempt FROM episodes WHERE purpose = 'train' AND drop_reason IS NULL AND"
                " (episode, attempt) IN (SELECT episode, attempt FROM trajectories"
                " WHERE policy IN (SELECT value FROM json_each(?)))"
            )
            rows = self.rows(statement + _IN_ORDER_OF_COMMIT, json.dumps(sorted(policies)))
            for _, header in self._read_ended_attempts(rows, ordered=True):
                yield header

    def _specs(self, keys: Sequence[tuple[str, int]]) -> list[EpisodeSpec]:
        """Return the specs of admitted attempts, at most `_CHUNK`, in the order of the keys."""
        statement = f"SELECT {_ADMISSION} FROM json_each(?) asked JOIN admissions a ON {_KEY_CONDITION.format('a')}"
        rows_by_key = {(row[0], row[1]): row for row in self.rows(statement, json.dumps(keys))}
        if len(rows_by_key) < len(keys):
            raise JournalError(
                f"{self.path}: an index refers to admissions that do not exist; restore the file from a copy"
            )
        return [decode_admission_row(rows_by_key[key[0], key[1]]) for key in keys]

    def _read_ended_attempts(
        self, keys: Sequence[tuple[str, int]], *, ordered: bool = False
    ) -> Iterator[tuple[EpisodeSpec, EpisodeHeader]]:
        """Yield the attempts that ended, in order of commit; `ordered` states that the keys have that order."""
        parts = (keys[start : start + _CHUNK] for start in range(0, len(keys), _CHUNK))
        if not ordered and len(keys) > _CHUNK:
            statement = (
                f"SELECT e.episode, e.attempt FROM json_each(?) asked JOIN episodes e ON {_KEY_CONDITION.format('e')}"
            )
            rows = self.rows(statement + " ORDER BY e.committed_at, length(e.episode), e.episode", json.dumps(keys))
            yield from self._read_ended_attempts(rows, ordered=True)
            return
        for part in parts:
            keys_json = json.dumps(part)
            trajectories: dict[tuple[str, int], list[Any]] = {}
            statement = (
                f"SELECT {_TRAJECTORY} FROM json_each(?) asked JOIN trajectories t ON {_KEY_CONDITION.format('t')}"
                " ORDER BY t.episode, t.attempt, t.seat, t.agent"
            )
            for row in self.rows(statement, keys_json):
                trajectories.setdefault((row[0], row[1]), []).append(row)
            statement = (
                f"SELECT {_ADMISSION}, {_EPISODE} FROM json_each(?) asked"
                f" JOIN episodes e ON {_KEY_CONDITION.format('e')}"
                " JOIN admissions a ON a.episode = e.episode AND a.attempt = e.attempt"
                " ORDER BY e.committed_at, length(e.episode), e.episode"
            )
            for row in self.rows(statement, keys_json):
                attempt_trajectories = trajectories.get((row[0], row[1]), [])
                yield (
                    decode_admission_row(row[:_ADMISSION_WIDTH]),
                    decode_episode_row(row[_ADMISSION_WIDTH:], attempt_trajectories),
                )

    def resolved_units(
        self, consumed_through: Mapping[str, PolicyVersion], among: Collection[str] | None = None
    ) -> dict[UnitKey, str | None]:
        """Map each resolved unit to None if it was consumed along the surviving lineage of `consumed_through`, else to
        its drop reason.

        Args:
            consumed_through: the manifest's version of each trainable policy.
            among: units of these episodes only.
        """
        arguments = [] if among is None else [json.dumps(sorted(among))]
        of_these = "" if among is None else " AND episode IN (SELECT value FROM json_each(?))"
        rows = self.rows(f"SELECT episode, attempt, policy, reason FROM unit_drops WHERE 1{of_these}", *arguments)
        reasons: dict[UnitKey, str | None] = {
            (episode, attempt, policy): reason for episode, attempt, policy, reason in rows
        }
        for policy, version in consumed_through.items():
            for part in self.surviving(version):
                statement = (
                    "SELECT DISTINCT episode, attempt FROM step_units"
                    f" WHERE policy = ? AND lineage = ? AND step > ? AND step <= ?{of_these}"
                )
                for episode, attempt in self.rows(statement, policy, *part, *arguments):
                    reasons[episode, attempt, policy] = None
        return reasons

    def pruned(self, episodes: Collection[str]) -> set[tuple[str, int]]:
        """Return the attempts of these episodes whose entries were pruned."""
        statement = "SELECT episode, attempt FROM pruned WHERE episode IN (SELECT value FROM json_each(?))"
        return set(map(tuple, self.rows(statement, json.dumps(sorted(episodes)))))

    def surviving(self, version: PolicyVersion) -> list[tuple[int, int, int]]:
        """Return the line of steps that led to `version`, newest first: (lineage, first, last) means steps first < s ≤
        last.

        Raises:
            JournalError: the tree of versions is broken or has a cycle.
        """
        line: list[tuple[int, int, int]] = []
        lineage, last = version.lineage, version.step
        self._check_numbers(version.policy, lineage, last)
        while True:
            statement = (
                "SELECT step, parent_lineage, parent_step FROM versions"
                " WHERE policy = ? AND lineage = ? AND step <= ? ORDER BY step LIMIT 1"
            )
            rows = self.rows(statement, version.policy, lineage, last)
            if not rows and not line and not self._has_steps(version.policy, lineage):
                return [(lineage, -1, last)]  # killed before its first version was on disk, so nothing was consumed
            if not rows:
                raise JournalError(
                    f"{self.path}: version {version.policy}@{lineage}.{last} was never published in this run"
                )
            first, parent_lineage, parent_step = rows[0]
            self._check_numbers(version.policy, first, *([] if parent_lineage is None else rows[0][1:]))
            if parent_lineage is None or (parent_lineage == lineage == 0 and parent_step < first):
                # Lineage 0 begins with the base model, even if that is not recorded.
                line.append((lineage, -1, last))
                return line
            if parent_lineage >= lineage:
                raise JournalError(
                    f"{self.path}: version {version.policy}@{lineage}.{first} has no parent lineage; the versions "
                    "table was altered or is damaged"
                )
            line.append((lineage, parent_step, last))
            lineage, last = parent_lineage, parent_step

    def parents(self) -> dict[tuple[str, int], PolicyVersion]:
        """Return the version that each (policy, lineage) except the first started from."""
        statement = (
            "SELECT policy, lineage, parent_lineage, parent_step FROM versions"
            " WHERE parent_lineage IS NOT NULL AND parent_lineage < lineage"
        )
        versions: dict[tuple[str, int], PolicyVersion] = {}
        for policy, lineage, parent_lineage, parent_step in self.rows(statement):
            self._check_numbers(policy, lineage, parent_lineage, parent_step)
            versions[policy, lineage] = PolicyVersion(policy, parent_lineage, parent_step)
        return versions

    def _check_numbers(self, policy: str, *numbers: Any) -> None:
        """Check the types of numbers: SQLite accepts any type in any column, and this reads without checksums."""
        odd = [number for number in numbers if not isinstance(number, int)]
        if odd:
            raise JournalError(
                f"{self.path}: a version of {policy} has {str(odd[0])[:40]!r} where a number belongs; "
                "the versions table was altered or is damaged"
            )

    def _has_steps(self, policy: str, lineage: int) -> bool:
        return bool(self.rows("SELECT 1 FROM step_units WHERE policy = ? AND lineage = ? LIMIT 1", policy, lineage))

    def proposals(self, newest: int | None = None) -> list[Proposal]:
        """Return the newest proposals that the run remembers, or all, and those of unfinished attempts, in recorded
        order.

        Proposals of dropped or replaced attempts are forgotten.
        """
        ended_query = "SELECT 1 FROM episodes e WHERE e.episode = p.episode AND e.attempt = p.attempt"
        replaced_query = "SELECT 1 FROM admissions a WHERE a.episode = p.episode AND a.attempt > p.attempt"
        source = (
            f"FROM proposals p WHERE NOT EXISTS ({ended_query} AND e.drop_reason IS NOT NULL)"
            f" AND NOT EXISTS ({replaced_query})"
        )
        oldest = 0
        if newest is not None:
            rows = self.rows(f"SELECT number {source} ORDER BY number DESC LIMIT 1 OFFSET ?", newest - 1)
            oldest = rows[0][0] if rows else 0
        statement = (
            f"SELECT number, episode, attempt, call, environment, key, structure {source}"
            f" AND (number >= ? OR NOT EXISTS ({ended_query})) ORDER BY number, episode, attempt, call"
        )
        try:
            return msgspec.convert(self.rows(statement, oldest), list[Proposal])
        except msgspec.ValidationError as error:
            raise JournalError(
                f"{self.path}: a record in `proposals` cannot be read ({error}); it is damaged"
            ) from error

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
        """Return the newest step of each policy in the newest lineage that took any."""
        statement = (
            "SELECT policy, max(step) FROM steps s WHERE lineage ="
            " (SELECT max(lineage) FROM steps o WHERE o.policy = s.policy) GROUP BY policy"
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
        self.connection.create_function("task_data", 1, task_data, deterministic=True)

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

    @abstractmethod
    def newest_scores(self, scorer: str, count: int) -> dict[bytes, Score]:
        """Return the newest scores of a scorer by the hash of their content; see `TurnLogReader.newest_scores`."""


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
