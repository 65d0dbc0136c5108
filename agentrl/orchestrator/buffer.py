"""The buffer: episodes enter whole, are released by their group's rule, and leave as units exactly once.

`EpisodeBuffer` owns every training episode between admission and its optimizer step, as headers only: token data stays
in the journal. A `GroupReleasePolicy` (`credit/release.py`) decides when members of a group are released and with which
advantages. The `Ledger` proves that no episode and no unit is lost or trained twice. This module does not handle
versions, capacity or execution.

Entry lifecycle: admit → record_end (committed or dropped) → released by its group: advantages → ready → pop → resolved
(trained or dropped). Invariants: a unit is popped at most once; the ledger balances after every call.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from agentrl.core import ids
from agentrl.core.errors import AgentRLError
from agentrl.core.ports import PolicyCounts
from agentrl.core.records import (
    TRUNCATED,
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    PolicyVersion,
    TrajectoryCredit,
    TrajectoryHeader,
    Unit,
    stopped_by_limit,
)
from agentrl.credit.release import Credits, GroupReleasePolicy, OpenGroup, rewarded_trajectories
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import UnitDropped
from agentrl.observe.metrics import PASS_RATES, metrics_owner, registered_metrics, with_unset_metrics
from agentrl.orchestrator.metrics import (
    AS_TRAINED,
    NO_SIGNAL,
    PROBE,
    TOO_FEW_MEMBERS,
    TREE_LOST,
    EpisodeTotals,
    SelectionBiasTracker,
    restore_selection_bias,
)


class LedgerError(AgentRLError):
    """The ledger does not balance: a bug, never a user's mistake."""


@dataclass(slots=True)
class Ledger:
    """Two equations that prove no episode and no unit is lost or trained twice.

        episodes, children counted:  admitted  = in_flight + ready + trained + dropped
        units of each policy:        committed = ready + consumed + dropped

    An episode is ready until its last unit is resolved; trained if one was consumed, dropped otherwise.
    """

    admitted: int = 0
    in_flight: int = 0
    ready: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped episodes by reason; `frozen` if no policy of the episode was trainable."""
    units_committed: Counter[str] = field(default_factory=Counter)
    """Number of committed units, by policy; the next three fields count by policy too."""
    units_ready: Counter[str] = field(default_factory=Counter)
    units_consumed: Counter[str] = field(default_factory=Counter)
    units_dropped: Counter[str] = field(default_factory=Counter)

    def as_data(self) -> dict[str, Any]:
        """Return the counts as JSON data."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}

    def check(self) -> None:
        """Compare both sides of each equation.

        Raises:
            LedgerError: an equation does not hold.
        """
        if self.admitted != self.in_flight + self.ready + self.trained + self.dropped.total():
            raise LedgerError(f"admitted = in_flight + ready + trained + dropped does not hold: {self}")
        for policy, committed in self.units_committed.items():
            resolved = self.units_consumed[policy] + self.units_dropped[policy]
            if committed != self.units_ready[policy] + resolved:
                raise LedgerError(f"policy {policy}: committed = ready + consumed + dropped does not hold: {self}")


class ReadyUnit(NamedTuple):
    """A unit that waits for its step, with the data of its episode for credit and metrics."""

    unit: Unit
    trajectories: tuple[TrajectoryHeader, ...]
    environment: str = ""
    is_alone: bool = False
    """Whether no other episode could be compared with this one, so that the advantage is 0."""
    sampled_by: tuple[PolicyVersion, ...] = ()
    """Oldest versions that sampled the episode and the children it waited for."""
    group_id: str = ""

    @property
    def tree(self) -> str:
        """Id of the main episode of the unit's tree; units of a tree enter one step."""
        return ids.main_episode_id(self.unit.episode_id)

    @property
    def has_signal(self) -> bool:
        """Whether any advantage of the unit differs from 0."""
        return any(_has_signal(credit) for credit in self.unit.credits)


def _by_tree(released: Sequence[EpisodeHeader]) -> list[EpisodeHeader]:
    """Return members with those of a tree together, trees in the order of their first ends."""
    trees: dict[str, list[EpisodeHeader]] = {}
    for header in released:
        trees.setdefault(ids.main_episode_id(header.episode_id), []).append(header)
    return [header for tree in trees.values() for header in tree]


def _has_signal(credit: TrajectoryCredit) -> bool:
    return any(credit.turn_advantages or (credit.advantage,))


