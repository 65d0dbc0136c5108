"""RAFT: imitate the best episodes of each group."""

from __future__ import annotations

from agentrl.credit.group import Group


def best_of_n(group: Group) -> list[float]:
    """A_i = n / m for the m of n agents with the largest reward, else 0; 0 if all are equal (RAFT, arXiv:2304.06767).

    With the loss `reinforce`, this is supervised training on the best episodes of each group, with equal weight per
    group.

    Example:
        >>> best_of_n(Group(rewards=(1.0, 0.0, 1.0, 0.5), episodes=("a", "b", "c", "d")))
        [2.0, 0.0, 2.0, 0.0]
    """
    if not group.has_signal:
        return [0.0] * len(group.rewards)
    best = max(group.rewards)
    share = len(group.rewards) / sum(reward == best for reward in group.rewards)
    return [share if reward == best else 0.0 for reward in group.rewards]
