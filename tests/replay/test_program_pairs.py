"""A program is executed over the recording of another one that differs in one field of one call."""

from __future__ import annotations

import pytest

from agentrl.core.errors import ReplayMismatchError
from tests.replay.executions import Stage
from tests.replay.program_pairs import BY_DESIGN, PAIRS, Pair, Program, reward, turn


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_difference_in_any_field_is_a_mismatch_from_every_prefix_that_has_it(pair: Pair) -> None:
    assert pair.undetected() == []


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_each_program_runs_over_its_own_recording(pair: Pair) -> None:
    for body in (pair.first, pair.second):
        Program.body = body
        stage = Stage(environment=Program)
        whole = stage.play()
        again = stage.play(whole.entries)
        assert again.error is None, again.error
        assert again.transcript == whole.transcript


@pytest.mark.parametrize("pair", BY_DESIGN, ids=lambda pair: pair.name)
def test_what_no_replay_compares_is_listed(pair: Pair) -> None:
    assert pair.undetected(), "it is detected: move it to PAIRS"


@pytest.mark.parametrize(
    ("first", "second", "values"),
    [
        (turn("alice"), turn("bob"), ("a turn of alice", "a turn of bob")),
        (turn("alice"), turn("alice", 1), ("a turn of alice ", "a turn of alice[1]")),
        (reward(), reward(seat="bob"), ("to alice", "to bob")),
        (reward(turn=0), reward(), ("to alice for turn 0", "to alice.")),
    ],
)
def test_a_mismatch_names_who_acted_then_and_who_acts_now(
    first: object, second: object, values: tuple[str, str]
) -> None:
    Program.body = first  # type: ignore[assignment]
    whole = Stage(environment=Program).play()
    Program.body = second  # type: ignore[assignment]
    error = Stage(environment=Program).play(whole.entries).error
    assert isinstance(error, ReplayMismatchError)
    assert error.reason == "nondeterminism"
    assert all(value in str(error) for value in values), error
