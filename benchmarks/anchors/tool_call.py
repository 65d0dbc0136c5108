"""Word problems and one tool. The policy must call it rightly, and then state the result instead of calling again."""

from __future__ import annotations

import random
from typing import Literal

import agentrl

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
QUESTIONS = (
    ("A cinema has {a} rows with {b} seats in each. How many seats does it have?", "*"),
    ("A baker sells {a} rolls a day. How many rolls does he sell in {b} days?", "*"),
    ("A library owns {a} novels and {b} atlases. How many books are these together?", "+"),
    ("A tank holds {a} liters, and {b} more are poured in. How many liters does it hold now?", "+"),
    ("Of {a} letters, {b} were delivered. How many were not?", "-"),
    ("A rope of {a} meters is cut by {b} meters. How long is it now?", "-"),
)


class OneTool(agentrl.ToolEnvironment):
    """Arithmetic in words. Half of the reward is for a call whose result is the answer, half for stating it."""

    @agentrl.tool
    def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        """One operation on two integers."""
        return OPERATIONS[op](a, b)

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        """Half for the call, half for the right number at the end of the answer."""
        answer = task.data["answer"]
        is_called = any(message.role == "tool" and message.content == answer for message in episode.messages)
        is_stated = episode.answer.strip().rstrip(".").split()[-1:] == [answer]
        return 0.5 * is_called + 0.5 * (is_called and is_stated)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Return 2,048 problems per split; the first number is even in training tasks and odd in held-out ones."""
        return [_task(split, seed, index) for index in range(2048)]


def _task(split: str, seed: int, index: int) -> agentrl.Task:
    drawn = random.Random(f"{split} {seed if split == 'train' else 0} {index}")
    question, op = QUESTIONS[index % len(QUESTIONS)]
    a, b = 2 * drawn.randint(100, 499) + (split == "held_out"), drawn.randint(11, 99)
    answer = str(OPERATIONS[op](a, b))
    return agentrl.Task(id=f"{split}-{index}", data={"question": question.format(a=a, b=b), "answer": answer})
