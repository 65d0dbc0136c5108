"""A sample run, written in seconds without a model, on which every command can be tried.

It is the real loop over a scripted engine and a trainer without gradients: `SampleRunTrainer` invents the losses,
everything else is real. It contains three policies, children, dropped, parked and repeated episodes, weight updates
inside turns, a lost trainer and the rollback that follows, an evaluation, step records, and forks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.app import forks, replays
from agentrl.app.forks import fork
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import Run, run_training
from agentrl.config.run import RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.errors import TrainerLostError
from agentrl.core.records import PolicyVersion, StepReport, TrainBatch
from agentrl.core.tokens import TrainingSample
from agentrl.credit.samples import unit_samples
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.inspection.reader import RunReader
from agentrl.journal.reader import TurnLogReader
from agentrl.journal.rows import assemble_trajectories
from agentrl.learn.step_columns import TokenColumns
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from tests.support.recording_trainer import RecordingTrainer
from tests.support.sample_environment import Propose, held_out_tasks, scripted_reply_tokens

if TYPE_CHECKING:
    import pytest

    from agentrl.config.plans import EnginePlan, TrainerPlan
    from agentrl.core.ports import Engine, Trainer
    from agentrl.orchestrator.loop import Orchestrator

NAME = "sample"
STEPS = 8
LOST_AT = ("solver", 5)
"""Policy and step before which the trainer is lost, once."""
PARK_EVERY_S = 0.15
MODEL = "a script"


def write_sample_run(directory: str | Path = "runs", name: str = NAME) -> Run:
    """Write the run into `directory/name`, forks included.

    Raises:
        RunDirectoryError: the directory exists.
    """
    config = sample_run_config(directory, name)
    run = asyncio.run(
        run_training(
            config, Propose, held_out=held_out_tasks(), quiet=True, factories=sample_run_factories(parked=True)
        )
    )
    reader = RunReader(run.path)
    try:
        parent = reader.episodes("purpose = 'train' and turns > 3 and environment ~ Solve", sort="turns", limit=1)[0]
    finally:
        reader.close()
    first = fork(run.path, parent.episode, at=1, n=3, factories=sample_run_factories())[0]
    fork(run.path / "forks", first.episode_id, at=-1, n=1, factories=sample_run_factories())
    return run


def sample_run_config(directory: str | Path, name: str) -> RunConfig:
    """Return the configuration of the sample run."""
    values: dict[str, Any] = {
        "name": name,
        "directory": str(directory),
        "steps": STEPS,
        "environment": {"id": name_of(Propose)},
        "model": {"path": MODEL},
        "policies": {
            "proposer": {"step_size": 4, "max_staleness": 2},
            "solver": {"step_size": 16, "max_staleness": 2},
            "checker": {"kind": "frozen"},
        },
        "engine": {"max_context": 1024, "refresh": "token"},
        "sampling": {"max_tokens": 96, "max_turns": 8},
        "credit": {"group_size": 2},
        "checkpoint": {"every": 2, "versions": 0},
        "evaluation": {"tasks": len(held_out_tasks())},
        "max_in_flight": 48,
    }
    return RunConfig(**values)


def play_with_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands replay and fork the episodes of a sample run."""
    factories = sample_run_factories()
    monkeypatch.setattr(forks, "fork", partial(fork, factories=factories))
    monkeypatch.setattr(replays, "replay", partial(replays.replay, factories=factories))


def sample_run_factories(*, parked: bool = False) -> RunFactories:
    """Make the script's engine, and the sample run's trainer, which is lost once; with `parked`, episodes are
    parked.
    """
    lives: list[SampleRunTrainer] = []

    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], tell: object, log: Path) -> Engine:
        return ScriptedEngine(
            scripted_reply_tokens,
            versions=versions,
            seconds_per_call=0.002,
            seconds_per_token=0.0005,
            seeded_logprobs=True,
            max_context=plan.engine.max_context,
        )

    def trainer(plan: TrainerPlan, directory: Path) -> Trainer:
        lives.append(SampleRunTrainer(plan, directory, loses=not lives))
        return lives[-1]

    return RunFactories(
        engine=engine,
        trainer=trainer,
        chat_format=lambda model: PlainChatFormat(),
        clock=_ShortWaits(),
        assembled=_park_now_and_then if parked else lambda orchestrator: None,
    )


