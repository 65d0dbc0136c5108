"""Keeps an episode's code, which runs in `GuardedAwaitable`, from affecting other episodes through their process.

Global random generators: games and programs draw from `random` and `numpy.random` while other episodes run in the same
process. `GlobalRandomState` gives each a state of its own, swapped in for its steps and out again, so that re-execution
draws the same (0.1 ms a step). `RandomDrawDetector` only detects whether a step draws (0.05 ms a step;
`EpisodeRunner` chooses the episodes that are checked).

Process ends: `sys.exit` and bare `BaseException`s of a program become errors of its episode. A process that an
environment forked ends once it leaves the environment's code: the files and connections of the event loop belong to its
parent. `os._exit`, a signal or a crash does end the process; the resumed run names its episodes.

Alarms: graders limit their time with `signal.alarm`, which works only in the main thread. Elsewhere Python raises a
`ValueError`, which many graders catch and return a reward of 0. Such a call fails its episode instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import os
import random
import signal
import threading
import weakref
from array import array
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from agentrl.core.errors import EpisodeError, describe_user_code_error

T = TypeVar("T")

_spare: list[Any] = []
"""Released generators of numpy, for reuse: making one takes 0.3 ms, seeding one a few microseconds."""
_WORDS = ctypes.c_uint32 * 625
"""What MT19937 keeps: 624 words, and its place in them."""


class CoroutineStepGuard(Protocol):
    """Runs before and after each step of some code."""

    def enter(self) -> None:
        """Begin a step."""
        ...

    def exit(self) -> bool:
        """End a step; returns whether it made a draw that is forbidden to it."""
        ...

    def close(self) -> None:
        """End the last step."""
        ...


class GlobalRandomState:
    """The state of `random` and `numpy.random` as one object sees it; everyone else's stays as it was.

    There is one exception: numpy draws normal variates in pairs and keeps the second for the next call. If others have
    one pending when the state is swapped in, it is discarded. Swapping it in again while it is in changes nothing.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._python: Any = None
        """State of `random`, once it was swapped out."""
        self._numpy: Any = None
        """Generator of `numpy.random`, from the first use on."""
        self._pending: Any = None
        """State of `numpy.random` while it holds the second variate of a pair, which no generator remembers."""
        self._others: Any = None
        """The process's state, while this one is swapped in."""
        self._depth = 0
        """Number of times that it was swapped in and not out yet."""

    def enter(self) -> None:
        """Swap the object's own state in."""
        from numpy.random import MT19937, set_state
        from numpy.random import seed as seed_numpy
        from numpy.random.mtrand import get_bit_generator, set_bit_generator

        self._depth += 1
        if self._depth > 1:
            return
        self._others = random.getstate(), get_bit_generator()
        if self._numpy is None:
            self._numpy = _spare.pop() if _spare else MT19937()
            set_bit_generator(self._numpy)  # a hundred times cheaper than setting a state
            seed_numpy(self._seed % (1 << 32))
            random.setstate(random.Random(self._seed).getstate())
        else:
            set_bit_generator(self._numpy)
            if self._pending is not None:
                set_state(self._pending)
            version, internal, pending = self._python
            random.setstate((version, tuple(internal), pending))

    def exit(self) -> bool:
        """Swap the object's state out; returns False, because draws are allowed."""
        from numpy.random import get_state
        from numpy.random.mtrand import set_bit_generator

        self._depth -= 1
        if self._depth:
            return False
        version, internal, pending = random.getstate()
        self._python = version, array("I", internal), pending  # a tenth of the memory of 625 int objects
        numpy = get_state(legacy=False)
        self._pending = numpy if numpy["has_gauss"] else None
        python, generator = self._others
        random.setstate(python)
        set_bit_generator(generator)
        return False

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the object's own state in, within the context."""
        self.enter()
        try:
            yield
        finally:
            self.exit()

    def close(self) -> None:
        """Return numpy's generator for reuse; the object must not be entered again."""
        if self._numpy is not None:
            _spare.append(self._numpy)
            self._numpy = None


class RandomDrawDetector:
    """Detects steps that draw from `random` or `numpy.random`.

    There is one false positive: a swap of states inside the step discards a pending normal variate of numpy, as a draw
    would.
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: tuple[object, ...] = ()

    def enter(self) -> None:
        """Note the generators' states."""
        self._before = _generator_states()

    def exit(self) -> bool:
        """End a step; returns whether a generator's state has changed."""
        before, self._before = self._before, ()
        return _generator_states() != before

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _generator_states() -> tuple[object, ...]:
    from numpy import ndarray
    from numpy.random import MT19937
    from numpy.random.mtrand import get_bit_generator

    generator = get_bit_generator()
    if isinstance(generator, MT19937):  # the default, whose `state` takes a hundred times as long
        return bytes(_WORDS.from_address(generator.ctypes.state_address)), random.getstate()
    state = generator.state
    # Some generators buffer numbers outside their state (Philox four, others half a word).
    numpy = [value for part in (state, state["state"]) for value in part.values() if value is not state["state"]]
    return [value.tobytes() if isinstance(value, ndarray) else value for value in numpy], random.getstate()


