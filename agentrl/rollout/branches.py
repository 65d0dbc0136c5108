"""Branches of an episode's program, and the order in which their recorded calls come back.

On re-execution the recorded calls are delivered in the order they were appended, whatever the schedule, so that state
that branches share evolves as it did; new calls begin when all recorded ones have been delivered (`ReplayOrder`).

1. A branch waits at one call at a time. With one branch open nothing ever waits.
2. A recorded call always comes due: everything that led to it was appended before it.
3. If every branch waits and none is due, the code no longer makes the call that is next: a mismatch, named.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING

from agentrl.core.errors import ReplayMismatchError, UnstructuredConcurrencyError
from agentrl.core.ids import stream

if TYPE_CHECKING:
    import random

    from agentrl.environment.global_random import Steps

_NO_PATCHES: Mapping[str, bool] = MappingProxyType({})
StreamKey = tuple[int, int]
"""Seed and attempt of the episode that made a call."""


class Branch:
    """A line of calls in order: the root, or one coroutine of a `gather`."""

    __slots__ = (
        "_key",
        "_rng",
        "awaits_cancellation",
        "calls",
        "children",
        "is_blocked",
        "is_dismissed",
        "is_open",
        "memoised",
        "owner",
        "patches",
        "path",
        "resources",
        "speaker",
        "steps",
        "task",
    )

    def __init__(self, path: str, key: StreamKey = (0, 0)) -> None:
        self.path = path
        self.owner: asyncio.Task[object] | None = None
        self.is_open = True
        """False once the branch has ended; True also before it begins."""
        self.calls = 0
        self.resources = 0
        self.memoised: str | None = None
        """The effect or external tool the branch is in the middle of: it may make no calls of its own."""
        self.is_blocked = False
        """Only another branch of the episode can wake it."""
        self.awaits_cancellation = False
        """It waits at a call that is recorded as cancelled."""
        self.is_dismissed = False
        """Its gather has cancelled it: it ends where the journal says it did, else now."""
        self.children: Sequence[Branch] = ()
        """Branches of the gather it is in, unless that gather is recorded."""
        self.task: asyncio.Task[object] | None = None
        """The task that runs it, also before it has begun."""
        self.steps: Steps | None = None
        """The running steps of its code."""
        self.patches: Mapping[str, bool] = _NO_PATCHES
        self.speaker: int | None = None
        """Number of the agent that acted last on it, or on its parent before it began."""
        self._key = key
        self._rng: random.Random | None = None

    def begin(self) -> None:
        """Make the running task the branch's owner."""
        self.owner = asyncio.current_task()
        _branch.set(self)

    @contextmanager
    def inside(self, memoised: str | None) -> Iterator[None]:
        """Around code that is not run again on re-execution; `memoised` names it, None: it is run again."""
        if memoised is None:
            yield
            return
        self.begin_memoised(memoised)
        try:
            yield
        finally:
            self.end_memoised()

    def begin_memoised(self, name: str) -> None:
        """Begin code that is not run again on re-execution.

        Its draws from global random generators do not count as the branch's: they would be missing on re-execution.

        Raises:
            CancelledError: the branch has drawn from them before.
        """
        if self.steps is not None:
            self.steps.suspend_guard()
        self.memoised = name

    def end_memoised(self) -> None:
        """End what `begin_memoised` began."""
        self.memoised = None
        if self.steps is not None:
            self.steps.resume_guard()

    @property
    def key(self) -> StreamKey:
        """Seed and attempt that the branch's randomness comes from at this point."""
        return self._key

    @property
    def rng(self) -> random.Random:
        """The branch's own random stream."""
        if self._rng is None:
            self._rng = stream(*self._key, self.path)
        return self._rng

    def use(self, key: StreamKey) -> None:
        """Switch the random stream, also where the program holds it, to `key`: a fork draws its own numbers."""
        if key != self._key:
            self._key = key
            if self._rng is not None:
                self._rng.setstate(stream(*key, self.path).getstate())


_branch: ContextVar[Branch] = ContextVar("agentrl_branch")


def current_branch() -> Branch:
    """The calling task's branch.

    Raises:
        UnstructuredConcurrencyError: the task was not started through the context.
    """
    branch = _branch.get(None)
    try:
        task = asyncio.current_task()
    except RuntimeError:  # in a thread of a tool
        task = None
    if branch is None or branch.owner is not task:
        who = "a callback" if task is None else f"the task {getattr(task.get_coro(), '__qualname__', task.get_name())}"
        raise UnstructuredConcurrencyError(
            f"ctx or an agent was used by {who}, outside run(). Act and reward before run() returns, in run() itself; "
            "start concurrent work with `await ctx.gather(...)`"
        )
    return branch


def branch_inside() -> Branch | None:
    """The branch whose code is running, None outside episodes; for observers."""
    return _branch.get(None)


_NO_QUEUE: deque[str] = deque()
"""The queue of every order with nothing recorded: an own one would take 760 bytes. Nothing is ever added to a queue."""
_NONE_LEFT: set[str] = set()


