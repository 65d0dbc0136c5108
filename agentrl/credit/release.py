"""The release of a group: when its members may be trained, and with which credits.

`WholeGroupRelease` waits for all members (`credit.release = "group"`). `FirstFinishersRelease` does not (`late`,
`episode`): the first m of K finishers are released together, with m fixed before any of them is sampled. Every later
one is released when it finishes. Each member is compared with the first m - 1 finishers *among the others*, with
weight 1.

This is unbiased, because a member's comparison set depends only on the others, whether it finished early or late. An
early member is compared with the other m - 1 of the first m, which are the first m - 1 of the others; a late one with
the first m - 1 of all. Its baseline is therefore independent of its own samples, and E[score · baseline] = 0. Comparing
a late member with all m would break this: its baseline would then depend on how long it took
(docs/explanation/off_policy.md).

Invariant: a member is released once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from agentrl.core import ids
from agentrl.core.errors import GroupTooSmallError
from agentrl.core.records import (
    EpisodeHeader,
    EpisodeSpec,
    ForkPoint,
    FrozenGroupBaselines,
    RoleMeanAtAdmission,
    TrajectoryCredit,
    TrajectoryHeader,
)
from agentrl.credit.baselines import RewardHistory, RewardInRole, SeatRole
from agentrl.credit.estimators import AdvantageEstimator
from agentrl.credit.group import Advantage, AdvantageFunction, AgentCredit, Group, Piece
from agentrl.credit.group_baselines import leave_one_out, no_baseline
from agentrl.credit.to_go import advantages_to_go
from agentrl.credit.trees import AgentKey, tree_credits

E = TypeVar("E", bound=Hashable)


Credits = Mapping[tuple[str, str, int], TrajectoryCredit]
"""Credits, keyed by episode, seat and agent; absent for agents of a group that was too small to be compared."""


@dataclass(slots=True)
class OpenGroup:
    """Episodes that are compared with each other: the number still running, and the headers of finished ones."""

    running: int
    size: int = 0
    """Number of members to be sampled; 0 until the first is admitted."""
    task: str | None = None
    """Id of the root episode's task."""
    main: EpisodeSpec | None = None
    """Spec of a member that is no branch."""
    headers: list[EpisodeHeader] = field(default_factory=list)
    """Headers of the members that ended, dropped ones included, in order of their ends."""
    released: int = 0
    """Number of `headers` that have been released."""
    earlier: tuple[RoleMeanAtAdmission, ...] = ()
    """Mean rewards of the group's policies in earlier groups, when the group was admitted."""
    frozen: FrozenGroupBaselines | None = None
    is_settled: bool = False
    """Whether all its units were trained or dropped by an earlier process of the run: no credit is needed."""
    branches: dict[str, ForkPoint] = field(default_factory=dict)
    """Calls that started members of the group as branches of other members, by the branch's id."""
    squares: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Sums for each policy of a complete group: of its squared advantages, and of those that leave-one-out over the
    whole group would have given."""

    @property
    def committed(self) -> list[EpisodeHeader]:
        """Members that ended and were not dropped."""
        return [header for header in self.headers if header.committed]

    @property
    def mains(self) -> list[EpisodeHeader]:
        """Members that ended and are no branches."""
        return [header for header in self.headers if header.episode_id not in self.branches]

    @property
    def lost_branches(self) -> set[str]:
        """Ids of the ended branches whose main episode was dropped, or was committed by another attempt."""
        attempts = {header.episode_id: header.attempt for header in self.mains if header.committed}
        ended = ((header.episode_id, self.branches.get(header.episode_id)) for header in self.headers)
        return {name for name, point in ended if point is not None and attempts.get(point.episode_id) != point.attempt}

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


class _RootTasks:
    """The tasks of the root episodes of running episodes."""

    def __init__(self) -> None:
        self._tasks: dict[str, str | None] = {}

    def record_start(self, spec: EpisodeSpec) -> str | None:
        """Return the id of the task of an episode's root; None if it is unknown."""
        task: str | None = spec.task.id
        if spec.parent_id is not None:
            task = self._tasks.get(spec.parent_id)
        self._tasks[spec.episode_id] = task
        return task

    def record_end(self, spec: EpisodeSpec) -> None:
        """Forget an episode, whose children have ended."""
        self._tasks.pop(spec.episode_id, None)


