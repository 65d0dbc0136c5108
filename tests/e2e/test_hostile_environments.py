"""Environments that end their process, in runs of several processes: named, tried apart, dropped by name, passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hostile_acts import FATAL, HARMLESS
from tests.support.hostile_environments import judge

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("act", "codes"),
    [
        ("kills_its_process", [-9, -9, 0]),
        # it ended as if all were well, and nothing was
        pytest.param("replaces_its_process", [-1, -1, 0], marks=pytest.mark.exhaustive),
        pytest.param("stops_the_loop", [1, 0], marks=pytest.mark.exhaustive),
        pytest.param("closes_all_descriptors", [1, 0], marks=pytest.mark.exhaustive),
        ("exhausts_memory_in_a_thread", [0]),
        ("replaces_the_clocks", [0]),
    ],
)
def test_a_run_goes_past_what_an_environment_does_to_its_process(tmp_path: Path, act: str, codes: list[int]) -> None:
    outcome = judge(act, tmp_path)
    assert not outcome.problems, outcome.output
    assert outcome.codes == codes, outcome.output
    assert outcome.is_named == (act in FATAL)


def test_there_are_as_many_acts_as_promised() -> None:
    assert len({**HARMLESS, **FATAL}) >= 45
    assert not HARMLESS.keys() & FATAL.keys()
