"""A scorer that has one of the run's policies judge a conversation by a rubric.

A score is read from the last line of a complete reply, in the form that the prompt states: `Score: N` on the declared
scale, or `Answer: WORD`. A reply that is only the value counts too. Any other reply is refused, and the judge is asked
again: a score guessed from prose would be wrong in silence.
"""

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
from agentrl.core.reply_formats import THINKING, split_thinking
from agentrl.core.text import plural
from agentrl.environment.context import LimitReachedError
from agentrl.environment.rewards import LARGEST_REWARD
from agentrl.rollout.scoring.retrying import Answer, RetryingScorer, call_engine, conversation_content

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, Sampler, SamplingParams
    from agentrl.core.records import Int32Array, PolicyVersion, Scored, ScoreRequest

_NUMBER = r"[-+\u2212]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_SHARE = re.compile(rf"({_NUMBER})(?: ?/ ?| out of )({_NUMBER})", re.IGNORECASE)
"""A score with its maximum, such as `8/10`."""
_LABELED = r"(?:(?:final|overall) )?{}s?[*_`]*\s*[:\uff1a=]"
_MARKUP = "#*_` \t"
"""Markdown and spaces around a line, its label and its value."""
_FENCED = re.compile(r"```\w*\n([^\n]*)\n```")

SHOWN = 500
"""Maximum number of characters of each reply kept in the journal, as the score's note."""


class VerdictError(Exception):
    """A judge's reply does not state an answer in the form of the prompt. The judge is asked again, with another
    seed."""


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
    """Score of each answer; empty: the judge answers with a number."""
    scale: tuple[float, float] = (-LARGEST_REWARD, LARGEST_REWARD)
    """Lowest and highest number; unused with `answer`."""
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
        prompt = context.tolist()
        options = [np.array(self.chat_format.encode(answer, prompt), np.int32) for answer in self.answer]
        rows = [np.concatenate([context, option]) for option in options]
        pin = request.pins.get(self.policy)
        scores = await asyncio.gather(*(self.engine.score(pin or self.policy, row) for row in rows))
        logprobs = [float(each.logprobs[len(context) :].sum()) for each in scores]
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
        form = self._form(1) if self.votes else f"Answer with one of: {', '.join(self.answer)}."
        lines = _lines(conversation)
        return "\n".join([self.rubric.strip(), "", *lines, "", f"Judge {subject}. {form}"])

    def group_question(self, members: Sequence[Scored]) -> str:
        """Return the judge's prompt about several conversations, numbered from 1."""
        lines = [self.rubric.strip()]
        for number, member in enumerate(members, start=1):
            lines += ["", f"Conversation {number}:", *_lines(member)]
        count = len(members)
        lines += ["", f"Compare the {count} conversations, and judge each, in this order. {self._form(count)}"]
        return "\n".join(lines)

    def _form(self, count: int) -> str:
        """State the form in which a reply must end."""
        if self.answer:
            symbol, values = "X", f"one of: {', '.join(self.answer)}"
        else:
            symbol, values = "N", "a number from {:g} to {:g}".format(*self.scale)
        line = f"{self._label}{'s' * (count > 1)}: {', '.join([symbol] * count)}"
        return f"The last line of your reply must be `{line}`, where {symbol} is {values}."

    @property
    def _label(self) -> str:
        return "Answer" if self.answer else "Score"

    def value_of(self, reply: str) -> float:
        """Read the score from a complete reply.

        Raises:
            VerdictError: the last line does not state it.
        """
        return self._value(self._stated(reply), reply)

    def values_of(self, reply: str, count: int) -> list[float]:
        """Read the scores of `count` conversations from a complete reply.

        Raises:
            VerdictError: the last line does not state as many.
        """
        has_spaces = any(" " in answer for answer in self.answer)
        parts = re.split(r",\s+" if has_spaces else r",?\s+", self._stated(reply))
        if len(parts) != count:
            raise VerdictError(
                f"the last line states {plural(len(parts), 'value')} for {plural(count, 'conversation')}: {_end(reply)}"
            )
        return [self._value(part, reply) for part in parts]

    def _stated(self, reply: str) -> str:
        """Return what the last line states: the text after its label, or a whole reply of one line.

        Raises:
            VerdictError: the last line has no label, and other lines are before it.
        """
        text = reply.replace("\r\n", "\n").strip()
        for marks in THINKING:
            if text.startswith(marks[0]):
                text = split_thinking(text, marks)[1].strip()
        if fenced := _FENCED.fullmatch(text):  # a fence after other lines may quote the conversation
            text = fenced[1]
        *before, line = text.split("\n")
        line = line.strip(_MARKUP)
        if label := re.match(_LABELED.format(self._label), line, re.IGNORECASE):
            line = line[label.end() :]
        elif before:
            raise VerdictError(f"the last line does not begin with `{self._label}:`: {_end(reply)}")
        return line.strip(_MARKUP).removesuffix(".").rstrip(_MARKUP)

    def _value(self, stated: str, reply: str) -> float:
        """Convert a stated value.

        Raises:
            VerdictError: it is none of the answers, or no number on the scale.
        """
        if self.answer:
            if (value := self.answer.get(stated.casefold())) is not None:
                return value
            raise VerdictError(f"{stated[:SHOWN]!r} is not one of {', '.join(self.answer)}: {_end(reply)}")
        low, high = self.scale
        share = _SHARE.fullmatch(stated)
        if share and _number(share[2]) == high:
            stated = share[1]
        if re.fullmatch(_NUMBER, stated) and low <= (number := _number(stated)) <= high:
            return number
        raise VerdictError(f"{stated[:SHOWN]!r} is not a number from {low:g} to {high:g}: {_end(reply)}")

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
        if completion.finish_reason != "stop":
            raise VerdictError(
                f"the reply was cut before its end: raise max_tokens of the policy {self.policy!r} "
                f"({self.sampling.max_tokens} tokens)"
            )
        try:
            reply = self.chat_format.parse(completion.token_ids.tolist(), context=context.tolist()).content
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


def _lines(conversation: Scored) -> list[str]:
    return [json.dumps(content, ensure_ascii=False) for content in conversation_content(conversation)]


def _number(text: str) -> float:
    return float(text.replace("\u2212", "-"))


def _end(reply: str) -> str:
    """Quote the end of a reply, for a message."""
    return repr(reply[-SHOWN:])
