"""The advantage estimators by their names in `credit.advantage`, and users' own."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.config.algorithms import ADVANTAGES
from agentrl.core.custom_functions import FunctionDeclaration, check_options, declaration_of, find_function
from agentrl.core.errors import GroupTooSmallError, InputError
from agentrl.credit.advantages.best_of_n import best_of_n
from agentrl.credit.advantages.gdpo import gdpo
from agentrl.credit.advantages.gigpo import gigpo
from agentrl.credit.advantages.group_baselines import group_mean, group_std, leave_one_out, no_baseline
from agentrl.credit.advantages.max_rl import max_rl
from agentrl.credit.advantages.pass_at_k import pass_at_k
from agentrl.credit.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from agentrl.credit.group import Advantage, AdvantageFunction, AgentCredit, Group
from agentrl.credit.to_go import advantages_to_go

REWARD_ESTIMATORS: dict[str, AdvantageFunction] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_std": group_std,
    "role_mean": no_baseline,
    "none": no_baseline,
    "gae": no_baseline,
}
"""Estimators that need the rewards alone, keyed by the name in `credit.advantage`; `role_mean` gets its baseline at the
step (`baselines.RoleMeans`), `gae` in the trainer (`generalized_advantages`)."""


def reward_estimator(advantage: str, *, loss: str) -> AdvantageFunction:
    """Return the estimator of `REWARD_ESTIMATORS` that a run with this loss uses.

    `dpo` reads the order of the advantages. With several agents in a seat, `leave_one_out` has a baseline for each
    episode, under which an agent of smaller reward may have the larger advantage; `group_mean` keeps their order.
    """
    return group_mean if (advantage, loss) == ("leave_one_out", "dpo") else REWARD_ESTIMATORS[advantage]


GROUP_ESTIMATORS: dict[str, Callable[..., Sequence[float] | Sequence[Sequence[float]]]] = {
    "max_rl": max_rl,
    "pass_at_k": pass_at_k,
    "best_of_n": best_of_n,
    "gigpo": gigpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gdpo": gdpo,
}
"""Estimators that take a `Group`, like users' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """An estimator that takes a `Group`, with its options."""

    name: str
    function: Callable[..., Any]
    mark: FunctionDeclaration
    options: Mapping[str, Any]

    def __call__(self, group: Group) -> list[AgentCredit]:
        """Return the credit of each agent.

        Raises:
            GroupTooSmallError: the function cannot compare so few members.
            InputError: the function raised, or did not return one advantage per agent or per turn.
        """
        credits = []
        advantages = self._call_function(group)
        for value, reward in zip(advantages, group.rewards, strict=True):
            turns = tuple(value) if isinstance(value, list | tuple) else ()
            numbers = turns or (value,)
            for number in numbers:
                if not _is_finite_number(number):
                    raise InputError(
                        f"the advantage {self.name} returned {value!r} for a reward of {reward}; it must return finite "
                        "numbers, or for each agent a list of them, one per turn"
                    )
            first = float(numbers[0])
            credits.append(AgentCredit(first, reward - first, tuple(map(float, turns))))
        return credits

    def of_trees(self, group: Group) -> list[list[float]]:
        """Return the advantage of each piece of `group.pieces`.

        Raises:
            GroupTooSmallError: the function cannot compare so few members.
            InputError: the function raised, or did not return a finite number per piece.
        """
        by_agent = []
        for episode, value, pieces in zip(group.episodes, self._call_function(group), group.pieces, strict=True):
            if not isinstance(value, list | tuple) or len(value) != len(pieces):
                raise InputError(
                    f"the advantage {self.name} returned {value!r} for the {len(pieces)} pieces of {episode}; "
                    'marked with over="tree", it must return a list per agent, with one number per piece'
                )
            for number, piece in zip(value, pieces, strict=True):
                if not _is_finite_number(number):
                    raise InputError(
                        f"the advantage {self.name} returned {number!r} for the piece of {episode} from turn "
                        f"{piece.first}, with value {piece.value}; it must return finite numbers"
                    )
            by_agent.append([float(number) for number in value])
        return by_agent

    def _call_function(self, group: Group) -> list[Any]:
        """Call the function; it must return one entry per agent."""
        try:
            advantages = list(self.function(group, **self.options))
        except GroupTooSmallError:
            raise
        except Exception as error:
            raise InputError(f"the advantage {self.name} raised {type(error).__name__}: {error}") from error
        if len(advantages) != len(group.rewards):
            raise InputError(
                f"the advantage {self.name} returned {len(advantages)} advantages for a group of {len(group.rewards)} "
                "rewards; it must return one per reward, in their order"
            )
        return advantages

    def to_go(self, group: Group) -> list[AgentCredit]:
        """Return the credit of each agent per turn, from the rewards to go; see `advantages_to_go`.

        Raises:
            InputError: as for a call, or the function itself credits turns.
        """

        def of_rewards(rewards: Sequence[float], _: Sequence[Hashable]) -> list[Advantage]:
            credits = self(replace(group, rewards=tuple(rewards)))
            if any(credit.by_turn for credit in credits):
                raise InputError(
                    f"the advantage {self.name} returned advantages per turn, and credit.turn_credit = 'to_go' credits "
                    "turns by the rewards that follow them: set credit.turn_credit = 'sum'"
                )
            return [Advantage(credit.value, credit.baseline) for credit in credits]

        by_turn = advantages_to_go(of_rewards, group.rewards, group.turn_rewards, group.episodes)
        return [credit._replace(by_turn=turns) for credit, turns in zip(self(group), by_turn, strict=True)]


def _is_finite_number(number: Any) -> bool:
    return not isinstance(number, bool) and isinstance(number, int | float) and math.isfinite(number)


def make_advantage_estimator(
    name: str, options: Mapping[str, Any], user_function: Callable[..., Any] | None = None
) -> AdvantageEstimator:
    """Make the estimator that `credit.advantage` names, if it is not one of `REWARD_ESTIMATORS`.

    Args:
        name: name of the estimator.
        options: its arguments in `credit.advantage`.
        user_function: the user's function of this name, if it is already loaded.

    Raises:
        ConfigError: there is no such estimator, or its options do not fit.
    """
    function = GROUP_ESTIMATORS.get(name) or user_function
    if function is None:
        function = find_function("advantage", name, key="credit.advantage")[1]
    mark = ADVANTAGES.get(name) or declaration_of(function)
    check_options(function, options, "credit.advantage")
    return AdvantageEstimator(name=name.rpartition(":")[2], function=function, mark=mark, options=options)
