"""Advantages against the sums one would write by hand."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from agentrl_algorithms.advantages import best_of_n
from hypothesis import given
from hypothesis import strategies as st

from agentrl.credit.estimators import REWARD_ESTIMATORS
from agentrl.credit.group import Group
from agentrl.credit.group_baselines import group_mean, group_std, leave_one_out, no_baseline
from agentrl.credit.to_go import advantages_to_go, rewards_to_go

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
def test_group_std_divides_by_the_sample_deviation(values: list[float]) -> None:
    scaled = [advantage.value for advantage in group_std(values)]
    std = statistics.stdev(values)  # by n - 1
    if std > 1e-2:
        assert scaled == pytest.approx([(v - statistics.fmean(values)) / std for v in values], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    ("values", "by_hand"),
    [
        ([1.0, 0.0], [0.5**0.5, -(0.5**0.5)]),  # deviation sqrt(1/2)
        ([1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),  # sqrt((9 + 1 + 1 + 1) / 16 / 3) = 1/2
        ([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0], [(r - 5) / (32 / 7) ** 0.5 for r in (2, 4, 4, 4, 5, 5, 7, 9)]),
    ],
)
def test_group_std_by_hand(values: list[float], by_hand: list[float]) -> None:
    assert [advantage.value for advantage in group_std(values)] == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("name", ["leave_one_out", "group_mean", "group_std"])
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 64))
def test_equal_rewards_teach_nothing_at_all(name: str, reward: float, size: int) -> None:
    """Not even a rounding, which a division by a tiny deviation would make large."""
    assert {advantage.value for advantage in REWARD_ESTIMATORS[name]([reward] * size, range(size))} == {0.0}


@pytest.mark.parametrize("name", ["leave_one_out", "group_mean", "group_std"])
def test_a_singleton_teaches_nothing(name: str) -> None:
    assert [advantage.value for advantage in REWARD_ESTIMATORS[name]([5.0])] == [0.0]


def test_no_baseline_is_the_reward() -> None:
    assert [advantage.value for advantage in no_baseline([1.0, -2.0])] == [1.0, -2.0]


agents = st.lists(st.tuples(st.integers(0, 4), st.integers(-8, 8)), min_size=2, max_size=10)


@given(agents)
def test_no_agent_of_an_episode_is_a_baseline_for_another(values: list[tuple[int, int]]) -> None:
    episodes, rewards = [e for e, _ in values], [float(r) for _, r in values]
    for at, advantage in enumerate(leave_one_out(rewards, episodes)):
        others = [reward for episode, reward in zip(episodes, rewards, strict=True) if episode != episodes[at]]
        baseline = sum(others) / len(others) if others else rewards[at]
        assert advantage.baseline == pytest.approx(baseline, abs=1e-9)
        assert advantage.value == pytest.approx(rewards[at] - baseline, abs=1e-9)


def test_the_gradient_of_a_game_within_an_episode_is_unbiased() -> None:
    """Two agents of one seat per episode, each choosing 0 or 1; what one gains the other may lose."""
    pay = {(0, 0): (0.0, 0.0), (1, 0): (3.0, -1.0), (0, 1): (-1.0, 3.0), (1, 1): (1.0, 1.0)}
    p = 0.3
    chance = {1: p, 0: 1 - p}
    score = {1: 1 / p, 0: -1 / (1 - p)}  # of p
    true = sum(
        chance[a] * chance[b] * (score[a] * pay[a, b][0] + score[b] * pay[a, b][1]) for a in (0, 1) for b in (0, 1)
    )
    for apart, right in ((True, True), (False, False)):
        estimate = 0.0
        for moves in itertools.product((0, 1), repeat=4):  # two episodes
            rewards = [*pay[moves[0], moves[1]], *pay[moves[2], moves[3]]]
            found = leave_one_out(rewards, [0, 0, 1, 1] if apart else None)
            weight = math.prod(chance[move] for move in moves)
            estimate += weight * sum(score[move] * a.value for move, a in zip(moves, found, strict=True)) / 2
        assert (estimate == pytest.approx(true)) is right


@given(
    st.lists(
        st.tuples(st.integers(-4, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(-4, 4)), max_size=4)),
        min_size=2,
        max_size=5,
    )
)
def test_each_turn_is_compared_by_what_was_still_to_come(
    given_rewards: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    turn_rewards = [[(turn, float(value)) for turn, value in turns] for _, turns in given_rewards]
    rewards = [
        float(own) + sum(v for _, v in turns) for (own, _), turns in zip(given_rewards, turn_rewards, strict=True)
    ]
    found = advantages_to_go(leave_one_out, rewards, turn_rewards, range(len(rewards)))
    for at, by_turn in enumerate(found):
        for turn in range(5):
            to_go = [
                float(own) + sum(value for when, value in turns if when >= turn)
                for (own, _), turns in zip(given_rewards, turn_rewards, strict=True)
            ]
            others = to_go[:at] + to_go[at + 1 :]
            assert by_turn[min(turn, len(by_turn) - 1)] == pytest.approx(
                to_go[at] - sum(others) / len(others), abs=1e-9
            )
    assert [by_turn[0] for by_turn in found] == pytest.approx([a.value for a in leave_one_out(rewards)], abs=1e-9)


def test_rewards_to_go_tie_whether_or_not_something_was_paid_before() -> None:
    """A: 0.1 + 0.2 for the episode. B: 0.5 for turn 0, then 0.1 + 0.2."""
    rewards, paid = [0.1 + 0.2, 0.5 + 0.1 + 0.2], [0.0, 0.5]
    first, second = rewards_to_go(rewards, paid)
    assert first == second == 0.3
    assert best_of_n(Group(rewards=(first, second, 0.0), episodes=("a", "b", "c"))) == [1.5, 1.5, 0.0]
