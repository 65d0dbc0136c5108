"""Advantages per turn, from the rewards that a turn or a later one earned (`credit.turn_credit = "to_go"`)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from agentrl.credit.group import AdvantageFunction


def advantages_to_go(
    advantage: AdvantageFunction,
    rewards: Sequence[float],
    turn_rewards: Sequence[Sequence[tuple[int, float]]],
    episodes: Sequence[Hashable],
) -> list[tuple[float, ...]]:
    """Compute the advantage of each turn from the rewards to go: those given for the turn or later.

    G_i(t) = R_i - (sum of the rewards for turns before t), and the estimator compares the G(t) of one t. So a turn's
    reward reaches the tokens of that turn and of earlier turns, and no token is credited with rewards given before it
    was sampled (policy gradient theorem, Sutton et al. 2000). The baseline of turn t is a function of the other
    episodes alone, so `leave_one_out` stays unbiased. For an episode that ended before turn t, G(t) is its reward for
    the whole episode, which is given at its end.

    Args:
        advantage: the estimator.
        rewards: R, the total reward of each agent.
        turn_rewards: rewards for single turns of each agent, as (turn, reward); the rest of R is for the whole episode.
        episodes: episode of each agent.

    Returns:
        For each agent, the advantages of turns 0, 1, …; the last one holds for all later turns. All lists have one
        length.

    Example:
        >>> from agentrl.credit.group_baselines import leave_one_out
        >>> advantages_to_go(leave_one_out, [1.0, 0.0], [[(0, 1.0)], []], ["e0", "e1"])
        [(1.0, 0.0), (-1.0, 0.0)]
    """
    last = max((turn + 1 for agent_rewards in turn_rewards for turn, _ in agent_rewards), default=0)
    by_turn = []
    for now in range(last + 1):
        before = [math.fsum(value for turn, value in agent_rewards if turn < now) for agent_rewards in turn_rewards]
        by_turn.append([entry.value for entry in advantage(rewards_to_go(rewards, before), episodes)])
    return list(zip(*by_turn, strict=True))


def rewards_to_go(rewards: Sequence[float], paid: Sequence[float]) -> list[float]:
    """Subtract from each reward what was paid before. The differences are rounded to 12 digits: estimators compare them
    for equality, and neither 1.4 - 0.4 is exactly 1 nor 0.1 + 0.2 exactly 0.3.

    Example:
        >>> rewards_to_go([1.4, 1.0, 0.3], [0.4, 0.0, 0.1 + 0.2])
        [1.0, 1.0, 0.0]
    """
    return [_difference(*pair) for pair in zip(rewards, paid, strict=True)]


def _difference(reward: float, paid: float) -> float:
    rest = reward - paid
    if not math.isfinite(rest):
        return rest
    return 0.0 if abs(rest) <= 1e-12 * max(abs(reward), abs(paid)) else float(f"{rest:.12g}")
