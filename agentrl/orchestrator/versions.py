"""Versions of policies: the current ones, those served, and the best.

`PolicyBoard` knows the current version of each policy and the staleness of others; `publish` makes versions.
`ServedVersions` knows who needs which version; the engine has the table of requested and confirmed versions.
`BestCheckpointTracker` remembers the versions at which a metric was best, and ends a run by its rules.

Invariants: weights leave the trainer only after the journal has recorded their version on disk; steps of a lineage only
grow; a version is current only after the engine serves it; lineages form a tree through the version each one started
from, so that a version of a dead lineage is never taken for a fresh one; a version that an episode in flight is pinned
to is served.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.core.errors import EngineError, VersionsRefusedError
from agentrl.core.futures import retrieve_exception
from agentrl.core.ports import Engine, Trainer
from agentrl.core.records import NEVER_RESUMED, Lines, PolicyVersion, WeightsRef
from agentrl.journal.port import JournalStore, StepRow, VersionPublication


class PolicyBoard:
    """Current versions of policies.

    Args:
        current: the starting version of every policy, frozen ones included.
        trainable: the policies that step.
        lines: the run's lineages.
    """

    def __init__(
        self,
        current: Mapping[str, PolicyVersion],
        trainable: Iterable[str],
        lines: Lines = NEVER_RESUMED,
    ) -> None:
        self._current = dict(current)
        self.trainable = tuple(trainable)
        self.lines = lines

    def current(self, policy: str) -> PolicyVersion:
        """Return the newest version that the engine serves."""
        return self._current[policy]

    def step(self, policy: str) -> int:
        """Return the number of optimizer steps that led to the current version."""
        return self._current[policy].step

    def next_version(self, policy: str) -> PolicyVersion:
        """Return the id of the version that the next step makes."""
        now = self._current[policy]
        return PolicyVersion(policy, now.lineage, now.step + 1)

    def start_at(self, version: PolicyVersion) -> None:
        """Make a version current with which a process of the run began, or that it reached."""
        if version.policy in self.trainable:
            self._current[version.policy] = version

    def advance(self, version: PolicyVersion) -> None:
        """Make a served version the current one."""
        if version != self.next_version(version.policy):
            raise ValueError(f"{version} does not follow {self._current[version.policy]}")
        self._current[version.policy] = version

    def at(self, policy: str, step: int) -> PolicyVersion:
        """Return the version of a step on the line that led to the current one."""
        return self.lines.before(self._current[policy], step)

    def at_versions(self, versions: Mapping[str, PolicyVersion]) -> PolicyBoard:
        """Return a board of the same lineages at other versions, such as a checkpoint's."""
        return PolicyBoard(versions, self.trainable, self.lines)

    def recent(self, lags: Mapping[str, int]) -> Iterator[PolicyVersion]:
        """Yield the versions up to the current one, from `lags[policy]` steps behind it, for each policy in `lags`."""
        for policy, lag in lags.items():
            for step in range(max(self.step(policy) - lag, 0), self.step(policy) + 1):
                yield self.at(policy, step)

    def survives(self, version: PolicyVersion) -> bool:
        """Whether the weights of `version` are ancestors of the current ones."""
        return self.lines.survives(version, self._current[version.policy])

    def staleness(self, version: PolicyVersion) -> int:
        """Return the steps between `version` and the current one; see `Lines.age`."""
        return self.lines.age(version, self._current[version.policy])


async def publish(
    trainer: Trainer, store: JournalStore, version: PolicyVersion, parent: PolicyVersion | None, step: StepRow | None
) -> WeightsRef:
    """Publish a policy's weights: write their files, then record the version and the step that made it, on disk.

    No other code asks a trainer for weights, so no engine samples with weights that the journal could lose in a crash.

    Args:
        trainer: has the weights.
        store: records them.
        version: id of the new version.
        parent: the version it was made from; None for the initial weights.
        step: the step that made it; None for the versions with which an attempt of the run starts.

    Raises:
        TrainerError: the id exists with other weights.
        StorageError: writing failed.
    """
    weights = await trainer.publish(version.policy, version)
    await record_published_version(store, weights, parent, step)
    return weights


