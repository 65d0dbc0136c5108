"""Reading a run: which episodes, what happened in one, how the reward went. Also while it is written, or damaged.

Needs neither torch, ray, numpy nor the environment's code. Gives content as it is: whoever shows it calls `safe`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from agentrl.core.errors import InputError, JournalError
from agentrl.core.records import PolicyVersion
from agentrl.inspection.ledger import RunLedger, run_ledger
from agentrl.inspection.showable import check_showable
from agentrl.inspection.where import Column, parse
from agentrl.journal.entries import Begin, EntryBody, JournalEntry
from agentrl.journal.forks import read_prefix
from agentrl.journal.reader import TurnReader
from agentrl.journal.results import win_rates
from agentrl.journal.rows import decode_entries
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.schema import CONTROL_FILE

_STATUS = (
    "CASE WHEN e.episode IS NULL THEN 'in_flight' WHEN e.drop_reason IS NOT NULL THEN 'dropped'"
    " WHEN a.purpose <> 'train' THEN 'finished'"
    " WHEN EXISTS (SELECT 1 FROM step_units s WHERE s.episode = a.episode AND s.attempt = a.attempt) THEN 'trained'"
    " WHEN EXISTS (SELECT 1 FROM unit_drops d WHERE d.episode = a.episode AND d.attempt = a.attempt) THEN 'dropped'"
    " ELSE 'ready' END"
)
COLUMNS: dict[str, Column] = {
    "episode": Column("a.episode", "text"),
    "attempt": Column("a.attempt", "number"),
    "status": Column(_STATUS, "text"),
    "purpose": Column("a.purpose", "text"),
    "environment": Column("a.environment", "text"),
    "task": Column("a.task", "text"),
    "group": Column("a.group_id", "text"),
    "parent": Column("a.parent", "text"),
    "seats": Column("e.seats", "text"),
    "policies": Column("e.policies", "text"),
    "oldest_step": Column("e.oldest_step", "number"),
    "lineage": Column("e.lineage", "number"),
    "reward": Column("e.reward", "number"),
    "stop_reason": Column("e.stop_reason", "text"),
    "drop_reason": Column("e.drop_reason", "text"),
    "turns": Column("e.turns", "number"),
    "tokens": Column("e.tokens", "number"),
    "seconds": Column("e.seconds", "number"),
    "admitted_at": Column("a.admitted_at", "number"),
    "committed_at": Column("e.committed_at", "number"),
}
"""Columns of `EpisodeLine`, as `--where` and `--sort` know them."""

_FROM = " FROM admissions a LEFT JOIN episodes e ON e.episode = a.episode AND e.attempt = a.attempt"
_NEWEST = "NOT EXISTS (SELECT 1 FROM admissions n WHERE n.episode = a.episode AND n.attempt > a.attempt)"


class EpisodeLine(msgspec.Struct, frozen=True):
    """An episode in a list."""

    episode: str
    attempt: int
    status: str
    """`in_flight`, `ready`, `trained`, `dropped`, or `finished` where it was not for training."""
    purpose: str
    environment: str
    task: str
    group: str
    parent: str | None
    seats: dict[str, str]
    policies: list[str]
    oldest_step: int | None
    lineage: int | None
    reward: float | None
    stop_reason: str | None
    drop_reason: str | None
    turns: int | None
    tokens: int | None
    seconds: float | None
    admitted_at: float
    committed_at: float | None


class AgentLine(msgspec.Struct, frozen=True):
    """What one agent of an episode got and gave."""

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
    """Versions its rewards may depend on besides: the oldest of each policy in the children it waited for."""
    metrics: dict[str, float | None]
    detail: str
    """Why it was dropped, in the words of what failed; empty where it was not."""
    entries: list[tuple[str, EntryBody]]
    """Call id and entry, in the order they were written."""
    problems: list[str]
    """What could not be read, in words."""


class WinRate(msgspec.Struct, frozen=True):
    """How a policy does against one past version of itself."""

    policy: str
    step: int
    """Of the policy's oldest weights in the episode, rounded down to when versions join."""
    opponent: str
    """The policy that stands for the past."""
    version: str
    episodes: int
    score: float
    """Wins per episode; draws count half."""


class _Policy(msgspec.Struct):
    kind: str = ""
    of: str = ""
    every: Annotated[int, msgspec.Meta(ge=1)] = 1


