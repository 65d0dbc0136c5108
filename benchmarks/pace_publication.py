"""What the publication of a merged LoRA costs, with vLLM and SmolLM2; see `pace.py`."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.app.engines import make_engine
from agentrl.config.run import RunConfig
from agentrl.core.files import WEIGHT_FILES, sha256_of
from agentrl.core.ports import Engine, GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.weights.merging import CheckpointMerger
from agentrl.engines.weights.reading import read_adapter
from agentrl.learn.models import PolicyModel
from agentrl.learn.publication import PublishedAdapter, PublishedWeights
from agentrl.learn.trainer import PolicyTrainer
from benchmarks.processes import ProcessTree

MODEL = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"
ROUNDS, QUICK_ROUNDS = 7, 1
CONTEXT = np.arange(10, 42, dtype=np.int32)


class MergedWeights(PublishedWeights):
    """All weights of the base, with the adapter merged into them by PEFT: what is compared with."""

    @torch.no_grad()
    def _gather(self, name: str, tensor: Tensor) -> Tensor:
        module: Any = self._policy.model.get_submodule(name.removesuffix(".weight"))
        if self._policy.adapter not in getattr(module, "lora_A", {}):
            return tensor
        return tensor + module.get_delta_weight(self._policy.adapter)


class Publications:
    """A trainer with a merged LoRA, and an engine that serves its versions."""

    def __init__(self, config: RunConfig, directory: Path, engine: Engine) -> None:
        self._trainer = PolicyTrainer(config.trainer_plan, directory)
        self._trainer.start()
        self._engine = engine
        self._generator = torch.Generator().manual_seed(0)
        self._processes = ProcessTree()

    @property
    def model(self) -> PolicyModel:
        return self._trainer._learner("solver").model

    def change(self) -> None:
        """Change the factors as an optimizer step does."""
        with torch.no_grad():
            for parameter in self.model.parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=self._generator) * 1e-3)

    async def publish(self, *, merged: bool) -> tuple[tuple[float, float], WeightsRef]:
        """Publish the next version; returns the seconds until its first token, and the CPU seconds of all processes."""
        learner = self._trainer._learner("solver")
        learner.step += 1
        self.model.__dict__["publication"] = (MergedWeights if merged else PublishedAdapter)(self.model)
        version = PolicyVersion("solver", 0, learner.step)
        cpu_start, start = self._processes.cpu_seconds(), time.perf_counter()
        weights = await asyncio.to_thread(self._trainer.publish, "solver", version)
        await self._engine.serve([weights])
        session, sampling = self._engine.open(str(version), "solver"), SamplingParams(max_tokens=1)
        request = GenerateRequest(request_id=str(version), token_ids=CONTEXT, sampling=sampling, seed=0)
        completion = await session.generate(request)
        seconds, cpu = time.perf_counter() - start, self._processes.cpu_seconds() - cpu_start
        session.close()
        assert completion.spans[0].version == version
        return (seconds, cpu), weights


def num_bytes(weights: WeightsRef) -> int:
    return sum((Path(weights.path) / name).stat().st_size for name in WEIGHT_FILES[weights.kind])


def difference(merger: CheckpointMerger, adapter: WeightsRef, full: Mapping[str, Tensor]) -> float:
    """Largest difference of the weights into which an adapter is merged from those of a file."""
    read = read_adapter(adapter, max_numbers=1 << 30)
    tensors = merger.merged(read, torch.device("cpu"))
    return max(float((tensor - full[name]).abs().max()) for name, tensor in tensors)


def perturbed(weights: WeightsRef, directory: Path) -> WeightsRef:
    """A version with one number of one factor moved by a thousandth, under its own digest."""
    directory.mkdir()
    tensors_file, config_file = WEIGHT_FILES["adapter"]
    tensors = load_file(Path(weights.path) / tensors_file)
    next(iter(tensors.values()))[0, 0] += 1e-3
    save_file(tensors, directory / tensors_file)
    (directory / config_file).write_bytes((Path(weights.path) / config_file).read_bytes())
    digest = sha256_of(directory / tensors_file, directory / config_file)
    return replace(weights, path=str(directory), sha256=digest)


async def measure(directory: Path, rounds: int) -> dict[str, float | None]:
    config = RunConfig(
        name="run",
        directory=str(directory),
        environment={"id": "calculator"},
        model={"path": str(MODEL), "dtype": "float32"},
        policies={"solver": {"lora": {"rank": 8, "merge": True}}},
        engine={"vllm": {}, "slots": 8, "max_context": 128},
        evaluation={"tasks": 0},
    )
    (run := directory / "run").mkdir()
    seconds_ratios, cpu_ratios, sizes, differences = [], [], [], []
    merger = CheckpointMerger(MODEL, torch.float32)
    engine = await make_engine(config.engine_plan, {"solver": PolicyVersion("solver", 0, 0)}, print)
    try:
        publications = Publications(config, run, engine)
        for number in range(rounds + (rounds > QUICK_ROUNDS)):
            publications.change()
            (whole_seconds, whole_cpu), whole = await publications.publish(merged=True)
            score = await engine.score(whole.version, CONTEXT)
            await publications.publish(merged=False)  # replaces the layers that the other path has loaded
            (seconds, cpu), factors = await publications.publish(merged=False)
            same = await engine.score(factors.version, CONTEXT)
            full = load_file(Path(whole.path) / WEIGHT_FILES["full"][0])
            differences += [difference(merger, factors, full), float(np.abs(score.logprobs - same.logprobs).max())]
            sizes.append(num_bytes(factors) / num_bytes(whole))
            costs = f"{whole_seconds:.2f} s, {whole_cpu:.2f} CPU s; factors {seconds:.2f} s, {cpu:.2f} CPU s"
            print(f"  merged weights {costs}", flush=True)
            if number or rounds == QUICK_ROUNDS:  # the first round also prepares the engine
                seconds_ratios.append(seconds / whole_seconds)
                cpu_ratios.append(cpu / whole_cpu)
        control = difference(merger, perturbed(factors, directory / "perturbed"), full)
    finally:
        await engine.close()
    return {
        "publication_ratio": median(seconds_ratios),
        "publication_cpu_ratio": median(cpu_ratios),
        "publication_bytes": max(sizes),
        "publication_difference": max(differences),
        "publication_control": float(control > 0.0),
    }


def figures(quick: bool) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory(prefix="agentrl-publication-") as directory:
        return asyncio.run(measure(Path(directory), QUICK_ROUNDS if quick else ROUNDS))
