"""Assembles journal entries into the token rows a trainer consumes, by concatenation and index arithmetic alone.

Invariants: a row is, over its turns in order, `context_ids + token_ids`; every sampled token keeps the logprob, the
version, the temperature, the routing and the kept set it was sampled with; context tokens carry logprob 0 and no
version. The turns that a fork inherited are context.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentrl.core.errors import EntriesError, JournalError
from agentrl.core.records import Trajectory
from agentrl.core.tokens import RecordedRouting, Tokens, TrajectoryRow
from agentrl.journal.entries import BeginEntry, JournalEntry, RewardEntry, TurnEntry, decode_entries, sum_by_key
from agentrl.journal.reader import AttemptLocation, TurnLogReader, load_fork_prefix
from agentrl.journal.routing import RoutingReader, read_locally

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from agentrl.core.records import Unit

AgentKey = tuple[str, int]
"""Seat and index of an agent."""


ReadTrajectories = Callable[["Sequence[Unit]"], "Sequence[Sequence[Trajectory]]"]
"""Returns the trajectories of each unit, from the unit's location."""


def make_unit_reader(run_directory: Path) -> ReadTrajectories:
    """Make a reader of a run's journal, and of the expert routing on the run's host."""
    journal = run_directory / "journal"
    read_rows, routing = make_row_reader(journal), RoutingReader(read_locally(journal))

    def read(units: Sequence[Unit]) -> Sequence[Sequence[Trajectory]]:
        return routing.attach(units, read_rows(units))

    return read


def make_row_reader(journal: Path) -> ReadTrajectories:
    """Make a reader of a run's journal that leaves expert routing to `RoutingReader`."""
    reader = TurnLogReader(journal)

    def read(units: Sequence[Unit]) -> Sequence[Sequence[Trajectory]]:
        keys = [
            AttemptLocation(unit.location.partition, unit.episode_id, unit.attempt, unit.location.entries)
            for unit in units
        ]
        entries = reader.read_many(keys)
        prefixes = ForkPrefixes(journal)  # the members of a group share one
        return [
            assemble_trajectories(episode_entries, unit.policy, prefixes.of(episode_entries))
            for unit, episode_entries in zip(units, entries, strict=True)
        ]

    return read


class ForkPrefixes:
    """Reads the entries that episodes of a journal inherited, each prefix once."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._prefixes: dict[tuple[str, str, int, str], list[JournalEntry]] = {}

    def of(self, entries: Sequence[JournalEntry]) -> Sequence[JournalEntry]:
        """Return the entries that the episode with these entries of its own inherited; empty unless it is a fork.

        Raises:
            EntriesError: they cannot be read.
        """
        begin = decode_entries(entries[:1])[0] if entries else None
        point = begin.fork if isinstance(begin, BeginEntry) else None
        if point is None:
            return ()
        key = (point.journal, point.episode_id, point.attempt, point.call_id)
        if key not in self._prefixes:
            try:
                self._prefixes[key] = load_fork_prefix(self._journal, point)
            except JournalError as error:
                raise EntriesError(f"the recorded turns it began with cannot be read: {error}") from error
        return self._prefixes[key]


def assemble_trajectories(
    entries: Iterable[JournalEntry], policy: str | None = None, prefix_entries: Iterable[JournalEntry] = ()
) -> tuple[Trajectory, ...]:
    """Assemble the trajectories of one episode, one row per context, in the order in which agents first acted or were
    rewarded.

    Args:
        entries: entries of the episode.
        policy: policy whose trajectories are returned; None: all.
        prefix_entries: entries that the episode inherited as a fork; their turns are context.

    Raises:
        EntriesError: the entries do not form one complete episode: the beginning or tokens are missing, or a turn
            occurs twice.
    """
    bodies = decode_entries(entries)
    begin = next((body for body in bodies if isinstance(body, BeginEntry)), None)
    if begin is None:
        raise EntriesError("an episode's entries lack its `begin` entry; the partition is damaged or was cut")
    turns: dict[AgentKey, list[TurnEntry]] = {}
    rewards: dict[AgentKey, list[RewardEntry]] = {}
    prefix = decode_entries(prefix_entries)
    first_sampled = Counter((body.seat, body.index) for body in prefix if isinstance(body, TurnEntry))
    for body in (*prefix, *bodies):
        if policy is not None and isinstance(body, TurnEntry | RewardEntry) and begin.seats.get(body.seat) != policy:
            continue
        if isinstance(body, TurnEntry):
            turns.setdefault((body.seat, body.index), []).append(body)
        elif isinstance(body, RewardEntry):
            rewards.setdefault((body.seat, body.index), []).append(body)
    answer = []
    for key in dict.fromkeys([*turns, *rewards]):
        seat_turns = turns.get(key, [])
        agent_rewards = rewards.get(key, [])
        by_turn = ((reward.turn, reward.weighted) for reward in agent_rewards if reward.turn is not None)
        answer.append(
            Trajectory(
                seat=key[0],
                index=key[1],
                policy=seat_turns[-1].policy if seat_turns else begin.seats.get(key[0], ""),
                rows=_rows(seat_turns, first_sampled[key]),
                reward=math.fsum(reward.weighted for reward in agent_rewards) if agent_rewards else None,
                turn_rewards=sum_by_key(by_turn),
            )
        )
    return tuple(answer)


def _rows(turns: Sequence[TurnEntry], first: int) -> tuple[TrajectoryRow, ...]:
    """Return the rows of an agent; turns before number `first` are context, and rows with only such turns left out."""
    by_row: dict[int, list[TurnEntry]] = {}
    numbers: set[int] = set()
    for turn in sorted(turns, key=lambda turn: turn.turn):
        if turn.turn in numbers:
            raise EntriesError(f"{turn.name} is in the journal twice; an attempt was run again under the same number")
        numbers.add(turn.turn)
        by_row.setdefault(turn.row, []).append(turn)
    return tuple(_row(by_row[number], first) for number in sorted(by_row) if by_row[number][-1].turn >= first)


def _row(turns: Sequence[TurnEntry], first: int) -> TrajectoryRow:
    import numpy as np

    parts: list[Tokens] = []
    recorded_routing: list[RecordedRouting] = []
    at = 0
    for turn in turns:
        if turn.parent_context not in (0, at):
            raise EntriesError(f"{turn.name} continues a row of {turn.parent_context} tokens, but the row has {at}")
        context, sampled = turn.context(), turn.sampled()
        if turn.turn < first:
            sampled = Tokens.context(sampled.token_ids)
        else:
            sampled = sampled.with_column("turn_index", np.full(len(sampled), turn.turn, np.int32))
            sampled = sampled.with_column("loss_mask", np.full(len(sampled), True))
            if turn.temperature not in (0, 1):  # greedy tokens are not trained
                sampled = sampled.with_column("temperatures", np.full(len(sampled), turn.temperature))
        at += len(context) + len(sampled)
        if not sampled.fits(at):
            raise EntriesError(f"{turn.name}: its expert routing does not fit its row")
        if turn.routing is not None and turn.turn >= first:
            recorded_routing.append(RecordedRouting(turn.turn, at, turn.routing))
        parts += [context, sampled]
    try:
        row = Tokens.join(parts)
    except ValueError as error:
        raise EntriesError(f"the turns of a row from {turns[0].name} on do not fit together ({error})") from error
    columns = {name: getattr(row, name) for name in Tokens.__struct_fields__}
    return TrajectoryRow(**columns, recorded_routing=tuple(recorded_routing))