class _ShortWaits(SystemClock):
    """A clock whose waits are short."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.02))


def _park_now_and_then(orchestrator: Orchestrator) -> None:
    """Park an episode in flight now and then, and resume it a moment later, as a scheduler would."""
    loop, dispatcher = asyncio.get_running_loop(), orchestrator.dispatcher

    def park() -> None:
        children = [episode_id for episode_id in dispatcher.in_flight.training() if "~" in episode_id]
        if children:
            dispatcher.worker.park(children[0])
            loop.call_later(PARK_EVERY_S / 3, dispatcher.worker.unpark)
        loop.call_later(PARK_EVERY_S, park)

    loop.call_later(PARK_EVERY_S, park)


class SampleRunTrainer(RecordingTrainer):
    """Writes step records like a trainer's; its logprobs are the recorded ones, shifted further the older they are.

    Args:
        plan: the trainer's part of the run.
        directory: directory of the run.
        loses: whether the trainer is lost before `LOST_AT`.
    """

    def __init__(self, plan: TrainerPlan, directory: Path, *, loses: bool) -> None:
        super().__init__(
            list(plan.policies),
            clock=SystemClock(),
            step_seconds=0.03,
            publish_seconds=0.01,
            versions=directory / "versions",
            failures={LOST_AT: TrainerLostError("the sample's trainer was lost, as planned")} if loses else {},
        )
        self._directory = directory
        self._turns = TurnLogReader(directory / "journal")

    async def close(self) -> None:
        """Close all open files. Idempotent."""
        self._turns.close()
        await super().close()

    def _report(self, policy: str, step_id: int, batches: Sequence[TrainBatch]) -> StepReport:
        units = [unit for batch in batches for unit in batch.units]
        samples: list[TrainingSample] = []
        for unit in units:
            entries = self._turns.read(unit.location.partition, unit.episode_id, unit.attempt)
            samples += unit_samples(unit, assemble_trajectories(entries, policy))
        version = self._versions[policy]._replace(step=step_id - 1)
        columns = TokenColumns.of(samples, version, group_size=1)
        _invent_outputs(columns)
        path = f"steps/{policy}/{version.lineage}.{step_id}.safetensors"
        (self._directory / path).parent.mkdir(parents=True, exist_ok=True)
        (self._directory / path).write_bytes(columns.encode_file())
        logprobs = columns.computed["trainer_logprobs"]
        ratio = np.exp(logprobs - columns.tokens.logprobs)
        pushes = columns.advantages * ratio / batches[0].normalizer
        return StepReport(
            step_id=step_id,
            policy=policy,
            started_from=version,
            loss=float(-pushes.sum()),
            grad_norm=float(np.sqrt((pushes**2).sum())),
            samples=len(samples),
            tokens=len(ratio),
            seconds=sum(map(self.step_seconds, batches)),
            metrics={"entropy": float(-logprobs.mean())},
            input_digest=columns.input_digest,
            columns=path,
        )


def _invent_outputs(columns: TokenColumns) -> None:
    """Fill in what a model would compute: recorded logprobs, shifted further the older they are."""
    at, lag = columns.position, np.maximum(columns.lags, 0)
    logprobs = columns.tokens.logprobs + (0.005 + 0.05 * lag) * np.sin(1.7 * at)
    columns.computed["trainer_logprobs"][:] = np.minimum(logprobs, 0.0)
    columns.computed["entropy"][:] = 0.3 + 0.2 * np.cos(2.3 * at)


if __name__ == "__main__":
    write_sample_run()
