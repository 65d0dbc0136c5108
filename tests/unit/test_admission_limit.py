"""The limit of `max_in_flight = "auto"`: when it rises, falls and stays."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentrl.core.errors import ConfigError
from agentrl.core.holds import InFlightLimit
from agentrl.observe.bottleneck import TURNS
from agentrl.orchestrator.admission_limit import AdmissionController
from tests.sim.small_run import config_for


def looked(
    controller: AdmissionController, *, in_flight: int, engine: float, memory: float = 0.0, is_held: bool = True
) -> int:
    """The limit after a minute of as many calls in the engine and without room, and a turn of each episode."""
    controller.restart()
    controller.look(0.0, {}, in_flight, is_held=is_held)
    totals = {"engine": 60 * engine, "memory": 60 * memory, TURNS: float(in_flight)}
    controller.look(60.0, totals, in_flight, is_held=is_held)
    return controller.limit


def test_it_begins_with_what_the_engine_samples_at_once_and_with_a_group_at_least() -> None:
    assert AdmissionController(16, 8).limit == 16
    assert AdmissionController(4, 8).limit == 8


def test_it_rises_while_the_engine_has_places_and_the_limit_is_what_holds_episodes_back() -> None:
    assert looked(AdmissionController(16, 8), in_flight=16, engine=8.0) == 21
    assert looked(AdmissionController(16, 8), in_flight=16, engine=8.0, is_held=False) == 16
    assert looked(AdmissionController(16, 8), in_flight=16, engine=15.5) == 16


def test_it_falls_while_calls_wait_for_room_or_a_place_and_not_below_a_group() -> None:
    controller = AdmissionController(100, 8)
    assert looked(controller, in_flight=100, engine=20.0, memory=60.0) == 80
    assert controller.reason == InFlightLimit("room", {"waiting": 60.0, "running": 100})
    assert looked(controller, in_flight=90, engine=20.0, memory=60.0) == 80, "ten still have to end"
    assert looked(controller, in_flight=9, engine=1.0, memory=5.0) == 8
    queued = AdmissionController(16, 8)
    queued.limit = 40
    assert looked(queued, in_flight=40, engine=36.0) == 32
    assert queued.reason == InFlightLimit("places", {"waiting": 20.0, "running": 40})


def test_some_may_wait_without_any_change() -> None:
    controller = AdmissionController(16, 8)
    controller.limit = 20
    assert looked(controller, in_flight=20, engine=19.0) == 20
    assert looked(controller, in_flight=20, engine=10.0, memory=8.0) == 20


def test_it_waits_for_turns_before_it_changes_again() -> None:
    controller = AdmissionController(16, 8)
    for seconds in range(100):
        assert not controller.look(float(seconds), {"engine": 2.0 * seconds, TURNS: 3.0}, 16, is_held=True)


def test_what_cannot_be_adjusted_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='max_in_flight = "auto" needs an engine'):
        AdmissionController(0, 8)
    with pytest.raises(ValidationError, match="max_in_flight = 'auto'"):
        config_for(max_in_flight="auto", deterministic=True, max_staleness=0)
