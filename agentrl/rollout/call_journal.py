"""The journal of one attempt of an episode, through which all its calls pass.

A program makes its calls on branches (`ProgramBranch`): the root, and one for each coroutine of a `gather`. Every call
passes through `CallJournal`: `open` gives the call its id and, if it is recorded, its entry; `reach` waits until it is
due; `recall` compares a recorded call instead of performing it; `record` appends a performed one. To resume, fork or
replay an episode is to do this over a prefix of recorded entries (`RecordedCalls`).

1. A call id belongs to a branch; a branch's calls are made by the task that owns it.
2. Recorded calls return in the order in which they were appended (`ReplayOrder`); new ones begin after the last.
3. A cancellation is recorded when the episode continues after it: at its next call, or at its normal end. Code that
   stops an episode from outside calls `stop`, after which nothing is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from agentrl.core import ids
from agentrl.core.errors import (
    AgentRLError,
    EpisodeError,
    GlobalRandomError,
    InfrastructureError,
    ReplayMismatchError,
    UnstructuredConcurrencyError,
)
from agentrl.core.text import valid_unicode
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
from agentrl.rollout.branches import (
    BEGIN,
    NOTHING_RECORDED,
    ProgramBranch,
    RecordedCalls,
    ReplayOrder,
    describe_entry,
    printable_excerpt,
    replay_mismatch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from agentrl.journal.port import TurnLog

Body = TypeVar("Body")


_branch: ContextVar[ProgramBranch] = ContextVar("agentrl_branch")


def current_branch() -> ProgramBranch:
    """The calling task's branch.

    Raises:
        UnstructuredConcurrencyError: the task was not started through the context.
    """
    branch = _branch.get(None)
    try:
        task = asyncio.current_task()
    except RuntimeError:  # raised in a tool's thread
        task = None
    if branch is None or branch.owner is not task:
        who = "a callback" if task is None else f"the task {getattr(task.get_coro(), '__qualname__', task.get_name())}"
        raise UnstructuredConcurrencyError(
            f"ctx or an agent was used by {who}, outside run(). Act and reward before run() returns, in run() itself; "
            "start concurrent work with `await ctx.gather(...)`"
        )
    return branch


def running_branch() -> ProgramBranch | None:
    """Return the branch whose code is running, or None outside episodes; for observers."""
    return _branch.get(None)


def begin_branch(branch: ProgramBranch) -> None:
    """Make the running task the owner of a branch."""
    branch.owner = asyncio.current_task()
    _branch.set(branch)


@contextlib.contextmanager
def mark_memoised_code(branch: ProgramBranch, name: str | None) -> Iterator[None]:
    """Mark code in the context that is not run again on re-execution, by `name`; None: the code is run again."""
    if name is None:
        yield
        return
    _begin_memoised(branch, name)
    try:
        yield
    finally:
        _end_memoised(branch)


def _begin_memoised(branch: ProgramBranch, name: str) -> None:
    """Begin memoised code, which is not run again on re-execution.

    Its draws from global random generators do not count for the branch, because re-execution does not repeat them.

    Raises:
        CancelledError: the branch has already drawn from them.
    """
    if branch.steps is not None:
        branch.steps.suspend_guard()
    branch.memoised = name


def _end_memoised(branch: ProgramBranch) -> None:
    branch.memoised = None
    if branch.steps is not None:
        branch.steps.resume_guard()


class JournaledCall(msgspec.Struct, frozen=True):
    """A call that is about to happen, or that is recorded."""

    call_id: str
    asked: bytes
    recorded: EntryBody | None
    branch: ProgramBranch | None = None
    number: int = 0
    waits: bool = True
    """Whether `CallJournal.reach` may have to wait; False for a new call while no other branch is open."""
    is_inherited: bool = False
    """Whether a fork inherited the call, so that it is not written."""


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
        "_cancelled",
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
        self._cancelled: tuple[JournaledCall, ...] = ()
        self.code_hash = self.code_hash_then = ""
        """Hash of the code that runs now; `code_hash_then` is that of the code that wrote the recorded entries."""
        self.own_random = False
        """Whether the episode's code has its own global random generators."""
        self.detects_draws = True
        """Whether the episode fails if its code draws from global random generators that are not its own."""
        self.written = 0
        own, inherited, answers = list(recorded), list(inherited), list(answers)
        self._seed = seed
        self._recorded = NOTHING_RECORDED
        if own or inherited or edits or answers:
            self._recorded = RecordedCalls(episode_id, (seed, attempt), own, inherited, edits, answers)
        self.is_resumed = bool(own)
        """Whether an earlier execution of the attempt left entries."""
        self.is_new = self._recorded.is_empty
        """Whether every call is new: nothing was recorded before."""
        stray = ReplayMismatchError if self.is_new else self._stray  # a new attempt has nothing recorded to depart from
        self._order = ReplayOrder(self._recorded.numbered(), stray)
        for entry in own:
            self._count(entry)

    # --- an act, in order ---------------------------------------------------------------------------------------------

    def open(self, asked: bytes, describe: Callable[[], str]) -> JournaledCall:
        """Open the next call of the calling branch.

        Args:
            asked: hash of the request: of everything that says who does what.
            describe: returns the request in words, for the message of a mismatch.

        Raises:
            UnstructuredConcurrencyError: the call is made by another task, inside an effect, or after the episode's
                end.
            ReplayMismatchError: the journal holds another question under this id.
            asyncio.CancelledError: the episode was stopped.
        """
        branch = current_branch()
        if self._ended:
            raise UnstructuredConcurrencyError(
                f"ctx or an agent of episode {self._episode_id} was used after its run() had returned. Act and reward "
                "before run() returns; do not keep ctx or an agent beyond the end of the episode"
            )
        if branch.memoised is not None:
            raise UnstructuredConcurrencyError(
                f"ctx or an agent of episode {self._episode_id} was used inside {branch.memoised}, which is not run "
                "again on re-execution. Use them before or after it"
            )
        if self._stopped:
            raise asyncio.CancelledError
        if self._cancelled:
            self.settle()
        number = branch.calls
        branch.calls = number + 1
        call_id = ids.call_id(branch.path, number)
        if self.is_new:
            return JournaledCall(call_id, asked, None, branch, number, len(self._order.branches) > 1)
        entry = self._recorded.get(call_id)
        branch.use(self._recorded.key_of(entry))
        if entry is None:
            entry = self._recorded.answer(call_id)
        if entry is None:
            return JournaledCall(call_id, asked, None, branch, number)
        body = self._recorded.body(entry)
        if entry.asked != asked:
            now = f"the code now asks {printable_excerpt(describe())}"
            self.mismatch(call_id, f"the journal holds {describe_entry(body)}", now)
        return JournaledCall(call_id, asked, body, branch, number)

    def open_named(self, call_id: str, asked: bytes) -> JournaledCall:
        """Open a call named by its content, on no branch and in no order: a request to the gateway.

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
        inherited = self._recorded.get(call_id)
        if inherited is not None:
            return JournaledCall(call_id, asked, inherited.decode(), waits=False, is_inherited=True)
        answer = self._recorded.remove_answer(call_id)
        recorded = None if answer is None or answer.asked != asked else answer.decode()
        return JournaledCall(call_id, asked, recorded, waits=False)

    def take_inherited(self, call: JournaledCall) -> None:
        """A call that a fork inherits has come back."""
        self._recorded.remove(call.call_id)

    def inherits_turns(self, seat: str) -> bool:
        """Whether the external agent of a seat has not asked yet for all that a fork inherits."""
        return self._recorded.has_turns(seat)

    def forget_answers(self) -> None:
        """Forget recorded answers, so that later calls run anew."""
        self._recorded.forget_answers()

    def unasked_turns(self, seat: str) -> list[TurnEntry]:
        """Return the recorded turns of a seat's external agent that it has not requested: those that a fork inherits,
        and those of the newest attempt, which holds all that were requested in it."""
        turns = (entry.decode() for entry in self._recorded.answers_left())
        return [turn for turn in turns if isinstance(turn, TurnEntry) and turn.seat == seat]

    def record_again(self, call: JournaledCall, body: TurnEntry) -> None:
        """Append a turn of an earlier attempt to this one; raises as `record`."""
        self.record(call, body)

    def check_new(self, call: JournaledCall, difference: str) -> None:
        """Check a named call before it is performed; a replay refuses it.

        Args:
            call: a call that is not recorded.
            difference: difference from a recorded call that was not made yet; empty if all were.
        """

    def edits_at(self, call_id: str) -> Sequence[Mapping[str, Any]]:
        """Return the messages with which a fork replaces those of a call; usually none."""
        return self._recorded.edits.get(call_id, ())

    def peek(self, asked: bytes) -> EntryBody | None:
        """Return the recorded body of the calling branch's next call if it has the same question, without making the
        call."""
        branch = current_branch()
        entry = self._recorded.get(ids.call_id(branch.path, branch.calls))
        return self._recorded.body(entry) if entry is not None and entry.asked == asked else None

    def fork_edits(self) -> Sequence[Mapping[str, Any]]:
        """Return the messages with which a fork replaces those of the calling branch's next call; usually none."""
        branch = current_branch()
        return self.edits_at(ids.call_id(branch.path, branch.calls))

    async def reach(self, call: JournaledCall, *, cancelled: bool = False) -> None:
        """Wait until the call is due: replay has reached it or, if it is new, has finished.

        `cancelled` states that the caller was cancelled during the call, which is recorded here.

        Raises:
            asyncio.CancelledError: the call is cancelled, now or in the journal.
            LimitReachedError: the time limit ended the call when it was recorded.
            ReplayMismatchError: the code no longer makes the recorded call that is next.
        """
        assert call.branch is not None
        if isinstance(call.recorded, TimeLimitEntry):
            await self._order.wait(call.branch, call.number)
            self._returned(call.call_id)
            self.is_over_time = True
            raise _time_limit(call.recorded)
        if isinstance(call.recorded, CancelEntry):
            await self._reach_cancelled(call, call.branch, cancelled=cancelled)
        try:
            if cancelled:
                raise asyncio.CancelledError
            await self._order.wait(call.branch, call.number)
        except asyncio.CancelledError:
            if call.recorded is None:
                self.cancel(call)
            raise

    async def _reach_cancelled(self, call: JournaledCall, branch: ProgramBranch, *, cancelled: bool) -> NoReturn:
        """Wait until a cancelled call is due, and for its canceller, in either order."""
        while True:
            try:
                await self._order.wait(branch, call.number)
                break
            except asyncio.CancelledError:
                cancelled = True
                if self._stopped:
                    raise
        if not (cancelled or branch.is_dismissed):
            branch.awaits_cancellation = True
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
            branch.awaits_cancellation = False
        self._order.forget_dismissed(branch)
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
            assert call.branch is not None
            self.cut(call.branch)
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
        if self._cancelled:
            self.settle()
        if not self.is_new:
            self._check_no_later(call, body)
        entry = JournalEntry(self._episode_id, self._attempt, call.call_id, call.asked, encode_body(body))
        self._log.append(entry)
        self._count(entry)

    def _check_no_later(self, call: JournaledCall, body: EntryBody) -> None:
        """Refuse an entry where a later call of its branch is recorded.

        Raises:
            ReplayMismatchError: the journal has a hole where this entry belongs.
        """
        later = None if call.branch is None else self._order.after(call.branch.path, call.number)
        if later is not None and not isinstance(body, CancelEntry):
            then = f"the journal holds call {later} of the same branch and not this one before it: entries are missing"
            self.mismatch(call.call_id, then, "the code now makes it")

    def reward(self, body: RewardEntry) -> RewardEntry:
        """Write a reward, or recall it with its recorded weight; raises as `open` and `record`."""
        agent = encode((body.seat, body.index, body.turn))
        asked = request_hash(agent, struct.pack("<d", body.value), body.name.encode())
        call = self.open(asked, lambda: describe_entry(body))
        recorded = self.recall(call, RewardEntry)
        if recorded is None:
            self.record(call, body)
        return recorded or body

    # --- entries without a number ------------------------------------------------------------------------------------

    def begin(self, make: Callable[[], BeginEntry]) -> BeginEntry:
        """Return the first entry, recorded or made by `make()`; notes the hash of the code then and now."""
        made = make()
        call = self._unnumbered(BEGIN)
        begin = self.recall(call, BeginEntry)
        if begin is None:
            if self.written:
                self.mismatch(BEGIN, "the journal holds entries of this attempt and not its beginning", "it is missing")
            begin = made
            self.record(call, made)
        self.code_hash, self.code_hash_then = made.code_hash, begin.code_hash
        self.own_random = begin.own_random
        return begin

    def intend(self, call: JournaledCall, name: str) -> bool:
        """Record that a `once` call is about to be performed; returns False if that was already recorded."""
        intent = self._unnumbered(f"{call.call_id}!")
        if self.recall(intent, EffectIntentEntry) is not None:
            return False
        self.record(intent, EffectIntentEntry(name))
        return True

    def patched(self, name: str) -> bool:
        branch = current_branch()
        known = branch.patches.get(name)
        if known is None:
            call = self._unnumbered(f"{branch.path}@{name}")
            known = self.recall(call, PatchMarkerEntry) is not None
            if not known and not self.holds(branch):
                self.record(call, PatchMarkerEntry(name))
                known = True
            branch.patches = {**branch.patches, name: known}
        return known

    @property
    def forked_from(self) -> BeginEntry | None:
        """First entry of the episode from which this one was forked."""
        return self._recorded.forked_from

    async def flush(self) -> None:
        """Wait until everything written is on disk."""
        await self._log.flush()

    def _unnumbered(self, call_id: str) -> JournaledCall:
        entry = self._recorded.get(call_id)
        return JournaledCall(call_id, b"", None if entry is None else entry.decode())

    # --- branches -----------------------------------------------------------------------------------------------------

    def enter(self, path: str) -> ProgramBranch:
        """Make a new branch; the task that will own it calls its `begin`."""
        following = self._order.next_id
        key = (self._seed, self._attempt)
        branch = ProgramBranch(path, key if following is None else self._recorded.key_of(self._recorded.get(following)))
        self._order.branches.append(branch)
        return branch

    def holds(self, branch: ProgramBranch) -> bool:
        """Whether a recorded call of a branch has not returned yet."""
        return self._order.has_under(branch.path)

    def look(self) -> None:
        """Note that a branch has begun."""
        self._order.look()

    def dismiss(self, branches: Iterable[ProgramBranch]) -> None:
        """Cancel branches, each where the journal records its cancellation, else now."""
        for branch in branches:
            self._order.dismiss(branch, now=self._stopped)

    def end_branch(self, branch: ProgramBranch) -> None:
        """Note that a branch has ended."""
        self._order.end_branch(branch)

    def begin_steps(self, branch: ProgramBranch, program: Callable[[], Awaitable[Any]]) -> GuardedAwaitable:
        """Return the code of a branch, begun by `program`, as an awaitable; call `end_steps` afterwards.

        The code has its own global random generators, or must not draw from them; a detected draw fails the episode.
        """
        guard: CoroutineStepGuard | None = None
        if self.own_random:
            guard = GlobalRandomState(ids.stable_hash64("branch", *branch.key, branch.path))
        elif self.detects_draws:
            guard = RandomDrawDetector()
        branch.steps = GuardedAwaitable(guard, program, self.drew)
        return branch.steps

    def end_steps(self, branch: ProgramBranch) -> None:
        """Note that the code of a branch has ended."""
        if branch.steps is not None:
            branch.steps.close()
            branch.steps = None

    def abandon(self) -> None:
        """End the code of all branches immediately; the owner of the root's task cancels that task."""
        self._order.abandon()

    # --- cancellation and the end -------------------------------------------------------------------------------------

    def cancel(self, call: JournaledCall) -> None:
        """Note that a call was cancelled in flight. It is recorded when it is known that the episode itself cancelled
        it.

        A call of a branch that ends during replay is not recorded, because it was not recorded originally.
        """
        replaying = self._order.next_id is not None and call.branch is not None and call.branch.is_dismissed
        if not self._stopped and not replaying:
            self._cancelled = (*self._cancelled, call)

    def end_act(self) -> None:
        """Note that the time limit is about to cancel the program: the call in flight will raise
        `LimitReachedError`.
        """
        self.is_over_time = self._is_cutting = True

    @property
    def is_cutting(self) -> bool:
        """Whether the time limit has cancelled the program, and no call has ended by that yet."""
        return self._is_cutting

    def cut(self, branch: ProgramBranch) -> bool:
        """Handle a cancellation that reached a call; returns whether it came from the time limit."""
        task = asyncio.current_task()
        if self._is_cutting and task is not None:
            task.uncancel()
            self._is_cutting = branch.path != ids.ROOT_BRANCH  # the root branch is the last to be cancelled
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
        cancelled, self._cancelled = self._cancelled, ()
        for call in cancelled:
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
        self._cancelled = ()

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
    def is_replaying(self) -> bool:
        """Whether a recorded call has not returned yet."""
        return self._order.next_id is not None

    @property
    def is_stopped(self) -> bool:
        """Whether the episode was cancelled from outside."""
        return self._stopped

    # --- differences --------------------------------------------------------------------------------------------------

    def mismatch(self, call_id: str, then: str, now: str) -> NoReturn:
        """Stop the execution at a call that differs from the journal.

        Raises:
            ReplayMismatchError: always; `then` and `now` are clauses.
        """
        raise self._mismatch(call_id, then, now)

    def _mismatch(self, call_id: str, then: str, now: str) -> ReplayMismatchError:
        return replay_mismatch(self._episode_id, call_id, then, now, code=(self.code_hash_then, self.code_hash))

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
            assert self._call.branch is not None
            try:
                _begin_memoised(self._call.branch, self._memoised)
            except asyncio.CancelledError:
                self._journal.interrupted(self._call)
                raise
        if self._limit is not None:
            self._limit.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._limit is not None:
            self._limit.__exit__(None, None, None)
        if self._memoised is not None:
            assert self._call.branch is not None
            _end_memoised(self._call.branch)
        if isinstance(error, asyncio.CancelledError):
            self._journal.interrupted(self._call)
        elif isinstance(error, InfrastructureError):
            self._journal.fail(error)


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


