"""Reads a run: its episodes, the events of one, its rewards. Works while the run is written, and if it is damaged.

Needs neither torch, ray, numpy nor the environment's code. Returns content unescaped: code that shows it calls
`escape_text`. Every question about a run is a method of `RunReader`, or a function of a reader in a neighboring
module; the answer is a record of plain data for any renderer and JSON. `COLUMNS` maps an episode's columns to SQL.

Damage is found and named. SQLite stores any type in any column: queries trust the declared types, and rows are checked
only after a query fails (`convert_damage_errors`), so that reading pays nothing for it. `verified_control_rows` leaves
out rows with a wrong checksum and reports them; `check_json_encodable` refuses an entry that is neither text nor JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.clock import SystemClock
from agentrl.core.control_messages import read_actions
from agentrl.core.errors import AgentRLError, ConfigError, InputError, JournalError
from agentrl.core.files import expand_path
from agentrl.core.records import ForkPoint, PolicyVersion
from agentrl.core.setting_paths import set_value
from agentrl.inspection.ledger import RunLedger, run_ledger
from agentrl.inspection.where_filter import FilterColumn, ObjectColumn, find_column, json_column, parse_where_filter
from agentrl.journal.control_rows import is_intact
from agentrl.journal.entries import BeginEntry, EntryBody, JournalEntry, decode_entries
from agentrl.journal.reader import TurnLogReader, load_fork_prefix
from agentrl.journal.requests import REQUESTS_FILE
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.run_process import is_writer_dead, read_process_state
from agentrl.journal.schema import CONTROL_FILE, control_columns
from agentrl.observe.metrics import TASK_DIGEST
from agentrl.observe.run_directory import describe_missing_run
from agentrl.observe.run_state import SILENT_S, TRAINING, read_run_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_TYPES = {"TEXT": "'text'", "INTEGER": "'integer'", "REAL": "'real', 'integer'", "BLOB": "'blob'"}
_PLAIN_TYPES = {str, int, float, bool, bytes, type(None)}
MAX_DEPTH = 100
"""Maximum nesting of content that is shown, far below the limit of recursive printers."""
MAX_RELATIVES = 1000
"""Maximum number of children or group members of an episode that are shown."""
MAX_SECONDS = 10**12
"""Largest time or duration that a run can record, as in `observe.run_state.Seconds`."""
Row = dict[str, Any]
STATUS = (
    "CASE WHEN e.episode IS NULL AND EXISTS"
    " (SELECT 1 FROM admissions n WHERE n.episode = a.episode AND n.attempt > a.attempt) THEN 'repeated'"
    " WHEN e.episode IS NULL THEN 'in_flight' WHEN e.drop_reason IS NOT NULL THEN 'dropped'"
    " WHEN a.purpose <> 'train' THEN 'finished'"
    " WHEN EXISTS (SELECT 1 FROM step_units s WHERE s.episode = a.episode AND s.attempt = a.attempt) THEN 'trained'"
    " WHEN EXISTS (SELECT 1 FROM unit_drops d WHERE d.episode = a.episode AND d.attempt = a.attempt) THEN 'dropped'"
    " ELSE 'ready' END"
)
STATUSES = ("in_flight", "ready", "trained", "finished", "dropped", "repeated")
DROP_REASON = (
    "coalesce(e.drop_reason, (SELECT min(d.reason) FROM unit_drops d WHERE d.episode = a.episode"
    " AND d.attempt = a.attempt AND a.purpose = 'train' AND NOT EXISTS"
    " (SELECT 1 FROM step_units s WHERE s.episode = a.episode AND s.attempt = a.attempt)))"
)
"""Reason for the status `dropped`: why the episode was dropped, or, if it was committed, its units."""
STALENESS = (
    "(SELECT max(s.step - 1 - t.oldest_step) FROM step_units s JOIN trajectories t ON t.episode = s.episode"
    " AND t.attempt = s.attempt AND t.seat = s.seat AND t.agent = s.agent"
    " WHERE s.episode = a.episode AND s.attempt = a.attempt AND t.lineage = s.lineage)"
)
_REWARDED = " FROM trajectories t WHERE t.episode = a.episode AND t.attempt = a.attempt AND t.reward IS NOT NULL"
REWARD = f"(CASE WHEN (SELECT min(t.seat) < max(t.seat){_REWARDED}) THEN NULL ELSE e.reward END)"
REWARDS = (
    f"(SELECT json_group_object(seat, reward) FROM (SELECT t.seat, avg(t.reward) AS reward{_REWARDED} GROUP BY t.seat))"
)
COLUMNS: dict[str, FilterColumn] = {
    "episode": FilterColumn("a.episode", "text"),
    "attempt": FilterColumn("a.attempt", "number"),
    "status": FilterColumn(STATUS, "text", choices=STATUSES),
    "purpose": FilterColumn("a.purpose", "text"),
    "environment": FilterColumn("a.environment", "text"),
    "task": FilterColumn("a.task", "text"),
    "group": FilterColumn("a.group_id", "text"),
    "parent": FilterColumn("a.parent", "text"),
    "seats": FilterColumn("e.seats", "text"),
    "policies": FilterColumn("e.policies", "text"),
    "oldest_step": FilterColumn("e.oldest_step", "number"),
    "lineage": FilterColumn("e.lineage", "number"),
    "staleness": FilterColumn(STALENESS, "number"),
    "reward": FilterColumn(REWARD, "number"),
    "stop_reason": FilterColumn("e.stop_reason", "text"),
    "drop_reason": FilterColumn(DROP_REASON, "text"),
    # An episode that an error dropped has none: its header counts nothing.
    "turns": FilterColumn("iif(e.stop_reason IS NULL, nullif(e.turns, 0), e.turns)", "number"),
    "tokens": FilterColumn("iif(e.stop_reason IS NULL, nullif(e.tokens, 0), e.tokens)", "number"),
    "seconds": FilterColumn("e.seconds", "number"),
    "detail": FilterColumn("e.detail", "text"),
    "admitted_at": FilterColumn("a.admitted_at", "number"),
    "committed_at": FilterColumn("e.committed_at", "number"),
}
"""Columns of `EpisodeLine`, for `--where`, `--sort` and `--columns`."""
OBJECTS = {
    "reward/": ObjectColumn(REWARDS, f"(SELECT avg(t.reward){_REWARDED} AND t.seat = ?)", "number"),
    "metric.": json_column("e.metrics"),
    "data.": json_column("a.data"),
}
"""Objects whose fields are columns too: `reward/SEAT`, `metric.NAME` from `ctx.metric`, `data.NAME` from the task."""
EPISODES = " FROM admissions a LEFT JOIN episodes e ON e.episode = a.episode AND e.attempt = a.attempt"
NEWEST = "NOT EXISTS (SELECT 1 FROM admissions n WHERE n.episode = a.episode AND n.attempt > a.attempt)"


@contextmanager
def convert_damage_errors(log: SqliteRunLog) -> Iterator[None]:
    """Convert an unexpected error in the context to a `JournalError` if the control log is damaged."""
    try:
        yield
    except AgentRLError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        check_control_log_types(log)
        try:
            log.verify()
        except JournalError as damage:
            raise damage from error
        raise


def check_control_log_types(log: SqliteRunLog) -> None:
    """Check the types of every row of the control log, and its times.

    Raises:
        JournalError: a value is not of the type its column declares, or is no time; the message names table, row and
            column.
    """
    for (table,) in log.rows("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"):
        columns = log.rows(f"PRAGMA table_info({table})")
        odd = {}
        for _, name, kind, is_required, *_ in columns:
            types = _TYPES[kind] if is_required else f"{_TYPES[kind]}, 'null'"
            odd[name] = f"typeof({name}) NOT IN ({types})"
            if name.endswith("_at") or name == "seconds":
                odd[name] += f" OR abs({name}) > {MAX_SECONDS}"
        cases = ", ".join(f"CASE WHEN {condition} THEN '{name}' END" for name, condition in odd.items())
        first = columns[0][1]
        rows = log.rows(f"SELECT {first}, coalesce({cases}) FROM {table} WHERE {' OR '.join(odd.values())} LIMIT 1")
        for key, name in rows:
            raise JournalError(
                f"{log.path.name}: `{name}` of {str(key)[:100]!r} in `{table}` has the wrong type, or is an impossible "
                "time; the record was altered or is damaged"
            )


def check_json_encodable(body: EntryBody, location: str) -> None:
    """Refuse content that no JSON writer accepts: keys that are neither text nor numbers, extension types, great depth.

    Raises:
        JournalError: the content is not acceptable; the message begins with `location`.
    """
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                odd = [type(key).__name__ for key in value if not isinstance(key, str | int | float | None)]
                if odd:
                    raise JournalError(f"{location}: a key of type {odd[0]}, which cannot be shown")
                below += value.values()
            elif isinstance(value, msgspec.Struct):
                below += [getattr(value, name) for name in value.__struct_fields__]
            elif isinstance(value, ForkPoint):
                below += [value.journal, value.partition, value.episode_id, value.attempt, value.call_id]
                below += value.messages
            elif isinstance(value, list | tuple):
                below += value
            elif not isinstance(value, str | int | float | bytes | datetime | None):
                raise JournalError(f"{location}: a value of type {type(value).__name__}, which cannot be shown")
        level = [value for value in below if type(value) not in _PLAIN_TYPES]
        if not level:
            return
    raise JournalError(f"{location}: nested deeper than {MAX_DEPTH}, which cannot be shown")


def verified_control_rows(
    log: SqliteRunLog, table: str, condition: str, *parameters: Any, problems: list[str] | None = None
) -> list[Row]:
    """Return the rows of a table that pass a condition and match their checksums.

    Args:
        log: the run's control log.
        table: one of `journal.control_rows.CHECKED`.
        condition: SQL, optionally with ORDER BY or LIMIT; a constant of this package, never content.
        parameters: values of its placeholders.
        problems: receives a message for each row with a wrong checksum.

    Raises:
        JournalError: the database cannot be read.
    """
    names = control_columns(table)
    row_values = []
    for row in log.rows(f"SELECT * FROM {table} WHERE {condition}", *parameters):
        if is_intact(table, row):
            row_values.append(dict(zip(names, row, strict=True)))
        elif problems is not None:
            problems.append(
                f"{log.path.name}: a record in `{table}` ({str(row[0])[:100]!r}, …) does not match its checksum"
            )
    return row_values


class EpisodeLine(msgspec.Struct, frozen=True):
    """An episode in a list."""

    episode: str
    attempt: int
    status: str
    """Status: `in_flight`, `ready`, `trained`, `dropped`, `finished` (not a training episode), or `repeated` (the
    attempt failed and a later one replaced it)."""
    purpose: str
    environment: str
    task: str
    group: str
    parent: str | None
    seats: dict[str, str]
    policies: list[str]
    oldest_step: int | None
    lineage: int | None
    staleness: int | None
    """Steps from the episode's oldest weights to those it was trained into, if both belong to one lineage."""
    reward: float | None
    """Reward of the episode's only rewarded seat, summed over its agents. None if several seats were rewarded: they
    have rewards of their own, in `rewards`, whose sum means nothing."""
    stop_reason: str | None
    drop_reason: str | None
    turns: int | None
    tokens: int | None
    seconds: float | None
    detail: str | None
    """Message of the failure that dropped the episode."""
    admitted_at: float
    committed_at: float | None
    rewards: dict[str, float] = {}
    """Mean reward of each rewarded seat's agents, as in the metric `reward/<seat>`."""
    problem: str | None = None
    """Damage found in the episode's records."""
    fields: dict[str, Any] = {}
    """Values of the chosen `reward/SEAT`, `metric.NAME` and `data.NAME`."""

    def field(self, column: str) -> Any:
        """Return the value of a column or of a chosen field; of `reward/SEAT` also if it was not chosen."""
        if column in self.fields:
            return self.fields[column]
        return self.rewards.get(column.removeprefix("reward/")) if "/" in column else getattr(self, column)


