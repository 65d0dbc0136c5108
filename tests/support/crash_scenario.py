"""A small run that can die at any operation: the real loop, dispatcher, buffer, runner, worker, checkpoints, recovery.

Simulated are the disk, the transactions of the journal, time, the policies (a script) and the trainer, whose weights
say what they were trained on. `CrashScenario.life` is one process, from its start on what a `Machine` holds to the end
of the run. Mutants, and tests of other parts, override the methods that make the parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.app.assemble import RunParts, assemble_orchestrator
from agentrl.app.plan import resolve
from agentrl.app.policies import pinned_policy_step_lags, seats_by_episode_kind
from agentrl.app.recovery import ResumeCheckpoint, remove_leftover_directories
from agentrl.config.run import RunConfig
from agentrl.core.clock import LoopClock
from agentrl.core.records import PolicyVersion, Task, WeightsRef
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.port import StepRow, VersionPublication
from agentrl.orchestrator.checkpoints import CheckpointWriter
from agentrl.orchestrator.evaluation import HeldOutSplit
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.testing.virtual_time import VirtualTimeEventLoop
from tests.support.recording_trainer import RecordingTrainer
from tests.support.sim_disk import SimDisk, SimulatedCrashError
from tests.support.sim_journal import SimJournal

if TYPE_CHECKING:
    from agentrl.core.errors import AgentRLError
    from agentrl.core.ports import GenerateRequest
    from agentrl.engines.scripted import Script
    from agentrl.environment.environment import Environment
    from agentrl.orchestrator.loop import Orchestrator
    from tests.support.sim_disk import Fate

RUN = Path("/run")
CHECKPOINTS = RUN / "checkpoints"
VERSIONS = RUN / "versions"
EMPTY_TASKS = (Task(id="task", data={}),)


def with_staleness(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose learning policies have a bound on staleness, 1 unless it says another: what "auto" chooses
    depends on the time that steps take."""
    policies = {
        name: {"max_staleness": 1, **policy} if policy.get("kind", "trained") == "trained" else policy
        for name, policy in values["policies"].items()
    }
    return {**values, "policies": policies}


@dataclass(slots=True, kw_only=True, eq=False)
class Machine:
    """What outlives a process, and what a witness saw of it."""

    disk: SimDisk
    journal: SimJournal
    sampled: list[str] = field(default_factory=list)
    """Request ids of the engine calls of this process, in order."""
    served: list[tuple[PolicyVersion, bool]] = field(default_factory=list)
    """Versions this process gave an engine, in order, and whether the journal had them on disk by then."""
    rejected: Sequence[str] = ()
    """Checkpoints this process found damaged."""
    life: int = 0
    """How many processes were here before."""

    def after_crash(self, fate: Fate, *, seed: int = 0) -> Machine:
        """What the next process finds; nothing here changes."""
        disk = self.disk.after_crash(fate, seed=seed)
        journal = self.journal.after_crash(fate, disk, seed=seed)
        return Machine(disk=disk, journal=journal, life=self.life + 1)


