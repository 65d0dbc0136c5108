"""Environments for workers' processes: imported there by name."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import agentrl
from agentrl.core.records import Message


def user(text: str) -> Message:
    return Message(role="user", content=text)


async def appears(path: Path) -> None:
    while not os.path.exists(path):  # noqa: ASYNC240 - at once
        await asyncio.sleep(0.005)


class TwoTurns(agentrl.Environment):
    """Says where it is between its turns, and waits there until the directory of its task has a file `go`."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        await agent.act(user("one"))
        place = Path(ctx.task.data["directory"])
        (place / f"{ctx.task.id}.{os.getpid()}").touch()
        await appears(place / "go")
        await agent.act(user("two"))
        ctx.metric("turned", 1.0)
        agent.reward(0.5)


class TwoWaits(TwoTurns):
    """Waits at its end, too, for a file `on`."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await super().run(ctx)
        await appears(Path(ctx.task.data["directory"]) / "on")


class TaskWitness(TwoTurns):
    """Writes the value in its task to a file, by type and content, and changes it before it waits."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        value = ctx.task.data["value"]
        with Path(ctx.task.data["directory"], f"{ctx.task.id}.seen").open("a") as file:  # noqa: ASYNC230 - at once
            file.write(f"{type(value).__name__} {value!r}\n")
        if isinstance(value, list | dict):
            value.clear()
        await super().run(ctx)


class LongTurn(agentrl.Environment):
    """One turn, as long as may be."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        (Path(ctx.task.data["directory"]) / f"{ctx.task.id}.{os.getpid()}").touch()
        await agent.act(user("one"))
        agent.reward(1.0)


class Poison(agentrl.Environment):
    """Kills its process."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("solver").act(user("one"))
        os.kill(os.getpid(), signal.SIGKILL)


class PoisonOrNot(TwoTurns):
    """Kills its process where its task says so."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.task.data.get("kills"):
            await Poison.run(self, ctx)  # type: ignore[arg-type]  # it has no state
        await super().run(ctx)


class ParentOfPoison(agentrl.Environment):
    """Of its three children one kills its process."""

    seats = ("solver",)
    fan_out = {"PoisonOrNot": 3}  # noqa: RUF012

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        await agent.act(user("one"))
        poison = ctx.spawn(PoisonOrNot, {"kills": True}, n=1)
        others = ctx.spawn(PoisonOrNot, {"directory": ctx.task.data["directory"]}, n=2)
        results = await ctx.gather(*poison, *others)
        agent.reward(sum(result.rewards.get("solver", 0.0) for result in results))


class Child(agentrl.Environment):
    """Says in which process it is."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        await agent.act(user(str(ctx.task.data["n"])))
        place = Path(ctx.task.data["directory"])
        (place / f"child.{os.getpid()}").touch()
        await appears(place / "go")
        agent.reward(2.0)


class Parent(agentrl.Environment):
    """Has four children, and is rewarded with what they got."""

    seats = ("solver",)
    fan_out = {"Child": 4}  # noqa: RUF012

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        await agent.act(user("one"))
        known = await ctx.remember("a proposal", "a structure")
        place = Path(ctx.task.data["directory"])
        children = ctx.spawn(Child, {"n": known.times, "directory": str(place)}, n=4)
        (place / f"parent.{os.getpid()}").touch()
        results = await ctx.gather(*children)
        agent.reward(sum(result.rewards["solver"] for result in results))


class PatientParent(agentrl.Environment):
    """Takes a turn while its two children run."""

    seats = ("solver",)
    fan_out = {"Child": 2}  # noqa: RUF012

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        children = ctx.spawn(Child, {"n": 1, "directory": ctx.task.data["directory"]}, n=2)
        await agent.act(user("one"))
        results = await ctx.gather(*children)
        agent.reward(sum(result.rewards["solver"] for result in results))


class Broken(agentrl.Environment):
    """Goes wrong in the way its task says."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        await agent.act(user("one"))
        how = ctx.task.data["how"]
        if how == "raises":
            raise KeyError("nothing there")
        if how == "sys.exit":
            sys.exit(3)
        if how == "no reward":
            agent.reward(float("nan"))
        if how == "no data":
            bad: Any = object()
            ctx.spawn(Child, {"n": bad}, n=2)
        if how == "no such seat":
            ctx.agent("nobody")
        if how == "no such policy":
            ctx.spawn(Unseated, {"n": 1}, n=2)
        if how == "swallows":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    return


class Unseated(agentrl.Environment):
    """Nobody holds its seat."""

    seats = ("stranger",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        ctx.agent("stranger")
