"""A scorer that asks an LLM to judge a conversation by a rubric.

A score is read from the last line of a complete reply, in the form that the prompt states: `Score: N` on the declared
scale, or `Answer: WORD`. A reply that is only the value counts too. Any other reply is an error: a score guessed from
prose would be wrong in silence.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from agentrl import Message, Score, Scored, scorer
from agentrl_judges.endpoint import Endpoint, JudgeError, RefusedError
from agentrl_judges.wrappers import Scorer

_NUMBER = r"[-+\u2212]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_SHARE = re.compile(rf"({_NUMBER})(?: ?/ ?| out of )({_NUMBER})", re.IGNORECASE)
"""A score with its maximum, such as `8/10`."""
_LABELED = r"(?:(?:final|overall) )?{}s?[*_`]*\s*[:\uff1a=]"
_MARKUP = "#*_` \t"
"""Markdown and spaces around a line, its label and its value."""
_FENCED = re.compile(r"```\w*\n([^\n]*)\n```")
_THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Marks around thinking."""
SHOWN = 500
"""Maximum number of characters of each reply in the score's note."""
MAX_CONCURRENT = 64
"""Maximum number of requests of a judge at once, in each worker."""


@dataclass(frozen=True)
class Form:
    """The form of a judge's last line."""

    answer: Mapping[str, float]
    """Score of each answer; empty: a number."""
    scale: tuple[float, float]
    """Lowest and highest number; unused with `answer`."""

    @property
    def _label(self) -> str:
        return "Answer" if self.answer else "Score"

    def text(self, count: int) -> str:
        """State the form for `count` conversations."""
        if self.answer:
            symbol, values = "X", f"one of: {', '.join(self.answer)}"
        else:
            symbol, values = "N", "a number from {:g} to {:g}".format(*self.scale)
        line = f"{self._label}{'s' * (count > 1)}: {', '.join([symbol] * count)}"
        return f"The last line of your reply must be `{line}`, where {symbol} is {values}."

    def read(self, reply: str, count: int = 0) -> list[float]:
        """Read the scores of `count` conversations of a group, or of one conversation (0), from a complete reply.

        Raises:
            JudgeError: the last line does not state them.
        """
        stated = self._stated(reply)
        if not count:
            return [self._value(stated, reply)]
        has_spaces = any(" " in answer for answer in self.answer)
        parts = re.split(r",\s+" if has_spaces else r",?\s+", stated)
        if len(parts) != count:
            raise JudgeError(f"the last line states {len(parts)} values for {count} conversations: {_end(reply)}")
        return [self._value(part, reply) for part in parts]

    def _stated(self, reply: str) -> str:
        """Return what the last line states: the text after its label, or a whole reply of one line."""
        text = reply.replace("\r\n", "\n").strip()
        for begin, end in _THINKING:
            if text.startswith(begin):
                text = text.partition(end)[2].strip()
        if fenced := _FENCED.fullmatch(text):  # a fence after other lines may quote the conversation
            text = fenced[1]
        *before, line = text.split("\n")
        line = line.strip(_MARKUP)
        if label := re.match(_LABELED.format(self._label), line, re.IGNORECASE):
            line = line[label.end() :]
        elif before:
            raise JudgeError(f"the last line does not begin with `{self._label}:`: {_end(reply)}")
        return line.strip(_MARKUP).removesuffix(".").rstrip(_MARKUP)

    def _value(self, stated: str, reply: str) -> float:
        if self.answer:
            if (value := self.answer.get(stated.casefold())) is not None:
                return value
            raise JudgeError(f"{stated[:SHOWN]!r} is not one of {', '.join(self.answer)}: {_end(reply)}")
        low, high = self.scale
        share = _SHARE.fullmatch(stated)
        if share and _number(share[2]) == high:
            stated = share[1]
        if re.fullmatch(_NUMBER, stated) and low <= (number := _number(stated)) <= high:
            return number
        raise JudgeError(f"{stated[:SHOWN]!r} is not a number from {low:g} to {high:g}: {_end(reply)}")


