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
        >>> from agentrl.credit.advantages.group_baselines import leave_one_out
        >>> advantages_to_go(leave_one_out, [1.0, 0.0], [[(0, 1.0)], []], ["e0", "e1"])
        [(1.0, 0.0), (-1.0, 0.0)]
    """
    last = max((turn + 1 for agent_rewards in turn_rewards for turn, _ in agent_rewards), default=0)
    by_turn = []
    for now in range(last + 1):
        before = [math.fsum(value for turn, value in agent_rewards if turn < now) for agent_rewards in turn_rewards]
        to_go = [reward - paid for reward, paid in zip(rewards, before, strict=True)]
        by_turn.append([entry.value for entry in advantage(to_go, episodes)])
    return list(zip(*by_turn, strict=True))
