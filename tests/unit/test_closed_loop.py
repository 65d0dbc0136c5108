"""The end of an event loop in which programs of episodes left tasks behind."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentrl.core import event_loop


async def connect() -> None:
    """The attempt of a client to connect, in a task of its own, as in `anyio.connect_tcp`."""


async def attempt(connecting: Coroutine[Any, Any, None]) -> None:
    await connecting


async def leave_behind(steps: int) -> str:
    """Return while a task is about to connect, after a number of steps of the loop."""

    async def retry() -> None:
        for _ in range(steps):
            await asyncio.sleep(0)
        await asyncio.create_task(attempt(connect()))

    loop = asyncio.get_running_loop()
    loop.retrying = loop.create_task(retry())  # type: ignore[attr-defined]  # else the task could be freed
    return "returned"


def warned(run: Callable[[Coroutine[Any, Any, str]], str]) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for steps in range(4):
            assert run(leave_behind(steps)) == "returned"
        gc.collect()
    return {str(warning.message) for warning in caught}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tasks_that_had_not_begun_are_ended_without_a_warning() -> None:
    assert "coroutine 'connect' was never awaited" in warned(asyncio.run), "as with any other loop"
    assert warned(event_loop.run) == set()


async def forget() -> str:
    connect()  # type: ignore[unused-coroutine]
    return "returned"


def test_a_missing_await_is_still_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="coroutine 'connect' was never awaited"):
        event_loop.run(forget())