def judge(
    rubric: str,
    endpoint: Endpoint,
    *,
    answer: Mapping[str, float] | None = None,
    scale: tuple[float, float] | None = None,
    votes: int = 1,
    unscorable: float | None = None,
) -> Scorer:
    """Make a scorer that asks an LLM.

    Args:
        rubric: instructions for the judge.
        endpoint: the judge.
        answer: score of each possible answer, such as `{"yes": 1.0, "no": 0.0}`.
        scale: lowest and highest number, such as `(0, 10)`, in place of `answer`.
        votes: number of replies; the score is their mean. Several need a temperature near 1.
        unscorable: score of content that the endpoint refuses; None: that is an error.

    Raises:
        ValueError: neither or both of `answer` and `scale` are given, or an answer cannot be read back.
    """
    if bool(answer) == bool(scale):
        raise ValueError("a judge gives an answer or a number: set answer={'yes': 1.0, 'no': 0.0}, or scale=(0, 10)")
    if scale and not scale[0] < scale[1]:
        raise ValueError("scale needs a lowest score below the highest")
    if votes < 1:
        raise ValueError("votes must be at least 1")
    for word in answer or {}:
        if not word or " ".join(word.casefold().split()).strip("#*_`.").replace(",", "") != word:
            raise ValueError(f"{word!r}: write words in lower case, without commas and . # * _ ` around them")
    form = Form(dict(answer or {}), scale or (0.0, 0.0))
    places = asyncio.Semaphore(MAX_CONCURRENT)

    async def vote(members: Sequence[Scored], number: int, count: int) -> tuple[list[float], str]:
        order = list(range(len(members)))
        text = prompt(rubric, form, members, count)
        if count:  # judges prefer some positions, so each vote has an order of its own
            random.Random(f"{number} {text}").shuffle(order)
            text = prompt(rubric, form, [members[at] for at in order], count)
        async with places:
            reply = await endpoint.ask(text)
        values = form.read(reply, count)
        note = f"[order {' '.join(str(at + 1) for at in order)}] " if count else ""
        return [values[order.index(at)] for at in range(len(members))], note + reply[:SHOWN]

    @scorer
    async def judged(scored: Any) -> Score:
        members = [scored] if isinstance(scored, Scored) else list(scored)
        count = 0 if isinstance(scored, Scored) else len(members)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(vote(members, number, count)) for number in range(votes)]
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, RefusedError) and unscorable is not None:
                return Score([unscorable] * count if count else unscorable, str(error))
            raise error from None
        replies = [task.result() for task in tasks]
        by_member = list(zip(*(values for values, _ in replies), strict=True))
        means, note = [fmean(values) for values in by_member], " | ".join(text for _, text in replies)
        if count and votes > 1:
            note = f"spread of the votes {fmean(map(pstdev, by_member)):.3g}: {note}"
        return Score(means if count else means[0], note)

    return judged


def prompt(rubric: str, form: Form, members: Sequence[Scored], count: int) -> str:
    """Return the judge's prompt. Messages are JSON, so that no content can imitate the end of a message."""
    if not count:
        end = f"Judge the conversation by these instructions. {form.text(1)}"
        return "\n".join([rubric.strip(), "", *_lines(members[0]), "", end])
    lines = [rubric.strip()]
    for number, member in enumerate(members, start=1):
        lines += ["", f"Conversation {number}:", *_lines(member)]
    lines += ["", f"Compare the {count} conversations, and judge each, in this order. {form.text(count)}"]
    return "\n".join(lines)


def _lines(scored: Scored) -> list[str]:
    contents = [_content(message) for message in scored.messages]
    if scored.turn.is_cut:
        contents[-1]["cut_off"] = True
    return [json.dumps(content, ensure_ascii=False) for content in contents]


def _content(message: Message) -> dict[str, object]:
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {"role": message.role, "content": message.content} | ({"tool_calls": calls} if calls else {})


def _number(text: str) -> float:
    return float(text.replace("\u2212", "-"))


def _end(reply: str) -> str:
    """Quote the end of a reply, for a message."""
    return repr(reply[-SHOWN:])
