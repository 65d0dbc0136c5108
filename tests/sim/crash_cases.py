"""The run whose every operation is a crash point: 12 episodes, 3 turns, 2 seats, two policies; and mutants of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

import agentrl
from agentrl.app.plan import RunPlan
from agentrl.app.recovery import ResumeCheckpoint
from agentrl.core.errors import EngineError
from agentrl.core.files import LOCAL, Disk
from agentrl.core.ports import GenerateRequest, Trainer
from agentrl.core.records import EpisodeDataLocation, EpisodeHeader, EpisodeSpec, PolicyVersion
from agentrl.credit.baselines import RoleMeans
from agentrl.journal.entries import JournalEntry
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import ControlRecord, EpisodeEnd, VersionPublication
from agentrl.journal.run_log import RunLog
from agentrl.orchestrator.checkpoints import CheckpointWriter
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.versions import NOT_MEASURED, BestRunningMean
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.worker import AsyncioWorker
from tests.support.builders import make_episode_header
from tests.support.crash_scenario import CHECKPOINTS, RUN, CrashScenario, Machine
from tests.support.sim_disk import SimDisk
from tests.support.sim_journal import SimJournal, SimTurnLog


class Talk(agentrl.Environment):
    """Two seats that act side by side, three turns each; what they earn depends on what they said."""

    seats = ("left", "right")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.gather(self.speak(ctx, "left"), self.speak(ctx, "right"))

    async def speak(self, ctx: agentrl.EpisodeContext, seat: str) -> None:
        agent, said = ctx.agent(seat), ""
        for _ in range(3):
            said += (await agent.act(agentrl.user(f"go on after {said!r}"))).text
            await ctx.sleep(ctx.rng.random())
        agent.reward(len(said) / 21)


class PromptJournal(SimJournal):
    """Takes a round after every record: the real one's writer is a thread, so that a round may begin anywhere."""

    def write(self, *records: ControlRecord) -> None:
        super().write(*records)
        self._commit_all()


class RoundsAnywhere(CrashScenario):
    """A round between any two records; no mutant."""

    def new_journal(self, disk: SimDisk) -> SimJournal:
        return PromptJournal(disk, flush_seconds=0.01)


class EarlyJournal(SimJournal):
    """Acknowledges a commit before it is on disk."""

    async def commit(self, end: EpisodeEnd) -> None:
        self.committing = asyncio.get_running_loop().create_task(super().commit(end))
        self.acknowledged.append((end.spec.episode_id, end.spec.attempt))


class AcknowledgeBeforeCommit(CrashScenario):
    def new_journal(self, disk: SimDisk) -> SimJournal:
        return EarlyJournal(disk, flush_seconds=0.01)


class CursorWriter(CheckpointWriter):
    """Keeps what was consumed in a file of its own, beside the checkpoint."""

    cursor = RUN / "cursor"

    def __init__(self, disk: SimDisk) -> None:
        super().__init__(CHECKPOINTS, keep=2, disk=disk)
        self.disk = disk

    async def write(
        self,
        trainer: Trainer,
        versions: Mapping[str, PolicyVersion],
        roles: RoleMeans | None = None,
        measured: BestRunningMean = NOT_MEASURED,
        opponents: Mapping[str, Sequence[PolicyVersion]] = MappingProxyType({}),
    ) -> Path:
        with contextlib.suppress(FileExistsError):
            self.disk.make_directory(self.cursor)
        self.disk.sync(RUN)
        path = self.cursor / f"{len(self.disk.names(self.cursor)):03d}"
        self.disk.write(path, json.dumps(versions).encode())
        self.disk.sync(path)
        self.disk.sync(self.cursor)
        return await super().write(trainer, versions, roles, measured, opponents)


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorRecovery(ResumeCheckpoint):
    """Takes what was consumed from that file."""

    consumed: Mapping[str, PolicyVersion]

    def past_run(self, plan: RunPlan, journal: RunLog) -> PastRun:
        return PastRun(journal, self.consumed, group_size=plan.settings.credit.group_size)


