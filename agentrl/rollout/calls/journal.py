"""The journal of one attempt of an episode, through which all its calls pass.

A program makes its calls on strands (`Strand`): the root, and one for each coroutine of a `gather`. Every call
passes through `CallJournal`:

* `open` names the call and finds its recorded entry; `reach` waits until the call is due (`ReplayOrder`);
* `recall` returns the recorded entry, which must be of the same kind (`RecordedCalls`);
* `record` appends the entry of a call that was performed.

To resume, fork or replay an episode is to do this over a prefix of recorded entries.

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
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from agentrl.core import ids
from agentrl.core.errors import (
    AgentRLError,
    GlobalRandomError,
    InfrastructureError,
    ReplayMismatchError,
    UnstructuredConcurrencyError,
)
from agentrl.environment.containment import CoroutineStepGuard, GlobalRandomState, GuardedAwaitable, RandomDrawDetector
from agentrl.environment.context import LimitReachedError
from agentrl.journal.entries import (
    BeginEntry,
    CancelEntry,
    EffectIntentEntry,
    EntryBody,
    JournalEntry,
    PatchMarkerEntry,
    RewardEntry,
    TimeLimitEntry,
    TurnEntry,
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
    describe_entry,
    printable_excerpt,
    replay_mismatch,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from agentrl.journal.port import TurnLog


Body = TypeVar("Body")

StreamKey = tuple[int, int]
"""Seed and attempt of the episode that made a call."""

BEGIN = "begin"
"""Call id of an attempt's first entry."""


class JournaledCall(msgspec.Struct, frozen=True):
    """A call that is about to happen, or that is recorded."""

    call_id: str
    request_hash: bytes
    recorded: EntryBody | None
    strand: Strand | None = None
    number: int = 0
    waits: bool = True
    """Whether `CallJournal.reach` may have to wait; False for a new call while no other strand is open."""
    is_inherited: bool = False
    """Whether a fork inherited the call, so that it is neither written nor trained."""


