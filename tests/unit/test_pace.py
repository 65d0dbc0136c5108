"""The bound on staleness that a run chose, as its recorded metrics tell: the screen, and `agentrl doctor RUN`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from agentrl.cli.main import main
from agentrl.observe.alarms import find_alarms
from agentrl.observe.metrics import PREDICTED_STEP, STALENESS_BOUND, TOGETHER
from agentrl.observe.pace import ChosenStaleness, StepPace, explain_staleness
from agentrl.observe.run_screen import render_run_screen
from agentrl.observe.run_state import RunDisplaySettings, RunState, display_settings_from_config
from tests.sim.small_run import config_for

PREDICTED = {0: 4.0, 1: 2.0, 2: 1.5, 4: 1.0}


def steps_of(*bounds: int) -> dict[int, dict[str, float]]:
    """Metrics of steps that take as long as predicted, after each of which a bound was in force."""
    steps, before = dict[int, dict[str, float]](), 0
    for number, bound in enumerate(bounds, start=1):
        steps[number] = {
            STALENESS_BOUND: float(bound),
            TOGETHER: 1.0,
            "step/seconds": PREDICTED[before],
            "staleness/mean": float(before),
            **{f"{PREDICTED_STEP}{each}": seconds for each, seconds in PREDICTED.items()},
        }
        before = bound
    return steps


def test_a_step_belongs_to_the_bound_before_it_once_that_shows() -> None:
    chosen = ChosenStaleness.of_steps(steps_of(0, 4, 4, 4, 4, 4, 4, 4))
    assert chosen is not None
    assert chosen.bound == 4
    assert chosen.paces == {
        0: StepPace(4.0, 4.0),
        1: StepPace(2.0, None),
        2: StepPace(1.5, None),
        4: StepPace(1.0, 1.0),
    }
    assert chosen.reason == "staleness 4: a step takes 1 s instead of 4 s in lockstep"
    assert chosen.table[4] == "1 s predicted, 1 s seen"


def test_steps_on_what_was_sampled_ahead_belong_to_no_bound() -> None:
    steps = steps_of(4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0)
    for step in range(8, 12):
        steps[step]["step/seconds"] = 0.1
    chosen = ChosenStaleness.of_steps(steps)
    assert chosen is not None
    assert chosen.paces[0] == StepPace(4.0, 4.0)


def test_a_run_with_a_number_chose_nothing() -> None:
    assert ChosenStaleness.of_steps({1: {"step/seconds": 1.0}}) is None


@pytest.mark.parametrize(
    ("bound", "predicted", "together", "text"),
    [
        (0, {}, 1.0, "lockstep: the first steps are timed"),
        (1, {}, 1.0, "staleness 1: the first steps are timed"),
        (0, {0: 1.0, 1: 0.9, 2: 0.9}, 1.0, "lockstep: staleness 1 would save 10% a step"),
        (
            0,
            {0: 1.0, 1: 1.2, 2: 1.3},
            0.4,
            "lockstep: engine and trainer share the cores; staleness 1 would save no time",
        ),
        (0, {0: 1.0}, 1.0, "lockstep: the other settings of the run allow nothing else"),
        (2, {1: 1.0, 2: 0.8}, 1.0, "staleness 2: a step takes 0.8 s"),
    ],
)
def test_a_bound_is_shown_with_its_reason(bound: int, predicted: dict[int, float], together: float, text: str) -> None:
    assert explain_staleness(bound, predicted, together) == text


def test_the_screen_shows_predicted_and_seen_times() -> None:
    state = RunState(plan=RunDisplaySettings(steps=9, max_staleness={"solver": None}))
    for step, values in steps_of(0, 4, 4, 4, 4, 4, 4).items():
        state.record("solver", step, values)
    console = Console(width=100, record=True)
    console.print(render_run_screen(state))
    text = console.export_text()
    assert "staleness 4: a step takes 1 s" in text
    assert "lockstep: 4 s predicted, 4 s seen a step" in text
    assert "staleness 2: 1.5 s predicted a step" in text


def test_units_in_flight_when_the_bound_falls_raise_no_alarm() -> None:
    config = {"policies": {"solver": {"max_staleness": "auto"}}}
    state = RunState(plan=display_settings_from_config(config))
    for step, values in steps_of(4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0).items():
        state.record("solver", step, values | {"staleness/mean": 3.0})
    assert "staleness" not in [alarm.name for alarm in find_alarms(state)]


def test_the_doctor_of_a_run_says_how_long_its_steps_take(sample_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(sample_run)]) == 0
    printed = capsys.readouterr().out
    assert "solver" in printed
    assert "max_staleness = 2, as set" in printed


def test_a_deterministic_run_needs_a_number() -> None:
    with pytest.raises(ValueError, match=r"max_staleness = 'auto'.*Set policies.guesser.max_staleness = 1, or 0"):
        config_for(max_staleness="auto", deterministic=True)


def test_max_lag_bounds_what_is_chosen_from() -> None:
    policy = {"step_size": 8, "max_lag": 2, "max_staleness": "auto"}
    trained = config_for(policies={"guesser": policy}).trained["guesser"]
    assert (trained.max_staleness, trained.staleness_choices, trained.largest_staleness) == ("auto", (0, 1, 2), 2)
