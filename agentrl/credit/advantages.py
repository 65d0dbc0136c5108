"""Advantages: pure functions over rewards that are compared with each other, chosen by configuration.

The rewards are those of one policy in one seat over the episodes of a group, in any order; the result has the same
order. Episodes are compared with episodes: agents of one episode share its outcome, so none is a baseline for another.
The advantage is 0 for an episode alone in its group, and if all rewards are equal.

If the members of a group do not wait for each other (`ReleaseRule`), the first m of K finishers are released together,
with m fixed before any of them is sampled, and every later one when it finishes. Each member is compared with the first
m - 1 finishers *among the others*, with weight 1.

This is unbiased, because a member's comparison set depends only on the others, whether it finished early or late. An
early member is compared with the other m - 1 of the first m, which are the first m - 1 of the others; a late one with
the first m - 1 of all. Its baseline is therefore independent of its own samples, and E[score · baseline] = 0. Comparing
a late member with all m would break this: its baseline would then depend on how long it took (docs/scheduling.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

E = TypeVar("E", bound=Hashable)


class Advantage(NamedTuple):
    """`value = reward - baseline`, scaled where the estimator scales."""

    value: float
    baseline: float


def leave_one_out(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = R_i - mean of the rewards in the other episodes (RLOO, arXiv:2402.14740).

    Unbiased for every group size, and with several agents in the seat: an agent cannot influence its baseline, which
    leaves out its whole episode.

    Args:
        rewards: the rewards to compare.
        episodes: the episode of each reward; None: all different.

    Example:
        >>> [a.value for a in leave_one_out([1.0, 0.0, 0.0])]
        [1.0, -0.5, -0.5]
        >>> [a.value for a in leave_one_out([1.0, -1.0, 1.0, 0.0], ["e0", "e0", "e1", "e1"])]
        [0.5, -1.5, 1.0, 0.0]
    """
    episodes = range(len(rewards)) if episodes is None else episodes
    if _alike(rewards, episodes):
        return [Advantage(0.0, reward) for reward in rewards]
    own: dict[Hashable, list[float]] = defaultdict(list)
    for episode, reward in zip(episodes, rewards, strict=True):
        own[episode].append(reward)
    total, count = math.fsum(rewards), len(rewards)
    baseline = {key: (total - math.fsum(values)) / (count - len(values)) for key, values in own.items()}
    return [Advantage(r - baseline[e], baseline[e]) for e, r in zip(episodes, rewards, strict=True)]


