"""Advantages of episodes with branches (`ctx.branch`): credit along the tree.

A tree is an episode and its branches. A piece u of it ends at a branch point, where it continues as n + 1 pieces C(u),
or with the episode. With R the reward of an episode:

    V(u) = R at the end of an episode, else the mean of V over C(u)
    w(u) = 1 for the first piece of a tree, and w(u) / |C(u)| for each piece of C(u)
    A_u  = w(u) · (V(u) - b(u)) for every token of u

b(u) is the baseline of the estimator among the pieces of the same branch point or, for first pieces, among the trees of
the group. With leave-one-out this is unbiased: given the past at a branch point, its pieces are independent samples of
the same continuation, so V(u) has the mean of one, the weights of C(u) sum to that of u, and b(u) depends on the others
alone. The decision to branch must depend on the past alone, which `ctx.branch` ensures. Without branches it is the
estimator itself.

VinePPO (arXiv:2410.01679) and TreeRL (arXiv:2506.11902) estimate values at branch points in related ways.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agentrl.core import ids
from agentrl.core.records import ForkPoint
from agentrl.credit.group import Advantage, AdvantageFunction, AgentCredit

AgentKey = tuple[str, str, int]
"""Episode, seat and index of an agent."""


class Piece(NamedTuple):
    """Consecutive turns of one agent between two branch points."""

    first: int
    """Number of the agent's first turn in the piece, counted over the whole conversation."""
    advantage: float
    """A_u, with its weight."""
    baseline: float


def tree_advantages(
    advantage: AdvantageFunction,
    rewards: Sequence[float],
    agents: Sequence[AgentKey],
    branches: Mapping[str, ForkPoint],
) -> list[list[Piece]]:
    """Compute the pieces of each agent, in the order of their turns.

    Args:
        advantage: estimator that compares the pieces of a branch point, and the trees of the group.
        rewards: reward of each agent in one seat.
        agents: the agents.
        branches: the call that started each branch, by its id. Its main episode must be among the agents' episodes.

    Example:
        >>> from agentrl.core.records import AgentTurns
        >>> from agentrl.credit.advantages.group_baselines import leave_one_out
        >>> point = ForkPoint(journal=".", partition="", episode_id="e0", attempt=0, call_id="r#1", branch=1,
        ...                   turns=(AgentTurns("s", 0, 1),))
        >>> agents = [("e0", "s", 0), ("e0~0.r#1.b1", "s", 0), ("e1", "s", 0)]
        >>> [[(piece.first, piece.advantage) for piece in pieces]
        ...  for pieces in tree_advantages(leave_one_out, [1.0, 0.0, 0.0], agents, {"e0~0.r#1.b1": point})]
        [[(0, 0.5), (1, 0.5)], [(0, -0.5)], [(0, -0.5)]]
    """
    values = dict(zip(agents, rewards, strict=True))
    by_episode: dict[str, list[AgentKey]] = defaultdict(list)
    for agent in agents:
        by_episode[agent[0]].append(agent)
    points: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for episode, point in branches.items():
        if episode in by_episode:
            points[point.episode_id][point.call_id].append(episode)
    behind: dict[tuple[str, str], dict[AgentKey, float]] = {}
    """V of the main episode's agents behind each branch point, by main episode and call."""
    mains = [episode for episode in by_episode if episode not in branches]
    for main in mains:
        for call_id in sorted(points[main], key=ids.episode_sort_key, reverse=True):
            behind[main, call_id] = {agent: values[agent] for agent in by_episode[main]}
            for agent in by_episode[main]:
                same = [(episode, *agent[1:]) for episode in points[main][call_id]]
                found = [values[agent], *(values[other] for other in same if other in values)]
                values[agent] = math.fsum(found) / len(found)
    roots = [agent for main in mains for agent in by_episode[main]]
    pieces: dict[AgentKey, list[Piece]] = defaultdict(list)
    for agent, (value, baseline) in _compared(advantage, roots, values).items():
        pieces[agent].append(Piece(0, value, baseline))
    for main in mains:
        weight = 1.0
        for call_id in sorted(points[main], key=ids.episode_sort_key):
            episodes = points[main][call_id]
            weight /= 1 + len(episodes)
            children = [*by_episode[main], *(agent for episode in episodes for agent in by_episode[episode])]
            turns = {(seat, index): count for seat, index, count in branches[episodes[0]].turns}
            for agent, (value, baseline) in _compared(advantage, children, values | behind[main, call_id]).items():
                first = turns.get(agent[1:], 0) if agent[0] == main else 0
                pieces[agent].append(Piece(first, weight * value, baseline))
    return [pieces[agent] for agent in agents]


def tree_credits(
    advantage: AdvantageFunction,
    rewards: Sequence[float],
    agents: Sequence[AgentKey],
    branches: Mapping[str, ForkPoint],
    turn_rewards: Sequence[Sequence[tuple[int, float]]] = (),
) -> list[AgentCredit]:
    """Return the credit of each agent; see `tree_advantages`.

    Args:
        advantage: see `tree_advantages`, as the next three.
        rewards: R.
        agents: the agents.
        branches: the calls that started branches.
        turn_rewards: rewards for single turns of each agent, as (turn, reward), if a turn is credited with the rewards
            to go alone (`to_go.advantages_to_go`); empty: with R.
    """
    whole = tree_advantages(advantage, rewards, agents, branches)
    paid = max((turn + 1 for own in turn_rewards for turn, _ in own), default=0)
    at_turn: list[list[list[Piece]]] = []
    if paid:
        for now in range(max(paid, *(piece.first for pieces in whole for piece in pieces)) + 1):
            before = [math.fsum(value for turn, value in own if turn < now) for own in turn_rewards]
            to_go = [reward - earlier for reward, earlier in zip(rewards, before, strict=True)]
            at_turn.append(tree_advantages(advantage, to_go, agents, branches))
    credits = []
    for number, pieces in enumerate(whole):
        if paid:
            by_turn = [_piece_of(turns[number], turn) for turn, turns in enumerate(at_turn)]
        else:
            by_turn = [_piece_of(pieces, turn) for turn in range(pieces[-1].first + 1)]
        turns = tuple(piece.advantage for piece in by_turn) if paid or len(pieces) > 1 else ()
        credits.append(AgentCredit(by_turn[0].advantage, by_turn[0].baseline, turns))
    return credits


def _piece_of(pieces: Sequence[Piece], turn: int) -> Piece:
    """Return the piece to which a turn belongs."""
    return next(piece for piece in reversed(pieces) if piece.first <= turn)


def _compared(
    advantage: AdvantageFunction, agents: Sequence[AgentKey], values: Mapping[AgentKey, float]
) -> dict[AgentKey, Advantage]:
    """Return the advantages of agents among each other."""
    if not agents:
        return {}
    found = advantage([values[agent] for agent in agents], [agent[0] for agent in agents])
    return dict(zip(agents, found, strict=True))
