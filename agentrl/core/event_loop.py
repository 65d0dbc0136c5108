"""The event loop that episodes run in, shared with code of environments that may disturb it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import linecache
import os
import signal
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Event, Thread, current_thread, get_ident, main_thread
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core.clock import SystemClock
from agentrl.core.errors import is_user_code

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")

ANSWER_S = 0.3
"""Seconds after which a loop that has not answered a signal counts as blocked."""


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
    """Run a coroutine like `asyncio.run`, in an `EpisodeEventLoop`. Ctrl-C is answered also while the loop is
    blocked."""

    # A handler of the caller stays in force: only it knows what Ctrl-C does.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    async def answering() -> T:
        with _answering_ctrl_c() if is_default else contextlib.nullcontext():
            return await main

    with asyncio.Runner(loop_factory=EpisodeEventLoop) as runner, contextlib.ExitStack() as stack:
        stack.callback(_close, runner)
        return runner.run(answering())


def _close(runner: asyncio.Runner) -> None:
    """Close a loop, and cancel tasks that episodes' programs left behind. Some may not have begun: Python would warn
    that their coroutines were never awaited."""
    if not asyncio.all_tasks(runner.get_loop()):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        runner.close()
        gc.collect()  # such a coroutine is often part of a cycle


@contextlib.contextmanager
def _answering_ctrl_c() -> Iterator[None]:
    """Say what blocks the loop when Ctrl-C arrives, before the handler of `asyncio.Runner` acts."""
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(before) or before is signal.default_int_handler:
        yield  # only the main thread may set handlers; elsewhere, `asyncio.Runner` has not set its own
        return
    loop = asyncio.get_running_loop()

    def on_signal(number: int, frame: FrameType | None) -> None:
        tell_if_blocked(loop, _say_on_stderr)
        before(number, frame)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _say_on_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed, or its reader has left
        clear = "\r\x1b[2K" if sys.stderr.isatty() else ""  # a line of progress
        sys.stderr.write(f"{clear}agentrl: {text}\n")
        sys.stderr.flush()


def tell_if_blocked(loop: asyncio.AbstractEventLoop, tell: Callable[[str], None]) -> None:
    """Answer a signal in the place of a blocked loop. For its handler, in the loop's thread; returns at once.

    Args:
        loop: the loop that was asked to stop.
        tell: shows a line that names the user's code that blocks; called in a thread.
    """
    owner, answered = get_ident(), Event()
    with contextlib.suppress(RuntimeError):  # an environment may have closed the loop
        loop.call_soon_threadsafe(answered.set)

    def look() -> None:
        if answered.wait(ANSWER_S) or not loop.is_running():
            return
        stack, _ = user_frames(sys._current_frames()[owner])
        is_users = is_user_code(stack[0].f_code.co_filename)
        code = f"blocked by {describe_stack(stack)}" if is_users else "busy in agentrl or a library"
        tell(f"the event loop is {code}; stopping when it is free. Another signal, or Ctrl-C, ends at once")

    with contextlib.suppress(RuntimeError, MemoryError):  # no thread can start; the signal itself must still act
        Thread(target=look, name="answer to a signal", daemon=True).start()


def user_frames(innermost: FrameType) -> tuple[list[FrameType], bool]:
    """Return the user's frames on the loop's stack, innermost first, or the innermost frame if there are none; and
    whether they wait for the import of a library."""
    frames: list[FrameType] = []
    is_import = False
    frame: FrameType | None = innermost
    while (
        frame is not None and frame.f_globals.get("__name__") != "asyncio.base_events"
    ):  # outer frames belong to the code that runs the loop
        if is_user_code(frame.f_code.co_filename):
            frames.append(frame)
        elif not frames:
            is_import |= frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return frames or [innermost], is_import


def suspended_frames(coroutine: Any) -> list[FrameType]:
    """Return the frames of a coroutine that waits, outermost first, up to an awaitable of another kind."""
    frames: list[FrameType] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            break
        frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return frames


def describe_stack(stack: Sequence[FrameType]) -> str:
    """Name the innermost line of a stack, with its source, and the lines that called it."""
    file, number = stack[0].f_code.co_filename, stack[0].f_lineno
    callers = "".join(f", called from {frame_location(frame)}" for frame in stack[1:5])
    return f"{frame_location(stack[0])}: `{linecache.getline(file, number).strip()}`{callers}"


def frame_location(frame: FrameType) -> str:
    """Return file, line and function of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
