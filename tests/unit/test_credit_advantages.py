"""Advantages against the sums one would write by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.credit.advantages import ADVANTAGES, group_mean, group_std, leave_one_out, no_baseline

rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


@given(rewards)
def test_leave_one_out_compares_each_with_the_others(values: list[float]) -> None:
    for index, advantage in enumerate(leave_one_out(values)):
        others = [value for other, value in enumerate(values) if other != index]
        assert advantage.value == pytest.approx(values[index] - sum(others) / len(others), abs=1e-9)
        assert advantage.baseline == pytest.approx(sum(others) / len(others), abs=1e-9)


@given(rewards)
def test_advantages_of_a_group_sum_to_zero(values: list[float]) -> None:
    for estimator in (leave_one_out, group_mean, group_std):
        assert sum(advantage.value for advantage in estimator(values)) == pytest.approx(0.0, abs=1e-6)


@given(rewards)
def test_group_std_has_unit_variance_unless_all_are_equal(values: list[float]) -> None:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    scaled = [advantage.value for advantage in group_std(values)]
    if std > 1e-2:
        assert math.sqrt(sum(value**2 for value in scaled) / len(scaled)) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", ["leave_one_out", "group_mean", "group_std"])
def test_a_singleton_teaches_nothing(name: str) -> None:
    assert [advantage.value for advantage in ADVANTAGES[name]([5.0])] == [0.0]


def test_no_baseline_is_the_reward() -> None:
    assert [advantage.value for advantage in no_baseline([1.0, -2.0])] == [1.0, -2.0]
