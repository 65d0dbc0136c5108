"""The journal of one attempt of an episode, through which all its calls pass.

A program makes its calls on strands (`Strand`): the root, and one for each coroutine of a `gather`. Every call
passes through `CallJournal`:

* `open` names the call and finds its recorded entry; `reach` waits until the call is due (`ReplayOrder`);
* `recall` returns the recorded entry, which must be of the same kind (`Prefix`);
* `record` appends the entry of a call that was performed.

To resume, fork or branch an episode is to do this over a `Prefix` of recorded entries, and to sample what is new. A
replay ends at what is new (`OnNew`).

1. A call id belongs to a strand; a strand's calls are made by the task that owns it.
2. Recorded calls return in the order in which they were appended, whatever the schedule, so that state shared by
   strands evolves as before; new ones begin after the last. A recorded call always becomes due: everything that led to
   it was appended before it.
3. A strand waits at one call at a time. With only one open strand, no call waits. If every strand waits and none is
   due, the code no longer makes the next call: a mismatch that names the call.
4. A cancellation is recorded when the episode continues after it: at its next call, or at its normal end. Code that
   stops an episode from outside calls `stop`, after which nothing is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import InitVar, dataclass, field
from itertools import count
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar

import msgspec

from agentrl.core import ids
from agentrl.core.errors import (
    AgentRLError,
    EffectError,
    EngineError,
    EpisodeError,
    GlobalRandomError,
    ReplayMismatchError,
    UnstructuredConcurrencyError,
    is_user_code,
)
from agentrl.core.event_loop import frame_location, suspended_frames, user_frames
from agentrl.environment.containment import CoroutineStepGuard, GlobalRandomState, GuardedAwaitable, RandomDrawDetector
from agentrl.environment.context import LimitReachedError
from agentrl.journal.entries import (
    BeginEntry,
    EffectIntentEntry,
    EntryBody,
    JournalEntry,
    NondeterministicValueEntry,
    RewardEntry,
    TurnEntry,
    UnansweredEntry,
    encode_body,
    extend_digest,
    request_hash,
)
from agentrl.journal.routing import move_routing
from agentrl.rollout.calls.journal_data import encode
from agentrl.rollout.calls.mismatch import (
    DIFFERENT_REQUEST,
    FORK_REMEDY,
    REMEDY,
    REPLAY_REMEDY,
    describe_entry,
    printable_excerpt,
    replay_mismatch,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Coroutine, Generator, Iterator
    from contextlib import AbstractContextManager

    from agentrl.core.records import ForkPoint
    from agentrl.journal.port import TurnLog


Body = TypeVar("Body")
T = TypeVar("T")

StreamKey = tuple[int, int]
"""Seed and attempt of the episode that made a call."""

TIME_LIMIT: Literal["time_limit"] = "time_limit"
ORDER_S = 10.0
"""Seconds that a request waits for an inherited turn that came earlier when it was recorded."""
BEGIN = "begin"
"""Call id of an attempt's first entry."""


Question = bytes | Callable[["JournaledCall"], bytes]
"""Hash of a call's request, or a function that computes it once the call is due."""


class JournaledCall(msgspec.Struct, eq=False):
    """A call that is about to happen, or that is recorded."""

    call_id: str
    question: Question
    recorded: EntryBody | None = None
    strand: Strand | None = None
    number: int = 0
    waits: bool = True
    """Whether `CallJournal.reach` may have to wait; False for a new call while no other strand is open."""
    recorded_hash: bytes = b""
    is_inherited: bool = False
    """Whether a fork inherited the call, so that it is neither written nor trained."""
    has_ended: bool = False
    """Whether the call has raised its recorded end."""
    suspended_at: int = 0
    """As `UnansweredEntry.suspensions`."""
    state: Any = None
    """As `UnansweredEntry.state`."""
    timer: int = -1
    """As `UnansweredEntry.timer`."""
    edits: Sequence[Mapping[str, Any]] = ()
    """Messages with which a fork replaces those of the call."""

    def own(self, count: int) -> int:
        """Return a count without that of inherited calls."""
        return count * (not self.is_inherited)

    @property
    def request_hash(self) -> bytes:
        """Hash of the request, computed when it is first needed."""
        if not isinstance(self.question, bytes):
            self.question = self.question(self)
        return self.question


