"""Credits of the units of an optimizer step, by an estimator that compares the whole step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl.core import ids
from agentrl.core.records import Unit
from agentrl.credit.estimators import AdvantageEstimator
from agentrl.credit.group import Group


class OptimizerStepCreditAssigner:
    """Assigns credit to the units of an optimizer step with an estimator over the step.

    Args:
        estimator: an estimator marked with `over="step"`.
        group_size: group size of the run.
        weights: weights of named rewards.
    """

    def __init__(
        self, estimator: AdvantageEstimator, *, group_size: int, weights: Mapping[str, float] | None = None
    ) -> None:
        self._estimator = estimator
        self._group_size = group_size
        self._weights = weights or {}

    def credited(self, policy: str, units: Sequence[tuple[str, Unit]]) -> list[Unit]:
        """Return the units of a step with their credits, in order; each seat of each environment is compared
        separately.

        Args:
            policy: policy that takes the step.
            units: (environment, unit) in the step's order.
        """
        members: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for at, (environment, unit) in enumerate(units):
            for number, credit in enumerate(unit.credits):
                members[environment, credit.seat].append((at, number))
        credits = [list(unit.credits) for _, unit in units]
        for (environment, seat), places in members.items():
            episodes = tuple(units[at][1].episode_id for at, _ in places)
            group = Group(
                rewards=tuple(credits[at][number].reward for at, number in places),
                named_rewards=tuple(credits[at][number].named_rewards for at, number in places),
                weights=self._weights,
                episodes=episodes,
                groups=tuple(ids.group_id_of(episode, self._group_size) for episode in episodes),
                policy=policy,
                seat=seat,
                environment=environment,
            )
            for (at, number), (value, baseline, turns) in zip(places, self._estimator(group), strict=True):
                credits[at][number] = replace(
                    credits[at][number], advantage=value, baseline=baseline, turn_advantages=turns
                )
        return [
            replace(unit, credits=tuple(unit_credits)) for (_, unit), unit_credits in zip(units, credits, strict=True)
        ]
