"""The part of `benchmarks.weight_sync` about adapters: what a publish costs calls in flight, and a refresh their KV."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.core.ports import Refresh
from agentrl.core.records import PolicyVersion
from agentrl.engines.vllm.engine import VllmEngine
from agentrl.engines.vllm.startup import start_vllm
from benchmarks.report import Report
from benchmarks.vllm_parts import Requests, RunFactories, WatchedVllm, at_percent, settings_for, spread

MODEL = Path(__file__).resolve().parents[1] / "environments" / "calculator" / "model"
VOCABULARY = 440
POLICY = "solver"
START = {POLICY: PolicyVersion(POLICY, 0, 0)}
PLACES, SLOTS, CONTEXT = 7, 32, 1024
PROMPT, NEW = 57, 48
PROBED, UNPROBED, NONE = "a publish", "a publish without a canary", "no publish"
BEHIND = 16
"""Calls in flight while adapters are published."""
WINDOW_S = 0.1
"""After a publish begins, in which its effect on calls in flight is looked for."""
TURNS, UPDATE_EVERY, SHARED, TOOL, SAMPLED, CONVERSATIONS = 20, 6, 64, 24, 16, 10


async def adapters(report: Report, *, publishes: int, quick: bool) -> None:
    """Start vLLM for adapters and measure."""
    settings = settings_for(slots=SLOTS, max_context=CONTEXT, refresh="lazy", adapter_slots=PLACES)
    llm = WatchedVllm(start_vllm(str(MODEL), settings))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            published = RunFactories(MODEL, Path(scratch), 8)
            await publishing(report, llm, published, publishes)
            with training():
                await publishing(report, llm, published, publishes, beside="_training")
            await refreshing(report, llm, published, quick=quick)
    finally:
        llm.bare.shutdown()


async def engine_over(llm: WatchedVllm, refresh: Refresh, max_staleness: int) -> VllmEngine:
    """An engine of ours over the vLLM that runs."""
    for number in await llm.list_loras():  # of the engine before, whose numbers come again
        await llm.remove_lora(number)
    settings = settings_for(
        slots=SLOTS, max_context=CONTEXT, refresh=refresh, adapter_slots=PLACES, max_staleness={POLICY: max_staleness}
    )
    shared: Any = llm
    return VllmEngine(shared, str(MODEL), versions=START, settings=settings)


@contextlib.contextmanager
def training() -> Iterator[None]:
    """A process that trains the same model on one thread meanwhile."""
    command = [sys.executable, "-c", _TRAINS, str(MODEL)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        try:
            yield
        finally:
            process.kill()


_TRAINS = """
import sys
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = torch.randint(model.config.vocab_size, (16, 256))
print("training", flush=True)
while True:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class PublishParts:
    """When the parts of each publish took place in an engine: names and (begin, end).

    vLLM is asked to load and to answer the canary at once; it answers the canary a step later.
    """

    def __init__(self, engine: VllmEngine) -> None:
        versions: Any = engine.versions
        self.times: dict[str, list[tuple[float, float]]] = {"copy and check": [], "vLLM loads": [], "canary check": []}

        check, load, ask = versions._copy_checked, versions._control.load_adapter, versions._control.next_logprobs

        def checked(*arguments: Any) -> Any:
            begun = time.perf_counter()
            found = check(*arguments)
            self.times["copy and check"].append((begun, time.perf_counter()))
            return found

        async def loaded(*arguments: Any) -> None:
            begun = time.perf_counter()
            await load(*arguments)
            self.times["vLLM loads"].append((begun, time.perf_counter()))

        async def answered(*arguments: Any, **settings: Any) -> Any:
            begun = time.perf_counter()
            answer = await ask(*arguments, **settings)
            self.times["canary check"].append((begun, time.perf_counter()))
            return answer

        versions._copy_checked = checked
        versions._control.load_adapter, versions._control.next_logprobs = loaded, answered

    def figures(self, *, until: float) -> dict[str, float]:
        """Median milliseconds of each part, in publishes that began before `until`."""
        names = {"copy and check": "lora_copy_ms", "vLLM loads": "lora_load_ms", "canary check": "lora_canary_ms"}
        return {
            name: 1e3 * statistics.median(ended - begun for begun, ended in self.times[part] if begun < until)
            for part, name in names.items()
        }

    def print(self, llm: WatchedVllm, *, until: float, step: float) -> None:
        """Print how long each part takes, also in steps of vLLM's worker, and the gaps of the calls that span it.

        Args:
            llm: the vLLM, which has seen the gaps.
            until: publishes that begin later do not count.
            step: median milliseconds between two tokens of a call, with no publish: of one step of the worker.
        """
        print(f"parts of a publish, {BEHIND} calls in flight; a step of vLLM takes {step:.1f} ms:")
        for name, times in self.times.items():
            counted = [(begun, ended) for begun, ended in times if begun < until]
            taken = [1e3 * (ended - begun) for begun, ended in counted]
            gaps = [gap for within in llm.gaps_within(counted) for gap in within]
            print(
                f"  {name:15s} {spread(taken)} ms, {statistics.median(taken) / step:.1f} steps; gaps meanwhile: "
                f"p50 {at_percent(gaps, 50):.1f}  p99 {at_percent(gaps, 99):.1f} ms"
            )


