"""`JournalStore`, `TurnLog` and `RunLog` in memory, with the suspension points of the real ones and failures on demand.

Owns: the records, and how many of them are on disk. Records that are not flushed are invisible to readers and lost in
a crash.

1. `flush` and `commit_episode` yield to the loop before they take effect, so that interleavings exist.
2. A commit puts the entries on disk before itself; one that names entries which were never appended is refused.
3. Readers see only what is on disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core.errors import JournalError, StorageError
from agentrl.core.records import FrozenGroupBaselines, PolicyVersion, Proposal
from agentrl.journal.port import PruneTotals, StepRow
from agentrl.journal.reader import read_fork_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, WeightsRef
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.port import PruneRule

    PartialItem = JournalEntry | tuple[str, int, str | None]
    """A partial, or the key of partials to remove: episode, attempt and call (None: all calls)."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Record of an admitted episode."""

    spec: EpisodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """Record of a committed or dropped episode."""

    spec: EpisodeSpec
    header: EpisodeHeader
    digest: bytes
    metrics: Mapping[str, float]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitDropped:
    """Record of a committed unit that will not be trained on."""

    episode_id: str
    attempt: int
    policy: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublication:
    """Record of a published version."""

    weights: WeightsRef
    parent: PolicyVersion | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """Metric values at a step of a policy."""

    policy: str
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPruning:
    """Record of an attempt whose entries were deleted."""

    episode_id: str
    attempt: int
    rule: str


ControlRecord = (
    Admission
    | EpisodeEnd
    | UnitDropped
    | Proposal
    | FrozenGroupBaselines
    | VersionPublication
    | StepRow
    | MetricRow
    | AttemptPruning
)


