"""Who plays what: how many units a group brings, and what is refused before anything is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.app.plan import resolve
from agentrl.config.load import load
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
    return [dict(demand.units) for demand in resolve(config, environment).demands]


def test_a_policy_of_parent_and_children_brings_the_units_of_both() -> None:
    everywhere = {"policy": {"step_size": 8}}
    assert units(Plan, policies=everywhere) == [{"policy": 2 * (1 + 3)}]
    assert units(Review, policies=everywhere) == [{"policy": 2}], "two seats of an episode are one unit"
    apart = {"planner": {"step_size": 8}, "writer": {"step_size": 8}}
    assert units(Plan, policies=apart, seats={"critic": "planner"}) == [{"planner": 2 * (1 + 3), "writer": 2 * 3}]
    in_turn = {"writer": ["planner", "writer"], "critic": "writer"}
    assert units(Plan, policies=apart, seats=in_turn) == [{"planner": 8, "writer": 6}, {"planner": 2, "writer": 6}]


def test_a_group_that_could_never_be_let_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="step_size"):
        units(Plan, policies={"policy": {"step_size": 3}})


def test_a_seat_that_nobody_holds_and_a_policy_that_holds_none_are_named() -> None:
    apart = {"planner": {"step_size": 8}, "writer": {"step_size": 8}}
    with pytest.raises(ConfigError, match=r"Review\.critic"):
        units(Plan, policies=apart)
    with pytest.raises(ConfigError, match=r"policies\.spare"):
        units(Plan, policies={**apart, "spare": {"kind": "frozen"}}, seats={"critic": "writer"})
    with pytest.raises(ConfigError, match=r"seats\.Review\.writter"):
        units(Plan, policies=apart, seats={"critic": "writer", "Review.writter": "planner"})
    with pytest.raises(ValueError, match="'wirter'"):
        units(Plan, policies=apart, seats={"critic": "wirter"})


def test_two_policies_of_one_name_are_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[policies.solver]\nstep_size = 8\n[policies.solver]\nstep_size = 16\n")
    with pytest.raises(ConfigError, match=r"run\.toml:3:17"):
        load(file, [])
    file.write_text('policies.solver.kind = "frozen"\npolicies.solver.kind = "trained"\n')
    with pytest.raises(ConfigError, match=r"run\.toml:2"):
        load(file, [])
