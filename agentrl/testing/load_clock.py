"""A clock for time limits of a check, whose verdict must not depend on what else the machine computes."""

from __future__ import annotations

import threading
from pathlib import Path

from agentrl.core.clock import SystemClock

_TOLERANCE_NS = 1_000_000
_RESOLUTION_S = 0.01


class TimeLimit:
    """The time for a part of a check, in seconds of a `LoadClock`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._clock = LoadClock()
        self._end = self._clock.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; negative after the end."""
        return self._end - self._clock.monotonic()


class LoadClock:
    """Counts seconds as on a machine without other load.

    Elapsed time counts by the share of time in which the calling thread computed instead of waiting for a processor,
    as Linux measures it. Processes that it started, and waits for, are taken to have had the same share. On other
    systems it counts all time.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._clock = SystemClock()
        self._last = self._clock.monotonic()
        self._last_ns = _thread_times_ns()

    def monotonic(self) -> float:
        """Return the seconds since the clock was made, to within 0.01 s."""
        now = self._clock.monotonic()
        if now - self._last < _RESOLUTION_S:  # reading the thread's times takes longer than comparing a task
            return self._seconds
        now_ns = _thread_times_ns()
        computed_ns, waited_ns = (new - old for new, old in zip(now_ns, self._last_ns, strict=True))
        share = (computed_ns + _TOLERANCE_NS) / (computed_ns + waited_ns + _TOLERANCE_NS)
        self._seconds += (now - self._last) * share
        self._last, self._last_ns = now, now_ns
        return self._seconds


def _thread_times_ns() -> tuple[int, int]:
    """Return the times that the calling thread has computed, and waited for a processor; zeros if unknown."""
    try:
        computed, waited, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0, 0
    return int(computed), int(waited)
