"""Connections held open while weights are updated: real aiohttp clients, a real gateway, the scripted engine.

All calls are in flight, half of them streamed, when the engine is paused; it gets the next version after a few signs of
life, goes on, and only then ends them. `client_errors` counts calls without a whole reply, and replies of which no
token is of the new version.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from typing import Any, ClassVar

import aiohttp

import agentrl
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding, WeightsRef
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.gateway import server
from agentrl.journal.entries import TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.rollout.turn_entries import completion_from_entry
from agentrl.testing.execution import PARTITION, POLICY, plain_rollout_settings, wire_dispatcher

CONNECTIONS, QUICK_CONNECTIONS = 1000, 50
SIGNS = 3
"""Signs of life that each client gets while it waits."""
KEEPALIVE_S = 2.0
NEXT = WeightsRef(version=PolicyVersion(POLICY, 0, 1), path="", kind="adapter", sha256="")


class Waiting(agentrl.HarnessEnvironment):
    """A program that asks everything at once."""

    seats = ("main",)
    connections = CONNECTIONS
    seen: ClassVar[Counter[str]] = Counter()

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=3 * KEEPALIVE_S + 60)
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as client:
            calls = (self._ask(client, endpoint, n) for n in range(self.connections))
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    self.seen[f"error: {type(outcome).__name__}: {outcome}"[:80]] += 1

    async def _ask(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint, n: int) -> None:
        body = {"model": "main", "messages": [{"role": "user", "content": str(n)}], "stream": n % 2 == 0}
        async with client.post(f"{endpoint.url}/chat/completions", json=body) as response:
            answer = await response.read()
        if n % 2:
            said, signs = json.loads(answer)["choices"][0]["message"]["content"], len(answer) - len(answer.lstrip())
        else:
            events = answer.split(b"\n\n")
            signs, data = events.count(b": waiting"), [each for each in events if each.startswith(b"data: {")]
            choices = [json.loads(each.removeprefix(b"data: "))["choices"][0]["delta"] for each in data]
            said = "".join(delta.get("content") or "" for delta in choices) if b"data: [DONE]" in events else ""
        whole = response.status == 200 and said == f"reply to {n}"
        self.seen["whole" if whole else f"error: {response.status} {said[:20]!r}"] += 1
        self.seen["signs"] += min(signs, SIGNS)

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 1.0


async def _held(connections: int) -> Counter[str]:
    def script(request: Any, policy: str, version: PolicyVersion) -> list[int]:
        asked = bytes(token for token in request.token_ids.tolist() if token < 256).decode()
        return [*f"reply to {asked.split()[1].removesuffix('assistant')}".encode(), STOP_TOKEN]

    Waiting.connections = connections
    Waiting.seen.clear()
    engine = ScriptedEngine(
        script, versions={POLICY: PolicyVersion(POLICY, 0, 0)}, hold=True, seconds_per_token=0.01, refresh="token"
    )
    settings = plain_rollout_settings(max_turns=2 * connections, episode_timeout_s=3600.0)
    failures: list[BaseException] = []
    journal = MemoryJournal()
    dispatcher, _ = wire_dispatcher(Waiting, engine, journal, settings, failures)
    ended: list[EpisodeHeader] = []
    spec = EpisodeSpec(
        episode_id="e0",
        environment=name_of(Waiting),
        task=agentrl.Task(id="t", data={}),
        seed=0,
        seats={"main": SeatBinding(POLICY)},
        group_id="g0",
    )
    dispatcher.worker.submit(spec, ended.append)
    while engine.in_flight < connections:
        await asyncio.sleep(0.05)
    await engine.pause()
    await asyncio.sleep((SIGNS + 1) * KEEPALIVE_S)
    await engine.serve([NEXT])
    await engine.resume()
    engine.release_held()
    await dispatcher.worker.drain()
    if failures or ended[0].drop_reason:
        raise SystemExit(f"the episode failed: {failures or dispatcher.worker.last_failure}")
    turns = [entry.decode() for entry in journal.turn_log(PARTITION).read("e0", 0)]
    for turn in turns:
        if isinstance(turn, TurnEntry):
            spans = completion_from_entry(turn).spans
            Waiting.seen["error: no token of the new version"] += spans[-1].version != NEXT.version
    return +Waiting.seen


def figures(quick: bool) -> dict[str, float | None]:
    connections = QUICK_CONNECTIONS if quick else CONNECTIONS
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    usual, server.KEEPALIVE_S = server.KEEPALIVE_S, KEEPALIVE_S
    try:
        seen = asyncio.run(_held(connections))
    finally:
        server.KEEPALIVE_S = usual
    print(f"{connections} connections: {dict(seen)}", flush=True)
    return {"client_errors": connections - seen["whole"] + sum(n for name, n in seen.items() if "error" in name)}
