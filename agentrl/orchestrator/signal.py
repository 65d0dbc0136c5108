"""One place to wait for a change of the loop's state: predicates are re-checked after every notification."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes every waiter whose predicate has become true.

    Example:
        await signal.wait_for(lambda: buffer.ready("solver") >= 64)
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Say that something changed; safe to call from any callback of the event loop."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return when `predicate()` is true; there is no await between its last check and the return."""
        while not predicate():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
