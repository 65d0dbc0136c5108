"""Late credit is unbiased: exactly, by enumeration of everything that can happen in a toy in which long answers are
better and five times slower, for every group size and every m; and rules that look alike are not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.credit.advantages import leave_one_out
from agentrl.credit.release import ReleaseRule, against, compared_with

LONG, SHORT = 1, 0
SPEED = {LONG: 1.0, SHORT: 5.0}
"""Rates of exponential durations."""
REWARD = {LONG: 0.9, SHORT: 0.6}
"""Mean rewards; baselines are linear in rewards, so the means are enough for an expectation."""

Rule = Callable[[Sequence[float]], list[float]]
"""From the rewards of a group in the order of finishing to the advantages, in that order."""


def finishing_orders(size: int, share_long: float) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence of answers in the order in which they finish, with its probability."""
    for answers in itertools.product((SHORT, LONG), repeat=size):
        longs = sum(answers)
        probability = math.comb(size, longs) * share_long**longs * (1 - share_long) ** (size - longs)
        left = {LONG: longs, SHORT: size - longs}
        for answer in answers:
            racing = sum(left[kind] * SPEED[kind] for kind in left)
            probability *= left[answer] * SPEED[answer] / racing
            left[answer] -= 1
        yield answers, probability


def gradient_ratio(rule: Rule, size: int, share_long: float) -> float:
    """E[Σ score · advantage] over the true gradient."""
    expected = 0.0
    for answers, probability in finishing_orders(size, share_long):
        advantages = rule([REWARD[answer] for answer in answers])
        expected += probability * sum((a - share_long) * v for a, v in zip(answers, advantages, strict=True))
    return expected / (size * share_long * (1 - share_long) * (REWARD[LONG] - REWARD[SHORT]))


def late(early: int, earlier: float | None) -> Rule:
    def advantages(rewards: Sequence[float]) -> list[float]:
        members = list(range(len(rewards)))
        sets = [compared_with(members[:early], member) for member in members]
        return [
            against(r, [rewards[i] for i in others], earlier).value for r, others in zip(rewards, sets, strict=True)
        ]

    return advantages


def all_that_were_there(early: int) -> Rule:
    """As `late`, but a late member is compared with all m that had finished."""

    def advantages(rewards: Sequence[float]) -> list[float]:
        first = rewards[:early]
        late = [reward - sum(first) / early for reward in rewards[early:]]
        return [*(a.value for a in leave_one_out(first)), *late]

    return advantages


def dropping_the_late(early: int) -> Rule:
    return lambda rewards: [*(a.value for a in leave_one_out(rewards[:early])), *[0.0] * (len(rewards) - early)]


@pytest.mark.parametrize("earlier", [None, 0.2])
@pytest.mark.parametrize("share_long", [0.2, 0.5, 0.9])
@pytest.mark.parametrize(("size", "early"), [(8, 2), (8, 4), (8, 6), (8, 8), (5, 3), (2, 2)])
def test_late_credit_is_the_true_gradient(size: int, early: int, share_long: float, earlier: float | None) -> None:
    assert gradient_ratio(late(early, earlier), size, share_long) == pytest.approx(1.0, abs=1e-12)


def test_each_by_itself_against_earlier_groups_is_too() -> None:
    assert gradient_ratio(late(1, 0.7), 8, 0.5) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("rule", [all_that_were_there, dropping_the_late])
def test_rules_that_look_alike_are_not(rule: Callable[[int], Rule]) -> None:
    assert gradient_ratio(rule(4), 8, 0.5) < 0.985


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.data())
def test_whoever_a_member_is_it_does_not_choose_its_own_baseline(rewards: list[float], data: st.DataObject) -> None:
    """Move a member anywhere in the order, others kept: its baseline stays."""
    size = len(rewards)
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
    assert late(4, None)(rewards) == pytest.approx([a.value for a in leave_one_out(rewards)])


@given(st.floats(0.01, 1.0), st.integers(1, 64))
def test_a_group_waits_for_two_at_least_and_for_all_at_most(share: float, size: int) -> None:
    waited_for = ReleaseRule(share).waited_for(size)
    assert min(2, size) <= waited_for <= size


def test_alone_and_without_a_past_nothing_is_learned() -> None:
    assert against(3.0, [], None) == (0.0, 3.0)
