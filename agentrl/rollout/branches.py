"""Branches of an episode's program, their recorded calls, and the order in which these return on re-execution.

`RecordedCalls` return in the order in which they were appended, whatever the schedule, so that state shared by branches
evolves as before; new calls begin after all recorded ones have returned (`ReplayOrder`).

1. A branch waits at one call at a time. With only one open branch, no call waits.
2. A recorded call always becomes due: everything that led to it was appended before it.
3. If every branch waits and none is due, the code no longer makes the next call: a mismatch that names the call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentrl.core import ids
from agentrl.core.errors import ReplayMismatchError
from agentrl.core.records import REWARD
from agentrl.core.text import agent_name, plural, valid_unicode
from agentrl.journal.entries import (
    BeginEntry,
    ChildResultEntry,
    EffectEntry,
    EntryBody,
    GatherOrderEntry,
    JournalEntry,
    NondeterministicValueEntry,
    ResourceCallEntry,
    RewardEntry,
    SpawnEntry,
    TimeLimitEntry,
    ToolEntry,
    TurnEntry,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from agentrl.environment.containment import GuardedAwaitable

StreamKey = tuple[int, int]
"""Seed and attempt of the episode that made a call."""
BEGIN = "begin"
"""Call id of an attempt's first entry."""
_NONE: dict[Any, Any] = {}
"""Shared empty dict of most episodes; never added to."""
_NO_PATCHES: Mapping[str, bool] = MappingProxyType({})


class ProgramBranch:
    """A sequence of calls: the root's, or those of one coroutine of a `gather`."""

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
        """Whether the branch has not ended; True also before it begins."""
        self.calls = 0
        self.resources = 0
        self.memoised: str | None = None
        """Name of the effect or external tool that runs on the branch, which may make no calls meanwhile."""
        self.is_blocked = False
        """Whether only another branch of the episode can wake this one."""
        self.awaits_cancellation = False
        """Whether the branch waits at a call that is recorded as cancelled."""
        self.is_dismissed = False
        """Whether the branch's gather has cancelled it: it ends where the journal records its end, else now."""
        self.children: Sequence[ProgramBranch] = ()
        """Branches of the gather that this branch awaits, unless that gather is recorded."""
        self.task: asyncio.Task[object] | None = None
        """Task that runs the branch, also before the branch has begun."""
        self.steps: GuardedAwaitable | None = None
        """Running steps of the branch's code."""
        self.patches: Mapping[str, bool] = _NO_PATCHES
        self.speaker: int | None = None
        """Number of the agent that acted last on the branch, or on its parent before it began."""
        self._key = key
        self._rng: random.Random | None = None

    @property
    def key(self) -> StreamKey:
        """Seed and attempt of the branch's randomness at this point."""
        return self._key

    @property
    def rng(self) -> random.Random:
        """The branch's own random stream."""
        if self._rng is None:
            self._rng = ids.random_stream(*self._key, self.path)
        return self._rng

    def use(self, key: StreamKey) -> None:
        """Switch the random stream to `key`, also where the program holds a reference to it: a fork draws its own
        numbers."""
        if key != self._key:
            self._key = key
            if self._rng is not None:
                self._rng.setstate(ids.random_stream(*key, self.path).getstate())


