"""Which members of a group are trained when, and what each is compared with, where they do not all wait for each other.

The rule, for a group of K members and a number m that is fixed before any of them is sampled: when m have finished,
those are released; each later one is released when it finishes. Every member is compared with the first m - 1
finishers *among the others*, and paid with weight 1.

Why that is unbiased: whom a member is compared with is a function of the others alone, whether it was early or late. An
early one is compared with the other m - 1 of the first m, which are the first m - 1 of the others; a late one with the
first m - 1 of all. So its baseline is independent of what it sampled, and E[score · baseline] = 0. Comparing a late one
with all m that were there breaks this: how it is compared then depends on how long it took (docs/scheduling.md).

Pure: no state, no time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agentrl.credit.advantages import Advantage

E = TypeVar("E", bound=Hashable)

SHRINKAGE = 3.0
"""How many rewards the mean of earlier groups counts for."""


@dataclass(frozen=True, slots=True)
class ReleaseRule:
    """How many of a group's members are waited for.

    Half of them: more wait longer, and fewer make the gradient noisier where a task has no earlier groups.

    Example:
        >>> ReleaseRule().waited_for(8), ReleaseRule(share=0.0).waited_for(8)
        (4, 1)
        >>> ReleaseRule().waited_for(2)
        2
    """

    share: float = 0.5
    """Of a group's members; 0: each is released when it finishes, and compared with earlier groups alone."""

    def waited_for(self, size: int) -> int:
        """m, for a group of `size`: with siblings to be compared with, two at least."""
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
        earlier: V; None where there is none.

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
