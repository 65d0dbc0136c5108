"""What the tasks for agentrl share: the task file, and the training, whose engine the TOML file beside it chooses."""

import json
from pathlib import Path

from progress import SETTINGS, AgentrlObserver  # measured

import agentrl
from agentrl.config.load import load


def read_tasks() -> list[agentrl.Task]:
    lines = Path(SETTINGS["tasks"]).read_text().splitlines()
    return [agentrl.Task(id=str(n), data=json.loads(line)) for n, line in enumerate(lines)]


def train(environment: type[agentrl.Environment]) -> None:
    agentrl.train(
        load(SETTINGS["config"], SETTINGS["overrides"]),
        environment=environment,
        resume=SETTINGS["resume"],
        observers=[AgentrlObserver()],  # measured
    )
