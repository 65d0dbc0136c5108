"""A thread for one call of a blocking tool.

A pool would let a few hung tools hold up every other tool, and the end of the program; a daemon thread per call costs
about 0.1 ms and holds up nobody. A call that never returns keeps its thread, and nothing else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Threads(Executor):
    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # a call cannot be taken back: who is cancelled just no longer waits

        def run() -> None:
            try:
                result = call(*arguments, **named)
            except BaseException as error:  # noqa: BLE001 - handed over to the caller, whatever it is
                answer.set_exception(error)
            else:
                answer.set_result(result)

        threading.Thread(target=run, name="tool", daemon=True).start()
        return answer


_THREADS = _Threads()


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call without blocking the event loop; a caller that is cancelled no longer waits for it."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)
