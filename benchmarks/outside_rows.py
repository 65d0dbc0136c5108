"""Episodes of a client that continues, branches, edits, compacts, repeats and goes away, against the engine's own log.

Half of them use the chat template of the model that is shipped, half a token per byte. The engine says texts, tool
calls, thinking and arbitrary tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

import agentrl
from agentrl.core.ids import stable_hash64
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.journal.entries import TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.rows import assemble_trajectories
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.rollout.runner import EpisodeRunner
from agentrl.testing.execution import PARTITION, POLICY, plain_rollout_settings, wire_dispatcher

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, GenerateRequest

EPISODES, QUICK_EPISODES = 500, 40
ACTS = 8
MODEL = Path(__file__).resolve().parents[1] / "environments/calculator/model"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}]
TEXTS = ("yes", "no", " yes", "<think>hm</think>yes", '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>')


class Roaming(agentrl.HarnessEnvironment):
    """A client that does to its conversations what clients do."""

    seats = ("main",)

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        draw = random.Random(task.data["seed"])
        async with aiohttp.ClientSession(headers={"x-api-key": endpoint.key}) as client:
            conversations: list[list[Any]] = []
            for _ in range(ACTS):
                asked = [_changed(draw, conversations) for _ in range(draw.choice((1, 1, 1, 3)))]
                asked += asked[:1] if draw.random() < 0.2 else []
                replies = await asyncio.gather(*(_ask(draw, client, endpoint, messages) for messages in asked))
                conversations += [[*messages, reply] for messages, reply in zip(asked, replies, strict=True) if reply]

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 1.0


def _changed(draw: random.Random, conversations: list[list[Any]]) -> list[Any]:
    """The messages of the next request."""
    new = {"role": "user", "content": draw.choice(("a", "b", "go on"))}
    if not conversations or draw.random() < 0.15:
        return [{"role": "system", "content": "be brief"}, new] if draw.random() < 0.5 else [new]
    messages = list(draw.choice(conversations[-4:]))
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    action = draw.random()
    if action < 0.5:
        calls = messages[-1].get("tool_calls", ())
        return [*messages, *({"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls), new]
    if action < 0.65:
        return [*messages[: draw.choice(replies) + 1], new]
    if action < 0.75:
        return messages[: replies[-1]]
    if action < 0.85:
        return [{"role": "user", "content": "so far: much"}, *messages[replies[-1] :], new]
    at = draw.choice(replies)
    changed = {**messages[at], "content": "changed"} if action < 0.95 else {**messages[at], "content": "yes "}
    return [*messages[:at], changed, *messages[at + 1 :], new]


async def _ask(
    draw: random.Random, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint, messages: list[Any]
) -> Any:
    """The reply's message; sometimes the client goes away and asks again."""
    key, leaves = str(draw.random()), draw.random() < 0.2
    body = {"model": "main", "messages": messages, "tools": TOOLS}
    while True:
        asking = client.post(f"{endpoint.url}/chat/completions", json=body, headers={"Idempotency-Key": key})
        try:
            async with asyncio.timeout(0.002 if leaves else 60.0), asking as response:
                answer = json.loads(await response.read())
        except TimeoutError:
            leaves = False
            continue
        return answer["choices"][0]["message"] if response.status == 200 else None


