"""A tiny model learns to write Python functions, rewarded by tests in a sandbox that the functions cannot read.

apt install bubblewrap      (check the sandbox: agentrl doctor --sandbox)
python 12_code_reward.py    (about two minutes on two CPU cores; needs no other file)

The model reads `add 3, multiply by 12` and writes a function `f(x)`. A warm-up of a minute teaches it the syntax, but
its demonstrations often forget parentheses. From rewards it learns where they belong. The sandboxed process receives
only numbers to call `f` with. The expected results stay outside.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agentrl
from agentrl.core.records import Message
from agentrl.environment.environment import Split
from agentrl.environments.tiny_model import model as tiny_model

HERE = Path(__file__).resolve()
OPERATORS = {"add": "+", "subtract": "-", "multiply by": "*"}
NUMBERS = (0, 1, 7, -12)
"""What every function is called with."""
CALLS = "\nimport sys\nfor line in sys.stdin:\n    print(f(int(line)))\n"
"""Appended to the model's code."""
FORGET = 0.75
"""Probability that a demonstration forgets a pair of parentheses it needs."""


class Functions(agentrl.ToolEnvironment):
    """Write a function of one number that performs two or three operations."""

    sandbox = agentrl.Sandbox(memory_mb=64, seconds=5, disk_mb=4, processes=8)

    async def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        """Return 1 if the function returns the right number for every test, else 0."""
        numbers = "".join(f"{number}\n" for number in NUMBERS)
        ran = await self.box.run(["python3", "-S", "f.py"], files={"f.py": episode.answer + CALLS}, stdin=numbers)
        expected = [str(compute(task.data["steps"], number)) for number in NUMBERS]
        return float(ran.ok and ran.output.split("\n") == [*expected, ""])

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> agentrl.TaskSource:
        """Return 2,048 tasks per split; their numbers add up to a multiple of 5 in held-out tasks alone."""
        draw = random.Random(f"{split} {seed if split == 'train' else 0}")
        return [make_task(f"{split}-{index}", draw, held_out=split == "held_out") for index in range(2048)]


def make_task(name: str, draw: random.Random, *, held_out: bool) -> agentrl.Task:
    """Return a random task, which multiplies a sum or a difference, and so needs parentheses."""
    while True:
        steps = [(draw.choice(list(OPERATORS)), draw.randint(2, 30)) for _ in range(draw.choice((2, 3)))]
        verbs = [verb for verb, _ in steps]
        needed = any(first != "multiply by" and "multiply by" in verbs[at:] for at, first in enumerate(verbs))
        if needed and (sum(number for _, number in steps) % 5 == 0) == held_out:
            question = ", ".join(f"{verb} {number}" for verb, number in steps)
            return agentrl.Task(id=name, data={"question": question, "steps": [list(step) for step in steps]})


def compute(steps: list[list[Any]], number: int) -> int:
    """Perform the operations, pairs of verb and number, one after another."""
    for verb, operand in steps:
        number = {"add": number + operand, "subtract": number - operand, "multiply by": number * operand}[verb]
    return number


def demonstration(steps: list[list[Any]], draw: random.Random) -> str:
    """Return a function that often lacks parentheses, and is then usually wrong."""
    expression = "x"
    for verb, number in steps:
        if verb == "multiply by" and expression != "x" and draw.random() >= FORGET:
            expression = f"({expression})"
        expression += f" {OPERATORS[verb]} {number}"
    return f"def f(x):\n    return {expression}"


def demonstrations(seed: int) -> Iterator[tiny_model.Demonstration]:
    """Yield conversations with training tasks."""
    draw = random.Random(seed)
    while True:
        task = make_task("", draw, held_out=False)
        reply = demonstration(task.data["steps"], draw)
        messages = [
            Message(role="user", content=task.data["question"]),
            Message(role="assistant", content=reply),
        ]
        yield tiny_model.Demonstration(messages)


def build_model(directory: Path, *, steps: int = 400) -> None:
    """Write a model that knows the syntax."""
    tiny_model.build_from_demonstrations(directory, demonstrations, context=256, layers=3, steps=steps)


def config(model: Path, **changes: Any) -> agentrl.RunConfig:
    """Return the run's configuration."""
    return agentrl.RunConfig.model_validate(
        {
            "name": "code_reward",
            "steps": 40,
            "environment": {"id": f"{HERE}:Functions"},
            "model": {"path": str(model)},
            "policies": {"main": {"learning_rate": 3e-4, "step_size": 64, "max_staleness": 1}},
            "credit": {"group_size": 8},
            "sampling": {"max_tokens": 48, "max_turns": 1},
            "engine": {"slots": 64, "max_context": 128},
            "evaluation": {"tasks": 128},
            **changes,
        }
    )


def main() -> None:
    """Warm up, train, and print the results."""
    with tempfile.TemporaryDirectory() as directory:
        build_model(Path(directory))
        run = agentrl.train(config(Path(directory)))
    if run.interrupted:
        raise SystemExit("stopped before its last step")
    start, end = run.summary["reward_start"], run.summary["reward_end"]
    print(f"share of 128 held-out functions that pass: {start:.2f} before, {end:.2f} after")
    print(f"look at them: agentrl episode list {run.path}")


if __name__ == "__main__":
    try:
        main()
    except (agentrl.AgentRLError, KeyboardInterrupt) as error:
        raise SystemExit(str(error) or "interrupted") from None
