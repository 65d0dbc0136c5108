"""Baselines that outlive a group: running means of the rewards of a policy in a seat.

`RoleMeans` compares a reward with the policy's earlier rewards in the same seat, for games in which nothing else is
comparable: in a zero-sum game the seats differ (the first mover wins more often), and two games of one task differ too,
because the opponent changes. Its means change only when a step is taken, in the order of its units, and are stored in
the manifest: a resumed run continues with the same means, and a repeated step uses the same ones again.

`RewardHistory` has the means of earlier groups, per task and per environment, towards which a group's baseline is
shrunk.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agentrl.core import ids
from agentrl.core.records import Unit


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


ROLE_DECAY = 0.95
"""Share of a running mean that is kept per reward; the mean covers about twenty rewards."""


class RoleMeans:
    """Role-conditioned advantage estimation (SPIRAL, arXiv:2506.24119): A = R - b_role, b_role ← d·b_role + (1 - d)·R.

    Two differences from the paper remove bias. A reward is compared with the mean *before* it enters; the paper enters
    it first, which multiplies every advantage by d. And the mean is divided by its accumulated weight, as in Adam, so
    that its start does not pull it to 0. The first reward of a role has no baseline: its advantage is 0. Agents of one
    episode in one seat are compared with the same mean and enter it together.

    Args:
        means: means of a previous attempt of the run.
        decay: d, the share of a mean that is kept per reward.
    """

    def __init__(self, means: Mapping[SeatRole, DecayingMean] | None = None, *, decay: float = ROLE_DECAY) -> None:
        self._decay = decay
        self._means = dict(means or {})
        self._next: dict[str, dict[SeatRole, DecayingMean]] = {}

    @property
    def means(self) -> Mapping[SeatRole, DecayingMean]:
        """Return the mean of each role after the newest steps taken."""
        return self._means

    def credited(self, policy: str, units: Sequence[tuple[str, Unit]]) -> list[Unit]:
        """Return the units of a step, in order, with advantages against the means.

        Each unit is compared with all before it in the order of admission, which does not depend on length. The means
        do not change before `commit_step`.

        Args:
            policy: policy that takes the step.
            units: (environment, unit) in the step's order.
        """
        means: dict[SeatRole, DecayingMean] = {}
        found: dict[str, Unit] = {}
        for environment, unit in sorted(units, key=lambda item: ids.episode_sort_key(item[1].episode_id)):
            seats = dict.fromkeys(credit.seat for credit in unit.credits)
            now = {seat: self._mean(means, SeatRole(policy, environment, seat)) for seat in seats}
            credits = []
            for credit in unit.credits:
                mean = now[credit.seat]
                baseline = mean.total / mean.weight if mean.weight else credit.reward
                credits.append(dataclasses.replace(credit, advantage=credit.reward - baseline, baseline=baseline))
                role = SeatRole(policy, environment, credit.seat)
                means[role] = self._mean(means, role).with_reward(credit.reward, self._decay)
            found[unit.episode_id] = dataclasses.replace(unit, credits=tuple(credits))
        self._next[policy] = means
        return [found[unit.episode_id] for _, unit in units]

    def commit_step(self, policy: str) -> None:
        """Add the rewards of the units credited last to the means, after their step has been taken."""
        self._means.update(self._next.pop(policy, {}))

    def _mean(self, means: Mapping[SeatRole, DecayingMean], role: SeatRole) -> DecayingMean:
        return means.get(role) or self._means.get(role) or DecayingMean()


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
        found = self._by_task.get(role, OrderedDict()).get(task or "") or self._by_role.get(role)
        return None if found is None else found.total / found.weight

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
