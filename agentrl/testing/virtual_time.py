"""A seeded event loop with virtual time: one seed, one schedule.

Owns: the order of ready task steps, the clock, the diagnosis of deadlocks. Does no I/O and starts no thread.

1. Ready task steps run in an order drawn from the seed. A plain callback (`call_soon`, a timer) runs before everything
   queued after it, as asyncio documents.
2. Time stands still while any step is ready, and then jumps to the next timer.
3. If neither a step nor a timer is left, `DeadlockError` names every waiting task and the line at which it waits.
4. Equal seeds give equal runs in every process, so sets of tasks and futures iterate in order of creation as well.
   `asyncio.as_completed` over bare coroutines is not covered (it uses a set ordered by address): pass it tasks.

`simulate` runs a coroutine function under a seed; the pytest fixture `simulated_loop` runs it under many.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from operator import itemgetter
from typing import Any, Never, TypeVar

from agentrl.core.errors import AgentRLError
from agentrl.core.event_loop import suspended_frames
from agentrl.core.ids import random_stream
from agentrl.core.own_loop import outside_event_loop

T = TypeVar("T")

SEED_VARIABLE = "AGENTRL_SIM_SEED"
"""Environment variable that restricts the `simulated_loop` fixture to one seed."""

_TRACE_LENGTH = 40

_PORTS = {
    "subprocess_exec": "a process runs in real time: fake the port that starts it",
    "subprocess_shell": "a process runs in real time: fake the port that starts it",
    "create_connection": "a socket answers in real time: use an engine or client fake",
    "create_datagram_endpoint": "a socket answers in real time: use an engine or client fake",
    "create_server": "a server listens in real time: call its handler directly",
    "create_unix_connection": "a socket answers in real time: use an engine or client fake",
    "create_unix_server": "a server listens in real time: call its handler directly",
    "sock_connect": "a socket answers in real time: use an engine or client fake",
    "sock_recv": "a socket answers in real time: use an engine or client fake",
    "sock_sendall": "a socket answers in real time: use an engine or client fake",
    "getaddrinfo": "names are resolved in real time: use an engine or client fake",
    "add_reader": "a file descriptor is ready in real time: fake the port that owns it",
    "add_writer": "a file descriptor is ready in real time: fake the port that owns it",
    "connect_read_pipe": "a pipe is ready in real time: fake the port that owns it",
    "connect_write_pipe": "a pipe is ready in real time: fake the port that owns it",
}


class SimulationError(AgentRLError):
    """The code under simulation did something that a simulation cannot repeat."""


class DeadlockError(SimulationError):
    """Deadlock: every task waits and no timer is set. The message names each waiting task and the line at which it
    waits."""


class StepLimitError(SimulationError):
    """The budget of steps is spent, because the code spins or the budget is too small."""


class _SimTask(asyncio.Task[T]):
    """Task that hashes by the order of its creation."""

    def __init__(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        loop: asyncio.AbstractEventLoop,
        name: str,
        context: Context | None,
        serial: int,
    ) -> None:
        self.serial = serial  # set first, because registering the task hashes it
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.serial


class _SimFuture(asyncio.Future[Any]):
    """Future that hashes by the order of its creation."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop, serial: int) -> None:
        self.serial = serial
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.serial