class WholeGroupRelease:
    """Releases all members at once, when the last one has ended.

    Args:
        trainable: policies whose trajectories are compared.
        advantage: estimator over the agents of one policy in one seat.
        to_go: whether a turn's reward counts for that turn and earlier turns only.
        uses_history: whether the estimator may use mean rewards of earlier groups.
        weights: weights of named rewards, for estimators that use them separately.
    """

    def __init__(
        self,
        trainable: Iterable[str],
        advantage: AdvantageFunction | AdvantageEstimator,
        *,
        to_go: bool = False,
        uses_history: bool = False,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._trainable = frozenset(trainable)
        self._advantage = advantage
        self._over_trees = isinstance(advantage, AdvantageEstimator) and advantage.mark.over == "tree"
        self._to_go = to_go
        self.history = RewardHistory() if uses_history else None
        """Mean rewards of earlier groups."""
        self._weights = weights or {}
        self._tasks = _RootTasks()
        self.compares = advantage is not no_baseline

    def record_admission(self, spec: EpisodeSpec, group: OpenGroup) -> None:
        """Fix the mean rewards of earlier groups when the first member is admitted."""
        if self.history is not None:
            task = self._tasks.record_start(spec)
            if not group.size:
                group.task, group.earlier = task, _earlier_means(self.history, spec, task, self._trainable)

    def record_end(self, spec: EpisodeSpec, group: OpenGroup) -> tuple[Sequence[EpisodeHeader], Credits]:
        """Release the whole group, or no member."""
        self._tasks.record_end(spec)
        if group.running:
            return (), {}
        compared: dict[tuple[str, str], list[tuple[str, TrajectoryHeader]]] = {}
        lost = group.lost_branches
        members_of_trees = (header for header in group.headers if header.episode_id not in lost)
        for header in sorted(members_of_trees, key=lambda header: ids.episode_sort_key(header.episode_id)):
            # Keep this order, because floating-point sums depend on it.
            for trajectory in rewarded_trajectories(header, self._trainable):
                key = (trajectory.policy, trajectory.seat)
                compared.setdefault(key, []).append((header.episode_id, trajectory))
        earlier = {(policy, seat): mean for policy, seat, mean in group.earlier}
        credits: dict[tuple[str, str, int], TrajectoryCredit] = {}
        for (policy, seat), found in compared.items():
            episodes = {episode_id for episode_id, _ in found}
            members = [
                (episode_id, agent)
                for episode_id, agent in found
                if episode_id not in group.branches or group.branches[episode_id].episode_id in episodes
            ]
            if not members:
                continue
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
            group_credits: Sequence[AgentCredit] = ()
            try:
                if not group.is_settled:
                    group_credits = self._credits_of(whole, members, group.branches)
            except GroupTooSmallError:
                started = group.size + len(group.branches)
                if len(set(whole.episodes)) >= started:
                    raise  # nothing was lost, so every such group would be too small
            for (episode_id, t), credited in zip(members, group_credits, strict=bool(group_credits)):
                credit = TrajectoryCredit(t.seat, t.index, t.reward or 0.0, *credited, t.named_rewards)
                credits[episode_id, t.seat, t.index] = credit
            if self.history is not None:
                role = SeatRole(policy, spec.environment, seat)
                mains = [trajectory for name, trajectory in members if name not in group.branches]
                self.history.add(group.task, [RewardInRole(role, main.reward or 0.0) for main in mains])
        return group.release_ended(), credits

    def _credits_of(
        self, whole: Group, members: Sequence[tuple[str, TrajectoryHeader]], branches: Mapping[str, ForkPoint]
    ) -> Sequence[AgentCredit]:
        """Compute the advantage of each agent of a group, from its trees if it has any."""
        if self._over_trees or any(name in branches for name, _ in members):
            return self._tree_credits(whole, members, branches)
        return self._credited(whole)

    def _tree_credits(
        self,
        whole: Group,
        members: Sequence[tuple[str, TrajectoryHeader]],
        branches: Mapping[str, ForkPoint],
    ) -> Sequence[AgentCredit]:
        """Compute the advantage of each agent of a group from its trees."""
        agents: list[AgentKey] = [(episode_id, member.seat, member.index) for episode_id, member in members]
        turn_rewards = whole.turn_rewards if self._to_go else ()
        estimator = self._advantage
        if not isinstance(estimator, AdvantageEstimator):
            return tree_credits(estimator, whole.rewards, agents, branches, turn_rewards)
        assert self._over_trees, "app.policies refuses it"

        def rule(rewards: Sequence[float], pieces: Sequence[Sequence[Piece]]) -> list[list[float]]:
            return estimator.of_trees(replace(whole, rewards=tuple(rewards), pieces=tuple(map(tuple, pieces))))

        return tree_credits(leave_one_out, whole.rewards, agents, branches, turn_rewards, rule)

    def _credited(self, group: Group) -> Sequence[AgentCredit]:
        """Compute the advantage of each agent of a group."""
        to_go = self._to_go and any(group.turn_rewards)
        if isinstance(self._advantage, AdvantageEstimator):
            return self._advantage.to_go(group) if to_go else self._advantage(group)
        by_turn: Sequence[tuple[float, ...]] = [()] * len(group.rewards)
        if to_go:
            by_turn = advantages_to_go(self._advantage, group.rewards, group.turn_rewards, group.episodes)
        advantages = self._advantage(group.rewards, group.episodes)
        return [AgentCredit(*advantage, turns) for advantage, turns in zip(advantages, by_turn, strict=True)]


@dataclass(frozen=True, slots=True)
class GroupReleaseRule:
    """The number of finishers that a group waits for before any member is released.

    The default is half of the members: a larger share waits longer, a smaller one makes the gradient noisier for tasks
    without earlier groups.

    Example:
        >>> GroupReleaseRule().waited_for(8), GroupReleaseRule(share=0.0).waited_for(8)
        (4, 1)
        >>> GroupReleaseRule().waited_for(2)
        2
    """

    share: float = 0.5
    """Share of the members; 0: each member is released when it finishes, and compared with earlier groups alone."""

    def waited_for(self, size: int) -> int:
        """Return m for a group of `size` members; at least two if there are siblings to compare with."""
        return max(math.ceil(self.share * size), min(2, size)) if self.share else 1


class FirstFinishersRelease:
    """Releases the first finishers together and every later member when it ends; the first fix the baseline set.

    Args:
        trainable: policies whose trajectories are compared.
        rule: number of members to wait for.
        freeze: called with every baseline set before any unit compared with it is ready.
        compares: whether rewards are compared; if not, they are their own advantages.
        to_go: whether a turn's reward counts for that turn and earlier turns only; not if rewards are compared.
    """

    def __init__(
        self,
        trainable: Iterable[str],
        rule: GroupReleaseRule,
        *,
        freeze: Callable[[FrozenGroupBaselines], None],
        compares: bool = True,
        to_go: bool = False,
    ) -> None:
        assert not (compares and to_go), "the means of earlier groups are of whole episodes"
        self._trainable = frozenset(trainable)
        self._rule = rule
        self.history = RewardHistory()
        self._freeze = freeze
        self.compares = compares
        self._to_go = to_go
        self._tasks = _RootTasks()

    def record_admission(self, spec: EpisodeSpec, group: OpenGroup) -> None:
        """Fix the mean rewards of earlier groups when the first member is admitted."""
        task = self._tasks.record_start(spec)
        if group.size:
            return
        group.task = task
        group.earlier = _earlier_means(self.history, spec, task, self._trainable)

    def record_end(self, spec: EpisodeSpec, group: OpenGroup) -> tuple[Sequence[EpisodeHeader], Credits]:
        """Release no member, or all waiting members that can be compared with the frozen baseline set."""
        self._tasks.record_end(spec)
        if group.running and len(group.headers) < self._rule.waited_for(group.size):
            return (), {}
        committed = {header.episode_id: header for header in group.committed}
        if (
            group.frozen is None
            and not group.is_settled
            and (len(committed) >= self._rule.waited_for(group.size) or not group.running)
        ):
            group.frozen = FrozenGroupBaselines(
                spec.group_id, tuple(committed)[: self._rule.waited_for(group.size)], group.earlier
            )
            self._freeze(group.frozen)
        if not group.running:
            in_order = (committed[name] for name in sorted(committed, key=ids.episode_sort_key))
            self.history.add(group.task, self._rewarded(spec.environment, in_order))
        if group.is_settled:
            return group.release_ended(), {}
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
            for trajectory in rewarded_trajectories(header, self._trainable):
                compared.setdefault((trajectory.policy, trajectory.seat), []).append((header.episode_id, trajectory))
        squares: dict[str, tuple[float, float]] = {}
        for (policy, _), trajectories in compared.items():
            whole = leave_one_out(
                [trajectory.reward or 0.0 for _, trajectory in trajectories],
                [episode_id for episode_id, _ in trajectories],
            )
            given_advantages = (
                credits[episode_id, trajectory.seat, trajectory.index].advantage
                for episode_id, trajectory in trajectories
            )
            before = squares.get(policy, (0.0, 0.0))
            squares[policy] = (
                before[0] + math.fsum(value**2 for value in given_advantages),
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
            for trajectory in rewarded_trajectories(header, self._trainable):
                key = (trajectory.policy, trajectory.seat)
                rewards = [
                    t.reward or 0.0
                    for other in others
                    for t in rewarded_trajectories(other, {trajectory.policy})
                    if t.seat == trajectory.seat
                ]
                reward = trajectory.reward or 0.0
                value, baseline = (
                    shrunk_advantage(reward, rewards, earlier.get(key)) if self.compares else Advantage(reward, 0.0)
                )
                turns: tuple[float, ...] = ()
                if self._to_go and trajectory.turn_rewards:
                    (turns,) = advantages_to_go(no_baseline, [reward], [trajectory.turn_rewards], [header.episode_id])
                credit = TrajectoryCredit(trajectory.seat, trajectory.index, reward, value, baseline, turns)
                yield (header.episode_id, trajectory.seat, trajectory.index), credit

    def _rewarded(self, environment: str, headers: Iterable[EpisodeHeader]) -> Iterator[RewardInRole]:
        for header in headers:
            for trajectory in rewarded_trajectories(header, self._trainable):
                yield RewardInRole(SeatRole(trajectory.policy, environment, trajectory.seat), trajectory.reward or 0.0)


def baseline_members(first: Sequence[E], member: E) -> list[E]:
    """The baseline set of a member: the first m - 1 finishers among the others.

    Args:
        first: the first m finishers of its group, in order.
        member: a member of the group, whether or not it is one of `first`.

    Example:
        >>> baseline_members(["a", "b", "c"], "b"), baseline_members(["a", "b", "c"], "z")
        (['a', 'c'], ['a', 'b'])
    """
    return [other for other in first if other != member][: len(first) - 1]


SHRINKAGE = 3.0
"""Weight of the mean of earlier groups, as a number of rewards."""


def shrunk_advantage(reward: float, others: Sequence[float], earlier: float | None) -> Advantage:
    """A = R - b with b = (Σ others + κ·V) / (n + κ), κ = 3: the noisy mean of a few siblings is shrunk toward the mean
    V of earlier groups (James & Stein 1961).

    V comes from earlier groups, so b stays independent of the member's samples. Without V, b is the mean of the
    siblings; without both, the advantage is 0.

    Args:
        reward: reward of the member.
        others: rewards in the member's baseline set.
        earlier: V; None if there is none.

    Example:
        >>> shrunk_advantage(1.0, [0.0, 1.0, 0.0], None).value, shrunk_advantage(1.0, [0.0, 1.0, 0.0], 0.5)
        (0.6666666666666667, Advantage(value=0.5833333333333333, baseline=0.4166666666666667))
    """
    weight = 0.0 if earlier is None else SHRINKAGE
    count = len(others) + weight
    if not count:
        return Advantage(0.0, reward)
    baseline = (math.fsum(others) + weight * (earlier or 0.0)) / count
    return Advantage(reward - baseline, baseline)


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


def rewarded_trajectories(header: EpisodeHeader, policies: frozenset[str] | set[str]) -> Iterator[TrajectoryHeader]:
    """Yield the trajectories of some policies that have a reward."""
    return (
        trajectory
        for trajectory in header.trajectories
        if trajectory.policy in policies and trajectory.reward is not None
    )
