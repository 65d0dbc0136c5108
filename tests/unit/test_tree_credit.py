"""Credit along trees of branches, by enumeration of all trees."""

from __future__ import annotations

import random

import pytest

from agentrl.core.records import AgentTurns, ForkPoint
from agentrl.credit.advantages.group_baselines import leave_one_out
from agentrl.credit.to_go import advantages_to_go
from agentrl.credit.trees import AgentKey, tree_credits
from tests.branch_toy import Path, Point, Toy, always, by_state, first_step, on_failure

TOY = Toy()
SHORT = Toy(length=3, seed=2)


def two_points(path: Path) -> list[Point]:
    return [(1, 1), (2, 1)] if path[0] else [(2, 2)]


def one_point(path: Path) -> list[Point]:
    return [(1, 1)] if path[0] else [(2, 1)]


@pytest.mark.parametrize(("toy", "points", "trees"), [(TOY, always, 1), (TOY, by_state, 1), (SHORT, two_points, 1),
                                                      (SHORT, one_point, 2)])  # fmt: skip
def test_trees_have_the_gradient_of_plain_episodes(toy: Toy, points: object, trees: int) -> None:
    assert toy.error(toy.expectation(points, trees)) < 1e-12  # type: ignore[arg-type]


def test_other_rules_have_another_gradient() -> None:
    assert TOY.ratio(TOY.leaves_of_weight_one(by_state)) == pytest.approx(1.920, abs=1e-3)
    assert TOY.ratio(TOY.expectation(on_failure(TOY))) == pytest.approx(1.180, abs=1e-3)
    assert TOY.ratio(TOY.resampled(on_failure(TOY), with_main=False)) == pytest.approx(1.112, abs=1e-3)
    assert TOY.ratio(TOY.resampled(on_failure(TOY), with_main=True)) == pytest.approx(1.149, abs=1e-3)


def test_roulette_has_the_gradient_of_whole_episodes() -> None:
    assert TOY.error(TOY.roulette(first_step, 2)) < 1e-12
    assert abs(TOY.ratio(TOY.stopped(first_step, 2, drops=True)) - 1) > 0.1
    assert abs(TOY.ratio(TOY.stopped(first_step, 2, drops=False)) - 1) > 0.1


def test_without_branches_it_is_leave_one_out_to_the_bit() -> None:
    draw = random.Random(3)
    for _ in range(200):
        rewards = [draw.gauss(0, 1) for _ in range(draw.randint(1, 9))]
        agents: list[AgentKey] = [(f"e{n // 2}", "s", n % 2) for n in range(len(rewards))]
        expected = leave_one_out(rewards, [agent[0] for agent in agents])
        found = tree_credits(leave_one_out, rewards, agents, {})
        assert [(credit.value, credit.baseline, credit.by_turn) for credit in found] == [(*a, ()) for a in expected]
        turn_rewards = [[(0, draw.gauss(0, 1)), (2, draw.gauss(0, 1))] for _ in rewards]
        by_turn = advantages_to_go(leave_one_out, rewards, turn_rewards, [agent[0] for agent in agents])
        found = tree_credits(leave_one_out, rewards, agents, {}, turn_rewards)
        assert [credit.by_turn for credit in found] == by_turn


def test_rewards_to_go_along_a_tree() -> None:
    point = ForkPoint(
        journal=".", partition="", episode_id="e0", attempt=0, call_id="r#1", branch=1, turns=(AgentTurns("s", 0, 1),)
    )
    agents: list[AgentKey] = [("e0", "s", 0), ("e0~0.r#1.b1", "s", 0), ("e1", "s", 0)]
    turn_rewards = [[(0, 1.0), (1, 2.0)], [(0, 1.0)], []]
    main, branch, other = tree_credits(leave_one_out, [3.0, 1.0, 0.0], agents, {"e0~0.r#1.b1": point}, turn_rewards)
    assert main.by_turn[:2] == (2.0, 1.0)  # (3 + 1)/2 - 0; (2 - 0)/2
    assert branch.by_turn[1] == -1.0
    assert other.by_turn == (-2.0, -1.0, 0.0)  # minus V of the tree to go: 2, 1, 0
