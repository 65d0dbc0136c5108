"""Assembles journal entries into the token rows a trainer consumes, by concatenation and index arithmetic alone.

Invariants: a row is, over its turns in order, `context_ids + token_ids`; every sampled token keeps the logprob, the
version, the routing and the kept set it was sampled with; context tokens carry logprob 0 and no version. The turns that
a fork inherited are context.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from agentrl.core.errors import EntriesError, JournalError
from agentrl.core.records import (
    ExpertRoutingSpan,
    PolicyVersion,
    SamplingMask,
    SamplingMaskStatus,
    Trajectory,
    TrajectoryRow,
    VersionSpan,
)
from agentrl.journal.entries import BeginEntry, JournalEntry, RewardEntry, TurnEntry, decode_entries, sum_by_key
from agentrl.journal.reader import AttemptLocation, TurnLogReader, load_fork_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from agentrl.core.records import ExpertArray, Int32Array, Unit

AgentKey = tuple[str, int]
"""Seat and index of an agent."""


def make_unit_reader(run_directory: Path) -> Callable[[Sequence[Unit]], Sequence[Sequence[Trajectory]]]:
    """Make a reader of a run's journal that returns the trajectories of each unit, from the unit's location."""
    journal = run_directory / "journal"
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
            raise EntriesError(f"{_name(turn)} is in the journal twice; an attempt was run again under the same number")
        numbers.add(turn.turn)
        by_row.setdefault(turn.row, []).append(turn)
    return tuple(_row(by_row[number], first) for number in sorted(by_row) if by_row[number][-1].turn >= first)


def _row(turns: Sequence[TurnEntry], first: int) -> TrajectoryRow:
    import numpy as np

    new_turns = [turn for turn in turns if turn.turn >= first]
    temperature = new_turns[0].temperature

    tokens, masks, logprobs, indices, counts, mask_parts = [], [], [], [], [], []
    spans: list[VersionSpan] = []
    at = 0
    for turn in turns:
        if turn.parent_context not in (0, at):
            raise EntriesError(f"{_name(turn)} continues a row of {turn.parent_context} tokens, but the row has {at}")
        if turn.turn >= first and turn.temperature != temperature:
            raise EntriesError(
                f"{_name(turn)} was sampled at another temperature than the rest of its row; the journal is damaged"
            )
        try:
            context = np.frombuffer(turn.context_ids, dtype="<i4")
            token_ids = np.frombuffer(turn.token_ids, dtype="<i4")
            behavior = np.frombuffer(turn.logprobs, dtype="<f4")
            mask_counts = None if turn.mask_counts is None else np.frombuffer(turn.mask_counts, dtype="<i4")
            mask_ids = np.frombuffer(turn.mask_ids or b"", dtype="<i4")
        except ValueError as error:
            raise EntriesError(f"{_name(turn)}: its token columns cannot be read ({error})") from error
        if len(behavior) != len(token_ids) or (mask_counts is not None and len(mask_counts) != len(token_ids)):
            raise EntriesError(f"{_name(turn)}: its token columns differ in length")
        if turn.turn < first:
            context, token_ids = np.concatenate([context, token_ids]), token_ids[:0]
            behavior, mask_counts, mask_ids = behavior[:0], None, mask_ids[:0]
        none = np.full(len(context), SamplingMaskStatus.NONE, dtype=np.int32)
        tokens += [context, token_ids]
        masks += [np.zeros(len(context), dtype=np.bool_), np.ones(len(token_ids), dtype=np.bool_)]
        logprobs += [np.zeros(len(context), dtype=np.float32), behavior]
        indices += [np.full(len(context), -1, dtype=np.int32), np.full(len(token_ids), turn.turn, dtype=np.int32)]
        counts += [
            none,
            np.full(len(token_ids), SamplingMaskStatus.NONE, dtype=np.int32) if mask_counts is None else mask_counts,
        ]
        mask_parts.append(mask_ids)
        start = at + len(context)
        for span in turn.spans if turn.turn >= first else ():
            version = PolicyVersion(turn.weights_of or turn.policy, span.lineage, span.step)
            spans.append(VersionSpan(start + span.start, start + span.stop, version))
        at = start + len(token_ids)
    masked = any(turn.mask_counts is not None for turn in new_turns)
    return TrajectoryRow(
        token_ids=_int32(tokens),
        loss_mask=np.concatenate(masks),
        behavior_logprobs=np.concatenate(logprobs).astype(np.float32, copy=False),
        turn_index=_int32(indices),
        spans=tuple(spans),
        temperature=temperature,
        routing=_routing(new_turns, at),
        sampling_mask=SamplingMask(counts=_int32(counts), token_ids=_int32(mask_parts)) if masked else None,
    )


def _int32(parts: Sequence[Int32Array]) -> Int32Array:
    import numpy as np

    return np.concatenate(parts).astype(np.int32, copy=False)


def _routing(turns: Sequence[TurnEntry], length: int) -> tuple[ExpertRoutingSpan, ...]:
    """Return the experts used to sample the row's tokens, with a span per run of tokens that share them.

    A position that was recomputed through other experts (the KV was lost, or newer weights took over) has two routings:
    tokens predicted before it were sampled with the first, later ones with the second. No span is longer than the row,
    and there is only one unless a prefix's routing changed.
    """
    import numpy as np

    routed_turns = [turn for turn in turns if turn.expert_routing is not None]
    if not routed_turns:
        return ()
    latest = np.full((length, *routed_turns[0].routing_shape[1:]), -1, dtype=np.int16)
    spans: list[ExpertRoutingSpan] = []
    first, end = 0, 0  # first token of the current span; positions below `end` have predicted a token
    for turn in routed_turns:
        for start, part in _routing_parts(turn):
            stop = start + len(part)
            if not 0 <= start <= stop <= length or part.shape[1:] != latest.shape[1:]:
                raise EntriesError(f"{_name(turn)}: its expert routing does not fit its row")
            overlap = latest[start : min(stop, end)]
            if end + 1 > first and ((overlap >= 0) & (overlap != part[: len(overlap)])).any():
                spans.append(ExpertRoutingSpan(first, end + 1, latest[:end].copy()))
                first = end + 1
            latest[start:stop] = part
            end = max(end, stop)
    if first < length:
        spans.append(ExpertRoutingSpan(first, length, latest[: length - 1]))
    return tuple(spans)


def _routing_parts(turn: TurnEntry) -> Iterator[tuple[int, ExpertArray]]:
    """Yield (first position, experts) for each stretch of consecutive positions, in the order of computation."""
    import numpy as np

    try:
        rows = np.frombuffer(turn.expert_routing or b"", dtype=np.uint8).reshape(turn.routing_shape)
        begins = [(0, turn.routing_start), *turn.routing_breaks]
        ends = [row for row, _ in turn.routing_breaks] + [len(rows)]
    except (ValueError, IndexError, TypeError) as error:
        raise EntriesError(f"{_name(turn)}: its expert routing cannot be read ({error})") from error
    for (row, position), end in zip(begins, ends, strict=True):
        yield position, rows[row:end]


def _name(turn: TurnEntry) -> str:
    return f"turn {turn.turn} of {turn.seat}[{turn.index}]"
