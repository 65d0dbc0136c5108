"""The guard on what steps are fed: silent where all is trained, however late; not where a part is lost or held."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest

from agentrl.core.records import PolicyVersion
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import StepRow
from agentrl.observe.alarms import LENGTH_STEPS, find_alarms
from agentrl.observe.run_state import RunDisplaySettings, RunState
from agentrl.orchestrator.buffer import ReadyUnit
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.metrics import SelectionBiasTracker, restore_selection_bias
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, simulate_run

pytestmark = pytest.mark.sim

LONG = 200
"""Tokens: a tenth of the children have as many."""


class Listener:
    """Keeps the metrics of steps."""

    def __init__(self) -> None:
        self.state = RunState(plan=RunDisplaySettings())

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        self.state.record(policy, step, metrics)

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        pass


def run(
    release: str, alter: Callable[[Orchestrator], None] = lambda orchestrator: None, *, max_staleness: int = 1
) -> RunState:
    listener = Listener()

    def wire(orchestrator: Orchestrator) -> None:
        orchestrator.observer = listener
        alter(orchestrator)

    tail = {"p50": 32, "p90": 160, "cap": 1280}
    plan = SimulationPlan.model_validate(
        {
            "max_in_flight": 1 << 20,
            "environments": {
                "Propose": {"seats": {"proposer": {"tokens": tail}}, "fan_out": {"Solve": 8}},
                "Solve": {"seats": {"solver": {"tokens": tail}}},
            },
            "policies": {"solver": {"step_size": 32, "max_staleness": max_staleness}, "proposer": {"kind": "frozen"}},
            "credit": {"group_size": 4, "release": release},
            "engine": {"slots": 32, "rates": {1: 32.0}},
            "trainer": {"step_seconds": 1.0},
        }
    )
    scenario = Scenario(plan=plan, steps=LENGTH_STEPS + 14, skipped=3)
    simulate_run(dataclasses.replace(scenario, alter=wire))
    return listener.state


def is_long(ready: ReadyUnit) -> bool:
    return sum(trajectory.tokens for trajectory in ready.trajectories) > LONG


def without_long_ones(orchestrator: Orchestrator) -> None:
    """What is long is dropped before each step."""
    take, buffer = orchestrator.scheduler.pop_units, orchestrator.buffer

    def short(policy: str) -> object:
        buffer.drop(buffer.pop_ready_where(policy, is_long), "too_long")
        return take(policy)

    orchestrator.scheduler.pop_units = short  # type: ignore[method-assign, assignment]


def long_ones_last(orchestrator: Orchestrator) -> None:
    """What is long waits for ever."""
    take, buffer = orchestrator.scheduler.pop_units, orchestrator.buffer
    held: list[ReadyUnit] = []

    def short(policy: str) -> object:
        held.extend(buffer.pop_ready_where(policy, is_long))
        return take(policy)

    orchestrator.scheduler.pop_units = short  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    "release", ["late", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("group", "episode"))]
)
def test_nothing_is_said_where_all_is_trained(release: str) -> None:
    state = run(release)
    newest = list(state.policies["solver"].steps.values())[-1]
    assert newest["selection_bias/length_ratio"] == newest["selection_bias/seconds_ratio"] == pytest.approx(1.0)
    assert newest["selection_bias/reward_shift"] == pytest.approx(0.0)
    assert newest["selection_bias/held_share"] == 0.0
    assert newest["selection_bias/overtaken"] < 6.0
    assert [alarm for alarm in find_alarms(state) if alarm.name == "selection_bias"] == []


def test_a_scheduler_that_drops_long_ones_is_named() -> None:
    state = run("late", without_long_ones)
    (alarm,) = (alarm for alarm in find_alarms(state) if alarm.name == "selection_bias")
    assert "shorter" in alarm.text
    assert "faster" in alarm.text
    assert "truncated_reward" in alarm.advice


def test_a_scheduler_that_holds_long_ones_back_is_named() -> None:
    state = run("episode", long_ones_last, max_staleness=6)  # so that those do not fill the bound
    (alarm,) = (alarm for alarm in find_alarms(state) if alarm.name == "selection_bias")
    assert "shorter" in alarm.text
    newest = list(state.policies["solver"].steps.values())[-1]
    assert newest["selection_bias/held_share"] > 0.02


def test_the_journal_says_what_steps_were_fed(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        first = SmallRun(config=config_for(steps=12, credit={"group_size": 4, "release": "late"}))
        journal = await first.cut_after(6.0)
        steps = len(journal.of_kind(StepRow))
        restored = SelectionBiasTracker(8)
        past = PastRun(journal, {"guesser": PolicyVersion("guesser", 0, steps)}, group_size=4)
        restore_selection_bias({"guesser": restored}, past)
        lived = first.orchestrator.buffer.selection_bias["guesser"].metrics()
        folded = restored.metrics()
        lived.pop("selection_bias/overtaken", None)
        assert folded == pytest.approx(lived)
        assert folded["selection_bias/length_ratio"] == pytest.approx(1.0)

    simulated_loop.run(main)


def test_a_resumed_run_counts_every_unit_once(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        first = SmallRun(config=config_for(steps=12, credit={"group_size": 4, "release": "late"}))
        journal = await first.cut_after(4.0)
        version = PolicyVersion("guesser", 0, max(len(journal.of_kind(StepRow)) - 1, 0))
        second = SmallRun(config=first.config, journal=journal, resumed_at={"guesser": version})
        await second.run()
        newest = [values for _, _, values in second.seen.steps][-1]
        assert newest["selection_bias/length_ratio"] == pytest.approx(1.0)
        assert newest["selection_bias/held_share"] == 0.0
        assert newest["selection_bias/overtaken"] < 3.0

    simulated_loop.run(main)