class _Ready:
    """Ready handles in segments: task steps in any order, then at most one plain callback that ends the segment."""

    def __init__(self) -> None:
        self._segments: deque[tuple[list[tuple[int, asyncio.Handle]], list[asyncio.Handle]]] = deque()

    def __len__(self) -> int:
        return sum(len(steps) + len(plain) for steps, plain in self._segments)

    def __bool__(self) -> bool:
        return bool(self._segments)

    def append(self, handle: asyncio.Handle) -> None:
        """Queue a handle; called by asyncio."""
        if not self._segments or self._segments[-1][1]:
            self._segments.append(([], []))
        steps, plain = self._segments[-1]
        task = _stepped_task(handle)
        if task is None:
            plain.append(handle)
        else:
            insort(steps, (task.serial, handle), key=itemgetter(0))

    def take(self, draw: Callable[[int], int]) -> asyncio.Handle:
        """Remove one handle of the first segment, chosen by `draw(n)` in `[0, n)`."""
        steps, plain = self._segments[0]
        choices = len(steps) + len(plain)
        chosen = draw(choices) if choices > 1 else 0
        if chosen < len(steps):
            handle = steps.pop(chosen)[1]
        else:
            handle = plain.pop()
        if not plain:
            self._segments.popleft()
            self._put_back(steps)
        return handle

    def clear(self) -> None:
        """Remove all handles; called by asyncio when the loop closes."""
        self._segments.clear()

    def _put_back(self, steps: list[tuple[int, asyncio.Handle]]) -> None:
        """Move the steps of a segment that has lost its plain callback to the next segment."""
        if not steps:
            return
        if self._segments:
            next_steps, plain = self._segments[0]
            self._segments[0] = (sorted(steps + next_steps, key=itemgetter(0)) if next_steps else steps, plain)
        else:
            self._segments.append((steps, []))


class VirtualTimeEventLoop(asyncio.BaseEventLoop):
    """Seeded event loop with virtual time; usually run through `simulate`.

    Example:
        >>> async def main() -> float:
        ...     await asyncio.sleep(3600)
        ...     return asyncio.get_running_loop().time()
        >>> simulate(main, seed=1)
        3600.0
    """

    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool
    _thread_id: int | None

    def __init__(self, seed: int, *, max_steps: int = 2_000_000, trace: int = _TRACE_LENGTH) -> None:
        """Create a loop. `trace` is the number of last steps that a failure names; 0 saves a tenth of the time."""
        super().__init__()
        self.seed = seed
        self.steps = 0
        """Number of handles that ran."""
        self._max_steps = max_steps
        self._draw = random_stream("simulated loop", seed).randrange
        self._now = 0.0
        self._ready = _Ready()
        self._serial = 0
        self._cancelled_timers = 0
        self._trace: deque[str] = deque(maxlen=trace)
        self._failures: list[BaseException] = []
        self.set_exception_handler(_keep_failure)

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._now

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """Create a task, named `task-<n>` in order of creation unless `name` is given."""
        self._serial += 1
        label = f"task-{self._serial}" if name is None else str(name)
        return _SimTask(coro, loop=self, name=label, context=context, serial=self._serial)

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future of this loop."""
        self._serial += 1
        return _SimFuture(loop=self, serial=self._serial)

    def note(self) -> str:
        """Return the seed and the last steps, oldest first: virtual time, task or callback, and the line at which it
        resumed."""
        lines = [f"simulated with {SEED_VARIABLE}={self.seed}, {self.steps} steps; the last of them:", *self._trace]
        return "\n  ".join(lines)

    def raise_failure(self) -> None:
        """Raise the exception of a callback, or of a task that nothing awaited, since the last call."""
        if self._failures:
            raise self._failures.pop(0)

    def _run_once(self) -> None:
        self._drop_cancelled_timers()
        if self.steps >= self._max_steps:
            step_limit, self._max_steps = self._max_steps, 2 * self._max_steps  # allow as many steps again for cleanup
            raise StepLimitError(f"{step_limit} steps taken by t={self._now:g}; a task probably loops without waiting")
        if not self._ready:
            if not self._scheduled:
                if self._stopping:
                    return
                raise DeadlockError(self._deadlock_message())
            self._now = max(self._now, self._scheduled[0].when())
        while self._scheduled and self._scheduled[0].when() <= self._now:
            timer = heapq.heappop(self._scheduled)
            if not timer.cancelled():
                self._ready.append(timer)
        while self._ready:
            handle = self._ready.take(self._draw)
            if not handle.cancelled():
                self._run_handle(handle)
                break
        self.raise_failure()

    def _run_handle(self, handle: asyncio.Handle) -> None:
        self.steps += 1
        if self._trace.maxlen:
            task = _stepped_task(handle)
            actor = str(_callback_name(handle)) if task is None else f"{task.get_name()} at {_position(task)}"
            self._trace.append(f"t={self._now:g} {actor}")
        handle._run()

    def _drop_cancelled_timers(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)
        if self._cancelled_timers > 1000 and 2 * self._cancelled_timers > len(self._scheduled):
            self._scheduled = [timer for timer in self._scheduled if not timer.cancelled()]
            heapq.heapify(self._scheduled)
            self._cancelled_timers = 0

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1

    def _deadlock_message(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"  {task.get_name()} waits at {_position(task)}" for task in tasks]
        return "\n".join([f"no task can run and no timer is set at t={self._now:g}; waiting:", *lines])

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Make a blocking call at once in the loop's own thread; it takes no virtual time."""
        answer = self.create_future()
        try:
            answer.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - passed to the caller
            answer.set_exception(error)
        return answer

    def _write_to_self(self) -> None:
        if threading.get_ident() != self._thread_id:
            raise SimulationError(
                "another thread called into the simulated loop, so its timing would not be reproducible"
            )


