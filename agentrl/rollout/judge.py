"""A scorer that has one of the run's policies judge a conversation by a rubric."""

from __future__ import annotations

import asyncio
import json
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

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
    from agentrl.core.records import Int32Array, PolicyVersion, Scored, ScoreRequest

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w%])")

SHOWN = 500
"""Maximum number of characters of each reply kept in the journal, as the score's note."""


class VerdictError(Exception):
    """A judge's reply contains no answer. The judge is asked again, with another seed."""


class Reply(NamedTuple):
    """One vote."""

    value: float
    text: str
    tokens: int
    """Tokens computed for it."""
    version: PolicyVersion
    """Version that sampled it."""


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
    """Number of replies; 0: the probabilities of the answers are computed instead."""
    learns: bool = False
    """Whether the policy learns, so that its versions differ."""

    async def judge(self, request: ScoreRequest, attempt: int) -> Answer:
        question = Message(role="user", content=self.question(request.scored))
        context = np.array(self.chat_format.start([question], ()), dtype=np.int32)
        if len(context) + self.sampling.max_tokens > self.max_context:
            raise Unscorable(f"it has {len(context)} tokens; the judge's context holds {self.max_context}")
        if not self.votes:
            return await self._expected(context)
        votes = [f"{attempt}.{vote}" for vote in range(self.votes)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._vote(request, vote, context)) for vote in votes]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        replies = [task.result() for task in tasks]
        return Answer(
            fmean(reply.value for reply in replies),
            " | ".join(reply.text[:SHOWN] for reply in replies),
            sum(reply.tokens for reply in replies),
            judged_by=min(reply.version for reply in replies) if self.learns else None,
        )

    async def _expected(self, context: Int32Array) -> Answer:
        """Return the expected value of the answers, by their probabilities as the beginning of the reply."""
        options = [np.array(self.chat_format.encode(answer), np.int32) for answer in self.answer]
        rows = [np.concatenate([context, option]) for option in options]
        scored = await asyncio.gather(*(self.engine.score(self.policy, row) for row in rows))
        logprobs = [float(each[len(context) :].sum()) for each in scored]
        largest = max(logprobs)
        weights = [math.exp(logprob - largest) for logprob in logprobs]
        value = sum(map(operator.mul, weights, self.answer.values())) / sum(weights)
        note = ", ".join(f"{name} {math.exp(each):.3g}" for name, each in zip(self.answer, logprobs, strict=True))
        return Answer(value, note, sum(map(len, rows)))

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

    async def _vote(self, request: ScoreRequest, vote: str, context: Int32Array) -> Reply:
        """Sample one reply."""
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
        tokens = len(context) - completion.cached_tokens + len(completion.token_ids)
        return Reply(self.value_of(reply), reply, tokens, completion.spans[0].version)
