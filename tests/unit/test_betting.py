"""Tests and intervals by betting: against another implementation, against enumeration, and at every moment."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.betting import (
    STAKES,
    AnytimeInterval,
    anytime_interval,
    budget_share,
    decide,
    log_wealth,
    verdict_words,
)
from agentrl.core.ids import random_stream

RECORDED: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("wealth_of_confseq.json").read_text())


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["name"])
def test_wealth_and_intervals_are_those_of_confseq(case: dict[str, Any]) -> None:
    counts = Counter(case["values"])
    mirrored = Counter({1 - value: count for value, count in counts.items()})
    for mean, above, below in zip(RECORDED["means"], case["above"], case["below"], strict=True):
        assert log_wealth(counts, mean) == pytest.approx(math.log(above), rel=1e-9, abs=1e-9)
        assert log_wealth(mirrored, 1 - mean) == pytest.approx(math.log(below), rel=1e-9, abs=1e-9)
    for error, low, high in case["intervals"]:
        interval = anytime_interval(case["values"], errors=(error / 2, error / 2))
        assert interval == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize("mean", [0.2, 0.5, 0.7])
def test_wealth_neither_grows_nor_falls_on_average_under_the_hypothesis(mean: float) -> None:
    """All sequences of ten values of 0 or 1, with their probabilities: the definition of a martingale."""
    expected = 0.0
    for values in itertools.product((0.0, 1.0), repeat=10):
        probability = math.prod(mean if value else 1 - mean for value in values)
        expected += probability * math.exp(log_wealth(Counter(values), mean))
    assert expected == pytest.approx(1.0)


def crossing_probability(mean: float, steps: int, error: float) -> float:
    """The exact probability that the interval of coins excludes their mean after any of so many flips."""
    alive, crossed = {0: 1.0}, 0.0
    for step in range(1, steps + 1):
        reached: dict[int, float] = {}
        for ones, probability in alive.items():
            for more, share in ((1, mean), (0, 1 - mean)):
                reached[ones + more] = reached.get(ones + more, 0.0) + probability * share
        alive = {}
        for ones, probability in reached.items():
            low, high = anytime_interval({1.0: ones, 0.0: step - ones}, errors=(error / 2, error / 2))
            if low <= mean <= high:
                alive[ones] = probability
            else:
                crossed += probability
    return crossed


@pytest.mark.parametrize(("mean", "error"), [(0.5, 0.05), (0.1, 0.05), (0.9, 0.2)])
def test_looking_after_every_value_errs_no_more_often_than_it_says(mean: float, error: float) -> None:
    crossed = crossing_probability(mean, 60, error)
    assert 0.05 * error < crossed <= error, "a bound that is never reached would pass too"


rewards = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(st.lists(st.tuples(rewards, rewards), min_size=1, max_size=80), st.sampled_from([0.0, 0.1, 0.5]))
def test_a_decision_is_what_the_interval_shows(pairs: list[tuple[float, float]], margin: float) -> None:
    differences = [first - second for first, second in pairs]
    interval = anytime_interval(differences, (-1.0, 1.0))
    assert -1.0 <= interval.low <= sum(differences) / len(differences) + 1e-9
    assert sum(differences) / len(differences) - 1e-9 <= interval.high <= 1.0
    assert anytime_interval(differences[::-1], (-1.0, 1.0)) == interval, "the order does not matter"
    decided = decide(differences, margin)
    words = verdict_words(interval, margin)
    assert words.startswith(decided) or (decided, words) == ("not better", "worse")
    opposite = {"better": "not better", "worse": "better"}.get(verdict_words(interval))
    assert opposite is None or decide([-each for each in differences]) == opposite


def test_bounds_scale_values_and_refuse_others() -> None:
    values = [1.0, 3.0, 3.0, 2.0] * 10
    scaled = anytime_interval([(value + 1) / 5 for value in values])
    assert anytime_interval(values, (-1.0, 4.0)) == pytest.approx([5 * end - 1 for end in scaled])
    with pytest.raises(ValueError, match=r"the value 3 is outside the bounds \[0, 1\]"):
        anytime_interval(values)
    with pytest.raises(ValueError, match=r"the value 2 is outside the bounds \[-1, 1\]"):
        decide([2.0])


def test_values_that_rounding_makes_equal_are_all_counted() -> None:
    near = [0.5 + 1e-17 * number for number in range(20)]
    tiny = [math.nextafter(0.3, 1.0), 0.3] * 20
    assert anytime_interval(near, (-1.0, 1.0)) == anytime_interval([0.5] * 20, (-1.0, 1.0))
    assert anytime_interval(tiny, (-1.0, 1.0)) == pytest.approx(anytime_interval([0.3] * 40, (-1.0, 1.0)))


def test_no_value_leaves_everything_open() -> None:
    assert anytime_interval([]) == AnytimeInterval(0.0, 1.0)
    assert decide([]) == "undecided"


def test_errors_of_planned_and_further_questions_add_up_to_the_budget() -> None:
    spent, shares = 0.0, []
    for number in range(40):
        shares.append(budget_share(spent, 20 - number))
        spent += shares[-1]
    assert shares[:20] == pytest.approx([0.05 / 21] * 20)
    assert 0 < shares[-1] < shares[20] < shares[19]
    assert 0.0499 < spent < 0.05
    assert decide([1.0] * 500, errors=(0.0, 0.05)) == "undecided", "nothing is left of the budget"


def test_each_side_has_its_error() -> None:
    values = [0.2, 0.9, 0.7, 1.0, 0.4] * 8
    low, high = anytime_interval(values)
    careful = anytime_interval(values, errors=(0.001, 0.025))
    assert (careful.low < low, careful.high) == (True, high)


def test_clear_differences_need_few_values_and_small_ones_many() -> None:
    assert decide([1.0] * 9) == "better"
    assert decide([1.0] * 5) == "undecided"
    draw = random_stream("betting")
    small = [float(draw.random() < 0.9) - float(draw.random() < 0.8) for _ in range(3000)]
    needed = next(number for number in range(1, 3000) if decide(small[:number]) == "better")
    assert 30 < needed < 1500
    assert max(STAKES) < 1.0, "a gambler who stakes everything never recovers"