class AgentLine(msgspec.Struct, frozen=True):
    """One agent of an episode: its policy, tokens and reward."""

    seat: str
    index: int
    policy: str
    reward: float | None
    tokens: int
    oldest_step: int
    lineage: int


class EpisodeView(msgspec.Struct, frozen=True):
    """An episode with its whole content."""

    summary: EpisodeLine
    agents: list[AgentLine]
    measured_against: list[str]
    """Versions on which the rewards may also depend: the oldest of each policy in the children it waited for."""
    metrics: dict[str, float | None]
    detail: str
    """Message of the failure that dropped the episode; empty if it was not dropped."""
    entries: list[tuple[str, EntryBody]]
    """Call ids and entries, in the order in which they were written."""
    inherited: int
    """Number of entries that a fork inherited from its parent, after its own first entry."""
    problems: list[str]
    """Problems met while reading, for people."""


class RunLine(msgspec.Struct, frozen=True):
    """A run in a list."""

    name: str
    path: str
    purpose: str
    """Purpose of the run: `train`, `evaluate` if `agentrl evaluate` kept its episodes, or `import` if another tool
    wrote them."""
    episodes: int
    """Number of committed episodes of that purpose."""
    dropped: int
    """Number of dropped ones."""
    in_flight: int
    """Number of unfinished ones."""
    steps: dict[str, int]
    """Newest step of each policy."""
    rewards: dict[str, float]
    """Mean reward of each policy over its last five steps; if nothing was trained, over all episodes it acted in. Of a
    policy with several seats, that of each, as `POLICY/SEAT`."""
    state: str = ""
    """State of the run, as `RunReader.standing` returns it, with what it does if it does not train, such as
    `starting: loading trainer and engine` or `running: paused`."""
    problem: str | None = None