@dataclass(slots=True, eq=False)
class CallJournal:
    """The journal of one attempt: its recorded entries, and the log of new ones.

    Args:
        _log: log to which entries are appended.
        _episode_id: id of the episode.
        _attempt: number of the attempt.
        _recorded: what is recorded of the attempt.
        seed: seed of the episode.
        _on_new: what happens at a call that is not recorded; None: it is performed.
    """

    _log: TurnLog
    _episode_id: str
    _attempt: int
    _recorded: Prefix
    seed: InitVar[int] = field(kw_only=True, default=0)
    _on_new: OnNew | None = None
    digest: bytes = b""
    """The digest of all entries of the attempt so far; see `extend_digest`."""
    _ended: bool = False
    _stopped: bool = False
    failure: AgentRLError | None = None
    """The error the episode ends with, even if its program catches it."""
    is_over_time: bool = False
    """Whether the time limit ended a call of the episode, now or when it was recorded; no further turn begins."""
    cut_error: EpisodeError | None = None
    """Error of the episode if the time limit has cancelled the program, and no call raises `LimitReachedError`."""
    cancellations: int = 0
    """Number of cancellations of the program's task by the episode's own end."""
    _is_told: bool = False
    """Whether a call of the program has been refused since the episode's end."""
    _cancelled_calls: tuple[JournaledCall, ...] = ()
    purpose: str = ""
    """Why the attempt was recorded; a replay of it has another purpose."""
    code_hash: str = ""
    """Hash of the code that runs now; `code_hash_then` is that of the code that wrote the recorded entries."""
    code_hash_then: str = ""
    own_random: bool = False
    """Whether the episode's code has its own global random generators."""
    detects_draws: bool = True
    """Whether the episode fails if its code draws from global random generators that are not its own."""
    written: int = 0
    _named: dict[str, set[str]] = field(default_factory=lambda: _NONE)
    """Ids of the calls named by their content so far, keyed by the part that their content determines."""
    _key: StreamKey = field(init=False)
    order: ReplayOrder = field(init=False)
    _is_resumed: bool = field(init=False)
    """Whether an earlier execution of the attempt left entries."""

    def __post_init__(self, seed: int) -> None:
        self._key = (seed, self._attempt)
        # A new attempt has no recording to differ from.
        stray: Callable[[str], Exception] = self._stray
        if self._recorded.is_empty:
            self._recorded, stray = NOTHING_RECORDED, ReplayMismatchError
        self.order = ReplayOrder(self._recorded.numbered(), stray)
        for entry in self._recorded.own:
            self._count(entry)
        self._is_resumed = bool(self._recorded.own)
        self._recorded.own = ()

    # --- an act, in order ---------------------------------------------------------------------------------------------

    async def call(
        self,
        question: Question,
        describe: Callable[[], str],
        kind: type[Body],
        do: Callable[[JournaledCall], Awaitable[Body]],
        *,
        repeats: Callable[[Body, Body], tuple[str, str] | None] | None = None,
        memoised: str | None = None,
        limit: AbstractContextManager[None] | None = None,
        recalled: Callable[[UnansweredEntry], None] | None = None,
    ) -> Body:
        """Make the next call of the calling strand: recall its entry, or perform and record it.

        An error that ends the episode cancels its program, which cannot catch it; later calls are refused, and the
        second of them ends the program's code.

        Args:
            question: hash of the request: of everything that says who does what.
            describe: returns the request in words, for the message of a mismatch.
            kind: kind of the entry.
            do: performs the call.
            repeats: for a call that is code which runs again on re-execution: returns how its new entry differs from
                the recorded one, as two clauses. The recorded entry is returned.
            memoised: name of a call that is not run again on re-execution; it may make no calls itself.
            limit: the episode's time limit, if it is paused meanwhile; for a `memoised` call.
            recalled: called with the recorded end of a call without a value.

        Raises:
            LimitReachedError: a limit refused the call, or cut it.
            asyncio.CancelledError: the call was cancelled, or the episode has ended.
        """
        try:
            if self._stopped or self.failure is not None:
                await self._wait_for_the_end()
            call = self.open(question, describe)
            del question  # a call in flight holds no more than it needs
            strand = call.strand
            assert strand is not None
            strand.inside += 1
            try:
                if repeats is None:
                    if call.waits and (recorded := await self.reach(call, describe, kind)) is not None:
                        return recorded
                    self.end_at_new(call.call_id, "a new call")
                    del describe
                if memoised is None:
                    entry = await do(call)
                else:
                    with strand.executing(memoised, limit):
                        entry = await do(call)
                is_replayed = call.recorded is not None or self.order.queue  # the code may have made calls
                if repeats and is_replayed and (recorded := await self.reach(call, describe, kind)) is not None:
                    if (difference := repeats(recorded, entry)) is not None:
                        self.mismatch(call.call_id, *difference)
                    return recorded
                self.record(call, entry)  # type: ignore[arg-type]
                return entry
            except (asyncio.CancelledError, LimitReachedError) as end:
                raise await self._end_without_value(call, end, recalled)  # noqa: B904 - the same one, or one of the limit
            finally:
                strand.inside -= 1
        except (EffectError, LimitReachedError):
            raise
        except AgentRLError as error:
            self.end_with(error)

    def answer(
        self,
        question: bytes,
        describe: Callable[[], str],
        kind: type[Body],
        make: Callable[[JournaledCall], Body],
        act: Callable[[JournaledCall, Body], object] = lambda call, entry: None,
    ) -> Body:
        """Make a call that waits for nothing; see `call`. `make` returns the entry of a new one, and `act` does what
        every execution does."""
        try:
            call = self.open(question, describe)
            if call.recorded is not None:
                entry = self.recall(call, kind)
            else:
                entry = make(call)
                self.record(call, entry)  # type: ignore[arg-type]
            act(call, entry)
            return entry
        except AgentRLError as error:
            self.end_with(error)

    def open(self, question: Question, describe: Callable[[], str]) -> JournaledCall:
        """Open the next call of the calling strand; see `call`.

        Raises:
            UnstructuredConcurrencyError: the call is made by another task, inside an effect, or after the episode's
                end.
            ReplayMismatchError: the journal holds another request under this id.
            asyncio.CancelledError: the episode has ended, or was stopped.
        """
        strand = current_strand()
        if self._ended:
            raise UnstructuredConcurrencyError(
                f"ctx or an agent of episode {self._episode_id} was used after its run() had returned. Act and reward "
                "before run() returns; do not keep ctx or an agent beyond the end of the episode"
            )
        if strand.memoised is not None:
            raise UnstructuredConcurrencyError(
                f"ctx or an agent of episode {self._episode_id} was used inside {strand.memoised}, which is not run "
                "again on re-execution. Use them before or after it"
            )
        if self._stopped or self.failure is not None:
            raise asyncio.CancelledError
        if self._cancelled_calls:
            self.settle()
        while self._recorded.regraded and ids.call_id(strand.path, strand.calls) in self._recorded.regraded:
            strand.calls += 1
        strand.timers = ()
        number = strand.calls
        strand.calls = number + 1
        call_id = ids.call_id(strand.path, number)
        if self._recorded.is_empty:
            return JournaledCall(call_id, question, None, strand, number, len(self.order.strands) > 1)
        entry = self._recorded.get(call_id)
        strand.use(self._recorded.keys.get(entry.episode_id, self._key) if entry else self._key)
        if entry is None:
            entry = self._recorded.answers.get(call_id)
        edits = self._recorded.edits.get(call_id, ())
        if entry is None:
            return JournaledCall(call_id, question, None, strand, number, edits=edits)
        is_inherited, asked = entry.episode_id != self._episode_id, entry.request_hash
        call = JournaledCall(call_id, question, entry.decode(), strand, number, True, asked, is_inherited, edits=edits)
        if isinstance(question, bytes):
            self._compare(call, describe)
        return call

    def _compare(self, call: JournaledCall, describe: Callable[[], str]) -> None:
        """Refuse a recorded call that now has another request; a call cancelled before it asked has none."""
        has_asked = call.recorded_hash or not isinstance(call.recorded, UnansweredEntry)
        if call.recorded is not None and has_asked and call.recorded_hash != call.request_hash:
            now = f"the code now asks {printable_excerpt(describe())}"
            self.mismatch(call.call_id, f"the journal holds {describe_entry(call.recorded)}", now)

    def end_at_new(self, call_id: str, act: str) -> None:
        """End a replay at a call that is not recorded."""
        if self._on_new is not None:
            raise self._on_new.error(call_id, act)

    def check_repeatable(self, call: JournaledCall, name: str) -> None:
        """Refuse to run code again that the time limit cut, and whose calls do not say where.

        Raises:
            EpisodeError: the call is recorded as cut.
        """
        if isinstance(call.recorded, UnansweredEntry) and call.recorded.stop_reason:
            why = f"{name} was ended by the time limit, so what it did until then cannot be repeated"
            raise EpisodeError(why, reason="resource_lost")

    # --- calls named by their content ---------------------------------------------------------------------------------

    def begin_external(self, *, recall: bool) -> None:
        """Note that the calls of an external agent begin; unless `recall`, no reply of an earlier attempt is recalled.

        Raises:
            EpisodeError: it died with its process, or must not run again.
        """
        episode = f"episode {self._episode_id}"
        if self._on_new is None and self._is_resumed:
            raise EpisodeError(
                f"{episode}: its external agent died with its process; the episode starts over, with the same replies "
                "to the same requests",
                reason="harness_lost",
                begin_again=True,
            )
        if self._on_new is not None and not recall:
            raise EpisodeError(
                f"{episode}: its program must not run again (replay_stable = False), so the episode cannot be replayed",
                reason="resource_lost",
            )
        self._named = {}
        if not recall:
            self._recorded.answers = _NONE

    async def call_named(
        self,
        prefix: str,
        digest: bytes,
        asks: Callable[[JournalEntry], bool],
        turn_over: Callable[[], Awaitable[None]],
        inherit: Callable[[JournaledCall, TurnEntry], T],
        recall: Callable[[JournaledCall, TurnEntry], T],
        do: Callable[[JournaledCall], Awaitable[T]],
    ) -> T:
        """Make a call named by its content, on no strand: a request to the gateway. Equal contents are two calls.

        Parallel requests may arrive in another order than the turns that a fork inherits; each waits at most `ORDER_S`
        for those before it.

        Args:
            prefix: part of the call's id that its seat and content determine.
            digest: hash of the request.
            asks: whether a recorded call with this content has the same messages, volatile text included.
            turn_over: waits until another call has ended.
            inherit: takes over a reply that a fork inherits.
            recall: takes over a reply of an earlier attempt.
            do: performs the call.

        Raises:
            UnstructuredConcurrencyError: the episode has ended.
            asyncio.CancelledError: the episode was stopped.
        """
        used, recorded = self._named.setdefault(prefix, set()), self._recorded
        same = (each.call_id for each in recorded.named(prefix) if each.call_id not in used and asks(each))
        call_id = next(same, "") or next(name for n in count() if (name := f"{prefix}{n}") not in used)
        used.add(call_id)
        if self._ended:
            self._refuse(call_id)
        if self._stopped:
            raise asyncio.CancelledError
        inherited, answer = recorded.get(call_id), recorded.answers.pop(call_id, None)
        entry = inherited or (None if answer is None or answer.request_hash != digest else answer)
        body, edits = entry.decode() if entry else None, recorded.edits.get(call_id, ())
        call = JournaledCall(call_id, digest, body, is_inherited=inherited is not None, edits=edits)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ORDER_S):
                while (inherited or not entry) and recorded.first_inherited(prefix) not in (None, inherited):
                    await turn_over()
        recorded.remove(call_id)
        try:
            if isinstance(call.recorded, TurnEntry):
                return (inherit if call.is_inherited else recall)(call, call.recorded)
            result = await do(call)
        except EngineError as error:
            self.fail(error)
            raise
        await self.flush()
        return result

    def inherits_turns(self, seat: str) -> bool:
        """Whether inherited turns remain to be requested by a seat's external agent."""
        return self._recorded.first_inherited(seat) is not None

    def unasked_turns(self, seat: str) -> list[TurnEntry]:
        """Return the recorded turns that a seat's external agent has not requested.

        A fork's inherited turns come first; once all are requested, the newest attempt's, which has all its requests.
        """
        entries = self._recorded.inherited_turns(seat) or self._recorded.answers_left()
        turns = (entry.decode() for entry in entries)
        return [turn for turn in turns if isinstance(turn, TurnEntry) and turn.seat == seat]

    def record_again(self, call: JournaledCall, body: TurnEntry) -> None:
        """Append a turn of an earlier attempt to this one; raises as `record`."""
        if self._on_new is not None:
            self._on_new.came_back(call.call_id, body)
        else:
            self.record(call, body)

    def check_new(self, call: JournaledCall, difference: str) -> None:
        """Check a named call before it is performed. A fork refuses it while inherited turns remain to be requested; a
        replay always refuses it.

        Args:
            call: a call that is not recorded.
            difference: difference from a recorded call that was not made yet; empty if there is none.

        Raises:
            ReplayMismatchError: the call is refused.
        """
        if self._on_new is not None and difference:
            self.mismatch(call.call_id, DIFFERENT_REQUEST, difference, remedy=REPLAY_REMEDY)
        self.end_at_new(call.call_id, "a turn that was not requested in the recording")
        if self.inherits_turns(call.call_id.rpartition(":")[0]):
            now = f"{difference}; fork at turn 0 to sample with the program as it is now"
            self.mismatch(call.call_id, DIFFERENT_REQUEST, now, remedy=FORK_REMEDY)

    # --- the steps of a call ------------------------------------------------------------------------------------------

    async def reach(self, call: JournaledCall, describe: Callable[[], str], kind: type[Body]) -> Body | None:
        """Wait until the call is due: replay has reached it or, if it is new, has finished. Returns its recorded body.

        Raises:
            asyncio.CancelledError: the call is cancelled, now or in the journal.
            LimitReachedError: a limit refused or cut the call when it was recorded.
            ReplayMismatchError: the code no longer makes the recorded call that is next, or asks something else.
        """
        strand = call.strand
        assert strand is not None
        if isinstance(call.recorded, UnansweredEntry):
            await self._reach_end(call, call.recorded)
        await self.wait_until_due(call)
        if self._stopped:
            raise asyncio.CancelledError
        if call.recorded is None and strand.is_early:
            await self._meet_early_timer(strand)
        self._compare(call, describe)
        return None if call.recorded is None else self.recall(call, kind)

    async def wait_until_due(self, call: JournaledCall) -> None:
        """Wait for a call's place in the replay order, although an early timer expires."""
        assert call.strand is not None
        while True:
            try:
                return await self.order.wait(call.strand, call.number)
            except asyncio.CancelledError:
                if not self.holds_back(call):
                    raise

    def holds_back(self, call: JournaledCall) -> bool:
        """Whether a cancellation that reached a call during replay is held back: a timer may have started earlier than
        it did when the call was recorded. The strand's next new call meets the expired timer."""
        is_over = self._stopped or self.failure is not None or not self.order.queue
        is_cut = isinstance(call.recorded, UnansweredEntry)
        return not is_over and not is_cut and call.strand is not None and call.strand.holds_back()

    async def _meet_early_timer(self, strand: Strand) -> None:
        """Cancel the running call if a timer has expired that was held back."""
        (await strand.interrupt()).uncancel()
        timer = strand.expired_timer()
        strand.is_early = timer >= 0
        if strand.is_early:
            await self._end_block(strand, timer)
            raise asyncio.CancelledError

    async def _end_block(self, strand: Strand, number: int) -> None:
        """Prepare the running task for a cancellation that ends the block of a timer, and no block inside it.

        Args:
            strand: the running strand.
            number: as `UnansweredEntry.timer`.
        """
        task = await strand.interrupt()
        for timer in strand.timers[number : number + 1]:
            while not (timer.expired() or self._stopped):
                timer.reschedule(asyncio.get_running_loop().time())
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.get_running_loop().create_future()
        # A block ends with its timer's error if no other cancellation is left: each expired one inside takes one away.
        cancellations = 1 + sum(inner.expired() for inner in strand.timers[number + 1 :])
        for _ in range(task.cancelling() - cancellations):
            task.uncancel()
        for _ in range(cancellations - task.cancelling()):
            await strand.interrupt()

    async def _reach_end(self, call: JournaledCall, entry: UnansweredEntry, *, cancelled: bool = False) -> NoReturn:
        """Raise the recorded end of a call where it is due."""
        await self.wait_for_cut(call, entry, cancelled=cancelled)
        assert call.strand is not None
        self.order.forget_dismissed(call.strand)
        call.has_ended = True
        self._returned(call)
        if not entry.stop_reason:
            raise asyncio.CancelledError
        self.is_over_time |= entry.stop_reason == TIME_LIMIT
        raise LimitReachedError(entry.message, stop_reason=entry.stop_reason)

    async def wait_for_cut(self, call: JournaledCall, entry: UnansweredEntry, *, cancelled: bool = False) -> None:
        """Wait for a recorded end's place in the replay order; for a cancellation, also for the task that cancels."""
        strand = call.strand
        assert strand is not None
        cancelled = cancelled and not strand.holds_back()
        while True:
            try:
                await self.order.wait(strand, call.number)
                break
            except asyncio.CancelledError:
                if self._stopped:
                    raise
                cancelled |= not strand.holds_back()
        waits = entry.timer < 0 and not entry.stop_reason
        while waits and not (cancelled or strand.is_dismissed or self._stopped or self.failure is not None):
            strand.awaits_cancellation = True
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled = not strand.holds_back()
        strand.awaits_cancellation = False
        if entry.timer >= 0 or (strand.is_early and not entry.stop_reason):
            await self._end_block(strand, entry.timer)
        if self._stopped:
            raise asyncio.CancelledError

    def recall(self, call: JournaledCall, kind: type[Body]) -> Body:
        """Return the recorded body of a call, which must be of a kind, and mark the call as returned.

        Raises:
            ReplayMismatchError: the entry is of another kind.
        """
        assert call.recorded is not None
        if not isinstance(call.recorded, kind):
            now = f"the code now makes a {kind.__name__}"
            self.mismatch(call.call_id, f"the journal holds {describe_entry(call.recorded)}", now)
        self._returned(call)
        return call.recorded

    async def _end_without_value(
        self,
        call: JournaledCall,
        end: asyncio.CancelledError | LimitReachedError,
        recalled: Callable[[UnansweredEntry], None] | None,
    ) -> asyncio.CancelledError | LimitReachedError:
        """Record and return the end of a call that was cancelled, refused or cut; raised here, it would be in a cycle.

        Raises:
            LimitReachedError: a limit refused or cut it when it was recorded.
            asyncio.CancelledError: it was cancelled when it was recorded.
            ReplayMismatchError: it ended otherwise when it was recorded.
        """
        if recalled is not None and call.has_ended and isinstance(call.recorded, UnansweredEntry):
            recalled(call.recorded)
        if call.has_ended or self._stopped:
            return end
        if self.failure is not None:  # whatever ends a call after the episode's end, the end cancels it
            end = asyncio.CancelledError()
        strand, recorded, is_limit = call.strand, call.recorded, isinstance(end, LimitReachedError)
        assert strand is not None
        if isinstance(recorded, UnansweredEntry) and (recorded.stop_reason or not is_limit):
            await self._reach_end(call, recorded, cancelled=not is_limit)
        if recorded is not None and is_limit:
            now = f"the code now reaches a limit ({end})"
            self.mismatch(call.call_id, f"the journal holds {describe_entry(recorded)}", now)
        if not isinstance(end, LimitReachedError):
            if recorded is not None or not self.cut(strand):
                call.timer = strand.expired_timer()
                self.cancel(call)
                return end
            end = self.time_is_up()
        if self.order.next_id is not None:  # code that runs again began before its calls were due
            await self.order.wait(strand, call.number)
        self.record(call, UnansweredEntry(end.stop_reason, str(end), call.suspended_at, call.state))
        return end

    def time_is_up(self) -> LimitReachedError:
        """Make the error of a call that the time limit ends or prevents."""
        text = f"episode {self._episode_id} was too long without a turn (episode_timeout_s)"
        return LimitReachedError(text, stop_reason=TIME_LIMIT)

    async def _wait_for_the_end(self) -> NoReturn:
        """Refuse a call after the episode's end; the second one ends the code that made it.

        Raises:
            asyncio.CancelledError: always.
        """
        if self._is_told:
            self.abandon()
            await asyncio.get_running_loop().create_future()
        self._is_told = True
        raise asyncio.CancelledError

    def record(self, call: JournaledCall, body: EntryBody) -> None:
        """Append the entry of a call that was performed.

        Raises:
            UnstructuredConcurrencyError: the episode has ended.
            ReplayMismatchError: the journal has a hole where this entry belongs.
            AgentRLError: the episode has failed.
        """
        if self._ended:
            self._refuse(call.call_id)
        if self.failure is not None:
            raise asyncio.CancelledError  # calls after a failure are not recorded
        if self._cancelled_calls:
            self.settle()
        if self._on_new is not None:
            self.end_at_new(call.call_id, describe_entry(body))
        if not self._recorded.is_empty:
            self._check_no_later(call, body)
        if type(body) is TurnEntry:
            body = move_routing(body, self._log, self._episode_id, self._attempt)
        asked = call.question if type(call.question) is bytes else b""  # a call may be cancelled before it asks
        entry = JournalEntry(self._episode_id, self._attempt, call.call_id, asked, encode_body(body))
        self._log.append(entry)
        self._count(entry)

    def _refuse(self, call_id: str) -> NoReturn:
        where = f"episode {self._episode_id}, call {call_id}"
        raise UnstructuredConcurrencyError(f"{where}: the episode ended while the call was waiting")

    def _check_no_later(self, call: JournaledCall, body: EntryBody) -> None:
        """Refuse an entry where a later call of its strand is recorded.

        Raises:
            ReplayMismatchError: the journal has a hole where this entry belongs.
        """
        later = None if call.strand is None else self.order.after(call.strand.path, call.number)
        if later is not None and not isinstance(body, UnansweredEntry):
            then = f"the journal holds call {later} of the same strand and not this one before it: entries are missing"
            self.mismatch(call.call_id, then, "the code now makes it")

    def reward(self, body: RewardEntry) -> RewardEntry:
        """Write a reward, or recall it with its recorded weight; raises as `open` and `record`."""
        if self._recorded.is_regraded:
            return body
        agent = encode((body.seat, body.index, body.turn))
        digest = request_hash(agent, struct.pack("<d", body.value), body.name.encode())
        return self.answer(digest, lambda: describe_entry(body), RewardEntry, lambda call: body)

    # --- scores -------------------------------------------------------------------------------------------------------

    def recorded_scores(self) -> list[JournalEntry]:
        """Return the entries of recorded scores, inherited ones included."""
        return self._recorded.scores()

    def record_score(self, call_id: str, body: EntryBody) -> None:
        """Append a score when it arrives, unless the episode has ended or will continue elsewhere.

        Unlike `record`, this does not settle cancelled calls: the scorer's task says nothing about the program.
        """
        if not (self._ended or self._stopped):
            entry = JournalEntry(self._episode_id, self._attempt, call_id, b"", encode_body(body))
            self._log.append(entry)
            self._count(entry)

    # --- entries without a number ------------------------------------------------------------------------------------

    def begin(self, make: Callable[[], BeginEntry]) -> BeginEntry:
        """Return the first entry, recorded or made by `make()`; notes the hash of the code then and now."""
        first_entry = make()
        call = self._open_unnumbered(BEGIN)
        if call.recorded is not None:
            begin = self.recall(call, BeginEntry)
        else:
            if self.written:
                self.mismatch(BEGIN, "the journal holds entries of this attempt and not its beginning", "it is missing")
            begin = first_entry
            self.record(call, first_entry)
        self.code_hash, self.code_hash_then = first_entry.code_hash, begin.code_hash
        self.purpose = begin.purpose
        self.own_random = begin.own_random
        return begin

    def intend(self, call: JournaledCall, name: str, *, may_repeat: bool) -> bool:
        """Record that a `once` call is about to be performed; returns False if that was already recorded."""
        intent = self._open_unnumbered(f"{call.call_id}!")
        if intent.recorded is not None:
            self.recall(intent, EffectIntentEntry)
            return False
        self.record(intent, EffectIntentEntry(name, may_repeat))
        return True

    def patched(self, name: str) -> bool:
        strand = current_strand()
        is_patched = strand.patches.get(name)
        if is_patched is None:
            call = self._open_unnumbered(f"{strand.path}@{name}")
            is_patched = call.recorded is not None
            if is_patched:
                self.recall(call, NondeterministicValueEntry)
            elif not self.order.has_under(strand.path):
                self.record(call, NondeterministicValueEntry("patch", name))
                is_patched = True
            strand.patches = {**strand.patches, name: is_patched}
        return is_patched

    @property
    def forked_from(self) -> BeginEntry | None:
        """First entry of the episode from which this one was forked."""
        return self._recorded.forked_from

    @property
    def partition(self) -> str:
        """Name of the partition to which entries are appended."""
        return self._log.name

    async def flush(self) -> None:
        """Wait until everything written is on disk."""
        await self._log.flush()

    def _open_unnumbered(self, call_id: str) -> JournaledCall:
        entry = self._recorded.get(call_id)
        return JournaledCall(call_id, b"", None if entry is None else entry.decode())

    # --- strands -----------------------------------------------------------------------------------------------------

    def enter(self, path: str) -> Strand:
        """Make a new strand; the task that will own it calls its `begin`."""
        next_call = self.order.next_id
        entry = None if next_call is None else self._recorded.get(next_call)
        strand = Strand(path, self._recorded.keys.get(entry.episode_id, self._key) if entry else self._key)
        self.order.strands.append(strand)
        return strand

    def dismiss(self, strands: Iterable[Strand]) -> None:
        """Cancel strands, each where the journal records its cancellation, else now."""
        for strand in strands:
            self.order.dismiss(strand, now=self._stopped)

    def begin_steps(self, strand: Strand, program: Callable[[], Awaitable[Any]]) -> GuardedAwaitable:
        """Return the code of a strand, begun by `program`, as an awaitable; call `end_steps` afterward.

        The code has its own global random generators, or must not draw from them; a detected draw fails the episode.
        """
        guard: CoroutineStepGuard | None = None
        if self.own_random:
            guard = GlobalRandomState(ids.stable_hash64("branch", *strand.key, strand.path))
        elif self.detects_draws:
            guard = RandomDrawDetector()
        strand.steps = StrandSteps(guard, program, None if guard is None else self.drew)
        strand.steps.strand = strand
        return strand.steps

    @property
    def program(self) -> Awaitable[Any] | None:
        """The code of the root strand; None while it does not run."""
        root = next((strand for strand in self.order.strands if strand.path == ids.ROOT_STRAND), None)
        return None if root is None or root.steps is None else root.steps.begun

    def end_steps(self, strand: Strand) -> None:
        """Note that the code of a strand has ended."""
        if strand.steps is not None:
            strand.steps.close()
            strand.steps = None

    def abandon(self) -> None:
        """End the code of all strands immediately."""
        self.order.abandon()
        for strand in self.order.strands:
            if strand.path == ids.ROOT_STRAND and strand.owner is not None:
                self.cancellations += 1
                strand.owner.cancel()

    # --- cancellation and the end -------------------------------------------------------------------------------------

    def cancel(self, call: JournaledCall) -> None:
        """Note that a call was cancelled in flight. It is recorded when it is known that the episode itself cancelled
        it.

        A call of a strand that ends during replay is not recorded, because it was not recorded originally.
        """
        is_replaying = self.order.next_id is not None and call.strand is not None and call.strand.is_dismissed
        if not self._stopped and not is_replaying:
            self._cancelled_calls = (*self._cancelled_calls, call)

    def cut_calls(self, error: EpisodeError) -> bool:
        """Note that the time limit is about to cancel the program: calls in flight raise `LimitReachedError`. Without
        one, the episode ends with `error`. Returns whether it may: not twice, nor before the recorded calls returned.
        """
        if self.is_over_time or self.order.next_id is not None:
            return False
        self.is_over_time = True
        self.cut_error = error
        return True

    def cut(self, strand: Strand) -> bool:
        """Handle a cancellation that reached a call; returns whether it came from the time limit."""
        task = asyncio.current_task()
        if self.cut_error is None or self.failure is not None or task is None:
            return False
        task.uncancel()
        if strand.path == ids.ROOT_STRAND:  # the last to be cancelled
            self.cut_error = None
            self.cancellations -= 1
        return True

    def settle(self) -> None:
        """Record the cancelled calls: the episode continues, so it cancelled them itself."""
        calls, self._cancelled_calls = self._cancelled_calls, ()
        for call in calls:
            self.record(call, UnansweredEntry(suspensions=call.suspended_at, state=call.state, timer=call.timer))

    def stop(self) -> None:
        """Record nothing more: the episode is about to be cancelled from outside, to be resumed later."""
        self._stopped = True

    def drew(self) -> None:
        """Note that the episode's code drew from the process's global random generators."""
        self.fail(GlobalRandomError(self._episode_id))

    def fail(self, error: AgentRLError) -> None:
        """Note that the program cannot continue. A limit truncates the episode, so the calls that its end cancels are
        recorded; after other errors nothing is."""
        self.failure = self.failure or error
        if not isinstance(self.failure, LimitReachedError):
            self.stop()
            self._cancelled_calls = ()

    def end_with(self, error: AgentRLError) -> NoReturn:
        """End the episode with an error that its program cannot catch.

        Raises:
            asyncio.CancelledError: the runner raises the error.
            UnstructuredConcurrencyError: the error is one: of a task of its own, which no cancellation may end in
                silence.
        """
        self.fail(error)
        raise (error if isinstance(error, UnstructuredConcurrencyError) else asyncio.CancelledError()) from error

    def reopen(self) -> None:
        """Record again: a limit has ended the program, and the episode is truncated."""
        self.failure, self._stopped = None, False

    def finish(self) -> None:
        """Check the journal after the program of the episode has returned.

        Raises:
            ReplayMismatchError: the program made fewer calls than the journal holds.
        """
        self.settle()
        if self.order.next_id is not None:
            raise self._stray(self.order.next_id)

    def end(self) -> None:
        """Refuse further calls, and break reference cycles so that the episode is freed at once."""
        self._ended = True
        self.order.close()

    @property
    def is_stopped(self) -> bool:
        """Whether the episode was cancelled from outside."""
        return self._stopped

    # --- differences --------------------------------------------------------------------------------------------------

    def mismatch(self, call_id: str, then: str, now: str, *, remedy: str = REMEDY) -> NoReturn:
        """Stop the execution at a call that differs from the journal; for the arguments, see `replay_mismatch`.

        Raises:
            ReplayMismatchError: always.
        """
        raise self._mismatch(call_id, then, now, remedy)

    def _mismatch(self, call_id: str, then: str, now: str, remedy: str = REMEDY) -> ReplayMismatchError:
        code_then = self.code_hash_then
        if code_then == self.code_hash and self.forked_from is not None:
            code_then = self.forked_from.code_hash  # a new fork differs from the episode that it was forked from
        return replay_mismatch(self._episode_id, call_id, then, now, code=(code_then, self.code_hash), remedy=remedy)

    def _stray(self, call_id: str) -> ReplayMismatchError:
        entry = self._recorded.get(call_id)
        assert entry is not None
        then = f"the journal holds {describe_entry(entry.decode())}"
        return self._mismatch(call_id, then, "the code now makes no such call")

    def _returned(self, call: JournaledCall) -> None:
        call_id = call.call_id
        if self._recorded.remove(call_id):
            self.order.returned(call_id)
            if self._on_new is not None and call.strand is not None and call.recorded is not None:
                self._on_new.came_back(call_id, call.recorded)
        elif (answer := self._recorded.answers.pop(call_id, None)) is not None:
            self._log.append(answer)
            self._count(answer)

    def _count(self, entry: JournalEntry) -> None:
        self.digest = extend_digest(self.digest, entry)
        self.written += 1


