"""What the warm-up shows the model: the form of a conversation, with mistakes in about half of them.

A demonstration calls the calculator from left to right and carries its results on. How long it keeps going, and now and
then an operand, an operator or the answer, is left to chance; a few calls are malformed and mended. So the model learns
how to call and to copy, how to go on after an error, and that an episode ends with a bare number. That it pays to go on
to the end, and to be exact, is left to learn by reward.
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
"""Chance that a demonstration does all operations, by number of terms."""
MISTAKE = 0.01
"""Chance that a call has a wrong operand or operator."""
SLIP = 0.01
"""Chance that the answer is not the number the demonstration arrived at."""
BROKEN = 0.02
"""Chance that a call is preceded by a malformed one, which shows how to go on after an error."""

_PIECE = r'</?tool_call>|\{"name":"calculate","arguments":\{"a":|,"op":"[+-]","b":|\d+|.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation after the question: what the assistant says, and what the calculator answers in between."""

    said: tuple[str, ...]
    """One more than there are observations; the last one is the answer."""
    observed: tuple[str, ...]


def demonstrate(question: str, random: Random) -> Demonstration:
    """A demonstration for a `chain_sum` question."""
    terms = [int(term) for term in re.findall(r"\d+", question)]
    operators = re.findall(r" ([+-]) ", question)
    operations = len(operators)
    if random.random() >= FINISH[len(terms)]:
        operations = random.randrange(1, operations) if operations > 1 else 0
    value, said = str(terms[0]), []
    observed: list[str] = []
    for op, term in list(zip(operators, terms[1:], strict=True))[:operations]:
        call = call_text(*_with_mistake(int(value), op, term, random))
        if random.random() < BROKEN:
            said.append(_broken(call, random))
            observed.append(observation(said[-1]))
        said.append(call)
        value = observation(call)
        observed.append(value)
    said.append(str(_other(int(value), random)) if random.random() < SLIP else value)
    return Demonstration(said=tuple(said), observed=tuple(observed))


def call_text(a: int, op: str, b: int) -> str:
    """A call of the calculator as the model writes it."""
    call = {"name": "calculate", "arguments": {"a": a, "op": op, "b": b}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


def observation(text: str) -> str:
    """What the environment answers to one call."""
    call = parse_hermes(text)[1][0]
    bound = Calculator.tool_table()["calculate"]
    try:
        return str(Calculator().calculate(**bound.validate(call.arguments)))
    except ValueError as error:
        return f"error: {error}"


def _with_mistake(a: int, op: str, b: int, random: Random) -> tuple[int, str, int]:
    if random.random() >= MISTAKE:
        return a, op, b
    wrong = [(_other(a, random), op, b), (a, "+" if op == "-" else "-", b), (a, op, _other(b, random))]
    return random.choice(wrong)


def _broken(call: str, random: Random) -> str:
    """`call` with a piece missing or written twice, so that it is no call any more."""
    pieces = re.findall(_PIECE, call)
    at = random.randrange(1, len(pieces) - 1)
    pieces[at] = "" if pieces[at].isdigit() else random.choice(["", pieces[at] * 2])
    return "".join(pieces)


def _other(number: int, random: Random) -> int:
    """A number of as many digits, one of them changed."""
    digits = list(str(abs(number)))
    digits[random.randrange(len(digits))] = random.choice("123456789")
    return int("".join(digits)) * (-1 if number < 0 else 1)
