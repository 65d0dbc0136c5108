"""The agents that an estimator compares, and the advantages that it returns.

The rewards are those of one policy in one seat over the episodes of a group, in any order; the result has the same
order. Episodes are compared with episodes: agents of one episode share its outcome, so none is a baseline for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.core.records import REWARD


class Advantage(NamedTuple):
    """Advantage of one reward: `value = reward - baseline`, divided by a scale in some estimators."""

    value: float
    baseline: float


AdvantageFunction = Callable[[Sequence[float], Sequence[Hashable]], list[Advantage]]


class AgentCredit(NamedTuple):
    """The credit that an estimator gave an agent."""

    value: float
    """Advantage of the agent; with advantages per turn, the one of the first turn."""
    baseline: float
    by_turn: tuple[float, ...] = ()


class Piece(NamedTuple):
    """Consecutive turns of one agent between two calls of `ctx.branch` (`credit.trees`)."""

    first: int
    """Number of the agent's first turn in the piece, counted over the whole conversation."""
    value: float
    """V: the reward at the end of an episode, else the mean over the pieces that follow."""
    parent_value: float
    """V of the piece before; for the first piece of a tree, the mean V over the trees of the group."""
    baseline: float
    """Leave-one-out: the mean V over the other pieces of the branch point, or over the other trees of the group. V
    itself if there is nothing to compare."""
    weight: float
    """w: 1 for the first piece of a tree; after a call with n branches, that of the piece before, divided by n + 1."""
    leaves: int
    """Number of episodes that end below the piece."""

    @property
    def advantage(self) -> float:
        """w · (V - b), which `leave_one_out` gives to every token of the piece."""
        return self.weight * (self.value - self.baseline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The agents that an advantage estimator compares: agents of one policy in one seat of an environment.

    An estimator marked with `over="step"` gets the agents of all units of an optimizer step; any other gets those of a
    group. Only one marked with `over="tree"` gets their `pieces`. All sequences have one entry per agent, in the order
    in which the estimator returns the advantages.

    Example:
        >>> Group(rewards=(1.0, 0.0), episodes=("e0", "e1")).mean
        0.5
    """

    rewards: tuple[float, ...]
    """Total reward of each agent, rewards for turns included."""
    episodes: tuple[str, ...]
    """Id of each agent's episode. Agents of one episode share its outcome: neither is a baseline of the other."""
    turn_rewards: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Part of each reward that was given for single turns: (turn, reward), in order."""
    named_rewards: tuple[tuple[tuple[str, float], ...], ...] = ()
    """Sum of each agent's rewards under each name, as (name, reward) pairs before weights; empty for an agent whose
    rewards have no name and weight 1."""
    turn_states: tuple[tuple[bytes, ...], ...] = ()
    """Hashes of the anchor states of each agent's turns, in order; equal if the environment's states were (`state` of
    `Agent.act`, else the new messages). Empty over a step, and for an agent that was played while `credit.advantage`
    did not compare turns."""
    tokens: tuple[int, ...] = ()
    """Number of sampled tokens of each agent; empty over a step."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Copy of `credit.reward_weights`; a name that is absent has weight 1."""
    pieces: tuple[tuple[Piece, ...], ...] = ()
    """Pieces of each agent, in the order of its turns. A main episode has its first piece and one more after each call
    of `ctx.branch`; a branch has one. Empty unless the estimator is marked with `over="tree"`."""
    groups: tuple[str, ...] = ()
    """Id of each agent's group; all the same unless the estimator compares a step."""
    policy: str = ""
    seat: str = ""
    environment: str = ""
    history: float | None = None
    """Mean reward of the policy in this seat over earlier groups of the same task, else of the environment, when the
    group was admitted; None before the first, in a deterministic run, and over a step."""

    @property
    def mean(self) -> float:
        """Mean of the rewards: of all leaves, if the group has trees."""
        return math.fsum(self.rewards) / len(self.rewards)

    @property
    def has_signal(self) -> bool:
        """Whether the rewards can be compared: of two episodes or more, and not all equal."""
        return not nothing_to_compare(self.rewards, self.episodes)

    def by_name(self) -> dict[str, tuple[float, ...]]:
        """Return the rewards of each name, one per agent, before weights; 0 if the agent has none of the name.

        Example:
            >>> given = ((("format", 0.5), ("right", 1.0)), ())
            >>> Group(rewards=(1.5, 0.5), episodes=("a", "b"), named_rewards=given).by_name()
            {'format': (0.5, 0.0), 'reward': (0.0, 0.5), 'right': (1.0, 0.0)}
        """
        by_agent = [
            dict(named) or {REWARD: reward}
            for named, reward in zip(self.named_rewards or ((),) * len(self.rewards), self.rewards, strict=True)
        ]
        names = sorted({name for rewards in by_agent for name in rewards})
        return {name: tuple(rewards.get(name, 0.0) for rewards in by_agent) for name in names}


def nothing_to_compare(rewards: Sequence[float], episodes: Sequence[Hashable]) -> bool:
    """Whether there is nothing to compare: one episode, or equal rewards, whose mean would differ by rounding
    errors.
    """
    return len(set(episodes)) < 2 or min(rewards) == max(rewards)