# --- a publish, seen by calls in flight and by the next one -----------------------------------------------------------


async def publishing(
    report: Report, llm: WatchedVllm, published: RunFactories, publishes: int, *, beside: str = ""
) -> None:
    """Publishes with and without a canary and, in between, the same without any.

    Args:
        report: takes the figures.
        llm: the vLLM.
        published: the adapters.
        publishes: of each kind.
        beside: of the names of the figures: what computes meanwhile.
    """
    llm.gaps.clear()
    engine, requests = await engine_over(llm, "lazy", 1), Requests(VOCABULARY)
    parts = PublishParts(engine)
    lost = 0
    stop = asyncio.Event()

    async def converse() -> None:
        nonlocal lost
        while not stop.is_set():
            completion = await requests.ask(engine, POLICY, requests.prompt(PROMPT), NEW)
            lost += len(completion.token_ids) != NEW or completion.spans[-1].stop != NEW

    async def first_token(kind: str) -> float:
        begun = time.perf_counter()
        weights = None if kind == NONE else published.publish(POLICY, probed=kind == PROBED)
        updating = None if weights is None else asyncio.ensure_future(engine.serve([weights]))
        while weights is not None and engine.versions.of_policy(POLICY).version != weights.version:
            await asyncio.sleep(0.0005)
        completion = await requests.ask(engine, POLICY, requests.prompt(PROMPT), 1)
        taken = time.perf_counter() - begun
        if updating is not None:
            await updating
        assert weights is None or completion.spans[-1].version == weights.version
        await asyncio.sleep(max(0.0, WINDOW_S - taken))
        windows[kind].append((begun, begun + WINDOW_S))
        milliseconds[kind].append(1e3 * taken)
        return 1e3 * taken

    kinds = (PROBED, NONE, UNPROBED, NONE)
    windows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    milliseconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    running = [asyncio.create_task(converse()) for _ in range(BEHIND)]
    await asyncio.sleep(1.0)  # until all are in flight
    pauses = llm.pauses
    for turn in range(2 * publishes):
        await first_token(kinds[2 * turn % 4])
        await first_token(NONE)
        await asyncio.sleep(WINDOW_S)
    stop.set()
    await asyncio.gather(*running)
    idle = [await first_token(PROBED) for _ in range(publishes // 4)]
    await engine.close()
    gaps = {kind: [gap for gaps in llm.gaps_within(sorted(windows[kind])) for gap in gaps] for kind in set(kinds)}
    until, step = llm.gaps[-1][1], at_percent(gaps[NONE], 50)
    found = parts.figures(until=until) | {
        "lora_gap_p99_ms": at_percent(gaps[PROBED], 99) - at_percent(gaps[NONE], 99),
        "lora_publish_ms": statistics.median(milliseconds[PROBED][:publishes]),
        "lora_step_ms": step,
        "first_token_ms": statistics.median(milliseconds[NONE][:publishes]),
    }
    report.figures.update({f"{name}{beside}": value for name, value in found.items()})
    for name, count in (("lora_pause_calls", llm.pauses - pauses), ("requests_lost", lost)):
        report.figures[name] = (report.figures[name] or 0) + count
    _print(gaps, {**milliseconds, "nothing in flight": idle}, publishes)
    parts.print(llm, until=until, step=step)


def _print(gaps: Mapping[str, Sequence[float]], milliseconds: Mapping[str, Sequence[float]], publishes: int) -> None:
    """Print gaps and times to the first token by kind of publish."""
    for kind in (PROBED, UNPROBED, NONE):
        shown = "  ".join(f"p{percent} {at_percent(gaps[kind], percent):.1f}" for percent in (50, 90, 99, 99.9))
        print(f"gaps, {kind:24s} {shown} ms over {len(gaps[kind])} gaps of {BEHIND} calls in flight")
    for kind in (PROBED, UNPROBED, NONE):
        print(f"to the first token, {kind:24s} {spread(milliseconds[kind][:publishes])} ms, {BEHIND} calls in flight")
    print(f"to the first token, nothing in flight    {spread(milliseconds['nothing in flight'])} ms", flush=True)


# --- long conversations -----------------------------------------------------------------------------------------------


class Conversation:
    """A conversation of `TURNS` turns; its words are the same in every arm."""

    def __init__(self, engine: VllmEngine, number: int, requests: Requests) -> None:
        self.turns = 0
        self._random = np.random.default_rng(number)
        opening = np.random.default_rng(1 << 20).integers(0, VOCABULARY, SHARED)
        self._context = np.concatenate([opening, self._random.integers(0, VOCABULARY, TOOL)]).astype(np.int32)
        self._session = engine.open(f"conversation {number}", POLICY)
        self._requests = requests

    async def turn(self) -> int:
        """One turn; how many tokens vLLM had to compute before the first new one."""
        completion = await self._session.generate(self._requests.call(self._context, SAMPLED))
        said = self._random.integers(0, VOCABULARY, TOOL).astype(np.int32)
        self._context = np.concatenate([self._context, completion.token_ids, said])
        self.turns += 1
        if self.turns == TURNS:
            self._session.close()
        return completion.prompt_tokens - completion.cached_tokens


async def refreshing(report: Report, llm: WatchedVllm, published: RunFactories, *, quick: bool) -> None:
    """Prefill of long conversations by refresh."""
    arms: dict[str, tuple[Refresh, int, str]] = {
        "no updates": ("lazy", 4, "none"),
        "lazy, max_staleness 4": ("lazy", 4, "update"),
        "turn": ("turn", 1, "update"),
    }
    ticks = 24 if quick else 80
    if not quick:
        arms |= {
            "lazy, max_staleness 2": ("lazy", 2, "update"),
            "lazy, max_staleness 1": ("lazy", 1, "update"),
            "cache cleared at each update": ("lazy", 4, "clear"),
        }
    per_turn = {}
    for name, (refresh, max_staleness, event) in arms.items():
        per_turn[name] = await conversations(llm, published, refresh, max_staleness, event=event, ticks=ticks)
        ratio = per_turn[name] / per_turn["no updates"]
        print(f"prefill per turn, {name:28s} {per_turn[name]:6.1f} tokens, {ratio:.3f} of no updates", flush=True)
    report.figures["lazy_prefill_ratio"] = per_turn["lazy, max_staleness 4"] / per_turn["no updates"]
    report.figures["turn_prefill_ratio"] = per_turn["turn"] / per_turn["no updates"]


async def conversations(
    llm: WatchedVllm, published: RunFactories, refresh: Refresh, max_staleness: int, *, event: str, ticks: int
) -> float:
    """Prefill tokens per turn with `CONVERSATIONS` at a time, begun one after the other; every tick each has a turn."""
    assert await llm.reset_prefix_cache(), "vLLM still holds keys and values of someone"
    engine, requests = await engine_over(llm, refresh, max_staleness), Requests(VOCABULARY)
    numbers: Iterator[int] = iter(range(1 << 20))
    await engine.serve([published.publish(POLICY)])
    places: list[Conversation | None] = [None] * CONVERSATIONS
    prefilled = turns = 0
    for tick in range(ticks):
        if tick and tick % UPDATE_EVERY == 0:
            if event == "update":
                await engine.serve([published.publish(POLICY)])
            elif event == "clear":
                assert await llm.reset_prefix_cache()
        for place, conversation in enumerate(places):
            may_begin = conversation is None and tick >= place * TURNS // CONVERSATIONS
            if may_begin or (conversation is not None and conversation.turns == TURNS):
                places[place] = Conversation(engine, next(numbers), requests)
        talking = [conversation for conversation in places if conversation is not None]
        prefilled += sum(await asyncio.gather(*(conversation.turn() for conversation in talking)))
        turns += len(talking)
    with contextlib.suppress(asyncio.CancelledError):
        await engine.close()
    return prefilled / turns
