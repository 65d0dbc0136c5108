"""What rewards used to be: means over earlier groups, per task and per environment, to shrink a baseline to.

A group is compared with the groups that had ended when it was admitted, and enters when all of it has ended, long and
short members alike. Rewards of child episodes belong to the task of their root: their own tasks are new each time.

Owns: the means. They are a fold over the groups of a run in the order in which they ended, and so come back from its
journal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from agentrl.credit.role_means import Mean, Role

DECAY = 0.98
"""Share of a mean that stays per reward: about fifty are remembered, six groups of eight."""

TASKS = 100_000
"""Tasks remembered per role; those not met for longest go."""


class Rewarded(NamedTuple):
    """What an agent of a group was given."""

    role: Role
    reward: float


class RewardHistory:
    """Mean rewards of a policy in a seat, on one task or on all."""

    def __init__(self, tasks: int = TASKS) -> None:
        self._tasks = tasks
        self._by_role: dict[Role, Mean] = {}
        self._by_task: dict[Role, OrderedDict[str, Mean]] = {}

    def mean(self, role: Role, task: str | None) -> float | None:
        """The mean of the task's earlier groups, else of the environment's; None before the first.

        Args:
            role: whose rewards.
            task: of the root episode; None where it is not known.
        """
        found = self._by_task.get(role, OrderedDict()).get(task or "") or self._by_role.get(role)
        return None if found is None else found.total / found.weight

    def add(self, task: str | None, group: Iterable[Rewarded]) -> None:
        """A group has ended: what its agents were given."""
        for role, reward in group:
            self._by_role[role] = self._by_role.get(role, Mean()).with_reward(reward, DECAY)
            if task is None:
                continue
            means = self._by_task.setdefault(role, OrderedDict())
            means[task] = means.pop(task, Mean()).with_reward(reward, DECAY)
            if len(means) > self._tasks:
                means.popitem(last=False)
