"""A client's script that uses every route of the Tinker server, and kills of the server between and inside requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packages.tinker.tests.client import CALCULATOR, KEY, Client, Refused, Row, ServerProcess, row, until_accepted

STEPS = 3
"""Optimizer steps of the script."""
CALLS = 64
"""Number of calls of the script."""
MOMENTS = ("sent", "answered", "later")
"""When a call's kill comes: while the server may handle the call, between it and the next, or during later ones."""


def policy_rows(seed: int = 0) -> list[Row]:
    """Rows with the inputs of policy losses."""
    generator = np.random.default_rng(seed)
    rows = []
    for tokens in ([5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12], [20, 21, 22]):
        count = len(tokens) - 1
        logprobs = -generator.random(count).astype(np.float32) * 9
        rows.append(row(tokens, logprobs=logprobs, advantages=generator.standard_normal(count).astype(np.float32)))
    return rows


@dataclass
class KilledServer:
    """A server process that is killed and started again, and what it answered.

    Args:
        directory: its run's parent directory.
        forgets: whether accepted requests without a result are removed from the journal at each kill. A server that
            kept its futures in memory would lose them so: the control of what the kills show.
        settings: configuration of the server.
    """

    directory: Path
    forgets: bool = False
    settings: str = CALCULATOR
    kills: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    """First result of each request, by id."""
    changed: set[str] = field(default_factory=set)
    """Requests that later had another result."""

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True)
        self.process = ServerProcess(self.directory, self.settings)
        self.address = self.process.start()
        self._one_at_a_time = asyncio.Lock()

    async def kill(self, delay: float = 0.0) -> None:
        """Kill the process after some seconds, and start another."""
        await asyncio.sleep(delay)
        async with self._one_at_a_time:
            await asyncio.to_thread(self._restart)

    def _restart(self) -> None:
        self.process.kill()
        self.kills += 1
        if self.forgets:
            database = self.directory / "server/journal/requests.db"
            with contextlib.closing(sqlite3.connect(database)) as connection, connection:
                connection.execute("DELETE FROM requests WHERE id NOT IN (SELECT id FROM results)")
        self.process.start()

    async def lost(self) -> int:
        """Count the requests of all scripts that no longer have the result that they had."""
        async with PersistentClient(self, {}) as client:
            for request_id in list(self.answers):
                try:
                    await client.send("POST", "retrieve_future", json={"request_id": request_id})
                except Refused:
                    self.changed.add(request_id)
        return len(self.changed)


class PersistentClient(Client):
    """A client that repeats a request without an answer, as the SDK does, and whose server is killed at some calls."""

    def __init__(self, server: KilledServer, kills: Mapping[int, str], seed: int = 0) -> None:
        super().__init__(server.address, KEY)
        self._server = server
        self._kills = kills
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self.calls = 0

    async def __aexit__(self, *details: object) -> None:
        await asyncio.gather(*self._tasks)
        await super().__aexit__(*details)

    async def send(self, method: str, path: str, **arguments: Any) -> bytes:
        moment = self._kills.get(self.calls)
        self.calls += 1
        if moment == "sent":
            self._schedule(0.01)
        body: bytes = await until_accepted(self, lambda: super(PersistentClient, self).send(method, path, **arguments))
        if moment == "answered":
            await self._server.kill()
        elif moment == "later":
            self._schedule(0.06)
        if path == "retrieve_future" and b'"try_again"' not in body:
            request_id = arguments["json"]["request_id"]
            if self._server.answers.setdefault(request_id, body) != body:
                self._server.changed.add(request_id)
        return body

    def _schedule(self, seconds: float) -> None:
        self._tasks.append(asyncio.create_task(self._server.kill(self._random.random() * seconds)))


class Outcome(NamedTuple):
    """The end of a script."""

    answers: Sequence[Any]
    """What it got, without names that differ from script to script."""
    changes: int
    """Changes of the model's weights: steps, and weights that were loaded."""


async def script(client: Client, rank: int = 4) -> Outcome:
    """Create, sample, train, save, load, look up and delete.

    Args:
        client: the client.
        rank: rank of the models' adapters; 0: models with all weights.
    """
    answers: list[Any] = []
    note = answers.append

    async def sample(sampler: str) -> None:
        found = await client.sample(sampler, [5, 6, 7], 2, seed=3, stop=[], prompt_logprobs=True)
        note([found.tokens, [one.tobytes() for one in found.logprobs]])

    created = {"session_id": client.session, "sampling_session_seq_id": 100, "base_model": "calc"}
    sampler = (await client.post("create_sampling_session", **created))["sampling_session_id"]
    await sample(sampler)
    model = await client.model(rank=rank)
    path = ""
    for step in range(STEPS):
        promises = [await client.forward_backward(model, policy_rows(2 * step + one), "ppo") for one in range(2)]
        note(await client.step(model))
        for promise in promises:
            note(await client.result(promise))
        await sample(await client.sampler(model, step))
        if step == 0:
            path = (await client.result(await client.submit("save_weights", model, path="first")))["path"]
        if step == 1:
            await client.result(await client.submit("load_weights", model, path=path, optimizer=True))
    await client.post("session_heartbeat", session_id=client.session)
    loaded = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": False}
    other = (await client.result(await client.post("load_weights", **loaded)))["model_id"]
    rows = [row([5, 6, 7, 8])]
    note(await client.result(await client.forward_backward(other, rows, "cross_entropy", forward_only=True)))
    note((await client.post("get_info", model_id=other))["lora_rank"])
    note(await client.post("weights_info", tinker_path=path))
    saved = await client.result(await client.submit("save_weights_for_sampler", model, path="end"))
    exported = await client.result(await client.submit("save_weights_external", model, path="end"))
    note(saved["agentrl_version"][2] == exported["agentrl_version"][2])
    await client.post("cancel_future", request_id=f"{sampler}:0")  # it has its result
    place = f"training_runs/{model}/checkpoints"
    name = "adapter_model.safetensors" if rank else "model.safetensors"
    note(await client.send("GET", f"{place}/sampler_weights/end/files/{name}"))
    await client.send("PUT", f"{place}/sampler_weights/end/ttl", json={"ttl_seconds": 3600})
    await client.send("DELETE", f"{place}/weights/first")
    note([one["checkpoint_id"] for one in (await client.get(place))["checkpoints"]])
    of_model, of_session = f"training_runs/{model}", f"sessions/{client.session}"
    for question in ("get_server_capabilities", "training_runs", of_model, "checkpoints", "sessions", of_session):
        await client.get(question)
    await client.get(f"samplers/{sampler}")
    await client.post(f"{of_session}/finish", reason={"type": "success"})
    return Outcome(answers, saved["agentrl_step"])


def plan(seed: int, count: int) -> dict[int, str]:
    """Choose calls of a script, and the moment of the kill at each."""
    chosen = random.Random(seed)
    return {call: chosen.choice(MOMENTS) for call in sorted(chosen.sample(range(CALLS), count))}