class RewardCurvePoint(msgspec.Struct, frozen=True):
    """One optimizer step of one policy."""

    policy: str
    lineage: int
    step: int
    reward: float | None
    """Mean reward over the units that the step consumed; None if they have several seats, whose sum means nothing."""
    units: int
    rewards: dict[str, float] = {}
    """Mean reward of each seat's agents, as in the metric `reward/<seat>`."""
    mark: str = ""
    """Changes just before the step: a resume, code, settings."""


def struct_from_row(kind: type[Any], row: Any) -> Any:
    """Make a struct of a row and check its types: a database may hold anything anywhere."""
    fields = row if isinstance(row, dict) else dict(zip(kind.__struct_fields__, row, strict=True))
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise JournalError(f"a row of the control log is damaged: {error}") from error


def decode_episode_metrics(text: Any, problems: list[str]) -> dict[str, float | None]:
    """Read an episode's metrics; values that are not numbers are reported in `problems`."""
    numbers: dict[str, float | None] = {}
    for name, value in parse_json_object(text).items():
        try:
            numbers[name] = msgspec.convert(value, float | None)
        except (msgspec.ValidationError, OverflowError):
            problems.append(f"metric {name[:100]!r} is not a number; its row of the control log is damaged")
    return numbers


def decode_child_versions(text: Any, problems: list[str]) -> list[str]:
    """Read the versions against which an episode was measured; anything but a list of versions is reported in
    `problems`."""
    try:
        return [] if text is None else list(map(str, msgspec.json.decode(text, type=tuple[PolicyVersion, ...])))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        problems.append(
            "the versions it was measured against are not a list of versions; its row of the control log is damaged"
        )
        return []


def parse_json_object(text: Any) -> dict[str, Any]:
    """Read the object in a JSON column; empty if it holds another value, or none."""
    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise JournalError(f"a row of the control log is damaged: {error}") from error
    return value if isinstance(value, dict) else {}


def reward_columns(rewarded: Iterable[Iterable[str]]) -> list[str]:
    """Return the columns that show rewards: `reward`, or `reward/SEAT` for each seat of an episode or step that
    rewarded several, because their sum means nothing. There are both if others rewarded another seat alone.

    Args:
        rewarded: the rewarded seats of each episode or step.
    """
    by_row = list(map(set, rewarded))
    several = {seat for seats in by_row if len(seats) > 1 for seat in seats}
    single = ["reward"] if not several or any(seats - several for seats in by_row) else []
    return single + [f"reward/{seat}" for seat in sorted(several)]


