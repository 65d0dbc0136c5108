"""The part of `benchmarks.weight_sync` about full weights: our update beside vLLM's own calls, on the same requests."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

from agentrl.core.errors import EngineError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.vllm.engine import VllmEngine
from agentrl.engines.vllm.startup import start_vllm
from benchmarks.report import Report
from benchmarks.vllm_parts import CountingModel, Requests, WatchedVllm, at_percent, settings_for, spread

POLICY = "solver"
IN_FLIGHT, CONTEXT, PROMPT, NEW = 64, 256, 32, 160
APART_S = {True: 0.15, False: 2.0}
"""Between two updates, by whether KV is kept: all of it is to be computed again before the next one comes."""


class Traffic:
    """`IN_FLIGHT` calls at a time, whose tokens are checked."""

    def __init__(self, engine: VllmEngine) -> None:
        self.calls = self.lost = self.faults = self.tokens = self.crossed = 0
        self._engine = engine
        self._requests = Requests(CountingModel.HALF)
        self._stop = asyncio.Event()

    def start(self, model: CountingModel) -> list[asyncio.Task[None]]:
        """Call, for as long as `stop` was not called."""
        return [asyncio.create_task(self._converse(model)) for _ in range(IN_FLIGHT)]

    async def stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Let calls in flight end."""
        self._stop.set()
        await asyncio.gather(*tasks)

    async def _converse(self, model: CountingModel) -> None:
        while not self._stop.is_set():
            prompt = self._requests.prompt(PROMPT)
            self.calls += 1
            try:
                completion = await self._requests.ask(self._engine, POLICY, prompt, NEW)
            except EngineError as error:
                print(error)
                self.lost += 1
                continue
            self.lost += len(completion.token_ids) != NEW
            self.faults += model.faults(prompt, completion)
            self.tokens += len(completion.token_ids)
            self.crossed += len(completion.spans) > 1


async def full_weights(report: Report, *, updates: int, keep_kv: bool) -> None:
    """Start vLLM for full weights; updates of ours and bare ones by turns."""
    with tempfile.TemporaryDirectory() as scratch:
        model = CountingModel(Path(scratch))
        start = str(model.directories[0])
        settings = settings_for(slots=IN_FLIGHT, max_context=CONTEXT, refresh="token", adapter_slots=0, keep_kv=keep_kv)
        llm = WatchedVllm(start_vllm(start, settings))
        try:
            shared: Any = llm
            engine = VllmEngine(shared, start, versions={POLICY: PolicyVersion(POLICY, 0, 0)}, settings=settings)
            traffic = Traffic(engine)
            tasks = traffic.start(model)
            windows = await by_turns(engine, llm, model, updates=updates, keep_kv=keep_kv)
            await traffic.stop(tasks)
            await engine.close()
        finally:
            llm.bare.shutdown()
    stalls = {name: llm.gaps_within(each) for name, each in windows.items()}
    longest = {name: [max(gaps) for gaps in each if gaps] for name, each in stalls.items()}
    if keep_kv:
        over = [statistics.median(longest[name]) for name in ("ours", "bare")]
        report.figures["full_gap_over_bare_ms"] = over[0] - over[1]
    for figure, found in (("requests_lost", traffic.lost), ("tokens_twice", traffic.faults)):
        report.figures[figure] = (report.figures[figure] or 0) + found
    print(
        f"full weights, keep_kv {keep_kv}: {traffic.calls} calls, {traffic.tokens} tokens, all checked; "
        f"{traffic.crossed} calls crossed an update; lost {traffic.lost}, faults {traffic.faults}"
    )
    for name, values in longest.items():
        took = [1e3 * (end - begin) for begin, end in windows[name]]
        print(
            f"  longest gap across an update, {name:5s} {spread(values)} p99 {at_percent(values, 99):.1f} ms; "
            f"the update took {spread(took)} ms",
            flush=True,
        )


async def by_turns(
    engine: VllmEngine, llm: WatchedVllm, model: CountingModel, *, updates: int, keep_kv: bool
) -> dict[str, list[tuple[float, float]]]:
    """When updates of each kind began and ended. A bare one loads again what serves, under the same label."""
    windows: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
    await asyncio.sleep(1.0)
    await engine.serve([model.weights(POLICY, 1)])  # sets up what is set up once
    for step in range(2, updates + 2):
        weights = model.weights(POLICY, step)
        for name in ("ours", "bare"):
            await asyncio.sleep(APART_S[keep_kv])
            begun = time.perf_counter()
            await (engine.serve([weights]) if name == "ours" else bare_update(llm, weights, keep_kv=keep_kv))
            windows[name].append((begun, time.perf_counter()))
    await asyncio.sleep(APART_S[keep_kv])
    return windows


async def bare_update(llm: WatchedVllm, weights: WeightsRef, *, keep_kv: bool) -> None:
    """vLLM's own way, and nothing else."""
    await llm.pause_generation(mode="keep", clear_cache=not keep_kv)
    await llm.start_weight_update()
    update = {"path": f"{weights.path}/model.safetensors"}
    await llm.update_weights(WeightTransferUpdateRequest(update_info=update))
    await llm.finish_weight_update(weight_version=str(weights.version))
    await llm.resume_generation()