async def call_with_random_state(
    state: GlobalRandomState, function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Return the result of a function or of its coroutine; `own` is swapped out while the coroutine waits."""
    with state.swapped_in():
        value = function(*arguments, **named)
    return await GuardedAwaitable(state, lambda: value) if inspect.isawaitable(value) else value


class GuardedAwaitable:
    """An awaitable each of whose steps runs under a guard. A process that was forked in one of them ends with it.

    Args:
        guard: surrounds each step; None for no guard.
        begin: called in the first step; returns the awaitable.
        on_draw: called after a step that drew although it must not; the awaitable is then cancelled.
    """

    __slots__ = ("_begin", "_guard", "_is_abandoned", "_is_suspended", "_on_draw", "begun")

    def __init__(
        self,
        guard: CoroutineStepGuard | None,
        begin: Callable[[], Awaitable[Any]],
        on_draw: Callable[[], None] | None = None,
    ) -> None:
        self._guard, self._begin, self._on_draw = guard, begin, on_draw
        self._is_abandoned = False
        self._is_suspended = False
        self.begun: Awaitable[Any] | None = None
        """What `begin` returned; None before the first step and after `close`."""

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = None
        exception: BaseException | None = None
        while True:
            if self._guard is not None and not self._is_suspended:
                self._guard.enter()
            try:
                if steps is None:
                    steps = self._first_step()
                waits_for = next(steps) if exception is None else steps.throw(exception)
            except StopIteration as end:
                return end.value
            finally:
                drew = self.end_step()
            if drew:
                exception = asyncio.CancelledError()
                continue
            exception = None
            try:
                yield waits_for
            except BaseException as error:
                if self._is_abandoned:
                    _close(steps)
                    raise
                exception = error
                self.interrupted()

    def interrupted(self) -> None:
        """Called before an error, such as a cancellation, is thrown into the code that waits."""

    def close(self) -> None:
        """Close the guard after the last step."""
        self.begun = None
        if self._guard is not None:
            self._guard.close()

    def abandon(self) -> None:
        """Make later cancellations of the awaiting task end the steps without throwing into the user's code."""
        self._is_abandoned = True

    def _first_step(self) -> Generator[Any, Any, Any]:
        begin, self._begin = self._begin, _do_nothing
        try:
            awaitable = self.begun = begin()
        except StopIteration as error:  # StopIteration here does not mean that the coroutine returned
            raise RuntimeError("the program raised StopIteration") from error
        return (awaitable if hasattr(awaitable, "__await__") else _await_value(awaitable)).__await__()

    def suspend_guard(self) -> None:
        """Suspend the guard within a step, until `resume_guard`, to run code that needs no guard and may block.

        Raises:
            CancelledError: the step has drawn although it must not.
        """
        if self.end_step():
            raise asyncio.CancelledError
        self._is_suspended = True

    def resume_guard(self) -> None:
        """Resume the guard within the step."""
        self._is_suspended = False
        # Otherwise no step runs, and the coroutine is only being closed.
        if self._guard is not None and not self._is_abandoned:
            self._guard.enter()

    def end_step(self) -> bool:
        """End a step, and return whether it made a forbidden draw."""
        if _is_child:
            exit_forked_process()
        if self._guard is None or self._is_suspended or not self._guard.exit():
            return False
        self._is_suspended = True  # report it only once
        if self._on_draw is not None:
            self._on_draw()
        return True


def _close(steps: Any) -> None:
    """Close a coroutine; never delete one that ignores `GeneratorExit`, since that would raise it again."""
    try:
        steps.close()
    except BaseException:  # noqa: BLE001 - foreign code, which is not awaited
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(steps))


async def _do_nothing() -> None:
    """Replaces `begin` once the program has begun, so that it is not kept alive."""


async def _await_value(value: Any) -> Any:
    """Await a value without `__await__`: a generator-based coroutine. Anything else is a TypeError."""
    return await value


