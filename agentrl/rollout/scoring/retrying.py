"""The scorers of a worker: their limits, their retries, and who answers when one fails.

A failed scorer gives no reward: it is retried, then another scorer answers, or the episode is dropped (`scorer_failed`)
without a further attempt. `scores.py` has the scores of an episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import inspect
import itertools
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentrl.core.clock import Clock, RetryBudget, SystemClock
from agentrl.core.errors import (
    AgentRLError,
    EngineLostError,
    EpisodeError,
    InfrastructureError,
    RewardError,
    ScorerError,
    ScorerFailedError,
    Unscorable,
    VersionNotServedError,
    describe_user_code_error,
)
from agentrl.core.ids import stable_hash64
from agentrl.core.ports import generate_when_room
from agentrl.core.records import Score
from agentrl.environment.containment import AlarmGuard, AlarmOutsideMainThreadError
from agentrl.environment.rewards import finite_reward
from agentrl.journal.entries import request_hash
from agentrl.rollout.turn.sampler import LOST_IN_A_ROW

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest, NewTokensCallback, Sampler, ScoreCredit, ScoreOf
    from agentrl.core.records import Message, PolicyVersion, Scored, ScoreRequest
    from agentrl.core.tokens import Completion


@dataclass(frozen=True, slots=True)
class Answer:
    """What a scorer says, not checked yet."""

    value: Any
    note: str = ""
    tokens: int = 0
    """Tokens that models computed for it."""
    judged_by: PolicyVersion | None = None
    """Oldest version of the judge, if its versions differ."""
    spread: float | None = None
    """Standard deviation of a member's score over the votes, as the mean over members; None: fewer than two votes."""


class Places:
    """A limit on what runs at once; of what waits, the most urgent runs first."""

    __slots__ = ("_numbers", "_waiting", "free")

    def __init__(self, count: int) -> None:
        self.free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap of (priority, order of arrival, future)."""
        self._numbers = itertools.count()

    @asynccontextmanager
    async def take(self, priority: int) -> AsyncIterator[None]:
        """Hold a place within the context."""
        if self.free:
            self.free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


@dataclass(slots=True, eq=False)
class _Flight:
    """A score that several requests may wait for."""

    task: asyncio.Task[Score]
    waiting: int = 0


def _message_content(message: Message) -> dict[str, object]:
    """Return the parts of a message that a scorer reads."""
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {"role": message.role, "content": message.content} | ({"tool_calls": calls} if calls else {})


def conversation_content(scored: Scored) -> list[dict[str, object]]:
    """Return the parts of each message that a scorer reads; the last one says if a limit on tokens cut it."""
    contents = [_message_content(message) for message in scored.messages]
    return [*contents[:-1], contents[-1] | {"cut_off": True}] if scored.turn.is_cut else contents


@dataclass(slots=True, eq=False, kw_only=True)
class RetryingScorer(ABC):
    """A scorer that is asked again when it fails; implements `core.ports.Scorer`."""

    name: str
    per: ScoreOf = "turn"
    credit: ScoreCredit = "reward"
    attempts: int = 4
    """Number of times that a failing scorer is asked, with waits of 1 to 30 s in between."""
    timeout_s: float = 60.0
    """Time limit of each."""
    unscorable: float | None = None
    """Score of content that the scorer cannot judge."""
    places: Places = field(default_factory=lambda: Places(64))
    """Limit of the requests that run at once."""
    cache: int = 0
    """Number of contents whose scores are kept."""
    identity: str = ""
    """Everything but the content that decides about a score, such as the judge and its rubric."""
    recorded: Mapping[bytes, Score] = field(default_factory=dict)
    """Scores in the journal of a resumed run, by `Score.content`."""
    run_seed: int = 0
    other: RetryingScorer | None = None
    """Scorer that answers if this one fails; None: the episode is dropped."""
    clock: Clock = field(default_factory=SystemClock)
    _known: OrderedDict[bytes, _Flight] = field(default_factory=OrderedDict)
    """Scores by content, in progress or kept; the least recently used first."""

    @property
    def calls(self) -> int:
        """Number of calls that one attempt makes."""
        return 1

    @abstractmethod
    async def judge(self, request: ScoreRequest, attempt: int) -> Answer:
        """Return a score. Any exception is a failure, except `Unscorable` and `ScorerError`."""

    def content(self, request: ScoreRequest) -> str:
        """Return the content that alone decides about a score, for scorers with a cache."""
        scored = request.scored
        messages = map(json.dumps, conversation_content(scored))
        return "\n".join([scored.task.id, scored.seat, str(scored.number), *messages])

    async def score(self, request: ScoreRequest) -> Score:
        """Return a score. Equal contents share one, with a seed that depends on nothing else.

        Raises:
            EpisodeError: the scorer failed, and no other one is named for that case.
            ScorerError: the scorer returned something that is not a score.
        """
        if not self.cache or request.group:
            return await self._ask(request)
        content = self.content(request).encode("utf-8", "replace")
        hashed = request_hash(self.identity.encode(), content)
        if hashed in self.recorded:
            return self.recorded[hashed]
        key = hashlib.blake2b(content, digest_size=16).digest()
        flight = self._known.get(key)
        is_new = flight is None
        if flight is None:
            asked = replace(request, seed=stable_hash64(self.run_seed, self.name, key))
            flight = self._known[key] = _Flight(asyncio.get_running_loop().create_task(self._ask(asked)))
            if len(self._known) > self.cache:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        flight.waiting += 1
        try:
            score = await asyncio.shield(flight.task)
        except BaseException:
            if flight.waiting == 1 or flight.task.done():
                flight.task.cancel()
                if self._known.get(key) is flight:
                    del self._known[key]
            raise
        finally:
            flight.waiting -= 1
        score = replace(score, content=hashed)
        return score if is_new else replace(score, queued=0.0, tokens=0, requests=0, cached=True)

    async def _ask(self, request: ScoreRequest) -> Score:
        """Return a score, after retries.

        Raises:
            EpisodeError: the scorer failed, and no other one is named for that case.
            ScorerError: the scorer returned something that is not a score.
        """
        clock = self.clock
        asked = clock.monotonic()
        async with self.places.take(request.priority):
            queued = clock.monotonic() - asked
            budget = RetryBudget(self.attempts - 1)
            for attempt in range(self.attempts):
                limit = asyncio.timeout(self.timeout_s)
                try:
                    async with limit:
                        answer = await self.judge(request, attempt)
                    value, values = self._checked(answer.value, request)
                    return Score(
                        value,
                        answer.note,
                        queued,
                        answer.tokens,
                        judged_by=answer.judged_by,
                        requests=self.calls * (attempt + 1),
                        values=values,
                        spread=answer.spread,
                    )
                except Unscorable as unscorable:
                    value = self._unscorable(unscorable, request)
                    values = (value,) * len(request.group)
                    requests = self.calls * (attempt + 1)
                    return Score(None if values else value, str(unscorable), queued, requests=requests, values=values)
                except (InfrastructureError, EngineLostError, VersionNotServedError, EpisodeError) as error:
                    detail = str(error)
                except AgentRLError:
                    raise
                except (Exception, AlarmOutsideMainThreadError) as error:  # noqa: BLE001 - foreign code
                    is_late = isinstance(error, TimeoutError) and limit.expired()
                    late = f"no answer within {self.timeout_s:g} s"
                    detail = late if is_late else describe_user_code_error(error)
                wait = budget.lost()
                if wait is not None:
                    await clock.sleep(wait)
        requests = self.calls * self.attempts
        if self.other is not None:
            try:
                score = await self.other.score(request)
            except ScorerFailedError as error:
                error.requests += requests
                raise
            note = f"by {self.other.name}, because {self.name} failed: {detail}"[:2000]
            if score.note:
                note = f"{score.note} ({note})"
            return replace(score, note=note, requests=score.requests + requests, failure=detail)
        raise ScorerFailedError(
            f"{request.where}: the scorer {self.name!r} failed {self.attempts} times, the last time with: {detail}",
            requests=requests,
        )

    def _checked(self, value: Any, request: ScoreRequest) -> tuple[float | None, tuple[float | None, ...]]:
        """Return a checked score and no others, or None and those of a group's members."""
        if not request.group:
            return self._checked_number(value, request), ()
        count = len(request.group)
        if (
            isinstance(value, str | bytes | Mapping)
            or not hasattr(value, "__iter__")
            or len(value := [*value]) != count
        ):
            raise ScorerError(
                f"{request.where}: {self.name!r} scores groups, so it must return a list of {count} numbers, one for "
                "each member in their order; it returned something else"
            )
        return None, tuple([self._checked_number(number, request) for number in value])

    def _checked_number(self, value: Any, request: ScoreRequest) -> float | None:
        try:
            return None if value is None else finite_reward(value, f"{request.where}, of {self.name!r}")
        except RewardError as error:
            raise ScorerError(str(error)) from None

    def _unscorable(self, why: Unscorable, request: ScoreRequest) -> float:
        if self.unscorable is None:
            raise ScorerError(
                f"{request.where}: the scorer {self.name!r} cannot judge it ({why}), and the run does not say what "
                f"such content is worth: set scorers.{self.name}.unscorable"
            ) from why
        return self.unscorable


