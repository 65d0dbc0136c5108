"""CPU time of a call through the gateway, its client's included, beside the same prompt through `agent.act`."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import aiohttp

import agentrl
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.journal.memory import MemoryJournal
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.execution import POLICY, plain_rollout_settings, wire_dispatcher

TURNS = 20
EPISODES = 8
PAIRS, QUICK_PAIRS = 7, 3
PROMPT = "A question of ordinary length, and what a tool found: " + 10 * "some words of it, "


class Direct(agentrl.Environment):
    """Turns by `act`."""

    seats = ("main",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("main")
        for _ in range(TURNS):
            await agent.act(agentrl.user(PROMPT))
        agent.reward(1.0)


class Outside(agentrl.HarnessEnvironment):
    """The same turns by chat completions."""

    seats = ("main",)

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        messages: list[Any] = []
        async with aiohttp.ClientSession(headers={"x-api-key": endpoint.key}) as client:
            for _ in range(TURNS):
                messages.append({"role": "user", "content": PROMPT})
                body = {"model": "main", "messages": messages}
                async with client.post(f"{endpoint.url}/chat/completions", json=body) as response:
                    messages.append((await response.json())["choices"][0]["message"])

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 1.0


async def _cpu_ms(environment: type[agentrl.Environment]) -> float:
    """CPU milliseconds a turn."""
    reply = [*b"a reply of a few words", STOP_TOKEN]
    engine = ScriptedEngine([reply], versions={POLICY: PolicyVersion(POLICY, 0, 0)})
    failures: list[BaseException] = []
    dispatcher, _ = wire_dispatcher(
        environment, engine, MemoryJournal(), plain_rollout_settings(max_turns=TURNS), failures
    )
    ended: list[EpisodeHeader] = []
    began = time.process_time()
    for n in range(EPISODES):
        spec = EpisodeSpec(
            episode_id=f"e{n}",
            environment=name_of(environment),
            task=agentrl.Task(id="t", data={}),
            seed=n,
            seats={"main": SeatBinding(POLICY)},
            group_id=f"g{n}",
        )
        dispatcher.worker.submit(spec, ended.append)
    await dispatcher.worker.drain()
    if failures or [header.turns for header in ended] != [TURNS] * EPISODES:
        raise SystemExit(f"an episode failed: {failures or dispatcher.worker.last_failure}")
    return (time.process_time() - began) * 1e3 / (TURNS * EPISODES)


def figures(quick: bool) -> dict[str, float | None]:
    asyncio.run(_cpu_ms(Outside))  # imports
    pairs = [
        (asyncio.run(_cpu_ms(Direct)), asyncio.run(_cpu_ms(Outside))) for _ in range(QUICK_PAIRS if quick else PAIRS)
    ]
    print(f"ms a turn, by act and through the gateway: {pairs}", flush=True)
    return {"gateway_ms": statistics.median(outside - direct for direct, outside in pairs)}
