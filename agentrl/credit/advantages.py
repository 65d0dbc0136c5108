"""Baselines and advantages: pure functions over the rewards of what is compared, chosen by configuration.

Rewards are those of one seat over the episodes of one group, in any order; the result is in the same order.
A reward alone in its group has nothing to be compared with: its advantage is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Advantage(NamedTuple):
    """`value = reward - baseline`, scaled where the estimator scales."""

    value: float
    baseline: float


def leave_one_out(rewards: Sequence[float]) -> list[Advantage]:
    """A_i = R_i - mean_{j≠i} R_j (RLOO, arXiv:2402.14740). Unbiased for every group size.

    Example:
        >>> [a.value for a in leave_one_out([1.0, 0.0, 0.0])]
        [1.0, -0.5, -0.5]
    """
    count = len(rewards)
    if count < 2:
        return [Advantage(0.0, reward) for reward in rewards]
    total = math.fsum(rewards)
    baselines = [(total - reward) / (count - 1) for reward in rewards]
    return [Advantage(reward - baseline, baseline) for reward, baseline in zip(rewards, baselines, strict=True)]


def group_mean(rewards: Sequence[float]) -> list[Advantage]:
    """A_i = R_i - mean(R), the reward itself included (Dr. GRPO, arXiv:2503.20783)."""
    if len(rewards) < 2:
        return [Advantage(0.0, reward) for reward in rewards]
    mean = math.fsum(rewards) / len(rewards)
    return [Advantage(reward - mean, mean) for reward in rewards]


def group_std(rewards: Sequence[float]) -> list[Advantage]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) (GRPO, arXiv:2402.03300); 0 where all rewards are equal."""
    centred = group_mean(rewards)
    if len(rewards) < 2:
        return centred
    std = math.sqrt(math.fsum(a.value * a.value for a in centred) / len(rewards))
    return [Advantage(a.value / (std + 1e-6), a.baseline) for a in centred]


def no_baseline(rewards: Sequence[float]) -> list[Advantage]:
    """A_i = R_i (REINFORCE)."""
    return [Advantage(reward, 0.0) for reward in rewards]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[Advantage]]] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_std": group_std,
    "none": no_baseline,
}
"""By the name in `credit.advantage`."""
