"""How long an episode's program may take between two turns: a limit that stands still while others are waited for."""

from __future__ import annotations

import asyncio


class TimeLimit:
    """Calls `expired` when a program has taken so many seconds of its own; time in which it is held does not count.

    One timer an episode: it looks at the deadline when it fires, and begins anew where that was put off.
    """

    __slots__ = ("_deadline", "_held", "_left", "_loop", "_seconds", "_timer")

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = self._left = seconds
        self._held = 0
        self._deadline = self._loop.time() + seconds
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._deadline, self._look)

    def expired(self) -> None:
        """The seconds are over."""
        raise NotImplementedError

    def restart(self) -> None:
        """All the seconds are left again."""
        self._left = self._seconds
        if not self._held:
            self._resume()

    def hold(self) -> None:
        """Stand still until it was released as often."""
        if not self._held:
            self._left = max(self._deadline - self._loop.time(), 0.0)
        self._held += 1

    def release(self) -> None:
        """Run on, where nobody else holds it."""
        self._held -= 1
        if not self._held:
            self._resume()

    def stop(self) -> None:
        """Never expire, whatever the program, should it be left behind, still does."""
        self._held += 1
        if self._timer is not None:
            self._timer.cancel()

    def _resume(self) -> None:
        self._deadline = self._loop.time() + self._left
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._held:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._look)
        else:
            self.expired()
