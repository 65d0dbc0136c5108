"""The `JournalStore` port: the interface of the loop and the workers to durable storage.

A run has one *control* log with one writer (admissions, commits, drops, versions, steps, metrics) and one *turn* log
(partition) per worker. `append` and the `record_*` calls never block and never raise for a full disk: the failure
surfaces at the next `flush`/`commit_episode`, which wait until everything before them is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.core.ports import CommitLog

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from agentrl.core.records import (
        EpisodeHeader,
        EpisodeSpec,
        ForkPoint,
        FrozenGroupBaselines,
        PolicyVersion,
        Proposal,
        StepReport,
        TrainBatch,
        WeightsRef,
    )
    from agentrl.journal.entries import JournalEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The control log's record of one optimizer step."""

    report: StepReport
    version: PolicyVersion
    """Version that the step made."""
    batch: TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRule:
    """The rule by which checkpoints and steps determine the data that may be pruned."""

    keep: int
    """Number of newest steps of each policy, up to the newest checkpoint, whose tokens and columns are kept."""
    sealed: Sequence[Mapping[str, PolicyVersion]]
    """Versions of every checkpoint that can be resumed from, newest first."""

    def __str__(self) -> str:
        return f"keep = {self.keep}"

    @property
    def last(self) -> dict[str, int]:
        """Return, per policy, the last step whose tokens and columns may be removed."""
        if not self.sealed:
            return {}
        newest = self.sealed[0]
        steps = {
            policy: min([version.step - self.keep, *(held[policy].step for held in self.sealed if policy in held)])
            for policy, version in newest.items()
        }
        return {policy: max(step, 0) for policy, step in steps.items()}


@dataclass(slots=True, kw_only=True)
class PruneTotals:
    """Totals of a pruning, or of a dry run."""

    rule: str
    episodes: int = 0
    """Number of attempts."""
    files: int = 0
    """Number of files of step columns."""
    bytes: int = 0
    """Bytes of entries, partials and files; the file system gets back slightly less, because of partly filled pages."""
    last: Mapping[str, int] = field(default_factory=dict)
    """See `PruneRule.last`."""


class TurnLog(Protocol):
    """One worker's partition."""

    name: str
    """File name of the partition, relative to the journal directory."""

    def append(self, entry: JournalEntry) -> None:
        """Queue an entry; on disk with the next group commit (at most 200 ms later)."""
        ...

    async def flush(self) -> None:
        """Wait until all appended entries are on disk.

        Raises:
            StorageError: writing failed; nothing appended since the last success counts as written.
        """
        ...

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Return the entries of an attempt on disk, in the order in which they were appended.

        Raises:
            JournalError: they cannot be read, or are damaged.
        """
        ...

    async def take_over(self, episode_id: str, attempt: int) -> None:
        """Copy an attempt from another partition if that holds more of its entries; they are on disk on return.

        Call it only if the other partition's writer is dead, or no longer runs the attempt, which continues here.

        Raises:
            JournalError: the attempt cannot be read.
            StorageError: the disk failed.
        """
        ...

    def append_partial(self, entry: JournalEntry) -> None:
        """Queue tokens of a turn in progress (`PartialTurnTokens`), which a commit does not count or digest."""
        ...

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        """Queue the removal of the partials of a call, or of a whole attempt, that are on disk by then."""
        ...

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Return the undamaged partials of an episode on disk, in the order in which they were appended."""
        ...

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        """Return the entries before a fork point, from whichever journal holds them; see `journal.reader`.

        Raises:
            JournalError: the entries cannot be read.
        """
        ...


