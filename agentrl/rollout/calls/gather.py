"""`ctx.gather`: runs strands of an episode's code, and records the order in which they ended.

1. Strands begin in their order, and no call of a strand returns before all have begun. So the code before a strand's
   first call must not depend on the others' later code.
2. All strands have ended when the program continues after the gather, whether they returned, one raised (the others
   are cancelled), or the gather itself was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.environment.containment import as_episode_error
from agentrl.journal.entries import NondeterministicValueEntry, request_hash
from agentrl.rollout.calls.journal import begin_strand, current_strand

if TYPE_CHECKING:
    from agentrl.rollout.calls.journal import CallJournal, JournaledCall, Strand


async def gather(journal: CallJournal, awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    strand, number = current_strand(), len(awaitables)
    group: _GatherGroup | None = None

    async def run(call: JournaledCall) -> NondeterministicValueEntry:
        nonlocal group
        group = _GatherGroup(journal, strand, call, awaitables)
        if await group.wait_until_settled():
            # Its strands may have finished their calls at the time limit, as they will have on re-execution.
            if not (group.is_answered and journal.cut(strand)):
                if journal.cut_error is not None:
                    journal.end_with(journal.cut_error)
                raise asyncio.CancelledError
        elif journal.failure is not None:
            raise asyncio.CancelledError
        return NondeterministicValueEntry("gather", group.finished)

    question = request_hash(b"gather", number.to_bytes(4, "little"))
    try:
        await journal.call(question, lambda: f"{number} strands", NondeterministicValueEntry, run, repeats=_compare)
    finally:
        if group is None:
            for awaitable in filter(inspect.iscoroutine, awaitables):
                awaitable.close()
    assert group is not None
    if group.error is not None:
        raise group.error
    return [task.result() for task in group.tasks]


def _compare(recorded: object, ended: object) -> None:
    """Accept any order of the ends of recorded strands: their calls have been compared."""


def _mark_retrieved(task: asyncio.Task[Any]) -> None:
    """Mark a strand's error as retrieved: only the first one is raised."""
    task.cancelled() or task.exception()


class _GatherGroup:
    """The strands of one gather."""

    def __init__(
        self, journal: CallJournal, strand: Strand, call: JournaledCall, awaitables: Sequence[Awaitable[Any]]
    ) -> None:
        self._journal = journal
        self._strand = strand
        self._call = call
        self._awaitables = awaitables
        self._is_ending = False
        self._waiting_to_begin: dict[int, asyncio.Future[None]] = {}
        self.finished: list[int] = []
        """Indices of the coroutines that returned, in the order of their returns."""
        self.error: BaseException | None = None
        """The error of the first strand that failed."""
        loop = asyncio.get_running_loop()
        self._strands = [journal.enter(f"{strand.path}/{call.number}.{index}") for index in range(len(awaitables))]
        for child in self._strands:
            child.speaker = strand.speaker
        self.tasks = [
            loop.create_task(self._run(index, awaitable), context=contextvars.copy_context())
            for index, awaitable in enumerate(awaitables)
        ]
        for child, task in zip(self._strands, self.tasks, strict=True):
            child.task = task
            task.add_done_callback(_mark_retrieved)
        if not isinstance(call.recorded, NondeterministicValueEntry):
            strand.children = self._strands
            if strand.is_dismissed:
                journal.dismiss(self._strands)

    @property
    def is_answered(self) -> bool:
        """Whether every strand has returned, or one has raised its own error."""
        return self.error is not None or not any(task.cancelled() for task in self.tasks)

    async def wait_until_settled(self) -> bool:
        """Wait until all strands have ended; if one fails, the others are cancelled. Returns whether the wait was
        cancelled."""
        cancelled, is_held, is_settled = False, False, not self.tasks
        self._strand.is_blocked = True
        while not (cancelled or is_settled):
            try:
                await asyncio.wait(self.tasks, return_when=asyncio.FIRST_EXCEPTION)
                is_settled = True
            except asyncio.CancelledError:
                is_held = self._journal.holds_back(self._call)
                cancelled = self._call.recorded is None or not is_held
        running = [task for task in self.tasks if not task.done()]
        if running:
            self._journal.dismiss(self._strands)
            self._is_ending = self._strand.is_blocked = True
            self._journal.order.look()  # a strand that waits for the calls of one that differs ends too
        while not all(task.done() for task in running):
            try:
                await asyncio.wait(running)
            except asyncio.CancelledError:
                cancelled = True  # a second cancellation: the strands are already ending
        self._end()
        if cancelled and is_held:  # a new gather ends where the replay has ended
            with contextlib.suppress(asyncio.CancelledError):
                await self._journal.wait_until_due(self._call)
        return cancelled

    def _end(self) -> None:
        self._strand.is_blocked = False
        self._strand.children = ()
        for child, awaitable in zip(self._strands, self._awaitables, strict=True):
            self._journal.order.end_strand(child)
            if child.owner is None and inspect.iscoroutine(awaitable):
                awaitable.close()

    async def _run(self, index: int, awaitable: Awaitable[Any]) -> Any:
        child = self._strands[index]
        if index and self._strands[index - 1].owner is None:
            self._waiting_to_begin[index] = asyncio.get_running_loop().create_future()
            await self._waiting_to_begin[index]
        begin_strand(child)
        if (follower := self._waiting_to_begin.pop(index + 1, None)) is not None and not follower.done():
            follower.set_result(None)
        self._journal.order.look()
        try:
            try:
                value = await self._journal.begin_steps(child, lambda: awaitable)
            finally:
                self._journal.end_steps(child)
                if self._journal.failure is not None:
                    raise self._journal.failure
            self.finished.append(index)
            return value
        except asyncio.CancelledError:
            raise
        except BaseException as exception:  # noqa: BLE001 - foreign code: raised again below
            error = as_episode_error(exception, child.task)
            if self.error is None:
                self.error = error
            raise error  # noqa: B904 - it is the same one, or has it as its cause
        finally:
            self._journal.order.end_strand(child)
            if not any(strand.is_open for strand in self._strands) or (self.error and not self._is_ending):
                self._strand.is_blocked = False