class _Opponents(msgspec.Struct):
    policies: dict[str, _Policy]


class RunLine(msgspec.Struct, frozen=True):
    """A run in a list."""

    name: str
    path: str
    purpose: str
    """`train`, or `evaluate` where `agentrl evaluate` kept its episodes."""
    episodes: int
    """Episodes of that purpose that were committed."""
    in_flight: int
    steps: dict[str, int]
    """Newest step of each policy."""
    reward: float | None
    """Mean training reward over the last five steps; that of all its episodes where it is an evaluation."""
    problem: str | None = None


class CurvePoint(msgspec.Struct, frozen=True):
    """One optimizer step of one policy."""

    policy: str
    lineage: int
    step: int
    reward: float | None
    """Mean over the units the step consumed."""
    units: int


class RunReader:
    """Reads one run; `path` is its directory or its journal's."""

    def __init__(self, path: str | Path) -> None:
        """Open the run.

        Raises:
            InputError: there is no run at `path`.
            JournalError: its journal cannot be read.
        """
        self.path = Path(path)
        self.journal = self.path / "journal" if (self.path / "journal").is_dir() else self.path
        if not (self.journal / CONTROL_FILE).is_file():
            raise InputError(
                f"{self.path}: there is no run here (no journal/{CONTROL_FILE}); `agentrl run list` shows runs"
            )
        self._log = SqliteRunLog(self.journal)
        self._turns = TurnReader(self.journal)

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        self._log.close()
        self._turns.close()

    def info(self) -> dict[str, Any]:
        """The run's identity: format, id, name, resolved configuration."""
        return dict(self._log.info())

    def episodes(
        self, where: str = "", *, sort: str = "admitted_at", descending: bool = True, limit: int = 50, offset: int = 0
    ) -> list[EpisodeLine]:
        """Episodes that pass a filter (`where.parse`), sorted by a column; those without a value come last.

        Raises:
            InputError: the filter cannot be read, or there is no such column.
            JournalError: the journal is damaged.
        """
        condition = parse(where, COLUMNS)
        if sort not in COLUMNS:
            raise InputError(f"--sort: {sort!r} is not a column; there are: {', '.join(COLUMNS)}")
        direction = "DESC" if descending else "ASC"
        key = f"({COLUMNS[sort].sql})"
        order = f"{key} IS NULL, {key} {direction}, a.admitted_at {direction}, a.episode, a.attempt"
        return self._lines(condition.sql, (*condition.values, limit, offset), order)

    def count(self, where: str = "") -> int:
        """How many episodes pass a filter; raises as `episodes`."""
        condition = parse(where, COLUMNS)
        return int(self._log.rows(f"SELECT count(*){_FROM} WHERE {condition.sql}", *condition.values)[0][0])

    def episode(self, episode_id: str, attempt: int | None = None) -> EpisodeView:
        """One episode; its newest attempt unless another is named. What cannot be read is named in `problems`.

        Raises:
            InputError: there is no such episode.
            JournalError: the control log is damaged.
        """
        condition = "a.episode = ?" + ("" if attempt is None else " AND a.attempt = ?")
        key = (episode_id,) if attempt is None else (episode_id, attempt)
        lines = self._lines(condition, (*key, 1, 0), "a.attempt DESC")
        if not lines:
            raise InputError(f"{self.path}: no episode {episode_id!r}; `agentrl episode list {self.path}` shows them")
        line = lines[0]
        entries, problems = self._entries(line)
        bodies: list[tuple[str, EntryBody]] = []
        for entry in entries:
            try:
                body = decode_entries([entry])[0]
                check_showable(body, f"episode {entry.episode_id}, call {entry.call_id}")
                bodies.append((entry.call_id, body))
            except JournalError as error:
                problems.append(str(error))
        rows = self._log.rows(
            "SELECT seat, agent, policy, reward, tokens, oldest_step, lineage FROM trajectories"
            " WHERE episode = ? AND attempt = ? ORDER BY seat, agent",
            line.episode,
            line.attempt,
        )
        metrics = self._log.rows(
            "SELECT metrics, detail, measured_against FROM episodes WHERE episode = ? AND attempt = ?",
            line.episode,
            line.attempt,
        )
        return EpisodeView(
            summary=line,
            agents=[_convert(AgentLine, row) for row in rows],
            measured_against=_versions(metrics[0][2], problems) if metrics else [],
            metrics=_numbers(metrics[0][0], problems) if metrics else {},
            detail=str(metrics[0][1]) if metrics else "",
            entries=bodies,
            problems=problems,
        )

    def curve(self) -> list[CurvePoint]:
        """The reward of each step along each policy's surviving line, in order."""
        points = []
        newest = "SELECT policy, lineage, max(step) FROM steps WHERE (policy, lineage) IN"
        newest += " (SELECT policy, max(lineage) FROM steps GROUP BY policy) GROUP BY policy ORDER BY policy"
        for policy, lineage, step in self._log.rows(newest):
            statement = (
                "SELECT policy, lineage, step, avg(reward), count(*) FROM"
                " (SELECT policy, lineage, step, sum(reward) AS reward FROM step_units"
                " WHERE policy = ? AND lineage = ? AND step > ? AND step <= ?"
                " GROUP BY policy, lineage, step, episode, attempt) GROUP BY step ORDER BY step"
            )
            for line in reversed(self._log.surviving(PolicyVersion(policy, lineage, step))):
                points += [_convert(CurvePoint, row) for row in self._log.rows(statement, policy, *line)]
        return points

    def metric(self, name: str) -> dict[str, list[tuple[int, float | None]]]:
        """A metric's values by policy and step, along the surviving line: not what a rollback undid."""
        values: dict[str, dict[int, float | None]] = {}
        statement = (
            "SELECT policy, step, value FROM metrics m WHERE name = ? AND NOT EXISTS (SELECT 1 FROM versions v"
            " WHERE v.policy = m.policy AND coalesce(v.parent_lineage, -1) < v.lineage"
            " AND coalesce(v.parent_step, -1) < m.step AND v.published_at > m.recorded_at) ORDER BY id"
        )
        for policy, step, value in self._log.rows(statement, name):
            values.setdefault(policy, {})[step] = value
        return {policy: sorted(by_step.items()) for policy, by_step in sorted(values.items())}

    def metric_names(self) -> list[str]:
        """The names that were recorded."""
        return [name for (name,) in self._log.rows("SELECT DISTINCT name FROM metrics ORDER BY name")]

    def counts(self) -> dict[str, int]:
        """Training episodes, the newest attempt of each, by status."""
        statement = (
            f"SELECT {_STATUS} AS status, count(*){_FROM} WHERE a.purpose = 'train' AND {_NEWEST} GROUP BY status"
        )
        return {str(status): int(count) for status, count in self._log.rows(statement)}

    def drop_reasons(self) -> dict[str, int]:
        """Dropped training episodes, the newest attempt of each, by reason; the most frequent first."""
        reason = (
            "coalesce(e.drop_reason, (SELECT min(d.reason) FROM unit_drops d"
            " WHERE d.episode = a.episode AND d.attempt = a.attempt))"
        )
        statement = (
            f"SELECT {reason} AS reason, count(*) AS many{_FROM} WHERE a.purpose = 'train' AND {_NEWEST}"
            f" AND {_STATUS} = 'dropped' GROUP BY reason ORDER BY many DESC, reason"
        )
        return {str(reason): int(count) for reason, count in self._log.rows(statement)}

    def ledger(self) -> RunLedger:
        """Every episode and every unit accounted for; raises as `run_ledger`."""
        return run_ledger(self._log, self.path / "checkpoints")

    def win_rates(self) -> list[WinRate]:
        """Results against past versions, by the learner's step and the opponent's version."""
        try:
            config = msgspec.convert(self.info().get("config"), _Opponents)
        except msgspec.ValidationError:  # of an evaluation, or of nobody's
            return []
        found = []
        for name, policy in config.policies.items():
            if policy.kind == "past":
                matrix = win_rates(self._log.against({name}), name, policy.of, every=policy.every)
                found += [
                    WinRate(policy.of, step, name, str(version), tally.episodes, tally.score / tally.episodes)
                    for (step, version), tally in matrix.items()
                ]
        return found

    def line(self) -> RunLine:
        """The run as a line of a list."""
        committed = "SELECT count(*), avg(reward) FROM episodes WHERE purpose = ? AND drop_reason IS NULL"
        in_flight = f"SELECT count(*){_FROM} WHERE e.episode IS NULL"
        points = self.curve()
        last = [point.reward for point in points if point.reward is not None][-5:]
        info = self.info()
        purpose = "evaluate" if "evaluated" in info else "train"
        ((episodes, mean),) = self._log.rows(committed, purpose)
        reward = mean if purpose == "evaluate" else sum(last) / len(last) if last else None
        return RunLine(
            name=name if isinstance(name := info.get("name"), str) else self.path.name,
            path=str(self.path),
            purpose=purpose,
            episodes=episodes,
            in_flight=self._log.rows(in_flight)[0][0],
            steps={point.policy: point.step for point in points},
            reward=reward,
        )

    def _lines(self, condition: str, values: tuple[Any, ...], order: str) -> list[EpisodeLine]:
        columns = ", ".join(column.sql for column in COLUMNS.values())
        rows = self._log.rows(f"SELECT {columns}{_FROM} WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?", *values)
        lines = []
        for row in rows:
            fields = dict(zip(COLUMNS, row, strict=True))
            fields["seats"] = _json(fields["seats"])
            fields["policies"] = [policy for policy in str(fields["policies"] or "").split(",") if policy]
            lines.append(_convert(EpisodeLine, fields))
        return lines

    def _entries(self, line: EpisodeLine) -> tuple[list[JournalEntry], list[str]]:
        statement = "SELECT partition, entries, digest FROM episodes WHERE episode = ? AND attempt = ?"
        located = [row for row in self._log.rows(statement, line.episode, line.attempt) if row[0] is not None]
        if not located:
            located = [(path.name, None, b"") for path in sorted(self.journal.glob("turns-*.db"))]
        entries: list[JournalEntry] = []
        problems = []
        for partition, count, digest in located:
            try:
                entries += self._turns.read(partition, line.episode, line.attempt, entries=count, digest=digest)
            except JournalError as error:
                problems.append(str(error))
        try:
            return self._with_prefix(entries), problems
        except JournalError as error:
            return entries, [*problems, str(error)]

    def _with_prefix(self, entries: list[JournalEntry]) -> list[JournalEntry]:
        """A fork's entries: its own beginning, then what it took over, then what is its own."""
        begin = decode_entries(entries[:1])[0] if entries else None
        if not isinstance(begin, Begin) or begin.fork is None:
            return entries
        inherited = [entry for entry in read_prefix(self.journal, begin.fork) if entry.call_id != "begin"]
        return [entries[0], *inherited, *entries[1:]]


