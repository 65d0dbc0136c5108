"""Several things at once within an episode: each on a branch of its own, their end an entry like any other.

1. Nothing is delivered to a branch before all have begun. What a branch does before its first call must not depend on
   what the others do.
2. They have all ended when the program goes on after the gather, whether they returned, one raised (the others are
   cancelled), or the gather itself was cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.core import ids
from agentrl.core.errors import ReplayMismatchError
from agentrl.journal.entries import CancelEntry, OrderEntry
from agentrl.rollout.branches import current_branch

if TYPE_CHECKING:
    from agentrl.rollout.branches import Branch
    from agentrl.rollout.calls import Call, CallJournal


async def gather(journal: CallJournal, awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """See `EpisodeContext.gather`."""
    branch, call = current_branch(), journal.open()
    gathering = _Gathering(journal, branch, call, awaitables)
    try:
        await gathering.wait()
    except asyncio.CancelledError:
        branch.was_cancelled = True  # told to `reach`, which records it in its turn
        if journal.is_stopped:
            raise
    finally:
        await gathering.end()
    if isinstance(gathering.error, ReplayMismatchError):
        raise gathering.error
    await journal.reach(call)
    if journal.recall(call, OrderEntry) is None:
        journal.write(call, OrderEntry(tuple(gathering.finished)))
    if gathering.error is not None:
        raise gathering.error
    return [task.result() for task in gathering.tasks]


class _Gathering:
    """The branches of one gather."""

    def __init__(self, journal: CallJournal, branch: Branch, call: Call, awaitables: Sequence[Awaitable[Any]]) -> None:
        self._journal = journal
        self._branch = branch
        self._call = call
        self._awaitables = awaitables
        self._is_ending = False
        self.finished: list[int] = []
        """Which coroutines returned, in that order."""
        self.error: BaseException | None = None
        """What the first of them to fail raised."""
        loop = asyncio.get_running_loop()
        self._branches = [
            journal.enter(ids.child_branch(branch.path, call.number, index)) for index in range(len(awaitables))
        ]
        self.tasks = [
            loop.create_task(self._run(index, awaitable), context=contextvars.copy_context())
            for index, awaitable in enumerate(awaitables)
        ]

    async def wait(self) -> None:
        """Until all have returned, or one has failed; no cancellation comes before where the journal knows better."""
        branch, ended = self._branch, isinstance(self._call.recorded, OrderEntry)
        branch.is_blocked = True
        if not ended and branch.was_cancelled and branch.take_cancellation():
            raise asyncio.CancelledError
        while self.error is None and not all(task.done() for task in self.tasks):
            try:
                await asyncio.wait(self.tasks, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError:
                if not (ended and branch.is_dismissed) or self._journal.is_stopped:
                    raise
                branch.was_cancelled = True

    async def end(self) -> None:
        """Cancel what still runs, and wait for it."""
        running = [task for task in self.tasks if not task.done()]
        if running:
            was_cancelled = isinstance(self._call.recorded, CancelEntry)
            for own in self._branches:
                own.is_dismissed = self.error is not None or was_cancelled or self._branch.is_dismissed
            await self._dismiss()
            self._is_ending = self._branch.is_blocked = True
            await asyncio.wait(running)
        self._branch.is_blocked = False
        for own, task, awaitable in zip(self._branches, self.tasks, self._awaitables, strict=True):
            self._journal.leave(own)
            if own.owner is None and inspect.iscoroutine(awaitable):
                awaitable.close()
            if not task.cancelled():
                task.exception()  # asked for: the first of them is raised, the rest belong to nobody

    async def _dismiss(self) -> None:
        """Cancel; those that have not begun never will, unless they had when this was recorded."""
        for own, task in zip(self._branches, self.tasks, strict=True):
            if own.owner is None and own.is_open and not self._journal.holds(own):
                task.cancel()
                self._journal.leave(own)
        while any(own.owner is None and own.is_open for own in self._branches):
            await asyncio.sleep(0)
        for task in self.tasks:
            task.cancel()

    async def _run(self, index: int, awaitable: Awaitable[Any]) -> Any:
        own = self._branches[index]
        own.begin()
        self._journal.look()
        try:
            value = await awaitable
            self.finished.append(index)
            return value
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self.error is None:
                self.error = error
            raise
        finally:
            self._journal.leave(own)
            if not any(branch.is_open for branch in self._branches) or (self.error and not self._is_ending):
                self._branch.is_blocked = False
