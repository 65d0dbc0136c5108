"""Role-conditioned baselines: a running mean reward per role, for games in which nothing else is comparable.

In a zero-sum game the seats differ (who moves first wins more often) and two games of one task are not alike, since the
opponent changes too. So a reward is compared with what the same policy used to get in the same seat.

Owns: the means. They change only where a step has been taken, in the order of its units, and are in the manifest: a
resumed run goes on with the same ones, and a step that is taken again finds what it found before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agentrl.core import ids
from agentrl.core.training_records import Unit


class Role(NamedTuple):
    """Whose rewards are averaged."""

    policy: str
    environment: str
    seat: str


class Mean(NamedTuple):
    """A mean whose newest rewards count most: `total / weight`."""

    total: float = 0.0
    weight: float = 0.0

    def with_reward(self, reward: float, decay: float) -> Mean:
        """After one more reward."""
        return Mean(decay * self.total + reward, decay * self.weight + 1.0)


DECAY = 0.95
"""The share of a running mean that stays per reward: it remembers about twenty rewards."""


class RoleMeans:
    """Role-conditioned advantage estimation (SPIRAL, arXiv:2506.24119): A = R - b_role, b_role ← d·b_role + (1 - d)·R.

    Two differences to the paper, both against bias: a reward is compared with the mean *before* it enters (the paper
    enters it first, which shrinks every advantage by 1 - d), and the mean is divided by the weight it has gathered, as
    Adam does, instead of being pulled to 0 by its start. The first reward of a role has nothing to be compared with:
    advantage 0. Agents of one episode in one seat are compared with the same mean and enter it together.

    Args:
        means: of an earlier life of the run.
        decay: d, the share that stays per reward.
    """

    def __init__(self, means: Mapping[Role, Mean] | None = None, *, decay: float = DECAY) -> None:
        self._decay = decay
        self._means = dict(means or {})
        self._next: dict[str, dict[Role, Mean]] = {}

    @property
    def means(self) -> Mapping[Role, Mean]:
        """By role, after the newest steps taken."""
        return self._means

    def credited(self, policy: str, units: Sequence[tuple[str, Unit]]) -> list[Unit]:
        """The units of a step, in their order, with advantages against the means.

        Each is compared with all before it in the order of admission, which long and short episodes share; the means
        stay as they are until `taken`.

        Args:
            policy: whose step it is.
            units: (environment, unit) in the step's order.
        """
        means: dict[Role, Mean] = {}
        found: dict[str, Unit] = {}
        for environment, unit in sorted(units, key=lambda item: ids.order_key(item[1].episode_id)):
            seats = dict.fromkeys(credit.seat for credit in unit.credits)
            now = {seat: self._mean(means, Role(policy, environment, seat)) for seat in seats}
            credits = []
            for credit in unit.credits:
                mean = now[credit.seat]
                baseline = mean.total / mean.weight if mean.weight else credit.reward
                credits.append(dataclasses.replace(credit, advantage=credit.reward - baseline, baseline=baseline))
                role = Role(policy, environment, credit.seat)
                means[role] = self._mean(means, role).with_reward(credit.reward, self._decay)
            found[unit.episode_id] = dataclasses.replace(unit, credits=tuple(credits))
        self._next[policy] = means
        return [found[unit.episode_id] for _, unit in units]

    def taken(self, policy: str) -> None:
        """The step whose units were credited last has been taken: their rewards enter the means."""
        self._means.update(self._next.pop(policy, {}))

    def as_data(self) -> list[list[str | float]]:
        """The means as JSON data; floats survive it exactly."""
        return [[*role, *mean] for role, mean in sorted(self._means.items())]

    def _mean(self, means: Mapping[Role, Mean], role: Role) -> Mean:
        return means.get(role) or self._means.get(role) or Mean()


def read_means(data: Iterable[Sequence[str | float]]) -> dict[Role, Mean]:
    """What `RoleMeans.as_data` wrote.

    Raises:
        ValueError: it is not that.
    """
    means = {}
    for policy, environment, seat, total, weight in data:
        mean = Mean(float(total), float(weight))
        if not (abs(mean.total) < float("inf") and 0.0 < mean.weight < float("inf")):
            raise ValueError(f"a mean of {policy} in seat {seat} is {total} / {weight}")
        means[Role(str(policy), str(environment), str(seat))] = mean
    return means
