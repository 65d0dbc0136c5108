"""Comparison of executions of an episode: forks as a tree, the first difference of two episodes, results of replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from agentrl.core import ids
from agentrl.core.errors import InputError, JournalError
from agentrl.core.files import refuse_links
from agentrl.inspection.reader import EpisodeLine, RunReader
from agentrl.journal.control_rows import ADMISSION_COLUMNS, decode_admission_row
from agentrl.journal.entries import BeginEntry, EntryBody, RewardEntry, TurnEntry
from agentrl.journal.reader import referred_journal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agentrl.core.records import ForkPoint, TrajectoryHeader
    from agentrl.inspection.reader import AgentLine, EpisodeView

FORKS = "forks"
"""Directory of a run's forks, inside the run directory."""
_TIMES = {"seconds", "started", "cached_tokens"}
"""Fields that differ between two executions of the same calls."""
Outcome = Literal["identical", "departed", "stopped", "damaged", "not_replayable"]


class ForkTreeNode(msgspec.Struct, frozen=True):
    """A fork in the tree of forks."""

    depth: int
    """Depth in the tree; 0: the forked episode, which belongs to the run itself."""
    line: EpisodeLine
    at: str
    """Call at which it departs from its parent; empty for the root of the tree."""
    is_edited: bool
    """Whether a message was edited at that call."""
    version: str | None = None
    """Version that sampled the turn at which it was forked; None if that turn sampled nothing."""


@contextmanager
def locate_episode(reader: RunReader, name: str) -> Iterator[tuple[RunReader, str]]:
    """Yield the reader that holds an episode, and the episode's id there: `forks/f0` is f0 of the run's forks.

    An episode of the run itself with that name, such as an imported one, takes precedence.

    Raises:
        InputError: the run has no forks.
        JournalError: the forks cannot be read.
    """
    in_this_run = not name.startswith(f"{FORKS}/") or reader.log.rows(
        "SELECT 1 FROM admissions WHERE episode = ? LIMIT 1", name
    )
    if in_this_run:
        yield reader, name
        return
    try:
        forks = _open_forks(reader)
    except InputError as error:
        raise InputError(f"{reader.path}: no episode {name!r}: this run has no forks") from error
    try:
        yield forks, name.removeprefix(f"{FORKS}/")
    finally:
        forks.close()


def _open_forks(reader: RunReader) -> RunReader:
    """Open the forks of a run; raises as `RunReader`."""
    refuse_links(reader.path / FORKS)
    return RunReader(reader.path / FORKS)


def fork_tree(reader: RunReader) -> list[ForkTreeNode]:
    """Return the forked episodes of a run, each with its forks below it, recursively.

    Raises:
        JournalError: the forks' control log is damaged.
    """
    try:
        forks = _open_forks(reader)
    except InputError:
        return []
    try:
        points, attempts = _points(forks)
        lines = {line.episode: line for line in forks.lines(list(attempts.items()))}
        versions = {episode: _version(forks, episode) for episode in lines}
    finally:
        forks.close()
    below: dict[str, list[str]] = {}
    for episode, point in points.items():
        below.setdefault(point.episode_id, []).append(episode)
    tree: list[ForkTreeNode] = []
    all_forks = _Forks(below, points, lines, versions)
    for parent in [name for name in below if name not in points]:
        attempt = points[below[parent][0]].attempt
        tree += [ForkTreeNode(0, line, "", is_edited=False) for line in reader.lines([(parent, attempt)])]
        _grow(tree, parent, 1, all_forks)
    return tree


class _Forks(NamedTuple):
    """The forks of a run: attributes keyed by episode id."""

    below: dict[str, list[str]]
    points: dict[str, ForkPoint]
    lines: dict[str, EpisodeLine]
    versions: dict[str, str | None]


def _grow(tree: list[ForkTreeNode], parent: str, depth: int, forks: _Forks) -> None:
    for episode in forks.below.pop(parent, []):  # pop, so that circular references terminate
        if episode in forks.lines:
            point = forks.points[episode]
            version = forks.versions[episode]
            tree.append(ForkTreeNode(depth, forks.lines[episode], point.call_id, bool(point.messages), version))
            _grow(tree, episode, depth + 1, forks)


def _version(forks: RunReader, episode: str) -> str | None:
    """Return the version that sampled the first turn of a fork's own."""
    view = forks.episode(episode)
    for _, body in view.entries[1 + view.inherited :]:
        if isinstance(body, TurnEntry) and body.tokens.spans:
            return str(body.tokens.spans[0].version)
    return None


def _points(forks: RunReader) -> tuple[dict[str, ForkPoint], dict[str, int]]:
    """Return fork point and newest attempt of each fork."""
    columns = ", ".join([*ADMISSION_COLUMNS.split(), "checksum"])
    points: dict[str, ForkPoint] = {}
    attempts: dict[str, int] = {}
    for row in forks.log.rows(
        f"SELECT {columns} FROM admissions WHERE purpose = 'fork' ORDER BY length(episode), episode, attempt"
    ):
        try:
            spec = decode_admission_row(row)
        except JournalError:
            continue  # `episode list` reports the damaged episode
        if spec.fork is not None:
            points[spec.episode_id], attempts[spec.episode_id] = spec.fork, spec.attempt
    return points, attempts


