"""What the benchmark compares with does what it says: stale work is dropped, losers are cut, batches wait."""

from __future__ import annotations

import pytest

from benchmarks.scheduling_simulated import altered, plan
from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, SimulationResult, simulate_run

pytestmark = pytest.mark.sim


def measured(rule: str, staleness: int = 1, steps: int = 8) -> SimulationResult:
    """A quarter of the benchmark's steps."""
    made = plan(rule, staleness=staleness, slots=16).model_dump(mode="json")
    made["policies"]["solver"]["step_size"] = 64
    return simulate_run(
        altered(Scenario(plan=SimulationPlan.model_validate(made), steps=steps, skipped=3), rule, staleness)
    )


@pytest.fixture(scope="module")
def ours() -> SimulationResult:
    return measured("late")


def test_every_rule_of_the_table_runs_and_none_is_faster_than_ours_without_waste(ours: SimulationResult) -> None:
    for rule in ("group", "episode", "fifo"):
        found = measured(rule, steps=6)
        assert found.waste == 0
        assert found.slots_busy <= ours.slots_busy + 0.02


def test_whatever_is_stale_is_dropped_and_its_sampling_was_for_nothing() -> None:
    found = measured("drop stale")
    assert found.lag_max <= 1
    assert found.older == 0
    assert found.waste > 0.05
    assert found.length_ratio < 0.95, "what is slow is long"


def test_losers_of_a_race_are_cut_and_never_trained(ours: SimulationResult) -> None:
    found = measured("race")
    assert found.waste > 0.1
    assert found.length_ratio < 0.9 * ours.length_ratio, "of the same jobs"


def test_batches_wait_for_their_slowest_and_for_each_other(ours: SimulationResult) -> None:
    barrier, ahead = measured("barrier", staleness=0), measured("one step off")
    assert barrier.token_lag == barrier.lag_max == 0
    assert ahead.lag_max <= 1
    assert 0 < ahead.token_lag < 1
    assert barrier.slots_busy < ahead.slots_busy < ours.slots_busy - 0.1
