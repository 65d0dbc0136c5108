"""A scorer that has one of the run's policies judge a conversation by a rubric."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from agentrl.core.errors import Unscorable
from agentrl.core.ids import stable_hash64
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import Message
from agentrl.environment.context import LimitReachedError
from agentrl.environment.rewards import LARGEST_REWARD
from agentrl.rollout.scorers import Answer, RetryingScorer, call_engine, message_content

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, Sampler, SamplingParams
    from agentrl.core.records import Int32Array, Scored, ScoreRequest

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w%])")

SHOWN = 500
"""Maximum number of characters of each reply kept in the journal, as the score's note."""


class VerdictError(Exception):
    """A judge's reply contains no answer. The judge is asked again, with another seed."""


@dataclass(slots=True, eq=False, kw_only=True)
class JudgeScorer(RetryingScorer):
    """A scorer that asks a policy for votes; each vote is a separate one-turn conversation."""

    engine: Sampler
    policy: str
    chat_format: ChatFormat
    sampling: SamplingParams
    max_context: int
    """Maximum length of the judge's conversation, in tokens, including its reply."""
    rubric: str
    answer: Mapping[str, float] = field(default_factory=dict)
    votes: int = 1

    async def judge(self, request: ScoreRequest, attempt: int) -> Answer:
        question = Message(role="user", content=self.question(request.scored))
        context = np.array(self.chat_format.start([question], ()), dtype=np.int32)
        if len(context) + self.sampling.max_tokens > self.max_context:
            raise Unscorable(f"it has {len(context)} tokens; the judge's context holds {self.max_context}")
        votes = [f"{attempt}.{vote}" for vote in range(self.votes)]
        try:
            async with asyncio.TaskGroup() as group:
                replies = [group.create_task(self._vote(request, vote, context)) for vote in votes]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        values, texts, tokens = zip(*(reply.result() for reply in replies), strict=True)
        return Answer(fmean(values), " | ".join(text[:SHOWN] for text in texts), sum(tokens))

    def content(self, scored: Scored) -> str:
        return self.question(scored)

    def question(self, scored: Scored) -> str:
        """Return the judge's prompt. Messages are JSON, so that no content can imitate the end of a message."""
        subject = "the whole conversation" if self.per == "episode" else "the last message"
        instruction = f"Answer with one of: {', '.join(self.answer)}." if self.answer else "Answer with a number."
        lines = [json.dumps(message_content(message), ensure_ascii=False) for message in scored.messages]
        return "\n".join([self.rubric.strip(), "", *lines, "", f"Judge {subject}. {instruction}"])

    def value_of(self, reply: str) -> float:
        """Read the score from a reply.

        Raises:
            VerdictError: the reply contains no answer.
        """
        if self.answer:
            matches = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, self.answer))})(?!\w)", reply.casefold())
            if matches:
                return self.answer[matches[-1]]
            raise VerdictError(f"none of {', '.join(self.answer)} in {reply[:SHOWN]!r}")
        numbers = _NUMBER.findall(reply)
        if numbers and abs(value := float(numbers[-1])) <= LARGEST_REWARD:
            return value
        raise VerdictError(f"no number up to {LARGEST_REWARD:g} in {reply[:SHOWN]!r}")

    async def _vote(self, request: ScoreRequest, vote: str, context: Int32Array) -> tuple[float, str, int]:
        """Sample one reply; return its value, its text, and the tokens computed."""
        call = GenerateRequest(
            request_id=f"{request.where}, vote {vote}",
            token_ids=context,
            sampling=self.sampling,
            seed=stable_hash64(request.seed, vote),
            priority=request.priority,
        )
        completion = await call_engine(self.engine, self.policy, call, self.clock)
        try:
            reply = self.chat_format.parse(completion.token_ids.tolist()).content
        except LimitReachedError as refused:
            raise Unscorable(str(refused)) from None
        return self.value_of(reply), reply, len(context) - completion.cached_tokens + len(completion.token_ids)
