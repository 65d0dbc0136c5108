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

TreeRL (arXiv:2506.11902) estimates values at branch points in a related way. A user's estimator marked with
`over="tree"` replaces A_u.

Resampled episodes (`ctx.resample`) are no part of the tree either, because their turn was chosen in hindsight. They are
compared with each other: V is R, w is λ/n with the weight λ of the call, and b(u) is the baseline among the n episodes.
With d(s) the probability that the episode resamples the turn after history s, they add λ times the sum of d(s) ∇V(s)
(DEEP-GRPO, arXiv:2602.14169, without the failed episode in the baseline).

Probes (`ctx.branch(n, probe=True)`; VinePPO, arXiv:2410.01679) are no part of the tree: they change no V, w or b. A
call for probes only divides the piece in which it was made. The part behind it has their mean reward as `probe_value`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from agentrl.core import ids
from agentrl.core.records import AgentTurns, ForkPoint
from agentrl.credit.group import Advantage, AdvantageFunction, AgentCredit, Piece
from agentrl.credit.to_go import rewards_to_go

AgentKey = tuple[str, str, int]
"""Episode, seat and index of an agent."""


class Probed(NamedTuple):
    """The rewards of a probe's agent."""

    reward: float
    turn_rewards: Sequence[tuple[int, float]] = ()
    """Part of `reward` that was given for single turns: (turn, reward)."""

    def to_go(self, turn: int) -> float:
        """Return the reward without the part for turns before `turn`."""
        return self.reward - math.fsum(value for number, value in self.turn_rewards if number < turn)


TreeRule = Callable[[Sequence[float], Sequence[Sequence[Piece]]], Sequence[Sequence[float]]]
"""Returns A_u of every piece, from the rewards and the pieces of the agents."""


def built_in_rule(_: Sequence[float], pieces: Sequence[Sequence[Piece]]) -> list[list[float]]:
    """A_u = w(u) · (V(u) - b(u))."""
    return [[piece.advantage for piece in own] for own in pieces]


