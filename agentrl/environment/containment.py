"""Keeps an episode's code, which runs in `Steps`, from affecting other episodes through their process.

Global random generators: games and programs draw from `random` and `numpy.random` while other episodes run in the same
process. `GlobalRandom` gives each a state of its own, swapped in for its steps and out again, so that re-execution
draws the same (60 us a step). `NoDraws` only detects whether a step draws (under a microsecond).

Process ends: `sys.exit` and bare `BaseException`s of a program become errors of its episode. A process that an
environment forked ends once it leaves the environment's code: the files and connections of the event loop belong to its
parent. `os._exit`, a signal or a crash does end the process; the resumed run names its episodes.
"""

from __future__ import annotations

import _random
import asyncio
import contextlib
import ctypes
import functools
import inspect
import os
import random
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any, Protocol

from agentrl.core.errors import EpisodeError
from agentrl.environment.base import described

_abandoned: list[Any] = []
"""Coroutines that cannot be ended."""
_spare: list[Any] = []
"""Released generators of numpy, for reuse: making one takes 0.3 ms, seeding one a few microseconds."""


class Guard(Protocol):
    """Around each step of some code."""

    def enter(self) -> None:
        """The step begins."""
        ...

    def exit(self) -> bool:
        """End the step; return whether it drew although it must not."""
        ...

    def close(self) -> None:
        """There are no further steps."""
        ...


class GlobalRandom:
    """A private state of `random` and `numpy.random`, swapped in for the steps of one object."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._python: Any = None
        """State of `random`, once it was swapped out."""
        self._numpy: Any = None
        """Generator of `numpy.random`, from the first use on."""
        self._half: Any = None
        """State of `numpy.random` if it holds the second half of a normal draw, which the generator itself does not
        store."""
        self._others: Any = None
        """The process's state, while this one is swapped in."""
        self._entered: tuple[int, int] = (0, 0)

    def enter(self) -> None:
        """Swap the object's own state in."""
        from numpy.random import MT19937, get_state, set_state
        from numpy.random import seed as seed_numpy
        from numpy.random.mtrand import get_bit_generator, set_bit_generator

        numpy = get_state(legacy=False)
        self._others = random.getstate(), numpy if numpy["has_gauss"] else None, get_bit_generator()
        if self._numpy is None:
            self._numpy = _spare.pop() if _spare else MT19937()
            set_bit_generator(self._numpy)  # a hundred times cheaper than setting a state
            seed_numpy(self._seed % (1 << 32))
            random.setstate(random.Random(self._seed).getstate())
        else:
            set_bit_generator(self._numpy)
            if self._half is not None:
                set_state(self._half)
            random.setstate(self._python)
        self._entered = _position(self._numpy)

    def exit(self) -> bool:
        """Swap it out."""
        from numpy.random import get_state, set_state
        from numpy.random.mtrand import set_bit_generator

        self._python = random.getstate()
        if self._half is not None or _position(self._numpy) != self._entered:
            state = get_state(legacy=False)
            self._half = state if state["has_gauss"] else None
        python, half, generator = self._others
        random.setstate(python)
        set_bit_generator(generator)
        if half is not None:
            set_state(half)
        return False

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within: the object's own state."""
        self.enter()
        try:
            yield
        finally:
            self.exit()

    def close(self) -> None:
        """Nobody draws from it any more."""
        if self._numpy is not None:
            _spare.append(self._numpy)
            self._numpy = None


class NoDraws:
    """Detects whether a step drew from `random` or `numpy.random`.

    Misses one case: a normal draw of numpy whose other half other code drew before.
    """

    __slots__ = ("_before", "_positions")

    def __init__(self) -> None:
        self._positions = _generator_positions()
        self._before: tuple[object, ...] = ()

    def enter(self) -> None:
        """Remember where the generators are."""
        self._before = self._positions()

    def exit(self) -> bool:
        """Whether they have moved."""
        before, self._before = self._before, ()
        return self._positions() != before

    def close(self) -> None:
        """Nothing is held."""


@functools.cache
def _generator_positions() -> Callable[[], tuple[object, ...]]:
    """A function that returns the positions of the process's generators: `random.getstate()` would take 25 us.

    Both are Mersenne twisters: 624 words and the number of used ones. The words change when all are used. (The first
    word is the same after every seed.)
    """
    from numpy.random.mtrand import get_bit_generator

    generator = get_bit_generator()
    own = random._inst
    if _random.Random.__basicsize__ >= object.__basicsize__ + ctypes.sizeof(_Words):
        python, numpy = _Words.from_address(id(own) + object.__basicsize__), _words(generator)
        if (*python[1:], python[0]) == own.getstate()[1]:
            return lambda: (python[0], python[2], numpy[624], numpy[1], own, generator)
    return lambda: (own.getstate(), _position(generator))


