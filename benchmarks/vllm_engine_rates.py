"""The part of `benchmarks.vllm_engine` about speed: the embedded engine beside vLLM, and what our client adds."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from agentrl.core.ports import Engine
from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.vllm.startup import start_vllm
from benchmarks.processes import ProcessTree
from benchmarks.report import Report
from benchmarks.vllm_parts import RANK, Requests, RunFactories, random_qwen3, settings_for, spread

MODEL = Path(__file__).resolve().parents[1] / "environments" / "calculator" / "model"
POLICIES = ("one", "two")
START = {name: PolicyVersion(name, 0, 0) for name in POLICIES}
PROMPT, NEW, CONTEXT, SLOTS, PLACES = 57, 48, 192, 64, 4
ROUNDS = {1: 4, 8: 2, 32: 1}
"""Rounds of so many concurrent requests that make up one measurement."""

Ask = Callable[[int], Awaitable[None]]
"""One request, by its number."""


class BareVllm:
    """vLLM as a person calls it who wants tokens and log-probabilities at the end, and nothing else."""

    def __init__(self, model: Path, vocabulary: int, *, places: int) -> None:
        settings = settings_for(slots=SLOTS, max_context=CONTEXT, refresh="lazy", adapter_slots=places)
        self.llm = start_vllm(str(model), settings)
        self._requests = Requests(vocabulary, seed=1)
        self._loras: Sequence[Any] = ()
        self._sent = 0

    async def load(self, directories: Sequence[Path]) -> None:
        """Serve adapters."""
        from vllm.lora.request import LoRARequest

        self._loras = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(directories, start=1)]
        for lora in self._loras:
            await self.llm.add_lora(lora)

    async def ask(self, number: int, *, adapted: bool = False) -> None:
        """One request."""
        self._sent += 1
        parameters = SamplingParams(
            max_tokens=NEW,
            seed=self._sent,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=self._requests.prompt(PROMPT).tolist())
        lora = self._loras[number % len(self._loras)] if adapted else None
        async for output in self.llm.generate(prompt, parameters, f"bare {self._sent}", lora_request=lora):
            assert len(output.outputs[0].token_ids) == NEW


def asking(engine: Engine, vocabulary: int) -> Ask:
    """Requests to one of our engines, its policies in turn."""
    requests = Requests(vocabulary)

    async def ask(number: int) -> None:
        completion = await requests.ask(engine, POLICIES[number % len(POLICIES)], requests.prompt(PROMPT), NEW)
        assert len(completion.token_ids) == NEW

    return ask


async def rounds(ask: Ask, concurrent: int, count: int) -> None:
    """`count` rounds of `concurrent` requests at once."""
    for _ in range(count):
        await asyncio.gather(*(ask(number) for number in range(concurrent)))


async def by_turns(contestants: Mapping[str, Ask], concurrent: int, repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each contestant, in interleaved repeats after a warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    count = ROUNDS[concurrent]
    for repeat in range(repeats + 1):
        for name, ask in contestants.items():
            begun = time.perf_counter()
            await rounds(ask, concurrent, count)
            if repeat:
                rates[name].append(concurrent * count * NEW / (time.perf_counter() - begun))
    return rates


def compare(rates: Mapping[str, Sequence[float]], ours: str, theirs: str, what: str) -> float:
    """Median over repeats of one rate over the other."""
    ratios = [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
    mine, other = (statistics.median(rates[name]) for name in (ours, theirs))
    print(f"{what:38s} {mine:8.0f} tokens/s, vLLM {other:8.0f}; ratio {spread(ratios)}", flush=True)
    return statistics.median(ratios)


async def speed(report: Report, *, repeats: int) -> None:
    """The embedded engine on one thread beside vLLM, whose worker has one too, without adapters and with two mixed."""
    with tempfile.TemporaryDirectory() as scratch:
        published = RunFactories(MODEL, Path(scratch), len(POLICIES))
        plain, adapted = BareVllm(MODEL, 440, places=0), BareVllm(MODEL, 440, places=PLACES)
        embedded, mixed = (
            EmbeddedEngine.load(
                str(MODEL), versions=START, slots=SLOTS, max_context=CONTEXT, max_rank=RANK, device="cpu"
            )
            for _ in range(2)
        )
        try:
            for policy in POLICIES:
                await mixed.serve([published.publish(policy)])
            await adapted.load([Path(scratch) / "a0", Path(scratch) / "a1"])
            contestants: dict[str, Ask] = {
                "embedded": asking(embedded, 440),
                "vLLM": plain.ask,
                "embedded, adapters": asking(mixed, 440),
                "vLLM, adapters": lambda number: adapted.ask(number, adapted=True),
            }
            for concurrent in ROUNDS:
                rates = await by_turns(contestants, concurrent, repeats)
                without = compare(rates, "embedded", "vLLM", f"calculator's model, {concurrent} concurrent")
                both = compare(rates, "embedded, adapters", "vLLM, adapters", f"  two adapters mixed, {concurrent}")
                report.figures[f"over_vllm_b{concurrent}"] = min(without, both)
        finally:
            plain.llm.shutdown()
            adapted.llm.shutdown()
        await embedded.close()
        await mixed.close()


async def larger_model(repeats: int) -> None:
    """The same with 5 million parameters, shown only."""
    with tempfile.TemporaryDirectory() as scratch:
        model = random_qwen3(Path(scratch) / "model", hidden=256, layers=6)
        plain = BareVllm(model, 512, places=0)
        embedded = EmbeddedEngine.load(
            str(model), versions=START, slots=SLOTS, max_context=CONTEXT, max_rank=RANK, device="cpu"
        )
        try:
            for concurrent in ROUNDS:
                rates = await by_turns({"ours": asking(embedded, 512), "vLLM": plain.ask}, concurrent, repeats)
                compare(rates, "ours", "vLLM", f"5 M parameters, {concurrent} concurrent")
        finally:
            plain.llm.shutdown()
        await embedded.close()


async def client(report: Report, *, repeats: int, concurrent: int = 64, count: int = 3) -> None:
    """CPU seconds per token: an engine as a run has it, and a bare client in the process that started vLLM."""
    bare = BareVllm(MODEL, 440, places=PLACES)
    arguments = {
        "model_path": str(MODEL),
        "slots": SLOTS,
        "max_context": CONTEXT,
        "refresh": "lazy",
        "adapter_slots": PLACES,
        "max_rank": RANK,
    }
    program = ChildProgram("agentrl.engines.vllm.engine:VllmEngine.load", arguments, "agentrl.engines.vllm.process")
    engine = await ProcessEngine(program, START).ready()
    host = engine.supervisor.process_id
    assert host is not None
    spent: list[Spent] = []
    try:
        asks: dict[str, Ask] = {"ours": asking(engine, 440), "bare": bare.ask}
        everything, of_ours = ProcessTree(), ProcessTree(host)
        for _ in range(repeats + 1):
            of: dict[str, tuple[float, float, float]] = {}
            for name, ask in asks.items():
                before = (time.process_time(), cpu_seconds(host), of_ours.cpu_seconds(), everything.cpu_seconds())
                await rounds(ask, concurrent, count)
                after = (time.process_time(), cpu_seconds(host), of_ours.cpu_seconds(), everything.cpu_seconds())
                here, hosted, ours, all_of_it = (b - a for a, b in zip(before, after, strict=True))
                vllm = ours - hosted if name == "ours" else all_of_it - ours - here
                of[name] = (here, hosted if name == "ours" else 0.0, vllm)
            spent.append(Spent(of["ours"], of["bare"]))
    finally:
        await engine.close()
        bare.llm.shutdown()
    del spent[0]  # a warm-up
    show(spent, concurrent * count * NEW)
    report.figures["client_overhead"] = statistics.median(each.overhead for each in spent)


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of one pair: in the benchmark's process, in the process of ours that talks to vLLM, in vLLM's own."""

    ours: tuple[float, float, float]
    bare: tuple[float, float, float]

    @property
    def overhead(self) -> float:
        """What our two processes take beyond the bare client's one, over all that a bare client's tokens cost."""
        return (sum(self.ours[:2]) - self.bare[0]) / sum(self.bare)


def show(spent: Sequence[Spent], tokens: int) -> None:
    """Where the CPU seconds went."""
    columns: dict[str, list[float]] = {
        "ours: client": [each.ours[0] for each in spent],
        "ours: beside vLLM": [each.ours[1] for each in spent],
        "ours: vLLM's processes": [each.ours[2] for each in spent],
        "bare: client": [each.bare[0] for each in spent],
        "bare: vLLM's processes": [each.bare[2] for each in spent],
    }
    for name, values in columns.items():
        print(f"CPU microseconds per token, {name:24s} {spread([1e6 * each / tokens for each in values])}")
    print(
        f"our client over a bare one                          {spread([each.overhead for each in spent])}", flush=True
    )


def cpu_seconds(pid: int) -> float:
    """Of one process, its children left out."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
