"""One object owns the contract on policy lag: how much may be in flight, and what a step takes.

Capacity rule (AReaL, arXiv:2505.24298): after n steps, units admitted and not dropped are ≤ (n + 1 + S) · step_size.
A step consumes step_size units, so the mean lag in steady state is at most S; S = 0 is synchronous training.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedStaleness:
    """Bounds the mean lag of one policy.

    Example:
        >>> BoundedStaleness(max_staleness=1, step_size=64).capacity(steps=0, units=0)
        128
    """

    max_staleness: int
    step_size: int

    def capacity(self, *, steps: int, units: int) -> int:
        """How many more units may be admitted after `steps` steps with `units` admitted and not dropped."""
        return (steps + 1 + self.max_staleness) * self.step_size - units
