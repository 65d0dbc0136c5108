"""The calculator, with three branches after the first result of a tool."""

from __future__ import annotations

import agentrl
from agentrl.environment.context import LimitReachedError
from agentrl.environment.tools import ToolEpisode, run_tool
from agentrl.environments.calculator.env import Calculator


class BranchingCalculator(Calculator):
    """Three branches after the first result of a tool."""

    branches = 3

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        tools, truncated = self.tool_table(), False
        self.task = ctx.task
        agent = ctx.agent(self.seats[0], tools=tuple(bound.spec for bound in tools.values()))
        branched = False
        observations = [agentrl.user(str(self.prompt(ctx.task)))]
        try:
            while observations:
                turn = await agent.act(*observations)
                observations = [await run_tool(ctx, self, tools, call) for call in turn.tool_calls]
                if observations and not branched:
                    branched = True
                    await ctx.branch(self.branches)
        except LimitReachedError as limit:
            ctx.truncate(limit)
            truncated = True
        agent.reward(
            self.reward(ctx.task, ToolEpisode(turns=agent.turns, messages=agent.messages, truncated=truncated))
        )
