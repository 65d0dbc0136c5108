"""Sums of two numbers up to 100, as in the `math_rl` recipe of tinker-cookbook: one worked example, then a question."""

from __future__ import annotations

import random

import agentrl

SHOWN = (agentrl.user("What is 4 + 5?"), agentrl.Message(role="assistant", content="9"))
LARGEST = 100


class Arithmetic(agentrl.Environment):
    """The reward is 1 if the first word of the reply is the sum, else 0. A reply that is cut off costs 0.1."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Ask once, and read the first word of the reply."""
        solver = ctx.agent("solver")
        x, y = ctx.task.data["x"], ctx.task.data["y"]
        turn = await solver.act(*SHOWN, agentrl.user(f"What is {x} + {y}?"))
        first = next(iter(turn.text.split()), "")
        solver.reward(float(first == str(x + y)) - 0.1 * turn.is_cut)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Return sums: one pair of numbers in ten is held out, and the seed orders the others."""
        pairs = [(x, y) for x in range(LARGEST + 1) for y in range(LARGEST + 1)]
        random.Random(0).shuffle(pairs)
        held_out, training = pairs[: len(pairs) // 10], pairs[len(pairs) // 10 :]
        random.Random(seed).shuffle(training)
        return [
            agentrl.Task(id=f"{x}+{y}", data={"x": x, "y": y}) for x, y in (training if split == "train" else held_out)
        ]
