"""Baselines that outlive a group: running means of the rewards of a policy in a seat.

`RoleMeans` compares a reward with the policy's earlier rewards in the same seat, for games in which nothing else is
comparable: in a zero-sum game the seats differ (the first mover wins more often), and two games of one task differ too,
because the opponent changes. Its means change only when a step is taken. Those after each step are kept, and stored in
the manifest: a resumed run continues with the same means, and a repeated step uses the same ones again.

`RewardHistory` has the means of earlier groups, per task and per environment, toward which a group's baseline is
shrunk.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agentrl.core.records import NEVER_RESUMED, Lines, PolicyVersion, TrajectoryHeader, Unit


class SeatRole(NamedTuple):
    """A policy in a seat of an environment, over which rewards are averaged."""

    policy: str
    environment: str
    seat: str


class DecayingMean(NamedTuple):
    """An exponentially weighted mean, `total / weight`."""

    total: float = 0.0
    weight: float = 0.0

    def with_reward(self, reward: float, decay: float) -> DecayingMean:
        """Return the mean after one more reward."""
        return DecayingMean(decay * self.total + reward, decay * self.weight + 1.0)


ROLE_DECAY = 0.8
"""Share of a role's running mean that is kept per step; the mean covers about five steps."""


class MeanAtStep(NamedTuple):
    """The mean of a role after a step of its policy."""

    step: int
    mean: DecayingMean


class RoleMeans:
    """Role-conditioned advantage estimation (SPIRAL, arXiv:2506.24119): A = R - b_role, b_role a mean of earlier R.

    A reward is compared with the role's mean when the agent sampled its first token: the mean over the steps that made
    those weights. The agent's behavior and duration do not affect this baseline, so E[score · baseline] = 0 in any
    order of completion. The newest mean would be biased: slow episodes are trained later than fast ones of the same
    time, and would be compared with other rewards.

    Agents that began before the role had a mean are compared with each other: those of the role's first step with the
    other episodes of that step, all later ones with that step's episodes but for the last released. These are the first
    n - 1 finishers among the others for each of them, as in `GroupReleaseRule`.

    All rewards of a step enter with the same weight, and one decay separates steps. Decay per reward would favor the
    last rewards of a step: in order of admission these belong to its shortest episodes, so that the baseline would be
    far from the mean reward wherever length and reward are tied.

    More differences from the paper, which decays per reward: it enters a reward into the mean before it compares the
    two, which multiplies every advantage by d; and it starts the mean at 0, where this one is divided by its weight.

    Args:
        means: means of a previous attempt of the run, as `means` returns them.
        decay: d, the share of a mean that is kept per step.
    """

    def __init__(
        self, means: Mapping[SeatRole, Sequence[MeanAtStep]] | None = None, *, decay: float = ROLE_DECAY
    ) -> None:
        self._decay = decay
        self._means = {role: list(means_by_step) for role, means_by_step in (means or {}).items()}
        self._next: dict[str, dict[SeatRole, list[MeanAtStep]]] = {}

    @property
    def means(self) -> Mapping[SeatRole, Sequence[MeanAtStep]]:
        """Return the means of each role, by step; the first is for agents that began before there was one."""
        return self._means

    def credited(
        self,
        version: PolicyVersion,
        units: Sequence[tuple[str, Unit, Sequence[TrajectoryHeader]]],
        lines: Lines = NEVER_RESUMED,
    ) -> list[Unit]:
        """Return the units of a step, in order, with advantages against the means.

        The means do not change before `commit_step`.

        Args:
            version: version that the step makes.
            units: (environment, unit, headers of its trajectories) in the step's order.
            lines: the run's lineages.
        """
        policy = version.policy
        rewards: dict[SeatRole, dict[str, list[float]]] = {}
        for environment, unit, _ in units:
            for credit in unit.credits:
                of_role = rewards.setdefault(SeatRole(policy, environment, credit.seat), {})
                of_role.setdefault(unit.episode_id, []).append(credit.reward)
        credited_units = []
        for environment, unit, trajectories in units:
            began = {
                (own.seat, own.index): lines.fork(own.oldest_version, version)
                for own in trajectories
                if own.policy == policy
            }
            credits = []
            for credit in unit.credits:
                role = SeatRole(policy, environment, credit.seat)
                if role in self._means:
                    mean = self._mean(role, began[credit.seat, credit.index])
                else:
                    mean = _mean_of(values for name, values in rewards[role].items() if name != unit.episode_id)
                baseline = mean.total / mean.weight if mean.weight else credit.reward
                credits.append(dataclasses.replace(credit, advantage=credit.reward - baseline, baseline=baseline))
            credited_units.append(dataclasses.replace(unit, credits=tuple(credits)))
        self._next[policy] = {
            role: self._after(role, version.step, of_episodes) for role, of_episodes in rewards.items()
        }
        return credited_units

    def commit_step(self, policy: str) -> None:
        """Add the means after the step credited last, once it has been taken."""
        for role, new in self._next.pop(policy, {}).items():
            self._means.setdefault(role, []).extend(new)

    def _mean(self, role: SeatRole, step: int) -> DecayingMean:
        """Return the newest mean at a step, else the first."""
        means = self._means[role]
        return means[max(bisect_right(means, step, key=lambda entry: entry.step) - 1, 0)].mean

    def _after(self, role: SeatRole, step: int, rewards: Mapping[str, list[float]]) -> list[MeanAtStep]:
        """Return the means that a step adds; the order of its episodes makes no difference."""
        means = self._means.get(role)
        before, of_step = means[-1].mean if means else DecayingMean(), _mean_of(rewards.values())
        mean = DecayingMean(self._decay * before.total + of_step.total, self._decay * before.weight + of_step.weight)
        start = [] if means else [MeanAtStep(0, _mean_of(list(rewards.values())[:-1]))]
        return [*start, MeanAtStep(step, mean)]