class RepeatedCode:
    """Code of a call that runs again on re-execution, such as an internal tool.

    Its own suspensions are counted. Where the journal says that it was cancelled or cut at one of them, it is cancelled
    there again.
    """

    __slots__ = ("_call", "_journal", "code")

    def __init__(self, journal: CallJournal, call: JournaledCall, code: Coroutine[Any, Any, Any]) -> None:
        self._journal, self._call, self.code = journal, call, code

    def __await__(self) -> Generator[Any, Any, Any]:
        call, steps = self._call, self.code.__await__()
        strand, end = call.strand, call.recorded if isinstance(call.recorded, UnansweredEntry) else None
        assert strand is not None
        depth, suspensions, thrown = strand.inside, 0, None
        while True:
            try:
                waits_for = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as stop:
                return stop.value
            is_own = strand.inside == depth
            suspensions += is_own
            thrown = None
            try:
                if is_own and end is not None and suspensions == end.suspensions:
                    if waits_for is not None:
                        waits_for._asyncio_future_blocking = False
                        waits_for.cancel()
                    yield from self._journal.wait_for_cut(call, end).__await__()
                    raise asyncio.CancelledError
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - thrown into the code
                thrown = error
                call.suspended_at = suspensions if is_own else 0


class StrandSteps(GuardedAwaitable):
    """The running code of a strand."""

    __slots__ = ("strand",)
    strand: Strand

    def interrupted(self) -> None:
        """Note the timers around the place where the code waits."""
        self.strand.timers = open_timers(self.begun)


