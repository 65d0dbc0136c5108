"""Late credit is unbiased: exactly, by going through everything that can happen in a toy in which long answers are
better and five times slower, for group sizes and every m; and rules that look alike are not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.credit.group_baselines import leave_one_out
from agentrl.credit.release import GroupReleaseRule, baseline_members, shrunk_advantage
from tests.release_toy import (
    APART,
    REWARDS,
    SPEED,
    Rule,
    all_that_were_there,
    complete,
    dropping_the_late,
    finishing_orders,
    gradient_ratio,
    gradient_variance,
    late,
    late_with_history,
)


@pytest.mark.parametrize("earlier", [None, 0.2])
@pytest.mark.parametrize("share_long", [0.2, 0.5, 0.9])
@pytest.mark.parametrize(("size", "early"), [(8, 2), (8, 4), (8, 6), (8, 8), (5, 3), (2, 2)])
def test_late_credit_is_the_true_gradient(size: int, early: int, share_long: float, earlier: float | None) -> None:
    assert gradient_ratio(late(early, earlier), size, share_long) == pytest.approx(1.0, abs=1e-12)


def test_each_by_itself_against_earlier_groups_is_too() -> None:
    assert gradient_ratio(late(1, 0.7)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("rule", [all_that_were_there, dropping_the_late])
def test_rules_that_look_alike_are_not(rule: Callable[[int], Rule]) -> None:
    assert gradient_ratio(rule(4)) < 0.985


@given(st.integers(2, 9), st.data())
def test_whoever_a_member_is_it_does_not_choose_its_own_baseline(size: int, data: st.DataObject) -> None:
    """Move a member anywhere in the order, others kept: its baseline set stays."""
    early = data.draw(st.integers(1, size))
    others = list(range(1, size))
    sets = []
    for place in range(size):
        order = [*others[:place], 0, *others[place:]]
        sets.append(baseline_members(order[:early], 0))
    assert all(found == sets[0] for found in sets)
    assert 0 not in sets[0]
    assert len(sets[0]) == early - 1


def test_waiting_for_all_is_leave_one_out() -> None:
    rewards = [0.1, 0.5, -1.0, 2.0]
    assert late(4)(rewards) == pytest.approx([a.value for a in leave_one_out(rewards)])


@given(st.floats(0.01, 1.0), st.integers(1, 64))
def test_a_group_waits_for_two_at_least_and_for_all_at_most(share: float, size: int) -> None:
    waited_for = GroupReleaseRule(share).waited_for(size)
    assert min(2, size) <= waited_for <= size


def test_alone_and_without_a_past_nothing_is_learned() -> None:
    assert shrunk_advantage(3.0, [], None) == (0.0, 3.0)


@pytest.mark.parametrize(
    ("speed", "reward", "without", "with_history"),
    [
        (SPEED, "long 0.9, short 0.6", 1.30, 0.97),
        (SPEED, "the length (1, 0)", 2.40, 0.62),
        (APART, "long 0.9, short 0.6", 1.45, 1.00),
        (APART, "the length (1, 0)", 3.76, 0.96),
    ],
)
def test_the_variance_is_what_the_docs_say(
    speed: dict[int, float], reward: str, without: float, with_history: float
) -> None:
    """docs/results/measurements.md, m = 4."""
    full = gradient_variance([complete], reward=REWARDS[reward], speed=speed)
    assert gradient_variance([late(4)], reward=REWARDS[reward], speed=speed) / full == pytest.approx(without, abs=0.005)
    history = late_with_history(4, reward=REWARDS[reward])
    assert gradient_variance(history, reward=REWARDS[reward], speed=speed) / full == pytest.approx(
        with_history, abs=0.005
    )


@pytest.mark.parametrize("slots", range(1, 9))
def test_a_group_on_slots_of_its_own_loses_little_of_the_gradient_and_none_where_they_are_one_or_all(
    slots: int,
) -> None:
    orders = finishing_orders(8, 0.3, slots)
    assert sum(orders.values()) == pytest.approx(1.0)
    assert gradient_ratio(complete, slots=slots) == pytest.approx(1.0)
    assert 0.98 < gradient_ratio(late(4), slots=slots) < 1.0 + 1e-9
    assert 0.95 < gradient_ratio(late(4), slots=slots, speed=APART) < 1.0 + 1e-9
    assert (gradient_ratio(late(4), slots=slots) == pytest.approx(1.0, abs=1e-12)) == (slots in (1, 8))
