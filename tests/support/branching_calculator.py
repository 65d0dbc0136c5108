"""The calculator, with branches between its turns."""

from __future__ import annotations

import agentrl
from agentrl.environments.calculator.env import Calculator


class BranchingCalculator(Calculator):
    """Three branches after the first result of a tool."""

    branches = 3

    async def between_turns(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.branches_left() == self.branches:
            await ctx.branch(self.branches)