def open_timers(code: Any) -> list[asyncio.Timeout]:
    """Return the timers of the `asyncio.timeout` blocks around the place where a coroutine waits, outermost first.

    The method that ends a block is on the stack of the block's frame.
    """
    timers: list[asyncio.Timeout] = []
    while code is not None:
        found = gc.get_referents(code)
        timers += [m.__self__ for m in found if type(m) is MethodType and type(m.__self__) is asyncio.Timeout]
        repeated = next((each.code for each in found if type(each) is RepeatedCode), None)
        code = repeated or getattr(code, "cr_await", None) or getattr(code, "gi_yieldfrom", None)
    return timers


_NONE: dict[Any, Any] = {}
"""Shared empty dict of most episodes; never added to."""

_NO_PATCHES: Mapping[str, bool] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Strand:
    """A sequence of calls: the root's, or those of one coroutine of a `gather`."""

    path: str
    _key: StreamKey = (0, 0)
    owner: asyncio.Task[object] | None = None
    is_open: bool = True
    """Whether the strand has not ended; True also before it begins."""
    calls: int = 0
    inside: int = 0
    """Number of calls in progress, each inside the one before it."""
    resources: int = 0
    memoised: str | None = None
    """Name of the effect or external tool that runs on the strand, which may make no calls meanwhile."""
    paused: AbstractContextManager[None] | None = None
    """The episode's time limit, if it is paused meanwhile."""
    is_blocked: bool = False
    """Whether only another strand of the episode can wake this one."""
    awaits_cancellation: bool = False
    """Whether the strand waits at a call that is recorded as cancelled."""
    is_dismissed: bool = False
    """Whether the strand's gather has cancelled it: it ends where the journal records its end, else now."""
    children: Sequence[Strand] = ()
    """Strands of the gather that this strand awaits, unless that gather is recorded."""
    task: asyncio.Task[object] | None = None
    """Task that runs the strand, also before the strand has begun."""
    steps: StrandSteps | None = None
    """Running steps of the strand's code."""
    timers: Sequence[asyncio.Timeout] = ()
    """Timers around the strand's code where it was interrupted last, outermost first."""
    is_early: bool = False
    """Whether a timer may have expired earlier than when the calls were recorded."""
    patches: Mapping[str, bool] = field(default_factory=lambda: _NO_PATCHES)
    speaker: int | None = None
    """Number of the agent that acted last on the strand, or on its parent before it began."""
    _rng: random.Random | None = None

    def executing(self, memoised: str, paused: AbstractContextManager[None] | None = None) -> Strand:
        """Return the strand as a context in which code runs that is not run again on re-execution: its draws from
        global random generators do not count. A call in flight holds no further object.

        Raises:
            CancelledError: the strand has already drawn from global random generators.
        """
        self.memoised, self.paused = memoised, paused
        return self

    def __enter__(self) -> None:
        if self.steps is not None:
            self.steps.suspend_guard()
        if self.paused is not None:
            self.paused.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self.paused is not None:
            self.paused.__exit__(None, None, None)
        self.memoised = self.paused = None
        if self.steps is not None:
            self.steps.resume_guard()

    def expired_timer(self) -> int:
        """Return the number of the outermost of `timers` that has expired; -1 if none has, or if something else has
        cancelled the running task too, and so ends all blocks."""
        expired = [timer.expired() for timer in self.timers]
        is_timer = any(expired) and self.owner is not None and self.owner.cancelling() <= sum(expired)
        return expired.index(True) if is_timer else -1

    def holds_back(self) -> bool:
        """Hold back a cancellation of the running task if a timer made it; returns whether it is held back."""
        is_held = self.expired_timer() >= 0
        self.is_early |= is_held
        return is_held

    async def interrupt(self) -> asyncio.Task[Any]:
        """Cancel the running task, and return it: `timers` are then those of the running call."""
        assert self.owner is not None
        self.owner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return self.owner

    @property
    def key(self) -> StreamKey:
        """Seed and attempt of the strand's randomness at this point."""
        return self._key

    @property
    def rng(self) -> random.Random:
        """The strand's own random stream."""
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


