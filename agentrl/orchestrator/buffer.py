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
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
)
from agentrl.credit.release import Credits, GroupReleasePolicy, OpenGroup, rewarded_trajectories
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import UnitDropped
from agentrl.observe.metrics import PASS_RATES, metrics_owner, registered_metrics, with_unset_metrics
from agentrl.orchestrator.metrics import (
    NO_REWARD,
    NO_SIGNAL,
    TOO_FEW_MEMBERS,
    TREE_LOST,
    EpisodeTotals,
)

_WITHOUT_SIGNAL: Mapping[str | None, int] = {NO_SIGNAL: 1, TOO_FEW_MEMBERS: 1, NO_REWARD: 0, TRUNCATED: 0, TREE_LOST: 0}
"""Units without signal that each drop reason counts as; a unit with another fate was ready."""


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
        drops_no_signal: whether the units of a group in which no unit of their policy has an advantage are dropped.
        whole_groups: whether a step takes all ready units of a group, because its loss or estimator compares them.
    """

    def __init__(
        self,
        trainable: Iterable[str],
        release: GroupReleasePolicy,
        *,
        drops_no_signal: bool = False,
        whole_groups: bool = False,
    ) -> None:
        self.trainable = frozenset(trainable)
        """Policies whose units are trained."""
        self.release = release
        self.past: PastRun | None = None
        """What the journal knows of units, while the records of earlier processes are applied."""
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
        """Number of root episodes in flight, by task."""
        self._late: Counter[str] = Counter()
        """Number of units of running episodes whose group has released other members, by policy."""
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

    # --- entering ---------------------------------------------------------------------------------------------------

    def admit(self, spec: EpisodeSpec) -> None:
        """Record that an episode has started."""
        if spec.branched_from is not None:
            self._groups[spec.group_id].running += 1
        elif spec.group_id not in self._groups:
            frozen = None if self.past is None else self.past.baselines.get(spec.group_id)
            self._groups[spec.group_id] = OpenGroup(spec.group_size, frozen=frozen)
        group = self._groups[spec.group_id]
        if spec.branched_from is not None and spec.fork is not None:
            group.branches[spec.episode_id] = spec.fork
        else:
            group.main = spec
        self.release.record_admission(spec, group)  # before `size` is set: 0 marks the group's first member
        group.size = spec.group_size
        self.ledger.admitted += 1
        self.ledger.in_flight += 1
        for policy in self.policies_of(spec):
            self._in_flight[policy] += 1

    def record_end(self, spec: EpisodeSpec, header: EpisodeHeader) -> list[UnitDropped]:
        """Record that an admitted episode ended; returns the units dropped because of it."""
        drops: list[UnitDropped] = []
        self.ledger.in_flight -= 1
        policies = self.policies_of(spec)
        if header.committed:
            self._commit(header, drops)
        else:
            self.ledger.dropped[header.drop_reason or ""] += 1
            self._forget_metrics(header.episode_id)
        group = self._groups[spec.group_id]
        group.is_settled = self.past is not None and spec.group_id not in self.past.open_groups
        before = group.late
        group.running -= 1
        group.headers.append(header)
        released, credits = self.release.record_end(spec, group)
        for policy in policies:
            self._in_flight[policy] -= 1
            self._late[policy] += group.late - before
        released = _by_tree(released)
        for member in released:
            self._count_known_signal(member)
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

    def hold_metrics(
        self, episode_id: str, environment: str, counted: Mapping[str, PolicyCounts], learning: Collection[str]
    ) -> None:
        """Keep the turns and metrics of an episode that is about to end until its units are trained; the environment's
        own metrics for one policy, of those that are `learning`."""
        self._metrics_owners[episode_id] = owner = metrics_owner(learning, counted)
        if owner is not None:
            with_unset_metrics({episode_id: counted[owner].metrics}, {episode_id: environment}, self._metric_names)
        self._metrics[episode_id] = {
            policy: counts if policy == owner else PolicyCounts(counts.turns, registered_metrics(counts.metrics))
            for policy, counts in counted.items()
            if policy in self.trainable
        }

    def _commit(self, header: EpisodeHeader, drops: list[UnitDropped]) -> None:
        self.ledger.ready += 1
        policies = {trajectory.policy for trajectory in header.trajectories} & self.trainable
        self._unresolved[header.episode_id] = set(policies)
        for policy in sorted(policies):
            self.ledger.units_committed[policy] += 1
            self.ledger.units_ready[policy] += 1
            if self.past is not None and (policy, header.episode_id) in self.past.fates:
                self._resolve(header.episode_id, policy, reason=self.past.fates[policy, header.episode_id])
            elif without := [t for t in header.trajectories if t.policy == policy and t.reward is None]:
                reason = TRUNCATED if header.drops_as_truncated(without[0]) else NO_REWARD
                drops.append(UnitDropped(header.episode_id, header.attempt, policy, reason))
                self._resolve(header.episode_id, policy, reason=reason)
        if not policies:
            self._close_episode(header.episode_id, reason="frozen")

    def _count_known_signal(self, header: EpisodeHeader) -> None:
        """Count released units without signal that an earlier process of the run resolved."""
        if self.past is None:
            return
        for policy in self.trainable.intersection(own.policy for own in header.trajectories):
            counted = _WITHOUT_SIGNAL.get(self.past.fates.get((policy, header.episode_id), NO_REWARD))
            self.without_signal[policy] = 0 if counted is None else self.without_signal[policy] + counted

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
            )
            is_alone = self._is_alone(unit, group)
            self._ready[policy].append(ReadyUnit(unit, own, environment, is_alone, header.sampled_by, header.group_id))

    def _is_alone(self, unit: Unit, group: OpenGroup) -> bool:
        """Whether a unit's rewards needed a comparison and no other member got a reward in the same seats."""
        if not self.release.compares or any(credit.advantage for credit in unit.credits):
            return False
        seats = {credit.seat for credit in unit.credits}
        others = (header for header in group.headers if header.episode_id != unit.episode_id)
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

    def outstanding(self, policy: str) -> int:
        """Return the number of units that may still be trained: of running episodes, of unreleased groups, ready, or in
        a step."""
        return self._in_flight[policy] + self.ledger.units_ready[policy]

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
        if reason is None:
            self.ledger.units_consumed[policy] += 1
            self._trained.add(episode_id)
        else:
            self.ledger.units_dropped[policy] += 1
        unresolved = self._unresolved[episode_id]
        unresolved.discard(policy)
        if not unresolved:
            self._close_episode(episode_id, reason=reason or "")

    def _close_episode(self, episode_id: str, *, reason: str) -> None:
        del self._unresolved[episode_id]
        self._forget_metrics(episode_id)
        self.ledger.ready -= 1
        if episode_id in self._trained:
            self._trained.discard(episode_id)
            self.ledger.trained += 1
        else:
            self.ledger.dropped[reason] += 1

    def _forget_metrics(self, episode_id: str) -> None:
        self._metrics.pop(episode_id, None)
        self._metrics_owners.pop(episode_id, None)

    def policies_of(self, spec: EpisodeSpec) -> set[str]:
        """Return the trainable policies to whose steps an episode may give a unit: those that hold a seat of it."""
        return {binding.policy for binding in spec.seats.values()} & self.trainable
