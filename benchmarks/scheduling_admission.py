"""What engines grant of their memory to 1 to 512 workers.

`kv_overcommit`: tokens that calls in flight hold over the tokens that the engines have, for the number of workers with
the largest share: two engine processes, one client per worker, conversations of a 75th of the memory.
`kv_overcommit_divided`: the same if each worker grants its part of the memory by itself.
"""

from __future__ import annotations

import asyncio

import numpy as np

from agentrl.core.errors import NoRoomError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion
from agentrl.engines.kv_budget import KVBudget
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import EngineClient, ProcessEngine

REPLICAS, KV_TOKENS, CONTEXT, CONVERSATIONS = 2, 48_000, 1_280, 512
"""Engines, tokens that each of them holds, tokens of a conversation: a hundredth of eight GPUs with long contexts."""
WORKERS = (1, 4, 16, 64, 128, 256, 512)
PROGRAM = ChildProgram(
    "tests.contract.scripted_program:scripted_engine",
    {"max_context": 1 << 17, "refresh": "token", "kv_tokens": KV_TOKENS, "seconds_per_token": 3600.0},
)


def figures(quick: bool) -> dict[str, float | None]:
    """Measure all; see the module."""
    granted = {workers: asyncio.run(_granted(workers)) for workers in ((1, 256) if quick else WORKERS)}
    divided = {workers: asyncio.run(_granted_by_division(workers)) for workers in granted}
    memory = REPLICAS * KV_TOKENS / CONTEXT
    for workers, count in granted.items():
        print(
            f"  {workers} workers: {count} of {CONVERSATIONS} conversations hold {count / memory:.2f} of the memory; "
            f"if it is divided, {divided[workers]} hold {divided[workers] / memory:.2f}",
            flush=True,
        )
    return {
        "kv_overcommit": max(granted.values()) / memory,
        "kv_overcommit_divided": max(divided.values()) / memory,
    }


async def _granted(workers: int) -> int:
    """Count the conversations that engine processes let in, of as many as workers ask for at once."""
    versions = {"policy": PolicyVersion("policy", 0, 0)}
    engines = [await ProcessEngine(PROGRAM, versions).ready() for _ in range(REPLICAS)]
    clients = [EngineClient(engines[0].capabilities) for _ in range(workers)]
    for client in clients:
        client.moved([address for engine in engines for address in engine.addresses])
    answered = [asyncio.ensure_future(_call(clients[number % workers], number)) for number in range(CONVERSATIONS)]
    while (
        sum(len(client.calls_in_flight) for client in clients) + sum(call.done() for call in answered) < CONVERSATIONS
    ):
        await asyncio.sleep(0.01)
    for client in clients:  # its answer shows that the engines have taken the calls before it
        for address in list(client._connections):
            await (await client._open_connection(address)).score("policy", np.full(2, 3, np.int32), 1.0)
    refused = sum(call.done() for call in answered)
    for call in answered:
        call.cancel()
    await asyncio.gather(*answered, return_exceptions=True)
    for engine in engines:
        await engine.close()
    return CONVERSATIONS - refused


async def _call(client: EngineClient, number: int) -> None:
    """Return once the call is refused."""
    request = GenerateRequest(
        request_id=f"r{number}",
        token_ids=np.full(CONTEXT, 3, np.int32),
        sampling=SamplingParams(max_tokens=1),
        seed=number,
        opening=number + 1,
    )
    try:
        await client.open(f"s{number}", "policy").generate(request)
    except NoRoomError:
        return


async def _granted_by_division(workers: int) -> int:
    budgets = [KVBudget(REPLICAS * KV_TOKENS // workers) for _ in range(workers)]
    return sum(budgets[number % workers].reservation().reserve(CONTEXT) for number in range(CONVERSATIONS))