class _Log:
    """The engine's own log: by request, the context it was given and what it sampled."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format
        self.calls: dict[str, tuple[list[int], list[int]]] = {}

    def script(self, request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        draw = random.Random(request.seed)
        end = self._format.stop_token_ids[-1]
        if draw.random() < 0.2:
            sampled = [draw.randrange(100, 200) for _ in range(draw.randrange(1, 6))]
        else:
            sampled = self._format.encode(draw.choice(TEXTS))
        sampled = [*sampled, end] if draw.random() < 0.9 else sampled * 300
        sampled = sampled[: sampled.index(end) + 1] if end in sampled else sampled[: request.sampling.max_tokens]
        self.calls[request.request_id] = (request.token_ids.tolist(), sampled)
        return sampled


async def _played(chat_format: ChatFormat, seeds: range) -> Counter[str]:
    """Counts over some episodes."""

    class Runner(EpisodeRunner):
        def __init__(self, **services: Any) -> None:
            super().__init__(**{**services, "chat_format": chat_format})

    log, journal, failures = _Log(chat_format), MemoryJournal(), list[BaseException]()
    engine = ScriptedEngine(log.script, versions={POLICY: PolicyVersion(POLICY, 0, 0)}, seconds_per_call=0.003)
    settings = plain_rollout_settings(max_turns=1000)
    sampling = replace(settings.sampling, stop_token_ids=chat_format.stop_token_ids[-1:])
    settings = replace(settings, sampling=sampling)
    dispatcher, _ = wire_dispatcher(Roaming, engine, journal, settings, failures, runner_type=Runner)
    ended: list[EpisodeHeader] = []
    for seed in seeds:
        spec = EpisodeSpec(
            episode_id=f"e{seed}",
            environment=name_of(Roaming),
            task=agentrl.Task(id=f"t{seed}", data={"seed": seed}),
            seed=stable_hash64("outside", seed),
            seats={"main": SeatBinding(POLICY)},
            group_id=f"g{seed}",
        )
        dispatcher.worker.submit(spec, ended.append)
        if seed % 8 == 7:
            await dispatcher.worker.drain()
    await dispatcher.worker.drain()
    if failures or any(header.drop_reason for header in ended):
        raise SystemExit(f"an episode failed: {failures or dispatcher.worker.last_failure}")
    found = Counter[str](episodes=len(ended))
    for header in ended:
        _compare(header, journal, log, found)
    for end in journal.of_kind(EpisodeEnd):
        found["quarantined"] += int(end.metrics.get("rows/ambiguous", 0))
    found["lost"] = sum(len(sampled) for _, sampled in log.calls.values()) - found["trained"]
    return found


def _compare(header: EpisodeHeader, journal: MemoryJournal, log: _Log, found: Counter[str]) -> None:
    """An episode's rows as the trainer gets them, against what the engine had."""
    entries = journal.turn_log(PARTITION).read(header.episode_id, header.attempt)
    (trajectory,) = assemble_trajectories(entries)
    turns = [(entry.call_id, body) for entry in entries if isinstance(body := entry.decode(), TurnEntry)]
    numbers = {number: n for n, number in enumerate(sorted({turn.row for _, turn in turns}))}
    found["rows"] += len(trajectory.rows)
    found["trained"] += sum(int(row.loss_mask.sum()) for row in trajectory.rows)
    found["turns"] += len(turns)
    places: Counter[tuple[int, int]] = Counter()
    for call_id, turn in turns:
        context, sampled = log.calls[f"{header.episode_id}.{header.attempt}.{call_id}"]
        row = trajectory.rows[numbers[turn.row]]
        stop = len(context) + len(sampled)
        own = row.turn_index == turn.turn
        same = row.token_ids[:stop].tolist() == [*context, *sampled]
        same = same and own.nonzero()[0].tolist() == list(range(len(context), stop)) and bool(row.loss_mask[own].all())
        found["different"] += not same
        places.update((numbers[turn.row], at) for at in range(len(context), stop))
    found["twice"] += sum(count - 1 for count in places.values())


def figures(quick: bool) -> dict[str, float | None]:
    half = (QUICK_EPISODES if quick else EPISODES) // 2
    found = asyncio.run(_played(PlainChatFormat(), range(half)))
    found += asyncio.run(_played(TemplateChatFormat.load(MODEL), range(half, 2 * half)))
    print(dict(found), flush=True)
    return {
        "rows_differ_from_engine": found["different"],
        "tokens_trained_twice": found["twice"],
        "tokens_lost": found["lost"],
        "quarantined_share": found["quarantined"] / found["turns"],
        "rows_per_episode": found["rows"] / found["episodes"],
    }
