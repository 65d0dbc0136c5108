"""Word problems with a calculator, for a model that writes tool calls as bare JSON.

The environment of 16_qwen.toml. Two worked examples show the call as text, in the form that the model writes, and the
answer that follows. Without them, Qwen2.5-Coder-0.5B-Instruct calls the tool in every turn and never answers. Half of
the reward is for the right call, so that a group of attempts differs before any of them is right to the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
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
SHOWN = (
    agentrl.system("Call the tool calculate once. Then state the number that it returned."),
    agentrl.user("A box holds 24 pens. How many pens do 31 boxes hold?"),
    agentrl.assistant('{"name": "calculate", "arguments": {"a": 24, "op": "*", "b": 31}}'),
    agentrl.Message(role="tool", content="744", name="calculate"),
    agentrl.assistant("The answer is 744."),
    agentrl.user("Of 530 seats, 87 are taken. How many are free?"),
    agentrl.assistant('{"name": "calculate", "arguments": {"a": 530, "op": "-", "b": 87}}'),
    agentrl.Message(role="tool", content="443", name="calculate"),
    agentrl.assistant("The answer is 443."),
)
"""The start of every prompt: two worked examples."""


class OneOperation(agentrl.ToolEnvironment):
    """One operation on two numbers, in words. Half of the reward is for the right call, half for stating its result."""

    @agentrl.tool
    def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        """One operation on two integers."""
        return OPERATIONS[op](a, b)

    def prompt(self, task: agentrl.Task) -> list[agentrl.Message]:
        """Show the worked examples, then ask."""
        return [*SHOWN, agentrl.user(task.data["question"])]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        """Half for a call with the right result, half if the answer then ends with it."""
        answer = task.data["answer"]
        results = [message.content for message in episode.messages[len(SHOWN) :] if message.role == "tool"]
        is_stated = episode.answer.strip().rstrip(".").split()[-1:] == [answer]
        return 0.5 * (answer in results) + 0.5 * (answer in results and is_stated)

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: random.Random) -> Iterator[object]:
        """Yield the right call and its statement, for `agentrl env check`."""
        yield {"name": "calculate", "arguments": {name: task.data[name] for name in ("a", "op", "b")}}
        yield f"The answer is {task.data['answer']}."

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Return 2,048 problems per split; the first number is even in training tasks and odd in held-out ones."""
        return [_task(split, seed, index) for index in range(2048)]


def _task(split: str, seed: int, index: int) -> agentrl.Task:
    drawn = random.Random(f"{split} {seed if split == 'train' else 0} {index}")
    question, op = QUESTIONS[index % len(QUESTIONS)]
    a, b = 2 * drawn.randint(100, 499) + (split == "held_out"), drawn.randint(11, 99)
    data = {"question": question.format(a=a, b=b), "a": a, "op": op, "b": b, "answer": str(OPERATIONS[op](a, b))}
    return agentrl.Task(id=f"{split}-{index}", data=data)
