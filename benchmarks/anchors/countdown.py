"""Countdown with a solver and a judge: two expressions for a target, and which of them is right.

The numbers are added or subtracted in any order, each once. The solver's reward is the share of right expressions; in
training, being chosen by the judge counts as well. The judge's reward is whether the expression that it chose is right.
"""

from __future__ import annotations

import random
import re
from zlib import crc32

import agentrl

ATTEMPTS = 2
CHOSEN = 0.25
"""Reward of the solver in training if the judge chose one of its expressions; a right expression is worth half."""


def question(numbers: list[int], target: int) -> str:
    """The problem in words."""
    return f"Numbers: {', '.join(map(str, numbers))}. Target: {target}."


SOLVED = (
    agentrl.system(
        "Reach the target: add or subtract the numbers, each of them once. Reply with the expression alone."
    ),
    *(agentrl.user(question([3, 8, 2], 9)), agentrl.assistant("3 + 8 - 2")),
    *(agentrl.user(question([7, 4, 9], 20)), agentrl.assistant("7 + 4 + 9")),
    *(agentrl.user(question([1, 9, 5], 3)), agentrl.assistant("9 - 5 - 1")),
    *(agentrl.user(question([6, 2, 7], 1)), agentrl.assistant("6 + 2 - 7")),
)
JUDGED = (
    agentrl.system("One of two expressions may reach the target. Reply with its number, 1 or 2."),
    *(agentrl.user(f"{question([3, 8, 2], 9)}\n1: 3 + 8 - 2\n2: 8 - 3 - 2"), agentrl.assistant("1")),
    *(agentrl.user(f"{question([7, 4, 9], 20)}\n1: 9 + 4 - 7\n2: 7 + 4 + 9"), agentrl.assistant("2")),
    *(agentrl.user(f"{question([1, 9, 5], 3)}\n1: 9 - 5 + 1\n2: 9 - 5 - 1"), agentrl.assistant("2")),
    *(agentrl.user(f"{question([6, 2, 7], 1)}\n1: 6 + 2 - 7\n2: 7 - 6 + 2"), agentrl.assistant("1")),
)
"""The starts of the prompts: worked examples. After 1 and 2 alone, SmolLM2 continues with 3."""


def is_right(expression: str, numbers: list[int], target: int) -> bool:
    """Whether an expression has each number once, and the right value."""
    if not re.fullmatch(r"\d{1,3}( [+-] \d{1,3})*", expression):
        return False
    terms = [int(term) for term in re.findall(r"[+-]?\d+", expression.replace(" ", ""))]
    return sorted(map(abs, terms)) == sorted(numbers) and sum(terms) == target


class Countdown(agentrl.Environment):
    """A judge chooses one of two attempts of a solver."""

    seats = ("solver", "judge")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Attempt twice, judge, and reward both."""
        numbers, target = ctx.task.data["numbers"], ctx.task.data["target"]
        asked = question(numbers, target)
        solvers = [ctx.agent("solver", number) for number in range(ATTEMPTS)]
        turns = await ctx.gather(*(solver.act(*SOLVED, agentrl.user(asked)) for solver in solvers))
        texts = [" ".join(turn.text.split()) for turn in turns]
        right = [not turn.is_cut and is_right(text, numbers, target) for turn, text in zip(turns, texts, strict=True)]
        judge = ctx.agent("judge")
        verdict = await judge.act(*JUDGED, agentrl.user(f"{asked}\n1: {texts[0]}\n2: {texts[1]}"))
        chosen = {"1": 0, "2": 1}.get(verdict.text.strip())
        for number, solver in enumerate(solvers):
            solver.reward(right[number] / ATTEMPTS + ctx.task.data["chosen"] * (number == chosen))
        judge.reward(float(chosen is not None and right[chosen]))
        ctx.metric("one_right", float(right[0] != right[1]))
        ctx.metric("chosen_of_one_right", float(right[0] != right[1] and chosen is not None and right[chosen]))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Return 2,048 problems per split, with three numbers up to 9. A held-out problem is in no training set."""
        return [_task(split, seed, index) for index in range(2048)]


def _task(split: str, seed: int, index: int) -> agentrl.Task:
    drawn = random.Random(f"{split} {seed if split == 'train' else 0} {index}")
    while True:
        numbers = [drawn.randint(1, 9) for _ in range(3)]
        target = numbers[0] + sum(drawn.choice((1, -1)) * number for number in numbers[1:])
        drawn.shuffle(numbers)
        is_held_out = crc32(question(sorted(numbers), target).encode()) % 8 == 0
        if target > 0 and is_held_out == (split == "held_out"):
            data = {"numbers": numbers, "target": target, "chosen": CHOSEN if split == "train" else 0.0}
            return agentrl.Task(id=f"{split}-{index}", data=data)
