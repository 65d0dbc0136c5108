"""Word problems with numbers too large for mental arithmetic, and a calculator called by name.

The environment of 07_smollm2.toml. The model writes `calculate(37 * 412)`, receives the result, and answers with it.
Two examples in the conversation demonstrate this; SmolLM2-135M-Instruct follows them in slightly less than half of its
attempts.
"""

from __future__ import annotations

import operator
import random
import re

import agentrl

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALL = re.compile(r"calculate\((\d{1,9}) ([-+*]) (\d{1,9})\)")
QUESTIONS = (
    ("What is {a} times {b}?", "*"),
    ("What is {a} plus {b}?", "+"),
    ("What is {a} minus {b}?", "-"),
    ("Tom has {a} boxes with {b} pencils in each. How many pencils does he have?", "*"),
    ("A ticket costs {b} dollars. How many dollars do {a} tickets cost?", "*"),
    ("A train with {a} passengers stops and {b} get off. How many stay?", "-"),
    ("Ann read {a} pages of a book and has {b} left. How many pages does it have?", "+"),
    ("A farm has {a} hens and buys {b} more. How many hens does it have now?", "+"),
)
SHOWN = (
    agentrl.Message(role="system", content="Use the calculator."),
    agentrl.user("What is 31 times 12?"),
    agentrl.Message(role="assistant", content="calculate(31 * 12)"),
    agentrl.user("372"),
    agentrl.Message(role="assistant", content="372"),
    agentrl.user("A shop had 250 apples and sold 67. How many are left?"),
    agentrl.Message(role="assistant", content="calculate(250 - 67)"),
    agentrl.user("183"),
    agentrl.Message(role="assistant", content="183"),
)
"""The start of every prompt: two worked examples of a call to the calculator."""


class WordProblems(agentrl.Environment):
    """One operation on two numbers, in words. The reward is 1 if the answer is the right number, else 0."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Act; if the reply is a call, act again on its result."""
        solver = ctx.agent("solver")
        turn = await solver.act(*SHOWN, agentrl.user(ctx.task.data["question"]))
        if not turn.is_cut and (call := CALL.fullmatch(turn.text.strip())):
            a, symbol, b = call.groups()
            turn = await solver.act(agentrl.user(str(OPERATORS[symbol](int(a), int(b)))))
        solver.reward(float(not turn.is_cut and turn.text.strip() == ctx.task.data["answer"]))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Return 4,096 problems per split; the first number is even in training tasks and odd in held-out ones."""
        return [_task(split, seed, index) for index in range(4096)]


def _task(split: str, seed: int, index: int) -> agentrl.Task:
    drawn = random.Random(f"{split} {seed if split == 'train' else 0} {index}")
    question, symbol = QUESTIONS[index % len(QUESTIONS)]
    a, b = 2 * drawn.randint(50, 499) + (split == "held_out"), drawn.randint(11, 99)
    answer = OPERATORS[symbol](a, b)
    return agentrl.Task(id=f"{split}-{index}", data={"question": question.format(a=a, b=b), "answer": str(answer)})
