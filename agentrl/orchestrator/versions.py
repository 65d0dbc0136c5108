"""Versions of policies: which one is current, which are served, which serve as opponents, which were the best.

`PolicyBoard` knows the current version of each policy and how old another one is; `publish` makes versions.
`ServedVersions` is the one table of the versions that the engine serves, and for whom. `Opponents` pins earlier
versions to play against. `BestCheckpointTracker` remembers the versions at which a metric was best, and ends a run
because of it.

Invariants: weights are known to nobody but the trainer before the journal has their version on disk; steps of a lineage
only grow; a version is current only after the engine serves it; lineages form a tree through the version each one
started from, so that a version of a dead lineage is never taken for a fresh one; a version that an episode in flight is
pinned to is served.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentrl.core.errors import EngineError
from agentrl.core.ids import stream
from agentrl.core.ports import Engine, Trainer
from agentrl.core.records import EpisodeHeader, EpisodeSpec, GameResult, PolicyVersion, Tally, WeightsRef
from agentrl.journal.port import JournalStore, StepRow
from agentrl.orchestrator.metrics import Counts


class PolicyBoard:
    """Current versions by policy.

    Args:
        current: the starting version of every policy, frozen ones included.
        trainable: the policies that step.
        parents: for each lineage but the first, the version it started from.
    """

    def __init__(
        self,
        current: Mapping[str, PolicyVersion],
        trainable: Iterable[str],
        parents: Mapping[tuple[str, int], PolicyVersion] | None = None,
    ) -> None:
        self._current = dict(current)
        self.trainable = tuple(trainable)
        self._parents = dict(parents or {})

    def current(self, policy: str) -> PolicyVersion:
        """The newest version the engine serves."""
        return self._current[policy]

    def step(self, policy: str) -> int:
        """Optimizer steps behind the current version."""
        return self._current[policy].step

    def next_version(self, policy: str) -> PolicyVersion:
        """The id of the version the next step makes."""
        now = self._current[policy]
        return PolicyVersion(policy, now.lineage, now.step + 1)

    def advance(self, version: PolicyVersion) -> None:
        """Make a served version the current one."""
        if version != self.next_version(version.policy):
            raise ValueError(f"{version} does not follow {self._current[version.policy]}")
        self._current[version.policy] = version

    def at(self, policy: str, step: int) -> PolicyVersion:
        """The version of a step on the line that led to the current one."""
        lineage = self._current[policy].lineage
        while (parent := self._parents.get((policy, lineage))) is not None and step < parent.step:
            lineage = parent.lineage
        return PolicyVersion(policy, lineage, step)

    def survives(self, version: PolicyVersion) -> bool:
        """Whether the weights of `version` are among the ancestors of the current ones."""
        current = self._current[version.policy]
        lineage, step = current.lineage, current.step
        while lineage > version.lineage:
            parent = self._parents.get((version.policy, lineage))
            if parent is None:
                return False
            lineage, step = parent.lineage, parent.step
        return lineage == version.lineage and version.step <= step

    def staleness(self, version: PolicyVersion) -> int:
        """Steps between `version` and the current one; counted from the fork if it did not survive a rollback."""
        current = self._current[version.policy]
        if self.survives(version):
            return current.step - version.step
        fork, lineage = version.step, current.lineage
        while lineage > version.lineage:
            parent = self._parents.get((version.policy, lineage))
            if parent is None:
                break
            fork, lineage = min(fork, parent.step), parent.lineage
        return max(current.step - fork, version.step - fork)


async def publish(
    trainer: Trainer, store: JournalStore, version: PolicyVersion, parent: PolicyVersion | None, step: StepRow | None
) -> WeightsRef:
    """Publish a policy's weights: write their files, then record the version and the step that made it, on disk.

    No other code asks a trainer for weights. So no engine samples by weights that a crash takes from the journal.

    Args:
        trainer: has the weights.
        store: records them.
        version: their id.
        parent: the version they were made from; None for those a run begins with.
        step: the step that made them; None for the versions an attempt of the run starts with.

    Raises:
        TrainerError: the id exists with other weights.
        StorageError: the disk refused.
    """
    weights = await trainer.publish(version.policy, version)
    await record_durably(store, weights, parent, step)
    return weights


async def record_durably(
    store: JournalStore, weights: WeightsRef, parent: PolicyVersion | None = None, step: StepRow | None = None
) -> None:
    """Record a version and the step that made it; on disk on return, so that an engine may be given the weights.

    Raises:
        StorageError: the disk refused.
    """
    store.record_version(weights, parent)
    if step is not None:
        store.record_step(step)
    await store.flush()


BATCHES = "synchronous batches"
"""The holder that pins the versions with which a deterministic run samples its batches in `ServedVersions`."""


class ServedVersions:
    """The one table of the versions that a run's engine serves: the current ones, and those that are pinned, by whom.

    Every change sends the engine the whole table (`Engine.serve`), so it does not matter which changes it saw
    before: a replica that joins late and a restarted process end up serving the same versions.

    Args:
        engine: serves them.
        batches: for each policy that samples the batches of a deterministic run, how many steps the oldest version it
            samples with is behind the current one; these versions are pinned for `BATCHES`.
    """

    def __init__(self, engine: Engine, *, batches: Mapping[str, int] | None = None) -> None:
        self.engine = engine
        self._batches = dict(batches or {})
        self.current: dict[str, WeightsRef] = {}
        """Newest weights of each policy; policies that still use the weights the engine started with are absent."""
        self._pins: dict[str, dict[PolicyVersion, WeightsRef]] = {}
        """Pinned versions by holder."""
        self._unpinning: set[asyncio.Task[None]] = set()

    async def make_current(self, weights: WeightsRef) -> None:
        """Serve new conversations of a policy with a version; it takes the place of the oldest one of `BATCHES`.

        Raises:
            EngineError: the engine refused the version; those before it keep serving.
        """
        policy = weights.version.policy
        before = self.current.get(policy)
        self.current[policy] = weights
        pins = self._pins.setdefault(BATCHES, {})
        outdated: dict[PolicyVersion, WeightsRef] = {}
        if policy in self._batches:
            oldest = weights.version.step - self._batches[policy]
            for version in [each for each in pins if each.policy == policy and each.step < oldest]:
                outdated[version] = pins.pop(version)
            outdated |= {each: ref for each, ref in pins.items() if each == weights.version}
            pins[weights.version] = weights
        try:
            await self._serve()
        except EngineError:
            pins.pop(weights.version, None)
            pins.update(outdated)
            if before is None:
                del self.current[policy]
            else:
                self.current[policy] = before
            raise

    async def pin(self, holder: str, weights: WeightsRef) -> None:
        """Serve a version until `holder` unpins it, whatever becomes current. Idempotent.

        Raises:
            EngineError: the engine refused the version; it is not pinned, unless it was before.
        """
        pins = self._pins.setdefault(holder, {})
        before = pins.get(weights.version)
        pins[weights.version] = weights
        try:
            await self._serve()
        except EngineError:
            if pins.pop(weights.version, None) is not None and before is not None:  # else unpinned meanwhile
                pins[weights.version] = before
            raise

    def unpin(self, holder: str, *versions: PolicyVersion) -> None:
        """Stop serving versions for `holder`; a background task tells the engine. Idempotent."""
        for version in versions:
            self._pins.get(holder, {}).pop(version, None)
        if versions:
            task = asyncio.get_running_loop().create_task(self._serve(), name="unpin versions")
            self._unpinning.add(task)
            task.add_done_callback(self._unpinned)

    def _unpinned(self, task: asyncio.Task[None]) -> None:
        self._unpinning.discard(task)
        if not task.cancelled():
            task.exception()  # whoever samples, or serves the next version, hears what is wrong with the engine

    def pinned_by(self, holder: str) -> list[PolicyVersion]:
        """The versions that a holder pins, in the order in which it pinned them."""
        return list(self._pins.get(holder, ()))

    def pinned(self) -> set[PolicyVersion]:
        """Return all pinned versions."""
        return {version for pins in self._pins.values() for version in pins}

    async def _serve(self) -> None:
        pinned = {weights for pins in self._pins.values() for weights in pins.values()}
        await self.engine.serve(tuple(self.current.values()), tuple(sorted(pinned, key=lambda each: each.version)))


def joined_by(step: int, every: int, size: int) -> range:
    """The steps whose versions are opponents when the policy is at `step`: the newest `size` multiples of `every`.

    Example:
        >>> list(joined_by(35, 10, 3)), list(joined_by(4, 10, 3))
        ([10, 20, 30], [0])
    """
    newest = step - step % every
    return range(max(newest - (size - 1) * every, 0), newest + 1, every)


def holder_of_pool(name: str) -> str:
    """The holder that pins the versions of an opponent pool in `ServedVersions`."""
    return f"opponents {name}"


@dataclass(slots=True, kw_only=True, eq=False)
class OpponentPool:
    """A pool of earlier versions of a learning policy that one policy of the configuration stands for.

    After every `every` steps of the policy its newest version joins; opponents are drawn from the newest few that
    joined.
    """

    name: str
    """The policy that holds the seats."""
    of: str
    """The policy whose versions these are."""
    every: int
    size: int
    choose: Literal["uniform", "latest", "prioritised"]
    served: list[PolicyVersion]
    """Oldest first. The newest `size` are drawn from; one more may still have episodes in flight."""
    tallies: dict[PolicyVersion, Tally] = field(default_factory=dict)
    """Results of the episodes against each version."""

    @property
    def holder(self) -> str:
        """Pins its versions in `ServedVersions`."""
        return holder_of_pool(self.name)

    def draw(self, *key: object) -> PolicyVersion:
        """The opponent of a group; where prioritised by (1 - win rate)², PFSP's hard one (Vinyals et al., 2019)."""
        versions = self.drawn_from()
        if self.choose == "latest":
            return versions[-1]
        weights = [1.0] * len(versions)
        if self.choose == "prioritised":
            weights = [(1.0 - self.tallies.get(version, Tally()).win_rate) ** 2 for version in versions]
        at = stream("opponent", self.name, *key).random() * sum(weights)
        for version, weight in zip(versions, weights, strict=True):
            at -= weight
            if at < 0.0:
                return version
        return versions[-1]

    def drawn_from(self) -> list[PolicyVersion]:
        """The versions that opponents are drawn from, oldest first."""
        return self.served[-self.size :]

    def is_due(self, version: PolicyVersion) -> bool:
        """Whether a version that became current is to join; it joins later than its step if the pool had no place."""
        return version.step - version.step % self.every > self.served[-1].step and len(self.served) <= self.size

    def count(self, header: EpisodeHeader) -> GameResult | None:
        """Count a committed episode; returns its result if it was played against a version of this pool."""
        result = header.result(self.of, self.name)
        if result is not None:
            self.tallies[result.opponent] = self.tallies.get(result.opponent, Tally()).plus(result.score)
        return result


