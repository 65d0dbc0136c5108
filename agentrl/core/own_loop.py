"""Runs the library's functions where an event loop is already running: in notebooks and in asynchronous tests.

An event loop cannot run inside another. Such a function blocks its caller, and so the caller's loop, until it returns.
The caller's loop is therefore suspended meanwhile, and the function starts its own loop in the same thread. Signals
reach it as in a script: Ctrl-C, and the alarms with which graders limit their time.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_is_nested: ContextVar[bool] = ContextVar("is_nested", default=False)


def shares_process() -> bool:
    """Whether a function runs inside a suspended event loop, whose process must survive the function."""
    return _is_nested.get()


def outside_event_loop(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that starts an event loop be called in a thread that is running one."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio._get_running_loop()  # get_running_loop would be the context of each of its errors
        if loop is None:
            return function(*args, **kwargs)
        context = copy_context()
        context.run(_is_nested.set, True)
        with _suspended(loop):
            try:
                return context.run(function, *args, **kwargs)
            except asyncio.CancelledError:  # Ctrl-C cancelled the function, and nothing cancels the caller's loop
                raise KeyboardInterrupt from None

    return call


@contextmanager
def _suspended(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Suspend the event loop that runs in this thread. In the main thread, Ctrl-C interrupts the code in the context,
    not the loop's task."""
    task = asyncio.current_task(loop)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        wakeup = signal.set_wakeup_fd(-1)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # None for a handler of C code
    if task is not None:
        _leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.set_event_loop(loop)
        asyncio._set_running_loop(loop)
        if task is not None:
            _enter_task(loop, task)
        if is_main:
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
            signal.set_wakeup_fd(wakeup)
