"""A scorer that has a reward model score a conversation, or the steps of its turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from agentrl.core.errors import Unscorable
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.rollout.scoring.retrying import Answer, RetryingScorer, call_engine

if TYPE_CHECKING:
    from agentrl.core.ports import Sampler
    from agentrl.core.records import Message, ScoreRequest

Combine = Literal["mean", "min", "last"]
COMBINE: dict[Combine, Callable[[Sequence[float]], float]] = {"mean": fmean, "min": min, "last": lambda each: each[-1]}
"""Functions that make one score of those of the steps, by name."""
_CUT = "\ue003"
"""A character of private use, which merges with no other into a token."""
_NO_SAMPLING = SamplingParams(max_tokens=0)


class Transcriber(Protocol):
    """Tokenizes whole conversations."""

    def transcript(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a whole conversation."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class RewardModelScorer(RetryingScorer):
    """A scorer that reads the values of a reward model's engine."""

    engine: Sampler
    model: str
    """Name under which the engine serves the model."""
    chat_format: Transcriber
    steps: str = ""
    """Text that ends a step; empty: only the end of the conversation is scored."""
    combine: Combine = "mean"

    async def judge(self, request: ScoreRequest, attempt: int) -> Answer:
        token_ids, ends = self.positions(request.scored.messages)
        if not ends:
            return Answer(None)
        call = GenerateRequest(
            request_id=f"{request.where}, request {attempt}",
            token_ids=np.array(token_ids, np.int32),
            sampling=_NO_SAMPLING,
            seed=request.seed,
            priority=request.priority,
        )
        completion = await call_engine(self.engine, self.model, call, self.clock)
        if completion.values is None:
            raise Unscorable(f"it has {len(token_ids)} tokens, more than the reward model's context holds")
        values = completion.values[ends].tolist()
        note = ", ".join(f"{value:.4g}" for value in values) if len(values) > 1 else ""
        return Answer(COMBINE[self.combine](values), note, len(token_ids) - completion.cached_tokens)

    def positions(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and the positions of those whose scores count; none if a turn has only
        tool calls, and no step.

        A step's last token is the last one that the whole conversation shares with one cut behind the step; that of a
        turn's last step is the one before the tokens that end every turn.
        """
        if not self.steps:
            token_ids = self.chat_format.transcript(messages)
            return token_ids, [len(token_ids) - 1]
        ended_messages = [self._ended_message(message) for message in messages]
        token_ids = self.chat_format.transcript(ended_messages)
        first = 0 if self.per == "episode" else len(ended_messages) - 1
        ends = [
            self._last_token(token_ids, ended_messages[: at + 1], match.end())
            for at, message in enumerate(ended_messages[first:], start=first)
            if message.role == "assistant"
            for match in re.finditer(re.escape(self.steps), message.content)
            if message.content[: match.start()].strip()
        ]
        return token_ids, ends

    def _last_token(self, token_ids: Sequence[int], messages: Sequence[Message], end: int) -> int:
        """Return the position of the last token of the step that ends at a character of the last message."""
        turn = messages[-1]
        if end < len(turn.content):
            cut = replace(turn, content=turn.content[:end] + _CUT)
            return _common_length(token_ids, self.chat_format.transcript([*messages[:-1], cut])) - 1
        all_token_ids = self.chat_format.transcript(messages)
        cut_token_ids = self.chat_format.transcript([*messages[:-1], replace(turn, content=_CUT)])
        return len(all_token_ids) - _common_length(all_token_ids[::-1], cut_token_ids[::-1]) - 1

    def _ended_message(self, message: Message) -> Message:
        """Return a message whose last step is ended too, as those that reward models are trained with."""
        if message.role != "assistant" or not message.content.strip() or message.content.endswith(self.steps):
            return message
        return replace(message, content=message.content + self.steps)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
