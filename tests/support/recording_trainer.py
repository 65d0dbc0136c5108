"""A `Trainer` that learns nothing and records everything: its batches, their order, and its answers.

Owns: step counters, the batches of each step, injected failures and durations. Its weights list the units of all
previous steps, in order, in `trained.json`, so a checkpoint shows the units it was trained on.

1. Idempotent by step id, as the port requires: a step is applied once, and repeats return its report.
2. A failed step leaves the counters unchanged; each injected failure happens once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import RunDirectoryError, StorageError, TrainerError
from agentrl.core.files import LOCAL, Disk, rename_whole, resume_advice, staging_directory
from agentrl.core.records import PolicyVersion, StepReport, TrainBatch, WeightsRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentrl.core.clock import Clock
    from agentrl.core.errors import AgentRLError

STATE_FILE = "recording_trainer.json"
TRAINED_FILE = "trained.json"
_LIMIT = 64 << 20


class RecordingTrainer:
    """A `Trainer` for tests and simulations.

    Args:
        policies: names of the policies to train.
        clock: clock for the durations; required if one of them is not 0.
        step_seconds: duration of `forward_backward` on that clock, or a function of the batch.
        publish_seconds: duration of `publish` on that clock.
        failures: errors that `optim_step` raises once, by (policy, step id).
        steps: number of earlier steps of each policy; 0 if absent.
        versions: directory of published versions; if None, no files are written.
        disk: the disk that holds versions and checkpoints.

    Example:
        >>> trainer = RecordingTrainer(["solver"])
        >>> import asyncio; asyncio.run(trainer.publish("solver", PolicyVersion("solver", 0, 0))).path
        'weights/solver/0.0'
    """

    def __init__(
        self,
        policies: Sequence[str],
        *,
        clock: Clock | None = None,
        step_seconds: float | Callable[[TrainBatch], float] = 0.0,
        publish_seconds: float = 0.0,
        failures: Mapping[tuple[str, int], AgentRLError] | None = None,
        steps: Mapping[str, int] | None = None,
        versions: Path | None = None,
        disk: Disk = LOCAL,
    ) -> None:
        if clock is None and (step_seconds or publish_seconds):
            raise ValueError("a duration needs a clock: RecordingTrainer(..., clock=LoopClock())")
        self.batches: list[TrainBatch] = []
        """Batches of applied steps, in order of application."""
        self.published: dict[PolicyVersion, WeightsRef] = {}
        self.closed = False
        self._clock = clock
        self.step_seconds = step_seconds if callable(step_seconds) else lambda batch: step_seconds
        """Returns the duration of a step with a batch, in seconds."""
        self._publish_seconds = publish_seconds
        self._failures = dict(failures or {})
        self._root = versions
        self._disk = disk
        self._steps = {policy: (steps or {}).get(policy, 0) for policy in policies}
        self._versions = {policy: PolicyVersion(policy, 0, step) for policy, step in self._steps.items()}
        self._trained_units: dict[str, list[tuple[str, int]]] = {policy: [] for policy in policies}
        self._batches: dict[str, list[TrainBatch]] = {policy: [] for policy in policies}
        self._reports: dict[str, StepReport] = {}

    async def start(self, resume_from: str | None = None) -> tuple[str, ...]:
        """Start the trainer; with `resume_from`, read the counters that `save` wrote there.

        Raises:
            TrainerError: the directory contains other policies.
        """
        if resume_from is None:
            return ()
        directory = Path(resume_from)
        state = self._read(directory / STATE_FILE)
        if set(state) != set(self._steps):
            raise TrainerError(f"{resume_from} holds policies {sorted(state)}, not {sorted(self._steps)}")
        for policy, (lineage, step) in state.items():
            self._steps[policy] = step
            self._versions[policy] = PolicyVersion(policy, lineage, step)
            self._trained_units[policy] = [tuple(unit) for unit in self._read(directory / policy / TRAINED_FILE)]
        return ()

    async def forward_backward(self, batch: TrainBatch) -> None:
        """Store a batch for its step; ignored if that step was already applied.

        Raises:
            TrainerError: the policy is unknown, or the step is not the next one.
        """
        steps_taken = self._steps_of(batch.policy)
        if batch.step_id <= steps_taken:
            return
        if batch.step_id != steps_taken + 1:
            raise TrainerError(f"{batch.policy}: a batch for step {batch.step_id} after {steps_taken}")
        await self._pass(self.step_seconds(batch))
        self._batches[batch.policy].append(batch)

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        """Apply the stored batches; a repeat of the last step returns its report.

        Raises:
            AgentRLError: the injected failure of this step, the first time.
            TrainerError: the step is neither the last nor the next one, or there is no batch.
        """
        steps_taken = self._steps_of(policy)
        if step_id == steps_taken and policy in self._reports:
            return self._reports[policy]
        batches = self._batches[policy]
        if step_id != steps_taken + 1 or not batches:
            raise TrainerError(f"{policy}: asked for step {step_id} after {steps_taken} with {len(batches)} batches")
        self._batches[policy] = []
        failure = self._failures.pop((policy, step_id), None)
        if failure is not None:
            raise failure
        self._steps[policy] = step_id
        self.batches.extend(batches)
        self._trained_units[policy] += [(unit.episode_id, unit.attempt) for batch in batches for unit in batch.units]
        self._reports[policy] = self._report(policy, step_id, batches)
        return self._reports[policy]

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        """Return a reference to weights; writes files if the trainer has a directory for versions.

        Raises:
            TrainerError: the version is of another policy, not of the current step, or was published before.
            StorageError: the disk failed.
        """
        if version.policy != policy or version.step != self._steps_of(policy):
            raise TrainerError(f"cannot publish {version} of policy {policy} at step {self._steps_of(policy)}")
        if version in self.published:
            raise TrainerError(f"{version} was published before: versions are never reused")
        await self._pass(self._publish_seconds)
        weights = self._weights(version)
        self._versions[policy] = version
        self.published[version] = weights
        return weights

    async def save(self, directory: str) -> None:
        """Write the step counters and the trained units of every policy to an empty directory.

        Raises:
            RunDirectoryError: the directory is not empty.
        """
        target, disk = Path(directory), self._disk
        if disk.names(target):
            raise RunDirectoryError(f"{target} is not empty: a checkpoint never overwrites another")
        with contextlib.suppress(FileExistsError):
            disk.make_directory(target)
        counters = {policy: (self._versions[policy].lineage, step) for policy, step in self._steps.items()}
        disk.write(target / STATE_FILE, json.dumps(counters).encode())
        for policy in self._steps:
            disk.make_directory(target / policy)
            disk.write(target / policy / TRAINED_FILE, self._weights_of(policy))

    async def close(self) -> None:
        """Set `closed`. Idempotent."""
        self.closed = True

    def _steps_of(self, policy: str) -> int:
        if policy not in self._steps:
            raise TrainerError(f"no policy {policy!r}; there are: {', '.join(sorted(self._steps))}")
        return self._steps[policy]

    async def _pass(self, seconds: float) -> None:
        if self._clock is not None and seconds > 0:
            await self._clock.sleep(seconds)

    def _report(self, policy: str, step_id: int, batches: Sequence[TrainBatch]) -> StepReport:
        units = [unit for batch in batches for unit in batch.units]
        digest = hashlib.blake2b(digest_size=16)
        for unit in units:
            digest.update(repr((unit.episode_id, unit.attempt, unit.credits)).encode())
        return StepReport(
            step_id=step_id,
            policy=policy,
            started_from=self._versions[policy],
            loss=0.0,
            grad_norm=0.0,
            samples=sum(len(unit.credits) for unit in units),
            tokens=0,
            seconds=sum(map(self.step_seconds, batches)),
            metrics={},
            input_digest=digest.hexdigest(),
        )

    def _weights(self, version: PolicyVersion) -> WeightsRef:
        """Return the reference of a version and write its file as a trainer writes full weights, without a sync."""
        sha256 = hashlib.sha256(str(version).encode()).hexdigest()
        name = f"{version.lineage}.{version.step}"
        if self._root is None:
            return WeightsRef(version=version, path=f"weights/{version.policy}/{name}", kind="full", sha256=sha256)
        target = self._root / version.policy / name
        try:
            with staging_directory(target, disk=self._disk, depth=2, durable=False) as staging:
                weights = self._weights_of(version.policy)
                self._disk.write(staging / TRAINED_FILE, weights)
                rename_whole(
                    staging,
                    target,
                    disk=self._disk,
                    unless_same=lambda existing: self._disk.read(existing / TRAINED_FILE, limit=_LIMIT) == weights,
                )
        except FileExistsError as error:
            raise TrainerError(f"{version} exists in {target} with other weights; ids are never reused") from error
        except OSError as error:
            raise StorageError(f"{target}: could not be written ({error.strerror}); {resume_advice(error)}") from error
        sha256 = self._disk.digest(target / TRAINED_FILE)
        return WeightsRef(version=version, path=str(target), kind="full", sha256=sha256)

    def _weights_of(self, policy: str) -> bytes:
        return json.dumps(self._trained_units[policy]).encode()

    def _read(self, path: Path) -> Any:
        return json.loads(self._disk.read(path, limit=_LIMIT))