class ReplayOrder:
    """When a recorded call may come back, and when the first new one may begin.

    Args:
        recorded: the recorded calls' ids in the order they were appended.
        stray: makes the error of a recorded call that the code no longer makes.
    """

    __slots__ = ("_dismissed", "_is_looking", "_left", "_open", "_queue", "_stray", "_waiting")

    def __init__(self, recorded: Iterable[str], stray: Callable[[str], Exception]) -> None:
        self._queue = deque(recorded) or _NO_QUEUE
        self._left = set(self._queue) or _NONE_LEFT
        self._stray: Callable[[str], Exception] = stray
        self._open: list[Branch] = []
        self._dismissed: tuple[Branch, ...] = ()
        self._waiting: dict[Branch, tuple[int, asyncio.Future[None]]] = {}
        self._is_looking = False
        """`_release` is scheduled: one call covers all changes until it runs."""

    @property
    def next_id(self) -> str | None:
        """The recorded call that comes back next; None where everything recorded has."""
        return self._queue[0] if self._queue else None

    @property
    def is_free(self) -> bool:
        """Whether the next call is new and the only open branch makes it: there is nothing to wait for."""
        return not self._queue and len(self._open) == 1

    def has_under(self, path: str) -> bool:
        """Whether something recorded on a branch, or on branches it started, is still to come."""
        return any(_is_under(call_id, path) for call_id in self._left)

    def after(self, path: str, number: int) -> str | None:
        """The next recorded call of a branch beyond a number of its calls, where one is still to come."""
        if not self._queue:
            return None
        calls = (call_id.rpartition("#") for call_id in self._queue)
        return next((f"{own}#{n}" for own, _, n in calls if own == path and int(n) > number), None)

    def enter(self, branch: Branch) -> None:
        """A branch begins."""
        self._open.append(branch)

    def end_branch(self, branch: Branch) -> None:
        """A branch has ended."""
        branch.is_open = False
        if branch in self._open:
            self._open.remove(branch)
        self.forget_dismissed(branch)
        self.look()

    def close(self) -> None:
        """End all waiting: drop the references to tasks and to the journal."""
        for branch in self._open:
            branch.owner = None
        self._stray = ReplayMismatchError

    def abandon(self) -> None:
        """End the code of every open branch where it stands; the root's task is cancelled by its owner."""
        for branch in self._open:
            if branch.steps is not None:
                branch.steps.abandon()
            if branch.task is not None:
                branch.task.cancel()

    def dismiss(self, branch: Branch, *, now: bool = False) -> None:
        """Cancel a branch: now, or once what is recorded of it has come back."""
        if not branch.is_open or (branch.is_dismissed and not now):
            return
        branch.is_dismissed = True
        if now or branch.awaits_cancellation or not self.has_under(branch.path):
            self._cancel(branch)
        else:
            self._dismissed = (*self._dismissed, branch)
            for child in branch.children:
                self.dismiss(child)

    def returned(self, call_id: str) -> None:
        """A recorded call came back."""
        if call_id in self._left:
            self._left.discard(call_id)
            while self._queue and self._queue[0] not in self._left:
                self._queue.popleft()
            for branch in [branch for branch in self._dismissed if not self.has_under(branch.path)]:
                self._cancel(branch)
            self.look()

    def is_due(self, branch: Branch, number: int) -> bool:
        """Whether call `number` of a branch may go on: what is next is itself, or happened inside it, or is new."""
        if not self._queue:
            return True
        path, call_id = branch.path, self._queue[0]
        if not _is_under(call_id, path):
            return False
        rest = call_id[len(path) + 1 :]
        return call_id[len(path)] == "#" or int(rest.partition(".")[0]) > number

    def forget_dismissed(self, branch: Branch) -> None:
        """A branch was cancelled where the journal says so: do not cancel it again."""
        if self._dismissed:
            self._dismissed = tuple(each for each in self._dismissed if each is not branch)

    async def wait(self, branch: Branch, number: int) -> None:
        """Wait until call `number` of a branch is due. Where other branches are open, what is ready of them runs first.

        Raises:
            ReplayMismatchError: it never will be.
        """
        if len(self._open) == 1:
            if not self.is_due(branch, number):
                raise self._stray(self._queue[0])
            return
        due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[branch] = (number, due)
        branch.is_blocked = branch.task is None or not branch.task.cancelling()  # a cancellation is about to wake it
        self.look()
        try:
            await due
        finally:
            self._waiting.pop(branch, None)
            branch.is_blocked = False

    def look(self) -> None:
        """Schedule a look at which branches may go on."""
        if self._waiting and not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._release)

    def _cancel(self, branch: Branch) -> None:
        self.forget_dismissed(branch)
        branch.is_blocked = False
        if branch.task is not None:
            branch.task.cancel()
        self.look()

    def _release(self) -> None:
        """Wake the branches that are due, once all have begun: one during replay, then all."""
        self._is_looking = False
        if not all(branch.owner or (branch.task and branch.task.cancelling()) for branch in self._open):
            return
        due = [branch for branch, (number, _) in self._waiting.items() if self.is_due(branch, number)]
        if self._queue and due:
            due = [max(due, key=lambda branch: len(branch.path))]
        for branch in due:
            self._wake(branch, None)
        if not due and self._waiting and all(branch.is_blocked for branch in self._open):
            self._wake(next(iter(self._waiting)), self._stray(self._queue[0]))

    def _wake(self, branch: Branch, error: Exception | None) -> None:
        _, due = self._waiting.pop(branch)
        branch.is_blocked = False
        if due.done():
            return
        if error is not None:
            due.set_exception(error)
        else:
            due.set_result(None)


def _is_under(call_id: str, path: str) -> bool:
    return call_id.startswith(path) and call_id[len(path)] in "#/"
