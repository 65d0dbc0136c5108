"""Unmodified mini-swe-agent repairs small functions and is rewarded if their tests pass.

pipx install mini-swe-agent       (an environment of its own; the command `mini` must be found)
python 09_harness.py              (about two minutes on two CPU cores; needs 09_harness.yaml and 09_harness_model.py)

Each episode starts `mini` in a directory with a broken function. The model is tiny: a warm-up of half a minute teaches
it to call `bash` with the right operator. From rewards it learns which of four commands changes the file.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agentrl
from agentrl.core.records import Message, ToolSpec
from agentrl.environment.environment import Split
from agentrl.environments.tiny_model import model as tiny_model

HERE = Path(__file__).resolve()
OPERATORS = {"add": "+", "subtract": "-", "multiply": "*"}
WAYS = (
    ("sed -i 's/a . b/a {operator} b/' f.py", "0"),  # repairs the file
    ("sed 's/a . b/a {operator} b/' f.py", "0"),  # prints what it would be
    ("echo 'return a {operator} b' > f.py", "0"),  # leaves one line of it
    ("grep 'a {operator} b' f.py", "1"),  # finds nothing
)
"""Commands a beginner may try, with their return codes, the only feedback of `mini` to the model here."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BASH = ToolSpec(
    name="bash",
    description="Execute a bash command",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
        "required": ["command"],
    },
)
START = r"""
printf %s "$1" > f.py
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_GLOBAL_CONFIG_DIR="$PWD"
export MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=1 PYTHONPATH="$(dirname "$3")" PYTHONDONTWRITEBYTECODE=1
exec mini --config "$3" --model main --model-class 09_harness_model.EndpointModel \
    --task "$2" --yolo --exit-immediately --output trajectory.json
"""


class Repair(agentrl.HarnessEnvironment):
    """Functions of two numbers with the wrong operator."""

    seats = ("main",)
    command = ("sh", "-c", START, "sh", "{task.source}", "{task.question}", str(HERE.with_suffix(".yaml")))
    failed_reward = 0.0

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        """Return 1 if the test passes, in a separate process."""
        test_run = subprocess.run(
            [sys.executable, "-c", task.data["test"]],
            cwd=episode.directory,
            capture_output=True,
            timeout=30,
            check=False,
        )
        return float(test_run.returncode == 0)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> agentrl.TaskSource:
        """Return tasks for every pair of right and wrong operators."""
        return [
            agentrl.Task(
                id=f"{word}-{wrong}",
                data={
                    "question": f"f must {word}",
                    "source": f"def f(a, b):\n    return a {OPERATORS[wrong]} b\n",
                    "test": f"from f import f; assert f(7, 3) == 7 {operator} 3",
                },
            )
            for word, operator in OPERATORS.items()
            for wrong in OPERATORS
            if wrong != word
        ]


def repairs(seed: int) -> Iterator[tiny_model.Demonstration]:
    """Yield conversations in the format of `mini`, each with a random command."""
    draw = random.Random(seed)
    while True:
        (word, operator), (way, code) = draw.choice(list(OPERATORS.items())), draw.choice(WAYS)
        commands = [way.format(operator=operator), SUBMIT]
        calls = [
            f'<tool_call>{{"name":"bash","arguments":{{"command":"{command}"}}}}</tool_call>' for command in commands
        ]
        messages = [
            Message(role="system", content="You repair f.py."),
            Message(role="user", content=f"f must {word}"),
            Message(role="assistant", content=calls[0]),
            Message(role="tool", content=code),
            Message(role="assistant", content=calls[1]),
        ]
        yield tiny_model.Demonstration(messages, [BASH])


def build_model(directory: Path, *, steps: int = 120) -> None:
    """Write a model that attempts a repair in one of four ways."""
    tiny_model.build_from_demonstrations(directory, repairs, context=512, layers=2, steps=steps)


def config(model: Path, **changes: Any) -> agentrl.RunConfig:
    """Return the run's configuration."""
    return agentrl.RunConfig.model_validate(
        {
            "name": "harness",
            "steps": 8,
            "max_in_flight": 8,
            "environment": {"id": f"{HERE}:Repair"},
            "model": {"path": str(model)},
            "policies": {"main": {"learning_rate": 5e-4, "step_size": 24, "max_staleness": 0}},
            "credit": {"group_size": 4},
            "sampling": {"max_tokens": 64, "max_turns": 4},
            "engine": {"slots": 8, "max_context": 512},
            "evaluation": {"tasks": 0},
            **changes,
        }
    )


def main() -> None:
    """Warm up, train, and print the results."""
    if shutil.which("mini") is None:
        raise SystemExit("`mini` is not found: pipx install mini-swe-agent")
    with tempfile.TemporaryDirectory() as directory:
        build_model(Path(directory))
        run = agentrl.train(config(Path(directory)))
    if run.interrupted:
        raise SystemExit("stopped before its last step")
    for step in run.metrics:
        episodes, tokens = f"{step['step/units']:.0f} episodes", f"{step['step/tokens']:.0f} sampled tokens"
        print(f"step {step['step']:.0f}: {episodes}, {tokens}, mean reward {step['reward/mean']:.2f}")
    print(f"look at them: agentrl episode list {run.path}")


if __name__ == "__main__":
    try:
        main()
    except (agentrl.AgentRLError, KeyboardInterrupt) as error:
        raise SystemExit(str(error) or "interrupted") from None