class DifferingSide(msgspec.Struct, frozen=True):
    """The content of one of two episodes at their first difference."""

    text: str
    version: str | None = None
    logprob: float | None = None


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference between two episodes."""

    kind: str
    """Kind of the difference: `context` (the policy's input), `sampled` (its output), `act`, `environment`, `ended`."""
    call: str
    agent: str = ""
    turn: int | None = None
    token: int | None = None
    """Position of the token in the turn's context or in its sampled tokens, depending on `kind`."""
    a: DifferingSide
    b: DifferingSide


class EpisodeDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two episodes."""

    a: EpisodeLine
    b: EpisodeLine
    same_acts: int
    """Number of equal acts before the first difference."""
    departure: FirstDifference | None
    """First difference; None if the episodes are equal except for times."""
    rewards: dict[str, tuple[float | None, float | None]]
    """Rewards on both sides, keyed by agent."""
    turns: list[tuple[str, int, bool]]
    """Turns of either episode, as tuples (agent, turn, whether the turn is equal in both)."""
    problems: list[str]


def compare_episodes_across_runs(
    a: RunReader, a_id: str, b: RunReader, b_id: str, *, a_attempt: int | None = None, b_attempt: int | None = None
) -> EpisodeDifference:
    """Compare two episodes, of one run or of two. Raises as `RunReader.episode`."""
    left, right = a.episode(a_id, a_attempt), b.episode(b_id, b_attempt)
    left_acts, right_acts = _acts(left), _acts(right)
    num_same, departure = 0, None
    for call in dict.fromkeys([*left_acts, *right_acts]):
        departure = _request_departure(call, left_acts, right_acts) or _departure(
            call, left_acts.get(call), right_acts.get(call)
        )
        if departure is not None:
            break
        num_same += 1
    return EpisodeDifference(
        a=left.summary,
        b=right.summary,
        same_acts=num_same,
        departure=departure or _environments(left, right),
        rewards=_rewards(left, right),
        turns=_turns(left_acts, right_acts),
        problems=[*left.problems, *right.problems],
    )


def _acts(view: EpisodeView) -> dict[str, EntryBody]:
    return {call: body for call, body in view.entries if not isinstance(body, BeginEntry)}


def _request_departure(
    call: str, left_acts: Mapping[str, EntryBody], right_acts: Mapping[str, EntryBody]
) -> FirstDifference | None:
    """Compare the same turn of both episodes at a call that only one of them made. Calls of external agents are named
    after their requests, so that a different request is another call."""
    present = left_acts.get(call) or right_acts.get(call)
    if ids.has_call_number(call) or not isinstance(present, TurnEntry) or (call in left_acts and call in right_acts):
        return None
    left = present if call in left_acts else _same_turn(present, left_acts, right_acts)
    right = present if call in right_acts else _same_turn(present, right_acts, left_acts)
    return None if left is None or right is None else _turn_departure(call, left, right)


def _same_turn(turn: TurnEntry, acts: Mapping[str, EntryBody], others: Mapping[str, EntryBody]) -> TurnEntry | None:
    """Return the turn at the same position among the calls that the other episode did not make."""
    turns = (body for call, body in acts.items() if isinstance(body, TurnEntry) and call not in others)
    return next((body for body in turns if _position(body) == _position(turn)), None)


def _environments(left: EpisodeView, right: EpisodeView) -> FirstDifference | None:
    if (left.summary.environment, left.summary.task) == (right.summary.environment, right.summary.task):
        return None
    sides = [DifferingSide(f"{line.environment}, task {line.task}") for line in (left.summary, right.summary)]
    return FirstDifference(kind="environment", call="begin", a=sides[0], b=sides[1])


def _departure(call: str, left: EntryBody | None, right: EntryBody | None) -> FirstDifference | None:
    if left is None or right is None:
        present = left if left is not None else right
        agent, turn = _position(present)
        sides = [
            DifferingSide("nothing: it has ended, or goes another way")
            if body is None
            else DifferingSide(describe_journal_entry(body))
            for body in (left, right)
        ]
        return FirstDifference(kind="ended", call=call, agent=agent, turn=turn, a=sides[0], b=sides[1])
    if isinstance(left, TurnEntry) and isinstance(right, TurnEntry):
        return _turn_departure(call, left, right)
    if _comparable(left) == _comparable(right):
        return None
    agent, turn = _position(left)
    return FirstDifference(
        kind="act",
        call=call,
        agent=agent,
        turn=turn,
        a=DifferingSide(describe_journal_entry(left)),
        b=DifferingSide(describe_journal_entry(right)),
    )


def _turn_departure(call: str, left_turn: TurnEntry, right_turn: TurnEntry) -> FirstDifference | None:
    agent, turn = _position(left_turn)
    for part, left, right in (
        ("context", left_turn.context(plain=True), right_turn.context(plain=True)),
        ("sampled", left_turn.sampled(plain=True), right_turn.sampled(plain=True)),
    ):
        at = _first(left.token_ids.tolist(), right.token_ids.tolist())
        if at is None:
            continue
        sides = [_side(body, part, at) for body in (left_turn, right_turn)]
        return FirstDifference(kind=part, call=call, agent=agent, turn=turn, token=at, a=sides[0], b=sides[1])
    return None


def _first(left: Sequence[int], right: Sequence[int]) -> int | None:
    for at, (left_value, right_value) in enumerate(zip(left, right, strict=False)):
        if left_value != right_value:
            return at
    return None if len(left) == len(right) else min(len(left), len(right))


def _side(turn: TurnEntry, part: str, at: int) -> DifferingSide:
    if part == "context":
        return DifferingSide(" / ".join(str(message.get("content", "")) for message in turn.messages))
    versions = [str(span.version) for span in turn.tokens.spans if span.start <= at < span.stop]
    return DifferingSide(turn.text, versions[0] if versions else None)


def _position(body: EntryBody | None) -> tuple[str, int | None]:
    if isinstance(body, TurnEntry | RewardEntry):
        return f"{body.seat}[{body.index}]", body.turn
    return "", None


def describe_journal_entry(body: EntryBody) -> str:
    """Describe an entry in one line."""
    if isinstance(body, TurnEntry):
        return f"turn {body.turn} of {body.seat}[{body.index}]: {body.text}"
    fields = ", ".join(f"{name}={value!r}" for name, value in _comparable(body)[1:])
    return f"{type(body).__name__.removesuffix('Entry').lower()}: {fields}"


def _comparable(body: EntryBody) -> list[Any]:
    names = [name for name in body.__struct_fields__ if name not in _TIMES]
    return [type(body).__name__, *((name, getattr(body, name)) for name in names)]


def agent_rewards(agents: Iterable[AgentLine | TrajectoryHeader]) -> dict[str, float | None]:
    """Return the reward of each agent by its name, such as `solver[0]`."""
    return {f"{agent.seat}[{agent.index}]": agent.reward for agent in agents}


def _rewards(left: EpisodeView, right: EpisodeView) -> dict[str, tuple[float | None, float | None]]:
    rewards = [agent_rewards(view.agents) for view in (left, right)]
    return {
        agent: (rewards[0].get(agent), rewards[1].get(agent)) for agent in dict.fromkeys([*rewards[0], *rewards[1]])
    }


def _turns(left_acts: dict[str, EntryBody], right_acts: dict[str, EntryBody]) -> list[tuple[str, int, bool]]:
    turns = []
    for call in dict.fromkeys([*left_acts, *right_acts]):
        bodies = (left_acts.get(call), right_acts.get(call))
        one = bodies[0] if isinstance(bodies[0], TurnEntry) else bodies[1]
        if isinstance(one, TurnEntry):
            turns.append((f"{one.seat}[{one.index}]", one.turn, _departure(call, *bodies) is None))
    return turns


def compare_episodes(reader: RunReader, a: str | None, b: str | None) -> EpisodeDifference:
    """Compare episode `a` of a run with `b` or, if `b` is None, with the episode from which it was forked.

    A fork of the run is `forks/f0`.

    Raises:
        InputError: there is no such episode, or `b` is None and `a` is not a fork.
    """
    if a is None:
        raise InputError("name two episodes, or a fork, such as forks/f0")
    with locate_episode(reader, a) as (left, left_id):
        if b is not None:
            with locate_episode(reader, b) as (right, right_id):
                return compare_episodes_across_runs(left, left_id, right, right_id)
        begin = next((body for _, body in left.episode(left_id).entries if isinstance(body, BeginEntry)), None)
        if begin is None or begin.fork is None:
            raise InputError(f"{a} is not a fork: name the episode to compare it with")
        parent = RunReader(referred_journal(left.journal, begin.fork.journal))
        try:
            return compare_episodes_across_runs(
                left, left_id, parent, begin.fork.episode_id, b_attempt=begin.fork.attempt
            )
        finally:
            parent.close()


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    episode: str
    attempt: int
    outcome: Outcome
    calls: int
    """Number of recorded calls that were replayed without a difference."""
    recorded: int
    """Number of acts in the journal."""
    call: str | None = None
    """Call at which the replay departed or stopped."""
    text: str = ""
    """Description of the event at that call."""
    advice: str = ""
    """What to do about it."""
    acts: list[tuple[str, str]] = []
    """Replayed calls, each with a description."""
    before: dict[str, float | None] = {}
    """Recorded reward of each agent, if rescoring."""
    after: dict[str, float | None] = {}
    """Reward of each agent by the current code, if rescoring."""
