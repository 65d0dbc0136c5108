"""A thread for one call of a blocking tool.

A pool would let a few hung tools hold up every other tool, and the end of the program; a daemon thread per call costs
about 0.1 ms and holds up nobody. A call that never returns keeps its thread, and nothing else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call without blocking the event loop; a caller that is cancelled no longer waits for it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (call(), None)
        except BaseException as error:  # noqa: BLE001 - handed over to the caller, whatever it is
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await answer
