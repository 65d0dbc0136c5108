"""The event loop that episodes run in, shared with code of environments that may disturb it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Event, Thread, get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core.clock import SystemClock

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")


class CallThreads(Executor):
    """An executor whose calls never wait for each other: as many daemon threads as calls run at once.

    In a pool of limited size, a few calls that hang would block all others, and the end of the program. Idle threads
    are kept and used again: the kernel ends processes that die with their parent, such as Ray's, when the thread that
    started them ends.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        """Seconds between the start of a call and its first line; the environment check lets calls overlap by it."""
        self._idle: list[SimpleQueue[Callable[[], None]]] = []
        """Queues of the idle threads; a thread runs what its queue holds."""
        self._running: set[int] = set()
        """Identifiers of the threads that run a call."""
        self.started = 0
        """Number of threads that were started."""
        os.register_at_fork(after_in_child=self._forget_threads)  # a forked process has none

    def stacks(self) -> list[FrameType]:
        """Return the innermost frame of each running call."""
        frames = sys._current_frames()
        return [frames[ident] for ident in tuple(self._running) if ident in frames]

    def _forget_threads(self) -> None:
        self._idle.clear()
        self._running.clear()

    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # a running call cannot be cancelled; it is only no longer awaited
        try:
            queue = self._idle.pop()
        except IndexError:
            queue = SimpleQueue()
            self.started += 1
            Thread(target=_run_calls, args=(queue,), name="call", daemon=True).start()

        def run() -> None:
            self._running.add(ident := get_ident())
            try:
                if self.delay_s:
                    Event().wait(self.delay_s)
                result = call(*arguments, **named)
            except BaseException as error:  # noqa: BLE001 - handed over to the caller
                self._running.discard(ident)
                self._idle.append(queue)
                if isinstance(error, StopIteration):  # which asyncio's futures cannot hold
                    error = RuntimeError("StopIteration").with_traceback(error.__traceback__)
                answer.set_exception(error)
            else:
                self._running.discard(ident)
                self._idle.append(queue)
                answer.set_result(result)

        queue.put(run)
        return answer


def _run_calls(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()


CALL_THREADS = CallThreads()


class EpisodeEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers no environment can disturb by replacing `time.monotonic`, and whose blocking calls,
    such as those of `asyncio.to_thread`, never wait for each other: its default executor is `CALL_THREADS`."""

    time = staticmethod(SystemClock.monotonic)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        return super().run_in_executor(CALL_THREADS if executor is None else executor, func, *args)


def was_stopped(error: BaseException) -> bool:
    """Whether an error says that something stopped the event loop that `run` was waiting for."""
    return isinstance(error, RuntimeError) and "Event loop stopped before" in str(error)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in an `EpisodeEventLoop`."""
    with asyncio.Runner(loop_factory=EpisodeEventLoop) as runner:
        return runner.run(main)
