"""What people bring works at the first try: agents, their settings, real models' replies, a wheel; see
`first_hour.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.parts import outcomes
from tests.support.blocking_agents import stop_run


def figures(quick: bool) -> dict[str, float | None]:
    """Run the suites; `quick`: without the wheel."""
    return {**_agents(), **_threads(), **_replies(), **({} if quick else _wheel())}


def _agents() -> dict[str, float | None]:
    """Recorded requests of agents of others, and the enumerated gradient of episodes with two temperatures."""
    requests = outcomes("tests/unit/test_recorded_requests.py")
    gradients = outcomes("tests/property/test_two_temperatures.py")
    trained = _named(requests, "test_recorded_requests_are_answered")
    settings = _named(requests, "test_no_token_is_trained_at_another") | _named(gradients, "test_training_has")
    planted = _named(requests, "test_tokens_that_are_trained") | _named(gradients, "test_training_at_the_temperature")
    return {
        "programs_trained": float(sum(trained.values())),
        "programs_recorded": float(len(trained)),
        "own_settings_wrongly_trained": float(sum(not passed for passed in settings.values())),
        "own_settings_recorded": float(len(settings)),
        "own_settings_faults_found": float(sum(planted.values())),
        "own_settings_faults_planted": float(len(planted)),
    }


def _threads() -> dict[str, float | None]:
    with tempfile.TemporaryDirectory(prefix="agentrl-first-hour-") as directory:
        outcome = stop_run(Path(directory))
    return {"agents_at_once": float(outcome.agents_at_once), "stop_seconds": outcome.stop_seconds}


def _replies() -> dict[str, float | None]:
    cases = outcomes("tests/unit/test_foreign_calls.py", "-k", "another_form_is_named or answer_is_not_accused")
    named = _named(cases, "test_a_call_in_another_form")
    accused = sum(not passed for name, passed in cases.items() if name not in named)
    return {
        "foreign_calls_named": float(sum(named.values())),
        "foreign_calls_written": float(len(named)),
        "answers_accused": float(accused),
        "answers_written": float(len(cases) - len(named)),
    }


def _wheel() -> dict[str, float | None]:
    steps = outcomes("tests/e2e/test_packaging.py")
    return {"wheel_steps_failed": float(sum(not passed for passed in steps.values())), "wheel_steps": float(len(steps))}


def _named(cases: Mapping[str, bool], start: str) -> dict[str, bool]:
    return {name: passed for name, passed in cases.items() if name.startswith(start)}
