"""The advantage estimators by their names in `credit.advantage`, and users' own."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from agentrl.core.custom_functions import FunctionDeclaration, check_options, declaration_of, find_function
from agentrl.core.errors import GroupTooSmallError, InputError
from agentrl.credit.group import Advantage, AdvantageFunction, AgentCredit, Group
from agentrl.credit.group_baselines import group_mean, group_std, leave_one_out, no_baseline
from agentrl.credit.to_go import advantages_to_go

REWARD_ESTIMATORS: dict[str, AdvantageFunction] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_std": group_std,
    "role_mean": no_baseline,
    "none": no_baseline,
}
"""Estimators that need the rewards alone, keyed by the name in `credit.advantage`; `role_mean` gets its baseline at the
step (`baselines.RoleMeans`)."""


def reward_estimator(advantage: str, *, loss: str) -> AdvantageFunction:
    """Return the estimator of `REWARD_ESTIMATORS` that a run with this loss uses.

    `dpo` reads the order of the advantages. With several agents in a seat, `leave_one_out` has a baseline for each
    episode, under which an agent of smaller reward may have the larger advantage; `group_mean` keeps their order.
    """
    return group_mean if (advantage, loss) == ("leave_one_out", "dpo") else REWARD_ESTIMATORS[advantage]


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
        turn_states = group.turn_states or ((),) * len(advantages)
        for value, reward, states in zip(advantages, group.rewards, turn_states, strict=True):
            turns = tuple(value) if isinstance(value, list | tuple) else ()
            numbers = turns or (value,)
            # Without states, the agent was played under an advantage that did not compare turns.
            num_turns = 0 if self.mark.over == "step" else len(states) or len(turns)
            if not all(map(_is_finite_number, numbers)) or len(turns) not in (0, num_turns):
                raise InputError(
                    f"the advantage {self.name} returned {value!r} for an agent with a reward of {reward} and "
                    f"{num_turns} turns; it must return a finite number or, unless it compares a step, a list with "
                    "one per turn"
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
            values = self.function(group, **self.options)
            advantages = [value.tolist() if hasattr(value, "tolist") else value for value in values]
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
    return not isinstance(number, bool) and isinstance(number, Real) and math.isfinite(number)


def make_advantage_estimator(
    name: str, options: Mapping[str, Any], user_function: Callable[..., Any] | None = None
) -> AdvantageEstimator:
    """Make the estimator that `credit.advantage` names, if it is not built in.

    Args:
        name: name of the estimator.
        options: its arguments in `credit.advantage`.
        user_function: the user's function of this name, if it is already loaded.

    Raises:
        ConfigError: there is no such estimator, or its options do not fit.
    """
    function = user_function or find_function("advantage", name, key="credit.advantage")[1]
    check_options(function, options, "credit.advantage")
    mark = declaration_of(function)
    return AdvantageEstimator(name=name.rpartition(":")[2], function=function, mark=mark, options=options)
