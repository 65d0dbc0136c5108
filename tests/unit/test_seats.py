"""Who plays what: how many units a group brings, and what is refused before anything is sampled."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.app.seats import demands_of
from agentrl.core.errors import ConfigError
from tests.sim.small_run import config_for


class Review(agentrl.Environment):
    """Two seats of one episode."""

    seats = ("writer", "critic")


class Plan(agentrl.Environment):
    """A planner that has three reviews made."""

    seats = ("planner",)
    fan_out: ClassVar[dict[str, int]] = {"Review": 3}


def units(environment: type[agentrl.Environment], **changes: Any) -> list[dict[str, int]]:
    config = config_for(credit={"group_size": 2}, **changes)
    return [dict(demand.units) for demand in demands_of(config, environment)]


def test_a_policy_of_parent_and_children_brings_the_units_of_both() -> None:
    everywhere = {"policy": {"step_size": 8}}
    assert units(Plan, policies=everywhere) == [{"policy": 2 * (1 + 3)}]
    assert units(Review, policies=everywhere) == [{"policy": 2}], "two seats of an episode are one unit"
    apart = {"planner": {"step_size": 8}, "writer": {"step_size": 8}}
    assert units(Plan, policies=apart, seats={"critic": "planner"}) == [{"planner": 2 * (1 + 3), "writer": 2 * 3}]
    in_turn = {"writer": ["planner", "writer"], "critic": "writer"}
    assert units(Plan, policies=apart, seats=in_turn) == [{"planner": 8, "writer": 6}, {"planner": 2, "writer": 6}]


def test_a_group_that_could_never_be_let_in_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a group brings 8 units of policy, .* step_size = 6"):
        units(Plan, policies={"policy": {"step_size": 3}})
