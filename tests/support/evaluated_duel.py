"""Two seats, and slow held-out episodes with children.

Held-out episodes fail while the file that `AGENTRL_JUDGE_DOWN` names exists.
"""

from __future__ import annotations

import os
from pathlib import Path

import agentrl
from agentrl.core.records import Task


class Reply(agentrl.Environment):
    """One turn."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.sleep(0.4 * ctx.rng.random())
        solver = ctx.agent("solver")
        turn = await solver.act(agentrl.user("2 + 2"))
        solver.reward(len(turn.text) % 3 / 2)


class Duel(agentrl.Environment):
    """Both seats take a turn; each opens its conversation late, and held-out tasks then start children."""

    seats = ("asker", "solver")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        is_held_out = ctx.task.id.startswith("held_out")
        if is_held_out and _judge_is_down():
            raise OSError("the judge is down")
        for seat in self.seats:
            await ctx.sleep((0.5 if is_held_out else 0.02) * ctx.rng.random())
            agent = ctx.agent(seat)
            turn = await agent.act(agentrl.user(f"{ctx.task.data['number']} + 1"))
            agent.reward(len(turn.text) % 3 / 2)
        if is_held_out:
            await ctx.gather(*ctx.spawn(Reply, {"number": 2}, n=2))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [Task(id=f"{split}-{number}", data={"number": number}) for number in range(12)]


class Past(agentrl.Environment):
    """A turn of each seat, of which an earlier version may hold one."""

    seats = ("solver", "rival")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            await ctx.sleep(0.05 * ctx.rng.random())
            agent = ctx.agent(seat)
            turn = await agent.act(agentrl.user(f"{ctx.task.data['number']} + 1"))
            agent.reward(len(turn.text) % 3 / 2)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return Duel.tasks(split)


def _judge_is_down() -> bool:
    named = os.environ.get("AGENTRL_JUDGE_DOWN")
    return named is not None and Path(named).exists()
