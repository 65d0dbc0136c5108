"""The calculator for agentrl."""

import asyncio
from typing import Literal

from agentrl_training import read_tasks, train
from progress import draw_wait  # measured

import agentrl


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
        return read_tasks()


if __name__ == "__main__":
    train(Calculator)