async def record_published_version(
    store: JournalStore, weights: WeightsRef, parent: PolicyVersion | None = None, step: StepRow | None = None
) -> None:
    """Record a version and the step that made it, atomically and on disk on return: an engine may serve the weights.

    Raises:
        StorageError: writing failed.
    """
    store.record(VersionPublication(weights, parent), *([] if step is None else [step]))
    await store.flush()


BATCHES = "synchronous batches"
"""Holder that pins the versions for a deterministic run's batches in `ServedVersions`."""


class ServedVersions:
    """The versions that a run needs from its engine: the current ones, and the pinned ones with their holders.

    The engine keeps the table of requested and confirmed versions. Each change is sent to it: a new current version,
    and all pinned versions.

    Args:
        engine: engine that serves the versions.
        batches: for each policy in the batches of a deterministic run, the number of steps by which its oldest sampling
            version is behind the current one; these versions are pinned for `BATCHES`.
    """

    def __init__(self, engine: Engine, *, batches: Mapping[str, int] | None = None) -> None:
        self.engine = engine
        self._batches = dict(batches or {})
        self.current: dict[str, WeightsRef] = {}
        """Newest weights of each policy that the engine has confirmed; policies that still use the weights the engine
        started with are absent."""
        self._pins: dict[str, dict[PolicyVersion, WeightsRef]] = {}
        """Pinned versions, keyed by holder; those that the engine has not confirmed yet are included."""
        self._pinning: dict[tuple[str, PolicyVersion], asyncio.Task[None]] = {}
        """Pins that the engine has not confirmed yet, keyed by holder and version; every caller waits for them."""
        self._unpin_tasks: set[asyncio.Task[None]] = set()
        """Tasks that tell the engine of unpinned versions; a reference keeps a task from being collected."""

    async def make_current(self, weights: WeightsRef) -> None:
        """Serve new conversations of a policy with a version, which replaces the oldest one of `BATCHES`.

        Raises:
            EngineError: the engine refused the version; earlier ones stay served.
        """
        policy, pins = weights.version.policy, self._pins.setdefault(BATCHES, {})
        old_pins: dict[PolicyVersion, WeightsRef] = {}
        if policy in self._batches:
            oldest = weights.version.step - self._batches[policy]
            old_pins = {
                old_version: pins[old_version]
                for old_version in pins
                if old_version.policy == policy and old_version.step < oldest
            }
            old_pins |= {old_version: ref for old_version, ref in pins.items() if old_version == weights.version}
            for version in old_pins:
                del pins[version]
            pins[weights.version] = weights
        try:
            await self._serve(weights.version, weights)
        except EngineError:
            # Undo this call's changes only: other pins may have changed while the engine worked.
            pins.pop(weights.version, None)
            pins.update(old_pins)
            raise
        self.current[policy] = weights

    async def pin(self, holder: str, weights: WeightsRef) -> None:
        """Serve a version until `holder` unpins it, independent of later updates. Idempotent: calls while the engine
        works on it wait for the same outcome.

        Raises:
            EngineError: the engine refused the version, and `holder` does not pin it.
        """
        key, pins = (holder, weights.version), self._pins.setdefault(holder, {})
        if key not in self._pinning:
            if pins.get(weights.version) == weights:
                return
            pins[weights.version] = weights
            task = asyncio.get_running_loop().create_task(self._confirm_pin(holder, weights), name=f"pin for {holder}")
            task.add_done_callback(retrieve_exception)
            self._pinning[key] = task
        await asyncio.shield(self._pinning[key])

    async def _confirm_pin(self, holder: str, weights: WeightsRef) -> None:
        key, task = (holder, weights.version), asyncio.current_task()
        is_refused = True
        try:
            await self._serve(weights.version)
            is_refused = False
        finally:
            if self._pinning.get(key) is task:  # otherwise the holder unpinned the version while the engine worked
                del self._pinning[key]
                if is_refused:
                    del self._pins[holder][weights.version]

    def unpin(self, holder: str, *versions: PolicyVersion) -> None:
        """Stop serving versions for `holder`; a background task tells the engine. Idempotent."""
        for version in versions:
            self._pins.get(holder, {}).pop(version, None)
            self._pinning.pop((holder, version), None)
        if versions:
            task = asyncio.get_running_loop().create_task(self._serve(None), name="unpin versions")
            self._unpin_tasks.add(task)
            task.add_done_callback(self._on_unpinned)

    def _on_unpinned(self, task: asyncio.Task[None]) -> None:
        self._unpin_tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: the next call or version reports the engine's failure

    def pinned_by(self, holder: str) -> list[PolicyVersion]:
        """Return the versions that a holder pins and the engine has confirmed, in the order of pinning."""
        return [version for version in self._pins.get(holder, ()) if (holder, version) not in self._pinning]

    def pinned(self) -> set[PolicyVersion]:
        """Return all pinned versions, confirmed or not."""
        return {version for pins in self._pins.values() for version in pins}

    async def _serve(self, version: PolicyVersion | None, *current: WeightsRef) -> None:
        """Request all versions. Only a refusal of `version` is raised: others have their own callers."""
        pinned_refs = {weights for pins in self._pins.values() for weights in pins.values()}
        try:
            await self.engine.serve(current, tuple(sorted(pinned_refs, key=lambda each: each.version)))
        except VersionsRefusedError as error:
            if version is not None and version in error.refused:
                raise error.refused[version] from None


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRunningMean:
    """The newest measurements of a metric, and its best running mean so far."""

    what: str = ""
    """Metric, policy and window; a run resumed with different ones starts over."""
    newest: tuple[float, ...] = ()
    """Measurements within the window, oldest first; larger is better."""
    measured_versions: tuple[Mapping[str, PolicyVersion], ...] = ()
    """Measured version of every learning policy, for each of `newest`."""
    best: float = -math.inf
    """Largest running mean."""
    versions: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """Versions of the largest measurement within the window of `best`; empty before the first mean."""

    def as_data(self) -> dict[str, Any]:
        """Return JSON data; floats round-trip exactly."""
        return {
            "what": self.what,
            "newest": list(self.newest),
            "measured_versions": list(map(_encode_versions, self.measured_versions)),
            "best": self.best if self.versions else None,
            "versions": _encode_versions(self.versions),
        }

    def largest(self) -> int:
        """Return the index of the largest of the newest measurements; of equal ones, the newest."""
        return max(range(len(self.newest)), key=lambda index: (self.newest[index], index))

    def needed(self) -> Iterator[PolicyVersion]:
        """Yield the best versions, and those that a later window may choose: no newer measurement is as large."""
        yield from self.versions.values()
        for index, value in enumerate(self.newest):
            if all(value > newer for newer in self.newest[index + 1 :]):
                yield from self.measured_versions[index].values()