def as_episode_error(error: BaseException, task: asyncio.Task[Any] | None) -> BaseException:
    """Convert an error of an environment's program to one that ends only its episode.

    Cancellations stay as they are. A `KeyboardInterrupt` is converted too: Ctrl-C is a signal, which the run handles
    itself. A `GeneratorExit` while the program's task does not run stays: Python closes a coroutine whose event loop
    has ended.

    Args:
        error: the raised error.
        task: the task that the program runs in.
    """
    is_closed = isinstance(error, GeneratorExit) and _current_task() is not task
    if isinstance(error, Exception | asyncio.CancelledError) or is_closed:
        return error
    if isinstance(error, AlarmOutsideMainThreadError):
        return EpisodeError(str(error), reason="environment_error")
    episode_error = EpisodeError(
        f"run() raised {describe_user_code_error(error)}; raise a subclass of Exception instead",
        reason="environment_error",
    )
    episode_error.__cause__ = error
    return episode_error


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Event loops that run episodes."""
_is_child = False
"""Whether this process was forked while an event loop ran episodes."""


@contextlib.contextmanager
def stop_loop_in_forked_process() -> Iterator[None]:
    """Mark the running event loop as one that runs episodes, within the context; it stops in a process forked from this
    one.

    The loop's owner calls `exit_forked_process` when it has stopped.
    """
    loop = asyncio.get_running_loop()
    _loops.add(loop)
    try:
        yield
    finally:
        _loops.discard(loop)


def exit_forked_process() -> None:
    """End this process, with exit code 1, if an environment forked it."""
    if _is_child:
        os.write(2, b"agentrl: a process that an environment forked came back from its code, and was ended\n")
        os._exit(1)


def _forked() -> None:
    global _is_child
    _is_child = bool(_loops)
    for loop in _loops:
        loop.stop()


os.register_at_fork(after_in_child=_forked)


class AlarmOutsideMainThreadError(BaseException):
    """An episode's code used an alarm outside the main thread. It is no `Exception`, because graders catch those."""


_ALARMS = {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
_guard: ContextVar[AlarmGuard | None] = ContextVar("guard", default=None)
"""The guard of the episode whose code is running."""
_num_episodes = 0
"""Number of episodes whose code runs in this process. A thread that code starts itself does not know its episode."""


class Failing(Protocol):
    """Something that an error fails."""

    def fail(self, error: EpisodeError) -> None:
        """End with an error."""
        ...


class AlarmGuard:
    """Fails an episode whose code, or a thread that it starts through asyncio, uses an alarm outside the main thread.

    `episode.fail` is called in the running event loop. The alarm also raises `AlarmOutsideMainThreadError`.

    Small, because every episode in flight holds one: hence neither a token of the context nor a bound method.
    """

    __slots__ = ("_episode", "_loop", "_outer")

    def __init__(self, episode: Failing) -> None:
        self._episode = episode
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        global _num_episodes
        self._outer = _guard.get()
        _guard.set(self)
        _num_episodes += 1

    def __exit__(self, *_: object) -> None:
        global _num_episodes
        _num_episodes -= 1
        if _guard.get() is self:  # an abandoned coroutine is closed in another context
            _guard.set(self._outer)

    def fail(self, error: EpisodeError) -> None:
        """Fail the episode, from any thread."""
        if asyncio._get_running_loop() is self._loop:
            self._episode.fail(error)
        else:
            self._loop.call_soon_threadsafe(self._episode.fail, error)


def keep_episode_in_thread(call: Callable[[], T]) -> Callable[[], T]:
    """Return a function for another thread, whose alarms fail the calling episode."""
    guard = _guard.get()

    def run() -> T:
        _guard.set(guard)
        return call()

    return run


def _refuse_alarm(call: str) -> None:
    """Fail the running episode if this is not the main thread.

    Raises:
        AlarmOutsideMainThreadError: an episode's code called this outside the main thread.
    """
    guard = _guard.get()
    if threading.current_thread() is threading.main_thread() or not (guard or _num_episodes):
        return
    text = (
        f"{call} was called in the thread {threading.current_thread().name!r}. Alarms work only in the main thread, so "
        "code that limits its time with them fails here, and may return wrong results. Threads run "
        "`asyncio.to_thread`, external tools that are plain functions, and whole episodes if agentrl is called outside "
        "the main thread. Call the code in the main thread (such as in an `async` tool), or limit its time with "
        "`subprocess.run(…, timeout=…)`"
    )
    if guard is not None:
        guard.fail(EpisodeError(text, reason="environment_error"))
    raise AlarmOutsideMainThreadError(text)


def _guard_alarms() -> None:
    """Replace the functions that set alarms by ones that call `_refuse_alarm` first."""
    set_handler, set_timer, set_alarm = signal.signal, signal.setitimer, signal.alarm

    @functools.wraps(set_handler)
    def guarded_signal(signalnum: Any, handler: Any) -> Any:
        if signalnum in _ALARMS:
            _refuse_alarm(f"signal.signal({signal.Signals(signalnum).name}, …)")
        return set_handler(signalnum, handler)

    @functools.wraps(set_timer)
    def guarded_setitimer(which: int, seconds: float, interval: float = 0.0) -> Any:
        if seconds:
            _refuse_alarm("signal.setitimer")
        return set_timer(which, seconds, interval)

    @functools.wraps(set_alarm)
    def guarded_alarm(seconds: int) -> int:
        if seconds:
            _refuse_alarm("signal.alarm")
        return set_alarm(seconds)

    signal.signal, signal.setitimer, signal.alarm = guarded_signal, guarded_setitimer, guarded_alarm


_guard_alarms()