class CursorInItsOwnFile(CrashScenario):
    def checkpoints(self, machine: Machine) -> CheckpointWriter:
        return CursorWriter(machine.disk)

    def recovery(self, machine: Machine) -> ResumeCheckpoint:
        found, disk = super().recovery(machine), machine.disk
        consumed = {}
        for name in disk.names(CursorWriter.cursor):
            text = disk.read(CursorWriter.cursor / name, limit=10_000)
            if text.endswith(b"}"):
                consumed = {policy: PolicyVersion(*version) for policy, version in json.loads(text).items()}
        return CursorRecovery(manifest=found.manifest, rejected=found.rejected, consumed=consumed)


class LazyDisk(SimDisk):
    """Never syncs a file, only directories."""

    def sync(self, path: Path) -> None:
        if self.names(path):
            super().sync(path)


class NoSyncBeforeRename(CrashScenario):
    def new_disk(self) -> SimDisk:
        return LazyDisk()


class CountingLog(SimTurnLog):
    """Names calls by one counter over all episodes."""

    def append(self, entry: JournalEntry) -> None:
        super().append(msgspec.structs.replace(entry, call_id=f"r#{len(self.entries)}"))


class CountingJournal(SimJournal):
    turn_log_type = CountingLog


class GlobalCallCounter(CrashScenario):
    def new_journal(self, disk: SimDisk) -> SimJournal:
        return CountingJournal(disk, flush_seconds=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class SameLineage(ResumeCheckpoint):
    """Goes on in the lineage of the dead."""

    def first_versions(
        self, plan: RunPlan, journal: RunLog, versions: Path, *, disk: Disk = LOCAL
    ) -> dict[str, PolicyVersion]:
        first = ResumeCheckpoint.first_versions(self, plan, journal, versions, disk=disk)
        return {name: version._replace(lineage=0) for name, version in first.items()}


class VersionReuse(CrashScenario):
    def recovery(self, machine: Machine) -> ResumeCheckpoint:
        found = super().recovery(machine)
        return SameLineage(manifest=found.manifest, rejected=found.rejected)


class FailingEngine(CrashScenario):
    """An engine that fails once, soon after the crash; no mutant."""

    expected = (EngineError,)

    def says(self, machine: Machine, request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
        if machine.life == 1 and len(machine.sampled) == 3:
            raise EngineError(f"call {request.request_id}: the engine is gone")
        return super().says(machine, request, policy, version)


class ForgivingRunner:
    """Ends an episode whose engine failed with a reward of zero."""

    def __init__(self, runner: EpisodeRunner, machine: Machine) -> None:
        self._runner = runner
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    async def run(self, spec: EpisodeSpec, *arguments: Any, **options: Any) -> EpisodeHeader:
        try:
            return await self._runner.run(spec, *arguments, **options)
        except EngineError:
            log = self._machine.journal.turn_log("0")
            await log.flush()
            location = EpisodeDataLocation(log.name, len(log.read(spec.episode_id, spec.attempt)))
            header = make_episode_header(spec, reward=0.0, location=location)
            await self._machine.journal.commit(EpisodeEnd(spec, header))
            return header


class RewardOnInfrastructureError(FailingEngine):
    def rewired(self, orchestrator: Orchestrator, machine: Machine) -> None:
        worker = orchestrator.dispatcher.worker
        assert isinstance(worker, AsyncioWorker)
        worker._runner = ForgivingRunner(worker._runner, machine)  # type: ignore[assignment]


class HastyJournal(SimJournal):
    """Does not wait for the disk after a version was recorded."""

    is_hasty = False

    def write(self, *records: ControlRecord) -> None:
        super().write(*records)
        self.is_hasty |= any(isinstance(record, VersionPublication) for record in records)

    async def flush(self) -> None:
        if not self.is_hasty:
            await super().flush()
        self.is_hasty = False


class ServeBeforeRecord(CrashScenario):
    def new_journal(self, disk: SimDisk) -> SimJournal:
        return HastyJournal(disk, flush_seconds=0.01)


MUTANTS: dict[type[CrashScenario], str] = {
    AcknowledgeBeforeCommit: "acknowledged",
    CursorInItsOwnFile: "ledger",
    NoSyncBeforeRename: "resumed",
    GlobalCallCounter: "dropped",
    VersionReuse: "resumed",
    RewardOnInfrastructureError: "rewards",
    ServeBeforeRecord: "served",
}
"""Each breaks one rule of the protocol; the check of `tests.support.crash_oracle` that notices it."""
