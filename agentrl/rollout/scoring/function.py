"""A scorer that calls a user's function; see `agentrl.scorer`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import SCORER_FAILED, EpisodeError, RewardError, ScorerError, describe_user_code_error
from agentrl.core.records import Score
from agentrl.environment.containment import AlarmGuard, AlarmOutsideMainThreadError
from agentrl.environment.rewards import finite_reward

if TYPE_CHECKING:
    from agentrl.core.ports import ScoreCredit, ScoreOf
    from agentrl.core.records import ScoreRequest


@dataclass(slots=True)
class _Failure:
    """The first error with which an `AlarmGuard` failed a function."""

    error: EpisodeError | None = None

    def fail(self, error: EpisodeError) -> None:
        self.error = self.error or error


@dataclass(slots=True, eq=False, kw_only=True)
class FunctionScorer:
    """Implements `core.ports.Scorer`."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    per: ScoreOf = "turn"
    credit: ScoreCredit = "reward"
    timeout_s: float = 600.0

    async def score(self, request: ScoreRequest) -> Score:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                answer = await self._call(request)
        except (Exception, AlarmOutsideMainThreadError) as error:  # noqa: BLE001 - foreign code
            is_late = isinstance(error, TimeoutError) and limit.expired()
            detail = f"no answer within {self.timeout_s:g} s" if is_late else describe_user_code_error(error)
            raise EpisodeError(
                f"{request.where}: the scorer {self.name!r} failed: {detail}", reason=SCORER_FAILED
            ) from None
        if not isinstance(answer, Score):
            answer = Score(answer)
        return Score(self._checked(answer.value, request), str(answer.note))

    async def _call(self, request: ScoreRequest) -> Any:
        failure = _Failure()
        with AlarmGuard(failure):
            answer = self.function(request.group or request.scored, **self.options)
            if inspect.isawaitable(answer):
                answer = await answer
        if failure.error is not None:
            raise failure.error
        return answer

    def _checked(self, value: Any, request: ScoreRequest) -> Any:
        if not request.group:
            return self._number(value, request)
        members = [] if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__") else [*value]
        if len(members) != len(request.group):
            raise ScorerError(
                f"{request.where}: {self.name!r} scores groups, so it must return a list of {len(request.group)} "
                "numbers, one for each member in their order; it returned something else"
            )
        return tuple(self._number(member, request) for member in members)

    def _number(self, value: Any, request: ScoreRequest) -> float | None:
        try:
            return None if value is None else finite_reward(value, f"{request.where}, of {self.name!r}")
        except RewardError as error:
            raise ScorerError(str(error)) from None