@dataclass(slots=True, kw_only=True, eq=False)
class Opponents:
    """The opponent pools of a run: keeps their versions served, draws one per root group, counts results.

    Pools are in the manifest, so a rollback restores them. The drawn version is pinned in the episode's spec, so
    journal, resume, replay and forks know it. Win rates are a fold of committed headers. Loading the files at the start
    is up to `app/recovery.py`.
    """

    pools: Mapping[str, OpponentPool]
    versions: ServedVersions
    run_seed: int
    pinned: Callable[[], Collection[PolicyVersion]]
    """Returns the versions that episodes in flight are pinned to."""
    counts: Counts
    checkpoints: int
    """Number of newest checkpoints that a run may resume from."""
    _saved: deque[Mapping[str, Sequence[PolicyVersion]]] = field(init=False)
    """The pools at the newest checkpoints."""

    def __post_init__(self) -> None:
        self._saved = deque([self.drawn_from()], maxlen=self.checkpoints)

    def pins(self, group: int) -> dict[str, PolicyVersion]:
        """The version each pool plays with in a root group: its members are compared, so they meet the same one."""
        return {name: pool.draw(self.run_seed, group) for name, pool in self.pools.items()}

    def resumable(self, spec: EpisodeSpec) -> EpisodeSpec:
        """The spec with which an episode of a previous attempt continues: with the newest opponent if its own is
        gone."""
        gone = {
            name: pool.served[-1]
            for name, pool in self.pools.items()
            if name in spec.pins and spec.pins[name] not in pool.served
        }
        return spec.pinned({**spec.pins, **gone}) if gone else spec

    async def add_version(self, weights: WeightsRef) -> None:
        """Add a version that became current to the pools it is due to join, and keep it served."""
        for pool in self.pools.values():
            if pool.of == weights.version.policy and pool.is_due(weights.version):
                await self.versions.pin(pool.holder, weights)
                pool.served.append(weights.version)
        self._unpin_unneeded()

    def record_result(self, header: EpisodeHeader) -> None:
        """Count the result of a training episode and unpin versions that no episode needs any more."""
        for name, pool in self.pools.items():
            result = pool.count(header) if header.committed else None
            if result is not None:
                self.counts.count_game(name, result.score)
        self._unpin_unneeded()

    def drawn_from(self) -> dict[str, Sequence[PolicyVersion]]:
        """The versions that opponents are drawn from, by pool; checkpoints store it, since it depends on stragglers."""
        return {name: pool.drawn_from() for name, pool in self.pools.items()}

    def record_checkpoint(self) -> None:
        """Record that a checkpoint was written with the present pools."""
        self._saved.append(self.drawn_from())

    def needed(self) -> set[PolicyVersion]:
        """Versions besides the pinned ones whose files must stay: a resumed run loads those of its checkpoints."""
        return {version for pools in self._saved for versions in pools.values() for version in versions}

    def _unpin_unneeded(self) -> None:
        """Unpin the version that has left its pool, once no episode in flight is pinned to it."""
        for pool in self.pools.values():
            if len(pool.served) > pool.size and pool.served[0] not in self.pinned():
                self.versions.unpin(pool.holder, pool.served.pop(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningBest:
    """The newest measurements of a metric, and its best running mean so far."""

    what: str = ""
    """Metric, policy and window; a run that is resumed with different ones starts over."""
    newest: tuple[float, ...] = ()
    """Measurements within the window, oldest first; larger is better."""
    best: float = -math.inf
    """The largest running mean."""
    versions: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """Version of every learning policy when `best` was reached; empty before the first mean."""

    def as_data(self) -> dict[str, Any]:
        """Return JSON data; floats round-trip exactly."""
        versions = {policy: [version.lineage, version.step] for policy, version in self.versions.items()}
        return {
            "what": self.what,
            "newest": list(self.newest),
            "best": self.best if self.versions else None,
            "versions": versions,
        }


NOT_MEASURED = RunningBest()


def read_running_best(data: Mapping[str, Any]) -> RunningBest:
    """Read what `RunningBest.as_data` wrote.

    Raises:
        KeyError: a field is missing.
        ValueError: a field is not valid.
    """
    versions = {
        policy: PolicyVersion(policy, int(lineage), int(step)) for policy, (lineage, step) in data["versions"].items()
    }
    newest = tuple(float(value) for value in data["newest"])
    best = float(data["best"]) if versions else -math.inf
    if not all(map(math.isfinite, [*newest, best] if versions else newest)):
        raise ValueError("a measurement is not finite")
    return RunningBest(what=str(data["what"]), newest=newest, best=best, versions=versions)


@dataclass(slots=True, kw_only=True)
class BestCheckpointTracker:
    """Tracks the versions at which the running mean of a metric was best, and says when that ends the run.

    The measurements are in the manifests of checkpoints, so a resumed run chooses as if it had never stopped. The files
    of the best versions stay on disk, also those named by a checkpoint that may still be resumed from.

    Example:
        >>> best = BestCheckpointTracker(metric="reward/mean", policy="solver", window=2, stop_fall=0.25)
        >>> for step, reward in enumerate([0.0, 1.0, 0.5, 0.0], start=1):
        ...     best.record_metrics("solver", {"reward/mean": reward}, {"solver": PolicyVersion("solver", 0, step)})
        >>> best.measured.best, best.measured.versions["solver"].step
        (0.75, 3)
        >>> best.why_stop()
        'reward/mean fell to 0.25, from 0.75 at its best'
    """

    metric: str = ""
    """Empty: nothing is tracked."""
    policy: str = ""
    """The policy whose metric it is."""
    over: str = ""
    """The held-out tasks that it is measured on: means over others are not compared."""
    smallest: bool = False
    """Whether smaller values are better."""
    window: int = 1
    """Number of measurements in the running mean."""
    stop_at: float | None = None
    """The run ends once the mean reaches this."""
    stop_fall: float | None = None
    """The run ends once the mean is worse than the best mean by more than this."""
    checkpoints: int = 1
    """Number of newest checkpoints that a run may resume from."""
    measured: RunningBest = NOT_MEASURED
    _saved: deque[RunningBest] = field(init=False)

    def __post_init__(self) -> None:
        what = f"{self._sign:+.0f} {self.metric} of {self.policy}, {self.window}{self.over and f', {self.over}'}"
        if self.measured.what != what:
            self.measured = RunningBest(what=what)
        self._saved = deque([self.measured], maxlen=self.checkpoints)

    def record_metrics(self, policy: str, metrics: Mapping[str, float], versions: Mapping[str, PolicyVersion]) -> None:
        """Record metrics of a policy; `versions` are the current ones of all learning policies."""
        value = metrics.get(self.metric, math.nan)
        if policy != self.policy or not math.isfinite(value):
            return
        newest = (*self.measured.newest, -value if self.smallest else value)[-self.window :]
        mean = math.fsum(newest) / len(newest)
        if len(newest) == self.window and mean > self.measured.best:
            self.measured = replace(self.measured, newest=newest, best=mean, versions=dict(versions))
        else:
            self.measured = replace(self.measured, newest=newest)

    def why_stop(self) -> str | None:
        """The reason to end the run, for people; None if there is none."""
        newest, best = self.measured.newest, self.measured.best
        if len(newest) < self.window or not self.metric:
            return None
        mean, sign = math.fsum(newest) / len(newest), self._sign
        if self.stop_at is not None and mean >= sign * self.stop_at:
            return f"{self.metric} reached {sign * mean:.4g}"
        if self.stop_fall is not None and mean < best - self.stop_fall:
            moved = "rose" if self.smallest else "fell"
            return f"{self.metric} {moved} to {sign * mean:.4g}, from {sign * best:.4g} at its best"
        return None

    def summary(self) -> dict[str, Any] | None:
        """The best mean so far and its steps, for people; None before the first mean."""
        if not self.measured.versions:
            return None
        steps = {policy: version.step for policy, version in self.measured.versions.items()}
        return {"metric": self.metric, "value": self._sign * self.measured.best, "steps": steps}

    @property
    def _sign(self) -> float:
        return -1.0 if self.smallest else 1.0

    def record_checkpoint(self) -> None:
        """Record that a checkpoint with the present measurements was written."""
        self._saved.append(self.measured)

    def needed(self) -> Iterator[PolicyVersion]:
        """Versions whose files must stay."""
        for measured in (self.measured, *self._saved):
            yield from measured.versions.values()
