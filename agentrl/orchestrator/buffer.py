"""The buffer: episodes enter whole, are released by their group's rule, and leave as units exactly once.

`EpisodeBuffer` owns every training episode between admission and its optimizer step, as headers only: token data stays
in the journal. A `GroupReleasePolicy` decides when members of a group are released and with which advantages:
`WholeGroupRelease` waits for all of them (`credit.release = "group"`), `FirstFinishersRelease` does not (`late`,
`episode`). The `Ledger` proves that no episode and no unit is lost or trained twice. This module does not handle
versions, capacity or execution.

Entry lifecycle: admit → record_end (committed or dropped) → released by its group: advantages → ready → pop → resolved
(trained or dropped). Invariants: a member is released once; a unit is popped at most once; the ledger balances after
every call.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from agentrl.core import ids
from agentrl.core.errors import AgentRLError, GroupTooSmallError
from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    FrozenGroupBaselines,
    RoleMeanAtAdmission,
    TrajectoryCredit,
    TrajectoryHeader,
    Unit,
)
from agentrl.credit.advantages import (
    Advantage,
    AdvantageEstimator,
    AdvantageFunction,
    AgentCredit,
    Group,
    GroupReleaseRule,
    advantages_to_go,
    baseline_members,
    leave_one_out,
    no_baseline,
    shrunk_advantage,
)
from agentrl.credit.baselines import RewardHistory, RewardInRole, SeatRole
from agentrl.observe.metrics import PASS_RATES
from agentrl.orchestrator.metrics import AS_TRAINED, NO_SIGNAL, TOO_FEW_MEMBERS, EpisodeTotals, SelectionBiasTracker


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

    @property
    def has_signal(self) -> bool:
        """Whether any advantage of the unit differs from 0."""
        return any(_has_signal(credit) for credit in self.unit.credits)


def _has_signal(credit: TrajectoryCredit) -> bool:
    return any(credit.turn_advantages or (credit.advantage,))


class UnitDrop(NamedTuple):
    """A unit that will not be trained, with the reason."""

    episode_id: str
    attempt: int
    policy: str
    reason: str


Credits = Mapping[tuple[str, str, int], TrajectoryCredit]
"""Credits, keyed by episode, seat and agent; absent for agents of a group that was too small to be compared."""


@dataclass(slots=True)
class OpenGroup:
    """Episodes that are compared with each other: the number that still run, and the headers of those that ended."""

    running: int
    size: int = 0
    """Number of members to be sampled; after a resume fewer may be left. 0 until the first is admitted."""
    task: str | None = None
    """Id of the root episode's task."""
    headers: list[EpisodeHeader] = field(default_factory=list)
    """Headers of the members that ended, dropped ones included, in order of their ends."""
    released: int = 0
    """Number of `headers` that have been released."""
    earlier: tuple[RoleMeanAtAdmission, ...] = ()
    """Mean rewards of the group's policies in earlier groups, when the group was admitted."""
    frozen: FrozenGroupBaselines | None = None
    squares: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Sums for each policy of a complete group: of its squared advantages, and of those that leave-one-out over the
    whole group would have given."""

    @property
    def committed(self) -> list[EpisodeHeader]:
        """Members that ended and were not dropped."""
        return [header for header in self.headers if header.committed]

    @property
    def late(self) -> int:
        """Number of members that still run while others have been released."""
        return self.running if self.released else 0

    def release_ended(self) -> Sequence[EpisodeHeader]:
        """Release all members that ended since the last release."""
        released, self.released = self.headers[self.released :], len(self.headers)
        return released


class GroupReleasePolicy(Protocol):
    """Decides when members of a group are released to the trainer, and with which credits."""

    compares: bool
    """Whether rewards are compared; if not, they are their own advantages."""

    def record_admission(self, spec: EpisodeSpec, group: OpenGroup) -> None:
        """Record that a member of a group has started."""
        ...

    def record_end(self, spec: EpisodeSpec, group: OpenGroup) -> tuple[Sequence[EpisodeHeader], Credits]:
        """Record the end of a member, the last of `group.headers`; return the members released, and their credits."""
        ...


class WholeGroupRelease:
    """Releases all members at once, when the last one has ended.

    Args:
        trainable: policies whose trajectories are compared.
        advantage: estimator over the agents of one policy in one seat.
        to_go: whether a turn's reward counts for that turn and earlier turns only.
        history: mean rewards of earlier groups, for estimators that use them; None: not used.
        weights: weights of named rewards, for estimators that use them separately.
    """

    def __init__(
        self,
        trainable: Iterable[str],
        advantage: AdvantageFunction | AdvantageEstimator,
        *,
        to_go: bool = False,
        history: RewardHistory | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._trainable = frozenset(trainable)
        self._advantage = advantage
        self._to_go = to_go
        self._history = history
        self._weights = weights or {}
        self._tasks: dict[str, str | None] = {}
        self.compares = advantage is not no_baseline

    def record_admission(self, spec: EpisodeSpec, group: OpenGroup) -> None:
        """Fix the mean rewards of earlier groups when the first member is admitted."""
        if self._history is not None:
            task = spec.task.id if spec.parent_id is None else self._tasks.get(spec.parent_id)
            self._tasks[spec.episode_id] = task
            if not group.size:
                group.task, group.earlier = task, _earlier_means(self._history, spec, task, self._trainable)

    def record_end(self, spec: EpisodeSpec, group: OpenGroup) -> tuple[Sequence[EpisodeHeader], Credits]:
        """Release the whole group, or no member."""
        self._tasks.pop(spec.episode_id, None)
        if group.running:
            return (), {}
        compared: dict[tuple[str, str], list[tuple[str, TrajectoryHeader]]] = {}
        for header in sorted(group.headers, key=lambda header: ids.episode_sort_key(header.episode_id)):
            # Keep this order, because floating-point sums depend on it.
            for trajectory in rewarded_trajectories(header, self._trainable):
                key = (trajectory.policy, trajectory.seat)
                compared.setdefault(key, []).append((header.episode_id, trajectory))
        earlier = {(policy, seat): mean for policy, seat, mean in group.earlier}
        credits: dict[tuple[str, str, int], TrajectoryCredit] = {}
        for (policy, seat), members in compared.items():
            whole = Group(
                rewards=tuple(trajectory.reward or 0.0 for _, trajectory in members),
                episodes=tuple(episode_id for episode_id, _ in members),
                turn_rewards=tuple(trajectory.turn_rewards for _, trajectory in members),
                named_rewards=tuple(trajectory.named_rewards for _, trajectory in members),
                turn_states=tuple(trajectory.states for _, trajectory in members),
                tokens=tuple(trajectory.tokens for _, trajectory in members),
                weights=self._weights,
                groups=(spec.group_id,) * len(members),
                policy=policy,
                seat=seat,
                environment=spec.environment,
                history=earlier.get((policy, seat)),
            )
            try:
                found = self._credited(whole)
            except GroupTooSmallError:
                if len(set(whole.episodes)) >= group.size:
                    raise  # nothing was lost, so every such group would be too small
                found = ()
            for (episode_id, t), credited in zip(members, found, strict=bool(found)):
                credit = TrajectoryCredit(t.seat, t.index, t.reward or 0.0, *credited, t.named_rewards)
                credits[episode_id, t.seat, t.index] = credit
            if self._history is not None:
                role = SeatRole(policy, spec.environment, seat)
                self._history.add(group.task, [RewardInRole(role, reward) for reward in whole.rewards])
        return group.release_ended(), credits

    def _credited(self, group: Group) -> Sequence[AgentCredit]:
        """Compute the advantage of each agent of a group."""
        to_go = self._to_go and any(group.turn_rewards)
        if isinstance(self._advantage, AdvantageEstimator):
            return self._advantage.to_go(group) if to_go else self._advantage(group)
        by_turn: Sequence[tuple[float, ...]] = [()] * len(group.rewards)
        if to_go:
            by_turn = advantages_to_go(self._advantage, group.rewards, group.turn_rewards, group.episodes)
        advantages = self._advantage(group.rewards, group.episodes)
        return [AgentCredit(*found, turns) for found, turns in zip(advantages, by_turn, strict=True)]


def _earlier_means(
    history: RewardHistory, spec: EpisodeSpec, task: str | None, trainable: Collection[str]
) -> tuple[RoleMeanAtAdmission, ...]:
    """Return the mean rewards of the policies of a group at its admission, in the order of its seats."""
    means = [
        (binding.policy, seat, history.mean(SeatRole(binding.policy, spec.environment, seat), task))
        for seat, binding in sorted(spec.seats.items())
        if binding.policy in trainable
    ]
    return tuple(RoleMeanAtAdmission(policy, seat, mean) for policy, seat, mean in means if mean is not None)


class FirstFinishersRelease:
    """Releases the first finishers together and every later member when it ends; the first fix the baseline set.

    Args:
        trainable: policies whose trajectories are compared.
        rule: number of members to wait for.
        history: mean rewards of earlier groups.
        freeze: called with every baseline set before any unit compared with it is ready.
        frozen: baseline sets that a previous attempt of the run fixed, by group.
        compares: whether rewards are compared; if not, they are their own advantages.
    """

    def __init__(
        self,
        trainable: Iterable[str],
        rule: GroupReleaseRule,
        *,
        history: RewardHistory,
        freeze: Callable[[FrozenGroupBaselines], None],
        frozen: Mapping[str, FrozenGroupBaselines],
        compares: bool = True,
    ) -> None:
        self._trainable = frozenset(trainable)
        self._rule = rule
        self._history = history
        self._freeze = freeze
        self._frozen = dict(frozen)
        self.compares = compares
        self._tasks: dict[str, str | None] = {}

    def record_admission(self, spec: EpisodeSpec, group: OpenGroup) -> None:
        """Fix the mean rewards of earlier groups when the first member is admitted."""
        task = spec.task.id if spec.parent_id is None else self._tasks.get(spec.parent_id)
        self._tasks[spec.episode_id] = task
        if group.size:
            return
        group.task = task
        group.frozen = self._frozen.pop(spec.group_id, None)
        group.earlier = _earlier_means(self._history, spec, task, self._trainable)

    def record_end(self, spec: EpisodeSpec, group: OpenGroup) -> tuple[Sequence[EpisodeHeader], Credits]:
        """Release no member, or all waiting members that can be compared with the frozen baseline set."""
        self._tasks.pop(spec.episode_id, None)
        if group.running and len(group.headers) < self._rule.waited_for(group.size):
            return (), {}
        committed = {header.episode_id: header for header in group.committed}
        if group.frozen is None and (len(committed) >= self._rule.waited_for(group.size) or not group.running):
            group.frozen = FrozenGroupBaselines(
                spec.group_id, tuple(committed)[: self._rule.waited_for(group.size)], group.earlier
            )
            self._freeze(group.frozen)
        if not group.running:
            self._history.add(group.task, self._rewarded(spec.environment, committed.values()))
        if group.frozen is None or not committed.keys() >= set(group.frozen.finishers):
            return (), {}
        released = group.release_ended()
        first = [committed[name] for name in group.frozen.finishers]
        if group.running or not self.compares:
            return released, dict(self._credits(released, first, group.frozen))
        credits = dict(self._credits(group.committed, first, group.frozen))
        group.squares = self._squares(group.committed, credits)
        return released, credits

    def _squares(self, members: Iterable[EpisodeHeader], credits: Credits) -> dict[str, tuple[float, float]]:
        """Compute `OpenGroup.squares` for a complete group."""
        compared: dict[tuple[str, str], list[tuple[str, TrajectoryHeader]]] = {}
        for header in members:
            for own in rewarded_trajectories(header, self._trainable):
                compared.setdefault((own.policy, own.seat), []).append((header.episode_id, own))
        squares: dict[str, tuple[float, float]] = {}
        for (policy, _), found in compared.items():
            whole = leave_one_out([own.reward or 0.0 for _, own in found], [episode_id for episode_id, _ in found])
            given = (credits[episode_id, own.seat, own.index].advantage for episode_id, own in found)
            before = squares.get(policy, (0.0, 0.0))
            squares[policy] = (
                before[0] + math.fsum(value**2 for value in given),
                before[1] + math.fsum(advantage.value**2 for advantage in whole),
            )
        return squares

    def _credits(
        self, released: Sequence[EpisodeHeader], first: Sequence[EpisodeHeader], frozen: FrozenGroupBaselines
    ) -> Iterator[tuple[tuple[str, str, int], TrajectoryCredit]]:
        earlier = {(policy, seat): mean for policy, seat, mean in frozen.earlier}
        by_episode = {header.episode_id: header for header in first}
        for header in released:
            others = [by_episode[name] for name in baseline_members(frozen.finishers, header.episode_id)]
            for own in rewarded_trajectories(header, self._trainable):
                key = (own.policy, own.seat)
                rewards = [
                    t.reward or 0.0
                    for other in others
                    for t in rewarded_trajectories(other, {own.policy})
                    if t.seat == own.seat
                ]
                reward = own.reward or 0.0
                value, baseline = (
                    shrunk_advantage(reward, rewards, earlier.get(key)) if self.compares else Advantage(reward, 0.0)
                )
                credit = TrajectoryCredit(own.seat, own.index, reward, value, baseline)
                yield (header.episode_id, own.seat, own.index), credit

    def _rewarded(self, environment: str, headers: Iterable[EpisodeHeader]) -> Iterator[RewardInRole]:
        for header in headers:
            for own in rewarded_trajectories(header, self._trainable):
                yield RewardInRole(SeatRole(own.policy, environment, own.seat), own.reward or 0.0)


def rewarded_trajectories(header: EpisodeHeader, policies: frozenset[str] | set[str]) -> Iterator[TrajectoryHeader]:
    """Yield the trajectories of some policies that have a reward."""
    return (own for own in header.trajectories if own.policy in policies and own.reward is not None)


def reward_history_from_journal(
    members: Iterable[tuple[EpisodeSpec, EpisodeHeader]], open_groups: Collection[str]
) -> RewardHistory:
    """Fold the mean rewards of earlier groups from a journal.

    Args:
        members: every committed training episode, in order of commit.
        open_groups: groups that will end, or end again, in this attempt of the run; they are left out.
    """
    tasks: dict[str, str] = {}
    groups: dict[str, list[RewardInRole]] = {}
    parents: dict[str, str] = {}
    for spec, header in members:
        tasks[spec.episode_id] = spec.task.id
        if spec.group_id in open_groups:
            continue
        # Removing and adding again keeps groups in the order in which they ended.
        rewards = groups.pop(spec.group_id, [])
        for own in rewarded_trajectories(header, {own.policy for own in header.trajectories}):
            rewards.append(RewardInRole(SeatRole(own.policy, spec.environment, own.seat), own.reward or 0.0))
        groups[spec.group_id] = rewards
        parents[spec.group_id] = spec.episode_id.partition("~")[0]
    history = RewardHistory()
    for group_id, rewards in groups.items():
        history.add(tasks.get(parents[group_id]), rewards)
    return history


class EpisodeBuffer:
    """Groups of episodes on their way to a trainer.

    Args:
        trainable: policies whose units are trained; other policies only play.
        release: decides when members of a group are released, and with which baselines.
        resolved_before: units that a previous attempt of the run resolved, by (policy, episode id): None if trained,
            else the drop reason. They serve as baselines for their siblings, and are never trained again.
        selection_bias: metrics by policy; informed of every admission, end and resolution.
        drops_no_signal: whether the units of a group in which no unit of their policy has an advantage are dropped.
    """

    def __init__(
        self,
        trainable: Iterable[str],
        release: GroupReleasePolicy,
        *,
        resolved_before: Mapping[tuple[str, str], str | None] | None = None,
        selection_bias: Mapping[str, SelectionBiasTracker] | None = None,
        drops_no_signal: bool = False,
    ) -> None:
        self.trainable = frozenset(trainable)
        """Policies whose units are trained."""
        self.release = release
        self._resolved_before = dict(resolved_before or {})
        self.selection_bias = dict(selection_bias or {})
        self._drops_no_signal = drops_no_signal
        self.without_signal: Counter[str] = Counter()
        """Units of each policy dropped as `no_signal` or `too_few_members` since a unit of it last became ready."""
        self.on_group: Callable[[EpisodeSpec, Sequence[EpisodeHeader]], None] = lambda spec, headers: None
        """Callback for a complete group, with the spec of the member that ended last and all headers."""
        self._groups: dict[str, OpenGroup] = {}
        self._ready: dict[str, deque[ReadyUnit]] = {policy: deque() for policy in self.trainable}
        self._in_flight: Counter[str] = Counter()
        """Number of units of running episodes, by policy."""
        self._late: Counter[str] = Counter()
        """See `late`."""
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
        self.ledger = Ledger()
        self.counts = EpisodeTotals()
        """Counts of the episodes that ended since the run began."""

    # --- entering ---------------------------------------------------------------------------------------------------

    def admit(self, spec: EpisodeSpec, members: int | None = None) -> None:
        """Record that an episode has started. Its group is complete when `members` of it have ended.

        Args:
            spec: the episode.
            members: number of members of its group that run; None: `group_size`. After a resume fewer may run, because
                dropped members do not return.
        """
        running = spec.group_size if members is None else members
        group = self._groups.setdefault(spec.group_id, OpenGroup(running))
        self.release.record_admission(spec, group)  # before `size` is set: 0 marks the group's first member
        group.size = spec.group_size
        self.ledger.admitted += 1
        self.ledger.in_flight += 1
        for policy in self.policies_of(spec):
            self._in_flight[policy] += 1
            self._begun[policy][spec.episode_id] = began = self._consumed[policy]
            self._beginnings[policy][began] = self._beginnings[policy].get(began, 0) + 1
            if policy in self.selection_bias:
                self.selection_bias[policy].record_admission(spec)

    def record_end(self, spec: EpisodeSpec, header: EpisodeHeader) -> list[UnitDrop]:
        """Record that an admitted episode ended; returns the units dropped because of it."""
        drops: list[UnitDrop] = []
        self.ledger.in_flight -= 1
        policies = self.policies_of(spec)
        for policy in policies & self.selection_bias.keys():
            self.selection_bias[policy].record_end(policy, header)
        if header.committed:
            self._commit(header, drops)
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
        drops += self._drop_uncompared(released, credits)
        if self._drops_no_signal:
            drops += self._drop_without_signal(released, credits)
        for member in released:
            self._make_ready(member, credits, group, spec.environment)
        if group.running == 0:
            del self._groups[spec.group_id]
            self.on_group(spec, group.headers)
            self._count_pass_rate(group.headers)
            self._count_states(group.headers)
            for policy, (given, whole) in group.squares.items():
                self.counts.count_squared_advantages(policy, given, whole)
        return drops

    def _commit(self, header: EpisodeHeader, drops: list[UnitDrop]) -> None:
        self.ledger.ready += 1
        policies = {trajectory.policy for trajectory in header.trajectories} & self.trainable
        self._unresolved[header.episode_id] = set(policies)
        for policy in sorted(policies):
            self.ledger.units_committed[policy] += 1
            self.ledger.units_ready[policy] += 1
            if (policy, header.episode_id) in self._resolved_before:
                reason = self._resolved_before[policy, header.episode_id]
                self._resolve(header.episode_id, policy, reason=reason)
            elif any(t.reward is None for t in header.trajectories if t.policy == policy):
                drops.append(UnitDrop(header.episode_id, header.attempt, policy, "no_reward"))
                self._resolve(header.episode_id, policy, reason="no_reward")
        if not policies:
            self._close_episode(header.episode_id, reason="frozen")

    def _drop_uncompared(self, released: Sequence[EpisodeHeader], credits: Credits) -> list[UnitDrop]:
        """Drop the units of members that have agents without a credit."""
        drops = []
        for header in released:
            for policy in sorted(self._unresolved.get(header.episode_id, ())):
                own = (t for t in header.trajectories if t.policy == policy)
                if not all((header.episode_id, t.seat, t.index) in credits for t in own):
                    drops.append(UnitDrop(header.episode_id, header.attempt, policy, TOO_FEW_MEMBERS))
                    self._resolve(header.episode_id, policy, reason=TOO_FEW_MEMBERS)
                    self.without_signal[policy] += 1
        return drops

    def _drop_without_signal(self, released: Sequence[EpisodeHeader], credits: Credits) -> list[UnitDrop]:
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
                drops.append(UnitDrop(header.episode_id, header.attempt, policy, NO_SIGNAL))
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
            self._ready[policy].append(ReadyUnit(unit, own, environment, self._is_alone(unit, group)))

    def _is_alone(self, unit: Unit, group: OpenGroup) -> bool:
        """Whether a unit's rewards needed a comparison and no other member got a reward in the same seats."""
        if not self.release.compares or any(credit.advantage for credit in unit.credits):
            return False
        seats = {credit.seat for credit in unit.credits}
        others = (header for header in group.headers if header.episode_id != unit.episode_id)
        return not any(own.seat in seats for other in others for own in rewarded_trajectories(other, {unit.policy}))

    def _count_pass_rate(self, headers: Sequence[EpisodeHeader]) -> None:
        """Count the pass rate of a group of child episodes, if rewards lie in [0, 1]; dropped members are ignored."""
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
        """Remove and return up to `count` ready units, oldest release first; resolve each by `consume` or `drop`."""
        queue = self._ready[policy]
        return [queue.popleft() for _ in range(min(count, len(queue)))]

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
        for ready in units:
            self._consumed[ready.unit.policy] += 1
            self._resolve(ready.unit.episode_id, ready.unit.policy, reason=None)

    def drop(self, units: Iterable[ReadyUnit], reason: str) -> list[UnitDrop]:
        """Record that popped units will not be trained."""
        drops = []
        for ready in units:
            drops.append(UnitDrop(ready.unit.episode_id, ready.unit.attempt, ready.unit.policy, reason))
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
        beginnings, began = self._beginnings[policy], self._begun[policy].pop(episode_id)
        beginnings[began] -= 1
        if not beginnings[began]:
            del beginnings[began]

    def _close_episode(self, episode_id: str, *, reason: str) -> None:
        del self._unresolved[episode_id]
        self.ledger.ready -= 1
        if episode_id in self._trained:
            self._trained.discard(episode_id)
            self.ledger.trained += 1
        else:
            self.ledger.dropped[reason] += 1

    def policies_of(self, spec: EpisodeSpec) -> set[str]:
        """Return the trainable policies that hold a seat of an episode."""
        return {binding.policy for binding in spec.seats.values()} & self.trainable