@outside_event_loop
def simulate(main: Callable[[], Coroutine[Any, Any, T]], *, seed: int, max_steps: int = 2_000_000) -> T:
    """Run `main()` to its end under `VirtualTimeEventLoop(seed)`.

    Args:
        main: a coroutine function without arguments.
        seed: seed of the schedule.
        max_steps: maximum number of steps, as a guard against code that spins.

    Returns:
        The result of `main`.

    Raises:
        DeadlockError: no task can run.
        StepLimitError: the budget is spent.
        SimulationError: the code used a thread, a socket or a process.
        BaseException: `main`, a callback, or a task that nothing awaited raised it. All errors carry a note with the
            seed and the last steps.

    Example:
        >>> async def main() -> str:
        ...     return await asyncio.wait_for(asyncio.sleep(10, "slept"), timeout=60)
        >>> simulate(main, seed=7)
        'slept'
    """
    loop = VirtualTimeEventLoop(seed, max_steps=max_steps)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            result = runner.run(main())
        except BaseException as error:
            error.add_note(loop.note())
            raise
    loop.raise_failure()
    return result


def _keep_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Record an exception that asyncio would only log as a failure of the simulation; an exception handler."""
    assert isinstance(loop, VirtualTimeEventLoop)
    loop._failures.append(context.get("exception") or SimulationError(str(context["message"])))


def _refusal(name: str, reason: str) -> Callable[..., Never]:
    def refuse(self: VirtualTimeEventLoop, *args: object, **kwargs: object) -> Never:
        raise SimulationError(f"{name} under the simulated loop: {reason}")

    refuse.__doc__ = f"Refused: {reason}."
    return refuse


for _name, _reason in _PORTS.items():
    setattr(VirtualTimeEventLoop, _name, _refusal(_name, _reason))


# --- positions of tasks -----------------------------------------------------------------------------------------------


def _stepped_task(handle: asyncio.Handle) -> _SimTask[Any] | None:
    """Return the task that `handle` runs a step of or wakes up; None for a plain callback, such as `task.cancel`."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, _SimTask) and getattr(callback, "__name__", "step") != "cancel":
        return owner
    return None


def _callback_name(handle: asyncio.Handle) -> object:
    callback: Any = handle._callback  # type: ignore[attr-defined]
    return getattr(callback, "__qualname__", callback)


def _position(task: asyncio.Task[Any]) -> str:
    """Return the innermost line outside asyncio at which a task is suspended, and the object it awaits there."""
    place, inside = "its start", ""
    for frame in suspended_frames(task.get_coro()):
        code = frame.f_code
        if "/asyncio/" in code.co_filename:
            inside = f", in asyncio {code.co_qualname}"
        else:
            place, inside = f"{code.co_qualname} ({'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno})", ""
    return place + inside
