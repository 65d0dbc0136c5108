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
