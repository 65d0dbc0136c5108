"""Published versions stay while they are among the newest, or pinned."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.records import Lines, PolicyVersion, WeightsRef
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import PruneRule, PruneTotals
from agentrl.orchestrator.checkpoints import CheckpointWriter, JournalRetention, Manifest, VersionRetention
from agentrl.orchestrator.versions import BestRunningMean, PolicyBoard
from tests.support.recording_trainer import RecordingTrainer


def publish(root: Path, step: int, policy: str = "solver") -> WeightsRef:
    path = root / policy / f"0.{step}"
    path.mkdir(parents=True)
    return WeightsRef(version=PolicyVersion(policy, 0, step), path=str(path), kind="full", sha256="")


def test_the_newest_and_the_pinned_versions_stay(tmp_path: Path) -> None:
    async def main() -> None:
        retention = VersionRetention(keep=2)
        pinned = {PolicyVersion("solver", 0, 1)}
        for step in range(6):
            await retention.prune(publish(tmp_path, step), pinned if step < 5 else ())
            await retention.prune(publish(tmp_path, step, "other"))
            left = sorted(path.name for path in (tmp_path / "solver").iterdir())
            assert left[-min(step + 1, 2) :] == [f"0.{kept}" for kept in range(max(step - 1, 0), step + 1)]
            assert ("0.1" in left) == (1 <= step < 5)
        assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["0.4", "0.5"]

    asyncio.run(main())


def test_what_a_resume_from_any_checkpoint_on_disk_needs_stays(tmp_path: Path) -> None:
    """Each part of a manifest names versions of its own, and so does the line of steps up to it."""
    solver = partial(PolicyVersion, "solver")
    parents = {("solver", 1): solver(0, 12)}

    async def checkpoint(writer: CheckpointWriter, at: PolicyVersion, best: int, opponent: int) -> None:
        trainer, versions = RecordingTrainer(["solver"], steps={"solver": at.step}), {"solver": at}
        measured = BestRunningMean(
            newest=(1.0,), measured_versions=({"solver": solver(0, best)},), best=1.0, versions={"solver": solver(0, 0)}
        )
        opponents = {"past": (solver(0, opponent),)}
        await writer.write(trainer, versions, measured=measured, opponents=opponents)

    async def main() -> None:
        writer = CheckpointWriter(tmp_path / "checkpoints", keep=2)
        for at, best, opponent in [(4, 1, 2), (10, 3, 4), (12, 5, 6)]:
            await checkpoint(writer, solver(0, at), best, opponent)
        directories = [publish(tmp_path / "versions", step) for step in range(16)]
        # a later process: it resumed from step 12, and knows the checkpoints from the disk alone
        retention, board = (
            VersionRetention(keep=1, lags={"solver": 2}),
            PolicyBoard({"solver": solver(1, 13)}, ["solver"], Lines(parents)),
        )

        async def kept() -> set[int]:
            await retention.keep_for(writer, board)
            await retention.prune(directories[-1])
            return {int(path.suffix[1:]) for path in Path(directories[0].path).parent.iterdir()}

        assert await kept() == {0, *(3, 4, 8, 9, 10), *(5, 6, 10, 11, 12), 15}
        await checkpoint(writer, solver(1, 13), 6, 6)
        assert await kept() == {0, *(5, 6, 10, 11, 12), 15}, "11 and 12 are on the line to 1.13 too"

    asyncio.run(main())


def test_a_checkpoint_written_while_older_ones_are_pruned_is_pruned_after_them(tmp_path: Path) -> None:
    steps: list[int] = []

    class Checkpoints(CheckpointWriter):
        step = 1

        def sealed(self) -> list[Any]:
            return [Manifest(directory=tmp_path, versions={"solver": PolicyVersion("solver", 0, self.step)})]

    async def main() -> None:
        began, go_on = asyncio.Event(), asyncio.Event()

        class Journal(MemoryJournal):
            async def prune(self, rule: PruneRule, *, should_stop: Any = None) -> PruneTotals:
                steps.append(rule.sealed[0]["solver"].step)
                began.set()
                await go_on.wait()
                return PruneTotals(rule=str(rule))

        checkpoints = Checkpoints(tmp_path, keep=1)
        retention = JournalRetention(Journal(), checkpoints, keep=0)
        retention.start_pruning(pytest.fail)
        await began.wait()
        for checkpoints.step in (2, 3):
            retention.start_pruning(pytest.fail)
        go_on.set()
        await retention.wait()

    asyncio.run(main())
    assert steps == [1, 3]


def test_no_error_of_pruning_is_lost(tmp_path: Path) -> None:
    told: list[BaseException] = []

    class Journal(MemoryJournal):
        async def prune(self, rule: PruneRule, *, should_stop: Any = None) -> PruneTotals:
            raise LookupError("nobody expected this")

    async def main() -> None:
        retention = JournalRetention(Journal(), CheckpointWriter(tmp_path, keep=1), keep=0)
        retention.start_pruning(told.append)
        await retention.wait()

    asyncio.run(main())
    assert [str(error) for error in told] == ["nobody expected this"]
