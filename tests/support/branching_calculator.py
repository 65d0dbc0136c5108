"""The calculator, with branches or probes between its turns, or resampled turns at its end."""

from __future__ import annotations

import agentrl
from agentrl.environments.calculator.env import Calculator


class BranchingCalculator(Calculator):
    """Three branches after the first result of a tool."""

    branches = 3

    async def between_turns(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.branches_left() == self.branches:
            await ctx.branch(self.branches)


class ProbingCalculator(Calculator):
    """Two probes after each of the first two results of tools."""

    probes = 4

    async def between_turns(self, ctx: agentrl.EpisodeContext) -> None:
        if len(ctx.agent("agent").turns) <= 2:
            await ctx.branch(2, probe=True)


class ResamplingCalculator(Calculator):
    """Four samples of the second turn of every episode that has one."""

    branches = 4

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await super().run(ctx)
        if len(ctx.agent("agent").turns) > 1:
            await ctx.resample(4, at=1)
