"""What engines grant of their memory to 1 to 512 workers, and how many episodes `max_in_flight = "auto"` admits.

`kv_overcommit`: tokens in the contexts of admitted calls over the tokens that the engines have, for the number of
workers with the largest share: two engine processes, one client per worker, conversations of a 75th of the memory.
`kv_overcommit_divided`: the same if each worker grants its part of the memory by itself.
`auto_over_best`: tokens per second with `max_in_flight = "auto"` over those with the best of some fixed values, the
mean over six simulated workloads; `auto_over_best_worst`: the smallest of them.
`jump_over_best`: the same after the contexts have become ten times as long in the middle of a run; `jump_thrashing`:
with a fixed value and without reservations, where contexts evict each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Literal

import numpy as np

from agentrl.core.errors import NoRoomError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion
from agentrl.engines.kv_budget import KVBudget
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import EngineClient, ProcessEngine
from benchmarks import scheduling_memory
from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, simulate_run

REPLICAS, KV_TOKENS, CONTEXT, CONVERSATIONS = 2, 48_000, 1_280, 512
"""Engines, tokens that each of them holds, tokens of a conversation: a hundredth of eight GPUs with long contexts."""
WORKERS = (1, 4, 16, 64, 128, 256, 512)
PROGRAM = ChildProgram(
    "tests.contract.scripted_program:scripted_engine",
    {"max_context": 1 << 17, "refresh": "token", "kv_tokens": KV_TOKENS, "seconds_per_token": 3600.0},
)
FIXED = (16, 32, 64, 128, 256)
WORKLOADS: Mapping[str, tuple[float, float, int, int]] = {
    "short tools, little memory": (5, 2_000, 125_000, 1),
    "slow tools, little memory, fast prefill": (20, 10_000, 125_000, 1),
    "slow tools": (20, 2_000, 1_000_000, 1),
    "very slow tools": (60, 2_000, 1_500_000, 1),
    "hardly any tools": (0.1, 2_000, 1_000_000, 1),
    "short tools, little memory, three engines": (5, 2_000, 125_000, 3),
}
"""Median seconds of a tool, tokens of context computed per second, tokens that an engine holds, engines."""
JUMP = {"jump": (64, 10.0)}
"""From the ninth step's tasks on, contexts are ten times as long: 20,000 tokens and 4,000 per tool."""


def figures(quick: bool) -> dict[str, float | None]:
    """Measure all; see the module."""
    return {**_memory_figures(quick), **_auto_figures(quick)}


def _auto_figures(quick: bool) -> dict[str, float | None]:
    if quick:
        return {}
    ratios = []
    for name, (tool_s, prefill_rate, kv_tokens, replicas) in WORKLOADS.items():
        planned = _altered(scheduling_memory.plan(0, tool_s, prefill_rate, kv_tokens), engine={"replicas": replicas})
        fixed = {count: _tokens_per_s(planned, count) for count in FIXED}
        auto = _tokens_per_s(planned, "auto")
        ratios.append(auto / max(fixed.values()))
        shown = ", ".join(f"{count}: {rate:.0f}" for count, rate in fixed.items())
        print(f"  {name}: auto {auto:.0f} tokens/s, {ratios[-1]:.2f} of the best fixed value ({shown})", flush=True)
    planned = _altered(scheduling_memory.plan(0, 20, 2_000, 1_500_000), **JUMP)
    after = {"steps": 20, "skipped": 11}
    fixed = {count: _tokens_per_s(planned, count, **after) for count in FIXED}
    auto = _tokens_per_s(planned, "auto", **after)
    thrashing = _tokens_per_s(planned, 128, reserves=False, **after)
    shown = ", ".join(f"{count}: {rate:.0f}" for count, rate in fixed.items())
    print(f"  jump: auto {auto:.0f} tokens/s; fixed {shown}; 128 without reservations: {thrashing:.0f}", flush=True)
    return {
        "auto_over_best": fmean(ratios),
        "auto_over_best_worst": min(ratios),
        "jump_over_best": auto / max(fixed.values()),
        "jump_thrashing": thrashing / max(fixed.values()),
    }


def _altered(plan: SimulationPlan, **changes: Any) -> SimulationPlan:
    data = plan.model_dump()
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    return SimulationPlan.model_validate(data)


def _tokens_per_s(
    plan: SimulationPlan,
    max_in_flight: int | Literal["auto"],
    *,
    steps: int = 12,
    skipped: int = 4,
    reserves: bool = True,
) -> float:
    planned = _altered(plan, max_in_flight=max_in_flight)
    return simulate_run(Scenario(plan=planned, steps=steps, skipped=skipped, reserves=reserves)).tokens_per_s


def _memory_figures(quick: bool) -> dict[str, float | None]:
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
            await (await client._open_connection(address)).score("policy", np.full(2, 3, np.int32), 1.0, 0)
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
