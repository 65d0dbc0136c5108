"""Environments whose sandbox fails, in every place where an environment can ask one.

The replay tests and `benchmarks.oracle` share them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import aiohttp

import agentrl
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.rollout.chat.byte_formats import STOP_TOKEN


class Sandbox:
    """Fails a number of times."""

    failures = 0
    asked = 0
    failed = 0
    rate = 0.0
    """Share of the other calls that fail, too."""

    def __init__(self) -> None:
        self.calls = 0

    @classmethod
    def broken(cls, failures: int) -> None:
        cls.failures, cls.asked = failures, 0

    @classmethod
    def run(cls) -> str:
        """What it says, if it is there."""
        cls.asked += 1
        if cls.failures or random.SystemRandom().random() < cls.rate:
            cls.failures -= bool(cls.failures)
            cls.failed += 1
            raise agentrl.InfrastructureError("the sandbox does not answer")
        return "4"

    def well(self) -> str:
        self.calls += 1
        return "well"

    def call(self) -> str:
        self.calls += 1  # a part of the call that failed is not there when it is tried again
        return f"{self.run()}.{self.calls}"

    def get_state(self) -> int:
        return self.calls

    def set_state(self, state: int) -> None:
        self.calls = state


class Broken(Sandbox):
    """Cannot be made."""

    def __init__(self) -> None:
        super().__init__()
        Sandbox.run()


def resource(level: str) -> Callable[[agentrl.EpisodeContext], Awaitable[str]]:
    async def call(ctx: agentrl.EpisodeContext) -> str:
        sandbox = ctx.resource(Sandbox, level=level)  # type: ignore[arg-type]
        await sandbox.call("well")
        return str(await sandbox.call("call"))

    return call


async def factory(ctx: agentrl.EpisodeContext) -> str:
    await ctx.resource(Broken).call("well")
    return "4"


async def program(ctx: agentrl.EpisodeContext) -> str:
    return Sandbox.run()


async def in_task_group() -> str:
    async def ask() -> str:
        return Sandbox.run()

    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask())
    return asked.result()


def tool(
    run: Callable[[], str | Awaitable[str]] = Sandbox.run, **options: Any
) -> Callable[[agentrl.EpisodeContext], Awaitable[str]]:
    return lambda ctx: ctx.call_tool("ask", {}, run, timeout_s=None, **options)


WAYS: dict[str, Callable[[agentrl.EpisodeContext], Awaitable[str]]] = {
    "effect": lambda ctx: ctx.effect("ask", Sandbox.run),
    "read": lambda ctx: ctx.effect("ask", Sandbox.run, guarantee="read"),
    "reconciled": lambda ctx: ctx.effect("ask", Sandbox.run, guarantee="once", reconcile=lambda: (False, "")),
    "tool": tool(external=False),
    "external tool": tool(external=True),
    "replay": resource("replay"),
    "snapshot": resource("snapshot"),
    "pinned": resource("pinned"),
    "factory": factory,
    "program": program,
    "task group": lambda ctx: ctx.effect("ask", in_task_group),
    "tool with a task group": tool(in_task_group, external=False),
}
ONCE: dict[str, Callable[[agentrl.EpisodeContext], Awaitable[str]]] = {
    "once": lambda ctx: ctx.effect("ask", Sandbox.run, guarantee="once"),
    "once tool": tool(external=True, guarantee="once"),
}


class Asks(agentrl.Environment):
    """Asks its sandbox between two turns."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver = ctx.agent("solver")
        await solver.act(agentrl.user("?"))
        value = await {**WAYS, **ONCE}[ctx.task.data["way"]](ctx)
        await solver.act(agentrl.user(value))
        solver.reward(float(value[0]))


class Swallows(Asks):
    """Makes a reward of each failure."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        try:
            await super().run(ctx)
        except Exception:  # noqa: BLE001
            ctx.agent("solver").reward(0.0)


class Uses(agentrl.ToolEnvironment):
    """The policy asks the sandbox, by a tool."""

    @agentrl.tool
    async def ask(self) -> str:
        """Ask it."""
        return Sandbox.run()

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        assert not any("error" in message.content for message in episode.messages)
        return -1.0 if episode.truncated else 1.0


class UsesOutside(Uses):
    @agentrl.tool(external=True)
    async def ask(self) -> str:
        """Ask it."""
        return Sandbox.run()


class UsesAnEffect(Uses):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.ctx = ctx
        await super().run(ctx)

    @agentrl.tool
    async def ask(self) -> str:
        """Ask it."""
        return await self.ctx.effect("ask", Sandbox.run)


class Scores(Uses):
    """The sandbox is asked by the reward."""

    @agentrl.tool
    async def ask(self) -> str:
        """Answer."""
        return "4"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(Sandbox.run()) / 4


def calls_the_tool_once(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    has_answer = b"4" in bytes(token for token in request.token_ids.tolist() if token < 256)
    call = b'<tool_call>{"name": "ask", "arguments": {}}</tool_call>'
    return [*(b"done" if has_answer else call), STOP_TOKEN]


class Outside(agentrl.HarnessEnvironment):
    """An agent from outside, whose sandbox fails after its second request."""

    seats = ("main",)
    attempts: ClassVar[int] = 0

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> str:
        Outside.attempts += 1
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            for text in ("a", "b"):
                body = {"model": "main", "messages": [{"role": "user", "content": text}]}
                async with client.post(f"{endpoint.url}/chat/completions", json=body) as response:
                    assert response.status == 200
        return Sandbox.run()

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float(episode.result) if episode.error is None else 0.0