_strand: ContextVar[Strand] = ContextVar("agentrl_strand")


def current_strand() -> Strand:
    """The calling task's strand.

    Raises:
        UnstructuredConcurrencyError: the task was not started through the context.
    """
    strand = _strand.get(None)
    try:
        task = asyncio.current_task()
    except RuntimeError:  # raised in a tool's thread
        task = None
    if strand is None or strand.owner is not task:
        name = "a callback" if task is None else f"task {getattr(task.get_coro(), '__qualname__', task.get_name())}"
        program = getattr(getattr(strand, "steps", None), "begun", None)
        frames = [*user_frames(sys._getframe())[0], *reversed(suspended_frames(program))]
        place = next((f" at {frame_location(frame)}" for frame in frames if is_user_code(frame.f_code.co_filename)), "")
        raise UnstructuredConcurrencyError(
            f"{name}{place} used ctx or an agent outside run(): start concurrent work with `await ctx.gather(...)`, "
            "and act and reward in run() itself, before it returns"
        )
    return strand


def running_strand() -> Strand | None:
    """Return the strand whose code is running, or None outside episodes; for observers."""
    return _strand.get(None)


def begin_strand(strand: Strand) -> None:
    """Make the running task the owner of a strand."""
    strand.owner = asyncio.current_task()
    _strand.set(strand)


