"""Late credit is unbiased: exactly, by going through everything that can happen in a toy in which long answers are
better and five times slower, for group sizes and every m; and rules that look alike are not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.credit.advantages import leave_one_out
from agentrl.credit.release import ReleaseRule, against, compared_with
from tests.release_toy import Rule, all_that_were_there, dropping_the_late, gradient_ratio, late


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
        sets.append(compared_with(order[:early], 0))
    assert all(found == sets[0] for found in sets)
    assert 0 not in sets[0]
    assert len(sets[0]) == early - 1


def test_waiting_for_all_is_leave_one_out() -> None:
    rewards = [0.1, 0.5, -1.0, 2.0]
    assert late(4)(rewards) == pytest.approx([a.value for a in leave_one_out(rewards)])


@given(st.floats(0.01, 1.0), st.integers(1, 64))
def test_a_group_waits_for_two_at_least_and_for_all_at_most(share: float, size: int) -> None:
    waited_for = ReleaseRule(share).waited_for(size)
    assert min(2, size) <= waited_for <= size


def test_alone_and_without_a_past_nothing_is_learned() -> None:
    assert against(3.0, [], None) == (0.0, 3.0)
