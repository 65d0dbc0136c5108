"""Lines of lists as records: runs, episodes, agents, points of a curve; and what an episode's columns are in SQL."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from agentrl.core.errors import JournalError
from agentrl.core.records import PolicyVersion
from agentrl.inspection.where import Column
from agentrl.journal.entries import EntryBody

STATUS = (
    "CASE WHEN e.episode IS NULL AND EXISTS"
    " (SELECT 1 FROM admissions n WHERE n.episode = a.episode AND n.attempt > a.attempt) THEN 'repeated'"
    " WHEN e.episode IS NULL THEN 'in_flight' WHEN e.drop_reason IS NOT NULL THEN 'dropped'"
    " WHEN a.purpose <> 'train' THEN 'finished'"
    " WHEN EXISTS (SELECT 1 FROM step_units s WHERE s.episode = a.episode AND s.attempt = a.attempt) THEN 'trained'"
    " WHEN EXISTS (SELECT 1 FROM unit_drops d WHERE d.episode = a.episode AND d.attempt = a.attempt) THEN 'dropped'"
    " ELSE 'ready' END"
)
STALENESS = (
    "(SELECT max(s.step - 1 - t.oldest_step) FROM step_units s JOIN trajectories t ON t.episode = s.episode"
    " AND t.attempt = s.attempt AND t.seat = s.seat AND t.agent = s.agent"
    " WHERE s.episode = a.episode AND s.attempt = a.attempt AND t.lineage = s.lineage)"
)
COLUMNS: dict[str, Column] = {
    "episode": Column("a.episode", "text"),
    "attempt": Column("a.attempt", "number"),
    "status": Column(STATUS, "text"),
    "purpose": Column("a.purpose", "text"),
    "environment": Column("a.environment", "text"),
    "task": Column("a.task", "text"),
    "group": Column("a.group_id", "text"),
    "parent": Column("a.parent", "text"),
    "seats": Column("e.seats", "text"),
    "policies": Column("e.policies", "text"),
    "oldest_step": Column("e.oldest_step", "number"),
    "lineage": Column("e.lineage", "number"),
    "staleness": Column(STALENESS, "number"),
    "reward": Column("e.reward", "number"),
    "stop_reason": Column("e.stop_reason", "text"),
    "drop_reason": Column("e.drop_reason", "text"),
    "turns": Column("e.turns", "number"),
    "tokens": Column("e.tokens", "number"),
    "seconds": Column("e.seconds", "number"),
    "detail": Column("e.detail", "text"),
    "admitted_at": Column("a.admitted_at", "number"),
    "committed_at": Column("e.committed_at", "number"),
}
"""Columns of `EpisodeLine`, as `--where` and `--sort` know them."""

EPISODES = " FROM admissions a LEFT JOIN episodes e ON e.episode = a.episode AND e.attempt = a.attempt"
NEWEST = "NOT EXISTS (SELECT 1 FROM admissions n WHERE n.episode = a.episode AND n.attempt > a.attempt)"


class EpisodeLine(msgspec.Struct, frozen=True):
    """An episode in a list."""

    episode: str
    attempt: int
    status: str
    """`in_flight`, `ready`, `trained`, `dropped`, `finished` where it was not for training, or `repeated`: the attempt
    failed, and a later one took its place."""
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
    """Steps from its oldest weights to those it was trained into, where both are of one lineage."""
    reward: float | None
    stop_reason: str | None
    drop_reason: str | None
    turns: int | None
    tokens: int | None
    seconds: float | None
    detail: str | None
    """Why it was dropped, in the words of what failed."""
    admitted_at: float
    committed_at: float | None
    problem: str | None = None
    """What is damaged of its records."""


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
    inherited: int
    """How many of them a fork took over from its parent, after its own beginning."""
    problems: list[str]
    """What could not be read, in words."""


class RunLine(msgspec.Struct, frozen=True):
    """A run in a list."""

    name: str
    path: str
    purpose: str
    """`train`, `evaluate` where `agentrl evaluate` kept its episodes, or `import` where another tool wrote them."""
    episodes: int
    """Episodes of that purpose that were committed."""
    in_flight: int
    steps: dict[str, int]
    """Newest step of each policy."""
    rewards: dict[str, float]
    """Mean reward of each policy over its last five steps; where nothing was trained, over all episodes it acted in."""
    state: str = ""
    """See `RunReader.standing`."""
    problem: str | None = None


class CurvePoint(msgspec.Struct, frozen=True):
    """One optimizer step of one policy."""

    policy: str
    lineage: int
    step: int
    reward: float | None
    """Mean over the units the step consumed."""
    units: int
    mark: str = ""
    """What changed before it: a resume, code, settings."""


def converted(kind: type[Any], row: Any) -> Any:
    """A struct of a row, its types checked: a database may hold anything anywhere."""
    fields = row if isinstance(row, dict) else dict(zip(kind.__struct_fields__, row, strict=True))
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise JournalError(f"a row of the control log is damaged: {error}") from error


def numbers_of(text: Any, problems: list[str]) -> dict[str, float | None]:
    """An episode's metrics; one that is no number is told in `problems`."""
    numbers: dict[str, float | None] = {}
    for name, value in json_of(text).items():
        try:
            numbers[name] = msgspec.convert(value, float | None)
        except (msgspec.ValidationError, OverflowError):
            problems.append(f"metric {name[:100]!r} is no number; its row of the control log is damaged")
    return numbers


def versions_of(text: Any, problems: list[str]) -> list[str]:
    """The versions an episode was measured against; what is no list of them is told in `problems`."""
    try:
        return [] if text is None else list(map(str, msgspec.json.decode(text, type=tuple[PolicyVersion, ...])))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        problems.append("what it was measured against is no list of versions; its row of the control log is damaged")
        return []


def json_of(text: Any) -> dict[str, Any]:
    """The object a column of JSON holds; empty where it holds another value, or none."""
    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise JournalError(f"a row of the control log is damaged: {error}") from error
    return value if isinstance(value, dict) else {}