_NONE_LEFT: set[str] = set()


class OnNew(Protocol):
    """A replay: what happens to recorded calls that return, and at the first call that is not recorded."""

    def came_back(self, call_id: str, body: EntryBody) -> None:
        """Receive a recorded call that has returned."""
        ...

    def error(self, call_id: str, act: str) -> AgentRLError:
        """Return the error that ends the replay at a call that is not recorded."""
        ...


class Prefix:
    """The recorded calls of an attempt that have not returned yet, keyed by id. Usable once.

    Args:
        entries: entries in the order in which they were appended. A fork's begin with those before the fork point,
            including each ancestor's `begin`.
        own_from: number of entries that a fork inherits; the others are the attempt's own.
        fork: where the episode was forked, with the messages that replace the program's, keyed by call id.
        answers: recorded calls that may be recalled at any time, in no order; the checker uses them to repeat the
            answers of the outside world.
        regraded: whether the program's rewards are left out, and given again.
    """

    __slots__ = ("_entries", "answers", "edits", "forked_from", "is_empty", "is_regraded", "keys", "own", "regraded")

    def __init__(
        self,
        entries: Sequence[JournalEntry],
        own_from: int = 0,
        *,
        fork: ForkPoint | None = None,
        answers: Iterable[JournalEntry] = (),
        regraded: bool = False,
    ) -> None:
        keys: dict[str, StreamKey] = {}
        calls: dict[str, JournalEntry] = {}
        edits = {} if fork is None else dict(fork.edits)
        self.own = entries[own_from:]
        """The attempt's own entries."""
        self.forked_from: BeginEntry | None = None
        """First entry of the episode from which this one was forked."""
        for number, entry in enumerate(entries):
            if entry.call_id == BEGIN and number < own_from:
                begin = entry.decode()
                assert isinstance(begin, BeginEntry)
                keys[entry.episode_id] = (begin.seed, entry.attempt)
                edits |= {} if begin.fork is None else begin.fork.edits
                self.forked_from = begin
            else:
                calls[entry.call_id] = entry
        self.keys: Mapping[str, StreamKey] = keys or _NONE
        """Seed and attempt of each ancestor of a fork."""
        self.edits: Mapping[str, Sequence[Mapping[str, Any]]] = edits or _NONE
        self.answers = {entry.call_id: entry for entry in answers} or _NONE
        rewards = (call_id for call_id, entry in calls.items() if isinstance(entry.decode(), RewardEntry))
        self.is_regraded = regraded
        self.regraded = set(filter(ids.has_call_number, rewards)) if regraded else _NONE_LEFT
        """Ids of the rewards that are left out."""
        self._entries = {call_id: entry for call_id, entry in calls.items() if call_id not in self.regraded} or _NONE
        self.is_empty = not (entries or self.answers or self.edits)
        """Whether nothing was recorded."""

    def numbered(self) -> Iterator[str]:
        """Yield the ids of calls that return in order, in the order in which they were appended."""
        return filter(ids.has_call_number, self._entries)

    def scores(self) -> list[JournalEntry]:
        """Return the entries of recorded scores."""
        return [entry for call_id, entry in self._entries.items() if ids.is_score(call_id)]

    def get(self, call_id: str) -> JournalEntry | None:
        """Return the entry of a call that has not returned yet; answers are left out."""
        return self._entries.get(call_id)

    def remove(self, call_id: str) -> bool:
        """Remove a call that has returned; returns whether it was recorded."""
        return self._entries.pop(call_id, None) is not None

    def answers_left(self) -> list[JournalEntry]:
        """Return unused answers, except answers found only in attempts before the newest one."""
        newest = max((entry.attempt for entry in self.answers.values()), default=0)
        return [entry for entry in self.answers.values() if entry.attempt == newest]

    def inherited_turns(self, seat: str) -> list[JournalEntry]:
        """Return the inherited turns of a seat's external agent that have not been requested yet."""
        return [entry for call_id, entry in self._entries.items() if call_id.startswith(f"{seat}:")]

    def first_inherited(self, seat: str) -> JournalEntry | None:
        """Return the first of `inherited_turns`; `seat` may be followed by the rest of a call id."""
        return next(iter(self.inherited_turns(seat.partition(":")[0])), None)

    def named(self, prefix: str) -> list[JournalEntry]:
        """Return inherited entries and unused answers whose ids have a prefix."""
        named = self.answers | self._entries
        return [entry for call_id, entry in named.items() if call_id.startswith(prefix)]


