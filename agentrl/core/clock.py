"""The only reader of time, and the back-off after losses.

Durations use a monotonic clock; wall time is a label and decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time: the system's, or the simulated loop's."""

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
    """The system clock. Binds its functions at import, so an environment that replaces them affects only itself."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)


class LoopClock:
    """The running event loop's time; virtual under `agentrl.testing.virtual_time.VirtualTimeEventLoop`."""

    def monotonic(self) -> float:
        """The running loop's time in seconds."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """The running loop's time: a simulation has no wall time."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep` on the running loop."""
        await asyncio.sleep(seconds)


FIRST_WAIT_S = 1.0
ATTEMPTS = 5
"""Number of losses in a row, without progress in between, after which a trainer, engine, worker or sandbox is given up.
The waits sum to half a minute: a further restart would not help."""


class RetryBudget:
    """Counts losses without progress in between, up to a limit. The wait doubles from 1 s to 30 s.

    Args:
        attempts: losses in a row that are allowed.

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
        """Count a loss; return the seconds to wait before the next attempt, or None if there is none left."""
        self._in_a_row += 1
        if self._in_a_row > self._attempts:
            return None
        return min(FIRST_WAIT_S * 2.0 ** (self._in_a_row - 1), 30.0)

    def achieved(self) -> None:
        """Reset the count after progress."""
        self._in_a_row = 0
