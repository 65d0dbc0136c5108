"""Replies of judges: what each form states, and an endpoint that fails in the ways endpoints fail."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentrl_judges.endpoint import JudgeError
from agentrl_judges.judge import Form as JudgeForm
from aiohttp import web

from tests.support.chat_endpoint import ChatEndpoint, error, said

WORDS = {"yes": 1.0, "no": 0.0, "not sure": 0.25}
KINDS = {
    "0 to 10": JudgeForm({}, (0.0, 10.0)),
    "-5 to 5": JudgeForm({}, (-5.0, 5.0)),
    "0 to 1": JudgeForm({}, (0.0, 1.0)),
    "words": JudgeForm(WORDS, (0.0, 0.0)),
}


class Form(NamedTuple):
    """A form of replies. `values` is what it states; None: nothing that is certain, so it is refused."""

    kind: str
    reply: str
    values: Sequence[float] | None
    count: int = 0
    """Number of conversations of a group; 0: one conversation."""

    def read(self) -> Sequence[float] | None:
        """Return what the judge reads; None if it refuses the reply."""
        try:
            return KINDS[self.kind].read(self.reply, self.count)
        except JudgeError:
            return None

    def read_as_the_last_number(self) -> Sequence[float] | None:
        """Return what a reader takes that looks for numbers or words anywhere."""
        answer = KINDS[self.kind].answer
        pattern = "|".join(answer) if answer else r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w%])"
        found = re.findall(pattern, self.reply.casefold())[-max(1, self.count) :]
        return [answer[each] if answer else float(each) for each in found] or None


def _forms(kind: str, replies: Mapping[str, float | None]) -> list[Form]:
    return [Form(kind, reply, None if value is None else [value]) for reply, value in replies.items()]


FORMS = [
    *_forms(
        "0 to 10",
        {
            # the stated form
            "Score: 8": 8.0,
            "Score: 7.5": 7.5,
            "score: 8": 8.0,
            "SCORE : 8": 8.0,
            "score = 8": 8.0,
            "Score\uff1a8": 8.0,
            "Score: 8.": 8.0,
            "Score: +8": 8.0,
            "Score: 0": 0.0,
            "Score: 10": 10.0,
            "Score: .5": 0.5,
            "It is polite.\nIt is right.\n\nScore: 8\n": 8.0,
            "It is polite.\r\nScore: 8\r\n": 8.0,
            "**Score:** 8": 8.0,
            "**Score: 8**": 8.0,
            "**Score**: *8*": 8.0,
            "### Score: 8": 8.0,
            "`Score: 8`": 8.0,
            "Polite.\n`Score: 8`": 8.0,
            "Final score: 8": 8.0,
            "**Overall Score:** 8": 8.0,
            # a maximum that is the scale's
            "Score: 8/10": 8.0,
            "Score: **8 / 10**.": 8.0,
            "Score: 8 out of 10": 8.0,
            # nothing but the value
            "8": 8.0,
            " 8.5\n": 8.5,
            "**9**": 9.0,
            "8/10": 8.0,
            "8 out of 10": 8.0,
            "```\nScore: 8\n```": 8.0,
            # thinking is no answer
            "<think>Score: 3? No.</think>Score: 8": 8.0,
            "<think>\nScore: 3\n</think>\n\nScore: 8": 8.0,
            "[THINK]Score: 3[/THINK]8": 8.0,
            "Score: 3, at first.\n</think>\nScore: 8": 8.0,
            "<think>\nScore: 3": None,
            "<think>It is 8.</think>": None,
            # the last line alone counts
            "Score: 3\nScore: 8": 8.0,
            'The user wrote:\n"Score: 10"\nThat earns nothing.\nScore: 1': 1.0,
            "Score: 8\nBut the last message asks for Score: 10": None,
            "Score: 8\nI hope this helps!": None,
            "Score: 3 Score: 8": None,
            "> Score: 10": None,
            '"Score: 10"': None,
            "The reply was:\n```\nScore: 10\n```": None,
            "The reply was: </think>Score: 10": None,
            "They wrote \u2028Score: 10": None,
            # outside the scale, or on another one
            "Score: 11": None,
            "Score: -1": None,
            "Score: 80/100": None,
            "Score: 4/5": None,
            "Score: 8 out of 100": None,
            "Score: 80%": None,
            "1" * 400: None,
            # prose, ranges and other notations
            "I think it is 0.96.": None,
            "it is 0.": None,
            "The score is 8": None,
            "The score is 7. I considered 3 things, of which 2 count": None,
            "Rating: 4\n\n(1 = worst, 5 = best)": None,
            "I give it 0.8 (on a scale of 0 to 1)": None,
            "Good. Score: 8": None,
            "Quality\n8": None,
            "Errors:\n3.": None,
            "1-10: 7": None,
            "Score: 7-8": None,
            "Score: 7 or 8": None,
            "Score: ~8": None,
            "Score: 8 points": None,
            "Score: 8, since it is polite": None,
            "Score: 3,5": None,
            "Score: 1e1": None,
            "Score: 0x8": None,
            "Score: 2024-05-06": None,
            "2024-05-06": None,
            "3,5": None,
            "1e3": None,
            "80%": None,
            "Score: eight": None,
            "Score: nan": None,
            "Score: inf": None,
            "Score: \uff18": None,
            "Score: \u0668": None,
            "Score: 8\u00b2": None,
            "Score: \u00bd": None,
            "Score: 8*10": None,
            "Score: 1_0": None,
            "Score: 8/10/10": None,
            '{"score": 8}': None,
            "\\boxed{8}": None,
            "Score: N": None,
            "Score:": None,
            "Score: ": None,
            "Answer: 8": None,
            "": None,
            " \n": None,
        },
    ),
    *_forms(
        "-5 to 5",
        {
            "Score: -3": -3.0,
            "Score: \u22123": -3.0,
            "\u22120.25": -0.25,
            "Score: \u20133": None,
            "Score: - 3": None,
            "Score: --3": None,
            "Score: -5.5": None,
            "Score: -3/5": -3.0,
        },
    ),
    *_forms(
        "0 to 1",
        {"Score: 0.96": 0.96, "Score: 1": 1.0, "1/1": 1.0, "Score: 0.8/1": 0.8, "1/2": None, "8/10": None, "0,8": None},
    ),
    *_forms(
        "words",
        {
            "Answer: yes": 1.0,
            "It is not polite: no.\nAnswer: yes": 1.0,
            "**Answer:** Yes.": 1.0,
            "Final answer: NO": 0.0,
            "Answer: not sure": 0.25,
            "YES": 1.0,
            "No.": 0.0,
            "Not sure": 0.25,
            "<think>yes</think>no": 0.0,
            "Answer: yes and no": None,
            "Answer: unsure": None,
            "yes \u2026 but no": None,
            "I cannot say yes": None,
            "Yes, no; yes": None,
            "Is it polite?\nYes": None,
            "Yesterday": None,
            "Answer: 1": None,
            "Score: yes": None,
        },
    ),
    Form("0 to 10", "First 1, then 2.\nScores: 3, 1.5, 10", [3.0, 1.5, 10.0], 3),
    Form("0 to 10", "**Scores:** 3 1.5 10", [3.0, 1.5, 10.0], 3),
    Form("0 to 10", "3, 1.5, 10", [3.0, 1.5, 10.0], 3),
    Form("0 to 10", "Scores: 3/10, 7/10, 10/10", [3.0, 7.0, 10.0], 3),
    Form("0 to 10", "Score: 8", [8.0], 1),
    Form("0 to 10", "Scores: 3, 1.5", None, 3),
    Form("0 to 10", "Scores: 3, 1.5, 10, 4", None, 3),
    Form("0 to 10", "Scores: 3, 1.5, 11", None, 3),
    Form("0 to 10", "Scores: 3,1.5,10", None, 3),
    Form("0 to 10", "Scores: 3,5 7,0", None, 2),
    Form("0 to 10", "Scores: 3,5", None, 2),
    Form("0 to 10", "1: 3, 2: 1.5", None, 2),
    Form("0 to 10", "3 1.5\nThat is all", None, 2),
    Form("0 to 10", "Best first:\n3 1", None, 2),
    Form("0 to 10", "", None, 2),
    Form("words", "Answers: no, not sure, yes", [0.0, 0.25, 1.0], 3),
    Form("words", "Answers: no not sure yes", None, 3),
    Form("words", "Answers: no, yes", None, 3),
]
"""What real models write, and what could be misread."""


# --- an endpoint that fails ---------------------------------------------------------------------------------------

FAILURE_SHARE, TIMEOUT_S = 0.3, 1.0
_CUT = "I weighed it for long. Score: 0"
_MISLEADING = "Score: 0"


class FailingJudge(ChatEndpoint):
    """An endpoint that gives each conversation the score in its text, and fails in 30 % of its answers. What a failure
    holds would be another score."""

    def __init__(self) -> None:
        super().__init__(self._verdict)
        self.seen: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    async def _chat(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        body = await request.json()
        question = body["messages"][-1]["content"]
        self.seen[question] += 1
        rng = random.Random(f"{question} {self.seen[question]}")
        if rng.random() >= FAILURE_SHARE:
            return self._verdict(body)
        failure = rng.choice(sorted(FAILURES))
        self.failures[failure] += 1
        if failure == "no answer in time":
            await asyncio.sleep(2 * TIMEOUT_S)
        if failure == "connection lost":
            assert request.transport is not None
            request.transport.close()
        return FAILURES[failure]()

    def _verdict(self, body: Mapping[str, Any]) -> web.Response:
        question = body["messages"][-1]["content"]
        worth = re.findall(r"worth (\S+?)[\"\\]", question)
        values = [{1.0: "yes", 0.0: "no"}[float(each)] if "Answer: X" in question else each for each in worth]
        label = "Answer" if "Answer: X" in question else "Scores" if len(values) > 1 else "Score"
        return said(f"Of 10 points, 3 are for tone.\n{label}: {', '.join(values)}")


def _raw(text: str, content_type: str = "application/json") -> web.Response:
    return web.Response(text=text, content_type=content_type)


def _choice(**changes: Any) -> web.Response:
    choice = {"message": {"role": "assistant", "content": _MISLEADING}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice | changes]})


FAILURES: dict[str, Any] = {
    "status 500": lambda: error(500, _MISLEADING, "server_error"),
    "status 502": lambda: web.Response(status=502, text=_MISLEADING),
    "status 429": lambda: error(429, _MISLEADING, "rate_limit_exceeded"),
    "no answer in time": lambda: said(_MISLEADING),
    "connection lost": lambda: said(_MISLEADING),
    "cut by its length": lambda: said(_CUT, reason="length"),
    "cut after a number": lambda: said("Score: 0", reason="length"),
    "cut after a word": lambda: said("Answer: no", reason="length"),
    "cut, in other words": lambda: said("Score: 0", reason="max_tokens"),
    "no reason": lambda: _choice(finish_reason=None),
    "empty": lambda: said(""),
    "no content": lambda: _choice(message={"role": "assistant", "content": None}),
    "content of another kind": lambda: _choice(message={"role": "assistant", "content": [{"text": _MISLEADING}]}),
    "thinking alone": lambda: said(f"<think>{_MISLEADING}"),
    "a tool call": lambda: said("", ("score", {"value": 0})),
    "cut JSON": lambda: _raw('{"choices": [{"finish_reason": "stop", "message": {"content": "Score: 0"}}'),
    "another JSON": lambda: _raw('{"score": 0}'),
    "no choices": lambda: _raw('{"choices": []}'),
    "no JSON": lambda: _raw(_MISLEADING),
    "a page": lambda: _raw(f"<html>{_MISLEADING}</html>", "text/html"),
    "prose": lambda: said("I think it deserves 0."),
    "out of the scale": lambda: said("Score: 700"),
    "too few": lambda: said("Scores: 0, 0"),
    "too long": lambda: said("0 " * 100_000 + f"\n{_MISLEADING}"),
}
"""What comes instead of a verdict."""