def babble(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
    """A few letters that depend on the request alone."""
    return [*b"abcdefg"[: 1 + request.seed % 7], STOP_TOKEN]


class CrashScenario:
    """A run of three steps per policy, each over four episodes.

    Args:
        environment: what is played; one policy for each of its seats.
        tasks: what it is played on.
        script: what the policies say; it must depend on the request alone, or runs cannot be compared.
        changes: of the run's configuration.
        held_out: held-out tasks.
    """

    expected: tuple[type[AgentRLError], ...] = ()
    """Errors after which the run is simply started again."""

    def __init__(
        self,
        environment: type[Environment],
        *,
        tasks: Sequence[Task] = EMPTY_TASKS,
        script: Script = babble,
        changes: Mapping[str, Any] | None = None,
        held_out: Sequence[Task] = (),
    ) -> None:
        self.environment = environment
        self.held_out = held_out
        self.tasks = tasks
        self.script = script
        names = sorted({seat.rsplit(".", 1)[-1] for kind in seats_by_episode_kind(environment) for seat in kind.seats})
        values: dict[str, Any] = {
            "steps": 3,
            "environment": {"id": "unused"},
            "model": {"path": "unused"},
            "policies": {name: {"step_size": 4, "max_staleness": 1} for name in names},
            "credit": {"group_size": 4},
            "checkpoint": {"every": 1, "versions": 2},
            "evaluation": {"tasks": 0},
        }
        self.config = RunConfig(**with_staleness({**values, **(changes or {})}))
        self.trainable = list(self.config.trained)

    # --- parts a mutant may replace ---------------------------------------------------------------------------------

    def new_disk(self) -> SimDisk:
        """An empty disk."""
        return SimDisk()

    def new_journal(self, disk: SimDisk) -> SimJournal:
        """An empty journal; its rounds are short, so that turns are committed one by one."""
        return SimJournal(disk, flush_seconds=0.01)

    def recovery(self, machine: Machine) -> ResumeCheckpoint:
        """What a process takes over."""
        return ResumeCheckpoint.find(CHECKPOINTS, disk=machine.disk)

    def checkpoints(self, machine: Machine) -> CheckpointWriter:
        """What writes the checkpoints."""
        return CheckpointWriter(CHECKPOINTS, disk=machine.disk)

    def says(self, machine: Machine, request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
        """What a policy says."""
        return self.script(request, policy, version)

    async def serves(self, machine: Machine, weights: WeightsRef) -> None:
        """An engine is given a version."""

    def rewired(self, orchestrator: Orchestrator, machine: Machine) -> None:
        """The loop is assembled and about to run."""

    # --- lives ------------------------------------------------------------------------------------------------------

    def new_machine(self) -> Machine:
        """A machine on which the run's directory, and nothing else, lies."""
        disk = self.new_disk()
        disk.make_directory(RUN)
        disk.sync(RUN.parent)
        disk.operations = 0
        return Machine(disk=disk, journal=self.new_journal(disk))

    async def life(self, machine: Machine) -> None:
        """One process: begin where the machine stands, run to the end.

        Raises:
            AgentRLError: what ended the run.
        """
        disk, journal, plan = machine.disk, machine.journal, resolve(self.config, self.environment)
        recovery = self.recovery(machine)
        machine.rejected = recovery.rejected
        remove_leftover_directories(CHECKPOINTS, VERSIONS, disk=disk)
        clock = LoopClock()
        trainer = RecordingTrainer(
            self.trainable, clock=clock, step_seconds=0.7, publish_seconds=0.1, versions=VERSIONS, disk=disk
        )
        await trainer.start(recovery.start_from)
        versions = recovery.first_versions(plan, journal, VERSIONS, disk=disk)
        engine = _WitnessedEngine(self._witnessed(machine), versions=versions, seconds_per_token=0.05)
        engine.machine, engine.scenario = machine, self
        first = {name: versions[name] for name in self.trainable}
        served = ServedVersions(
            engine, batches=pinned_policy_step_lags(self.config.trained, deterministic=self.config.deterministic)
        )
        past = recovery.past_run(plan, journal)
        opponents = await recovery.publish_first_versions(plan, first, trainer, served, journal, past)
        parts = RunParts(
            served=served,
            trainer=trainer,
            chat_format=PlainChatFormat(),
            store=journal,
            observer=_Unheard(),
            clock=clock,
            tasks=self.tasks,
            held_out=[HeldOutSplit("held_out", self.held_out)],
            checkpoints=self.checkpoints(machine),
            versions=versions,
            opponents=opponents,
            past=past,
            role_means=recovery.role_means,
            running_best=recovery.running_best(VERSIONS, disk=disk),
            disk=disk,
        )
        orchestrator = assemble_orchestrator(plan, parts)
        self.rewired(orchestrator, machine)
        await orchestrator.run()
        orchestrator.buffer.ledger.check()
        await journal.close()

    def run(self, machine: Machine, *, seed: int) -> BaseException | None:
        """Run a life in a simulated loop of its own until it ends; what ended it, None for the end of the run."""
        loop = VirtualTimeEventLoop(seed)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(self._until_its_end(machine, loop))

    async def _until_its_end(self, machine: Machine, loop: VirtualTimeEventLoop) -> BaseException | None:
        crashed: asyncio.Future[None] = loop.create_future()

        def stop() -> None:
            loop.set_exception_handler(lambda *_: None)  # a process that is gone complains of nothing
            if not crashed.done():
                crashed.set_result(None)

        machine.disk.on_crash = stop
        life = loop.create_task(self.life(machine), name="life")
        await asyncio.wait({life, crashed}, return_when=asyncio.FIRST_COMPLETED)
        ended = None if crashed.done() else life.exception()
        if crashed.done() or ended is not None:
            loop.set_exception_handler(lambda *_: None)
            await _end_all()
            return ended or SimulatedCrashError("as planned")
        return None

    def _witnessed(self, machine: Machine) -> Callable[[GenerateRequest, str, PolicyVersion], Sequence[int]]:
        def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
            machine.sampled.append(request.request_id)
            return self.says(machine, request, policy, version)

        return script


class _WitnessedEngine(ScriptedEngine):
    """A scripted engine that looks at the disk when it is given a version."""

    machine: Machine
    scenario: CrashScenario

    async def load(self, weights: WeightsRef) -> None:
        """See `ScriptedEngine.load`."""
        version, on_disk = weights.version, self.machine.journal.on_disk()
        lineage = {
            record.weights.version.step
            for record in on_disk
            if isinstance(record, VersionPublication) and record.weights.version[:2] == version[:2]
        }
        made = any(isinstance(record, StepRow) and record.version == version for record in on_disk)
        is_known = version.step in lineage and (made or version.step == min(lineage))
        self.machine.served.append((version, is_known))
        await self.scenario.serves(self.machine, weights)


class _Unheard:
    """An observer that looks away."""

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        pass


async def _end_all() -> None:
    """Cancel every other task, until none is left."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others)
