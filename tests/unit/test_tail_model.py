"""The tail model against laws it does not know: what is left, who was cut, who is alike, and how well it says so."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

import pytest

from agentrl.core.records import StopReason
from agentrl.core.remaining import MARKS, pack, unpack
from agentrl.orchestrator.tail import Law, TailModel, Tails
from agentrl.testing.builders import make_episode_header, make_spec

MEAN, DEVIATION = math.log(300.0), 1.2559
GUESS = Law(5.0, 1.25)


def works(count: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [math.exp(draw.gauss(MEAN, DEVIATION)) for _ in range(count)]


def first_law(model: TailModel) -> Law:
    return next(model.laws("Solve", "solver"))


def heard(tails: Tails, tokens: list[int], seconds: list[float], stop_reason: StopReason = "completed") -> None:
    """An episode of one agent ended."""
    spec = make_spec()
    header = make_episode_header(spec, tokens=sum(tokens))
    agents = tuple(
        dataclasses.replace(own, tokens=sum(tokens), remaining=pack(tokens, seconds)) for own in header.trajectories
    )
    tails.heard(spec, dataclasses.replace(header, trajectories=agents, stop_reason=stop_reason))


def test_it_learns_the_law_and_is_calibrated() -> None:
    model = TailModel(GUESS)
    for work in works(2000):
        model.ended("Solve", "solver", [work])
    assert first_law(model) == (pytest.approx(MEAN, abs=0.1), pytest.approx(DEVIATION, abs=0.1))
    assert model.calibration() == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize("context", [300.0, 600.0])
def test_those_that_the_context_cut_are_known_to_be_longer(context: float) -> None:
    """Half of them, three in ten; the calibration speaks of what they would have become."""
    model, blind = TailModel(GUESS), TailModel(GUESS)
    for work in works(4000):
        model.ended("Solve", "solver", [min(work, context)], is_cut=work > context)
        blind.ended("Solve", "solver", [min(work, context)])
    assert first_law(model) == (pytest.approx(MEAN, abs=0.2), pytest.approx(DEVIATION, abs=0.2))
    assert first_law(blind).deviation < DEVIATION - 0.2
    assert model.calibration() == pytest.approx(0.9, abs=0.04)


def test_an_episode_that_its_context_ended_is_one_that_was_cut() -> None:
    cut, ended = Tails(), Tails()
    for _ in range(50):
        heard(cut, [400, 600], [2.0, 0.5], "context_length")
        heard(ended, [400, 600], [2.0, 0.5])
    spec = make_spec()
    (seat,) = spec.seats
    for mine, other in ((cut.tokens, ended.tokens), (cut.tool_seconds, ended.tool_seconds)):
        for longer, shorter in zip(mine.laws(spec.environment, seat), other.laws(spec.environment, seat), strict=True):
            assert longer.mean > shorter.mean


def alike_works(likeness: float, groups: int) -> list[tuple[str, float]]:
    """Groups of eight, each with its id."""
    draw, drawn = random.Random(1), []
    for group in range(groups):
        common = draw.gauss(0, math.sqrt(likeness))
        for _ in range(8):
            z = common + draw.gauss(0, math.sqrt(1 - likeness))
            drawn.append((f"g{group}", math.exp(MEAN + DEVIATION * z)))
    return drawn


def test_siblings_are_alike_as_far_as_they_were() -> None:
    model = TailModel(GUESS)
    for group_id, work in alike_works(0.5, groups=400):
        model.ended("Solve", "solver", [work], group_id=group_id)
    assert model.likeness == pytest.approx(0.5, abs=0.1)
    assert model.calibration() == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize(("group_id", "foreseen"), [("hard", True), ("", False)])
def test_long_ones_are_foreseen_where_their_siblings_were_long(group_id: str, foreseen: bool) -> None:
    model, draw = TailModel(GUESS), random.Random(2)
    for group, work in alike_works(0.8, groups=400):
        model.ended("Solve", "solver", [work], group_id=group)
    for _ in range(500):
        work = math.exp(MEAN + DEVIATION * (2.2 + 0.2 * draw.gauss(0, 1)))
        model.ended("Solve", "solver", [work], group_id=group_id)
    share = model.calibration()
    assert share is not None
    assert share > 0.8 if foreseen else share < 0.2


def test_a_turn_seen_rarely_borrows_from_the_one_before() -> None:
    model = TailModel(GUESS)
    for work in works(500):
        model.ended("Solve", "solver", [work, work / 2])
    first, second, third, *_ = model.laws("Solve", "solver")
    assert second.mean == pytest.approx(first.mean - math.log(2), abs=0.05)
    assert third == (pytest.approx(second.mean), pytest.approx(second.deviation))


def test_before_anything_was_seen_there_is_a_guess() -> None:
    model = TailModel(GUESS)
    assert first_law(model) == pytest.approx(GUESS)
    assert model.calibration() is None
    assert model.likeness == 0.0


def test_what_was_left_at_turns_that_double_travels_in_16_bytes() -> None:
    draw = random.Random(2)
    tokens = [draw.randrange(1, 30_000) for _ in range(100)]
    seconds = [draw.expovariate(0.1) for _ in range(100)]
    packed = pack(tokens, seconds)
    assert len(packed) == 16
    found = list(unpack(packed))
    assert [left.turn for left in found] == list(MARKS)
    for left in found:
        assert left.tokens == pytest.approx(sum(tokens[left.turn :]), rel=0.05)
        assert left.tool_seconds == pytest.approx(sum(seconds[left.turn :]), rel=0.05)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e300, 0.0])
def test_seconds_that_are_none_are_packed_as_what_fits(seconds: float) -> None:
    (left,) = unpack(pack([7], [seconds]))
    assert left.tokens == pytest.approx(7, rel=0.05)
    assert left.tool_seconds == 0 or seconds > 1e9
    assert list(unpack(b"\x01")) == []
    assert not pack([], [])


def test_tokens_and_tool_seconds_are_learned_turn_by_turn_and_calibrated() -> None:
    """An agent that has waited long at its first turns is one that waits long."""
    draw, tails, after_eight = random.Random(3), Tails(), []
    for _ in range(1500):
        turns = min(max(round(math.exp(draw.gauss(1.5, 0.8))), 1), 40)
        after_eight += [math.log(20 * (turns - 8))] if turns > 8 else []
        heard(tails, [20] * turns, [math.exp(draw.gauss(0.5, 0.5)) for _ in range(turns)])
    shares = tails.metrics()
    assert shares["tail/below_p90"] == pytest.approx(0.9, abs=0.05)
    assert shares["tail/tools_below_p90"] == pytest.approx(0.9, abs=0.05)
    spec = make_spec()
    (seat,) = spec.seats
    assert next(tails.tool_seconds.laws(spec.environment, seat)).mean == pytest.approx(1.5 + 0.5, abs=0.3)
    ninth = list(tails.tokens.laws(spec.environment, seat))[MARKS.index(8)]
    assert ninth.mean == pytest.approx(statistics.fmean(after_eight), abs=0.1)


def test_who_has_no_tools_says_nothing_of_them() -> None:
    tails = Tails()
    heard(tails, [7], [0.0])
    assert tails.metrics().keys() == {"tail/below_p90"}
