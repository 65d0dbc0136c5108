"""What a publication costs: a merged LoRA with vLLM and SmolLM2, and full weights; see `pace.py`.

Run as a script, it is one tree's side of the comparison of full weights: a round for each line of its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
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
from agentrl.journal.store import SqliteJournal
from agentrl.learn.models import PolicyModel
from agentrl.learn.publication import PublishedAdapter, PublishedWeights
from agentrl.learn.trainer import InProcessTrainer, PolicyTrainer
from agentrl.orchestrator.checkpoints import VersionRetention
from agentrl.orchestrator.versions import ServedVersions
from agentrl.orchestrator.versions import publish as publish_and_record
from benchmarks.processes import ProcessTree
from benchmarks.report import ROOT
from benchmarks.suite import checkout

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
CALCULATOR = REPOSITORY / "environments" / "calculator" / "model"
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


# --- full weights -----------------------------------------------------------------------------------------------------

BEFORE = "637075c8"
"""Commit to compare with: every version was synced before it was served, and read back from its file."""
FULL: Mapping[str, tuple[Path, Mapping[str, Any]]] = {
    "calculator": (CALCULATOR, {"replicas": 0}),
    "smollm2": (MODEL, {"replicas": 0}),
    "smollm2_process": (MODEL, {"replicas": 1}),
    "smollm2_vllm": (MODEL, {"vllm": {}}),
}
"""Model and engine section, by name: embedded in the trainer's process or its own, and vLLM."""
MEASURED = ("seconds", "cpu", "bytes")
FULL_ROUNDS = 12
_MARK = "round: "


async def publish_rounds(name: str, directory: Path) -> None:
    """Publish full weights, once for each line of the input. Prints the seconds from the changed weights to the first
    token under them, and the CPU seconds and bytes written to files in that time, by all processes."""
    model, engine_section = FULL[name]
    config = RunConfig(
        name="run",
        directory=str(directory),
        environment={"id": "calculator"},
        model={"path": str(model), "dtype": "float32"},
        policies={"solver": {"max_staleness": 0}},
        engine={"slots": 8, "max_context": 128, **engine_section},
        evaluation={"tasks": 0},
    )
    processes, generator = ProcessTree(), torch.Generator().manual_seed(0)
    trainer, retention = InProcessTrainer(config.trainer_plan, directory / "run"), VersionRetention(keep=2)
    await trainer.start()
    learner = trainer._trainer._learner("solver")
    store = SqliteJournal(directory / "run" / "journal")
    engine = await make_engine(config.engine_plan, {"solver": PolicyVersion("solver", 0, 0)}, print)
    served = ServedVersions(engine)

    def spent() -> tuple[float, int]:
        return processes.cpu_seconds(), written_bytes(pid for pid, _ in processes._seen)

    for _ in sys.stdin:
        learner.step += 1
        with torch.no_grad():
            for parameter in learner.model.parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 1e-5)
        version, before, start = PolicyVersion("solver", 0, learner.step), spent(), time.perf_counter()
        weights = await publish_and_record(trainer, store, version, None, None)
        await served.make_current(weights)
        session, sampling = engine.open(str(version), "solver"), SamplingParams(max_tokens=1)
        request = GenerateRequest(request_id=str(version), token_ids=CONTEXT, sampling=sampling, seed=0)
        completion = await session.generate(request)
        seconds, after = time.perf_counter() - start, spent()
        session.close()
        assert completion.spans[0].version == version
        await retention.prune(weights)
        costs = (seconds, *(end - begin for begin, end in zip(before, after, strict=True)))
        print(_MARK + json.dumps(dict(zip(MEASURED, costs, strict=True))), flush=True)
    await engine.close()
    await trainer.close()
    await store.close()


def written_bytes(pids: Iterable[int]) -> int:
    """Bytes that processes have written to files of disks."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))
    return total


class Tree:
    """The process of one tree."""

    def __init__(self, tree: Path, name: str, exits: ExitStack) -> None:
        sources = [tree, *sorted(tree.glob("packages/*/src"))]
        self._process = exits.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", __file__, name],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        exits.callback(self._process.stdin.close)  # type: ignore[union-attr]

    def round(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(_MARK):
                measured: dict[str, float] = json.loads(line.removeprefix(_MARK))
                return measured
        raise SystemExit(f"exit code {self._process.wait()}")


def compare(name: str, trees: Sequence[Path], rounds: int) -> list[dict[str, float]]:
    """What each tree but the first needs over what the first one needs, of rounds in turn: the median of the seconds,
    and the sums of the rest, which are counted coarsely."""
    measured: list[list[dict[str, float]]] = [[] for _ in trees]
    with ExitStack() as exits:
        processes = [Tree(tree, name, exits) for tree in trees]
        for process in processes:
            process.round()  # warms up
        for _ in range(rounds):
            for process, costs in zip(processes, measured, strict=True):
                costs.append(process.round())
    for key in MEASURED:
        print(
            f"  {name}: {key} " + ", ".join(f"{fmean(each[key] for each in costs):.4g}" for costs in measured),
            flush=True,
        )
    first, *others = measured
    return [
        {
            "seconds": median(b["seconds"] / a["seconds"] for a, b in zip(first, costs, strict=True)),
            **{key: sum(each[key] for each in costs) / sum(each[key] for each in first) for key in ("cpu", "bytes")},
        }
        for costs in others
    ]


def full_figures(quick: bool) -> dict[str, float | None]:
    """Compare with the earlier commit, and that commit with itself."""
    figures: dict[str, float | None] = {}
    with checkout(BEFORE) as before:
        for name in list(FULL)[: 1 if quick else None]:
            is_small = name == "calculator"  # milliseconds, so it has the control and more rounds
            rounds = FULL_ROUNDS * (4 if is_small else 1) // (4 if quick else 1)
            ratios, *control = compare(name, [before, ROOT, *([before] if is_small else [])], rounds)
            figures |= {f"full_{name}_{key}": ratio for key, ratio in ratios.items()}
            if control:
                figures["full_control"] = control[0]["seconds"]
    return figures


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="agentrl-publication-") as scratch:
        asyncio.run(publish_rounds(sys.argv[1], Path(scratch)))
