"""A run whose trainer is lost goes on by itself, as `--resume` would, within a budget."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl.app.parts import Adapters
from agentrl.app.training import Run, run_training
from agentrl.config.run import RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.errors import RunDirectoryError, TrainerLostError
from agentrl.core.ports import Engine
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.observe.run_directory import RunDirectory
from agentrl.rollout.plain_format import PlainFormat
from agentrl.testing import RecordingTrainer
from tests.sim.small_run import TASKS, Guess, config_for, guess


class NoWaiting(SystemClock):
    """Remembers how long it was asked to wait, if that was a second or more (episodes wait less)."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waits += [seconds] if seconds >= 1 else []
        await asyncio.sleep(0)


@dataclass
class Lives:
    """Adapters that make a scripted engine and a recording trainer in each life."""

    losses: list[int]
    """Of each life, the step at which its trainer is lost; 0: it is lost when it starts."""
    trainers: list[RecordingTrainer] = field(default_factory=list)
    clock: NoWaiting = field(default_factory=NoWaiting)

    def trainer(self, config: RunConfig, directory: Path) -> RecordingTrainer:
        step = self.losses[len(self.trainers)] if len(self.trainers) < len(self.losses) else -1
        lost = TrainerLostError("trainer rank 0 died")
        trainer = Fragile(["guesser"], failures={("guesser", step): lost}, dies_at_once=step == 0)
        self.trainers.append(trainer)
        return trainer

    async def engine(
        self, config: RunConfig, versions: Mapping[str, PolicyVersion], tell: Callable[[str], None]
    ) -> Engine:
        return ScriptedEngine(guess, versions=versions)

    def run(
        self, path: Path, *, resume: bool = False, checkpoint: int = 2, attempts: int = 5, held_out: int = 0
    ) -> Run:
        config = config_for(
            steps=6,
            name="run",
            directory=str(path),
            checkpoint={"every": checkpoint, "versions": 0},
            infrastructure_attempts=attempts,
            evaluation={"tasks": held_out, "every": 0},
        )
        adapters = Adapters(
            engine=self.engine, trainer=self.trainer, chat_format=lambda config: PlainFormat(), clock=self.clock
        )
        running = run_training(
            config, Guess, tasks=TASKS, held_out=TASKS[:held_out], quiet=True, adapters=adapters, resume=resume
        )
        return asyncio.run(running)


class Fragile(RecordingTrainer):
    """Can be lost as it starts; and publishes directories, which links can point at."""

    def __init__(self, policies: list[str], *, failures: dict[tuple[str, int], TrainerLostError], dies_at_once: bool):
        super().__init__(policies, failures=failures)
        self._dies_at_once = dies_at_once

    async def start(self, resume_from: str | None = None) -> None:
        if self._dies_at_once:
            raise TrainerLostError("Ray did not start")
        await super().start(resume_from)


def surviving_steps(path: Path) -> list[tuple[int, int, set[str]]]:
    """(lineage, step, episodes) of the steps that led to the last checkpoint, by plain SQL."""
    manifest = json.loads(
        max((path / "run/checkpoints").glob("step_*"), key=_order).joinpath("manifest.json").read_text()
    )
    lineage, step = manifest["versions"]["guesser"]
    connection = sqlite3.connect(path / "run/journal/control.db")
    found = []
    while step:
        row = connection.execute(
            "SELECT parent_lineage, parent_step FROM versions WHERE lineage = ? AND step = ?", (lineage, step)
        ).fetchone()
        query = "SELECT DISTINCT episode FROM step_units WHERE lineage = ? AND step = ?"
        episodes = {episode for (episode,) in connection.execute(query, (lineage, step))}
        if episodes:
            found.append((lineage, step, episodes))
        lineage, step = row
    connection.close()
    return found[::-1]


def _order(path: Path) -> tuple[int, int]:
    step, lineage = path.name.removeprefix("step_").split("-")
    return int(lineage), int(step)


def test_a_lost_trainer_costs_the_steps_since_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    lives = Lives([4, 6])
    run = lives.run(tmp_path)
    assert not run.interrupted
    assert [[batch.step_id for batch in trainer.batches] for trainer in lives.trainers] == [
        [1, 2, 3],
        [3, 4, 5],
        [5, 6],
    ]
    assert all(trainer.closed for trainer in lives.trainers)
    assert lives.clock.waits == [1.0, 1.0]
    steps = surviving_steps(tmp_path)
    assert [(lineage, step) for lineage, step, _ in steps] == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    assert max(Counter(episode for _, _, episodes in steps for episode in episodes).values()) == 1


def test_without_a_checkpoint_it_starts_again_from_the_base_model(tmp_path: Path) -> None:
    lives = Lives([3])
    lives.run(tmp_path, checkpoint=0)
    assert [len(trainer.batches) for trainer in lives.trainers] == [2, 6]
    units = Counter(unit.episode_id for batch in lives.trainers[1].batches for unit in batch.units)
    assert {unit.episode_id for batch in lives.trainers[0].batches for unit in batch.units} <= set(units)
    assert max(units.values()) == 1


def test_a_trainer_lost_again_and_again_ends_the_run(tmp_path: Path) -> None:
    lives = Lives([0, 0, 0, 0])
    with pytest.raises(TrainerLostError, match="Ray did not start"):
        lives.run(tmp_path, attempts=3)
    assert lives.clock.waits == [1.0, 2.0, 4.0]
    later = Lives([])
    assert later.run(tmp_path, resume=True).summary["steps"] == 6


def test_the_summary_is_of_the_whole_run_and_counts_steps_taken_again_once(tmp_path: Path) -> None:
    with pytest.raises(TrainerLostError):
        Lives([4, 0, 0]).run(tmp_path, attempts=2, held_out=3)
    resumed = Lives([]).run(tmp_path, resume=True, held_out=3)
    assert [values["step"] for values in resumed.metrics] == [3, 4, 5, 6], "the life of this process"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], len(summary["rewards"])) == (6, 6)
    assert [entry["step"] for entry in summary["evaluations"]] == [0, 6]
    before, after = summary["evaluations"]
    assert (summary["reward_start"], summary["reward_end"]) == (before["evaluation/reward"], after["evaluation/reward"])
    assert summary["rl_seconds"] > sum(values["step/seconds"] for values in resumed.metrics)


def test_a_run_killed_before_its_journal_was_made_can_be_resumed_or_made_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".config.json").write_text('{"na')
    RunDirectory.create(tmp_path / "a", "{}")
    RunDirectory.reopen(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match="exists"):
        RunDirectory.create(tmp_path / "a", "{}")
    assert Lives([]).run(tmp_path / "b").summary["steps"] == 6