class RecordedCalls:
    """The recorded calls of an attempt, keyed by id.

    Args:
        episode_id: id of the episode.
        key: seed and attempt of the episode, for new calls.
        own: the attempt's entries on disk.
        inherited: for a fork, the entries before the fork point, including each ancestor's `begin`.
        edits: for a fork, messages that replace the program's, keyed by call id.
        answers: recorded calls that may be recalled at any time, in no order.
    """

    __slots__ = (
        "_answers",
        "_decoded",
        "_entries",
        "_episode_id",
        "_keys",
        "_newest",
        "edits",
        "forked_from",
        "is_empty",
        "key",
    )

    def __init__(
        self,
        episode_id: str,
        key: StreamKey,
        own: Iterable[JournalEntry],
        inherited: Iterable[JournalEntry],
        edits: Mapping[str, Sequence[Mapping[str, Any]]],
        answers: Iterable[JournalEntry],
    ) -> None:
        self.key = key
        keys: dict[str, StreamKey] = {}
        entries: dict[str, JournalEntry] = {}
        edits = dict(edits)
        self._decoded: tuple[JournalEntry, EntryBody] | None = None
        self.forked_from: BeginEntry | None = None
        """First entry of the episode from which this one was forked."""
        for entry in inherited:
            if entry.call_id == BEGIN:
                begin = entry.decode()
                assert isinstance(begin, BeginEntry)
                keys[entry.episode_id] = (begin.seed, entry.attempt)
                edits |= {} if begin.fork is None else begin.fork.edits
                self.forked_from = begin
            else:
                entries[entry.call_id] = entry
        for entry in own:
            entries[entry.call_id] = entry
        self._keys: Mapping[str, StreamKey] = keys or _NONE
        """Seed and attempt of each ancestor of a fork."""
        self.edits: Mapping[str, Sequence[Mapping[str, Any]]] = edits or _NONE
        """Messages that replace the program's, keyed by call id."""
        self._entries = entries or _NONE
        self._answers = {entry.call_id: entry for entry in answers} or _NONE
        self._episode_id = episode_id
        known = self._answers.values()
        self._newest = max((entry.attempt for entry in known if entry.episode_id == episode_id), default=0)
        self.is_empty = not (self._entries or self._answers or self.edits)

    def numbered(self) -> Iterator[str]:
        """Yield the ids of calls that return in order, in the order in which they were appended."""
        return filter(ids.has_call_number, self._entries)

    def get(self, call_id: str) -> JournalEntry | None:
        """Return the entry of a call that has not returned yet; answers are left out."""
        return self._entries.get(call_id)

    def answer(self, call_id: str) -> JournalEntry | None:
        """Return the recorded answer of the outside world to a call."""
        return self._answers.get(call_id)

    def answers_left(self) -> list[JournalEntry]:
        """Return the answers that were not given yet, except those that only attempts before the newest one had."""
        left = self._answers.values()
        return [entry for entry in left if entry.episode_id != self._episode_id or entry.attempt == self._newest]

    def has_turns(self, seat: str) -> bool:
        """Whether a turn that the external agent of a seat asked for has not come back yet."""
        return any(call_id.startswith(f"{seat}:") for call_id in self._entries)

    def forget_answers(self) -> None:
        """Forget the answers that were not given yet."""
        self._answers = _NONE

    def key_of(self, entry: JournalEntry | None) -> StreamKey:
        """Seed and attempt under which a call was made; the episode's own for a new call."""
        return self.key if entry is None else self._keys.get(entry.episode_id, self.key)

    def body(self, entry: JournalEntry) -> EntryBody:
        """Return the body of an entry, decoded once for both peeking and the call."""
        if self._decoded is None or self._decoded[0] is not entry:
            self._decoded = (entry, entry.decode())
        return self._decoded[1]

    def remove(self, call_id: str) -> bool:
        """Remove a call that has returned; returns whether it was recorded."""
        self._decoded = None
        return self._entries.pop(call_id, None) is not None

    def remove_answer(self, call_id: str) -> JournalEntry | None:
        """Remove and return an answer; None if there is none."""
        return self._answers.pop(call_id, None)


NOTHING_RECORDED = RecordedCalls("", (0, 0), (), (), {}, ())
"""Recorded calls of an attempt that starts from the beginning."""

_NO_QUEUE: deque[str] = deque()
"""Shared empty queue of orders without recorded calls, never added to; a separate one would take 760 bytes."""
_NONE_LEFT: set[str] = set()
_NOBODY: dict[ProgramBranch, tuple[int, asyncio.Future[None]]] = {}