def runs(directory: str | Path) -> list[RunLine]:
    """The runs in a directory, by name; one whose journal cannot be read carries its problem.

    Raises:
        InputError: there is no such directory.
    """
    root = Path(directory)
    if not root.is_dir():
        raise InputError(f"{root}: there is no such directory; runs are made by `agentrl train`")
    lines = []
    for path in sorted(root.iterdir()):
        try:
            if not (path / "journal" / CONTROL_FILE).is_file():
                continue
            reader = RunReader(path)
            try:
                lines.append(reader.line())
            finally:
                reader.close()
        except (JournalError, OSError) as error:
            problem = str(error)
            lines.append(RunLine(path.name, str(path), "", 0, 0, {}, None, problem=problem))
    return lines


def _convert(kind: type[Any], row: Any) -> Any:
    """A struct of a row, its types checked: a database may hold anything anywhere."""
    fields = row if isinstance(row, dict) else dict(zip(kind.__struct_fields__, row, strict=True))
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise JournalError(f"a row of the control log is damaged: {error}") from error


def _numbers(text: Any, problems: list[str]) -> dict[str, float | None]:
    """An episode's metrics; one that is no number is told in `problems`."""
    numbers: dict[str, float | None] = {}
    for name, value in _json(text).items():
        try:
            numbers[name] = msgspec.convert(value, float | None)
        except (msgspec.ValidationError, OverflowError):
            problems.append(f"metric {name[:100]!r} is no number; its row of the control log is damaged")
    return numbers


def _versions(text: Any, problems: list[str]) -> list[str]:
    """The versions an episode was measured against; what is no list of them is told in `problems`."""
    try:
        return [] if text is None else list(map(str, msgspec.json.decode(text, type=tuple[PolicyVersion, ...])))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        problems.append("what it was measured against is no list of versions; its row of the control log is damaged")
        return []


def _json(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise JournalError(f"a row of the control log is damaged: {error}") from error
    return value if isinstance(value, dict) else {}
