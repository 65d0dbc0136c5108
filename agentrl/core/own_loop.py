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
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from agentrl.core.clock import SystemClock

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")
P = ParamSpec("P")

SAME_PRESS_S = 0.5
"""Seconds within which several signals count as one: `timeout` and shells send theirs to the process and to its
group.
"""
ENDING_S = 10.0
"""Seconds after the second Ctrl-C in which a function must end; then it is abandoned in its thread."""
POLL_S = 0.2
"""Seconds between two looks at whether a function must be abandoned."""


class _Interrupts:
    """Ctrl-C during a function that runs in a thread."""

    def __init__(self) -> None:
        self.presses = 0
        self._pressed_at = 0.0
        self._handlers: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._lock = threading.RLock()  # the main thread may be interrupted while it holds the lock

    @property
    def is_abandoned(self) -> bool:
        """Whether the caller waits no longer."""
        is_late = SystemClock.monotonic() - self._pressed_at > ENDING_S
        return self.presses > 2 or (self.presses == 2 and is_late)

    def press(self) -> None:
        """Handle a signal: the first calls the innermost handler, the second the innermost `at_once`."""
        now = SystemClock.monotonic()
        with self._lock:
            if self.presses and now - self._pressed_at <= SAME_PRESS_S:
                return
            self.presses += 1
            self._pressed_at = now
            if self._handlers and self.presses <= 2:
                self._handlers[-1][self.presses - 1]()

    @contextmanager
    def handled_by(self, handler: Callable[[], None], at_once: Callable[[], None]) -> Iterator[None]:
        handlers = (handler, at_once)
        with self._lock:
            self._handlers.append(handlers)
            for call in handlers[: self.presses]:
                call()
        try:
            yield
        finally:
            with self._lock:
                self._handlers.remove(handlers)


_interrupts: ContextVar[_Interrupts | None] = ContextVar("interrupts", default=None)


def outside_event_loop(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that starts an event loop run in a thread if the caller's thread is running one.

    The thread has the caller's context variables. Ctrl-C interrupts the function as in the main thread. A second one
    cancels it, and raises `KeyboardInterrupt` when it has ended, after `ENDING_S` at the latest. A third raises at
    once.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if asyncio._get_running_loop() is None:  # get_running_loop would be the context of each of its errors
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
        interrupts.press()

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, on_sigint) if is_main else None  # None also for a handler of C code
    try:
        threading.Thread(target=copy_context().run, args=(work,), name="agentrl", daemon=True).start()
        while not wait_for_futures([future], timeout=POLL_S).done:
            if interrupts.is_abandoned:
                raise KeyboardInterrupt("the function has not ended: it still runs in a thread; restart the process")
        return future.result()
    except asyncio.CancelledError:
        if interrupts.presses:
            raise KeyboardInterrupt from None
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)


@contextmanager
def on_interrupt(handler: Callable[[], None], at_once: Callable[[], None]) -> Iterator[None]:
    """Call `handler` when Ctrl-C is pressed, and `at_once` when it is pressed again, from the main thread; only in a
    function that runs in a thread because of `outside_event_loop`."""
    interrupts = _interrupts.get()
    if interrupts is None:
        yield
        return
    with interrupts.handled_by(handler, at_once):
        yield


async def interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine, and cancel it when Ctrl-C is pressed, as `asyncio.run` does in the main thread."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)

    with on_interrupt(cancel, cancel):
        return await main


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in a function that is called through `outside_event_loop`."""
    return asyncio.run(interruptible(main))
