"""The journal's interface: the records of the control log, and the writers of both logs.

A run has one *control* log with one writer (admissions, commits, drops, versions, steps, metrics) and one *turn* log
(partition) per worker. `append` and `record` never block and never raise for a full disk: the failure surfaces at the
next `flush` or `commit`, which wait until everything before them is on disk.

There are two journals behind this interface: `journal.store` in SQLite, and `journal.memory`. Both are read through
`journal.run_log.RunLog`. A worker on another host than the run's writes its turn log over a connection
(`cluster.journal_stream`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from agentrl.core.ports import PolicyCounts
from agentrl.core.records import FrozenGroupBaselines, GroupScores, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentrl.core.records import (
        EpisodeHeader,
        EpisodeSpec,
        ForkPoint,
        PolicyVersion,
        StepReport,
        TrainBatch,
        WeightsRef,
    )
    from agentrl.core.tokens import RoutingReference
    from agentrl.journal.entries import JournalEntry


# --- records of the control log ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """An admitted episode."""

    spec: EpisodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Repinning:
    """Other versions to which a running attempt is pinned, in the place of its admission."""

    spec: EpisodeSpec
    admitted_at: float
    seq: int


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """A committed or dropped episode."""

    spec: EpisodeSpec
    header: EpisodeHeader
    digest: bytes = b""
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    counts: Mapping[str, PolicyCounts] | None = None
    """Turns and metrics of each policy that acted; None: each has all turns and metrics."""

    @property
    def counted(self) -> Mapping[str, PolicyCounts]:
        """Turns and metrics of each policy that acted."""
        all_of_them = PolicyCounts(self.header.turns, dict(self.metrics))
        return self.counts or dict.fromkeys((each.policy for each in self.header.trajectories), all_of_them)

    @property
    def distinct_counts(self) -> Mapping[str, PolicyCounts] | None:
        """`counts`, or None if that says the same."""
        is_plain = list(self.counted.values()) == [PolicyCounts(self.header.turns, dict(self.metrics))]
        return None if is_plain else self.counts


@dataclass(frozen=True, slots=True)
class EvaluationBegun:
    """An evaluation beside training or between steps, or the rest of one that an earlier process began."""

    first: int
    """Number that the root episode of the first task has, or would have."""
    lineage: int
    """Lineage of the process, whose code and settings give the rewards."""
    versions: Mapping[str, PolicyVersion]
    tasks: int
    """Digest of the tasks."""


@dataclass(frozen=True, slots=True)
class EvaluationEnded:
    """An evaluation whose tasks have all been played; `first` is that of its newest beginning."""

    first: int


@dataclass(frozen=True, slots=True)
class UnitDropped:
    """A committed unit that will not be trained on."""

    episode_id: str
    attempt: int
    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class VersionPublication:
    """A published version, and the version it was made from."""

    weights: WeightsRef
    parent: PolicyVersion | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """An optimizer step, and the units that it consumed. It is recorded with its version, atomically."""

    report: StepReport
    version: PolicyVersion
    """Version that the step made."""
    batch: TrainBatch


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Metric values at a step of a policy; NaN and infinity are stored as NULL."""

    policy: str
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPruning:
    """An attempt whose entries are about to be removed."""

    episode_id: str
    attempt: int
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePruning:
    """A file of step columns that is about to be removed."""

    file: str
    rule: str


ControlRecord = (
    Admission
    | Repinning
    | EpisodeEnd
    | EvaluationBegun
    | EvaluationEnded
    | UnitDropped
    | Proposal
    | FrozenGroupBaselines
    | GroupScores
    | VersionPublication
    | StepRow
    | MetricRow
    | AttemptPruning
    | FilePruning
)

UNNUMBERED = (Repinning, MetricRow, AttemptPruning, FilePruning)
"""Kinds of records that have no number in the order of the log."""


# --- pruning ----------------------------------------------------------------------------------------------------------


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
        steps = {policy: [cut[policy].step for cut in self.sealed if policy in cut] for policy in self.sealed[0]}
        return {policy: max(min(newest - self.keep, newest, *older), 0) for policy, (newest, *older) in steps.items()}


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
    """Last step whose data may be removed, by policy."""


# --- writers ---------------------------------------------------------------------------------------------------------


class TurnLog(Protocol):
    """One worker's partition."""

    name: str
    """File name of the partition, relative to the journal directory."""

    def append(self, entry: JournalEntry) -> None:
        """Queue an entry; on disk with the next group commit (at most 200 ms later)."""
        ...

    def store_routing(self, episode_id: str, attempt: int, routing: bytes) -> RoutingReference | None:
        """Store the encoded routing of a turn beside the journal, before its entry is appended; see `journal.routing`.

        Returns:
            Its name; None: the entry must hold it.
        """
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
            JournalError: the attempt cannot be read, or this partition holds other entries of it.
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


class WorkerTurnLog(TurnLog, Protocol):
    """The partition of a worker process, which owns it from opening to `close`."""

    async def advanced(self) -> Sequence[str]:
        """Return the episodes that were taken over and have new entries on disk; each is returned once.

        Raises:
            StorageError: see `flush`.
        """
        ...

    def check(self) -> None:
        """Check whether a write has failed, without waiting.

        Raises:
            StorageError: a write failed; nothing queued since the last success counts as written.
        """
        ...

    async def close(self) -> None:
        """Flush and release. Idempotent."""
        ...


class CommitLog(Protocol):
    """Records the end of an episode."""

    async def commit(self, end: EpisodeEnd) -> None:
        """Record a committed or dropped episode with its query columns, once its entries are on disk; wait until it is
        durable.

        Of `detail`, which explains to people why the episode was dropped, at most 4,000 characters are kept, the first
        line and the last ones.
        """
        ...


class JournalStore(ABC):
    """Writes a run's journal: the orchestrator's interface.

    `record` takes every kind of control record. Only an episode's end, which waits for its entries, has a method of its
    own: `commit` (see `CommitLog`).
    """

    apply: Callable[[ControlRecord], None] = staticmethod(lambda record: None)
    """Receives each record when it is queued, in the order of the log: it changes the state of the run's loop."""

    @abstractmethod
    def turn_log(self, worker: str) -> TurnLog:
        """Return the partition of a worker, created if missing."""

    def record(self, *records: ControlRecord) -> None:
        """Queue records, atomically: after a crash all of them are on disk, or none. Then apply them."""
        self.write(*records)
        for record in records:
            self.apply(record)

    @abstractmethod
    def write(self, *records: ControlRecord) -> None:
        """Queue records."""

    @abstractmethod
    async def commit(self, end: EpisodeEnd) -> None: ...

    @abstractmethod
    async def prune(self, rule: PruneRule, *, should_stop: Callable[[], bool] = lambda: False) -> PruneTotals:
        """Remove the tokens and step columns that a rule allows, recording it before anything is removed.

        Raises:
            StorageError: writing failed.
        """

    @abstractmethod
    async def flush(self) -> None:
        """Wait until everything recorded is on disk."""

    @abstractmethod
    async def close(self) -> None:
        """Flush and release. Idempotent."""

    def admit(self, *specs: EpisodeSpec) -> None:
        """Record the admission of episodes, atomically.

        Raises:
            TypeError: the data of a task were changed and are no longer JSON; none is admitted.
        """
        self.record(*[Admission(spec=spec) for spec in specs])
