"""Tokens per second of the embedded engine and of vLLM, on small models on a CPU.

    python -m benchmarks.vllm_engine [--quick]

`over_vllm_b1`, `over_vllm_b8`, `over_vllm_b32`: tokens per second of the embedded engine over vLLM's called bare, at 1,
8 and 32 concurrent requests on the calculator's model; the lower of no adapter and two adapters mixed in a batch. A
model of 5 million parameters is printed beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.core.ports import Engine, GenerateRequest, SamplingParams, generate_when_room
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.vllm import process as vllm_process
from benchmarks.embedded_engine import random_adapter, random_model
from benchmarks.report import Report

if TYPE_CHECKING:
    from agentrl.core.records import Int32Array
    from agentrl.core.tokens import Completion, Tokens

MODEL = Path(__file__).resolve().parents[1] / "environments" / "calculator" / "model"
POLICIES = ("one", "two")
FIVE_MILLION = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "vocab_size": 512,
}
"""Sizes of a Qwen3 of 5 million parameters."""
START = {name: PolicyVersion(name, 0, 0) for name in POLICIES}
PROMPT, NEW, CONTEXT, SLOTS, PLACES, RANK = 57, 48, 192, 64, 4, 8
ROUNDS = {1: 4, 8: 2, 32: 1}
"""Rounds of so many concurrent requests that make up one measurement."""

Ask = Callable[[int], Awaitable[None]]
"""One request, by its number."""


class BareVllm:
    """vLLM as a person calls it who wants tokens and log-probabilities at the end, and nothing else."""

    def __init__(self, model: Path, vocabulary: int, *, places: int) -> None:
        from agentrl.engines.vllm.startup import VllmSettings, start_vllm

        settings = VllmSettings(
            slots=SLOTS,
            max_context=CONTEXT,
            refresh="lazy",
            keep_kv=True,
            adapter_slots=places,
            max_rank=RANK,
            max_staleness={},
        )
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
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

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


class Requests:
    """Calls with prompts and names that nobody has used before."""

    def __init__(self, vocabulary: int, *, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._sent = 0

    def prompt(self, length: int) -> Int32Array:
        """Random tokens."""
        return self._random.integers(0, self._vocabulary, length).astype(np.int32)

    def call(self, prompt: Int32Array, new: int) -> GenerateRequest:
        """A call for exactly `new` tokens."""
        self._sent += 1
        sampling = SamplingParams(max_tokens=new)
        return GenerateRequest(request_id=f"r{self._sent}", token_ids=prompt, sampling=sampling, seed=self._sent)

    async def ask(self, engine: Engine, policy: str, prompt: Int32Array, new: int) -> Completion:
        """One call in a session of its own."""
        session = engine.open(f"s{self._sent}", policy)
        try:
            return await generate_when_room(session, self.call(prompt, new), _listen)
        finally:
            session.close()


def _listen(request_id: str, tokens: Tokens) -> None:
    """Partials, as a run takes them."""


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
        adapters = [_adapter(Path(scratch) / f"a{number}", number) for number in range(len(POLICIES))]
        plain, adapted = BareVllm(MODEL, 440, places=0), BareVllm(MODEL, 440, places=PLACES)
        embedded, mixed = (
            EmbeddedEngine.load(
                str(MODEL), versions=START, slots=SLOTS, max_context=CONTEXT, max_rank=RANK, device="cpu"
            )
            for _ in range(2)
        )
        try:
            for policy, (directory, digest) in zip(POLICIES, adapters, strict=True):
                version = PolicyVersion(policy, 0, 1)
                await mixed.serve([WeightsRef(version=version, path=str(directory), kind="adapter", sha256=digest)])
            await adapted.load([directory for directory, _ in adapters])
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
        model = Path(scratch) / "model"
        random_model(model, **FIVE_MILLION)
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


def _adapter(directory: Path, seed: int) -> tuple[Path, str]:
    """Write an adapter of the calculator's model; return it, and its digest."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return directory, random_adapter(model, directory, seed, RANK)


def spread(values: Sequence[float]) -> str:
    """`median [first quartile, third quartile]`."""
    if len(values) < 2:
        return ", ".join(f"{value:.3f}" for value in values)
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats, no larger model")
    quick = parser.parse_args().quick
    repeats = 2 if quick else 15
    report = Report("vllm_engine", quick=quick, repeats=repeats, compared_with="vLLM's AsyncLLM, called bare, in turns")
    vllm_process.prepare_vllm_process()
    asyncio.run(speed(report, repeats=repeats))
    if not quick:
        asyncio.run(larger_model(7))
    report.print()
    os._exit(0)  # vLLM's threads would be waited for


if __name__ == "__main__":
    main()
