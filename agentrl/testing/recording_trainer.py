"""A `Trainer` that learns nothing and remembers everything: what it was given, in which order, and what it gave.

Owns: step counters, the batches of each step, injected failures and durations. Its weights are paths without files.

1. Idempotent by step id, as the port asks: a step that was applied is applied once, and repeats return its report.
2. A failed step leaves the counters as they were; each injected failure happens once.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.errors import RunDirectoryError, TrainerError
from agentrl.core.records import PolicyVersion, StepReport, TrainBatch, WeightsRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentrl.core.clock import Clock
    from agentrl.core.errors import AgentRLError

STATE_FILE = "recording_trainer.json"


class RecordingTrainer:
    """The fake trainer.

    Args:
        policies: the policies it trains.
        clock: where durations are waited; needed if one is not 0.
        step_seconds: how long `forward_backward` takes on that clock.
        publish_seconds: how long `publish` takes on that clock.
        failures: what `optim_step` raises, once, at a (policy, step id).
        steps: steps each policy has taken before; 0 where absent.

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
        step_seconds: float = 0.0,
        publish_seconds: float = 0.0,
        failures: Mapping[tuple[str, int], AgentRLError] | None = None,
        steps: Mapping[str, int] | None = None,
    ) -> None:
        if clock is None and (step_seconds or publish_seconds):
            raise ValueError("a duration needs a clock: RecordingTrainer(..., clock=LoopClock())")
        self.batches: list[TrainBatch] = []
        """Batches of applied steps, in the order they were applied."""
        self.published: list[WeightsRef] = []
        self.closed = False
        self._clock = clock
        self._step_seconds = step_seconds
        self._publish_seconds = publish_seconds
        self._failures = dict(failures or {})
        self._steps = {policy: (steps or {}).get(policy, 0) for policy in policies}
        self._versions = {policy: PolicyVersion(policy, 0, step) for policy, step in self._steps.items()}
        self._accumulated: dict[str, list[TrainBatch]] = {policy: [] for policy in policies}
        self._reports: dict[str, StepReport] = {}

    async def start(self, resume_from: str | None = None) -> None:
        """With `resume_from`, take over the counters that `save` wrote there.

        Raises:
            TrainerError: the directory holds other policies.
        """
        if resume_from is not None:
            saved = json.loads((Path(resume_from) / STATE_FILE).read_text())
            if set(saved) != set(self._steps):
                raise TrainerError(f"{resume_from} holds policies {sorted(saved)}, not {sorted(self._steps)}")
            for policy, (lineage, step) in saved.items():
                self._steps[policy] = step
                self._versions[policy] = PolicyVersion(policy, lineage, step)

    async def forward_backward(self, batch: TrainBatch) -> None:
        """Remember a batch for the step it names; ignored where that step was applied already.

        Raises:
            TrainerError: an unknown policy, an empty batch, or a step that is not the next one.
        """
        applied = self._steps_of(batch.policy)
        if batch.step_id <= applied:
            return
        if batch.step_id != applied + 1 or not batch.units:
            raise TrainerError(
                f"{batch.policy}: a batch of {len(batch.units)} units for step {batch.step_id} after {applied}"
            )
        await self._pass(self._step_seconds)
        self._accumulated[batch.policy].append(batch)

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        """Apply the remembered batches; a repeat of the last step returns its report.

        Raises:
            AgentRLError: the injected failure of this step, the first time.
            TrainerError: the step is neither the last nor the next one, or there is nothing to apply.
        """
        applied = self._steps_of(policy)
        if step_id == applied and policy in self._reports:
            return self._reports[policy]
        batches = self._accumulated[policy]
        if step_id != applied + 1 or not batches:
            raise TrainerError(f"{policy}: asked for step {step_id} after {applied} with {len(batches)} batches")
        self._accumulated[policy] = []
        failure = self._failures.pop((policy, step_id), None)
        if failure is not None:
            raise failure
        self._steps[policy] = step_id
        self.batches.extend(batches)
        self._reports[policy] = self._report(policy, step_id, batches)
        return self._reports[policy]

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        """A reference to weights that exist in name only.

        Raises:
            TrainerError: the version is of another policy, not of the current step, or was published before.
        """
        if version.policy != policy or version.step != self._steps_of(policy):
            raise TrainerError(f"cannot publish {version} of policy {policy} at step {self._steps_of(policy)}")
        weights = _weights(version)
        if weights in self.published:
            raise TrainerError(f"{version} was published before: versions are never reused")
        await self._pass(self._publish_seconds)
        self._versions[policy] = version
        self.published.append(weights)
        return weights

    async def save(self, directory: str) -> None:
        """Write the step counters into an empty directory.

        Raises:
            RunDirectoryError: the directory is not empty.
        """
        _write_state(
            Path(directory),
            {policy: (self._versions[policy].lineage, step) for policy, step in self._steps.items()},
        )

    async def close(self) -> None:
        """Nothing to release. Idempotent."""
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
            seconds=self._step_seconds,
            metrics={},
            input_digest=digest.hexdigest(),
        )


def _weights(version: PolicyVersion) -> WeightsRef:
    return WeightsRef(
        version=version,
        path=f"weights/{version.policy}/{version.lineage}.{version.step}",
        kind="full",
        sha256=hashlib.sha256(str(version).encode()).hexdigest(),
    )


def _write_state(directory: Path, counters: Mapping[str, tuple[int, int]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise RunDirectoryError(f"{directory} is not empty: a checkpoint never overwrites another")
    (directory / STATE_FILE).write_text(json.dumps(counters))
