"""Runs the library's functions where an event loop is already running: in notebooks and in asynchronous tests.

An event loop cannot run inside another, so these functions then run in a thread. Their caller, and its event loop, wait
for them as for any other function. Ctrl-C reaches only the main thread, which hands it on.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")
P = ParamSpec("P")


class _Interrupts:
    """Ctrl-C during a function that runs in a thread."""

    def __init__(self) -> None:
        self.is_requested = False
        self._handlers: list[Callable[[], None]] = []
        self._lock = threading.RLock()  # the main thread may be interrupted while it holds the lock

    def request(self) -> None:
        with self._lock:
            self.is_requested = True
            if self._handlers:
                self._handlers[-1]()

    @contextmanager
    def handled_by(self, handler: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self._handlers.append(handler)
            if self.is_requested:
                handler()
        try:
            yield
        finally:
            with self._lock:
                self._handlers.remove(handler)


_interrupts: ContextVar[_Interrupts | None] = ContextVar("interrupts", default=None)


def outside_event_loop(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that starts an event loop run in a thread if the caller's thread is running one.

    The thread has the caller's context variables. Ctrl-C interrupts the function as in the main thread; a second one
    raises `KeyboardInterrupt` at once.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return function(*args, **kwargs)
        return _call_in_thread(functools.partial(function, *args, **kwargs))

    return call


def _call_in_thread(function: Callable[[], T]) -> T:
    interrupts, future = _Interrupts(), Future[T]()

    def work() -> None:
        _interrupts.set(interrupts)
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller
            future.set_exception(error)

    def on_sigint(number: int, frame: FrameType | None) -> None:
        if interrupts.is_requested:
            raise KeyboardInterrupt
        interrupts.request()

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, on_sigint) if is_main else None  # None also for a handler of C code
    try:
        threading.Thread(target=copy_context().run, args=(work,), name="agentrl", daemon=True).start()
        return future.result()
    except asyncio.CancelledError:
        if interrupts.is_requested:
            raise KeyboardInterrupt from None
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)


@contextmanager
def on_interrupt(handler: Callable[[], None]) -> Iterator[None]:
    """Call a function when Ctrl-C is pressed, from the main thread; only in a function that runs in a thread because of
    `outside_event_loop`."""
    interrupts = _interrupts.get()
    if interrupts is None:
        yield
        return
    with interrupts.handled_by(handler):
        yield


async def interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine, and cancel it when Ctrl-C is pressed, as `asyncio.run` does in the main thread."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)

    with on_interrupt(cancel):
        return await main


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in a function that is called through `outside_event_loop`."""
    return asyncio.run(interruptible(main))
