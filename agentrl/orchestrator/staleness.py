"""One object owns the contract on policy lag: how much may be under way, and what a step takes.

Capacity rule: units under way, begun or reserved and neither trained nor dropped, are at most (1 + S) · step_size. With
full steps that is AReaL's bound on all that was ever admitted, (n + 1 + S) · step_size after n steps
(arXiv:2505.24298); a step that is short of units leaves no credit behind.

So a full step overtakes at most S · step_size units. A unit's lag is how often that happens to it: the mean lag is at
most S, whoever is slow. S = 0 is synchronous training.

Where groups are released in parts, late members, which run while others of their group are trained, are left out, up to
half a step: they would keep the work out that fills the engine beside them. The mean lag is then at most S + 1/2.

Window rule, where `max_lag` = L is given: units under way, late ones too, and those trained since the oldest of them
began are together at most (1 + L) · step_size. All that overtakes a unit is trained since it began, and the unit itself
is under way: so fewer than (1 + L) · step_size others, L full steps, overtake it, and its lag is at most L. A step that
is short of units is taken only when nothing runs, and leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedStaleness:
    """Bounds the mean lag of one policy, and the largest where it is asked to.

    Example:
        >>> bounded = BoundedStaleness(max_staleness=1, step_size=64, max_lag=2)
        >>> bounded.capacity(under_way=64), bounded.window(under_way=64, overtaken=128)
        (64, 0)
    """

    max_staleness: int
    step_size: int
    max_lag: int | None = None

    def capacity(self, *, under_way: int, late: int = 0) -> int:
        """How many more units may be admitted, where `late` of those under way belong to groups that were released."""
        return (1 + self.max_staleness) * self.step_size - under_way + min(late, self.step_size // 2)

    def window(self, *, under_way: int, overtaken: int) -> float:
        """How many more the limit on lag lets in; `overtaken`: units trained since the oldest under way began."""
        if self.max_lag is None:
            return float("inf")
        return (1 + self.max_lag) * self.step_size - under_way - overtaken
