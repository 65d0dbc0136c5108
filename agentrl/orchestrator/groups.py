"""Groups on their way through the buffer: when their members are released, and what they are compared with.

`WholeGroups` waits for all (`credit.release = "group"`); `FirstFinishers` follows `credit.release` (`late`, `episode`).
Members are those of one group; rewards are compared within a policy in a seat. All of it happens on headers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.core import ids
from agentrl.core.baselines import BaselineSet, EarlierMean
from agentrl.core.records import EpisodeHeader, EpisodeSpec, TrajectoryHeader
from agentrl.core.training_records import TrajectoryCredit
from agentrl.credit.advantages import Advantage, AdvantageFunction, advantages_to_go, leave_one_out, no_baseline
from agentrl.credit.history import Rewarded, RewardHistory
from agentrl.credit.release import ReleaseRule, against, compared_with
from agentrl.credit.role_means import Role

Credits = Mapping[tuple[str, str, int], TrajectoryCredit]
"""By episode, seat and agent."""


@dataclass(slots=True)
class Group:
    """Episodes that are compared with each other, as far as they have ended."""

    running: int
    size: int = 0
    """How many were to be sampled; fewer may be left after a resume."""
    task: str | None = None
    """Of the root episode."""
    headers: list[EpisodeHeader] = field(default_factory=list)
    """Of the members that ended, dropped ones included, in that order."""
    released: int = 0
    """How many of those have been released."""
    earlier: tuple[EarlierMean, ...] = ()
    """What its policies used to get when it was admitted."""
    frozen: BaselineSet | None = None
    squares: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Once it is complete, by policy: the squares of its advantages added up, and of those that leave-one-out over the
    whole group would have given."""

    @property
    def committed(self) -> list[EpisodeHeader]:
        """The members that ended and were not dropped."""
        return [header for header in self.headers if header.committed]

    @property
    def late(self) -> int:
        """Members that run while others have been released."""
        return self.running if self.released else 0

    def release(self) -> Sequence[EpisodeHeader]:
        """All that ended since the last release."""
        released, self.released = self.headers[self.released :], len(self.headers)
        return released


class Release(Protocol):
    """When members of a group leave it."""

    compares: bool
    """Whether rewards are compared at all; else they are their own advantages."""

    def admitted(self, spec: EpisodeSpec, group: Group) -> None:
        """A member of a group starts."""
        ...

    def ended(self, spec: EpisodeSpec, group: Group) -> tuple[Sequence[EpisodeHeader], Credits]:
        """A member has ended, the last of `group.headers`: who is released now, and the credits of their agents."""
        ...


class WholeGroups:
    """All members at once, when the last one has ended.

    Args:
        trainable: policies whose trajectories are compared.
        advantage: over the rewards of one policy in one seat.
        to_go: whether a turn's reward counts for that turn and those before it alone.
    """

    def __init__(self, trainable: Iterable[str], advantage: AdvantageFunction, *, to_go: bool = False) -> None:
        self._trainable = frozenset(trainable)
        self._advantage = advantage
        self._to_go = to_go
        self.compares = advantage is not no_baseline

    def admitted(self, spec: EpisodeSpec, group: Group) -> None:
        """Nothing depends on it."""

    def ended(self, spec: EpisodeSpec, group: Group) -> tuple[Sequence[EpisodeHeader], Credits]:
        """All of the group, or nobody."""
        if group.running:
            return (), {}
        compared: dict[tuple[str, str], list[tuple[str, TrajectoryHeader]]] = {}
        for header in sorted(group.headers, key=lambda header: ids.order_key(header.episode_id)):
            for trajectory in rewarded(header, self._trainable):  # in this order, since sums depend on it
                seat = (trajectory.policy, trajectory.seat)
                compared.setdefault(seat, []).append((header.episode_id, trajectory))
        credits: dict[tuple[str, str, int], TrajectoryCredit] = {}
        for members in compared.values():
            for (episode_id, trajectory), credit in zip(members, self._credits(members), strict=True):
                credits[episode_id, trajectory.seat, trajectory.index] = credit
        return group.release(), credits

    def _credits(self, members: Sequence[tuple[str, TrajectoryHeader]]) -> Iterator[TrajectoryCredit]:
        """Credits of trajectories that are compared with each other, given with their episodes."""
        episodes = [episode_id for episode_id, _ in members]
        rewards = [trajectory.reward or 0.0 for _, trajectory in members]
        by_turn: Sequence[tuple[float, ...]] = [()] * len(members)
        if self._to_go and any(trajectory.turn_rewards for _, trajectory in members):
            turn_rewards = [trajectory.turn_rewards for _, trajectory in members]
            by_turn = advantages_to_go(self._advantage, rewards, turn_rewards, episodes)
        advantages = self._advantage(rewards, episodes)
        for (_, t), reward, (value, baseline), turns in zip(members, rewards, advantages, by_turn, strict=True):
            yield TrajectoryCredit(t.seat, t.index, reward, value, baseline, turns)


