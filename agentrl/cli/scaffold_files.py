"""The files of `agentrl env new`; NAME and CLASS stand for the environment's names."""

FILES = {
    "env.py": '''"""NAME: describe what the agent does here."""

from random import Random
from typing import Literal

import agentrl


class CLASS(agentrl.ToolEnvironment):
    """Sums of three numbers, with a calculator for two."""

    # What the policy may do. Every parameter needs a type; the docstring's first paragraph is what the policy is told.
    @agentrl.tool
    def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        """One operation on two integers."""
        return {"+": a + b, "-": a - b, "*": a * b}[op]

    # What is good. `episode.answer` is the first turn that calls no tool; `episode.messages` is the whole conversation.
    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer.strip() == task.data["answer"])

    # What there is to do. Keyword arguments after `seed` are options, set under [environment.options] of train.toml.
    # Held-out tasks must not be training tasks: they tell learning from remembering.
    @classmethod
    def tasks(cls, split: str, *, seed: int = 0, count: int = 1000) -> agentrl.TaskSource:
        return [_task(split, seed, number) for number in range(count)]


def _task(split: str, seed: int, number: int) -> agentrl.Task:
    draw = Random(f"{split} {seed} {number}")  # a stream of its own: the same task each time it is asked for
    a, b = draw.randint(1, 99), draw.randint(1, 99)
    c = 2 * draw.randint(1, 49) + (split == "held_out")  # odd where held out: never the same question
    # The model that comes with agentrl knows this sentence and no other; yours will understand any.
    question = f"State the final answer to the following arithmetic problem: {a} + {b} - {c} ="
    return agentrl.Task(id=f"{split}-{seed}-{number}", data={"question": question, "answer": str(a + b - c)})


# Several turns without tools, several agents, rewards along the way: write `run` yourself. Remove the `# ` to use it,
# and name the class in train.toml: id = "env.py:CLASSInTurns".
#
# class CLASSInTurns(agentrl.Environment):
#     """The policy may correct itself twice."""
#
#     seats = ("solver",)
#
#     async def run(self, ctx: agentrl.EpisodeContext) -> None:
#         agent = ctx.agent("solver")
#         turn = await agent.act(agentrl.user(ctx.task.data["question"]))
#         for _ in range(2):
#             if turn.text.strip() == ctx.task.data["answer"]:
#                 break
#             turn = await agent.act(agentrl.user("That is wrong. Try again."))
#         agent.reward(float(turn.text.strip() == ctx.task.data["answer"]))
#         # Chance: ctx.rng. Time: ctx.now(), ctx.sleep(). Files, sockets, services: await ctx.effect("name", function).
#
#     @classmethod
#     def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
#         return CLASS.tasks(split, seed=seed)
''',
    "test_env.py": '''"""The environment's tests: `pytest` in this directory. No model and no GPU is needed."""

from pathlib import Path

import agentrl
from agentrl.testing import play

ENVIRONMENT = str(Path(__file__).with_name("env.py")) + ":CLASS"
TASK = agentrl.Task(id="t", data={"question": "20 + 5 - 7 =", "answer": "18"})


def calculate(a: int, op: str, b: int) -> dict[str, object]:
    return {"name": "calculate", "arguments": {"a": a, "op": op, "b": b}}


def test_it_can_be_trained_on() -> None:
    report = agentrl.check_environment(ENVIRONMENT)
    assert report.passed, report.text


def test_the_right_answer_is_rewarded() -> None:
    played = play(ENVIRONMENT, TASK, [calculate(20, "+", 5), calculate(25, "-", 7), "18"])
    assert played.told == ("20 + 5 - 7 =", "25", "18")
    assert played.reward == 1.0


def test_a_wrong_answer_is_not() -> None:
    assert play(ENVIRONMENT, TASK, ["19"]).reward == 0.0


def test_no_held_out_task_is_trained_on() -> None:
    environment = type(agentrl.make(ENVIRONMENT))
    questions = [{task.data["question"] for task in environment.tasks(split)} for split in ("train", "held_out")]
    assert questions[0].isdisjoint(questions[1])
''',
    "train.toml": """# agentrl train train.toml
# Every field, with its default and why: docs/configuration.md, or `agentrl train train.toml --dry-run`.
name = "NAME"
steps = 40            # optimizer steps

[environment]
id = "env.py:CLASS"   # beside this file

[model]
path = "environments.calculator:model"   # 0.84 M parameters, comes with agentrl; or the directory of your own model

[policies.solver]
learning_rate = 3e-4  # all weights are trained; for larger models add [policies.solver.lora] and try 1e-5
step_size = 64        # episodes per optimizer step
max_staleness = 1     # 0 is synchronous training

[credit]
group_size = 8        # episodes of one task, compared with each other

[sampling]
max_tokens = 32       # longest turn
max_turns = 6

[engine]
slots = 96
max_context = 192     # longest conversation, in tokens

[evaluation]
tasks = 256           # held-out tasks, before the first step and after the last
""",
    "README.md": """# NAME

Describe the task, the tools, the reward and the options here.

```
pytest                        # its tests
agentrl env check env.py      # plays it with a random policy, kills and resumes it, says what is wrong
agentrl train train.toml      # trains on it; half a minute on two cores
agentrl episode list NAME     # what the agent did
```

`env.py` is the environment, `test_env.py` its tests, `train.toml` how it is trained. The model that comes with agentrl
has learned to write numbers and to call `calculate`, nothing else. For other tools and other words, give a model that
follows instructions: `agentrl train train.toml --model DIR`.

`pip install -e .` makes it known by name: `agentrl env list`, `id = "NAME"`.
""",
    "__init__.py": '''"""The environment NAME."""

from NAME.env import CLASS

__all__ = ["CLASS"]
''',
    "pyproject.toml": """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["agentrl"]

[project.entry-points."agentrl.environments"]
NAME = "NAME:CLASS"

[tool.setuptools]
packages = ["NAME"]
package-dir = { "NAME" = "." }
package-data = { "NAME" = ["train.toml"] }
""",
}
"""Text by file name."""