def group_mean(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = R_i - mean(R), the reward itself included (Dr. GRPO, arXiv:2503.20783)."""
    if _alike(rewards, range(len(rewards)) if episodes is None else episodes):
        return [Advantage(0.0, reward) for reward in rewards]
    mean = math.fsum(rewards) / len(rewards)
    return [Advantage(reward - mean, mean) for reward in rewards]


def group_std(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) (GRPO, arXiv:2402.03300); 0 if all rewards are equal.

    std is the sample deviation, which divides by n - 1, as in verl and TRL. With the population's (by n) advantages
    would be sqrt(n / (n - 1)) times as large: 1.069 for a group of 8.

    Example:
        >>> [round(a.value, 4) for a in group_std([1.0, 0.0, 0.0, 0.0])]
        [1.5, -0.5, -0.5, -0.5]
    """
    centred = group_mean(rewards, episodes)
    if _alike(rewards, range(len(rewards)) if episodes is None else episodes):
        return centred
    std = math.sqrt(math.fsum(a.value * a.value for a in centred) / (len(rewards) - 1))
    return [Advantage(a.value / (std + 1e-6), a.baseline) for a in centred]


def no_baseline(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = R_i (REINFORCE)."""
    return [Advantage(reward, 0.0) for reward in rewards]


def _alike(rewards: Sequence[float], episodes: Sequence[Hashable]) -> bool:
    """Whether there is nothing to compare: one episode, or equal rewards, whose mean would be off by a rounding."""
    return len(set(episodes)) < 2 or min(rewards) == max(rewards)


AdvantageFunction = Callable[[Sequence[float], Sequence[Hashable]], list[Advantage]]

ADVANTAGES: dict[str, AdvantageFunction] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_std": group_std,
    "role_mean": no_baseline,
    "none": no_baseline,
}
"""Estimators by the name in `credit.advantage`; `role_mean` gets its baseline at the step (`baselines.RoleMeans`)."""


def advantages_to_go(
    advantage: AdvantageFunction,
    rewards: Sequence[float],
    turn_rewards: Sequence[Sequence[tuple[int, float]]],
    episodes: Sequence[Hashable],
) -> list[tuple[float, ...]]:
    """The advantage of each turn, from the rewards to go: those given for the turn or later.

    G_i(t) = R_i - (what was paid for turns before t), and the estimator compares the G(t) of one t. So a turn's reward
    reaches the tokens of that turn and of those before it, and no token is credited with what had been paid before it
    was sampled (policy gradient theorem, Sutton et al. 2000). The baseline of turn t is a function of the other
    episodes alone, so `leave_one_out` stays unbiased. One that had ended by then has G(t) = what was given for the
    episode as a whole, since that is paid at its end.

    Args:
        advantage: the estimator.
        rewards: R, everything an agent was given.
        turn_rewards: (turn, reward) of what was given for single turns, per agent; the rest of R is the episode's.
        episodes: which episode each agent is of.

    Returns:
        Per agent the advantage of turns 0, 1, …; the last one holds for every later turn. Of one length for all.

    Example:
        >>> advantages_to_go(leave_one_out, [1.0, 0.0], [[(0, 1.0)], []], ["e0", "e1"])
        [(1.0, 0.0), (-1.0, 0.0)]
    """
    last = max((turn + 1 for given in turn_rewards for turn, _ in given), default=0)
    by_turn = []
    for now in range(last + 1):
        before = [math.fsum(value for turn, value in given if turn < now) for given in turn_rewards]
        to_go = [reward - paid for reward, paid in zip(rewards, before, strict=True)]
        by_turn.append([found.value for found in advantage(to_go, episodes)])
    return list(zip(*by_turn, strict=True))


SHRINKAGE = 3.0
"""Number of rewards that the mean of earlier groups counts for."""


@dataclass(frozen=True, slots=True)
class ReleaseRule:
    """The number of a group's members that are waited for.

    The default is half of them: more would wait longer, fewer make the gradient noisier for tasks without earlier
    groups.

    Example:
        >>> ReleaseRule().waited_for(8), ReleaseRule(share=0.0).waited_for(8)
        (4, 1)
        >>> ReleaseRule().waited_for(2)
        2
    """

    share: float = 0.5
    """Share of the members; 0: each is released when it finishes, and compared with earlier groups alone."""

    def waited_for(self, size: int) -> int:
        """m for a group of `size` members; at least two if there are siblings to compare with."""
        return max(math.ceil(self.share * size), min(2, size)) if self.share else 1


def compared_with(first: Sequence[E], member: E) -> list[E]:
    """The baseline set of a member: the first m - 1 finishers among the others.

    Args:
        first: the first m finishers of its group, in order.
        member: one of the group, among those or not.

    Example:
        >>> compared_with(["a", "b", "c"], "b"), compared_with(["a", "b", "c"], "z")
        (['a', 'c'], ['a', 'b'])
    """
    return [other for other in first if other != member][: len(first) - 1]


def against(reward: float, others: Sequence[float], earlier: float | None) -> Advantage:
    """A = R - b with b = (Σ others + κ·V) / (n + κ), κ = 3: the mean of a few siblings, shrunk to the mean V of earlier
    groups, whose noise it does not have (James & Stein 1961).

    V is of groups before this one, so b stays independent of what the member sampled. Without V, b is the mean of the
    siblings; without both there is nothing to compare with, and the advantage is 0.

    Args:
        reward: of the member.
        others: rewards in its baseline set.
        earlier: V; None if there is none.

    Example:
        >>> against(1.0, [0.0, 1.0, 0.0], None).value, against(1.0, [0.0, 1.0, 0.0], 0.5)
        (0.6666666666666667, Advantage(value=0.5833333333333333, baseline=0.4166666666666667))
    """
    weight = 0.0 if earlier is None else SHRINKAGE
    count = len(others) + weight
    if not count:
        return Advantage(0.0, reward)
    baseline = (math.fsum(others) + weight * (earlier or 0.0)) / count
    return Advantage(reward - baseline, baseline)