@dataclass
class _Memory:
    """What a reader keeps in `RunReader.remembering`."""

    info: dict[str, Any] = field(default_factory=dict)
    lines: dict[tuple[Any, Any], EpisodeLine] = field(default_factory=dict)
    relatives: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Rows of the newest attempts by column and its value: id, attempt, value."""
    models: dict[str, str | None] = field(default_factory=dict)
    """Directory of the base model by policy; see `inspection.tokens`."""


class RunReader:
    """Reads one run; `path` is its directory or its journal's."""

    def __init__(self, path: str | Path) -> None:
        """Open the run.

        Raises:
            InputError: there is no run at `path`.
            JournalError: the journal cannot be read.
        """
        self.path = Path(expand_path(path))
        self.journal = self.path / "journal" if (self.path / "journal").is_dir() else self.path
        if not (self.journal / CONTROL_FILE).is_file():
            raise InputError(describe_missing_run(self.path))
        self.log = SqliteRunLog(self.journal)
        self._turns = TurnLogReader(self.journal)
        self._memory: _Memory | None = None

    def close(self) -> None:
        """Close all open files. Idempotent."""
        self.log.close()
        self._turns.close()

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Keep the run's identity, the lines of episodes and their relations in memory: many questions about many
        episodes then read them once. Records that the run writes meanwhile may be missing.
        """
        self._memory = _Memory()
        try:
            yield
        finally:
            self._memory = None

    def model_of(self, policy: str, find: Callable[[], str | None]) -> str | None:
        """Return the base model's directory that `find` returns; kept while the reader remembers."""
        if self._memory is None:
            return find()
        if policy not in self._memory.models:
            self._memory.models[policy] = find()
        return self._memory.models[policy]

    def info(self) -> dict[str, Any]:
        """The run's identity: format, id, name, resolved configuration."""
        if self._memory is None:
            return dict(self.log.info())
        self._memory.info = self._memory.info or dict(self.log.info())
        return self._memory.info

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration with the changes of all resumes, and of `agentrl run set` since the newest;
        empty if the journal has none."""
        config = self.log.config()
        begun_at = max((start.began_at for start in self.log.starts()), default=0.0)
        for action in read_actions(self.log.info()) if config else ():
            if action.act == "set" and action.at >= begun_at:
                with contextlib.suppress(ConfigError):
                    set_value(config, action.path, action.now)
        return config

    def purpose(self) -> str:
        """Return what the run was for: `train` or `evaluate`."""
        return "evaluate" if "evaluated" in self.info() else "train"

    def episodes(
        self,
        where: str = "",
        *,
        sort: str = "admitted_at",
        descending: bool = True,
        limit: int = 50,
        offset: int = 0,
        among: Collection[str] | None = None,
        training_first: bool = False,
        fields: Collection[str] = (),
    ) -> list[EpisodeLine]:
        """Return the episodes that pass a filter (`where_filter.parse_where_filter`), sorted by a column; those without
        a value come last.

        Args:
            where: the filter.
            sort: the column.
            descending: whether the largest come first.
            limit: maximum number of episodes.
            offset: number of episodes to skip.
            among: only these episodes, as `EPISODE.ATTEMPT`, from `search.episodes_with_words`.
            training_first: whether episodes of purpose `train` come before all others.
            fields: each `reward/SEAT`, `metric.NAME` or `data.NAME` to read.

        Raises:
            InputError: the filter cannot be read, or there is no such column; it names `reward`, which no episode has.
            JournalError: the journal is damaged.
        """
        condition, values = self._condition(where, among)
        by = find_column("--sort", sort, COLUMNS, OBJECTS)
        self._check_reward("--sort", by.sql)
        direction = "DESC" if descending else "ASC"
        key = f"({by.sql})"
        first = "a.purpose != 'train', " if training_first else ""
        order = f"{first}{key} IS NULL, {key} {direction}, a.admitted_at {direction}, a.episode, a.attempt"
        statement = f"SELECT a.episode, a.attempt{EPISODES} WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?"
        return self.lines(self.log.rows(statement, *values, *by.values, *by.values, limit, offset), fields)

    def field_names(self) -> dict[str, list[str]]:
        """Return the names of the fields of each object in `OBJECTS`, as far as the newest thousand episodes have
        them."""
        names = {}
        for prefix, column in OBJECTS.items():
            newest = f"SELECT {column.sql} AS object{EPISODES} ORDER BY a.admitted_at DESC LIMIT 1000"
            fields = "json_each(CASE WHEN json_valid(object) THEN object ELSE '{}' END) field"
            rows = self.log.rows(f"SELECT DISTINCT field.key FROM ({newest}), {fields} ORDER BY 1")
            names[prefix] = [f"{prefix}{name}" for (name,) in rows]
        return names

    def reward_columns(self, condition: str = "1", *values: Any) -> list[str]:
        """Return the columns that hold the episodes' rewards, as `reward_columns` chooses them for the newest thousand.

        Args:
            condition: SQL over `episodes e`, a constant of this package; which episodes to look at.
            values: values of its placeholders.
        """
        newest = f"SELECT e.episode, e.attempt FROM episodes e WHERE e.reward IS NOT NULL AND {condition}"
        newest += " ORDER BY e.committed_at DESC LIMIT 1000"
        seats = "SELECT json_group_array(DISTINCT t.seat) AS seats FROM trajectories t WHERE t.reward IS NOT NULL"
        seats += f" AND (t.episode, t.attempt) IN ({newest}) GROUP BY t.episode, t.attempt"
        rows = self.log.rows(f"SELECT DISTINCT seats FROM ({seats})", *values)
        return reward_columns(map(str, json.loads(seats)) for (seats,) in rows)

    def _check_reward(self, option: str, sql: str) -> None:
        """Refuse a question about `reward` if no episode has one, because several seats of each are rewarded."""
        if REWARD not in sql or "reward" in (columns := self.reward_columns()):
            return
        if not self.log.rows(f"SELECT 1{EPISODES} WHERE {REWARD} IS NOT NULL LIMIT 1"):
            raise InputError(
                f"{option}: no episode has one reward, because several seats are rewarded; use {' or '.join(columns)}"
            )

    def _condition(self, where: str, among: Collection[str] | None) -> tuple[str, tuple[Any, ...]]:
        condition = parse_where_filter(where, COLUMNS, OBJECTS)
        self._check_reward("--where", condition.sql)
        if among is None:
            return condition.sql, condition.values
        key_condition = "a.episode || '.' || a.attempt IN (SELECT value FROM json_each(?))"
        return f"({condition.sql}) AND {key_condition}", (*condition.values, json.dumps(sorted(among)))

    def keys(self, where: str = "", *, among: Collection[str] | None = None) -> list[tuple[str, int]]:
        """Return id and attempt of all episodes that pass a filter, in order of admission; raises as `episodes`."""
        condition, values = self._condition(where, among)
        order = "a.admitted_at, a.episode, a.attempt"
        return self.log.rows(f"SELECT a.episode, a.attempt{EPISODES} WHERE {condition} ORDER BY {order}", *values)

    def count(self, where: str = "", *, among: Collection[str] | None = None) -> int:
        """Return the number of episodes that pass a filter; raises as `episodes`."""
        if not where.strip() and among is None:
            return int(self.log.rows("SELECT count(*) FROM admissions")[0][0])
        condition, values = self._condition(where, among)
        return int(self.log.rows(f"SELECT count(*){EPISODES} WHERE {condition}", *values)[0][0])

    def children(self, episode_id: str) -> list[EpisodeLine]:
        """Return the newest attempts of an episode's children, sorted by id."""
        return self._newest("parent", episode_id)

    def group(self, group_id: str) -> list[EpisodeLine]:
        """Return the newest attempts of the members of a group."""
        return self._newest("group_id", group_id)

    def _newest(self, column: str, value: str) -> list[EpisodeLine]:
        statement = f"SELECT a.episode, a.attempt, a.{column} FROM admissions a WHERE a.{column}"
        if self._memory is None:
            rows = self.log.rows(f"{statement} = ? AND {NEWEST} LIMIT {MAX_RELATIVES}", value)
        else:  # no index leads to them: one pass over all admissions is cheaper than one for each question
            if column not in self._memory.relatives:
                relatives = self._memory.relatives[column] = {}
                for row in self.log.rows(f"{statement} IS NOT NULL AND {NEWEST}"):
                    relatives.setdefault(row[2], []).append(row)
            rows = self._memory.relatives[column].get(value, [])[:MAX_RELATIVES]
        newest = [(str(episode), attempt) for episode, attempt, _ in rows]
        return self.lines(sorted(newest, key=lambda key: (len(key[0]), key)))

    def lines(self, keys: Sequence[tuple[Any, Any]], fields: Collection[str] = ()) -> list[EpisodeLine]:
        """Return episodes by (id, attempt), each with the damage to its records and the chosen fields.

        The columns of a page are read separately, so that sorting reads only the columns it needs.
        """
        remembered = self._memory.lines if self._memory is not None and not fields else {}
        chosen = [find_column("--columns", name, {}, OBJECTS) for name in fields]
        columns = ", ".join([*(column.sql for column in (*COLUMNS.values(), *chosen)), REWARDS])
        values = [value for column in chosen for value in column.values]
        statement = f"SELECT {columns}{EPISODES} WHERE a.episode = ? AND a.attempt = ?"
        lines = []
        for key in keys:
            if key in remembered:
                lines.append(remembered[key])
                continue
            for row in self.log.rows(statement, *values, *key):
                read = dict(zip((*COLUMNS, *fields, "rewards"), row, strict=True))
                read["fields"] = {name: read.pop(name) for name in fields}
                read["seats"], read["rewards"] = parse_json_object(read["seats"]), parse_json_object(read["rewards"])
                read["policies"] = [policy for policy in str(read["policies"] or "").split(",") if policy]
                read["problem"] = self._damage(*key)
                lines.append(struct_from_row(EpisodeLine, read))
                remembered[key] = lines[-1]
        return lines

    def _damage(self, episode: Any, attempt: Any) -> str | None:
        """Describe damage to the records of an attempt, by their checksums; None if there is none."""
        for table in ("admissions", "episodes", "trajectories"):
            statement = f"SELECT * FROM {table} WHERE episode = ? AND attempt = ?"
            for row in self.log.rows(statement, episode, attempt):
                if not is_intact(table, row):
                    return f"its record in `{table}` does not match its checksum: altered, or damaged by the disk"
        return None

    def named_attempt(self, name: str, attempt: int | None = None) -> tuple[str, int | None]:
        """Return the episode and the attempt of a name such as `e433.1`, as messages of a run write it; another name
        unchanged."""
        episode_id, dot, number = name.rpartition(".")
        if not dot or not (number.isascii() and number.isdecimal()) or attempt not in (None, int(number[:9])):
            return name, attempt
        exists = "SELECT 1 FROM admissions WHERE episode = ? LIMIT 1"  # ids of children end with a number too
        if self.log.rows(exists, name) or not self.log.rows(exists, episode_id):
            return name, attempt
        return episode_id, int(number[:9])

    def episode(self, episode_id: str, attempt: int | None = None) -> EpisodeView:
        """Read an episode in its newest attempt, or in a given one; `e433.1` names attempt 1 of e433. Its `problems`
        list the unreadable parts.

        Raises:
            InputError: there is no such episode.
            JournalError: the control log is damaged.
        """
        episode_id, attempt = self.named_attempt(episode_id, attempt)
        statement = "SELECT episode, attempt FROM admissions WHERE episode = ? ORDER BY attempt DESC"
        keys = [key for key in self.log.rows(statement, episode_id) if attempt in (None, key[1])]
        lines = self.lines(keys[:1])
        if not lines:
            attempt_text = f", attempt {attempt}" if attempt is not None else ""
            raise InputError(
                f"{self.path}: no episode {episode_id!r}{attempt_text}; `agentrl episode list {self.path}` shows them"
            )
        line = lines[0]
        entries, inherited, problems = self._entries(line)
        if line.problem is not None:
            problems.append(line.problem)
        bodies: list[tuple[str, EntryBody]] = []
        for entry in entries:
            try:
                body = decode_entries([entry])[0]
                check_json_encodable(body, f"episode {entry.episode_id}, call {entry.call_id}")
                bodies.append((entry.call_id, body))
            except JournalError as error:
                problems.append(str(error))
        rows = self.log.rows(
            "SELECT seat, agent, policy, reward, tokens, oldest_step, lineage FROM trajectories"
            " WHERE episode = ? AND attempt = ? ORDER BY seat, agent",
            line.episode,
            line.attempt,
        )
        metrics = self.log.rows(
            "SELECT metrics, detail, measured_against FROM episodes WHERE episode = ? AND attempt = ?",
            line.episode,
            line.attempt,
        )
        return EpisodeView(
            summary=line,
            agents=[struct_from_row(AgentLine, row) for row in rows],
            measured_against=decode_child_versions(metrics[0][2], problems) if metrics else [],
            metrics=decode_episode_metrics(metrics[0][0], problems) if metrics else {},
            detail=str(metrics[0][1]) if metrics else "",
            entries=bodies,
            inherited=inherited,
            problems=problems,
        )

    def surviving(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return the line of steps that led to each policy's newest version, oldest first; see `RunLog.surviving`. In a
        server's run every lineage is a client's model, so all steps are returned."""
        if self._is_server:
            lines: dict[str, list[tuple[int, int, int]]] = {}
            statement = "SELECT policy, lineage, max(step) FROM steps GROUP BY policy, lineage ORDER BY policy, lineage"
            for policy, lineage, last in self.log.rows(statement):
                lines.setdefault(policy, []).append((lineage, -1, last))
            return lines
        newest = "SELECT policy, lineage, max(step) FROM versions WHERE (policy, lineage) IN (SELECT policy,"
        newest += " max(lineage) FROM versions GROUP BY policy) AND policy IN (SELECT policy FROM steps)"
        newest += " GROUP BY policy ORDER BY policy"
        versions = [PolicyVersion(*row) for row in self.log.rows(newest)]
        return {version.policy: self.log.surviving(version)[::-1] for version in versions}

    @property
    def _is_server(self) -> bool:
        """Whether the run is a server's."""
        return (self.journal / REQUESTS_FILE).exists()

    def curve(self) -> list[RewardCurvePoint]:
        """Return the reward of each step along each policy's surviving line, in order."""
        points, is_server = [], self._is_server
        start_words = {start.lineage: start.words for start in self.log.starts()}
        for policy, lines in self.surviving().items():
            for line in lines:
                # Marks the first step of the lineage.
                marks = {line[0]: start_words.get(line[0], "resumed")} if line[0] and not is_server else {}
                condition = "policy = ? AND lineage = ? AND step > ? AND step <= ?"
                for step, rewards in sorted(self.step_rewards(condition, policy, *line).items()):
                    points.append(struct_from_row(RewardCurvePoint, (*step, *rewards, marks.pop(step[1], ""))))
        return points

    def step_rewards(
        self, condition: str, *values: Any
    ) -> dict[tuple[str, int, int], tuple[float | None, int, dict[str, float]]]:
        """Return the mean reward over the units of each step (policy, lineage, number), None if they have several
        seats; the number of units; and the mean reward of each seat's agents.

        Args:
            condition: SQL over `step_units`, a constant of this package.
            values: values of its placeholders.
        """
        by_unit = (
            f"SELECT policy, lineage, step, sum(reward) AS reward FROM step_units WHERE {condition}"
            " GROUP BY policy, lineage, step, episode, attempt"
        )
        by_seat: dict[tuple[str, int, int], dict[str, float]] = {}
        for *step, seat, reward in self.log.rows(
            f"SELECT policy, lineage, step, seat, avg(reward) FROM step_units WHERE {condition}"
            " GROUP BY policy, lineage, step, seat ORDER BY seat",
            *values,
        ):
            if reward is not None:
                by_seat.setdefault(tuple(step), {})[seat] = reward
        found = {}
        for *step, reward, units in self.log.rows(
            f"SELECT policy, lineage, step, avg(reward), count(*) FROM ({by_unit}) GROUP BY policy, lineage, step",
            *values,
        ):
            rewards = by_seat.get(tuple(step), {})
            found[tuple(step)] = (reward if len(rewards) < 2 else None, units, rewards)
        return found

    def metric(self, name: str) -> dict[str, list[tuple[int, float | None]]]:
        """Return a metric's values by policy and step, along the surviving line, without those that a rollback
        undid.
        """
        return self.metrics([name]).get(name, {})

    def metrics(self, names: Sequence[str] | None = None) -> dict[str, dict[str, list[tuple[int, float | None]]]]:
        """Return the values of metrics as `metric` does, by name; None: of all metrics."""
        undone: dict[str, list[tuple[int, float]]] = {}
        for policy, step, at in self.log.rows(
            "SELECT policy, coalesce(parent_step, -1), published_at FROM versions"
            " WHERE coalesce(parent_lineage, -1) < lineage"
        ):
            undone.setdefault(policy, []).append((step, at))
        condition, parameters = (
            ("1", ()) if names is None else (f"name IN ({', '.join('?' * len(names))})", tuple(names))
        )
        values: dict[str, dict[str, dict[int, float | None]]] = {}
        for name, policy, step, value, at in self.log.rows(
            f"SELECT name, policy, step, value, recorded_at FROM metrics WHERE {condition} ORDER BY id", *parameters
        ):
            if not any(step > last and at < published_at for last, published_at in undone.get(policy, ())):
                values.setdefault(name, {}).setdefault(policy, {})[step] = value
        return {
            name: {policy: sorted(by_step.items()) for policy, by_step in sorted(by_policy.items())}
            for name, by_policy in sorted(values.items())
        }

    def training_seconds(self) -> dict[str, float]:
        """Return the seconds that each policy was trained in all processes of the run together, those of undone steps
        included."""
        rows = self.log.rows(
            "SELECT s.policy, coalesce(l.value, 0), max(s.value) FROM metrics s LEFT JOIN metrics l"
            " ON l.name = 'run/lineage' AND l.policy = s.policy AND l.step = s.step AND l.recorded_at = s.recorded_at"
            " WHERE s.name = 'run/seconds' GROUP BY 1, 2"
        )
        seconds: dict[str, float] = {}
        for policy, _, newest in rows:
            seconds[policy] = seconds.get(policy, 0.0) + (newest or 0.0)
        return seconds

    def evaluation_breaks(self) -> dict[str, set[int]]:
        """Return the steps of each policy whose evaluation was on other tasks than the one before: a curve breaks
        there, since a resume exchanged the held-out tasks."""
        return {
            policy: {step for (_, before), (step, now) in itertools.pairwise(points) if now != before}
            for policy, points in self.metric(TASK_DIGEST).items()
        }

    def metric_names(self) -> list[str]:
        """Return the names of the recorded metrics."""
        return [name for (name,) in self.log.rows("SELECT DISTINCT name FROM metrics ORDER BY name")]

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Count training episodes by status, and the dropped ones by reason, the most frequent first. Only the newest
        attempt of each counts."""
        statement = (
            f"SELECT status, reason, count(*) AS many FROM"
            f" (SELECT {STATUS} AS status, {DROP_REASON} AS reason{EPISODES} WHERE a.purpose = 'train' AND {NEWEST})"
            " GROUP BY 1, 2 ORDER BY many DESC, reason"
        )
        statuses: dict[str, int] = {}
        reasons: dict[str, int] = {}
        for status, why, count in self.log.rows(statement):
            statuses[str(status)] = statuses.get(str(status), 0) + int(count)
            if status == "dropped":
                reasons[str(why)] = int(count)
        return statuses, reasons

    def ledger(self, on_read: Callable[[int, int], None] = lambda read, of: None) -> RunLedger:
        """Account for every episode and unit of the run; see `run_ledger`."""
        return run_ledger(self.log, self.path / "checkpoints", on_read)

    def line(self) -> RunLine:
        """Return the run as a line of a list."""
        ended = "SELECT count(*) FILTER (WHERE drop_reason IS NULL), count(drop_reason) FROM episodes WHERE purpose = ?"
        in_flight = f"SELECT count(*){EPISODES} WHERE e.episode IS NULL AND {NEWEST} AND a.purpose = ?"
        points = self.curve()
        info, purpose = self.info(), self.purpose()
        ((episodes, dropped),) = self.log.rows(ended, purpose)
        return RunLine(
            name=name if isinstance(name := info.get("name"), str) else self.path.name,
            path=str(self.path),
            purpose=purpose,
            episodes=episodes,
            dropped=dropped,
            in_flight=self.log.rows(in_flight, purpose)[0][0],
            steps={point.policy: point.step for point in points},
            rewards=_last_rewards(points) if purpose == "train" else self._played_rewards(purpose),
            state=self._state(),
        )

    def _state(self) -> str:
        phase = self._phase()
        if phase in ("", TRAINING):
            return self.standing()
        return f"{'running' if self.log.starts() else 'starting'}: {phase}"

    def _phase(self) -> str:
        """Return what a running training run does now; empty if there is none."""
        is_running = self.purpose() == "train" and self.standing() == "running"
        status = read_run_snapshot(self.path) if is_running else None
        return "" if status is None else status.phase

    def start_phase(self) -> str:
        """Return what a run does before its first episode, such as loading the model; empty if it has started."""
        return "" if self.log.starts() else self._phase()

    def _played_rewards(self, purpose: str) -> dict[str, float]:
        """Return the mean reward of each policy, or of each of its seats, over the committed episodes it acted in."""
        rewarded = (
            "FROM trajectories t JOIN episodes e ON e.episode = t.episode AND e.attempt = t.attempt"
            " WHERE e.purpose = ? AND e.drop_reason IS NULL AND t.reward IS NOT NULL"
        )
        by_seat: dict[str, dict[str, float]] = {}
        for policy, seat, reward in self.log.rows(
            f"SELECT t.policy, t.seat, avg(t.reward) {rewarded} GROUP BY 1, 2 ORDER BY 1, 2", purpose
        ):
            by_seat.setdefault(str(policy), {})[str(seat)] = float(reward)
        statement = f"SELECT policy, avg(reward) FROM (SELECT t.policy AS policy, sum(t.reward) AS reward {rewarded}"
        statement += " GROUP BY t.episode, t.attempt, t.policy) GROUP BY policy ORDER BY policy"
        rewards: dict[str, float] = {}
        for policy, reward in self.log.rows(statement, purpose):
            seats = by_seat[str(policy)]
            if len(seats) > 1:
                rewards |= {f"{policy}/{seat}": of_seat for seat, of_seat in seats.items()}
            else:
                rewards[str(policy)] = float(reward)
        return rewards

    def standing(self) -> str:
        """Return the state of the run: `running`, `finished`, `stopped` (Ctrl-C), `failed` (an error), `killed`,
        `unknown` (its record is damaged); empty if no process ever led it, as after an import.

        If the lock is invisible, as for a process in another container, a fresh status counts as a sign of life.
        """
        state = read_process_state(self.path)
        if state == "killed" and not is_writer_dead(self.path):
            status = read_run_snapshot(self.path)
            if status is not None and abs(SystemClock().wall() - status.wall) < SILENT_S:
                return "running"
        return state

    def _entries(self, line: EpisodeLine) -> tuple[list[JournalEntry], int, list[str]]:
        """Return the entries of an attempt, the number that a fork inherited, and problems met while reading."""
        statement = "SELECT partition, entries, digest FROM episodes WHERE episode = ? AND attempt = ?"
        locations = [row for row in self.log.rows(statement, line.episode, line.attempt) if row[0] is not None]
        entries: list[JournalEntry] = []
        problems = []
        if not locations:
            try:
                partition = self._turns.partition_of(line.episode, line.attempt)
                if partition is None:
                    self._turns.check_pruned(line.episode, line.attempt)
            except JournalError as error:
                return [], 0, [str(error)]
            locations = [(partition, None, b"")] if partition is not None else []
        for partition, count, digest in locations:
            try:
                entries += self._turns.read(partition, line.episode, line.attempt, entries=count, digest=digest)
            except JournalError as error:
                problems.append(str(error))
        try:
            all_entries = self._with_prefix(entries)
        except JournalError as error:
            return entries, 0, [*problems, str(error)]
        return all_entries, len(all_entries) - len(entries), problems

    def recorded(self, line: EpisodeLine) -> tuple[list[JournalEntry], list[JournalEntry]]:
        """Return an attempt's own entries and, for a fork, the inherited ones with its ancestors' first entries, for a
        replay.

        Unreadable entries are missing; `episode` reports them.
        """
        all_entries, num_inherited, problems = self._entries(line)
        entries = [all_entries[0], *all_entries[1 + num_inherited :]] if all_entries else []
        begin = decode_entries(entries[:1])[0] if entries and not problems else None
        if not isinstance(begin, BeginEntry) or begin.fork is None:
            return entries, []
        return entries, load_fork_prefix(self.journal, begin.fork)

    def _with_prefix(self, entries: list[JournalEntry]) -> list[JournalEntry]:
        """Return a fork's entries: its own first entry, then the inherited ones, then the rest of its own."""
        begin = decode_entries(entries[:1])[0] if entries else None
        if not isinstance(begin, BeginEntry) or begin.fork is None:
            return entries
        prefix_entries = [entry for entry in load_fork_prefix(self.journal, begin.fork) if entry.call_id != "begin"]
        return [entries[0], *prefix_entries, *entries[1:]]


def _last_rewards(points: Sequence[RewardCurvePoint]) -> dict[str, float]:
    """Return the mean reward of the last five steps of each policy; of each seat, as `POLICY/SEAT`, if one of these
    steps has several."""
    last: dict[str, list[RewardCurvePoint]] = {}
    for point in points:
        if point.rewards:
            last[point.policy] = [*last.get(point.policy, []), point][-5:]
    rewards: dict[str, list[float]] = {}
    for policy, newest in last.items():
        columns = reward_columns(point.rewards for point in newest)
        for point in newest:
            for seat, reward in point.rewards.items():
                if f"reward/{seat}" in columns:
                    rewards.setdefault(f"{policy}/{seat}", []).append(reward)
            if "reward" in columns and point.reward is not None:
                rewards.setdefault(policy, []).append(point.reward)
    return {name: sum(values) / len(values) for name, values in rewards.items()}


def list_runs(directory: str | Path) -> list[RunLine]:
    """List the runs in a directory by name; a run with an unreadable journal has a problem.

    Raises:
        InputError: there is no such directory.
    """
    root = Path(directory)
    if not root.is_dir():
        raise InputError(f"{root.absolute()}: there is no such directory; runs are made by `agentrl train`")
    lines = []
    for path in sorted(root.iterdir()):
        try:
            if not (path / "journal" / CONTROL_FILE).is_file():
                continue
            reader = RunReader(path)
            try:
                with convert_damage_errors(reader.log):
                    lines.append(reader.line())
            finally:
                reader.close()
        except (JournalError, OSError) as error:
            problem = str(error)
            lines.append(RunLine(path.name, str(path), "", 0, 0, 0, {}, {}, problem=problem))
    return lines
