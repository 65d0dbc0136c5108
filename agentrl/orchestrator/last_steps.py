"""Whether groups keep starting until the last step has ended, although no step will train on them.

Without such groups, the last steps wait until the slowest episodes in flight have ended, while the engine empties. With
them, the last steps come as fast as those before, and the episodes in flight at the end are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

import numpy as np

MAX_EPISODES = 256
"""Number of newest episodes whose durations count."""
MAX_STEPS = 8
"""Number of newest steps whose times count."""
MIN_SAVED = 0.1
"""Share of the run's time that must be saved for episodes to be thrown away."""


class LastSteps:
    """Decides whether groups start that no step needs.

    Args:
        setting: `sample_until_end`.
    """

    def __init__(self, setting: Literal["auto"] | bool) -> None:
        self._setting = setting
        self._durations: deque[float] = deque(maxlen=MAX_EPISODES)
        self._step_s: dict[str, deque[float]] = {}
        self._decision: tuple[Mapping[str, int], bool] = ({}, False)
        """The last decision, and the steps left when it was taken."""

    def record_episode(self, seconds: float) -> None:
        """Record the duration of a training episode that ended."""
        self._durations.append(seconds)

    def record_step(self, policy: str, seconds: float) -> None:
        """Record the time between two steps of a policy."""
        self._step_s.setdefault(policy, deque(maxlen=MAX_STEPS)).append(seconds)

    def may_start_more(self, left: Mapping[str, int], taken: Mapping[str, int], in_flight: int) -> bool:
        """Whether groups may start that no step needs. With `auto`, this is decided anew for each number of steps left.

        Args:
            left: number of steps that each learning policy has yet to take.
            taken: number of steps that it has taken.
            in_flight: number of training episodes in flight.
        """
        if self._setting != "auto":
            return self._setting
        if self._decision[0] != left:
            self._decision = left, self._saves_time(left, taken, in_flight)
        return self._decision[1]

    def _saves_time(self, left: Mapping[str, int], taken: Mapping[str, int], in_flight: int) -> bool:
        if not self._durations or not in_flight or not self._step_s.keys() >= left.keys():
            return False
        step_s = {policy: fmean(self._step_s[policy]) for policy in left}
        wait_s = expected_wait_s(self._durations, in_flight)
        saved_s = wait_s - max(left[policy] * step_s[policy] for policy in left)
        so_far_s = max(taken[policy] * step_s[policy] for policy in left)
        return saved_s > MIN_SAVED * (so_far_s + wait_s)


def expected_wait_s(durations: Sequence[float], in_flight: int) -> float:
    """Return the expected time in seconds until all episodes in flight have ended.

    At a random time, an episode in flight has t seconds left or more with probability E[max(D − t, 0)] / E[D], D being
    the duration of an episode: the residual life of a renewal process (Cox, Renewal Theory, 1962, section 5.2).

    Args:
        durations: durations of episodes in seconds.
        in_flight: number of episodes in flight, taken as independent.

    Example:
        >>> round(expected_wait_s([6.0], 1), 3), round(expected_wait_s([6.0], 2), 3)
        (3.0, 4.0)
    """
    lasted, points = np.array(durations), 128
    longest, total = float(lasted.max()), float(lasted.sum())
    if not total:
        return 0.0
    seconds = longest / points * (np.arange(points)[:, None] + 0.5)
    one_runs_on = np.maximum(lasted - seconds, 0.0).sum(axis=1) / total
    some_run_on = 1.0 - (1.0 - one_runs_on) ** in_flight
    return longest / points * float(some_run_on.sum())