@dataclass(slots=True)
class _Failure:
    """The first error with which an `AlarmGuard` failed a function."""

    error: EpisodeError | None = None

    def fail(self, error: EpisodeError) -> None:
        self.error = self.error or error


@dataclass(slots=True, eq=False, kw_only=True)
class FunctionScorer(RetryingScorer):
    """A user's function; see `agentrl.scorer`."""

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    async def judge(self, request: ScoreRequest, attempt: int) -> Answer:
        failure = _Failure()
        with AlarmGuard(failure):
            value = self.function(request.group or request.scored, **self.options)
            if inspect.isawaitable(value):
                value = await value
        if failure.error is not None:
            raise failure.error
        return Answer(value)


async def call_engine(
    engine: Sampler,
    policy: str,
    request: GenerateRequest,
    clock: Clock,
    *,
    pin: PolicyVersion | None = None,
    watch: Callable[[], NewTokensCallback | None] | None = None,
) -> Completion:
    """Make one call in a session of its own; wait while the engine is unavailable.

    Args:
        engine: the engine.
        policy: policy that samples.
        request: the call.
        clock: waits.
        pin: version that samples; None: the current one.
        watch: makes, for each attempt, what receives the tokens; the call may then be aborted. None: an aborted call
            is made again.

    Raises:
        VersionNotServedError: the engine does not serve the version `pin`.
        EngineLostError: the engine was lost `LOST_IN_A_ROW` times in a row.
    """
    budget = RetryBudget(LOST_IN_A_ROW)
    while True:
        try:
            session = engine.open(request.request_id, policy, pin=pin)
            try:
                completion = await generate_when_room(session, request, None if watch is None else watch())
            finally:
                session.close()
            if completion.finish_reason == "abort" and watch is None:
                raise EngineLostError(f"{request.request_id}: the call was aborted")
            return completion
        except EngineLostError:
            wait = budget.lost()
            if wait is None:
                raise
            await clock.sleep(wait)
