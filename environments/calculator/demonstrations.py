"""What the warm-up shows the model: the form of a conversation, with mistakes in about half of them.

Every demonstration calls the calculator from left to right and carries its results on; how long it keeps going, and
now and then an operand, an operator or the answer, is left to chance. So the model learns how to call and to copy, and
that an episode ends with a bare number. That it pays to go on to the end, and to be exact, is left to learn by reward.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

FINISH = {2: 0.6, 3: 0.5, 4: 0.45}
"""Chance that a demonstration does all operations, by number of terms."""
MISTAKE = 0.02
"""Chance that a call has a wrong operand or operator."""
SLIP = 0.02
"""Chance that the answer is not the number the demonstration arrived at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation after the question: what the assistant says, and what the calculator answers in between."""

    said: tuple[str, ...]
    """One more than there are observations; the last one is the answer."""
    observed: tuple[str, ...]


def call_text(a: int, op: str, b: int) -> str:
    """A call of the calculator as the model writes it."""
    call = {"name": "calculate", "arguments": {"a": a, "op": op, "b": b}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


def demonstrate(question: str, random: random.Random) -> Demonstration:
    """A demonstration for a `chain_sum` question."""
    terms = [int(term) for term in re.findall(r"\d+", question)]
    operators = re.findall(r" ([+-]) ", question)
    operations = len(operators)
    if random.random() >= FINISH[len(terms)]:
        operations = random.randrange(1, operations) if operations > 1 else 0
    value = terms[0]
    said, observed = [], []
    for op, term in list(zip(operators, terms[1:], strict=True))[:operations]:
        a, b = value, term
        if random.random() < MISTAKE:
            a, op, b = random.choice(
                [(_other(a, random), op, b), (a, "+" if op == "-" else "-", b), (a, op, _other(b, random))]
            )
        said.append(call_text(a, op, b))
        value = a + b if op == "+" else a - b
        observed.append(str(value))
    said.append(str(_other(value, random) if random.random() < SLIP else value))
    return Demonstration(said=tuple(said), observed=tuple(observed))


def _other(number: int, random: random.Random) -> int:
    """A number of as many digits, one of them changed."""
    digits = list(str(abs(number)))
    digits[random.randrange(len(digits))] = random.choice("123456789")
    return int("".join(digits)) * (-1 if number < 0 else 1)