def to_journal_data(arguments: Any) -> Any:
    """Convert arguments to data that the journal can hold; anything else (such as an integer of 80 bits) becomes
    text.
    """
    return to_journal_data_and_bytes(arguments)[0]


def encode_arguments(arguments: Any) -> bytes:
    """Encode arguments for hashing."""
    return to_journal_data_and_bytes(arguments)[1]


def to_journal_data_and_bytes(arguments: Any) -> tuple[Any, bytes]:
    """Compute `to_journal_data` and `encode_arguments` at once."""
    data = dict(arguments) if type(arguments) is dict or isinstance(arguments, Mapping) else arguments
    try:
        return data, encode(data)
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = valid_unicode(str(data)[:2000])
        return text, encode(text)


def after_journal_round_trip(value: Any, where: str) -> Any:
    """Return a value as the journal returns it: the same on the first execution as on every other.

    Tuples become lists, and the caller may change the result without changing the recorded value.

    Raises:
        EpisodeError: the value cannot be journaled; `where` names its origin in the message.
    """
    try:
        return decode(encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        numpy = " (`.tolist()`, `float()`)" if type(value).__module__ == "numpy" else ""
        raise EpisodeError(
            f"{where} returned {type(value).__name__}, which cannot be journaled ({error}); return JSON data{numpy}",
            reason="environment_error",
        ) from error