def _mean_of(episodes: Iterable[Sequence[float]]) -> DecayingMean:
    """Return the plain mean over rewards of some episodes."""
    rewards = [reward for member_rewards in episodes for reward in member_rewards]
    return DecayingMean(math.fsum(rewards), float(len(rewards)))


HISTORY_DECAY = 0.98
"""Share of a mean that is kept per reward; the mean covers about fifty rewards, six groups of eight."""

TASKS = 100_000
"""Number of tasks remembered per role; the least recently seen are forgotten first."""


class RewardInRole(NamedTuple):
    """The reward of an agent of a group, with its role."""

    role: SeatRole
    reward: float


class RewardHistory:
    """Mean rewards of a policy in a seat over earlier groups, on one task or on all.

    A group is compared with the groups that had ended when it was admitted, and enters once all of it has ended, long
    and short members alike. Rewards of child episodes belong to the task of their root, since their own tasks are new
    each time. The means are a fold over the run's groups in the order of their ends, so they are rebuilt from its
    journal.
    """

    def __init__(self, tasks: int = TASKS) -> None:
        self._tasks = tasks
        self._by_role: dict[SeatRole, DecayingMean] = {}
        self._by_task: dict[SeatRole, OrderedDict[str, DecayingMean]] = {}

    def mean(self, role: SeatRole, task: str | None) -> float | None:
        """Return the mean reward of the task's earlier groups, else of the environment's; None before the first.

        Args:
            role: the policy, environment and seat.
            task: id of the root episode's task; None if unknown.
        """
        mean = self._by_task.get(role, OrderedDict()).get(task or "") or self._by_role.get(role)
        return None if mean is None else mean.total / mean.weight

    def add(self, task: str | None, group: Iterable[RewardInRole]) -> None:
        """Add the rewards of a group that has ended."""
        for role, reward in group:
            self._by_role[role] = self._by_role.get(role, DecayingMean()).with_reward(reward, HISTORY_DECAY)
            if task is None:
                continue
            means = self._by_task.setdefault(role, OrderedDict())
            means[task] = means.pop(task, DecayingMean()).with_reward(reward, HISTORY_DECAY)
            if len(means) > self._tasks:
                means.popitem(last=False)
