"""The only reader of time. Durations come from a monotonic clock; wall time is a label, never a decision."""

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


_monotonic, _wall = time.monotonic, time.time
"""As they are: an environment may put something else in their place for itself."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds of `time.monotonic`."""
        return _monotonic()

    def wall(self) -> float:
        """Seconds of `time.time`."""
        return _wall()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)


class LoopClock:
    """The running event loop's time: virtual under `agentrl.testing.SimLoop`."""

    def monotonic(self) -> float:
        """Seconds of the running loop."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """The running loop's seconds: a simulation has no wall."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep` on the running loop."""
        await asyncio.sleep(seconds)