class ReplayOrder:
    """Decides when a recorded call may return, and when the first new call may begin.

    Args:
        recorded: ids of the recorded calls, in the order in which they were appended.
        stray: makes the error of a recorded call that the code no longer makes.
    """

    __slots__ = ("_dismissed", "_is_looking", "_left", "_queue", "_stray", "_waiting", "branches")

    def __init__(self, recorded: Iterable[str], stray: Callable[[str], Exception]) -> None:
        self._queue = deque(recorded) or _NO_QUEUE
        self._left = set(self._queue) or _NONE_LEFT
        self._stray: Callable[[str], Exception] = stray
        self.branches: list[ProgramBranch] = []
        """Open branches."""
        self._dismissed: tuple[ProgramBranch, ...] = ()
        self._waiting: dict[ProgramBranch, tuple[int, asyncio.Future[None]]] = _NOBODY
        self._is_looking = False
        """Whether `_release` is scheduled: one call covers all changes until it runs."""

    @property
    def next_id(self) -> str | None:
        """Recorded call that returns next; None if all have returned."""
        return self._queue[0] if self._queue else None

    def has_under(self, path: str) -> bool:
        """Whether a recorded call of a branch, or of branches it started, has not returned yet."""
        return any(_is_under(call_id, path) for call_id in self._left)

    def after(self, path: str, number: int) -> str | None:
        """Return the next recorded call of a branch after call `number`; None if there is none left."""
        if not self._queue:
            return None
        calls = (call_id.rpartition("#") for call_id in self._queue)
        return next((f"{own}#{n}" for own, _, n in calls if own == path and int(n) > number), None)

    def end_branch(self, branch: ProgramBranch) -> None:
        """Remove a branch that has ended."""
        branch.is_open = False
        if branch in self.branches:
            self.branches.remove(branch)
        self.forget_dismissed(branch)
        self.look()

    def close(self) -> None:
        """End all waits, and drop the references to tasks and to the journal."""
        for branch in self.branches:
            branch.owner = None
        self._stray = ReplayMismatchError

    def abandon(self) -> None:
        """End the code of every open branch immediately; the owner of the root's task cancels that task."""
        for branch in self.branches:
            if branch.steps is not None:
                branch.steps.abandon()
            if branch.task is not None:
                branch.task.cancel()

    def dismiss(self, branch: ProgramBranch, *, now: bool = False) -> None:
        """Cancel a branch, either now or once its recorded calls have returned."""
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
        """Record that a call has returned."""
        if call_id in self._left:
            self._left.discard(call_id)
            while self._queue and self._queue[0] not in self._left:
                self._queue.popleft()
            for branch in [branch for branch in self._dismissed if not self.has_under(branch.path)]:
                self._cancel(branch)
            self.look()

    def is_due(self, branch: ProgramBranch, number: int) -> bool:
        """Whether call `number` of a branch may continue: the next recorded call is this one, or happened inside it, or
        there is none."""
        if not self._queue:
            return True
        path, call_id = branch.path, self._queue[0]
        if not _is_under(call_id, path):
            return False
        rest = call_id[len(path) + 1 :]
        return call_id[len(path)] == "#" or int(rest.partition(".")[0]) > number

    def forget_dismissed(self, branch: ProgramBranch) -> None:
        """Stop cancelling a branch that was cancelled where the journal records it."""
        if self._dismissed:
            self._dismissed = tuple(each for each in self._dismissed if each is not branch)

    async def wait(self, branch: ProgramBranch, number: int) -> None:
        """Wait until call `number` of a branch is due. Ready steps of other open branches run first.

        Raises:
            ReplayMismatchError: the call will never be due.
        """
        if len(self.branches) == 1:
            if not self.is_due(branch, number):
                raise self._stray(self._queue[0])
            return
        due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiting is _NOBODY:
            self._waiting = {}
        self._waiting[branch] = (number, due)
        # A task that is being cancelled will wake, so it is not blocked.
        branch.is_blocked = branch.task is None or not branch.task.cancelling()
        self.look()
        try:
            await due
        finally:
            self._waiting.pop(branch, None)
            branch.is_blocked = False

    def look(self) -> None:
        """Schedule `_release`."""
        if self._waiting and not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._release)

    def _cancel(self, branch: ProgramBranch) -> None:
        self.forget_dismissed(branch)
        branch.is_blocked = False
        if branch.task is not None:
            branch.task.cancel()
        self.look()

    def _release(self) -> None:
        """Wake the branches that are due, once all have begun: one at a time during replay, then all."""
        self._is_looking = False
        if not all(branch.owner or (branch.task and branch.task.cancelling()) for branch in self.branches):
            return
        due = [branch for branch, (number, _) in self._waiting.items() if self.is_due(branch, number)]
        if self._queue and due:
            due = [max(due, key=lambda branch: len(branch.path))]
        for branch in due:
            self._wake(branch, None)
        if not due and self._waiting and all(branch.is_blocked for branch in self.branches):
            self._wake(next(iter(self._waiting)), self._stray(self._queue[0]))

    def _wake(self, branch: ProgramBranch, error: Exception | None) -> None:
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


