"""The environment: a proposed sum, eight attempts at it, and both sides' rewards."""

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
"""Number of attempts at each proposal."""
PROMPT = "Propose a sum."
INVALID = -0.5
"""Reward of a proposal rejected by the gate."""
NUM_HELD_OUT = 400
"""Number of sums for evaluating the solver; a proposer may not write them."""
ALIKE = 0.1
"""Penalty of a proposal if all recent proposals have the same number of terms."""
_SUM = re.compile(r"[1-9]\d?( [+-] [1-9]\d?){1,7}")


class Sum(NamedTuple):
    """A sum of 2 to 8 terms of 1 or 2 digits, as `37 - 4 + 12`."""

    text: str

    @property
    def terms(self) -> tuple[int, ...]:
        """Terms of the sum, with signs."""
        return tuple(int(term) for term in re.findall(r"-?\d+", self.text.replace(" ", "")))

    @property
    def key(self) -> str:
        """Key that is equal for sums that differ only in the order of their terms."""
        return " ".join(f"{term}x{count}" for term, count in sorted(Counter(self.terms).items()))

    def task(self) -> dict[str, str]:
        """Return the task data for a solver."""
        return {"question": f"{self.text} =", "answer": str(sum(self.terms))}


def read(text: str) -> Sum | None:
    """Return the sum that a proposer wrote; None if the text is not a sum."""
    return Sum(text) if _SUM.fullmatch(text) else None


class Solve(Calculator):
    """One attempt at a sum, with a calculator for single operations."""

    seats: ClassVar[tuple[str, ...]] = ("solver",)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0, held_out: int = NUM_HELD_OUT) -> TaskSource:
        """Return sums of 2 to 6 terms, equally many of each length.

        Args:
            split: held-out sums are the same for all seeds, and `ProposeAndSolve` rejects them; the training sums can
                train a solver without a proposer.
            seed: seed of the training sums.
            held_out: number of sums.
        """
        sums = held_out_sums()
        if split != "held_out":
            sums = tuple(problem for problem in drawn_sums(split, seed) if problem.key not in examined_keys())
        return [agentrl.Task(id=f"{split}-{at}", data=problem.task()) for at, problem in enumerate(sums[:held_out])]


def drawn_sums(*seeds: str | int) -> tuple[Sum, ...]:
    """Draw as many sums as the evaluation uses."""
    draws = (random_stream("sums", *seeds, number) for number in range(NUM_HELD_OUT))
    return tuple(drawn_sum(draw, 2 + number % 5) for number, draw in enumerate(draws))


@functools.cache
def held_out_sums() -> tuple[Sum, ...]:
    """Return the sums for evaluating the solver."""
    return drawn_sums("held_out", 0)


@functools.cache
def examined_keys() -> frozenset[str]:
    """Return the keys of the evaluation's sums."""
    return frozenset(problem.key for problem in held_out_sums())


def drawn_sum(draw: Random, terms: int) -> Sum:
    """Return a sum with this number of terms, half of them with two digits."""
    numbers = [str(draw.randint(1, 9) if draw.random() < 0.5 else draw.randint(10, 99)) for _ in range(terms)]
    return Sum(numbers[0] + "".join(f" {draw.choice('+-')} {number}" for number in numbers[1:]))


class ProposeAndSolve(agentrl.Environment):
    """Rewards a sum for its learning value, which is largest if half of the attempts succeed."""

    seats: ClassVar[tuple[str, ...]] = ("proposer",)
    fan_out: ClassVar[Mapping[str, int]] = {"Solve": ATTEMPTS}
    truncated_reward: ClassVar[float | None] = INVALID

    async def run(self, ctx: EpisodeContext) -> None:
        """Propose; if the proposal is a new sum, have it solved."""
        proposer = ctx.agent("proposer")
        turn = await proposer.act(agentrl.user(PROMPT))
        proposal = None if turn.is_cut else read(turn.text)
        is_sum = proposal is not None and proposal.key not in examined_keys()
        if not proposer.gate(is_sum, penalty=INVALID) or proposal is None:
            return
        recollection = await ctx.remember(proposal.key, structure=f"{len(proposal.terms)} terms")
        if not proposer.gate(recollection.times == 0, penalty=INVALID):
            return
        ctx.metric("terms", len(proposal.terms))
        children = await ctx.gather(*ctx.spawn(Solve, proposal.task(), n=ATTEMPTS))
        proposer.reward(agentrl.learnability(children) - ALIKE * recollection.share)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """Return the only task, to propose. The solver is evaluated on `Solve.tasks`."""
        return [agentrl.Task(id="propose", data={})]
