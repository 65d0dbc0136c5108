"""The only reader of time, and how long to wait before what was lost is tried again.

Durations come from a monotonic clock; wall time is a label, never a decision.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from: real, or the simulated loop's."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; a label for people."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds`."""
        ...


class SystemClock:
    """The machine's clock, its functions as they are now: an environment may put others in their place for itself."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)


class SteadyLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers no environment can disturb by replacing `time.monotonic`."""

    time = staticmethod(time.monotonic)


class LoopClock:
    """The running event loop's time: virtual under `agentrl.simulation.virtual_time.SimLoop`."""

    def monotonic(self) -> float:
        """Seconds of the running loop."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """The running loop's seconds: a simulation has no wall."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep` on the running loop."""
        await asyncio.sleep(seconds)


FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
ATTEMPTS = 5
"""How often in a row, with nothing achieved in between, a trainer, an engine, a worker or a sandbox may be lost: half a
minute of waits, behind which a restart is no accident any more."""


class RetryBudget:
    """Losses in a row, with nothing achieved in between, up to a number; the wait doubles from 1 s to 30 s.

    Args:
        attempts: how many losses in a row are borne.

    Example:
        >>> budget = RetryBudget(3)
        >>> budget.lost(), budget.lost(), budget.lost(), budget.lost()
        (1.0, 2.0, 4.0, None)
    """

    __slots__ = ("_attempts", "_in_a_row")

    def __init__(self, attempts: int = ATTEMPTS) -> None:
        self._attempts = attempts
        self._in_a_row = 0

    def lost(self) -> float | None:
        """Count a loss: seconds to wait before the next attempt, None where there is to be none."""
        self._in_a_row += 1
        if self._in_a_row > self._attempts:
            return None
        return min(FIRST_WAIT_S * 2.0 ** (self._in_a_row - 1), LONGEST_WAIT_S)

    def achieved(self) -> None:
        """Something was achieved: the next loss is the first in a row again."""
        self._in_a_row = 0
