"""Rows rebuilt from entries: every token with what it was sampled with."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from agentrl.core.errors import JournalError
from agentrl.core.records import PolicyVersion, VersionSpan
from agentrl.core.tokens import ExpertRouting, ExpertRoutingRestart, KeptSets, Tokens
from agentrl.inspection.export.episodes import _row
from agentrl.inspection.tokens import AssembledTokenRow
from agentrl.journal.entries import (
    BeginEntry,
    EntryBody,
    JournalEntry,
    RewardEntry,
    ToolEntry,
    TurnEntry,
    encode_body,
)
from agentrl.journal.rows import assemble_trajectories
from tests.support.builders import spans_of

BEGIN = BeginEntry("calculator", "hash", "t", {}, 7, {"solver": "policy", "judge": "old"}, "train", "g", 1, None)


def turn(
    number: int,
    context: list[int],
    sampled: list[int],
    *,
    steps: list[int] | None = None,
    kept: KeptSets | None = None,
    experts: ExpertRouting | None = None,
    columns: dict[str, bytes] | None = None,
    **changes: Any,
) -> TurnEntry:
    """A turn of `sampled` tokens; version `steps[i]` sampled token i, and `columns` replaces encoded columns."""
    policy = changes.get("policy", "policy")
    spans = [VersionSpan(at, at + 1, PolicyVersion(policy, 0, step)) for at, step in enumerate(steps or [])]
    table = Tokens(
        token_ids=np.array(sampled, np.int32),
        logprobs=-np.arange(1, len(sampled) + 1, dtype=np.float32),
        spans=tuple(spans) or (VersionSpan(0, len(sampled), PolicyVersion(policy, 0, number)),),
        kept=kept,
        experts=experts,
    )
    base = TurnEntry(
        seat="solver",
        index=0,
        policy="policy",
        row=0,
        turn=number,
        context_ids=np.array(context, dtype="<i4").tobytes(),
        tokens=table.encode(),
        finish_reason="stop",
        text="",
        messages=(),
        temperature=1.0,
        seconds=0.0,
        started=0.0,
    )
    if columns is not None:
        encoded = msgspec.structs.replace(base.tokens, columns=base.tokens.columns | columns)
        base = msgspec.structs.replace(base, tokens=encoded)
    return msgspec.structs.replace(base, **changes)


def int32(*columns: list[int]) -> list[Any]:
    return [np.array(column, np.int32) for column in columns]


def entries(*bodies: EntryBody) -> list[JournalEntry]:
    return [JournalEntry("e0", 0, f"r#{number}", b"", encode_body(body)) for number, body in enumerate(bodies)]


def test_two_turns_and_a_tool_between_make_one_row() -> None:
    tool = ToolEntry("calculate", {}, "5", "ok", False, 0.0)
    second = turn(1, [30, 31], [40, 41], steps=[1, 2], parent_context=5)
    (only,) = assemble_trajectories(
        entries(BEGIN, turn(0, [1, 2, 3], [10, 11]), tool, second, RewardEntry("solver", 0, 1.0, None))
    )
    (row,) = only.rows
    assert row.token_ids.tolist() == [1, 2, 3, 10, 11, 30, 31, 40, 41]
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    assert row.logprobs.tolist() == [0, 0, 0, -1, -2, 0, 0, -1, -2]
    assert row.turn_index.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1, 1]
    assert row.spans == (
        VersionSpan(3, 5, PolicyVersion("policy", 0, 0)),
        VersionSpan(7, 8, PolicyVersion("policy", 0, 1)),
        VersionSpan(8, 9, PolicyVersion("policy", 0, 2)),
    )
    assert (spans_of(row), row.kept, only.reward) == ((), None, 1.0)
    dtypes = (row.token_ids.dtype, row.loss_mask.dtype, row.logprobs.dtype, row.turn_index.dtype)
    assert dtypes == (np.int32, np.bool_, np.float32, np.int32)


def test_a_rewritten_context_makes_a_second_row_and_agents_stay_apart() -> None:
    found = assemble_trajectories(
        entries(
            BEGIN,
            turn(0, [1], [2]),
            turn(0, [5], [6], seat="judge", policy="old"),
            turn(1, [3], [4], row=1),
            RewardEntry("solver", 0, 0.25, 1),
            RewardEntry("solver", 0, 0.5, 1),
            RewardEntry("solver", 0, 1.0, None),
            RewardEntry("solver", 1, 2.0, None),
        )
    )
    solver, judge, silent = found
    assert [row.token_ids.tolist() for row in solver.rows] == [[1, 2], [3, 4]]
    assert (solver.reward, dict(solver.turn_rewards)) == (1.75, {1: 0.75})
    assert (judge.policy, judge.reward, judge.rows[0].spans[0].version.policy) == ("old", None, "old")
    assert (silent.seat, silent.index, silent.policy, silent.rows, silent.reward) == ("solver", 1, "policy", (), 2.0)


def test_inherited_turns_are_context() -> None:
    before = entries(
        BEGIN,
        turn(0, [1], [2], temperature=0.5),
        turn(1, [3], [4], row=1, policy="old", kept=KeptSets(*int32([1], [4]))),
        turn(0, [8], [9], seat="judge"),
        RewardEntry("solver", 0, 0.25, 0),
    )
    sampled = turn(2, [5], [6, 7], row=1, parent_context=2)
    (solver,) = assemble_trajectories(
        entries(BEGIN, sampled, RewardEntry("solver", 0, 1.0, None)), "policy", prefix_entries=before
    )
    (row,) = solver.rows
    assert row.token_ids.tolist() == [3, 4, 5, 6, 7]
    assert row.loss_mask.tolist() == [False, False, False, True, True]
    assert row.logprobs.tolist() == [0, 0, 0, -1, -2]
    assert row.turn_index.tolist() == [-1, -1, -1, 2, 2]
    assert row.spans == (VersionSpan(3, 5, PolicyVersion("policy", 0, 2)),)
    assert (row.temperatures, row.kept) == (None, None)
    assert (solver.policy, solver.reward, dict(solver.turn_rewards)) == ("policy", 1.25, {0: 0.25})


def test_exports_have_inherited_turns_as_context_too() -> None:
    turns = [
        turn(0, [1], [2, 3], temperature=0.5, kept=KeptSets(*int32([1, 1], [2, 3]))),
        turn(1, [4], [5, 6], temperature=2.0, parent_context=3),
    ]
    begin = entries(BEGIN)
    (trained,) = assemble_trajectories([*begin, *entries(turns[1])], prefix_entries=entries(turns[0]))
    exported = _row(
        AssembledTokenRow(
            seat="solver",
            index=0,
            row=0,
            policy="policy",
            number=0,
            turns=turns,
            tables=[(each.context(plain=True), each.sampled(plain=True)) for each in turns],
            first=1,
        ),
        None,
        {("solver", 0, number): {"role": "assistant", "content": "said"} for number in range(2)},
    )
    (row,) = trained.rows
    assert row.temperatures is not None
    assert exported.token_ids == row.token_ids.tolist()
    assert exported.loss_mask == row.loss_mask.tolist()
    assert exported.logprobs == row.logprobs.tolist()
    assert exported.turn_index == row.turn_index.tolist()
    assert exported.temperatures == row.temperatures.tolist()
    assert [tuple(span) for span in exported.versions] == [(*span[:2], str(span.version)) for span in row.spans]
    assert (exported.kept_counts, exported.kept_ids, row.kept) == ([], [], None)


def test_each_token_has_the_temperature_of_its_turn() -> None:
    """Greedy turns, which are not trained, and context have 1."""
    turns = [turn(n, [1], [2, 3], temperature=temperature) for n, temperature in enumerate((0.5, 0.0, 1.0, 2.0))]
    (trajectory,) = assemble_trajectories(entries(BEGIN, *turns))
    temperatures = trajectory.rows[0].temperatures
    assert temperatures is not None
    assert temperatures.tolist() == [1, 0.5, 0.5, 1, 1, 1, 1, 1, 1, 1, 2, 2]


def test_kept_sets_are_aligned_and_absent_ones_are_none() -> None:
    first = turn(0, [1, 2], [10, 11], kept=KeptSets(*int32([2, -1], [10, 12])))
    (only,) = assemble_trajectories(entries(BEGIN, first, turn(1, [3], [13])))
    mask = only.rows[0].kept
    assert mask is not None
    assert mask.counts.tolist() == [0, 0, 2, -1, 0, 0]
    assert mask.ids.tolist() == [10, 12]


def routed(start: int, positions: int, value: int) -> dict[str, Any]:
    return {"experts": ExpertRouting(np.full((positions, 2, 1), value, np.uint8), start)}


def spans(*turns: TurnEntry) -> list[tuple[int, int, list[int]]]:
    (found,) = assemble_trajectories(entries(BEGIN, *turns))
    return [(span.start, span.stop, span.experts[:, 0, 0].tolist()) for span in spans_of(found.rows[0])]


def test_routing_is_assembled_by_position_and_what_was_not_recorded_is_minus_one() -> None:
    """Turn 0 forwards positions 0-2 of 4; turn 1 the sampled token 3 and its context."""
    first, second = turn(0, [1, 2], [10, 11], **routed(0, 3, 1)), turn(1, [3], [12], **routed(3, 2, 2))
    assert spans(first, second) == [(0, 6, [1, 1, 1, 2, 2])]
    assert spans(first, turn(1, [3], [12])) == [(0, 6, [1, 1, 1, -1, -1])]
    assert spans(turn(0, [1, 2], [10, 11], **routed(1, 2, 1)), second) == [(0, 6, [-1, 1, 1, 2, 2])]


def test_the_same_routing_again_changes_nothing() -> None:
    first = turn(0, [1, 2], [10, 11], **routed(0, 3, 1))
    assert spans(first, turn(1, [3], [12], **routed(0, 5, 1))) == [(0, 6, [1] * 5)]


def test_tokens_sampled_before_a_prefix_was_routed_again_keep_theirs() -> None:
    """Turn 1 forwards position 1 and what follows again, through expert 2: tokens up to 3 were sampled before."""
    first, second = turn(0, [1, 2], [10, 11], **routed(0, 3, 1)), turn(1, [3], [12], **routed(1, 4, 2))
    assert spans(first, second) == [(0, 4, [1, 1, 1]), (4, 6, [1, 2, 2, 2, 2])]


def test_a_turn_whose_context_was_computed_again_has_two_routings() -> None:
    """Its positions 0-3 go through expert 1, then 1-4 through 2: tokens up to 4 were sampled before, 5 after."""
    data = np.array([1, 1, 1, 1, 2, 2, 2, 2], np.uint8).reshape(-1, 1, 1)
    whole = turn(0, [1, 2], [10, 11, 12, 13], experts=ExpertRouting(data, 0, (ExpertRoutingRestart(4, 1),)))
    assert spans(whole) == [(0, 5, [1, 1, 1, 1]), (5, 6, [1, 2, 2, 2, 2])]


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ([turn(0, [1], [2])], "begin"),
        ([BEGIN, turn(0, [1], [2]), turn(0, [1], [2])], "twice"),
        ([BEGIN, turn(0, [1], [2], columns={"logprobs": b""})], "1 tokens but 0 logprobs"),
        ([BEGIN, turn(0, [1], [2], columns={"logprobs": b"abc"})], "turn 0 of solver.0.: its tokens cannot be read"),
        ([BEGIN, turn(0, [1], [2], columns={"taste": b""})], "unknown columns taste"),
        ([BEGIN, turn(0, [1], [2], context_ids=b"abc")], "context cannot be read"),
        ([BEGIN, turn(0, [-1], [2])], "negative"),
        ([BEGIN, turn(0, [1], [2]), turn(1, [1], [2], parent_context=9)], "row of 9"),
        ([BEGIN, turn(0, [1, 2], [2], columns={"experts": b"12"})], "cannot be read"),
        ([BEGIN, turn(0, [1], [2], **routed(1, 4, 1))], "does not fit"),
    ],
)
def test_what_is_no_whole_episode_is_a_named_error(bodies: list[EntryBody], message: str) -> None:
    with pytest.raises(JournalError, match=message):
        assemble_trajectories(entries(*bodies))


def test_a_body_of_another_format_is_named() -> None:
    with pytest.raises(JournalError, match="e0, call r#0"):
        assemble_trajectories([JournalEntry("e0", 0, "r#0", b"", b"\xc1")])
