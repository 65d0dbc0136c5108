"""Whatever interrupts it, every episode ends with the turns it would have had, and nothing is sampled twice."""

from __future__ import annotations

from collections import Counter

import pytest

from agentrl.testing.plugin import SimulatedLoop
from tests.sim.interrupted_run import check_schedule

pytestmark = pytest.mark.sim


def test_interrupted_turns_are_those_of_the_undisturbed_run(simulated_loop: SimulatedLoop) -> None:
    did: Counter[str] = Counter()
    for seed in simulated_loop.seeds():
        did += check_schedule(seed).did
    assert len(did) == 7 or len(simulated_loop.seeds()) < 20, f"the schedules did only {did}"
