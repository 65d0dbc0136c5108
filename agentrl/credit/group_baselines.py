"""A reward minus a baseline from its group. The advantage is 0 for an episode alone in its group, and if all rewards
are equal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

from agentrl.credit.group import Advantage, nothing_to_compare


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
    if nothing_to_compare(rewards, episodes):
        return [Advantage(0.0, reward) for reward in rewards]
    by_episode: dict[Hashable, list[float]] = defaultdict(list)
    for episode, reward in zip(episodes, rewards, strict=True):
        by_episode[episode].append(reward)
    total, count = math.fsum(rewards), len(rewards)
    baseline = {key: (total - math.fsum(values)) / (count - len(values)) for key, values in by_episode.items()}
    return [Advantage(r - baseline[e], baseline[e]) for e, r in zip(episodes, rewards, strict=True)]


def group_mean(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = R_i - mean(R), the reward itself included (Dr. GRPO, arXiv:2503.20783)."""
    if nothing_to_compare(rewards, range(len(rewards)) if episodes is None else episodes):
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
    centered = group_mean(rewards, episodes)
    if nothing_to_compare(rewards, range(len(rewards)) if episodes is None else episodes):
        return centered
    std = math.sqrt(math.fsum(a.value * a.value for a in centered) / (len(rewards) - 1))
    return [Advantage(a.value / (std + 1e-6), a.baseline) for a in centered]


def no_baseline(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = R_i (REINFORCE)."""
    return [Advantage(reward, 0.0) for reward in rewards]