_Words = ctypes.c_uint32 * 625


def _words(generator: Any) -> Any:
    return _Words.from_address(generator.ctypes.state_address)


def _position(generator: Any) -> tuple[int, int]:
    """Number of used words of a Mersenne twister of numpy, and one of the words."""
    words = _words(generator)
    return words[624], words[1]


async def awaited_under(own: GlobalRandom, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a function or of its coroutine; `own` is swapped out while the coroutine waits."""
    with own.swapped_in():
        value = function(*arguments, **named)
    return await Steps(own, lambda: value) if inspect.isawaitable(value) else value


class Steps:
    """An awaitable each of whose steps runs under a guard. A process that was forked in one of them ends with it.

    Args:
        guard: surrounds each step.
        begin: called in the first step; returns the awaitable.
        on_draw: called after a step that drew although it must not; the awaitable is then cancelled.
    """

    __slots__ = ("_begin", "_guard", "_is_abandoned", "_is_suspended", "_on_draw")

    def __init__(
        self, guard: Guard, begin: Callable[[], Awaitable[Any]], on_draw: Callable[[], None] | None = None
    ) -> None:
        self._guard = guard
        self._begin = begin
        self._on_draw = on_draw
        self._is_abandoned = False
        self._is_suspended = False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = None
        thrown: BaseException | None = None
        while True:
            if not self._is_suspended:
                self._guard.enter()
            try:
                if steps is None:
                    steps = self._begun()
                waits_for = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            finally:
                drew = self.end_step()
            if drew:
                thrown = asyncio.CancelledError()
                continue
            thrown = None
            try:
                yield waits_for
            except BaseException as error:
                if self._is_abandoned:
                    _close(steps)
                    raise
                thrown = error

    def close(self) -> None:
        """There are no further steps."""
        self._guard.close()

    def abandon(self) -> None:
        """From now on a cancellation of the awaiting task ends the steps without being thrown into the code."""
        self._is_abandoned = True

    def _begun(self) -> Generator[Any, Any, Any]:
        begin, self._begin = self._begin, _nothing
        try:
            awaitable = begin()
        except StopIteration as error:  # it is no return from the steps
            raise RuntimeError("the program raised StopIteration") from error
        return (awaitable if hasattr(awaitable, "__await__") else _awaited(awaitable)).__await__()

    def suspend_guard(self) -> None:
        """Within a step: suspend the guard until `resume_guard`, for code that it does not concern and that may wait.

        Raises:
            CancelledError: the step has drawn although it must not.
        """
        if self.end_step():
            raise asyncio.CancelledError
        self._is_suspended = True

    def resume_guard(self) -> None:
        """Resume the guard within the step."""
        self._is_suspended = False
        self._guard.enter()

    def end_step(self) -> bool:
        """Called after each step; whether it drew what it must not."""
        if _is_child:
            end_if_forked()
        if self._is_suspended or not self._guard.exit():
            return False
        self._is_suspended = True  # once is enough
        if self._on_draw is not None:
            self._on_draw()
        return True


def _close(steps: Any) -> None:
    """End a coroutine; one that ignores `GeneratorExit` is kept, since to forget it would try that once more."""
    try:
        steps.close()
    except BaseException:  # noqa: BLE001 - foreign code, whose end nobody waits for
        _abandoned.append(steps)


async def _nothing() -> None:
    """Replaces `begin` once the program has begun, so that it is not kept alive."""


async def _awaited(value: Any) -> Any:
    """Await a value without `__await__`: a generator-based coroutine; else a TypeError."""
    return await value


def of_the_episode(error: BaseException, task: asyncio.Task[Any] | None) -> BaseException:
    """An error of an environment's program as one that ends only its episode.

    Cancellations stay as they are. A `KeyboardInterrupt` is not Ctrl-C: that is a signal the run handles itself. A
    `GeneratorExit` while the program's task does not run is not the program's: Python closes a coroutine whose event
    loop has ended, and it must end.

    Args:
        error: the raised error.
        task: the task that the program runs in.
    """
    is_closed = isinstance(error, GeneratorExit) and _current_task() is not task
    if isinstance(error, Exception | asyncio.CancelledError) or is_closed:
        return error
    ended = EpisodeError(f"run() raised {described(error)}; raise an exception", reason="environment_error")
    ended.__cause__ = error
    return ended


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
def forks_ended() -> Iterator[None]:
    """Within: the running event loop runs episodes, and stops in a process that is forked from this one.

    Whoever runs the loop calls `end_if_forked` when it has stopped.
    """
    loop = asyncio.get_running_loop()
    _loops.add(loop)
    try:
        yield
    finally:
        _loops.discard(loop)


def end_if_forked() -> None:
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
