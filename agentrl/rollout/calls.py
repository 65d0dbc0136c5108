"""Call ids, branches, and the journal of one attempt of an episode.

Owns the seam every act passes through: `open` gives the act its id and, where the journal already holds it, the
recorded entry, to be compared instead of performed; `write` appends. To resume, to fork and to replay are all this
with a prefix.

Invariants: a call id belongs to a branch, never to a global order; a branch's calls are made by the task that owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from agentrl.core import ids
from agentrl.core.errors import ReplayMismatchError, UnstructuredConcurrencyError
from agentrl.core.rng import stream
from agentrl.journal.checksums import EpisodeDigest
from agentrl.journal.entries import EntryBody, JournalEntry, encode_body

if TYPE_CHECKING:
    import random

    from agentrl.journal.port import TurnLog

Body = TypeVar("Body")

BEGIN = "begin"
"""Call id of the first entry."""


class Branch:
    """A line of calls in order: the root, or one coroutine of a `gather`."""

    __slots__ = ("_rng", "calls", "owner", "path")

    def __init__(self, path: str, owner: asyncio.Task[object] | None) -> None:
        self.path = path
        self.owner = owner
        self.calls = 0
        self._rng: random.Random | None = None

    def rng(self, seed: int, attempt: int) -> random.Random:
        """The branch's own random stream in an attempt."""
        if self._rng is None:
            self._rng = stream(seed, attempt, self.path)
        return self._rng


_branch: ContextVar[Branch] = ContextVar("agentrl_branch")


def enter_branch(path: str) -> Branch:
    """Make the running task the owner of a new branch."""
    branch = Branch(path, asyncio.current_task())
    _branch.set(branch)
    return branch


def current_branch() -> Branch:
    """The calling task's branch.

    Raises:
        UnstructuredConcurrencyError: the task was not started through the context.
    """
    branch = _branch.get()
    if branch.owner is not asyncio.current_task():
        task = asyncio.current_task()
        who = "a callback" if task is None else f"the task {getattr(task.get_coro(), '__qualname__', task.get_name())}"
        raise UnstructuredConcurrencyError(
            f"ctx or an agent was used by {who}, outside run(). Act and reward before run() returns, in run() itself; "
            "start concurrent work with `await ctx.gather(...)`"
        )
    return branch


class Call(NamedTuple):
    """An act about to happen, or that happened before."""

    call_id: str
    asked: bytes
    recorded: EntryBody | None


class CallJournal:
    """The journal of one attempt: what was recorded before, and where new entries go."""

    __slots__ = ("_attempt", "_digest", "_ended", "_episode_id", "_log", "_recorded", "written")

    def __init__(self, log: TurnLog, episode_id: str, attempt: int, recorded: Iterable[JournalEntry] = ()) -> None:
        self._log = log
        self._episode_id = episode_id
        self._attempt = attempt
        self._digest = EpisodeDigest()
        self._recorded: dict[str, JournalEntry] | None = None
        self._ended = False
        self.written = 0
        for entry in recorded:
            if self._recorded is None:
                self._recorded = {}
            self._recorded[entry.call_id] = entry
            self._count(entry)

    def open(self, asked: bytes = b"") -> Call:
        """The next call of the calling branch.

        Raises:
            UnstructuredConcurrencyError: the call is made by another task, or after the episode's end.
            ReplayMismatchError: the journal holds another question under this id.
        """
        branch = current_branch()
        if self._ended:
            raise UnstructuredConcurrencyError(
                f"ctx or an agent of episode {self._episode_id} was used after its run() had returned. Act and reward "
                "before run() returns; keep nothing of an episode beyond its end"
            )
        call_id = ids.call_id(branch.path, branch.calls)
        branch.calls += 1
        return self.at(call_id, asked)

    def at(self, call_id: str, asked: bytes = b"") -> Call:
        """The call with a given id."""
        if self._recorded is None:
            return Call(call_id, asked, None)
        entry = self._recorded.pop(call_id, None)
        if entry is None:
            return Call(call_id, asked, None)
        body = entry.decode()
        if entry.asked != asked:
            raise ReplayMismatchError(
                f"episode {self._episode_id}, call {call_id}: the journal holds {type(body).__name__} for a question "
                f"with hash {entry.asked.hex()}, the code now asks {asked.hex()}. Check that run() is deterministic: "
                "randomness through ctx.rng, time through ctx.now(), the outside world through ctx.effect()"
            )
        return Call(call_id, asked, body)

    def write(self, call: Call, body: EntryBody) -> None:
        """Append the entry of a call that was performed.

        Raises:
            UnstructuredConcurrencyError: the episode has ended, and its journal is another's to continue.
        """
        if self._ended:
            raise UnstructuredConcurrencyError(f"episode {self._episode_id}, call {call.call_id}: it ended meanwhile")
        entry = JournalEntry(self._episode_id, self._attempt, call.call_id, call.asked, encode_body(body))
        self._log.append(entry)
        self._count(entry)

    def expect(self, call: Call, kind: type[Body]) -> Body | None:
        """The recorded body of a call, which must be of a kind.

        Raises:
            ReplayMismatchError: it is of another kind.
        """
        if call.recorded is None:
            return None
        if not isinstance(call.recorded, kind):
            raise ReplayMismatchError(
                f"episode {self._episode_id}, call {call.call_id}: the journal holds {type(call.recorded).__name__}, "
                f"the code now makes a {kind.__name__}. Check that run() is deterministic"
            )
        return call.recorded

    def end(self) -> None:
        """Refuse further calls: the episode's program has returned."""
        self._ended = True

    @property
    def digest(self) -> bytes:
        """Of all entries of the attempt so far; see `EpisodeDigest`."""
        return self._digest.value

    def _count(self, entry: JournalEntry) -> None:
        self._digest.add(entry)
        self.written += 1