class JournalStore(CommitLog, Protocol):
    """The run's durable log: the orchestrator's interface."""

    def turn_log(self, worker: str) -> TurnLog:
        """Return the partition of a worker, created if missing."""
        ...

    def admit(self, *specs: EpisodeSpec) -> None:
        """Record the admission of episodes, atomically: after a crash all of them were admitted, or none."""
        ...

    def record_drop(self, episode_id: str, attempt: int, policy: str, reason: str) -> None:
        """Record that a committed unit will not be trained."""
        ...

    def record_proposal(self, proposal: Proposal) -> None:
        """Record a proposal for the run's memory."""
        ...

    def record_baselines(self, baselines: FrozenGroupBaselines) -> None:
        """Record the baselines of a group's members, before a step that consumes one of them."""
        ...

    def record_version(self, weights: WeightsRef, parent: PolicyVersion | None) -> None:
        """Record a published version."""
        ...

    def record_step(self, row: StepRow) -> None:
        """Record an optimizer step and that its units were consumed by it."""
        ...

    def record_metrics(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        """Record metric values at a step of a policy."""
        ...

    async def prune(self, rule: PruneRule, *, stopped: Callable[[], bool] = ...) -> PruneTotals:
        """Remove the tokens and step columns that a rule allows, recording it before anything is removed.

        Raises:
            StorageError: writing failed.
        """
        ...

    async def flush(self) -> None:
        """Wait until everything recorded is on disk."""
        ...

    async def close(self) -> None:
        """Flush and release. Idempotent."""
        ...


class RunLog(Protocol):
    """The reading side of a run's control log, for resume: a pure function of its records."""

    def verify(self) -> None:
        """Check the whole log before a run resumes from it.

        Raises:
            JournalError: a record is damaged.
        """
        ...

    def next_number(self, prefix: str) -> int:
        """Return one more than the largest number of a root episode `<prefix><number>` in admissions or turn logs."""
        ...

    def lost_numbers(self, prefix: str, stop: int) -> Sequence[int]:
        """Return the numbers below `stop` of root episodes `<prefix><number>` whose admission never reached the
        disk.
        """
        ...

    def published(self, version: PolicyVersion) -> WeightsRef | None:
        """Return the location of a version's weights; None if it was never published."""
        ...

    def ready_units(self, consumed_through: Mapping[str, PolicyVersion]) -> Iterator[tuple[EpisodeSpec, EpisodeHeader]]:
        """Yield committed training episodes with a unit neither consumed along the surviving lineage nor dropped."""
        ...

    def members(self, group_ids: Collection[str] | None = None) -> Iterator[tuple[EpisodeSpec, EpisodeHeader]]:
        """Yield committed training episodes of some groups, or all, in order of commit, whatever the fate of their
        units."""
        ...

    def dispatched(self, newest: int | None = None) -> Iterator[tuple[EpisodeSpec, EpisodeHeader | None]]:
        """Yield the newest training episodes, or all, in order of admission, at their newest attempts, with their
        headers; None if one has not ended."""
        ...

    def baselines(self) -> Mapping[str, FrozenGroupBaselines]:
        """Return the baselines of groups, keyed by group."""
        ...

    def against(self, policies: Collection[str]) -> Iterator[EpisodeHeader]:
        """Yield committed training episodes in which one of these policies acted."""
        ...

    def resolved_units(
        self, consumed_through: Mapping[str, PolicyVersion], among: Collection[str] | None = None
    ) -> Mapping[tuple[str, int, str], str | None]:
        """Map each resolved unit, (episode, attempt, policy), to None if it was consumed along the surviving lineage,
        else to its drop reason.

        Args:
            consumed_through: the manifest's version of each trainable policy.
            among: units of these episodes only.
        """
        ...

    def pruned(self, episodes: Collection[str]) -> Collection[tuple[str, int]]:
        """Return the attempts of these episodes whose entries were pruned."""
        ...

    def parents(self) -> Mapping[tuple[str, int], PolicyVersion]:
        """Return the version that each (policy, lineage) except the first started from."""
        ...

    def unfinished(self) -> Sequence[EpisodeSpec]:
        """Return the training episodes, children included, whose newest attempt was neither committed nor dropped."""
        ...

    def ended_children(self, parents: Collection[str]) -> Mapping[str, EpisodeHeader]:
        """Return the headers of the ended children of some episodes, by id; unfinished ones are left out."""
        ...

    def proposals(self, newest: int | None = None) -> Sequence[Proposal]:
        """Return the newest proposals that the run remembers, or all, and those of unfinished attempts, in recorded
        order.

        Proposals of dropped or replaced attempts are forgotten.
        """
        ...

    def recorded(self, episode_id: str, attempt: int) -> tuple[list[JournalEntry], list[JournalEntry]]:
        """Return the entries and partials of an attempt on disk, from whichever partition holds them.

        Raises:
            JournalError: the entries cannot be read.
        """
        ...

    def highest_lineage(self) -> int:
        """Return the largest lineage of any published version; -1 before the first."""
        ...

    def info(self) -> Mapping[str, Any]:
        """Return the run's identity: format, name, resolved configuration."""
        ...
