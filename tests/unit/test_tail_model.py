"""The tail model against laws it does not know: what is left, what is censored, who is alike."""

from __future__ import annotations

import math
import random

import pytest

from agentrl.orchestrator.tail import Law, Place, TailModel

MEAN, DEVIATION = math.log(300.0), 1.2559
PLACE = Place("Solve", "solver")


def works(count: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [math.exp(draw.gauss(MEAN, DEVIATION)) for _ in range(count)]


@pytest.mark.parametrize("bound", [math.inf, 2000.0])
@pytest.mark.parametrize("worked", [0.0, 100.0, 1500.0])
def test_what_is_left_is_the_mean_of_what_came(worked: float, bound: float) -> None:
    drawn = [min(work, bound) - worked for work in works(100_000) if work > worked]
    assert Law(MEAN, DEVIATION).left(worked, bound) == pytest.approx(sum(drawn) / len(drawn), rel=0.05)


def test_the_longer_it_has_taken_the_longer_it_will() -> None:
    law = Law(MEAN, DEVIATION)
    left = [law.left(300.0 * age) for age in (0, 1, 5, 20, 100)]
    assert left == sorted(left)
    assert law.left(3000.0, 2000.0) == 0.0
    assert 0 < law.left(1e30) < math.inf


def test_it_learns_the_law_and_is_calibrated() -> None:
    model = TailModel()
    for work in works(2000):
        model.ended("Solve", "solver", [work])
    law = model.law(PLACE)
    assert law.mean == pytest.approx(MEAN, abs=0.1)
    assert law.deviation == pytest.approx(DEVIATION, abs=0.1)
    assert model.calibration() == pytest.approx(0.9, abs=0.04)


def test_those_that_still_run_count() -> None:
    """After a time in which half have ended the law is not that of the short ones."""
    now, model, blind = 300.0, TailModel(), TailModel()
    drawn = works(4000)
    for work in drawn:
        if work <= now:
            model.ended("Solve", "solver", [work])
            blind.ended("Solve", "solver", [work])
    running = [now for work in drawn if work > now]
    assert model.law(PLACE, running).mean == pytest.approx(MEAN, abs=0.25)
    assert blind.law(PLACE).mean < MEAN - 0.8


def test_those_that_met_the_bound_are_known_to_be_longer() -> None:
    model = TailModel(bound=600.0)
    for work in works(4000):
        model.ended("Solve", "solver", [min(work, 600.0)])
    assert model.law(PLACE).mean == pytest.approx(MEAN, abs=0.2)
    assert model.left(PLACE, 500.0) <= 100.0


def test_siblings_are_alike_as_far_as_they_were() -> None:
    draw, model, alike = random.Random(1), TailModel(), 0.5
    for group in range(400):
        common = draw.gauss(0, math.sqrt(alike))
        for _ in range(8):
            z = common + draw.gauss(0, math.sqrt(1 - alike))
            model.ended("Solve", "solver", [math.exp(MEAN + DEVIATION * z)], group_id=f"g{group}")
    assert model.likeness == pytest.approx(alike, abs=0.1)
    assert model.left(PLACE, 0.0, [3000.0] * 4) > 2 * model.left(PLACE, 0.0, [300.0] * 4)


def test_a_turn_seen_rarely_borrows_from_the_one_before() -> None:
    model = TailModel()
    for work in works(500):
        model.ended("Solve", "solver", [work / 2, work / 2])
    later = Place("Solve", "solver", 1)
    assert model.law(later).mean == pytest.approx(MEAN - math.log(2), abs=0.15)
    unseen = model.law(Place("Solve", "solver", 2))
    assert unseen == model.law(later) or unseen.mean == pytest.approx(model.law(later).mean)


def test_before_anything_was_seen_there_is_a_guess() -> None:
    model = TailModel()
    assert 0 < model.left(PLACE, 0.0) < math.inf
    assert model.calibration() is None
    assert model.likeness == 0.0