def _encode_versions(versions: Mapping[str, PolicyVersion]) -> dict[str, list[int]]:
    return {policy: [version.lineage, version.step] for policy, version in versions.items()}


def _decode_versions(data: Mapping[str, Any]) -> dict[str, PolicyVersion]:
    return {policy: PolicyVersion(policy, int(lineage), int(step)) for policy, (lineage, step) in data.items()}


NOT_MEASURED = BestRunningMean()


def decode_best_running_mean(data: Mapping[str, Any]) -> BestRunningMean:
    """Read the output of `BestRunningMean.as_data`.

    Raises:
        KeyError: a field is missing.
        ValueError: a field is not valid.
    """
    versions = _decode_versions(data["versions"])
    newest = tuple(float(value) for value in data["newest"])
    measured_versions = tuple(map(_decode_versions, data.get("measured_versions", ())))
    best = float(data["best"]) if versions else -math.inf
    if not all(map(math.isfinite, [*newest, best] if versions else newest)):
        raise ValueError("a measurement is not finite")
    if len(measured_versions) != len(newest):
        newest = measured_versions = ()  # earlier checkpoints lack the versions: fill the window again
    return BestRunningMean(
        what=str(data["what"]),
        newest=newest,
        measured_versions=measured_versions,
        best=best,
        versions=versions,
    )


