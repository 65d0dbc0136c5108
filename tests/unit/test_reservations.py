"""Units that children have yet to bring: what is declared, what is learned, and who gives it back."""

from __future__ import annotations

from typing import ClassVar

import agentrl
from agentrl.orchestrator.child_reservations import ChildUnitReservations


class Solve(agentrl.Environment):
    seats = ("solver", "critic")

    async def run(self, ctx: agentrl.EpisodeContext) -> None: ...


class Propose(Solve):
    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Solve": 4}


class Teach(Solve):
    seats = ("teacher",)
    fan_out: ClassVar[dict[str, int]] = {"Propose": 2, "Solve": 1}


class Endless(Solve):
    seats = ("solver",)
    fan_out: ClassVar[dict[str, int]] = {"Endless": 2}


class Undeclared(Solve):
    seats = ("proposer",)


POLICIES = {"solver": "solver", "critic": "judge", "proposer": "proposer", "teacher": "proposer"}


def reservations() -> ChildUnitReservations:
    """The judge is frozen; the proposer teaches as well."""
    return ChildUnitReservations({"solver", "proposer"}, lambda seat, group: POLICIES[seat.rpartition(".")[2]])


def test_a_child_takes_its_part_over_and_the_rest_is_given_back() -> None:
    held = reservations()
    held.reserve("e0", Propose, 0)
    held.reserve("e1", Propose, 0)
    assert (held.units("solver"), held.units("judge"), held.units("proposer")) == (8, 0, 0)
    held.hand_over("e0", Solve, 3, "r#1")
    assert held.units("solver") == 5
    held.hand_over("e0", Solve, 3, "r#1")  # by a parent that is executed again
    assert held.units("solver") == 5
    held.hand_over("e0", Solve, 3, "r#2")  # more than were declared
    assert held.units("solver") == 4
    held.cancel("e0")
    held.cancel("e1")
    assert held.units("solver") == 0
    held.hand_over("e1", Solve, 3, "r#1")
    held.cancel("e1")
    assert held.units("solver") == 0


def test_children_of_children_are_reserved_where_the_first_is_admitted() -> None:
    held = reservations()
    held.reserve("e0", Teach, 0)
    assert (held.units("solver"), held.units("proposer")) == (9, 2)
    held.hand_over("e0", Propose, 2, "r#1")
    for index in range(2):
        held.reserve(f"e0~0.r#1.{index}", Propose, 0)
    assert (held.units("solver"), held.units("proposer")) == (9, 0)
    held.cancel("e0~0.r#1.0")
    assert held.units("solver") == 5
    held.cancel("e0")
    assert held.units("solver") == 4
    held.cancel("e0~0.r#1.1")
    assert held.units("solver") == 0


def test_as_deep_as_episodes_nest_and_no_deeper() -> None:
    held = reservations()
    held.reserve("e0", Endless, 0)
    assert held.units("solver") == 2 + 4 + 8


def test_what_is_not_declared_is_learned() -> None:
    held = reservations()
    held.reserve("e0", Undeclared, 0)
    assert held.units("solver") == 0
    held.hand_over("e0", Solve, 5, "r#1")
    held.hand_over("e0", Solve, 2, "r#2")
    held.reserve("e1", Undeclared, 0)
    assert held.units("solver") == 7


def test_another_attempt_reserves_anew() -> None:
    held = reservations()
    held.reserve("e0", Propose, 0)
    held.hand_over("e0", Solve, 4, "r#1")
    assert held.units("solver") == 0
    held.reserve("e0", Propose, 0)
    assert held.units("solver") == 4
    held.hand_over("e0", Solve, 4, "r#1")
    assert held.units("solver") == 0
