"""Baselines that remember: the same after a crash at any operation, in what every step is trained on."""

from __future__ import annotations

import pytest

from agentrl.core.records import TrajectoryCredit
from agentrl.journal.port import StepRow
from agentrl.testing.plugin import SeededSimulation
from tests.sim.crash_cases import Talk
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_several_policies import Duel, policies
from tests.support.crash_scenario import CrashScenario, Machine

pytestmark = pytest.mark.sim

CHANGES = {
    "steps": 4,
    "deterministic": True,
    "policies": {name: {"step_size": 4, "max_staleness": 0} for name in ("left", "right")},
    "credit": {"group_size": 1, "advantage": "role_mean"},
    "checkpoint": {"every": 2, "versions": 2},
}


def trained(machine: Machine) -> dict[tuple[str, int], str]:
    """What each step of each policy was trained on, its advantages included; of a step taken twice, the last time."""
    rows = [record for record in machine.journal.on_disk() if isinstance(record, StepRow)]
    return {(row.version.policy, row.version.step): row.report.input_digest for row in rows}


def test_a_crash_changes_no_baseline() -> None:
    scenario = CrashScenario(Talk, changes=CHANGES)
    undisturbed = scenario.new_machine()
    assert scenario.run(undisturbed, seed=0) is None
    expected = trained(undisturbed)
    assert len(expected) == 8
    taken_twice = 0
    for operation in range(20, undisturbed.disk.operations, 23):
        machine = scenario.new_machine()
        machine.disk.before = lambda number, _, disk=machine.disk, at=operation: number == at and disk.crash()
        scenario.run(machine, seed=operation)
        machine = machine.after_crash("kill")
        before = len(trained(machine))
        assert scenario.run(machine, seed=operation + 1) is None
        assert trained(machine) == expected, f"operation {operation}"
        rows = [record for record in machine.journal.on_disk() if isinstance(record, StepRow)]
        taken_twice += before < 8 and len(rows) > 8
    assert taken_twice, "no crash fell between a checkpoint and a step"


def test_a_zero_sum_game_is_compared_seat_by_seat(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(policies=policies(asker=8, guesser=8), credit=CHANGES["credit"])
        run = SmallRun(config=config, environment=Duel)
        await run.run()
        for policy in ("asker", "guesser"):
            credits: list[TrajectoryCredit] = []
            for batch in run.trainer.batches:
                if batch.policy == policy:
                    units = sorted(batch.units, key=lambda unit: int(unit.episode_id[1:]))
                    credits += [credit for unit in units for credit in unit.credits]
            assert credits[0].advantage == 0.0, "nothing came before it"
            total = weight = 0.0
            for credit in credits:
                assert credit.advantage == credit.reward - credit.baseline
                assert not weight or abs(credit.baseline - total / weight) < 1e-12
                total, weight = 0.95 * total + credit.reward, 0.95 * weight + 1.0

    simulated_loop.run(main)
