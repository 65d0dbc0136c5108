"""The event loop that episodes run in, shared with code of environments that may disturb it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from threading import Thread
from typing import Any, TypeVar

from agentrl.core.clock import SystemClock

T = TypeVar("T")


class CallThreads(Executor):
    """An executor with one daemon thread per call.

    In a pool, a few calls that hang would block all others, and the end of the program. A thread costs about 0.1 ms,
    and a call that never returns keeps only its thread.
    """

    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # a running call cannot be cancelled; it is only no longer awaited

        def run() -> None:
            try:
                result = call(*arguments, **named)
            except StopIteration as error:  # which asyncio's futures cannot hold
                answer.set_exception(RuntimeError("StopIteration").with_traceback(error.__traceback__))
            except BaseException as error:  # noqa: BLE001 - handed over to the caller
                answer.set_exception(error)
            else:
                answer.set_result(result)

        Thread(target=run, name="call", daemon=True).start()
        return answer


CALL_THREADS = CallThreads()


class EpisodeEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers no environment can disturb by replacing `time.monotonic`, and whose blocking calls,
    such as those of `asyncio.to_thread`, never wait for each other: its default executor is `CALL_THREADS`."""

    time = staticmethod(SystemClock.monotonic)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        return super().run_in_executor(CALL_THREADS if executor is None else executor, func, *args)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in an `EpisodeEventLoop`."""
    with asyncio.Runner(loop_factory=EpisodeEventLoop) as runner:
        return runner.run(main)
