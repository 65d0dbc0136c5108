"""The bound on staleness that a run chose, as its recorded metrics tell: the screen."""

from __future__ import annotations

import pytest
from rich.console import Console

from agentrl.observe.alarms import find_alarms
from agentrl.observe.metrics import STALENESS_BOUND, TIMED_STEP
from agentrl.observe.pace import recorded_choice
from agentrl.observe.run_screen import render_run_screen
from agentrl.observe.run_state import RunDisplaySettings, RunState, display_settings_from_config
from tests.sim.small_run import config_for


def test_a_run_with_a_number_chose_nothing() -> None:
    assert recorded_choice({"step/seconds": 1.0}) is None


@pytest.mark.parametrize(
    ("bound", "seconds", "text"),
    [
        (0, {}, "lockstep: its steps are being timed"),
        (1, {0: 4.0}, "staleness 1: 4 s a step in lockstep, its steps are being timed"),
        (0, {0: 1.0, 1: 1.2}, "lockstep: 1 s a step in lockstep, 1.2 s a step with staleness 1"),
        (1, {1: 0.8}, "staleness 1: 0.8 s a step with staleness 1"),
    ],
)
def test_a_bound_is_shown_with_its_reason(bound: int, seconds: dict[int, float], text: str) -> None:
    recorded = {STALENESS_BOUND: float(bound), **{f"{TIMED_STEP}{each}": value for each, value in seconds.items()}}
    assert recorded_choice(recorded) == text
    state = RunState(plan=RunDisplaySettings(steps=9, max_staleness={"solver": None}))
    state.record("solver", 1, recorded)
    console = Console(width=120, record=True)
    console.print(render_run_screen(state))
    assert text in console.export_text()


def test_units_in_flight_when_the_bound_falls_raise_no_alarm() -> None:
    config = {"policies": {"solver": {"max_staleness": "auto"}}}
    state = RunState(plan=display_settings_from_config(config))
    for step, bound in enumerate((1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0), 1):
        state.record("solver", step, {STALENESS_BOUND: float(bound), "staleness/mean": 1.0})
    assert "staleness" not in [alarm.name for alarm in find_alarms(state)]


def test_a_deterministic_run_needs_a_number() -> None:
    with pytest.raises(ValueError, match=r"max_staleness = 'auto'.*Set policies.guesser.max_staleness = 1, or 0"):
        config_for(max_staleness="auto", deterministic=True)


def test_max_lag_bounds_what_is_chosen_from() -> None:
    policy = {"step_size": 8, "max_lag": 2, "max_staleness": "auto"}
    trained = config_for(policies={"guesser": policy}).trained["guesser"]
    assert (trained.max_staleness, trained.staleness_choices, trained.largest_staleness) == ("auto", (0, 1), 1)
