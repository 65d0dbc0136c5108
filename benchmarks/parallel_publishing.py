"""The part `publishing` of `benchmarks.parallel`: how small the changes of published weights are in runs that train."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.app.run_parts import RunFactories, environment_of
from agentrl.app.training import run_training
from agentrl.config.plans import TrainerPlan
from agentrl.config.run import RunConfig
from agentrl.core.errors import EngineError
from agentrl.core.files import DELTA_FILES
from agentrl.core.records import PolicyVersion, StepReport, WeightsRef
from agentrl.core.weight_deltas import DeltaRecord, read_record, write_record
from agentrl.engines.weights.reading import read_weights
from agentrl.inspection.reader import RunReader
from agentrl.learn.trainer import InProcessTrainer, PolicyTrainer
from benchmarks.parts import outcomes

STEPS, QUICK_STEPS = 24, 6
TESTS = (
    "tests/unit/test_weight_deltas.py",
    "tests/contract/test_engine_elsewhere.py::test_a_process_that_holds_the_base_is_sent_the_changes",
)


class Measured(NamedTuple):
    """Means over the versions of the second half of a run's steps, or over all of its first steps."""

    bytes: float
    """Bytes of the changes, over those of all weights."""
    changed: float
    """Share of the numbers that changed."""
    predicted: float
    """Mean of min(1, |update| / spacing)."""
    errors: int
    """Number of versions whose digest differs."""


def figures(quick: bool) -> dict[str, float | None]:
    """Train at each learning rate; quick: fewer steps."""
    with tempfile.TemporaryDirectory() as directory:
        place, steps = Path(directory), QUICK_STEPS if quick else STEPS
        slow, fast = (measure(_config(place / f"{rate:g}", rate, steps)) for rate in (1e-6, 1e-5))
        start = measure(_config(place / "start", 1e-6, QUICK_STEPS), is_spread=False)
        control = _applied_to_another_base(place / f"{1e-6:g}")
    tests = outcomes(*TESTS)
    return {
        "delta_bytes": slow.bytes,
        "delta_bytes_1e_5": fast.bytes,
        "changed_numbers": slow.changed,
        "changed_numbers_1e_5": fast.changed,
        "changed_predicted": slow.predicted,
        "changed_predicted_1e_5": fast.predicted,
        "changed_at_start": start.changed,
        "delta_digest_errors": slow.errors + fast.errors + start.errors + list(tests.values()).count(False),
        "delta_control": float(control),
    }


class _SpreadTrainer(PolicyTrainer):
    """A trainer that starts in the steady state of many steps: its masters lie anywhere between two roundings."""

    is_spread = True

    def start(self, resume_from: Path | None = None) -> tuple[str, ...]:
        lines = super().start(resume_from)
        self.predicted: list[float] = []
        if self.is_spread:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for master in self._masters():
                    master += (torch.rand(master.shape, generator=generator) - 0.5) * _spacing(master)
        return lines

    def optim_step(self, policy: str, step_id: int) -> StepReport:
        before = [master.detach().clone() for master in self._masters()]
        report = super().optim_step(policy, step_id)
        moved = [
            ((master.detach() - old).abs() / _spacing(old)).clamp(max=1).double().sum()
            for old, master in zip(before, self._masters(), strict=True)
        ]
        self.predicted.append(float(sum(moved)) / sum(old.numel() for old in before))
        return report

    def _masters(self) -> list[Tensor]:
        return list(self._learner("solver").model.parameters.values())


def _spacing(tensor: Tensor) -> Tensor:
    """Return the distance of two neighboring bfloat16 numbers at each number."""
    return torch.exp2(torch.floor(torch.log2(tensor.detach().abs().clamp(min=1e-30))) - 7)


def _config(directory: Path, rate: float, steps: int) -> RunConfig:
    return RunConfig(
        name="run",
        directory=str(directory),
        steps=steps,
        environment={"id": "calculator"},
        model={"path": "agentrl.environments:calculator/model", "dtype": "bfloat16"},
        policies={"solver": {"learning_rate": rate, "step_size": 32}},
        credit={"group_size": 8},
        sampling={"max_tokens": 32, "max_turns": 6},
        engine={"slots": 32, "max_context": 192, "publish": "delta"},
        evaluation={"tasks": 0},
        checkpoint={"every": 0, "versions": 0},
    )


def measure(config: RunConfig, *, is_spread: bool = True) -> Measured:
    """Train; a run that is not spread starts from the checkpoint's own numbers."""
    steps, rate = config.steps, config.policies["solver"].learning_rate
    trainers: list[_SpreadTrainer] = []

    def make_trainer(plan: TrainerPlan, run: Path) -> InProcessTrainer:
        trainer = InProcessTrainer(plan, run)
        trainers.append(_SpreadTrainer(plan, run))
        trainers[0].is_spread = is_spread
        trainer._trainer = trainers[0]
        return trainer

    factories = RunFactories(trainer=make_trainer)
    run = asyncio.run(run_training(config, environment_of(config), quiet=True, factories=factories))
    kept = range(steps // 2 + 1 if is_spread else 1, steps + 1)
    versions = [_version(run.path, step) for step in kept]
    sizes = [
        sum((Path(weights.path) / name).stat().st_size for name in DELTA_FILES if (Path(weights.path) / name).exists())
        for weights in versions
    ]
    whole = (run.policies["solver"] / "model.safetensors").stat().st_size
    measured = Measured(
        bytes=statistics.fmean(size / whole for size in sizes),
        changed=statistics.fmean(run.metrics[step - 1]["changed_numbers"] for step in kept),
        predicted=statistics.fmean(trainers[0].predicted[step - 1] for step in kept),
        errors=sum(not _is_readable(weights) for weights in versions),
    )
    print(f"  learning rate {rate:g}{'' if is_spread else ', first steps'}: {measured}", flush=True)
    return measured


def _version(run: Path, step: int) -> WeightsRef:
    reader = RunReader(run)
    try:
        weights = reader.log.published(PolicyVersion("solver", 0, step))
    finally:
        reader.close()
    assert weights is not None
    return weights


def _is_readable(weights: WeightsRef) -> bool:
    """Whether a version, which may be stored as changes, has the digest that was published."""
    try:
        read_weights(weights, max_numbers=1 << 24)
    except EngineError as error:
        print(f"  {error}", flush=True)
        return False
    return True


def _applied_to_another_base(directory: Path) -> bool:
    """Whether the digest tells that the changes of a version were applied to another base than its own."""
    weights = _version(directory / "run", 3)
    record = read_record(Path(weights.path))
    assert record is not None
    write_record(Path(weights.path), DeltaRecord("0.1", record.base_sha256, record.sha256))
    return not _is_readable(weights)
