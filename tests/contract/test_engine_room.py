"""The memory of an engine's process: clients' conversations are admitted if they fit, and a dead client holds none."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EngineLostError, NoRoomError
from agentrl.core.ports import EngineSession, generate_when_room
from agentrl.core.tokens import Completion
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import EngineClient, ProcessEngine
from tests.contract.engine_kinds import prompt, request
from tests.contract.test_engine_process import kill, made

BUDGET, CONTEXT = 900, 128
"""Tokens that reservations may hold of the engine's 1,000; tokens of a conversation: seven fit."""
SLOW = ChildProgram(
    "tests.contract.scripted_program:scripted_engine",
    {"max_context": 4096, "refresh": "token", "kv_tokens": 1000, "seconds_per_token": 60.0},
)
"""Its calls end when they are aborted."""
VICTIM = """
import asyncio, sys
import numpy as np
from agentrl.core.ports import EngineCapabilities, GenerateRequest, SamplingParams
from agentrl.engines.remote.client import EngineClient

async def main():
    client = EngineClient(EngineCapabilities(
        name="scripted", refresh=frozenset(), expert_routing=False, sampling_mask=False, adapters=0, max_context=4096))
    client.moved([sys.argv[1]])
    request = GenerateRequest(
        request_id="victim", token_ids=np.full(800, 3, np.int32), sampling=SamplingParams(max_tokens=8), seed=0)
    call = asyncio.ensure_future(client.open("victim", "solver").generate(request))
    while not client.calls_in_flight:
        await asyncio.sleep(0.01)
    await client.score("solver", np.full(3, 3, np.int32))  # answered after the engine has taken the call
    print("holds", flush=True)
    await call

asyncio.run(main())
"""


def with_slow_engine(scenario: Callable[[ProcessEngine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        engine, _ = await made(SLOW)
        try:
            async with asyncio.timeout(60):
                await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(main())


def clients_of(engine: ProcessEngine, count: int) -> list[EngineClient]:
    clients = [EngineClient(engine.capabilities) for _ in range(count)]
    for client in clients:
        client.moved(engine.addresses)
        engine.on_move(lambda: [each.moved(engine.addresses) for each in clients])
    return clients


def test_the_calls_of_all_clients_fit_the_memory_and_the_others_run_by_priority() -> None:
    async def scenario(engine: ProcessEngine) -> None:
        started: list[int] = []
        sessions = [client.open("s", "solver") for client in clients_of(engine, 12)]
        refused = list[int]()

        async def call(number: int) -> None:
            wanted = request(f"r{number}", prompt(CONTEXT, number), priority=-number)
            try:
                await sessions[number].generate(wanted)
            except NoRoomError:
                refused.append(number)
                await sessions[number].wait_for_room()
                started.append(number)
                await sessions[number].generate(wanted)

        calls = [asyncio.ensure_future(call(number)) for number in range(12)]
        while len(refused) < 12 - BUDGET // CONTEXT:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(refused) == 12 - BUDGET // CONTEXT
        running = [number for number in range(12) if number not in refused]
        for count, number in enumerate(running[:5], 1):
            sessions[number].close()
            while len(started) < count:
                await asyncio.sleep(0.01)
        assert started == sorted(refused, reverse=True), "the lowest value of the priority comes first"
        for task in calls:
            task.cancel()

    with_slow_engine(scenario)


def test_a_killed_worker_returns_its_memory() -> None:
    async def scenario(engine: ProcessEngine) -> None:
        victim = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", VICTIM, engine.addresses[0]),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert victim.stdout is not None
        assert await victim.stdout.readline() == b"holds\n"
        (client,) = clients_of(engine, 1)
        session = client.open("s", "solver")
        with pytest.raises(NoRoomError):
            await session.generate(request("r", prompt(800), max_tokens=0))
        waiting = asyncio.ensure_future(session.wait_for_room())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        os.kill(victim.pid, signal.SIGKILL)
        await waiting
        assert (await session.generate(request("r", prompt(800), max_tokens=0))).finish_reason == "length"
        await victim.wait()

    with_slow_engine(scenario)


async def hold(client: EngineClient) -> asyncio.Task[Completion]:
    """Start a call of 800 tokens that only an abort ends."""
    call = asyncio.ensure_future(client.open("h", "solver").generate(request("h", prompt(800))))
    while not client.calls_in_flight:
        await asyncio.sleep(0.01)
    await client.score("solver", prompt(3))  # its answer shows that the engine has taken the call before it
    return call


async def wait_behind(client: EngineClient, name: str, tokens: int) -> tuple[EngineSession, asyncio.Task[None]]:
    """Queue for the memory of a call."""
    session = client.open(name, "solver")
    with pytest.raises(NoRoomError):
        await session.generate(request(name, prompt(tokens), max_tokens=0))
    return session, asyncio.ensure_future(session.wait_for_room())


def test_an_engine_that_restarts_has_granted_nothing_and_those_that_waited_ask_again() -> None:
    async def scenario(engine: ProcessEngine) -> None:
        holder, waiter = clients_of(engine, 2)
        held = await hold(holder)
        session, waiting = await wait_behind(waiter, "w", 800)
        kill(engine)
        await waiting
        with pytest.raises(EngineLostError):
            await held
        completion = None
        while completion is None:
            try:
                completion = await generate_when_room(session, request("w", prompt(800), max_tokens=0))
            except EngineLostError:
                await asyncio.sleep(0.01)
        assert completion.finish_reason == "length"

    with_slow_engine(scenario)


def test_a_wait_that_is_cancelled_leaves_the_queue() -> None:
    async def scenario(engine: ProcessEngine) -> None:
        holder, cancelled, last = clients_of(engine, 3)
        held = await hold(holder)
        _, first = await wait_behind(cancelled, "c", 800)
        _, second = await wait_behind(last, "l", 100)
        await asyncio.sleep(0.1)
        assert not second.done(), "a call that fits does not pass an earlier one that does not"
        first.cancel()
        await second
        held.cancel()

    with_slow_engine(scenario)
