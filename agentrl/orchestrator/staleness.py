"""The bound on a policy's staleness under `max_staleness = "auto"`: the run times a few steps with each choice."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from agentrl.observe.metrics import STALENESS_BOUND, TIMED_STEP
from agentrl.observe.pace import choose_staleness, explain_staleness

TIMED_STEPS = 3
"""Number of steps that are timed with each bound."""


class StalenessController:
    """The bound on one policy's staleness. Only admission follows it; what runs continues.

    Args:
        choices: bounds to choose between, in ascending order. The first steps run with the smallest.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self.bound = choices[0]
        self._timed: dict[int, float] = {}
        """Mean seconds per step by bound, of the bounds that have been timed."""
        self._seconds: list[float] = []
        self._left_out = 1
        """Number of steps that are not timed. The first step of a process is slow."""

    def record_time(self, bound: int, seconds: float) -> None:
        """Record the mean seconds per step with a bound, and move to the next bound, or to the chosen one."""
        self._timed[bound] = seconds
        untimed = [each for each in self._choices if each not in self._timed]
        self.bound = untimed[0] if untimed else choose_staleness(self._timed)
        self._left_out = 1 + self.bound  # until the bound shows

    @property
    def reason(self) -> str:
        """The bound and the reason for it, for people."""
        return explain_staleness(self.bound, self._timed)

    def step_ended(self, seconds: float) -> bool:
        """Time a step; returns whether the bound changed or was chosen."""
        if len(self._timed) == len(self._choices):
            return False
        if self._left_out:
            self._left_out -= 1
            return False
        self._seconds.append(seconds)
        if len(self._seconds) < TIMED_STEPS:
            return False
        self.record_time(self.bound, fmean(self._seconds))
        self._seconds.clear()
        return True

    def leave_out_step(self) -> None:
        """Do not time the step in progress."""
        self._left_out = max(self._left_out, 1)

    def metrics(self) -> dict[str, float]:
        """Return the bound and what it rests on, as metrics of a step."""
        return {STALENESS_BOUND: float(self.bound)} | {
            f"{TIMED_STEP}{bound}": seconds for bound, seconds in self._timed.items()
        }
