"""The PolicyBoard: which version of each policy is current, and how old another one is; and how versions are published.

Invariants: weights are known to nobody but the trainer before the journal has their version on disk; steps of a lineage
only grow; a version is current only after the engine serves it; lineages form a tree through the version each one
started from, so that a version of a dead lineage is never taken for a fresh one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentrl.core.ports import Trainer
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.journal.port import JournalStore, StepRow


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
        """Steps between `version` and the current one; counted from the fork where it did not survive a rollback."""
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
        store: is told of them.
        version: their id.
        parent: the version they were made from; None for those a run begins with.
        step: what made them; None where a life of the run begins with them.

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