CHARACTERS = 200

REMEDY = (
    "run() must do the same when it is run again: randomness through ctx.rng, time through ctx.now(), the outside "
    "world through ctx.effect()"
)


def shortened_repr(value: object) -> str:
    """Return the `repr` of a value, at most `CHARACTERS` long."""
    text = valid_unicode(repr(value))
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…"


def printable_excerpt(text: str) -> str:
    """Escape unprintable characters of a text, and cut it to twice `CHARACTERS`."""
    shown = valid_unicode(text)[: 2 * CHARACTERS]
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in shown)


def describe_entry(body: EntryBody) -> str:
    """Describe an entry in a few words, for messages."""
    match body:
        case TurnEntry():
            asked = shortened_repr(" / ".join(_content(message) for message in body.messages))
            return f"a turn of {agent_name(body.seat, body.index)} asked {asked}"
        case ToolEntry():
            return f"the tool call {body.name}({shortened_repr(body.arguments)})"
        case EffectEntry():
            return f"the effect {body.name!r}"
        case ResourceCallEntry():
            return f"the call {body.resource}.{body.method}({shortened_repr(body.arguments)})"
        case ChildResultEntry():
            return f"the wait for {body.child}"
        case SpawnEntry():
            return f"the start of {plural(len(body.children), 'child', 'children')} of {body.environment}"
        case RewardEntry():
            turn = "" if body.turn is None else f" for turn {body.turn}"
            name = "" if body.name == REWARD else f" for {body.name}"
            return f"a reward of {body.value} to {agent_name(body.seat, body.index)}{turn}{name}"
        case NondeterministicValueEntry():
            return f"{body.kind} = {shortened_repr(body.value)}"
        case TimeLimitEntry():
            return f"the end of the episode's time ({body.stop_reason})"
        case GatherOrderEntry():
            return f"the order in which {len(body.order)} branches ended"
    return f"an entry of kind {type(body).__struct_config__.tag}"


def replay_mismatch(
    episode_id: str, call_id: str, then: str, now: str, *, code: tuple[str, str]
) -> ReplayMismatchError:
    """Make the error of a re-execution that differs from the journal at a call.

    `then` and `now` are clauses, `code` holds the code's hashes then and now.
    """
    changed = code[0] != code[1]
    why = f"The code has changed since ({code[0]} then, {code[1]} now)"
    text = why if changed else f"The code is the same ({code[1]}): {REMEDY}"
    message = f"episode {episode_id}, call {call_id}: {then}, {now}. {text}"
    return ReplayMismatchError(message, code_changed=changed, call_id=call_id)


def _content(message: dict[str, object]) -> str:
    return str(message.get("content", ""))