@dataclass(slots=True, kw_only=True)
class BestCheckpointTracker:
    """Tracks the versions at which the running mean of a metric was best, and decides when that ends the run.

    The best versions are those of the largest measurement within the best window. A measurement is of the versions that
    sampled it: an evaluation's, or those that sampled a step's units.

    The measurements are in the manifests of checkpoints, so a resumed run chooses as if it had never stopped. The files
    of the best versions stay on disk.

    Example:
        >>> best = BestCheckpointTracker(metric="reward/mean", policy="solver", window=2, stop_at=0.7)
        >>> for step, reward in enumerate([0.0, 1.0, 0.5], start=1):
        ...     best.record_metrics("solver", {"reward/mean": reward}, {"solver": PolicyVersion("solver", 0, step - 1)})
        >>> best.measured.best, best.measured.versions["solver"].step
        (0.75, 1)
        >>> best.why_stop()
        'reward/mean reached 0.75'
    """

    metric: str = ""
    """Name of the metric; empty: nothing is tracked."""
    policy: str = ""
    """Policy of the metric."""
    over: str = ""
    """Held-out tasks of the measurements: means over other tasks are not compared."""
    smallest: bool = False
    """Whether smaller values are better."""
    window: int = 1
    """Number of measurements in the running mean."""
    stop_at: float | None = None
    """Mean at which the run ends."""
    lags: Mapping[str, int] = field(default_factory=dict)
    """For each learning policy, the number of steps by which a measured version may be behind the current one; empty if
    evaluations measure."""
    measured: BestRunningMean = NOT_MEASURED

    def __post_init__(self) -> None:
        description = f"{self._sign:+.0f} {self.metric} of {self.policy}, {self.window}{self.over and f', {self.over}'}"
        if self.measured.what != description:
            self.measured = BestRunningMean(what=description)

    def record_metrics(self, policy: str, metrics: Mapping[str, float], versions: Mapping[str, PolicyVersion]) -> None:
        """Record metrics of a policy; `versions` are the measured ones of all learning policies."""
        value = metrics.get(self.metric, math.nan)
        if policy != self.policy or not math.isfinite(value):
            return
        newest = (*self.measured.newest, -value if self.smallest else value)[-self.window :]
        measured_versions = (*self.measured.measured_versions, dict(versions))[-self.window :]
        measured = replace(self.measured, newest=newest, measured_versions=measured_versions)
        mean = math.fsum(newest) / len(newest)
        if len(newest) == self.window and mean > self.measured.best:
            measured = replace(measured, best=mean, versions=measured_versions[measured.largest()])
        self.measured = measured

    def why_stop(self) -> str | None:
        """Return the reason to end the run, for the user; None if there is none."""
        newest = self.measured.newest
        if self.stop_at is None or len(newest) < self.window:
            return None
        mean = math.fsum(newest) / len(newest)
        return f"{self.metric} reached {self._sign * mean:.4g}" if mean >= self._sign * self.stop_at else None

    def summary(self) -> dict[str, Any] | None:
        """Return the best mean so far with its steps and versions, for the user; None before the first mean."""
        if not self.measured.versions:
            return None
        steps = {policy: version.step for policy, version in self.measured.versions.items()}
        versions = {policy: str(version) for policy, version in self.measured.versions.items()}
        value = self._sign * self.measured.best
        return {"metric": self.metric, "value": value, "steps": steps, "versions": versions}

    @property
    def _sign(self) -> float:
        return -1.0 if self.smallest else 1.0

    def sampled_by(self, board: PolicyBoard, units: Iterable[Sequence[PolicyVersion]]) -> dict[str, PolicyVersion]:
        """Return the versions that a step measures: of each learning policy, the one with which most of its units
        began; of several, the newest. A policy that did not act in these episodes counts with its current version.

        Args:
            board: the versions before the step becomes current.
            units: for each unit, the oldest versions that sampled its episode.
        """
        steps: dict[str, Counter[int]] = {policy: Counter() for policy in board.trainable}
        for versions in units:
            oldest: dict[str, int] = {}
            for version in versions:
                if version.policy in steps:
                    step = board.lines.fork(version, board.current(version.policy))
                    oldest[version.policy] = min(step, oldest.get(version.policy, step))
            for policy, step in oldest.items():
                # older ones count as the oldest whose files stay, see `needed`
                oldest_kept = max(board.step(policy) - self.lags.get(policy, 0), 0)
                steps[policy][max(step, oldest_kept)] += 1
        return {
            policy: board.at(policy, max(counts, key=lambda step: (counts[step], step), default=board.step(policy)))
            for policy, counts in steps.items()
        }

    def needed(self, board: PolicyBoard) -> set[PolicyVersion]:
        """Return the versions whose files must stay, so that a later step can choose them."""
        return {*self.measured.needed(), *board.recent(self.lags)}