class FirstFinishers:
    """The first finishers together, every later member when it ends; the baseline set is frozen with the first.

    Args:
        trainable: policies whose trajectories are compared.
        rule: how many are waited for.
        history: what rewards used to be.
        freeze: told of every baseline set, before any unit compared with it is ready.
        frozen: baseline sets of an earlier life of the run, by group: they hold.
        compares: whether rewards are compared here at all; else they are their own advantages.
    """

    def __init__(
        self,
        trainable: Iterable[str],
        rule: ReleaseRule,
        *,
        history: RewardHistory,
        freeze: Callable[[BaselineSet], None],
        frozen: Mapping[str, BaselineSet],
        compares: bool = True,
    ) -> None:
        self._trainable = frozenset(trainable)
        self._rule = rule
        self._history = history
        self._freeze = freeze
        self._frozen = dict(frozen)
        self.compares = compares
        self._tasks: dict[str, str | None] = {}

    def admitted(self, spec: EpisodeSpec, group: Group) -> None:
        """The first member's admission decides what the group's policies used to get."""
        task = spec.task.id if spec.parent_id is None else self._tasks.get(spec.parent_id)
        self._tasks[spec.episode_id] = task
        if group.size:
            return
        group.task = task
        group.frozen = self._frozen.pop(spec.group_id, None)
        for seat, binding in sorted(spec.seats.items()):
            mean = self._history.mean(Role(binding.policy, spec.environment, seat), task)
            if mean is not None and binding.policy in self._trainable:
                group.earlier += (EarlierMean(binding.policy, seat, mean),)

    def ended(self, spec: EpisodeSpec, group: Group) -> tuple[Sequence[EpisodeHeader], Credits]:
        """Nobody, or all that wait and can be compared with the frozen set."""
        self._tasks.pop(spec.episode_id, None)
        if group.running and len(group.headers) < self._rule.waited_for(group.size):
            return (), {}
        committed = {header.episode_id: header for header in group.committed}
        if group.frozen is None and (len(committed) >= self._rule.waited_for(group.size) or not group.running):
            group.frozen = BaselineSet(
                spec.group_id, tuple(committed)[: self._rule.waited_for(group.size)], group.earlier
            )
            self._freeze(group.frozen)
        if not group.running:
            self._history.add(group.task, self._rewarded(spec.environment, committed.values()))
        if group.frozen is None or not committed.keys() >= set(group.frozen.finishers):
            return (), {}
        released = group.release()
        first = [committed[name] for name in group.frozen.finishers]
        if group.running or not self.compares:
            return released, dict(self._credits(released, first, group.frozen))
        credits = dict(self._credits(group.committed, first, group.frozen))
        group.squares = self._squares(group.committed, credits)
        return released, credits

    def _squares(self, members: Iterable[EpisodeHeader], credits: Credits) -> dict[str, tuple[float, float]]:
        """See `Group.squares`."""
        compared: dict[tuple[str, str], list[tuple[str, TrajectoryHeader]]] = {}
        for header in members:
            for own in rewarded(header, self._trainable):
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
        self, released: Sequence[EpisodeHeader], first: Sequence[EpisodeHeader], frozen: BaselineSet
    ) -> Iterator[tuple[tuple[str, str, int], TrajectoryCredit]]:
        earlier = {(policy, seat): mean for policy, seat, mean in frozen.earlier}
        by_episode = {header.episode_id: header for header in first}
        for header in released:
            others = [by_episode[name] for name in compared_with(frozen.finishers, header.episode_id)]
            for own in rewarded(header, self._trainable):
                key = (own.policy, own.seat)
                rewards = [
                    t.reward or 0.0 for other in others for t in rewarded(other, {own.policy}) if t.seat == own.seat
                ]
                reward = own.reward or 0.0
                value, baseline = (
                    against(reward, rewards, earlier.get(key)) if self.compares else Advantage(reward, 0.0)
                )
                credit = TrajectoryCredit(own.seat, own.index, reward, value, baseline)
                yield (header.episode_id, own.seat, own.index), credit

    def _rewarded(self, environment: str, headers: Iterable[EpisodeHeader]) -> Iterator[Rewarded]:
        for header in headers:
            for own in rewarded(header, self._trainable):
                yield Rewarded(Role(own.policy, environment, own.seat), own.reward or 0.0)


def rewarded(header: EpisodeHeader, policies: frozenset[str] | set[str]) -> Iterator[TrajectoryHeader]:
    """The trajectories of some policies that were given a reward."""
    return (own for own in header.trajectories if own.policy in policies and own.reward is not None)


def history_of(members: Iterable[tuple[EpisodeSpec, EpisodeHeader]], open_groups: Collection[str]) -> RewardHistory:
    """What rewards used to be, folded from a journal.

    Args:
        members: every committed training episode, in order of commit.
        open_groups: groups that will end, or end again, in this life of the run: left out.
    """
    tasks: dict[str, str] = {}
    groups: dict[str, list[Rewarded]] = {}
    parents: dict[str, str] = {}
    for spec, header in members:
        tasks[spec.episode_id] = spec.task.id
        if spec.group_id in open_groups:
            continue
        rewards = groups.pop(spec.group_id, [])  # so that groups stay in the order in which they ended
        for own in rewarded(header, {own.policy for own in header.trajectories}):
            rewards.append(Rewarded(Role(own.policy, spec.environment, own.seat), own.reward or 0.0))
        groups[spec.group_id] = rewards
        parents[spec.group_id] = spec.episode_id.partition("~")[0]
    history = RewardHistory()
    for group_id, rewards in groups.items():
        history.add(tasks.get(parents[group_id]), rewards)
    return history
