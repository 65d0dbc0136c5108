"""Signals that end a run, and the limit on how long a stop may take.

The first signal asks the run to stop, the second ends the process at once. After every signal but Ctrl-C, a thread ends
the process when `stop_seconds` have passed: a cluster kills what it has told to end, and a blocked event loop, a long
optimizer step or a hanging thread must not use up its patience. What is on disk suffices for a resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal as signals
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.clock import SystemClock
from agentrl.core.errors import StorageError
from agentrl.core.event_loop import tell_if_blocked
from agentrl.core.own_loop import shares_process
from agentrl.journal.run_process import record_process_state

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
SAME_PRESS_S = 0.5
"""Seconds within which several signals count as one: `timeout` and shells send theirs to the process and to its
group.
"""
STOP_SIGNALS = (signals.SIGINT, signals.SIGTERM, signals.SIGHUP, signals.SIGUSR1)
"""Signals that stop a run. Slurm sends SIGUSR1 as a warning, with `--signal=USR1@60`."""
_IGNORABLE = (signals.SIGHUP, signals.SIGUSR1)
"""Signals that stay ignored where the caller ignores them, as `nohup` does."""
_SAYING_S = 0.5
"""Seconds in which the last line and record must be written: whatever blocks the process may block them too."""


_handled: set[signals.Signals] = set()
"""Signals that `handle_signals` handles now."""


def _restore_handlers() -> None:
    """Give a process that an environment forks the default handlers: a grader's `terminate()` ends it at once, and
    stops no run."""
    for number in _handled:
        signals.signal(number, signals.default_int_handler if number == signals.SIGINT else signals.SIG_DFL)


os.register_at_fork(after_in_child=_restore_handlers)


class StopLimit:
    """Ends this process, from a thread, if it has not ended in time."""

    def __init__(self) -> None:
        self._ends_at: float | None = None
        self._cancelled = threading.Event()

    def start(self, seconds: float, give_up: Callable[[], None]) -> None:
        """Call `give_up` and end the process after some seconds, unless `cancel` is called before."""
        self._ends_at, self._cancelled = SystemClock.monotonic() + seconds, threading.Event()
        watch = threading.Thread(
            target=self._watch, args=(seconds, give_up, self._cancelled), name="limit of a stop", daemon=True
        )
        watch.start()

    def forget(self) -> None:
        """Forget the signal of an earlier run of this process."""
        self._ends_at = None

    def cancel(self) -> None:
        """Let the process live."""
        self._cancelled.set()

    def resume(self) -> None:
        """Continue a cancelled limit, with the time that was left, while nothing but threads can keep the process
        alive; does nothing if no limit was started."""
        if self._ends_at is not None:
            self.start(max(self._ends_at - SystemClock.monotonic(), 0.0), _say_that_threads_run)

    def end_process(self) -> None:
        """End this process if a limit runs. Python's own teardown takes seconds once torch is loaded, and no thread
        runs meanwhile that could end it. For `atexit`, before all other functions, so that it is called last."""
        if self._ends_at is not None and not self._cancelled.is_set():
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # closed, or its reader has left
                    stream.flush()
            os._exit(INTERRUPTED)

    @staticmethod
    def _watch(seconds: float, give_up: Callable[[], None], cancelled: threading.Event) -> None:
        if cancelled.wait(seconds):
            return
        threading.Thread(target=give_up, name="last line of a stop", daemon=True).start()
        cancelled.wait(_SAYING_S)
        os._exit(INTERRUPTED)


def _say_that_threads_run() -> None:
    sys.stderr.write("agentrl: ended without waiting for threads that still run (stop_seconds)\n")
    sys.stderr.flush()


STOP_LIMIT = StopLimit()
"""The limit of this process."""


def record_stop(run: Path) -> None:
    """Record that a run was stopped by a signal."""
    with contextlib.suppress(StorageError):  # at worst, the run is counted as killed
        record_process_state(run, "stopped")


@contextlib.contextmanager
def cancel_run_on_signal(run: Path, stop_seconds: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Handle signals while there is nothing to drain. Once: stop everything that was started. Twice: end the process.

    Args:
        run: directory of the run.
        stop_seconds: limit on the time of a stop.
        tell: shows a line; may be called from any thread.

    Raises:
        KeyboardInterrupt: Ctrl-C, or another signal that ends a run, arrived.
    """
    task, has_cancelled = asyncio.current_task(), False

    def cancel() -> None:
        nonlocal has_cancelled
        has_cancelled = task is not None and task.cancel()

    def give_up() -> None:
        tell(f"ended {stop_seconds:g} s after the signal (stop_seconds), without waiting for the start to end")
        record_stop(run)

    try:
        with handle_signals(cancel, lambda: record_stop(run), stop_seconds=stop_seconds, give_up=give_up, tell=tell):
            try:
                yield
            except asyncio.CancelledError:
                if has_cancelled:
                    raise KeyboardInterrupt from None
                raise
    finally:
        STOP_LIMIT.cancel()


@contextlib.contextmanager
def handle_signals(
    then: Callable[[], None],
    at_once: Callable[[], None],
    *,
    stop_seconds: float,
    give_up: Callable[[], None],
    tell: Callable[[str], None],
    stays: bool = False,
) -> Iterator[None]:
    """Make the first signal that ends a run call `then` in the event loop, and the second end the process at once.

    If code blocks the loop when the first arrives, `tell` shows a line that names the code. The second calls `at_once`
    first, from the signal handler. In a notebook, whose process stays, the second only calls `at_once`, and a third
    raises `KeyboardInterrupt`. A signal that is ignored (as SIGHUP by `nohup`) stays ignored. With `stays`, a first
    signal keeps the handlers until an outer `handle_signals` ends. Unless the first signal is Ctrl-C, the process ends
    after `stop_seconds`; before that, `give_up` is called in a thread.
    """
    loop, is_notebook = asyncio.get_running_loop(), shares_process()
    requested_at: float | None = None
    presses = 0
    is_over = False

    def first() -> None:
        if not is_over:  # otherwise there is nothing left to stop
            then()

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal requested_at, presses
        if requested_at is not None and loop.time() - requested_at <= SAME_PRESS_S:
            return
        requested_at = loop.time()
        presses += 1
        if presses == 1:
            if number != signals.SIGINT:  # a person at a terminal waits, or presses again
                STOP_LIMIT.start(stop_seconds, give_up)
            loop.call_soon_threadsafe(first)
            tell_if_blocked(loop, lambda text: tell(f"{text}, and --resume continues the run"))
        elif presses == 2:
            at_once()
            if not is_notebook:
                os._exit(INTERRUPTED)
        else:
            signals.signal(signals.SIGINT, signals.default_int_handler)
            raise KeyboardInterrupt

    ignored = [number for number in _IGNORABLE if signals.getsignal(number) is signals.SIG_IGN]
    numbers = [number for number in STOP_SIGNALS if number not in ignored]
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        numbers = []
    before = {number: signals.signal(number, on_signal) for number in numbers}
    handled_before = frozenset(_handled)
    _handled.update(numbers)
    try:
        yield
    finally:
        is_over = True
        if requested_at is None or not stays:
            _handled.intersection_update(handled_before)
            for number, handler in before.items():
                signals.signal(number, handler)
