"""Demonstrations for the warm-up: conversations in the right format, about half of them with mistakes.

A demonstration calls the calculator from left to right and passes on its results. Its length is random, and so are some
operands, operators and answers; a few calls are malformed and then corrected. The model learns to call the tool, to
copy results, to recover from an error, and to end an episode with a bare number. Reinforcement learning teaches it to
finish the calculation and to be exact.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.core.reply_formats import parse_hermes
from agentrl.environments.calculator.env import Calculator

if TYPE_CHECKING:
    from random import Random

FINISH = {2: 0.6, 3: 0.5, 4: 0.45}
"""Probability that a demonstration performs all operations, by number of terms."""
MISTAKE = 0.01
"""Probability of a wrong operand or operator in a call."""
SLIP = 0.01
"""Probability that the answer differs from the computed number."""
BROKEN_CALL_SHARE = 0.02
"""Probability of a malformed call before a correct one, which demonstrates recovery from an error."""

_PIECE = r'</?tool_call>|\{"name":"calculate","arguments":\{"a":|,"op":"[+-]","b":|\d+|.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation after the question: the assistant's replies, and the calculator's observations."""

    replies: tuple[str, ...]
    """Replies, one more than the observations; the last one is the answer."""
    observed: tuple[str, ...]


def demonstrate(question: str, random: Random) -> Demonstration:
    """Return a demonstration for a `chain_sum` question."""
    terms = [int(term) for term in re.findall(r"\d+", question)]
    operators = re.findall(r" ([+-]) ", question)
    operations = len(operators)
    if random.random() >= FINISH[len(terms)]:
        operations = random.randrange(1, operations) if operations > 1 else 0
    value, replies = str(terms[0]), []
    observations: list[str] = []
    for op, term in list(zip(operators, terms[1:], strict=True))[:operations]:
        call = call_text(*_with_mistake(int(value), op, term, random))
        if random.random() < BROKEN_CALL_SHARE:
            replies.append(_break_call(call, random))
            observations.append(observation(replies[-1]))
        replies.append(call)
        value = observation(call)
        observations.append(value)
    replies.append(str(_other_number(int(value), random)) if random.random() < SLIP else value)
    return Demonstration(replies=tuple(replies), observed=tuple(observations))


def call_text(a: int, op: str, b: int) -> str:
    """Return a calculator call in the model's format."""
    call = {"name": "calculate", "arguments": {"a": a, "op": op, "b": b}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


def observation(text: str) -> str:
    """Return the environment's answer to a call."""
    call = parse_hermes(text)[1][0]
    bound = Calculator.tool_table()["calculate"]
    try:
        return str(Calculator().calculate(**bound.validate(call.arguments)))
    except ValueError as error:
        return f"error: {error}"


def _with_mistake(a: int, op: str, b: int, random: Random) -> tuple[int, str, int]:
    if random.random() >= MISTAKE:
        return a, op, b
    wrong = [(_other_number(a, random), op, b), (a, "+" if op == "-" else "-", b), (a, op, _other_number(b, random))]
    return random.choice(wrong)


def _break_call(call: str, random: Random) -> str:
    """Return `call` with a piece missing or repeated, so that it no longer parses."""
    pieces = re.findall(_PIECE, call)
    at = random.randrange(1, len(pieces) - 1)
    pieces[at] = "" if pieces[at].isdigit() else random.choice(["", pieces[at] * 2])
    return "".join(pieces)


def _other_number(number: int, random: Random) -> int:
    """Return a number with the same digits except for one."""
    digits = list(str(abs(number)))
    digits[random.randrange(len(digits))] = random.choice("123456789")
    return int("".join(digits)) * (-1 if number < 0 else 1)