def tree_pieces(
    advantage: AdvantageFunction,
    rewards: Sequence[float],
    agents: Sequence[AgentKey],
    branches: Mapping[str, ForkPoint],
    probes: Mapping[AgentKey, float] = MappingProxyType({}),
) -> list[list[Piece]]:
    """Compute the pieces of each agent, in the order of their turns.

    Args:
        advantage: estimator of the baselines among the pieces of a branch point, and among the trees of the group.
        rewards: reward of each agent in one seat.
        agents: the agents.
        branches: the call that started each branch or probe, by its id. Its main episode must be among the agents'
            episodes.
        probes: reward of each agent of a probe; these are not among `agents`.

    Example:
        >>> from agentrl.core.records import AgentTurns
        >>> from agentrl.credit.advantages.group_baselines import leave_one_out
        >>> point = ForkPoint(journal=".", partition="", episode_id="e0", attempt=0, call_id="r#1", branch=1,
        ...                   turns=(AgentTurns("s", 0, 1),))
        >>> agents = [("e0", "s", 0), ("e0~0.r#1.b1", "s", 0), ("e1", "s", 0)]
        >>> [[(piece.first, piece.advantage) for piece in pieces]
        ...  for pieces in tree_pieces(leave_one_out, [1.0, 0.0, 0.0], agents, {"e0~0.r#1.b1": point})]
        [[(0, 0.5), (1, 0.5)], [(0, -0.5)], [(0, -0.5)]]
    """
    values = dict(zip(agents, rewards, strict=True))
    by_episode: dict[str, list[AgentKey]] = defaultdict(list)
    for agent in agents:
        by_episode[agent[0]].append(agent)
    points = _branch_points(by_episode, branches)
    behind: dict[tuple[str, str], dict[AgentKey, float]] = {}
    """V of the main episode's agents behind each branch point, by main episode and call."""
    leaves = dict.fromkeys(agents, 1)
    leaves_behind: dict[tuple[str, str], dict[AgentKey, int]] = {}
    mains = [episode for episode in by_episode if episode not in branches]
    for main in mains:
        for call_id in sorted(points[main], key=ids.episode_sort_key, reverse=True):
            behind[main, call_id] = {agent: values[agent] for agent in by_episode[main]}
            leaves_behind[main, call_id] = {agent: leaves[agent] for agent in by_episode[main]}
            for agent in by_episode[main]:
                same = [(episode, *agent[1:]) for episode in points[main][call_id]]
                found = [values[agent], *(values[other] for other in same if other in values)]
                values[agent] = math.fsum(found) / len(found)
                leaves[agent] += len(found) - 1
    roots = [agent for main in mains for agent in by_episode[main]]
    pieces: dict[AgentKey, list[Piece]] = defaultdict(list)
    group_value = math.fsum(values[agent] for agent in roots) / max(1, len(roots))
    for agent, (_, baseline) in _compared(advantage, roots, values).items():
        pieces[agent].append(Piece(0, values[agent], group_value, baseline, 1.0, leaves[agent]))
    for main in mains:
        weight = 1.0
        for call_id in sorted(points[main], key=ids.episode_sort_key):
            episodes = points[main][call_id]
            weight /= 1 + len(episodes)
            children = [*by_episode[main], *(agent for episode in episodes for agent in by_episode[episode])]
            turns = {(seat, index): count for seat, index, count in branches[episodes[0]].turns}
            at_point = values | behind[main, call_id]
            below = leaves | leaves_behind[main, call_id]
            same_agent: dict[tuple[str, int], list[float]] = defaultdict(list)
            for agent in children:
                same_agent[agent[1:]].append(at_point[agent])
            for agent, (_, baseline) in _compared(advantage, children, at_point).items():
                first = turns.get(agent[1:], 0) if agent[0] == main else 0
                parent_value = math.fsum(same_agent[agent[1:]]) / len(same_agent[agent[1:]])
                pieces[agent].append(Piece(first, at_point[agent], parent_value, baseline, weight, below[agent]))
    for siblings in _resampled(by_episode, branches):
        weight = branches[siblings[0][0]].resample_weight / len({episode for episode, _, _ in siblings})
        mean = math.fsum(values[agent] for agent in siblings) / len(siblings)
        for agent, (_, baseline) in _compared(advantage, siblings, values).items():
            pieces[agent].append(Piece(0, values[agent], mean, baseline, weight, 1))
    _add_probes(pieces, by_episode, points, branches, probes)
    return [pieces[agent] for agent in agents]


def _branch_points(
    by_episode: Mapping[str, Sequence[AgentKey]], branches: Mapping[str, ForkPoint]
) -> defaultdict[str, defaultdict[str, list[str]]]:
    """Return the branches, keyed by main episode and call; resampled episodes are not among them."""
    points: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for episode, point in branches.items():
        if episode in by_episode and not point.resample_weight:
            points[point.episode_id][point.call_id].append(episode)
    return points


def _resampled(by_episode: Mapping[str, Sequence[AgentKey]], branches: Mapping[str, ForkPoint]) -> list[list[AgentKey]]:
    """Return the agents of resampled episodes, those of a turn together."""
    turns: dict[tuple[str, str], list[AgentKey]] = defaultdict(list)
    for episode, agents in by_episode.items():
        point = branches.get(episode)
        if point is not None and point.resample_weight:
            turns[point.episode_id, point.call_id] += agents
    return list(turns.values())


