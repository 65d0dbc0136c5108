"""The pieces of a turn: how they become one completion, and which of those on disk a resumed turn goes on from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from agentrl.core.clock import SystemClock
from agentrl.core.ports import SamplingParams
from agentrl.core.records import PolicyVersion, VersionSpan
from agentrl.core.tokens import (
    Completion,
    EncodedTokens,
    ExpertRouting,
    ExpertRoutingRestart,
    KeptCount,
    KeptSets,
    Tokens,
)
from agentrl.journal.entries import JournalEntry, PartialTurnTokens, encode_partial_turn
from agentrl.journal.memory import MemoryTurnLog
from agentrl.rollout.calls.journal import JournaledCall
from agentrl.rollout.turn_entries import EpisodePartialTurns, PartialTurn
from tests.support.builders import make_completion

ASKED = b"question"
CALL = JournaledCall("r#1", ASKED, None)
SAMPLING = SamplingParams(max_tokens=8, stop_token_ids=(2,))


def version(step: int) -> PolicyVersion:
    return PolicyVersion("policy", 0, step)


def routing(start: int, *values: int, restarts: tuple[ExpertRoutingRestart, ...] = ()) -> ExpertRouting:
    return ExpertRouting(np.array(values, np.uint8).reshape(-1, 1, 1), start, restarts)


def piece(tokens: Sequence[int], step: int = 0, reason: str = "abort", **fields: object) -> Completion:
    whole = (VersionSpan(0, len(tokens), version(step)),) if tokens else ()
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        finish_reason=reason,  # type: ignore[arg-type]
        spans=whole,
        **fields,  # type: ignore[arg-type]
    )


def test_pieces_become_one_completion_whose_spans_are_shifted_and_merged() -> None:
    first = make_completion(
        [5, 6, 7], finish_reason="abort", spans=[VersionSpan(0, 1, version(0)), VersionSpan(1, 3, version(1))]
    )
    whole = Tokens.join([first, piece([]), piece([8], 1), piece([9, 2], 3, "stop")])
    assert whole.token_ids.tolist() == [5, 6, 7, 8, 9, 2]
    assert whole.logprobs.tolist() == [-0.5, -0.5, -0.5, -8, -9, -2]
    assert [(start, stop, version.step) for start, stop, version in whole.spans] == [(0, 1, 0), (1, 4, 1), (4, 6, 3)]
    assert whole.kept is None
    assert whole.experts is None


def test_kept_sets_are_concatenated_and_a_piece_without_had_none() -> None:
    mask = KeptSets(counts=np.array([2, -1], np.int32), ids=np.array([5, 6], np.int32))
    other = KeptSets(counts=np.array([1], np.int32), ids=np.array([7], np.int32))
    whole = Tokens.join([piece([5, 6], kept=mask), piece([9]), piece([7], kept=other)])
    assert whole.kept is not None
    assert whole.kept.counts.tolist() == [2, KeptCount.MISSING, KeptCount.NONE, 1]
    assert whole.kept.ids.tolist() == [5, 6, 7]


def test_routings_are_concatenated_and_break_where_positions_begin_again() -> None:
    again = routing(0, 1, 2, 3, 4, 5, 6, 40, 50, 60, 70, restarts=(ExpertRoutingRestart(6, 3),))
    parts = [piece([5, 6], experts=routing(3, 30, 31)), piece([1]), piece([7], experts=again)]
    whole = Tokens.join([*parts, piece([8], experts=routing(7, 9))])
    assert whole.experts is not None
    assert whole.experts.start == 3
    assert whole.experts.rows[:, 0, 0].tolist() == [30, 31, 1, 2, 3, 4, 5, 6, 40, 50, 60, 70, 9]
    assert whole.experts.restarts == ((2, 0), (8, 3))


def test_a_part_keeps_the_spans_inside() -> None:
    whole = Tokens.join([piece([5, 6], 0), piece([7, 8], 1)])
    assert whole.slice(1, 3).spans == (VersionSpan(0, 1, version(0)), VersionSpan(1, 2, version(1)))
    assert whole.slice(2, 2).spans == ()


def row(
    start: int, tokens: Sequence[int], *, asked: bytes = ASKED, step: int = 0, body: bytes | None = None
) -> JournalEntry:
    partial = PartialTurnTokens(start, make_completion(tokens, version=version(step)).encode())
    return JournalEntry("e0", 0, "r#1", asked, encode_partial_turn(partial) if body is None else body)


def encoded(data: bytes, span: VersionSpan) -> EncodedTokens:
    return EncodedTokens(data, (span,), {"logprobs": data})


def recalled(*rows: JournalEntry, masked: bool = False) -> PartialTurn:
    """The turn that goes on from partials on disk."""
    log = MemoryTurnLog("turns-0.db")
    for entry in rows:
        log.append_partial(entry)
    asyncio.run(log.flush())
    partials = EpisodePartialTurns(log, "e0", 0, clock=SystemClock(), kept=True, resumed=True)
    return partials.turn(CALL, masked=masked)


@pytest.mark.parametrize(
    ("rows", "sampled"),
    [
        ([row(0, [5, 6]), row(2, [7], step=1)], 3),
        ([row(2, [7])], 0),
        ([row(0, [5, 6]), row(3, [7])], 2),
        ([row(0, [5, 6], asked=b"another!")], 0),
        ([row(0, [5, 6]), row(2, [7], asked=b"another!")], 2),
        ([row(0, [5, 6]), row(2, [], body=b"\x93rotten"), row(2, [7])], 2),
        (
            [
                row(
                    0,
                    [5, 6],
                    body=encode_partial_turn(PartialTurnTokens(0, encoded(b"123", VersionSpan(0, 1, version(0))))),
                )
            ],
            0,
        ),
        (
            [
                row(
                    0,
                    [5, 6],
                    body=encode_partial_turn(PartialTurnTokens(0, encoded(b"1234" * 2, VersionSpan(1, 2, version(0))))),
                )
            ],
            0,
        ),
    ],
)
def test_a_resumed_turn_goes_on_from_what_is_whole_and_follows_on(rows: list[JournalEntry], sampled: int) -> None:
    turn = recalled(*rows)
    assert turn.sampled == sampled
    assert turn.finish_reason(SAMPLING) is None


def test_tokens_read_back_are_not_trained_where_kept_sets_are_recorded() -> None:
    (whole,) = recalled(row(0, [5, 6]), masked=True).pieces
    assert whole.kept is not None
    assert whole.kept.counts.tolist() == [KeptCount.MISSING] * 2


def test_a_turn_that_was_all_on_disk_is_not_asked_for_again() -> None:
    turn = recalled(row(0, [5, 2]))
    assert turn.finish_reason(SAMPLING) == "stop"
    assert turn.whole("stop").finish_reason == "stop"
    assert recalled(row(0, [5] * 8)).finish_reason(SAMPLING) == "length"


def test_where_routing_is_recorded_its_last_token_is() -> None:
    turn = recalled(row(0, [5, 2]))
    assert turn.give_back_last()
    assert turn.sampled == 1
    assert turn.finish_reason(SAMPLING) is None
    turn.call_returned(piece([2], reason="stop", experts=routing(0, 1, 2, 3)))
    assert turn.finish_reason(SAMPLING) == "stop"
    assert not turn.give_back_last()


def test_a_token_given_back_takes_no_kept_set_of_the_others_with_it() -> None:
    """Tokens of a lost call stay untrained if its last one is sampled again."""
    turn = recalled(row(0, [5, 6, 2]), masked=True)
    assert turn.give_back_last()
    kept = KeptSets(counts=np.array([1], np.int32), ids=np.array([2], np.int32))
    turn.call_returned(piece([2], reason="stop", kept=kept, experts=routing(0, 1, 2, 3)))
    whole = turn.whole("stop")
    assert whole.kept is not None
    assert whole.kept.counts.tolist() == [KeptCount.MISSING, KeptCount.MISSING, 1]
