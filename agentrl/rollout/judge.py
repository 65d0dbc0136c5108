"""A scorer that has one of the run's policies judge a conversation by a rubric."""

from __future__ import annotations

import asyncio
import json
import math
import operator
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
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

    values: Sequence[float]
    """The score, or those of a group's members in their order."""
    text: str
    tokens: int
    """Tokens computed for it."""
    version: PolicyVersion
    """Version that sampled it."""


class Ballot(NamedTuple):
    """The question of one vote."""

    name: str
    context: Int32Array
    order: Sequence[int] = ()
    """Members of a group in the order of the question."""


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
    """Whether the policy learns or has several past versions, so that scores name the version."""

    @property
    def calls(self) -> int:
        return self.votes or len(self.answer)

    async def judge(self, request: ScoreRequest, attempt: int) -> Answer:
        votes = [f"{attempt}.{vote}" for vote in range(self.votes)]
        if request.group:
            ballots = [self._shuffle(request, vote) for vote in votes]
        else:
            context = self._context(self.question(request.scored))
            if not self.votes:
                return await self._expected(request, context)
            ballots = [Ballot(vote, context) for vote in votes]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._vote(request, ballot)) for ballot in ballots]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        replies = [task.result() for task in tasks]
        by_member = list(zip(*(reply.values for reply in replies), strict=True))
        means = [fmean(votes) for votes in by_member]
        return Answer(
            means if request.group else means[0],
            " | ".join(reply.text[:SHOWN] for reply in replies),
            sum(reply.tokens for reply in replies),
            judged_by=min(reply.version for reply in replies) if self.learns else None,
            spread=fmean(map(pstdev, by_member)) if request.group and len(replies) > 1 else None,
        )

    def _context(self, question: str) -> Int32Array:
        """Return the tokens of a question.

        Raises:
            Unscorable: they are too many for the judge.
        """
        message = Message(role="user", content=question)
        context = np.array(self.chat_format.start([message], ()), dtype=np.int32)
        if len(context) + self.sampling.max_tokens > self.max_context:
            raise Unscorable(f"it has {len(context)} tokens; the judge's context holds {self.max_context}")
        return context

    def _shuffle(self, request: ScoreRequest, vote: str) -> Ballot:
        """Ask about a group's members in an order of the vote's own, since judges prefer some positions."""
        order = list(range(len(request.group)))
        random.Random(stable_hash64(request.seed, vote, "order")).shuffle(order)
        return Ballot(vote, self._context(self.group_question([request.group[member] for member in order])), order)

    async def _expected(self, request: ScoreRequest, context: Int32Array) -> Answer:
        """Return the expected value of the answers, by their probabilities as the beginning of the reply."""
        options = [np.array(self.chat_format.encode(answer), np.int32) for answer in self.answer]
        rows = [np.concatenate([context, option]) for option in options]
        pin = request.pins.get(self.policy)
        row_logprobs = await asyncio.gather(*(self.engine.score(pin or self.policy, row) for row in rows))
        logprobs = [float(each[len(context) :].sum()) for each in row_logprobs]
        largest = max(logprobs)
        weights = [math.exp(logprob - largest) for logprob in logprobs]
        value = sum(map(operator.mul, weights, self.answer.values())) / sum(weights)
        note = ", ".join(f"{name} {math.exp(each):.3g}" for name, each in zip(self.answer, logprobs, strict=True))
        return Answer(value, note, sum(map(len, rows)), judged_by=pin)

    def content(self, request: ScoreRequest) -> str:
        pin, question = request.pins.get(self.policy), self.question(request.scored)
        return question if pin is None else f"{pin}\n{question}"

    def question(self, conversation: Scored) -> str:
        """Return the judge's prompt. Messages are JSON, so that no content can imitate the end of a message."""
        subject = "the whole conversation" if self.per == "episode" else "the last message"
        instruction = f"Answer with one of: {', '.join(self.answer)}." if self.answer else "Answer with a number."
        lines = [json.dumps(message_content(message), ensure_ascii=False) for message in conversation.messages]
        return "\n".join([self.rubric.strip(), "", *lines, "", f"Judge {subject}. {instruction}"])

    def group_question(self, members: Sequence[Scored]) -> str:
        """Return the judge's prompt about several conversations, numbered from 1."""
        one = f"one of {', '.join(self.answer)}" if self.answer else "one number"
        lines = [self.rubric.strip()]
        for number, member in enumerate(members, start=1):
            messages = [json.dumps(message_content(message), ensure_ascii=False) for message in member.messages]
            lines += ["", f"Conversation {number}:", *messages]
        lines += [
            "",
            f"Compare the {len(members)} conversations. The last line of your reply must hold {one} for each "
            "conversation, in this order, separated by spaces, and nothing else.",
        ]
        return "\n".join(lines)

    def values_of(self, reply: str, count: int) -> list[float]:
        """Read the scores of `count` conversations from the last line of a reply.

        Raises:
            VerdictError: the line does not hold as many answers.
        """
        line = (reply.strip().splitlines() or [""])[-1]
        if self.answer:
            values = [self.answer[word] for word in self._answers_in(line)]
        else:
            values = [float(number) for number in _NUMBER.findall(line)]
        if len(values) != count or max(map(abs, values)) > LARGEST_REWARD:
            raise VerdictError(f"the last line does not hold {count} answers: {reply[-SHOWN:]!r}")
        return values

    def _answers_in(self, reply: str) -> list[str]:
        return re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, self.answer))})(?!\w)", reply.casefold())

    def value_of(self, reply: str) -> float:
        """Read the score from a reply.

        Raises:
            VerdictError: the reply contains no answer.
        """
        if self.answer:
            if matches := self._answers_in(reply):
                return self.answer[matches[-1]]
            raise VerdictError(f"none of {', '.join(self.answer)} in {reply[:SHOWN]!r}")
        numbers = _NUMBER.findall(reply)
        if numbers and abs(value := float(numbers[-1])) <= LARGEST_REWARD:
            return value
        raise VerdictError(f"no number up to {LARGEST_REWARD:g} in {reply[:SHOWN]!r}")

    async def _vote(self, request: ScoreRequest, ballot: Ballot) -> Reply:
        """Sample one reply."""
        context = ballot.context
        call = GenerateRequest(
            request_id=f"{request.where}, vote {ballot.name}",
            token_ids=context,
            sampling=self.sampling,
            seed=stable_hash64(request.seed, ballot.name),
            priority=request.priority,
        )
        pin = request.pins.get(self.policy)
        policy = self.policy if pin is None else pin.policy
        completion = await call_engine(self.engine, policy, call, self.clock, pin=pin)
        try:
            reply = self.chat_format.parse(completion.token_ids.tolist()).content
        except LimitReachedError as refusal:
            raise Unscorable(str(refusal)) from None
        tokens = len(context) - completion.cached_tokens + len(completion.token_ids)
        version = completion.spans[0].version
        if not ballot.order:
            return Reply([self.value_of(reply)], reply, tokens, version)
        by_place = self.values_of(reply, len(ballot.order))
        values = [by_place[ballot.order.index(member)] for member in range(len(by_place))]
        places = " ".join(str(member + 1) for member in ballot.order)
        return Reply(values, f"[order {places}] {reply}", tokens, version)
