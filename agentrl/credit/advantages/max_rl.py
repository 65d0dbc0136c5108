"""MaxRL: advantages divided by the mean reward, so that rarely solved tasks weigh more."""

from __future__ import annotations

from agentrl.credit.group import Group


def max_rl(group: Group) -> list[float]:
    """A_i = (R_i - mean(R)) / mean(R), for rewards of at least 0; 0 if all are equal (MaxRL, arXiv:2602.02710).

    Rarely solved tasks weigh more: for rewards of 0 and 1, the expectation approaches the gradient of log p, p being
    the probability of success, whereas GRPO's approaches the gradient of p.

    Example:
        >>> max_rl(Group(rewards=(1.0, 0.0, 0.0, 0.0), episodes=("a", "b", "c", "d")))
        [3.0, -1.0, -1.0, -1.0]
    """
    if min(group.rewards) < 0:
        raise ValueError(
            f"it divides by the mean reward, so no reward may be negative, but one is {min(group.rewards)}"
        )
    return [(r - group.mean) / group.mean for r in group.rewards] if group.has_signal else [0.0] * len(group.rewards)
