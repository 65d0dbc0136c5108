"""Baselines that remember: the same after a crash at any operation, in what every step is trained on."""

from __future__ import annotations

import pytest

from agentrl.journal.port import StepRow
from agentrl.testing.plugin import SeededSimulation
from tests.sim.crash_cases import Talk
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_several_policies import Duel, policies
from tests.support.crash_scenario import CrashScenario, Machine
from tests.support.dispatched import members

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


@pytest.mark.parametrize("max_staleness", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_crash_changes_no_baseline(max_staleness: int) -> None:
    """At staleness 1, agents of discarded weights are trained; the same steps give the same means again."""
    policy = {"step_size": 4, "max_staleness": max_staleness, "lora": {"rank": 2}}
    changes = {**CHANGES, "policies": dict.fromkeys(("left", "right"), policy)}
    scenario = CrashScenario(Talk, changes=changes)
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
        began = {
            (header.episode_id, own.policy): own.oldest_step
            for _, header in members(run.journal)
            for own in header.trajectories
        }
        for policy in ("asker", "guesser"):
            means: list[float] = []
            total = weight = 0.0
            for batch in (batch for batch in run.trainer.batches if batch.policy == policy):
                rewards = {unit.episode_id: unit.credits[0].reward for unit in batch.units}
                for unit in batch.units:
                    (credit,) = unit.credits
                    assert credit.advantage == credit.reward - credit.baseline
                    others = [reward for name, reward in rewards.items() if name != unit.episode_id]
                    known = means[began[unit.episode_id, policy]] if means else sum(others) / len(others)
                    assert abs(credit.baseline - known) < 1e-12
                if not means:  # of agents that began before there was a mean
                    first = list(rewards.values())[:-1]
                    means.append(sum(first) / len(first))
                total, weight = 0.8 * total + sum(rewards.values()), 0.8 * weight + len(rewards)
                means.append(total / weight)
            assert len(means) == 5

    simulated_loop.run(main)