_NO_QUEUE: deque[str] = deque()
"""Shared empty queue of orders without recorded calls, never added to; a separate one would take 760 bytes."""


NOTHING_RECORDED = Prefix(())
"""Prefix of an attempt that starts from the beginning."""

_NO_WAITERS: dict[Strand, tuple[int, asyncio.Future[None]]] = {}


class ReplayOrder:
    """Decides when a recorded call may return, and when the first new call may begin.

    Args:
        recorded: ids of the recorded calls, in the order in which they were appended.
        stray: makes the error of a recorded call that the code no longer makes.
    """

    __slots__ = ("_dismissed_strands", "_is_looking", "_remaining_ids", "_stray", "_waiting", "queue", "strands")

    def __init__(self, recorded: Iterable[str], stray: Callable[[str], Exception]) -> None:
        self.queue = deque(recorded) or _NO_QUEUE
        """Ids of the recorded calls that have not returned."""
        self._remaining_ids = set(self.queue) or _NONE_LEFT
        self._stray: Callable[[str], Exception] = stray
        self.strands: list[Strand] = []
        """Open strands."""
        self._dismissed_strands: tuple[Strand, ...] = ()
        self._waiting: dict[Strand, tuple[int, asyncio.Future[None]]] = _NO_WAITERS
        self._is_looking = False
        """Whether `_release` is scheduled: one call covers all changes until it runs."""

    @property
    def next_id(self) -> str | None:
        """Recorded call that returns next; None if all have returned."""
        return self.queue[0] if self.queue else None

    def has_under(self, path: str) -> bool:
        """Whether a recorded call of a strand, or of strands it started, has not returned yet."""
        return any(_is_under(call_id, path) for call_id in self._remaining_ids)

    def after(self, path: str, number: int) -> str | None:
        """Return the next recorded call of a strand after call `number`; None if there is none left."""
        if not self.queue:
            return None
        calls = (call_id.rpartition("#") for call_id in self.queue)
        return next(
            (f"{strand_path}#{n}" for strand_path, _, n in calls if strand_path == path and int(n) > number), None
        )

    def end_strand(self, strand: Strand) -> None:
        """Remove a strand that has ended."""
        strand.is_open = False
        if strand in self.strands:
            self.strands.remove(strand)
        self.forget_dismissed(strand)
        self.look()

    def close(self) -> None:
        """End all waits, and drop the references to tasks and to the journal."""
        for strand in self.strands:
            strand.owner = None
        self._stray = ReplayMismatchError

    def abandon(self) -> None:
        """End the code of every open strand immediately; the owner of the root's task cancels that task."""
        for strand in self.strands:
            if strand.steps is not None:
                strand.steps.abandon()
            if strand.task is not None:
                strand.task.cancel()

    def dismiss(self, strand: Strand, *, now: bool = False) -> None:
        """Cancel a strand, either now or once its recorded calls have returned."""
        if not strand.is_open or (strand.is_dismissed and not now):
            return
        strand.is_dismissed = True
        if now or strand.awaits_cancellation or not self.has_under(strand.path):
            self._cancel(strand)
        else:
            self._dismissed_strands = (*self._dismissed_strands, strand)
            for child in strand.children:
                self.dismiss(child)

    def returned(self, call_id: str) -> None:
        """Record that a call has returned."""
        if call_id in self._remaining_ids:
            self._remaining_ids.discard(call_id)
            while self.queue and self.queue[0] not in self._remaining_ids:
                self.queue.popleft()
            for strand in [strand for strand in self._dismissed_strands if not self.has_under(strand.path)]:
                self._cancel(strand)
            self.look()

    def is_due(self, strand: Strand, number: int) -> bool:
        """Whether call `number` of a strand may continue: the next recorded call is this one, or happened inside it, or
        there is none."""
        if not self.queue:
            return True
        path, call_id = strand.path, self.queue[0]
        if not _is_under(call_id, path):
            return False
        suffix = call_id[len(path) + 1 :]
        return call_id[len(path)] == "#" or int(suffix.partition(".")[0]) > number

    def forget_dismissed(self, strand: Strand) -> None:
        """Stop canceling a strand that was cancelled where the journal records it."""
        if self._dismissed_strands:
            self._dismissed_strands = tuple(
                candidate for candidate in self._dismissed_strands if candidate is not strand
            )

    async def wait(self, strand: Strand, number: int) -> None:
        """Wait until call `number` of a strand is due. Ready steps of other open strands run first.

        Raises:
            ReplayMismatchError: the call will never be due.
        """
        if len(self.strands) == 1:
            if not self.is_due(strand, number):
                raise self._stray(self.queue[0])
            return
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiting is _NO_WAITERS:
            self._waiting = {}
        self._waiting[strand] = (number, gate)
        # A task that is being cancelled will wake, so it is not blocked.
        strand.is_blocked = strand.task is None or not strand.task.cancelling() or strand.is_early
        self.look()
        try:
            await gate
        finally:
            self._waiting.pop(strand, None)
            strand.is_blocked = False

    def look(self) -> None:
        """Schedule `_release`."""
        if self._waiting and not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._release)

    def _cancel(self, strand: Strand) -> None:
        self.forget_dismissed(strand)
        strand.is_blocked = False
        if strand.task is not None:
            strand.task.cancel()
        self.look()

    def _release(self) -> None:
        """Wake the strands that are due, once all have begun: one at a time during replay, then all."""
        self._is_looking = False
        if not all(strand.owner or (strand.task and strand.task.cancelling()) for strand in self.strands):
            return
        due_strands = [strand for strand, (number, _) in self._waiting.items() if self.is_due(strand, number)]
        if self.queue and due_strands:
            due_strands = [max(due_strands, key=lambda strand: len(strand.path))]
        for strand in due_strands:
            self._wake(strand, None)
        if not due_strands and self._waiting and all(strand.is_blocked for strand in self.strands):
            self._wake(next(iter(self._waiting)), self._stray(self.queue[0]))

    def _wake(self, strand: Strand, error: Exception | None) -> None:
        _, gate = self._waiting.pop(strand)
        strand.is_blocked = False
        if gate.done():
            return
        if error is not None:
            gate.set_exception(error)
        else:
            gate.set_result(None)


def _is_under(call_id: str, path: str) -> bool:
    return call_id.startswith(path) and call_id[len(path)] in "#/"
