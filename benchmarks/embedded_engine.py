"""The embedded engine on one thread, against a bare DynamicCache loop, against one request, and with mixed adapters.

Figures, medians over interleaved repeats, in CPU seconds of this process (wall seconds are shown beside):
  over_bare_loop_b32   tokens per second of the engine over those of a bare loop with the same sampling, 32 prompts
  b16_over_b1          tokens per second at 16 concurrent requests over those of one request
  mixed_adapter_cost   cost per token of two adapters mixed in one batch over that of no adapter
  decode_over_bare_b8, decode_over_bare_b32, decode_over_bare_b64   seconds of a decode call with that many rows, which
                       are of different lengths, over those of the bare loop with rows of the longest

    python -m benchmarks.embedded_engine [--quick] [--model DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.core.files import sha256_of
from agentrl.core.ports import Engine, GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.counter_random import uniform
from agentrl.engines.embedded.engine import EmbeddedEngine

PROMPT, NEW, FEW = 57, 48, 8
ROWS = (8, 32, 64)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHIPPED = Path(__file__).parent.parent / "environments" / "calculator" / "model"


def random_model(directory: Path, **sizes: int) -> None:
    """Write a Qwen3 with random weights, of about the shipped model's size but for some `sizes`."""
    torch.manual_seed(0)
    shipped = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "vocab_size": 640,
    }
    config = Qwen3Config(**shipped | sizes, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def random_adapter(model: PreTrainedModel, directory: Path, seed: int, rank: int = 8) -> str:
    """Write a LoRA adapter on all linear layers in PEFT's format; returns its digest."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in TARGETS:
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = 0.02 * torch.randn(rank, module.in_features, generator=generator)
            tensors[f"{key}.lora_B.weight"] = 0.02 * torch.randn(module.out_features, rank, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return sha256_of(directory / "adapter_model.safetensors", directory / "adapter_config.json")


def bare_loop(model: PreTrainedModel, prompts: torch.Tensor, seed: int, new: int = NEW) -> None:
    """What a person writes who needs tokens and their logprobs: one batch, DynamicCache, inverse CDF."""
    seeds = np.arange(len(prompts), dtype=np.uint64) + np.uint64(seed)
    cache = DynamicCache(config=model.config)
    ids = prompts
    tokens, logprobs = [], []
    with torch.inference_mode():
        for step in range(new):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            scores = torch.log_softmax(logits.float(), dim=-1)
            cumulative = scores.exp().cumsum(-1, dtype=torch.float64)
            drawn = torch.from_numpy(uniform(seeds, np.full(len(prompts), step)))[:, None]
            ids = torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True)
            tokens.append(ids)
            logprobs.append(scores.gather(1, ids))
    torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist()


class EngineLoad:
    """Requests to one engine, with prompts that no one has sent before."""

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        self._engine = engine
        self._random = np.random.default_rng(0)
        self._vocabulary = vocabulary
        self._sent = 0

    async def batch(self, policies: list[str], new: int = NEW, shortest: int = PROMPT) -> None:
        """One request per entry of `policies`, all at once, each of `new` tokens; prompts have `shortest` to `PROMPT`
        tokens."""
        lengths = np.linspace(shortest, PROMPT, len(policies)).astype(int).tolist()
        await asyncio.gather(
            *(self._one(policy, new, length) for policy, length in zip(policies, lengths, strict=True))
        )

    async def _one(self, policy: str, new: int, length: int) -> None:
        self._sent += 1
        session = self._engine.open(f"s{self._sent}", policy)
        request = GenerateRequest(
            request_id=f"r{self._sent}",
            token_ids=self._random.integers(0, self._vocabulary, length).astype(np.int32),
            sampling=SamplingParams(max_tokens=new),
            seed=self._sent,
        )
        completion = await session.generate(request)
        assert len(completion.token_ids) == new
        session.close()


async def measure(model_path: Path, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) seconds of each repeat of each case."""
    versions = {name: PolicyVersion(name, 0, 0) for name in ("base", "one", "two")}
    engine = EmbeddedEngine.load(
        str(model_path), versions=versions, slots=max(ROWS), max_context=PROMPT + NEW + 1, device="cpu"
    )
    adapted = EmbeddedEngine.load(
        str(model_path), versions=versions, slots=32, max_context=PROMPT + NEW + 1, device="cpu"
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    vocabulary = model.config.vocab_size
    with tempfile.TemporaryDirectory() as scratch:
        for seed, name in enumerate(("one", "two")):
            directory = Path(scratch) / name
            digest = random_adapter(model, directory, seed)
            version = PolicyVersion(name, 0, 1)
            await adapted.serve([WeightsRef(version=version, path=str(directory), kind="adapter", sha256=digest)])
    load, adapted_load = EngineLoad(engine, vocabulary), EngineLoad(adapted, vocabulary)
    random = np.random.default_rng(1)

    async def bare(rows: int = 32, new: int = NEW) -> None:
        prompts = torch.from_numpy(random.integers(0, vocabulary, (rows, PROMPT)))
        bare_loop(model, prompts, int(random.integers(1 << 30)), new)

    async def one_by_one() -> None:
        for _ in range(4):
            await load.batch(["base"])

    cases = {
        "bare_b32": bare,
        "engine_b32": lambda: load.batch(["base"] * 32),
        "engine_b16": lambda: load.batch(["base"] * 16),
        "engine_b1_x4": one_by_one,
        "mixed_b32": lambda: adapted_load.batch(["one", "two"] * 16),
    }
    for rows in ROWS:
        for new in (FEW, NEW):
            cases[f"bare_b{rows}_{new}"] = partial(bare, rows, new)
            cases[f"ragged_b{rows}_{new}"] = partial(load.batch, ["base"] * rows, new, PROMPT // 2)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, case in cases.items():
            cpu, wall = time.process_time(), time.perf_counter()
            await case()
            if repeat:  # the first is a warm-up
                seconds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    await engine.close()
    await adapted.close()
    return seconds


def quartiles(values: list[float]) -> str:
    """`median [first quartile, third quartile]`."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def report(seconds: dict[str, list[tuple[float, float]]], write: Callable[[str], object]) -> dict[str, float]:
    """Show rates and ratios, return the figures."""
    tokens = {"bare_b32": 32, "engine_b32": 32, "engine_b16": 16, "engine_b1_x4": 4, "mixed_b32": 32}
    for name, pairs in ((name, seconds[name]) for name in tokens):
        rates = [f"{tokens[name] * NEW / statistics.median(column):8.0f}" for column in zip(*pairs, strict=True)]
        write(f"{name:14s} {rates[0]} tokens per CPU second, {rates[1]} per wall second\n")
    figures = {}
    ratios = {
        "over_bare_loop_b32": ("bare_b32", "engine_b32"),
        "b16_over_b1": ("engine_b1_x4", "engine_b16"),
        "mixed_adapter_cost": ("mixed_b32", "engine_b32"),
    }
    for figure, (upper, lower) in ratios.items():
        scale = tokens[lower] / tokens[upper]
        for at, clock in enumerate(("CPU", "wall")):
            values = [u[at] / low[at] * scale for u, low in zip(seconds[upper], seconds[lower], strict=True)]
            write(f"{figure:20s} {clock:4s} {quartiles(values)}\n")
            if at == 0:
                figures[figure] = round(statistics.median(values), 3)
    for rows in ROWS:
        for at, clock in enumerate(("CPU", "wall")):
            # prefill is the same in both, so the difference is that of `NEW - FEW` decode calls
            ours, bare = (
                statistics.median(pair[at] for pair in seconds[f"{who}_b{rows}_{NEW}"])
                - statistics.median(pair[at] for pair in seconds[f"{who}_b{rows}_{FEW}"])
                for who in ("ragged", "bare")
            )
            calls = (NEW - FEW) / 1000
            write(f"decode of {rows:2d} rows {clock:4s} {ours / calls:.2f} ms, bare {bare / calls:.2f} ms\n")
            if at == 0:
                figures[f"decode_over_bare_b{rows}"] = round(ours / bare, 3)
    return figures


def main() -> None:
    """Run and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--model", type=Path, help="a local Hugging Face causal LM directory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats = 9 if arguments.quick else 31
    with tempfile.TemporaryDirectory() as scratch:
        path = arguments.model or (SHIPPED if (SHIPPED / "config.json").is_file() else Path(scratch))
        if path == Path(scratch):
            random_model(path)
        seconds = asyncio.run(measure(path, repeats))
    figures = report(seconds, sys.stdout.write)
    result = {
        "benchmark": "embedded_engine",
        "quick": arguments.quick,
        "figures": figures,
        "compared_with": "a bare DynamicCache loop with the same sampling; the engine at one request; no adapter",
        "repeats": repeats,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
