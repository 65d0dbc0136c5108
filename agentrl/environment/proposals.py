"""The reward of a proposer: how much there is to learn from the task it proposed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from agentrl.core.errors import EpisodeError, RewardError
from agentrl.environment.base import ChildResult


def learnability(solved: Iterable[ChildResult]) -> float:
    """Estimate 4·p·(1 - p) of a task from attempts at it, without bias: 1 if half of them succeed, 0 if all or none do.

    p is the mean reward of an attempt, in [0, 1]. Put into the formula as it is, the pass rate p̂ of K attempts gives
    E[4·p̂·(1 - p̂)] = 4·p·(1 - p)·(K - 1)/K, since p̂ varies by p·(1 - p)/K around p: too little, and the less the fewer
    attempts are left where some were dropped. So the estimate is 4·p̂·(1 - p̂)·K/(K - 1) for attempts that fail or
    succeed and, for rewards in between, the U-statistic that it is a case of, 4/(K·(K - 1)) · Σ_{i≠j} r_i·(1 - r_j):
    each term multiplies two independent attempts. It reaches 4/3 at K = 4, 8/7 at K = 8. Its relatives: 1 - p where
    0 < p < 1 (AZR, arXiv:2505.03335); min(p, 1 - p) (R-Zero, arXiv:2508.05004), of which there is no unbiased estimate.

    Args:
        solved: results of the attempts; dropped ones are left out.

    Raises:
        EpisodeError: fewer than two are left (`too_few_children`): there is no estimate, and the proposer's unit is
            dropped.
        RewardError: a reward lies outside [0, 1].

    Example:
        >>> def attempt(reward):
        ...     return ChildResult(episode_id="e0~0.r#1.0", drop_reason=None, rewards={"solver": reward})
        >>> learnability([attempt(1.0), attempt(0.0), attempt(0.0), attempt(1.0)])
        1.3333333333333333
    """
    rewards = [reward for child in solved if (reward := child.reward) is not None]
    count = len(rewards)
    if count < 2:
        raise EpisodeError(
            f"{count} of the child episodes were committed; learnability needs two or more", reason="too_few_children"
        )
    outside = [reward for reward in rewards if not 0.0 <= reward <= 1.0]
    if outside:
        raise RewardError(f"learnability takes rewards between 0 and 1, and a child episode got {outside[0]}")
    total = math.fsum(rewards)
    pairs = total * (count - total) - math.fsum(reward * (1.0 - reward) for reward in rewards)
    return 4.0 * pairs / (count * (count - 1))