class CallJournal:
    """The journal of one attempt: its recorded entries, and the log of new ones.

    Args:
        log: log to which entries are appended.
        episode_id: id of the episode.
        attempt: number of the attempt.
        recorded: the attempt's entries on disk, in the order in which they were appended.
        seed: seed of the episode.
        inherited: see `RecordedCalls`.
        edits: see `RecordedCalls`.
        answers: see `RecordedCalls`; the checker uses them to repeat the answers of the outside world.
    """

    __slots__ = (
        "_attempt",
        "_cancelled_calls",
        "_ended",
        "_episode_id",
        "_is_cutting",
        "_log",
        "_order",
        "_recorded",
        "_seed",
        "_stopped",
        "code_hash",
        "code_hash_then",
        "detects_draws",
        "digest",
        "failure",
        "is_new",
        "is_over_time",
        "is_resumed",
        "own_random",
        "purpose",
        "written",
    )

    def __init__(
        self,
        log: TurnLog,
        episode_id: str,
        attempt: int,
        recorded: Iterable[JournalEntry] = (),
        *,
        seed: int = 0,
        inherited: Iterable[JournalEntry] = (),
        edits: Mapping[str, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
        answers: Iterable[JournalEntry] = (),
    ) -> None:
        self._log = log
        self._episode_id = episode_id
        self._attempt = attempt
        self.digest = b""
        """The digest of all entries of the attempt so far; see `extend_digest`."""
        self._ended = False
        self._stopped = False
        self.failure: AgentRLError | None = None
        """The error the episode ends with, even if its program catches it."""
        self.is_over_time = False
        """Whether the time limit ended a call of the episode, now or when it was recorded; no further turn begins."""
        self._is_cutting = False
        """Whether the time limit has cancelled the program, and no call has raised `LimitReachedError` for it yet."""
        self._cancelled_calls: tuple[JournaledCall, ...] = ()
        self.purpose = ""
        """Why the attempt was recorded; a replay of it has another purpose."""
        self.code_hash = self.code_hash_then = ""
        """Hash of the code that runs now; `code_hash_then` is that of the code that wrote the recorded entries."""
        self.own_random = False
        """Whether the episode's code has its own global random generators."""
        self.detects_draws = True
        """Whether the episode fails if its code draws from global random generators that are not its own."""
        self.written = 0
        recorded_here, inherited, answers = list(recorded), list(inherited), list(answers)
        self._seed = seed
        self._recorded = NOTHING_RECORDED
        if recorded_here or inherited or edits or answers:
            self._recorded = RecordedCalls(episode_id, (seed, attempt), recorded_here, inherited, edits, answers)
        self.is_resumed = bool(recorded_here)
        """Whether an earlier execution of the attempt left entries."""
        self.is_new = self._recorded.is_empty
        """Whether every call is new: nothing was recorded before."""
        stray = ReplayMismatchError if self.is_new else self._stray  # a new attempt has no recording to differ from
        self._order = ReplayOrder(self._recorded.numbered(), stray)
        for entry in recorded_here:
            self._count(entry)

    # --- an act, in order ---------------------------------------------------------------------------------------------

    def open(self, digest: bytes, describe: Callable[[], str]) -> JournaledCall:
        """Open the next call of the calling strand.

        Args:
            digest: hash of the request: of everything that says who does what.
            describe: returns the request in words, for the message of a mismatch.

        Raises:
            UnstructuredConcurrencyError: the call is made by another task, inside an effect, or after the episode's
                end.
            ReplayMismatchError: the journal holds another request under this id.
            asyncio.CancelledError: the episode was stopped.
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
        if self._stopped:
            raise asyncio.CancelledError
        if self._cancelled_calls:
            self.settle()
        number = strand.calls
        strand.calls = number + 1
        call_id = ids.call_id(strand.path, number)
        if self.is_new:
            return JournaledCall(call_id, digest, None, strand, number, len(self._order.strands) > 1)
        entry = self._recorded.get(call_id)
        strand.use(self._recorded.key_of(entry))
        if entry is None:
            entry = self._recorded.answer(call_id)
        if entry is None:
            return JournaledCall(call_id, digest, None, strand, number)
        body = self._recorded.body(entry)
        if entry.request_hash != digest:
            now = f"the code now asks {printable_excerpt(describe())}"
            self.mismatch(call_id, f"the journal holds {describe_entry(body)}", now)
        return JournaledCall(call_id, digest, body, strand, number, is_inherited=entry.episode_id != self._episode_id)

    def open_named(self, call_id: str, digest: bytes) -> JournaledCall:
        """Open a call named by its content, on no strand and in no order: a request to the gateway.

        An answer of an earlier attempt is removed from `answers`, and the caller writes it again; an entry that a fork
        inherits is already written.

        Raises:
            UnstructuredConcurrencyError: the episode has ended.
            asyncio.CancelledError: the episode was stopped.
        """
        if self._ended:
            raise UnstructuredConcurrencyError(
                f"episode {self._episode_id}, call {call_id}: the episode ended while the call was waiting"
            )
        if self._stopped:
            raise asyncio.CancelledError
        inherited_entry = self._recorded.get(call_id)
        if inherited_entry is not None:
            return JournaledCall(call_id, digest, inherited_entry.decode(), waits=False, is_inherited=True)
        answer = self._recorded.remove_answer(call_id)
        body = None if answer is None or answer.request_hash != digest else answer.decode()
        return JournaledCall(call_id, digest, body, waits=False)

    def recorded_named(self, prefix: str) -> list[JournalEntry]:
        """Return the recorded calls named by their content that `open_named` would find under a prefix."""
        return self._recorded.named(prefix)

    def take_inherited(self, call: JournaledCall) -> None:
        """Consume an inherited call."""
        self._recorded.remove(call.call_id)

    def inherits_turns(self, seat: str) -> bool:
        """Whether inherited turns remain to be requested by a seat's external agent."""
        return bool(self._recorded.inherited_turns(seat))

    def forget_answers(self) -> None:
        """Forget recorded answers, so that later calls are performed again."""
        self._recorded.forget_answers()

    def unasked_turns(self, seat: str) -> list[TurnEntry]:
        """Return the recorded turns that a seat's external agent has not requested.

        A fork's inherited turns come first; once all are requested, the newest attempt's, which has all its requests.
        """
        entries = self._recorded.inherited_turns(seat) or self._recorded.answers_left()
        turns = (entry.decode() for entry in entries)
        return [turn for turn in turns if isinstance(turn, TurnEntry) and turn.seat == seat]

    def record_again(self, call: JournaledCall, body: TurnEntry) -> None:
        """Append a turn of an earlier attempt to this one; raises as `record`."""
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
        if self.inherits_turns(call.call_id.rpartition(":")[0]):
            now = f"{difference}; fork at turn 0 to sample with the program as it is now"
            self.mismatch(call.call_id, DIFFERENT_REQUEST, now, remedy=FORK_REMEDY)

    def edits_at(self, call_id: str) -> Sequence[Mapping[str, Any]]:
        """Return the messages with which a fork replaces those of a call; usually none."""
        return self._recorded.edits.get(call_id, ())

    def peek(self, digest: bytes) -> EntryBody | None:
        """Return the recorded body of the calling strand's next call if it has the same request, without making the
        call."""
        entry = self._next_entry()
        return self._recorded.body(entry) if entry is not None and entry.request_hash == digest else None

    def next_recorded(self) -> EntryBody | None:
        """Return the recorded body of the calling strand's next call, whatever it asks."""
        entry = self._next_entry()
        return None if entry is None else self._recorded.body(entry)

    def _next_entry(self) -> JournalEntry | None:
        strand = current_strand()
        return self._recorded.get(ids.call_id(strand.path, strand.calls))

    async def reach_next(self) -> None:
        """Wait until the calling strand's next call, which is recorded, is due; raises as `reach`."""
        strand = current_strand()
        await self._order.wait(strand, strand.calls)

    def fork_edits(self) -> Sequence[Mapping[str, Any]]:
        """Return the messages with which a fork replaces those of the calling strand's next call; usually none."""
        strand = current_strand()
        return self.edits_at(ids.call_id(strand.path, strand.calls))

    async def reach(self, call: JournaledCall, *, cancelled: bool = False) -> None:
        """Wait until the call is due: replay has reached it or, if it is new, has finished.

        `cancelled` states that the caller was cancelled during the call, which is recorded here.

        Raises:
            asyncio.CancelledError: the call is cancelled, now or in the journal.
            LimitReachedError: the time limit ended the call when it was recorded.
            ReplayMismatchError: the code no longer makes the recorded call that is next.
        """
        assert call.strand is not None
        if isinstance(call.recorded, TimeLimitEntry):
            await self._order.wait(call.strand, call.number)
            self._returned(call.call_id)
            self.is_over_time = True
            raise _time_limit(call.recorded)
        if isinstance(call.recorded, CancelEntry):
            await self._reach_cancelled(call, call.strand, cancelled=cancelled)
        try:
            if cancelled:
                raise asyncio.CancelledError
            await self._order.wait(call.strand, call.number)
        except asyncio.CancelledError:
            if call.recorded is None:
                self.cancel(call)
            raise

    async def _reach_cancelled(self, call: JournaledCall, strand: Strand, *, cancelled: bool) -> NoReturn:
        """Wait for both: the call's place in the replay order, and the task that cancelled it."""
        while True:
            try:
                await self._order.wait(strand, call.number)
                break
            except asyncio.CancelledError:
                cancelled = True
                if self._stopped:
                    raise
        if not (cancelled or strand.is_dismissed):
            strand.awaits_cancellation = True
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
            strand.awaits_cancellation = False
        self._order.forget_dismissed(strand)
        self._returned(call.call_id)
        raise asyncio.CancelledError

    def recall(self, call: JournaledCall, kind: type[Body]) -> Body | None:
        """Return the recorded body of a call, which must be of a kind, and mark the call as returned.

        Raises:
            ReplayMismatchError: the entry is of another kind.
        """
        if call.recorded is None:
            return None
        if not isinstance(call.recorded, kind):
            now = f"the code now makes a {kind.__name__}"
            self.mismatch(call.call_id, f"the journal holds {describe_entry(call.recorded)}", now)
        self._returned(call.call_id)
        return call.recorded

    def interrupted(self, call: JournaledCall) -> None:
        """Note that a call was cancelled.

        Raises:
            LimitReachedError: the time limit cancelled it.
        """
        if self._is_cutting and call.recorded is None and not self._stopped:
            assert call.strand is not None
            self.cut(call.strand)
            self.refuse_for_time(call)
        self.cancel(call)

    def record(self, call: JournaledCall, body: EntryBody) -> None:
        """Append the entry of a call that was performed.

        Raises:
            UnstructuredConcurrencyError: the episode has ended.
            ReplayMismatchError: the journal has a hole where this entry belongs.
            AgentRLError: the episode has failed.
        """
        if self._ended:
            raise UnstructuredConcurrencyError(
                f"episode {self._episode_id}, call {call.call_id}: the episode ended while the call was waiting"
            )
        if self.failure is not None:
            raise self.failure  # calls after a failure are not recorded
        if self._cancelled_calls:
            self.settle()
        if not self.is_new:
            self._check_no_later(call, body)
        if isinstance(body, TurnEntry):
            body = move_routing(body, self._log, self._episode_id, self._attempt)
        entry = JournalEntry(self._episode_id, self._attempt, call.call_id, call.request_hash, encode_body(body))
        self._log.append(entry)
        self._count(entry)

    def _check_no_later(self, call: JournaledCall, body: EntryBody) -> None:
        """Refuse an entry where a later call of its strand is recorded.

        Raises:
            ReplayMismatchError: the journal has a hole where this entry belongs.
        """
        later = None if call.strand is None else self._order.after(call.strand.path, call.number)
        if later is not None and not isinstance(body, CancelEntry):
            then = f"the journal holds call {later} of the same strand and not this one before it: entries are missing"
            self.mismatch(call.call_id, then, "the code now makes it")

    def reward(self, body: RewardEntry) -> RewardEntry:
        """Write a reward, or recall it with its recorded weight; raises as `open` and `record`."""
        agent = encode((body.seat, body.index, body.turn))
        digest = request_hash(agent, struct.pack("<d", body.value), body.name.encode())
        call = self.open(digest, lambda: describe_entry(body))
        entry = self.recall(call, RewardEntry)
        if entry is None:
            self.record(call, body)
        return entry or body

    # --- scores -------------------------------------------------------------------------------------------------------

    def recorded_scores(self) -> list[JournalEntry]:
        """Return the entries of recorded scores, inherited ones included."""
        return self._recorded.scores()

    def record_score(self, call_id: str, body: EntryBody, content: bytes = b"") -> None:
        """Append a score when it arrives, with the hash of its content, unless the episode has ended or will continue
        elsewhere.

        Unlike `record`, this does not settle cancelled calls: the scorer's task says nothing about the program.
        """
        if not (self._ended or self._stopped):
            entry = JournalEntry(self._episode_id, self._attempt, call_id, content, encode_body(body))
            self._log.append(entry)
            self._count(entry)

    # --- entries without a number ------------------------------------------------------------------------------------

    def begin(self, make: Callable[[], BeginEntry]) -> BeginEntry:
        """Return the first entry, recorded or made by `make()`; notes the hash of the code then and now."""
        first_entry = make()
        call = self._open_unnumbered(BEGIN)
        begin = self.recall(call, BeginEntry)
        if begin is None:
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
        if self.recall(intent, EffectIntentEntry) is not None:
            return False
        self.record(intent, EffectIntentEntry(name, may_repeat))
        return True

    def patched(self, name: str) -> bool:
        strand = current_strand()
        is_patched = strand.patches.get(name)
        if is_patched is None:
            call = self._open_unnumbered(f"{strand.path}@{name}")
            is_patched = self.recall(call, PatchMarkerEntry) is not None
            if not is_patched and not self.holds(strand):
                self.record(call, PatchMarkerEntry(name))
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
        next_call = self._order.next_id
        key = (self._seed, self._attempt)
        strand = Strand(path, key if next_call is None else self._recorded.key_of(self._recorded.get(next_call)))
        self._order.strands.append(strand)
        return strand

    def holds(self, strand: Strand) -> bool:
        """Whether a recorded call of a strand has not returned yet."""
        return self._order.has_under(strand.path)

    def look(self) -> None:
        """Note that a strand has begun, or was dismissed."""
        self._order.look()

    def dismiss(self, strands: Iterable[Strand]) -> None:
        """Cancel strands, each where the journal records its cancellation, else now."""
        for strand in strands:
            self._order.dismiss(strand, now=self._stopped)

    def end_strand(self, strand: Strand) -> None:
        """Note that a strand has ended."""
        self._order.end_strand(strand)

    def begin_steps(self, strand: Strand, program: Callable[[], Awaitable[Any]]) -> GuardedAwaitable:
        """Return the code of a strand, begun by `program`, as an awaitable; call `end_steps` afterward.

        The code has its own global random generators, or must not draw from them; a detected draw fails the episode.
        """
        guard: CoroutineStepGuard | None = None
        if self.own_random:
            guard = GlobalRandomState(ids.stable_hash64("branch", *strand.key, strand.path))
        elif self.detects_draws:
            guard = RandomDrawDetector()
        strand.steps = GuardedAwaitable(guard, program, None if guard is None else self.drew)
        return strand.steps

    @property
    def program(self) -> Awaitable[Any] | None:
        """The code of the root strand; None while it does not run."""
        root = next((strand for strand in self._order.strands if strand.path == ids.ROOT_STRAND), None)
        return None if root is None or root.steps is None else root.steps.begun

    def end_steps(self, strand: Strand) -> None:
        """Note that the code of a strand has ended."""
        if strand.steps is not None:
            strand.steps.close()
            strand.steps = None

    def abandon(self) -> None:
        """End the code of all strands immediately; the owner of the root's task cancels that task."""
        self._order.abandon()

    # --- cancellation and the end -------------------------------------------------------------------------------------

    def cancel(self, call: JournaledCall) -> None:
        """Note that a call was cancelled in flight. It is recorded when it is known that the episode itself cancelled
        it.

        A call of a strand that ends during replay is not recorded, because it was not recorded originally.
        """
        is_replaying = self._order.next_id is not None and call.strand is not None and call.strand.is_dismissed
        if not self._stopped and not is_replaying:
            self._cancelled_calls = (*self._cancelled_calls, call)

    def end_act(self) -> None:
        """Note that the time limit is about to cancel the program: the call in flight will raise
        `LimitReachedError`.
        """
        self.is_over_time = self._is_cutting = True

    @property
    def is_cutting(self) -> bool:
        """Whether the time limit has cancelled the program, and no call has ended by that yet."""
        return self._is_cutting

    def cut(self, strand: Strand) -> bool:
        """Handle a cancellation that reached a call; returns whether it came from the time limit."""
        task = asyncio.current_task()
        if self._is_cutting and task is not None:
            task.uncancel()
            self._is_cutting = strand.path != ids.ROOT_STRAND  # the root strand is the last to be cancelled
            return True
        return False

    def refuse_for_time(self, call: JournaledCall) -> NoReturn:
        """Record that the time limit ended a call, or prevents it.

        Raises:
            LimitReachedError: always.
        """
        entry = TimeLimitEntry(
            "time_limit", f"episode {self._episode_id} was too long without a turn (episode_timeout_s)"
        )
        self.record(call, entry)
        raise _time_limit(entry)

    def settle(self) -> None:
        """Record the cancelled calls: the episode continues, so it cancelled them itself."""
        calls, self._cancelled_calls = self._cancelled_calls, ()
        for call in calls:
            self.record(call, CancelEntry())

    def stop(self) -> None:
        """Record nothing more: the episode is about to be cancelled from outside, to be resumed later."""
        self._stopped = True

    def drew(self) -> None:
        """Note that the episode's code drew from the process's global random generators."""
        self.fail(GlobalRandomError(self._episode_id))

    def fail(self, error: AgentRLError) -> None:
        """Note that the episode cannot continue; later cancellations are not recorded."""
        self.failure = self.failure or error
        self.stop()
        self._cancelled_calls = ()

    def finish(self) -> None:
        """Check the journal after the program of the episode has returned.

        Raises:
            ReplayMismatchError: the program made fewer calls than the journal holds.
        """
        self.settle()
        if self._order.next_id is not None:
            raise self._stray(self._order.next_id)

    def end(self) -> None:
        """Refuse further calls, and break reference cycles so that the episode is freed at once."""
        self._ended = True
        self._order.close()

    @property
    def has_strands(self) -> bool:
        """Whether several strands are open."""
        return len(self._order.strands) > 1

    @property
    def is_replaying(self) -> bool:
        """Whether a recorded call has not returned yet."""
        return self._order.next_id is not None

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

    def _returned(self, call_id: str) -> None:
        if self._recorded.remove(call_id):
            self._order.returned(call_id)
        elif (answer := self._recorded.remove_answer(call_id)) is not None:
            self._log.append(answer)
            self._count(answer)

    def _count(self, entry: JournalEntry) -> None:
        self.digest = extend_digest(self.digest, entry)
        self.written += 1


def _time_limit(entry: TimeLimitEntry) -> LimitReachedError:
    return LimitReachedError(entry.message, stop_reason="time_limit")


class CallExecution:
    """A context in which a call is performed; it records the call's cancellation.

    If infrastructure that the call needs has failed, the episode ends with that error, even if its program catches it:
    nothing that the program makes of it may become a reward.

    Args:
        journal: journal of the episode.
        call: the call.
        memoised: name of a call that is not run again on re-execution; it may make no calls itself.
        limit: the episode's time limit, if it is paused meanwhile.

    Raises:
        LimitReachedError: the time limit ended the call.
    """

    __slots__ = ("_call", "_journal", "_limit", "_memoised")

    def __init__(
        self,
        journal: CallJournal,
        call: JournaledCall,
        memoised: str | None = None,
        limit: AbstractContextManager[None] | None = None,
    ) -> None:
        self._journal = journal
        self._call = call
        self._memoised = memoised
        self._limit = limit

    def __enter__(self) -> None:
        if self._memoised is not None:
            assert self._call.strand is not None
            try:
                _begin_memoised(self._call.strand, self._memoised)
            except asyncio.CancelledError:
                self._journal.interrupted(self._call)
                raise
        if self._limit is not None:
            self._limit.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._limit is not None:
            self._limit.__exit__(None, None, None)
        if self._memoised is not None:
            assert self._call.strand is not None
            _end_memoised(self._call.strand)
        if error is None:
            return
        if isinstance(error, asyncio.CancelledError):
            self._journal.interrupted(self._call)
        elif isinstance(error, InfrastructureError):
            self._journal.fail(error)


_NONE: dict[Any, Any] = {}
"""Shared empty dict of most episodes; never added to."""

_NO_PATCHES: Mapping[str, bool] = MappingProxyType({})


class Strand:
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
        """Whether the strand has not ended; True also before it begins."""
        self.calls = 0
        self.resources = 0
        self.memoised: str | None = None
        """Name of the effect or external tool that runs on the strand, which may make no calls meanwhile."""
        self.is_blocked = False
        """Whether only another strand of the episode can wake this one."""
        self.awaits_cancellation = False
        """Whether the strand waits at a call that is recorded as cancelled."""
        self.is_dismissed = False
        """Whether the strand's gather has cancelled it: it ends where the journal records its end, else now."""
        self.children: Sequence[Strand] = ()
        """Strands of the gather that this strand awaits, unless that gather is recorded."""
        self.task: asyncio.Task[object] | None = None
        """Task that runs the strand, also before the strand has begun."""
        self.steps: GuardedAwaitable | None = None
        """Running steps of the strand's code."""
        self.patches: Mapping[str, bool] = _NO_PATCHES
        self.speaker: int | None = None
        """Number of the agent that acted last on the strand, or on its parent before it began."""
        self._key = key
        self._rng: random.Random | None = None

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
        caller = (
            "a callback" if task is None else f"the task {getattr(task.get_coro(), '__qualname__', task.get_name())}"
        )
        raise UnstructuredConcurrencyError(
            f"ctx or an agent was used by {caller}, outside run(). Act and reward before run() returns, in run() "
            "itself; start concurrent work with `await ctx.gather(...)`"
        )
    return strand


def running_strand() -> Strand | None:
    """Return the strand whose code is running, or None outside episodes; for observers."""
    return _strand.get(None)


def begin_strand(strand: Strand) -> None:
    """Make the running task the owner of a strand."""
    strand.owner = asyncio.current_task()
    _strand.set(strand)


@contextlib.contextmanager
def mark_memoised_code(strand: Strand, name: str | None) -> Iterator[None]:
    """Mark code in the context that is not run again on re-execution, by `name`; None: the code is run again."""
    if name is None:
        yield
        return
    _begin_memoised(strand, name)
    try:
        yield
    finally:
        _end_memoised(strand)


def _begin_memoised(strand: Strand, name: str) -> None:
    """Begin memoised code, which is not run again on re-execution.

    Its draws from global random generators do not count for the strand, because re-execution does not repeat them.

    Raises:
        CancelledError: the strand has already drawn from them.
    """
    if strand.steps is not None:
        strand.steps.suspend_guard()
    strand.memoised = name


def _end_memoised(strand: Strand) -> None:
    strand.memoised = None
    if strand.steps is not None:
        strand.steps.resume_guard()


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
        "_entries",
        "_episode_id",
        "_keys",
        "_last_decoded",
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
        own_entries: Iterable[JournalEntry],
        inherited: Iterable[JournalEntry],
        edits: Mapping[str, Sequence[Mapping[str, Any]]],
        answers: Iterable[JournalEntry],
    ) -> None:
        self.key = key
        keys: dict[str, StreamKey] = {}
        entries: dict[str, JournalEntry] = {}
        edits = dict(edits)
        self._last_decoded: tuple[JournalEntry, EntryBody] | None = None
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
        for entry in own_entries:
            entries[entry.call_id] = entry
        self._keys: Mapping[str, StreamKey] = keys or _NONE
        """Seed and attempt of each ancestor of a fork."""
        self.edits: Mapping[str, Sequence[Mapping[str, Any]]] = edits or _NONE
        """Messages that replace the program's, keyed by call id."""
        self._entries = entries or _NONE
        self._answers = {entry.call_id: entry for entry in answers} or _NONE
        self._episode_id = episode_id
        answers_by_call = self._answers.values()
        self._newest = max((entry.attempt for entry in answers_by_call if entry.episode_id == episode_id), default=0)
        self.is_empty = not (self._entries or self._answers or self.edits)

    def numbered(self) -> Iterator[str]:
        """Yield the ids of calls that return in order, in the order in which they were appended."""
        return filter(ids.has_call_number, self._entries)

    def scores(self) -> list[JournalEntry]:
        """Return the entries of recorded scores."""
        return [entry for call_id, entry in self._entries.items() if ids.is_score(call_id)]

    def get(self, call_id: str) -> JournalEntry | None:
        """Return the entry of a call that has not returned yet; answers are left out."""
        return self._entries.get(call_id)

    def answer(self, call_id: str) -> JournalEntry | None:
        """Return the recorded answer of the outside world to a call."""
        return self._answers.get(call_id)

    def answers_left(self) -> list[JournalEntry]:
        """Return unused answers, except answers found only in attempts before the newest one."""
        answers = self._answers.values()
        return [entry for entry in answers if entry.episode_id != self._episode_id or entry.attempt == self._newest]

    def inherited_turns(self, seat: str) -> list[JournalEntry]:
        """Return the inherited turns of a seat's external agent that have not been replayed yet."""
        return [entry for call_id, entry in self._entries.items() if call_id.startswith(f"{seat}:")]

    def named(self, prefix: str) -> list[JournalEntry]:
        """Return inherited entries and unused answers whose ids have a prefix."""
        named = self._answers | self._entries
        return [entry for call_id, entry in named.items() if call_id.startswith(prefix)]

    def forget_answers(self) -> None:
        """Forget unused answers."""
        self._answers = _NONE

    def key_of(self, entry: JournalEntry | None) -> StreamKey:
        """Seed and attempt under which a call was made; the episode's own for a new call."""
        return self.key if entry is None else self._keys.get(entry.episode_id, self.key)

    def body(self, entry: JournalEntry) -> EntryBody:
        """Return the body of an entry, decoded once for both peeking and the call."""
        if self._last_decoded is None or self._last_decoded[0] is not entry:
            self._last_decoded = (entry, entry.decode())
        return self._last_decoded[1]

    def remove(self, call_id: str) -> bool:
        """Remove a call that has returned; returns whether it was recorded."""
        self._last_decoded = None
        return self._entries.pop(call_id, None) is not None

    def remove_answer(self, call_id: str) -> JournalEntry | None:
        """Remove and return an answer; None if there is none."""
        return self._answers.pop(call_id, None)