class EpisodeBuffer:
    """Groups of episodes on their way to a trainer.

    Args:
        trainable: policies whose units are trained; other policies only play.
        release: decides when members of a group are released, and with which baselines.
        selection_bias: metrics by policy; informed of every admission, end and resolution.
        drops_no_signal: whether the units of a group in which no unit of their policy has an advantage are dropped.
        whole_groups: whether a step takes all ready units of a group, because its loss or estimator compares them.
    """

    def __init__(
        self,
        trainable: Iterable[str],
        release: GroupReleasePolicy,
        *,
        selection_bias: Mapping[str, SelectionBiasTracker] | None = None,
        drops_no_signal: bool = False,
        whole_groups: bool = False,
    ) -> None:
        self.trainable = frozenset(trainable)
        """Policies whose units are trained."""
        self.release = release
        self._resolved_before: dict[tuple[str, str], str | None] = {}
        """Units that a previous attempt of the run resolved, by (policy, episode id): None if trained, else the drop
        reason. They serve as baselines for their siblings, and are never trained again."""
        self.selection_bias = dict(selection_bias or {})
        self._drops_no_signal = drops_no_signal
        self._whole_groups = whole_groups
        self.without_signal: Counter[str] = Counter()
        """Units of each policy dropped as `no_signal` or `too_few_members` since a unit of it last became ready."""
        self.on_group: Callable[[EpisodeSpec, Sequence[EpisodeHeader]], None] = lambda spec, headers: None
        """Callback for a complete group, with the spec of a member and the headers of all, branches left out."""
        self._groups: dict[str, OpenGroup] = {}
        self._ready: dict[str, deque[ReadyUnit]] = {policy: deque() for policy in self.trainable}
        self._in_flight: Counter[str] = Counter()
        """Number of units of running episodes, by policy."""
        self._tasks: Counter[str] = Counter()
        """Number of root episodes in flight, by task."""
        self._late: Counter[str] = Counter()
        """Number of units of running episodes whose group has released other members, by policy."""
        self._consumed: Counter[str] = Counter()
        """Number of units trained in this attempt of the run, by policy."""
        self._begun: dict[str, dict[str, int]] = {policy: {} for policy in self.trainable}
        """Value of `_consumed` when an outstanding unit began, keyed by policy and episode."""
        self._beginnings: dict[str, OrderedDict[int, int]] = {policy: OrderedDict() for policy in self.trainable}
        """Number of outstanding units that began at each value of `_consumed`, smallest first, keyed by policy."""
        self._unresolved: dict[str, set[str]] = {}
        """Policies whose unit is neither trained nor dropped, keyed by committed episode."""
        self._trained: set[str] = set()
        """Episodes with unresolved units of which one was trained."""
        self._metrics: dict[str, dict[str, PolicyCounts]] = {}
        """Turns and metrics of each trainable policy, keyed by episode, until all units of the episode are resolved."""
        self._metrics_owners: dict[str, str | None] = {}
        """Policies whose steps report the environment's own metrics, keyed by the same episodes."""
        self._metric_names: dict[str, dict[str, None]] = {}
        """Names of the metrics that each environment has set so far, in order."""
        self.ledger = Ledger()
        self.counts = EpisodeTotals()
        """Counts of the episodes that ended, and of those that were trained, since the run began."""

    def restore(self, past: PastRun) -> None:
        """Restore what later credits and metrics depend on. The episodes themselves are admitted by the dispatcher."""
        self.release.restore(past)
        self._resolved_before = dict(past.resolved_units({spec.episode_id for spec, _ in past.ended}))
        restore_selection_bias(self.selection_bias, past)

    # --- entering ---------------------------------------------------------------------------------------------------

    def admit(self, spec: EpisodeSpec, members: int | None = None) -> None:
        """Record that an episode has started. Its group is complete when `members` of it have ended.

        Args:
            spec: the episode.
            members: number of members of its group that run; None: `group_size`. After a resume fewer may run, because
                dropped members do not return.
        """
        running = spec.group_size if members is None else members
        if members is None and spec.branched_from is not None:
            self._groups[spec.group_id].running += 1
        group = self._groups.setdefault(spec.group_id, OpenGroup(running))
        if spec.branched_from is not None and spec.fork is not None:
            group.branches[spec.episode_id] = spec.fork
        else:
            group.main = spec
        self.release.record_admission(spec, group)  # before `size` is set: 0 marks the group's first member
        group.size = spec.group_size
        self.ledger.admitted += 1
        self.ledger.in_flight += 1
        if spec.parent_id is None:
            self._tasks[spec.task.id] += 1
        for policy in self.policies_of(spec):
            self._in_flight[policy] += 1
            self._begun[policy][spec.episode_id] = began = self._consumed[policy]
            self._beginnings[policy][began] = self._beginnings[policy].get(began, 0) + 1
            if policy in self.selection_bias:
                self.selection_bias[policy].record_admission(spec)

    def record_end(self, spec: EpisodeSpec, header: EpisodeHeader) -> list[UnitDropped]:
        """Record that an admitted episode ended; returns the units dropped because of it."""
        drops: list[UnitDropped] = []
        self.ledger.in_flight -= 1
        if spec.parent_id is None:
            self._tasks[spec.task.id] -= 1
            if not self._tasks[spec.task.id]:
                del self._tasks[spec.task.id]
        policies = self.policies_of(spec)
        for policy in policies & self.selection_bias.keys():
            self.selection_bias[policy].record_end(policy, header)
        if header.committed:
            self._commit(header, drops, is_probe=spec.is_probe)
        else:
            self.ledger.dropped[header.drop_reason or ""] += 1
        for policy in policies - {trajectory.policy for trajectory in header.trajectories}:
            self._remove_outstanding(policy, header.episode_id)
        group = self._groups[spec.group_id]
        before = group.late
        group.running -= 1
        group.headers.append(header)
        released, credits = self.release.record_end(spec, group)
        for policy in policies:
            self._in_flight[policy] -= 1
            self._late[policy] += group.late - before
        released = _by_tree(released)
        drops += self._drop_uncompared(released, credits, group.branches)
        if self._drops_no_signal:
            drops += self._drop_without_signal(released, credits)
        for member in released:
            self._make_ready(member, credits, group, spec.environment)
        if group.running == 0:
            del self._groups[spec.group_id]
            self.on_group(group.main or spec, group.mains)
            self._count_pass_rate(group.mains)
            self._count_states(group.headers)
            for policy, (given, whole) in group.squares.items():
                self.counts.count_squared_advantages(policy, given, whole)
        return drops

    def hold_metrics(self, episode_id: str, counted: Mapping[str, PolicyCounts], learning: Collection[str]) -> None:
        """Keep the turns and metrics of an episode that is about to end until its units are trained; the environment's
        own metrics for one policy, of those that are `learning`."""
        self._metrics_owners[episode_id] = owner = metrics_owner(learning, counted)
        self._metrics[episode_id] = {
            policy: counts if policy == owner else PolicyCounts(counts.turns, registered_metrics(counts.metrics))
            for policy, counts in counted.items()
            if policy in self.trainable
        }

    def _commit(self, header: EpisodeHeader, drops: list[UnitDropped], *, is_probe: bool) -> None:
        self.ledger.ready += 1
        policies = {trajectory.policy for trajectory in header.trajectories} & self.trainable
        self._unresolved[header.episode_id] = set(policies)
        for policy in sorted(policies):
            self.ledger.units_committed[policy] += 1
            self.ledger.units_ready[policy] += 1
            if (policy, header.episode_id) in self._resolved_before:
                reason = self._resolved_before[policy, header.episode_id]
                self._resolve(header.episode_id, policy, reason=reason)
            elif is_probe:
                drops.append(UnitDropped(header.episode_id, header.attempt, policy, PROBE))
                self._resolve(header.episode_id, policy, reason=PROBE)
            elif without := [t for t in header.trajectories if t.policy == policy and t.reward is None]:
                reason = TRUNCATED if header.drops_as_truncated(without[0]) else "no_reward"
                drops.append(UnitDropped(header.episode_id, header.attempt, policy, reason))
                self._resolve(header.episode_id, policy, reason=reason)
        if not policies:
            self._close_episode(header.episode_id, reason="frozen")

    def _drop_uncompared(
        self, released: Sequence[EpisodeHeader], credits: Credits, branches: Collection[str]
    ) -> list[UnitDropped]:
        """Drop the units of members that have agents without a credit; those of branches have lost their tree."""
        drops = []
        for header in released:
            for policy in sorted(self._unresolved.get(header.episode_id, ())):
                own = (t for t in header.trajectories if t.policy == policy)
                if not all((header.episode_id, t.seat, t.index) in credits for t in own):
                    reason = TREE_LOST if header.episode_id in branches else TOO_FEW_MEMBERS
                    drops.append(UnitDropped(header.episode_id, header.attempt, policy, reason))
                    self._resolve(header.episode_id, policy, reason=reason)
                    self.without_signal[policy] += reason == TOO_FEW_MEMBERS
        return drops

    def _drop_without_signal(self, released: Sequence[EpisodeHeader], credits: Credits) -> list[UnitDropped]:
        """Drop the units of a whole group in which no unit of their policy has an advantage."""
        trajectories = [(header.episode_id, own) for header in released for own in header.trajectories]
        found = [(own.policy, credits.get((episode_id, own.seat, own.index))) for episode_id, own in trajectories]
        with_signal = {policy for policy, credit in found if credit is not None and _has_signal(credit)}
        drops = []
        for policy in sorted({policy for policy, _ in found} & self.trainable):
            units = [header for header in released if policy in self._unresolved.get(header.episode_id, ())]
            if policy in with_signal:
                continue
            for header in units:
                drops.append(UnitDropped(header.episode_id, header.attempt, policy, NO_SIGNAL))
                self._resolve(header.episode_id, policy, reason=NO_SIGNAL)
            self.without_signal[policy] += len(units)
            if units:
                self.counts.count_without_signal(policy)
        return drops

    def _make_ready(self, header: EpisodeHeader, credits: Credits, group: OpenGroup, environment: str) -> None:
        for policy in sorted(self._unresolved.get(header.episode_id, ())):
            self.without_signal[policy] = 0
            own = tuple(t for t in header.trajectories if t.policy == policy)
            unit = Unit(
                episode_id=header.episode_id,
                attempt=header.attempt,
                policy=policy,
                location=header.location or EpisodeDataLocation("", 0),
                credits=tuple(credits[header.episode_id, t.seat, t.index] for t in own),
                is_cut=stopped_by_limit(header.stop_reason),
            )
            is_alone = self._is_alone(unit, group)
            self._ready[policy].append(ReadyUnit(unit, own, environment, is_alone, header.sampled_by, header.group_id))

    def _is_alone(self, unit: Unit, group: OpenGroup) -> bool:
        """Whether a unit's rewards needed a comparison and no other member got a reward in the same seats."""
        if not self.release.compares or any(credit.advantage for credit in unit.credits):
            return False
        seats = {credit.seat for credit in unit.credits}
        ignored = {name for name, point in group.branches.items() if point.probe or point.resample_weight}
        ignored.add(unit.episode_id)
        others = (header for header in group.headers if header.episode_id not in ignored)
        return not any(own.seat in seats for other in others for own in rewarded_trajectories(other, {unit.policy}))

    def _count_pass_rate(self, headers: Sequence[EpisodeHeader]) -> None:
        """Count the pass rate of a group of child episodes, if rewards are in [0, 1]; dropped members are ignored."""
        rewards = [header.reward for header in headers if header.parent_id is not None and header.reward is not None]
        if rewards and min(rewards) >= 0.0 and max(rewards) <= 1.0:
            mean = math.fsum(rewards) / len(rewards)
            # A range includes its lower end; that below 0.8 also its upper one, so that `FRONTIER` includes both ends.
            inside = 1 + min(int(mean * 5), 3 if mean <= 0.8 else 4)
            self.counts.count_pass_rate(PASS_RATES[0 if mean == 0 else -1 if mean == 1 else inside])

    def _count_states(self, headers: Sequence[EpisodeHeader]) -> None:
        """Count the turns of a group by anchor state, if the run's advantage compares turns."""
        compared = [own for header in headers for own in rewarded_trajectories(header, self.trainable)]
        met = Counter((own.policy, own.seat, state) for own in compared for state in own.states)
        for (policy, _, _), turns in met.items():
            self.counts.count_state(policy, turns)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def ready(self, policy: str) -> int:
        """Return the number of units that were released and wait for a step."""
        return len(self._ready[policy])

    def running(self, group_id: str) -> int:
        """Return the number of members of an open group whose ends have not been recorded."""
        return self._groups[group_id].running

    def running_of_task(self, task_id: str) -> int:
        """Return the number of root episodes of a task whose ends have not been recorded."""
        return self._tasks[task_id]

    def outstanding(self, policy: str) -> int:
        """Return the number of units that may still be trained: of running episodes, of unreleased groups, ready, or in
        a step."""
        return self._in_flight[policy] + self.ledger.units_ready[policy]

    def overtaken(self, policy: str) -> int:
        """Return the number of units trained since the oldest outstanding one began."""
        beginnings = self._beginnings[policy]
        return self._consumed[policy] - next(iter(beginnings)) if beginnings else 0

    def late(self, policy: str) -> int:
        """Return the number of units of running episodes whose group has released other members."""
        return self._late[policy]

    def pop_ready(self, policy: str, count: int) -> list[ReadyUnit]:
        """Remove and return `count` ready units, oldest release first, and the rest of the last one's tree, or of its
        group with `whole_groups`; fewer if fewer are ready. Resolve each by `consume` or `drop`."""
        queue, taken = self._ready[policy], list[ReadyUnit]()

        def is_of_last(ready: ReadyUnit) -> bool:
            last = taken[-1]
            return ready.tree == last.tree or (self._whole_groups and ready.group_id == last.group_id)

        while queue and (len(taken) < count or (taken and is_of_last(queue[0]))):
            taken.append(queue.popleft())
        return taken

    def pop_ready_where(self, policy: str, wanted: Callable[[ReadyUnit], bool]) -> list[ReadyUnit]:
        """Remove and return the `wanted` ready units, oldest release first; resolve each by `consume` or `drop`."""
        queue = self._ready[policy]
        taken = [ready for ready in queue if wanted(ready)]
        self._ready[policy] = deque(ready for ready in queue if not wanted(ready))
        return taken

    def put_back(self, policy: str, units: Sequence[ReadyUnit]) -> None:
        """Put popped units back, before all other ready units."""
        self._ready[policy].extendleft(reversed(units))

    def consume(self, units: Iterable[ReadyUnit]) -> None:
        """Record that popped units were trained. Advantage 0 counts as consumed."""
        units = list(units)
        own = {
            ready.unit.episode_id: self._metrics[ready.unit.episode_id][ready.unit.policy].metrics
            for ready in units
            if self._metrics_owners.get(ready.unit.episode_id) == ready.unit.policy
        }
        environments = {ready.unit.episode_id: ready.environment for ready in units}
        own = with_unset_metrics(own, environments, self._metric_names)
        for ready in units:
            policy = ready.unit.policy
            self._consumed[policy] += 1
            if counts := self._metrics.get(ready.unit.episode_id, {}).get(policy):
                if self._metrics_owners[ready.unit.episode_id] == policy:
                    counts = counts._replace(metrics=own[ready.unit.episode_id])
                self.counts.count_trained(policy, ready.trajectories, counts)
            self._resolve(ready.unit.episode_id, ready.unit.policy, reason=None)

    def drop(self, units: Iterable[ReadyUnit], reason: str) -> list[UnitDropped]:
        """Record that popped units will not be trained."""
        drops = []
        for ready in units:
            drops.append(UnitDropped(ready.unit.episode_id, ready.unit.attempt, ready.unit.policy, reason))
            self._resolve(ready.unit.episode_id, ready.unit.policy, reason=reason)
        return drops

    def _resolve(self, episode_id: str, policy: str, *, reason: str | None) -> None:
        self.ledger.units_ready[policy] -= 1
        self._remove_outstanding(policy, episode_id)
        if policy in self.selection_bias:
            self.selection_bias[policy].record_resolution(episode_id, trained=reason in AS_TRAINED)
        if reason is None:
            self.ledger.units_consumed[policy] += 1
            self._trained.add(episode_id)
        else:
            self.ledger.units_dropped[policy] += 1
        unresolved = self._unresolved[episode_id]
        unresolved.discard(policy)
        if not unresolved:
            self._close_episode(episode_id, reason=reason or "")

    def _remove_outstanding(self, policy: str, episode_id: str) -> None:
        """Record that a unit is no longer outstanding."""
        beginnings, began = self._beginnings[policy], self._begun[policy].pop(episode_id, None)
        if began is None:
            return  # the unit of a probe
        beginnings[began] -= 1
        if not beginnings[began]:
            del beginnings[began]

    def _close_episode(self, episode_id: str, *, reason: str) -> None:
        del self._unresolved[episode_id]
        self._metrics.pop(episode_id, None)
        self._metrics_owners.pop(episode_id, None)
        self.ledger.ready -= 1
        if episode_id in self._trained:
            self._trained.discard(episode_id)
            self.ledger.trained += 1
        else:
            self.ledger.dropped[reason] += 1

    def policies_of(self, spec: EpisodeSpec) -> set[str]:
        """Return the trainable policies to whose steps an episode may give a unit: those that hold a seat of it."""
        if spec.is_probe:
            return set()
        return {binding.policy for binding in spec.seats.values()} & self.trainable
