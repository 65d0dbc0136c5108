"""GiGPO: compare the turns of a group that began in the same state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from agentrl.credit.advantages.group_baselines import group_mean, group_std
from agentrl.credit.group import Group


def gigpo(
    group: Group, *, discount: float = 0.95, step_weight: float = 1.0, divide_by_std: bool = False
) -> list[list[float]]:
    """A_it = (R_i - mean(R)) + ω (G_it - mean of G over the turns in the same state) (GiGPO, arXiv:2505.10978).

    G_it = Σ_{k ≥ t} γ^(k - t) r_ik is the discounted return of turn t of agent i; rewards that are not for a turn are
    those of its last turn. Turns of the group that began in the same state are compared with each other, so that an
    action gets its own credit. A state that was met once adds 0. With `divide_by_std`, both differences are divided by
    their std + 1e-6, std by n - 1.

    Like the mean of `group_mean`, the means include the turn itself; an agent that returns to a state is compared with
    itself, and gets less for the earlier turn: it went in a circle.

    Args:
        group: the agents, with the states of their turns.
        discount: γ, from 0 to 1.
        step_weight: ω, the weight of the comparison by state.
        divide_by_std: whether to divide by the standard deviations.

    Example:
        >>> states = ((b"start", b"door"), (b"start",))
        >>> group = Group(rewards=(1.0, 0.0), episodes=("a", "b"), turn_states=states)
        >>> gigpo(group, discount=0.5)
        [[0.75, 0.5], [-0.75]]
    """
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount = {discount}: it must be from 0 to 1")
    compare = group_std if divide_by_std else group_mean
    states = group.turn_states or ((),) * len(group.rewards)
    turn_rewards = group.turn_rewards or ((),) * len(group.rewards)
    returns = [
        _discounted_returns(reward, turns, len(hashes), discount)
        for reward, turns, hashes in zip(group.rewards, turn_rewards, states, strict=True)
    ]
    met: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for agent, hashes in enumerate(states):
        for turn, state in enumerate(hashes):
            met[state].append((agent, turn))
    of_episodes = compare(group.rewards, group.episodes)
    advantages = [[credit.value] * max(1, len(turns)) for credit, turns in zip(of_episodes, states, strict=True)]
    for places in met.values():
        for (agent, turn), step in zip(places, compare([returns[a][t] for a, t in places]), strict=True):
            advantages[agent][turn] += step_weight * step.value
    return advantages


def _discounted_returns(
    reward: float, turn_rewards: Sequence[tuple[int, float]], turns: int, discount: float
) -> list[float]:
    """Return the discounted return of each turn of an agent with this total reward, of which `turn_rewards` were for
    turns."""
    turn_values = dict(turn_rewards)
    if turns:
        turn_values[turns - 1] = turn_values.get(turns - 1, 0.0) + reward - math.fsum(turn_values.values())
    returns, next_return = [], 0.0
    for turn in reversed(range(turns)):
        next_return = turn_values.get(turn, 0.0) + discount * next_return
        returns.append(next_return)
    return returns[::-1]
