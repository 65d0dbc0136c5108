"""The calculator for agentrl; the engine is chosen by the TOML file beside it."""

import asyncio
import json
from pathlib import Path
from typing import Literal

from progress import SETTINGS, AgentrlObserver, draw_wait  # measured

import agentrl
from agentrl.config.load import load


class Calculator(agentrl.ToolEnvironment):
    @agentrl.tool
    async def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        """One operation on two integers."""
        await asyncio.sleep(draw_wait())  # measured
        return {"+": a + b, "-": a - b, "*": a * b}[op]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer.strip() == task.data["answer"])

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        lines = Path(SETTINGS["tasks"]).read_text().splitlines()
        return [agentrl.Task(id=str(n), data=json.loads(line)) for n, line in enumerate(lines)]


if __name__ == "__main__":
    config = load(SETTINGS["config"], SETTINGS["overrides"])
    agentrl.train(
        config,
        environment=Calculator,
        resume=SETTINGS["resume"],
        observers=[AgentrlObserver()],  # measured
    )
