"""Generalized advantage estimation, from the values that the trainer's value head predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple


class AdvantagesAndReturns(NamedTuple):
    """What GAE computes for each trained token from rewards and values."""

    advantages: list[float]
    returns: list[float]
    """Discounted rewards from the token on, and the discounted end value."""


def generalized_advantages(
    returns: Sequence[float],
    values: Sequence[float],
    agents: Sequence[int],
    turns: Sequence[int],
    *,
    end_values: Mapping[int, float] = MappingProxyType({}),
    discount: float,
    trace_decay: float,
) -> AdvantagesAndReturns:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t (generalized advantage estimation, arXiv:1506.02438).

    t counts the trained tokens of an agent in order; those of prompts, tools and other agents do not count, as in verl.
    The reward of a turn is that of its last token. After the agent's last token V = 0, or its end value. With λ = 1, A
    is the discounted return minus V.

    Args:
        returns: rewards of the token's turn and all later ones of its agent, undiscounted; with
            `credit.turn_credit = "sum"` the agent's whole reward.
        values: V of each token.
        agents: id of each token's agent.
        turns: number of each token's turn, ascending in time. The tokens of a turn are given in order.
        end_values: V after the last token of agents that a limit cut, by id.
        discount: γ.
        trace_decay: λ.

    Example:
        >>> generalized_advantages([1.0, 1.0], [0.5, 0.75], [0, 0], [0, 1], discount=1.0, trace_decay=0.5)
        AdvantagesAndReturns(advantages=[0.375, 0.25], returns=[1.0, 1.0])
    """
    result = AdvantagesAndReturns([0.0] * len(returns), [0.0] * len(returns))
    order = sorted(range(len(returns)), key=lambda at: (agents[at], turns[at]))
    next_index: int | None = None
    for at in reversed(order):
        if next_index is None or agents[next_index] != agents[at]:
            result.returns[at] = returns[at] + discount * end_values.get(agents[at], 0.0)
            result.advantages[at] = result.returns[at] - values[at]
        else:
            reward = returns[at] - returns[next_index]
            result.returns[at] = reward + discount * result.returns[next_index]
            delta = reward + discount * values[next_index] - values[at]
            result.advantages[at] = delta + discount * trace_decay * result.advantages[next_index]
        next_index = at
    return result