def _add_probes(
    pieces: Mapping[AgentKey, list[Piece]],
    by_episode: Mapping[str, Sequence[AgentKey]],
    points: Mapping[str, Mapping[str, Sequence[str]]],
    branches: Mapping[str, ForkPoint],
    probes: Mapping[AgentKey, float],
) -> None:
    """Add the values of probes to the pieces of their trees, and divide the pieces in which they were started.

    Args:
        pieces: pieces of each agent, which are changed.
        by_episode: agents of each episode.
        points: branches, keyed by main episode and call.
        branches: see `tree_pieces`.
        probes: see `tree_pieces`.
    """
    calls: dict[tuple[str, str], dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    states: dict[tuple[str, str], tuple[AgentTurns, ...]] = {}
    for (episode, seat, index), reward in probes.items():
        point = branches[episode]
        calls[point.episode_id, point.call_id][seat, index].append(reward)
        states[point.episode_id, point.call_id] = point.turns
    for main, call_id in sorted(calls, key=lambda call: ids.episode_sort_key(call[1])):
        state = states[main, call_id]
        turns = {(seat, index): count for seat, index, count in state}
        means = {agent: math.fsum(rewards) / len(rewards) for agent, rewards in calls[main, call_id].items()}
        for agent in by_episode[main]:
            if agent[1:] in means:
                _begin_piece(pieces[agent], turns.get(agent[1:], 0), means[agent[1:]])
        for branch_call, episodes in points[main].items():
            is_later = ids.episode_sort_key(branch_call) > ids.episode_sort_key(call_id)
            for episode in episodes if is_later and branches[episodes[0]].turns == state else ():
                for agent in by_episode[episode]:
                    pieces[agent][0] = pieces[agent][0]._replace(probe_value=means.get(agent[1:]))


def _begin_piece(pieces: list[Piece], first: int, probe_value: float) -> None:
    """Give the piece that begins with a turn the value of probes; begin one there if none does."""
    at = max(number for number, piece in enumerate(pieces) if piece.first <= first)
    begins_here = pieces[at].first == first
    pieces.insert(at + 1, pieces[at]._replace(first=first, probe_value=probe_value))
    if begins_here:
        del pieces[at]


def tree_credits(
    advantage: AdvantageFunction,
    rewards: Sequence[float],
    agents: Sequence[AgentKey],
    branches: Mapping[str, ForkPoint],
    turn_rewards: Sequence[Sequence[tuple[int, float]]] = (),
    rule: TreeRule = built_in_rule,
    probes: Mapping[AgentKey, Probed] = MappingProxyType({}),
) -> list[AgentCredit]:
    """Return the credit of each agent; see `tree_pieces`.

    Args:
        advantage: see `tree_pieces`, as the next three.
        rewards: R.
        agents: the agents.
        branches: the calls that started branches.
        turn_rewards: rewards for single turns of each agent, as (turn, reward), if a turn is credited with the rewards
            to go alone (`to_go.advantages_to_go`); empty: with R.
        rule: gives A_u of every piece; with rewards to go it is called once per turn.
        probes: rewards of each agent of a probe; these are not among `agents`.
    """

    def of_rewards(rewards: Sequence[float], turn: int = 0) -> list[list[_Credited]]:
        probed = {agent: rewarded.to_go(turn) for agent, rewarded in probes.items()}
        pieces = tree_pieces(advantage, rewards, agents, branches, probed)
        return [list(zip(own, given, strict=True)) for own, given in zip(pieces, rule(rewards, pieces), strict=True)]

    whole = of_rewards(rewards)
    paid = max((turn + 1 for own in turn_rewards for turn, _ in own), default=0)
    at_turn: list[list[list[_Credited]]] = []
    if paid:
        for now in range(max(paid, *(piece.first for pieces in whole for piece, _ in pieces)) + 1):
            before = [math.fsum(value for turn, value in own if turn < now) for own in turn_rewards]
            at_turn.append(of_rewards(rewards_to_go(rewards, before), now))
    credits = []
    for number, pieces in enumerate(whole):
        if paid:
            by_turn = [_piece_of(turns[number], turn) for turn, turns in enumerate(at_turn)]
        else:
            by_turn = [_piece_of(pieces, turn) for turn in range(pieces[-1][0].first + 1)]
        turns = tuple(value for _, value in by_turn) if paid or len(pieces) > 1 else ()
        credits.append(AgentCredit(by_turn[0][1], by_turn[0][0].baseline, turns))
    return credits


_Credited = tuple[Piece, float]
"""A piece and its A_u."""


def _piece_of(pieces: Sequence[_Credited], turn: int) -> _Credited:
    """Return the piece to which a turn belongs."""
    return next(credited for credited in reversed(pieces) if credited[0].first <= turn)


def _compared(
    advantage: AdvantageFunction, agents: Sequence[AgentKey], values: Mapping[AgentKey, float]
) -> dict[AgentKey, Advantage]:
    """Return the advantages of agents among each other."""
    if not agents:
        return {}
    found = advantage([values[agent] for agent in agents], [agent[0] for agent in agents])
    return dict(zip(agents, found, strict=True))