@dataclass(slots=True)
class MemoryTurnLog:
    """Partition of one worker.

    Example:
        >>> from agentrl.testing.memory_journal import MemoryJournal
        >>> log = MemoryJournal().turn_log("worker-0")
        >>> log.name, log.read("e0", 0)
        ('turns-worker-0.db', [])
    """

    name: str
    entries: list[JournalEntry] = field(default_factory=list)
    """All appended entries, in order."""
    on_disk: int = 0
    """Number of entries that would survive a crash."""
    failing_flushes: Collection[int] = ()
    """Numbers of the calls of `flush`, counted from 1, that raise `StorageError`."""
    flushes: int = 0
    partials: list[PartialItem] = field(default_factory=list)
    """Every appended partial, and the key of every removal, in order."""
    partials_on_disk: int = 0
    """Number of partials that would survive a crash."""
    siblings: Mapping[str, MemoryTurnLog] = field(default_factory=dict)
    """All partitions of the journal, including this one."""
    _keys: set[tuple[str, int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._keys = {(entry.episode_id, entry.attempt, entry.call_id) for entry in self.entries}

    def append(self, entry: JournalEntry) -> None:
        """Queue an entry.

        Raises:
            JournalError: the call was journaled before.
        """
        key = (entry.episode_id, entry.attempt, entry.call_id)
        if key in self._keys:
            raise JournalError(f"episode {key[0]} attempt {key[1]}: call {key[2]} was journaled twice")
        self._keys.add(key)
        self.entries.append(entry)

    async def flush(self) -> None:
        """Yield, then put all entries appended before the call on disk.

        Raises:
            StorageError: the test requested it; entries appended since the last success do not count as written.
        """
        self.flushes += 1
        number, reached, partials = self.flushes, len(self.entries), len(self.partials)
        await asyncio.sleep(0)
        if number in self.failing_flushes:
            raise StorageError(f"no space left on the simulated disk (flush {number} of {self.name})")
        self.on_disk = max(self.on_disk, reached)
        self.partials_on_disk = max(self.partials_on_disk, partials)

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Return the entries on disk of an attempt, in the order they were appended."""
        return [e for e in self.entries[: self.on_disk] if e.episode_id == episode_id and e.attempt == attempt]

    async def take_over(self, episode_id: str, attempt: int) -> None:
        """Copy the entries of an attempt from another partition if it holds more than this one."""
        other = fullest_partition(self.siblings, episode_id, attempt)
        if other is None or other is self:
            return
        for entry in other.read(episode_id, attempt)[len(self.read(episode_id, attempt)) :]:
            self.append(entry)
        self.remove_partials(episode_id, attempt)
        for partial in other.read_partials(episode_id, attempt):
            self.append_partial(partial)
        await self.flush()

    def append_partial(self, entry: JournalEntry) -> None:
        """Queue the tokens of a turn that has not ended."""
        self.partials.append(entry)

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        """Queue the removal of a call's partials, or of all partials of an attempt."""
        self.partials.append((episode_id, attempt, call_id))

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Return the partials on disk of an attempt, in the order they were appended."""
        found: list[JournalEntry] = []
        for item in self.partials[: self.partials_on_disk]:
            if not isinstance(item, tuple):
                if (item.episode_id, item.attempt) == (episode_id, attempt):
                    found.append(item)
            elif item[:2] == (episode_id, attempt):
                found = [entry for entry in found if item[2] not in (None, entry.call_id)]
        return found

    def remove(self, attempts: Collection[tuple[str, int]]) -> None:
        """Delete the entries of some attempts from disk."""
        kept = [e for e in self.entries[: self.on_disk] if (e.episode_id, e.attempt) not in attempts]
        self.entries[: self.on_disk] = kept
        self.on_disk = len(kept)

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        """Return the entries of this partition before a fork point."""
        return read_fork_prefix(".", point, lambda _, at: self.read(at.episode_id, at.attempt))


def fullest_partition(logs: Mapping[str, MemoryTurnLog], episode_id: str, attempt: int) -> MemoryTurnLog | None:
    """Return the partition with the most entries of an attempt; see `TurnLogReader.partition_of`."""

    def held(log: MemoryTurnLog) -> tuple[int, int]:
        return len(log.read(episode_id, attempt)), len(log.read_partials(episode_id, attempt))

    best = max(logs.values(), key=held, default=None)
    return best if best is not None and any(held(best)) else None


class MemoryJournal:
    """Journal of a run in memory: `JournalStore` and `RunLog` in one.

    Args:
        info: identity of the run, returned by `RunLog.info`.
        failing_commits: numbers of the calls of `commit_episode`, counted from 1, that raise `StorageError` and record
            nothing.
        failing_flushes: numbers of the calls of `flush` of every turn log that raise `StorageError`.

    Example:
        >>> journal = MemoryJournal(failing_commits={3})
        >>> journal.next_number("e"), journal.highest_lineage()
        (0, -1)
    """

    def __init__(
        self,
        *,
        info: Mapping[str, Any] | None = None,
        failing_commits: Collection[int] = (),
        failing_flushes: Collection[int] = (),
    ) -> None:
        self.records: list[ControlRecord] = []
        """All records of the control log, in order."""
        self.turn_logs: dict[str, MemoryTurnLog] = {}
        """Turn logs, keyed by the worker's name."""
        self.closed = False
        self._on_disk = 0
        self._ended: set[tuple[str, int]] = set()
        self._info = dict(info or {})
        self._failing_commits = frozenset(failing_commits)
        self._failing_flushes = frozenset(failing_flushes)
        self._commits = 0

    # --- JournalStore -------------------------------------------------------------------------------------------------

    def turn_log(self, worker: str) -> MemoryTurnLog:
        """Return the partition of a worker; created if missing."""
        if worker not in self.turn_logs:
            self.turn_logs[worker] = MemoryTurnLog(
                f"turns-{worker}.db", failing_flushes=self._failing_flushes, siblings=self.turn_logs
            )
        return self.turn_logs[worker]

    def admit(self, *specs: EpisodeSpec) -> None:
        """Record the admission of episodes, all at once."""
        self._record(*[Admission(spec=spec) for spec in specs])

    async def commit_episode(
        self, spec: EpisodeSpec, header: EpisodeHeader, digest: bytes, metrics: Mapping[str, float], detail: str = ""
    ) -> None:
        """Record a committed or dropped episode once its entries are on disk, and wait for the disk.

        Raises:
            StorageError: the test requested it; nothing is recorded.
            JournalError: the header names entries that were never appended, or an episode that already ended.
        """
        self._commits += 1
        number = self._commits
        await asyncio.sleep(0)
        for log in self.turn_logs.values():
            await log.flush()
        if number in self._failing_commits:
            raise StorageError(f"no space left on the simulated disk (commit {number}, episode {spec.episode_id})")
        self._check_entries(header)
        key = (spec.episode_id, spec.attempt)
        if key in self._ended:
            raise JournalError(f"episode {spec.episode_id} attempt {spec.attempt} ended twice")
        self._record(EpisodeEnd(spec=spec, header=header, digest=digest, metrics=dict(metrics), detail=detail))
        self._ended.add(key)
        self._on_disk = len(self.records)

    def record_drop(self, episode_id: str, attempt: int, policy: str, reason: str) -> None:
        """Record that a committed unit will not be trained on."""
        self._record(UnitDropped(episode_id=episode_id, attempt=attempt, policy=policy, reason=reason))

    def record_proposal(self, proposal: Proposal) -> None:
        """Record a proposal for the run's memory."""
        self._record(proposal)

    def record_baselines(self, baselines: FrozenGroupBaselines) -> None:
        """Record the baselines of a group's members."""
        self._record(baselines)

    def record_version(self, weights: WeightsRef, parent: PolicyVersion | None) -> None:
        """Record a published version."""
        self._record(VersionPublication(weights=weights, parent=parent))

    def record_step(self, row: StepRow) -> None:
        """Record an optimizer step and the units it consumed."""
        self._record(row)

    def record_metrics(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        """Record metric values at a step of a policy."""
        self._record(MetricRow(policy=policy, step=step, values=dict(values)))

    async def prune(self, rule: PruneRule, *, stopped: Callable[[], bool] = lambda: False) -> PruneTotals:
        """Delete the entries that a rule releases, one partition after another."""
        given_up = PruneTotals(rule=str(rule), last=rule.last)
        settled = self._settled(rule)
        for log in self.turn_logs.values():
            attempts = settled & {(entry.episode_id, entry.attempt) for entry in log.entries[: log.on_disk]}
            if attempts and not stopped():
                given_up.episodes += len(attempts)
                self._record(
                    *[AttemptPruning(episode_id=name, attempt=number, rule=str(rule)) for name, number in attempts]
                )
                await self.flush()
                self._remove(log, attempts)
        return given_up

    def _settled(self, rule: PruneRule) -> set[tuple[str, int]]:
        """Return attempts that no kept checkpoint makes ready again and no kept step consumed."""
        if not rule.sealed:
            return set()
        kept = {
            (unit.episode_id, unit.attempt)
            for row in self.on_disk()
            if isinstance(row, StepRow) and row.version.step > rule.last.get(row.version.policy, 0)
            for unit in row.batch.units
        }
        newest = {record.spec.episode_id: record.spec.attempt for record in self.of_kind(Admission)}
        settled = {
            (record.spec.episode_id, record.spec.attempt)
            for record in self.on_disk()
            if isinstance(record, Admission) and record.spec.attempt < newest[record.spec.episode_id]
        }
        settled |= {
            (record.spec.episode_id, record.spec.attempt)
            for record in self.on_disk()
            if isinstance(record, EpisodeEnd) and record.spec.purpose == "train"
        }
        for versions in rule.sealed:
            settled -= {(header.episode_id, header.attempt) for _, header in self.ready_units(versions)}
        return settled - kept

    def _remove(self, log: MemoryTurnLog, attempts: Collection[tuple[str, int]]) -> None:
        log.remove(attempts)

    async def flush(self) -> None:
        """Yield, then put all records made before the call on disk."""
        reached = len(self.records)
        await asyncio.sleep(0)
        self._on_disk = max(self._on_disk, reached)

    async def close(self) -> None:
        """Flush; later records are refused. Idempotent."""
        for log in self.turn_logs.values():
            await log.flush()
        await self.flush()
        self.closed = True

    # --- RunLog -------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Do nothing, because memory is never damaged."""

    def next_number(self, prefix: str) -> int:
        """Return the largest number of a root episode with this prefix, plus one."""
        known = {r.spec.episode_id for r in self.on_disk() if isinstance(r, Admission)}
        known |= {entry.episode_id for log in self.turn_logs.values() for entry in log.entries[: log.on_disk]}
        numbers = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
        return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1

    def lost_numbers(self, prefix: str, stop: int) -> list[int]:
        """Return the numbers below `stop` of root episodes with this prefix whose admission is not on disk."""
        admitted = {r.spec.episode_id for r in self.on_disk() if isinstance(r, Admission)}
        return [number for number in range(stop) if f"{prefix}{number}" not in admitted]

    def published(self, version: PolicyVersion) -> WeightsRef | None:
        """Return the published weights of a version."""
        found = (
            r.weights for r in self.on_disk() if isinstance(r, VersionPublication) and r.weights.version == version
        )
        return next(found, None)

    def ended_children(self, parents: Collection[str]) -> dict[str, EpisodeHeader]:
        """Return the headers of the ended children of some episodes, by id."""
        ends = (r.header for r in self.on_disk() if isinstance(r, EpisodeEnd))
        return {header.episode_id: header for header in ends if header.parent_id in parents}

    def ready_units(self, consumed_through: Mapping[str, PolicyVersion]) -> Iterator[tuple[EpisodeSpec, EpisodeHeader]]:
        """Yield committed training episodes with a unit neither consumed along the surviving lineage nor dropped.

        Policies absent from `consumed_through` are frozen, and their units are never ready; if it is empty, all units
        may be ready.
        """
        resolved = self.resolved_units(consumed_through)
        for record in self.on_disk():
            if isinstance(record, EpisodeEnd) and record.spec.purpose == "train" and record.header.committed:
                header = record.header
                trained = {t.policy for t in header.trajectories}
                policies = trained & consumed_through.keys() if consumed_through else trained
                units = {(header.episode_id, header.attempt, policy) for policy in policies}
                if units - resolved.keys():
                    yield record.spec, header

    def members(self, group_ids: Collection[str] | None = None) -> Iterator[tuple[EpisodeSpec, EpisodeHeader]]:
        """Yield the committed training episodes of some groups, or all."""
        for record in self.on_disk():
            if not isinstance(record, EpisodeEnd) or not record.header.committed or record.spec.purpose != "train":
                continue
            if group_ids is None or record.spec.group_id in group_ids:
                yield record.spec, record.header

    def dispatched(self, newest: int | None = None) -> Iterator[tuple[EpisodeSpec, EpisodeHeader | None]]:
        """Yield the newest training episodes, or all, in order of admission, at their newest attempts, with their
        headers; None if not ended."""
        specs: dict[str, EpisodeSpec] = {}
        ends: dict[tuple[str, int], EpisodeHeader] = {}
        for record in self.on_disk():
            if isinstance(record, Admission) and record.spec.purpose == "train":
                specs[record.spec.episode_id] = record.spec
            elif isinstance(record, EpisodeEnd):
                ends[record.spec.episode_id, record.spec.attempt] = record.header
        for spec in list(specs.values())[0 if newest is None else max(len(specs) - newest, 0) :]:
            yield spec, ends.get((spec.episode_id, spec.attempt))

    def baselines(self) -> dict[str, FrozenGroupBaselines]:
        """Return the baseline sets by group; of two for one group, the first one."""
        return {
            record.group_id: record for record in reversed(self.on_disk()) if isinstance(record, FrozenGroupBaselines)
        }

    def against(self, policies: Collection[str]) -> Iterator[EpisodeHeader]:
        """Yield the committed training episodes in which one of these policies acted."""
        for record in self.on_disk():
            if isinstance(record, EpisodeEnd) and record.header.committed:
                yield from [record.header] * any(t.policy in policies for t in record.header.trajectories)

    def parents(self) -> dict[tuple[str, int], PolicyVersion]:
        """Return the version from which each (policy, lineage) except the first started."""
        return {
            (record.weights.version.policy, record.weights.version.lineage): record.parent
            for record in self.on_disk()
            if isinstance(record, VersionPublication)
            and record.parent is not None
            and record.parent.lineage < record.weights.version.lineage
        }

    def unfinished(self) -> Sequence[EpisodeSpec]:
        """Return the training episodes that have not ended, including children, in order of admission."""
        return [spec for spec, header in self.dispatched() if header is None]

    def proposals(self, newest: int | None = None) -> list[Proposal]:
        """Return the newest proposals in the run's memory, or all, and those of attempts that have not ended, in order.

        Proposals of attempts that were dropped, or that another attempt replaced, are left out.
        """
        made: dict[tuple[str, int, str], Proposal] = {}
        ended: dict[tuple[str, int], EpisodeHeader] = {}
        attempt: dict[str, int] = {}
        for record in self.on_disk():
            if isinstance(record, Proposal):
                made.setdefault(record.made_by, record)
            elif isinstance(record, Admission):
                attempt[record.spec.episode_id] = record.spec.attempt
            elif isinstance(record, EpisodeEnd):
                ended[record.spec.episode_id, record.spec.attempt] = record.header
        kept = [
            proposal
            for proposal in made.values()
            if proposal.attempt >= attempt.get(proposal.episode_id, 0)
            and ((header := ended.get(proposal.made_by[:2])) is None or header.committed)
        ]
        oldest = 0 if newest is None or len(kept) < newest else sorted(p.number for p in kept)[-newest]
        return [p for p in kept if p.number >= oldest or p.made_by[:2] not in ended]

    def recorded(self, episode_id: str, attempt: int) -> tuple[list[JournalEntry], list[JournalEntry]]:
        """Return the entries and partials on disk of an attempt, from any partition."""
        log = fullest_partition(self.turn_logs, episode_id, attempt)
        return ([], []) if log is None else (log.read(episode_id, attempt), log.read_partials(episode_id, attempt))

    def highest_lineage(self) -> int:
        """Return the largest lineage of any published version; -1 before the first."""
        return max((r.weights.version.lineage for r in self.on_disk() if isinstance(r, VersionPublication)), default=-1)

    def info(self) -> Mapping[str, Any]:
        """Return the run's identity."""
        return self._info

    # --- for tests ----------------------------------------------------------------------------------------------------

    def on_disk(self) -> list[ControlRecord]:
        """Return the control records that would survive a crash."""
        return self.records[: self._on_disk]

    def of_kind(self, kind: type[R]) -> list[R]:
        """Return all control records of one class, in order."""
        return [record for record in self.records if isinstance(record, kind)]

    def after_crash(self) -> MemoryJournal:
        """Return the journal that a new process would open: the records on disk, without further failures."""
        survivor = MemoryJournal(info=self._info)
        survivor.records = self.on_disk()
        survivor._on_disk = len(survivor.records)
        ends = (record for record in survivor.records if isinstance(record, EpisodeEnd))
        survivor._ended = {(end.spec.episode_id, end.spec.attempt) for end in ends}
        for worker, log in self.turn_logs.items():
            kept = log.entries[: log.on_disk]
            partials = log.partials[: log.partials_on_disk]
            survivor.turn_logs[worker] = MemoryTurnLog(
                log.name,
                entries=kept,
                on_disk=len(kept),
                partials=partials,
                partials_on_disk=len(partials),
                siblings=survivor.turn_logs,
            )
        return survivor

    def _record(self, *records: ControlRecord) -> None:
        if self.closed:
            raise JournalError(f"the journal is closed; refused records: {records}")
        self.records.extend(records)

    def _check_entries(self, header: EpisodeHeader) -> None:
        if header.location is None:
            return
        named = [log for log in self.turn_logs.values() if log.name == header.location.partition]
        found = sum(len(log.read(header.episode_id, header.attempt)) for log in named)
        if found != header.location.entries:
            raise JournalError(
                f"episode {header.episode_id} attempt {header.attempt}: {header.location.entries} entries named in "
                f"{header.location.partition}, {found} are there"
            )

    def pruned(self, episodes: Collection[str]) -> set[tuple[str, int]]:
        """Return the attempts of these episodes whose entries were deleted."""
        found = (record for record in self.on_disk() if isinstance(record, AttemptPruning))
        return {(record.episode_id, record.attempt) for record in found if record.episode_id in episodes}

    def resolved_units(
        self, consumed_through: Mapping[str, PolicyVersion], among: Collection[str] | None = None
    ) -> dict[tuple[str, int, str], str | None]:
        """Map each resolved unit, of all or some episodes, to None if it was consumed along the surviving lineage, else
        to its drop reason."""
        rows = [r for r in self.on_disk() if isinstance(r, StepRow)]
        parents: dict[PolicyVersion, PolicyVersion] = {
            r.weights.version: r.parent
            for r in self.on_disk()
            if isinstance(r, VersionPublication) and r.parent is not None
        }
        parents.update((row.version, row.report.started_from) for row in rows)
        surviving: set[PolicyVersion] = set()
        for version in consumed_through.values():
            at: PolicyVersion | None = version
            while at is not None and at not in surviving:
                surviving.add(at)
                at = parents.get(at)
        drops = [r for r in self.on_disk() if isinstance(r, UnitDropped)]
        resolved: dict[tuple[str, int, str], str | None] = {
            (d.episode_id, d.attempt, d.policy): d.reason for d in drops
        }
        for row in rows:
            if row.version in surviving:
                resolved.update(((unit.episode_id, unit.attempt, unit.policy), None) for unit in row.batch.units)
        return {key: why for key, why in resolved.items() if among is None or key[0] in among}