NOTHING_RECORDED = RecordedCalls("", (0, 0), (), (), {}, ())
"""Recorded calls of an attempt that starts from the beginning."""

_NO_QUEUE: deque[str] = deque()
"""Shared empty queue of orders without recorded calls, never added to; a separate one would take 760 bytes."""

_NONE_LEFT: set[str] = set()

_NO_WAITERS: dict[Strand, tuple[int, asyncio.Future[None]]] = {}


class ReplayOrder:
    """Decides when a recorded call may return, and when the first new call may begin.

    Args:
        recorded: ids of the recorded calls, in the order in which they were appended.
        stray: makes the error of a recorded call that the code no longer makes.
    """

    __slots__ = ("_dismissed_strands", "_is_looking", "_queue", "_remaining_ids", "_stray", "_waiting", "strands")

    def __init__(self, recorded: Iterable[str], stray: Callable[[str], Exception]) -> None:
        self._queue = deque(recorded) or _NO_QUEUE
        self._remaining_ids = set(self._queue) or _NONE_LEFT
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
        return self._queue[0] if self._queue else None

    def has_under(self, path: str) -> bool:
        """Whether a recorded call of a strand, or of strands it started, has not returned yet."""
        return any(_is_under(call_id, path) for call_id in self._remaining_ids)

    def after(self, path: str, number: int) -> str | None:
        """Return the next recorded call of a strand after call `number`; None if there is none left."""
        if not self._queue:
            return None
        calls = (call_id.rpartition("#") for call_id in self._queue)
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
            while self._queue and self._queue[0] not in self._remaining_ids:
                self._queue.popleft()
            for strand in [strand for strand in self._dismissed_strands if not self.has_under(strand.path)]:
                self._cancel(strand)
            self.look()

    def is_due(self, strand: Strand, number: int) -> bool:
        """Whether call `number` of a strand may continue: the next recorded call is this one, or happened inside it, or
        there is none."""
        if not self._queue:
            return True
        path, call_id = strand.path, self._queue[0]
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
                raise self._stray(self._queue[0])
            return
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiting is _NO_WAITERS:
            self._waiting = {}
        self._waiting[strand] = (number, gate)
        # A task that is being cancelled will wake, so it is not blocked.
        strand.is_blocked = strand.task is None or not strand.task.cancelling()
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
        if self._queue and due_strands:
            due_strands = [max(due_strands, key=lambda strand: len(strand.path))]
        for strand in due_strands:
            self._wake(strand, None)
        if not due_strands and self._waiting and all(strand.is_blocked for strand in self.strands):
            self._wake(next(iter(self._waiting)), self._stray(self._queue[0]))

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
