"""The scorers of a worker: their limits, their retries, and who answers when one fails.

A failed scorer gives no reward: it is retried, then another scorer answers, or the episode is dropped (`scorer_failed`)
without a further attempt. `scores.py` has the scores of an episode.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
    Unscorable,
    describe_user_code_error,
)
from agentrl.core.records import Score
from agentrl.environment.rewards import finite_reward
from agentrl.rollout.turn_sampler import LOST_IN_A_ROW

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest, Sampler, ScoreCredit, ScoreOf
    from agentrl.core.records import Completion, ScoreRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """What a scorer says, not checked yet."""

    value: Any
    note: str = ""
    tokens: int = 0
    """Tokens that models computed for it."""


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
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(64))
    """Limit of the requests that run at once."""
    other: RetryingScorer | None = None
    """Scorer that answers if this one fails; None: the episode is dropped."""
    clock: Clock = field(default_factory=SystemClock)

    @abstractmethod
    async def judge(self, request: ScoreRequest, attempt: int) -> Answer:
        """Return a score. Any exception is a failure, except `Unscorable` and `ScorerError`."""

    async def score(self, request: ScoreRequest) -> Score:
        """Return a score.

        Raises:
            EpisodeError: the scorer failed, and no other one is named for that case.
            ScorerError: the scorer returned something that is not a score.
        """
        clock = self.clock
        asked = clock.monotonic()
        async with self.places:
            queued = clock.monotonic() - asked
            budget = RetryBudget(self.attempts - 1)
            for attempt in range(self.attempts):
                try:
                    async with asyncio.timeout(self.timeout_s):
                        answer = await self.judge(request, attempt)
                    return Score(self._checked(answer.value, request), answer.note, queued, answer.tokens)
                except Unscorable as unscorable:
                    return Score(self._unscorable(unscorable, request), str(unscorable), queued)
                except (InfrastructureError, EngineLostError, EpisodeError) as error:
                    detail = str(error)
                except AgentRLError:
                    raise
                except TimeoutError:
                    detail = f"no answer within {self.timeout_s:g} s"
                except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is a failure
                    detail = describe_user_code_error(error)
                wait = budget.lost()
                if wait is not None:
                    await clock.sleep(wait)
        if self.other is not None:
            score = await self.other.score(request)
            return replace(score, note=f"by {self.other.name}, because {self.name} failed: {detail}"[:2000])
        raise EpisodeError(
            f"{request.where}: the scorer {self.name!r} failed {self.attempts} times, the last time with: {detail}",
            reason="scorer_failed",
        )

    def _checked(self, value: Any, request: ScoreRequest) -> float | None:
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


@dataclass(slots=True, eq=False, kw_only=True)
class FunctionScorer(RetryingScorer):
    """A user's function; see `agentrl.scorer`."""

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    async def judge(self, request: ScoreRequest, attempt: int) -> Answer:
        value = self.function(request.scored, **self.options)
        return Answer(await value if inspect.isawaitable(value) else value)


async def call_engine(engine: Sampler, policy: str, request: GenerateRequest, clock: Clock) -> Completion:
    """Make one call in a session of its own; wait while the engine is unavailable.

    Raises:
        EngineLostError: the engine was lost `LOST_IN_A_ROW` times in a row.
    """
    budget = RetryBudget(LOST_IN_A_ROW)
    while True:
        try:
            session = engine.open(request.request_id, policy)
            try:
                completion = await session.generate(request)
            finally:
                session.close()
            if completion.finish_reason == "abort":
                raise EngineLostError(f"{request.request_id}: the call was aborted")
            return completion
        except EngineLostError:
            wait = budget.lost()
            if wait is None:
                raise
            await clock.sleep(wait)
