"""Intervals by betting: against another implementation, against enumeration, and after every value."""

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

from agentrl.core.ids import random_stream
from agentrl.core.intervals import (
    STAKES,
    Interval,
    betting_interval,
    difference_interval,
    log_wealth,
    verdict,
)

RECORDED: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("wealth_of_confseq.json").read_text())


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["name"])
def test_wealth_and_intervals_are_those_of_confseq(case: dict[str, Any]) -> None:
    counts = Counter(case["values"])
    mirrored = Counter({1 - value: count for value, count in counts.items()})
    for mean, above, below in zip(RECORDED["means"], case["above"], case["below"], strict=True):
        assert log_wealth(counts, mean) == pytest.approx(math.log(above), rel=1e-9, abs=1e-9)
        assert log_wealth(mirrored, 1 - mean) == pytest.approx(math.log(below), rel=1e-9, abs=1e-9)
    for error, low, high in case["intervals"]:
        interval = betting_interval(case["values"], error=error)
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
            low, high = betting_interval({1.0: ones, 0.0: step - ones}, error=error)
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


def test_bounds_scale_values_and_refuse_others() -> None:
    values = [1.0, 3.0, 3.0, 2.0] * 10
    scaled = betting_interval([(value + 1) / 5 for value in values])
    assert betting_interval(values, (-1.0, 4.0)) == pytest.approx([5 * end - 1 for end in scaled])
    with pytest.raises(ValueError, match=r"the value 3 is outside the bounds \[0, 1\]"):
        betting_interval(values)


def test_values_that_rounding_makes_equal_are_all_counted() -> None:
    near = [0.5 + 1e-17 * number for number in range(20)]
    tiny = [math.nextafter(0.3, 1.0), 0.3] * 20
    assert betting_interval(near, (-1.0, 1.0)) == betting_interval([0.5] * 20, (-1.0, 1.0))
    assert betting_interval(tiny, (-1.0, 1.0)) == pytest.approx(betting_interval([0.3] * 40, (-1.0, 1.0)))


def test_no_value_leaves_everything_open() -> None:
    assert betting_interval([]) == Interval(0.0, 1.0)


@given(st.lists(st.tuples(rewards, rewards), min_size=1, max_size=80))
def test_the_interval_of_a_difference_is_antisymmetric_and_ignores_the_order(pairs: list[tuple[float, float]]) -> None:
    interval = difference_interval(pairs)
    mean = sum(first - second for first, second in pairs) / len(pairs)
    assert -1.0 <= interval.low <= mean + 1e-9
    assert mean - 1e-9 <= interval.high <= 1.0
    assert difference_interval(pairs[::-1]) == interval
    swapped = difference_interval([(second, first) for first, second in pairs])
    assert swapped == pytest.approx((-interval.high, -interval.low), abs=1e-9)
    opposite = {"better": "worse", "worse": "better", "undecided": "undecided"}
    assert verdict(swapped) == opposite[verdict(interval)]


@pytest.mark.parametrize(
    ("better", "tasks", "expected"), [(5, 16, "undecided"), (16, 16, "better"), (30, 60, "better")]
)
def test_few_pairs_need_clear_differences(better: int, tasks: int, expected: str) -> None:
    """Student's interval calls 5 better ones of 16, and none worse, a difference, which 1 in 16 sign tests would."""
    pairs = [(1.0, 0.0)] * better + [(0.0, 0.0)] * (tasks - better)
    assert verdict(difference_interval(pairs)) == expected


def test_rewards_outside_0_and_1_widen_the_bounds() -> None:
    pairs = [(1.0, 0.5), (0.5, 0.5), (0.75, 0.0)] * 10
    scaled = difference_interval([(8 * first, 8 * second) for first, second in pairs])
    assert scaled == pytest.approx([8 * end for end in difference_interval(pairs)])
    assert difference_interval([(3.0, -1.0)] * 40).low > 0


def test_small_differences_need_many_pairs() -> None:
    draw = random_stream("intervals")
    pairs = [(float(draw.random() < 0.9), float(draw.random() < 0.8)) for _ in range(3000)]
    needed = next(number for number in range(10, 3000, 10) if verdict(difference_interval(pairs[:number])) == "better")
    assert 30 < needed < 1500
    assert max(STAKES) < 1.0, "a gambler who stakes everything never recovers"
