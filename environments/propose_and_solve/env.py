"""The environment: a proposed sum, eight attempts at it, and what each of both sides gets."""

from __future__ import annotations

import functools
import re
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import agentrl
from agentrl.core.ids import random_stream
from agentrl.environments.calculator.env import Calculator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentrl.environment.context import EpisodeContext
    from agentrl.environment.environment import Split, TaskSource

ATTEMPTS = 8
"""At each proposal."""
PROMPT = "Propose a sum."
INVALID = -0.5
"""What a proposal gets that the gate refuses."""
EXAMINED = 400
"""Sums the solver is examined on, which no proposer may write."""
ALIKE = 0.1
"""What is taken from one whose number of terms all the newest proposals have."""
_SUM = re.compile(r"[1-9]\d?( [+-] [1-9]\d?){1,7}")


class Sum(NamedTuple):
    """A sum of 2 to 8 terms of 1 or 2 digits, as `37 - 4 + 12`."""

    text: str

    @property
    def terms(self) -> tuple[int, ...]:
        """With their signs."""
        return tuple(int(term) for term in re.findall(r"-?\d+", self.text.replace(" ", "")))

    @property
    def key(self) -> str:
        """The same for sums that differ in the order of their terms only."""
        return " ".join(f"{term}x{count}" for term, count in sorted(Counter(self.terms).items()))

    def task(self) -> dict[str, str]:
        """What a solver is given."""
        return {"question": f"{self.text} =", "answer": str(sum(self.terms))}


def read(text: str) -> Sum | None:
    """The sum that a proposer wrote; None where it is none."""
    return Sum(text) if _SUM.fullmatch(text) else None


class Solve(Calculator):
    """One attempt at a sum, with a calculator that does one operation a call."""

    seats: ClassVar[tuple[str, ...]] = ("solver",)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0, held_out: int = EXAMINED) -> TaskSource:
        """Sums of 2 to 6 terms, as many of each.

        Args:
            split: held-out sums are the same for all seeds, and `ProposeAndSolve` refuses them; the others are there to
                train a solver on without a proposer.
            seed: of the training sums.
            held_out: how many of a split's sums, its first.
        """
        sums = (examined() if split == "held_out" else drawn_sums(split, seed))[:held_out]
        return [agentrl.Task(id=f"{split}-{number}", data=made.task()) for number, made in enumerate(sums)]


def drawn_sums(*seeds: str | int) -> tuple[Sum, ...]:
    """As many sums as the solver is examined on."""
    draws = (random_stream("sums", *seeds, number) for number in range(EXAMINED))
    return tuple(drawn_sum(draw, 2 + number % 5) for number, draw in enumerate(draws))


@functools.cache
def examined() -> tuple[Sum, ...]:
    """The sums the solver is examined on."""
    return drawn_sums("held_out", 0)


@functools.cache
def examined_keys() -> frozenset[str]:
    """Their keys."""
    return frozenset(made.key for made in examined())


def drawn_sum(draw: Random, terms: int) -> Sum:
    """A sum of so many terms, half of which have two digits."""
    numbers = [str(draw.randint(1, 9) if draw.random() < 0.5 else draw.randint(10, 99)) for _ in range(terms)]
    return Sum(numbers[0] + "".join(f" {draw.choice('+-')} {number}" for number in numbers[1:]))


class ProposeAndSolve(agentrl.Environment):
    """A sum is worth what there is to learn from it: most where half of the attempts succeed."""

    seats: ClassVar[tuple[str, ...]] = ("proposer",)
    fan_out: ClassVar[Mapping[str, int]] = {"Solve": ATTEMPTS}
    truncated_reward: ClassVar[float | None] = INVALID

    async def run(self, ctx: EpisodeContext) -> None:
        """Propose; where it is a sum, and a new one, let it be solved."""
        proposer = ctx.agent("proposer")
        proposed = read((await proposer.act(agentrl.user(PROMPT))).text)
        is_sum = proposed is not None and proposed.key not in examined_keys()
        if not proposer.gate(is_sum, penalty=INVALID) or proposed is None:
            return
        known = await ctx.remember(proposed.key, structure=f"{len(proposed.terms)} terms")
        if not proposer.gate(known.times == 0, penalty=INVALID):
            return
        ctx.metric("terms", len(proposed.terms))
        solved = await ctx.gather(*ctx.spawn(Solve, proposed.task(), n=ATTEMPTS))
        proposer.reward(agentrl.learnability(solved) - ALIKE * known.share)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """One task: to propose. The solver is examined on `Solve.tasks`."""
        return [agentrl.Task(id="propose", data={})]
