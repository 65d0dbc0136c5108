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

    async def between_turns(self, ctx: agentrl.EpisodeContext) -> None:
        if any(isinstance(call.arguments, str) for call in ctx.agent("agent").turns[-1].tool_calls):
            raise agentrl.LimitReachedError("the tool call is not JSON", stop_reason="max_turns")

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer.strip() == task.data["answer"])

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return read_tasks()


if __name__ == "__main__":
    train(Calculator)
