"""Helpers for asyncio tasks and futures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved, for a future that may lose its last waiter.

    Use it with `add_done_callback`, or asyncio logs "exception was never retrieved".
    """
    if not future.cancelled():
        future.exception()


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end even if the caller is cancelled; the cancellation is raised when the work has ended.

    So a lock of the caller is held until the work has ended. A caller that is cancelled twice does not wait.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(retrieve_exception)
        await asyncio.wait({task})
        raise
