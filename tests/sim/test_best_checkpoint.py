"""A metric chooses versions and ends a run, the same after a crash at any operation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import agentrl
from agentrl.app.recovery import ResumeCheckpoint
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task, WeightsRef
from agentrl.journal.run_log import RunLog, RunStart
from agentrl.orchestrator.checkpoints import CheckpointWriter, VersionRetention
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from tests.sim.crash_cases import Talk
from tests.sim.evaluated_run import NUM_TASKS, Answer, Evaluated, held_out, with_skills
from tests.sim.small_run import TASKS, SmallRun, config_for
from tests.support.crash_scenario import CHECKPOINTS, VERSIONS, CrashScenario, Machine
from tests.support.dispatched import members
from tests.support.recording_trainer import TRAINED_FILE
from tests.support.sim_disk import Fate

pytestmark = pytest.mark.sim


class Heard(CrashScenario):
    """Keeps the newest life's loop."""

    orchestrator: Orchestrator

    def rewired(self, orchestrator: Orchestrator, machine: Machine) -> None:
        self.orchestrator = orchestrator

    def chosen(self, machine: Machine) -> tuple[float, int]:
        """The best mean and its step; the files of all that was chosen are there, as published."""
        measured = self.orchestrator.best.measured
        assert measured.versions.keys() == {"left", "right"}
        for policy, version in measured.versions.items():
            weights, file = machine.journal.published(version), VERSIONS / policy / f"{version.lineage}.{version.step}"
            assert weights is not None
            assert machine.disk.digest(file / TRAINED_FILE) == weights.sha256
        return measured.best, measured.versions["left"].step


class Unsynced(Heard):
    """Writes checkpoints that name versions which a power cut may take."""

    def rewired(self, orchestrator: Orchestrator, machine: Machine) -> None:
        super().rewired(orchestrator, machine)
        orchestrator.retention = _NeverDurable(keep=orchestrator.retention._keep, disk=machine.disk)


class _NeverDurable(VersionRetention):
    async def make_durable(self, versions: Iterable[WeightsRef]) -> None:
        pass


FATES: tuple[Fate, ...] = ("kill", "lost", "mixed")


def resumed_after_best(scenario: Heard) -> int:
    """Crash between a version's first tokens and the checkpoint that needs its files, among others; returns the number
    of crashes after the best step's checkpoint, after each of which the choice was the undisturbed run's."""
    undisturbed = scenario.new_machine()
    assert scenario.run(undisturbed, seed=0) is None
    expected = scenario.chosen(undisturbed)
    assert 2 <= expected[1] < 6, "the last step is no choice"
    count = 0
    for operation in range(20, undisturbed.disk.operations, 31):
        crashed = scenario.new_machine()
        crashed.disk.before = lambda number, _, disk=crashed.disk, at=operation: number == at and disk.crash()
        scenario.run(crashed, seed=operation)
        for fate in FATES:
            machine = crashed.after_crash(fate, seed=operation)
            assert scenario.run(machine, seed=operation + 1) is None
            assert scenario.chosen(machine) == expected, f"operation {operation}, {fate}"
            recovered = scenario.orchestrator.board.current("left").lineage
            count += scenario.orchestrator.best.measured.versions["left"].lineage < recovered
    return count


def changes_of_best() -> dict[str, Any]:
    return {
        "steps": 6,
        "deterministic": True,
        "policies": {name: {"step_size": 4, "max_staleness": 0} for name in ("left", "right")},
        "checkpoint": {"every": 2, "versions": 1},
        "best": {"metric": "reward/mean", "window": 2},
    }


def test_a_crash_changes_no_choice_and_loses_no_file_of_it() -> None:
    assert resumed_after_best(Heard(Talk, changes=changes_of_best())), "no crash fell after the best step's checkpoint"


def test_a_best_version_that_its_checkpoint_did_not_sync_is_missed() -> None:
    scenario = Unsynced(Talk, changes=changes_of_best())
    undisturbed = scenario.new_machine()
    assert scenario.run(undisturbed, seed=0) is None
    assert scenario.chosen(undisturbed), "without a crash nothing is missed"
    with pytest.raises((AssertionError, OSError)):
        resumed_after_best(scenario)


class SlowlySynced(CrashScenario):
    """A disk that syncs for seconds, in which evaluations end. Looks after each checkpoint at what a power cut left."""

    def __init__(self) -> None:
        self.chosen: list[PolicyVersion] = []
        self.missing: list[PolicyVersion] = []
        super().__init__(
            Talk,
            held_out=[Task(id=f"{number}", data={}) for number in range(4)],
            changes={
                "steps": 6,
                "checkpoint": {"every": 1, "versions": 2},
                "evaluation": {"tasks": 4, "every": 1},
                "best": {"metric": "evaluation/reward"},
            },
        )

    def rewired(self, orchestrator: Orchestrator, machine: Machine) -> None:
        orchestrator.retention = _SlowlyDurable(keep=orchestrator.retention._keep, disk=machine.disk)

    def checkpoints(self, machine: Machine) -> CheckpointWriter:
        return _ExaminedCheckpoints(self, machine)

    def examine(self, machine: Machine) -> None:
        left = machine.after_crash("lost")
        manifest = ResumeCheckpoint.find(CHECKPOINTS, disk=left.disk).manifest
        assert manifest is not None
        for version in manifest.measured.versions.values():
            weights, name = machine.journal.published(version), f"{version.lineage}.{version.step}"
            self.chosen.append(version)
            try:
                digest = left.disk.digest(VERSIONS / version.policy / name / TRAINED_FILE)
            except OSError:
                digest = ""
            if weights is None or digest != weights.sha256:
                self.missing.append(version)


class _SlowlyDurable(VersionRetention):
    async def make_durable(self, versions: Iterable[WeightsRef]) -> None:
        await super().make_durable(versions)
        await asyncio.sleep(2.0)


class _ExaminedCheckpoints(CheckpointWriter):
    def __init__(self, scenario: SlowlySynced, machine: Machine) -> None:
        super().__init__(CHECKPOINTS, disk=machine.disk)
        self._scenario, self._machine = scenario, machine

    async def write(self, *arguments: Any) -> None:
        await super().write(*arguments)
        self._scenario.examine(self._machine)


def test_a_checkpoint_names_no_best_version_that_was_measured_while_it_synced() -> None:
    for seed in range(4):
        scenario = SlowlySynced()
        assert scenario.run(scenario.new_machine(), seed=seed) is None
        assert scenario.chosen
        assert scenario.missing == []


def test_a_run_ends_when_its_metric_is_good_enough(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        best = {"metric": "episodes/trained", "window": 1, "stop_at": 16}
        run = SmallRun(config=config_for(steps=8, best=best))
        outcome = await run.run()
        assert len(run.trainer.batches) == 2
        assert not outcome.interrupted
        assert run.orchestrator.best.why_stop() == "episodes/trained reached 16"
        assert run.orchestrator.buffer.ledger.in_flight == run.orchestrator.buffer.ledger.ready == 0

    simulated_loop.run(main)


def skilled_at(step: int) -> Callable[[GenerateRequest, str, PolicyVersion], list[int]]:
    """A script that guesses right with the weights of one step only; all tasks have the digit 7."""
    return lambda request, policy, version: [ord("7" if version.step == step else "0"), STOP_TOKEN]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("window", [1, 2])
def test_training_rewards_choose_the_version_that_earned_them(
    simulated_loop: SeededSimulation, max_staleness: int, window: int
) -> None:
    async def main() -> None:
        sections = {"best": {"metric": "reward/mean", "window": window}, "checkpoint": {"every": 3, "versions": 1}}
        run = SmallRun(
            config=config_for(steps=6, max_staleness=max_staleness, **sections),
            script=skilled_at(2),
            tasks=[TASKS[7]],
        )
        await run.run()
        best = run.orchestrator.best
        assert best.measured.best > 0.0
        assert best.measured.versions == {"guesser": PolicyVersion("guesser", 0, 2)}

    simulated_loop.run(main)


class Pair(agentrl.Environment):
    """Two policies answer; both are rewarded where both are right."""

    seats = ("left", "right")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turns = [await ctx.agent(seat).act(agentrl.user("Guess a digit.")) for seat in self.seats]
        for seat in self.seats:
            ctx.agent(seat).reward(float(all(turn.text == "7" for turn in turns)))


@pytest.mark.parametrize("metric", ["left/reward/mean", "right/reward/mean"])
def test_training_rewards_choose_the_versions_that_played_together(
    simulated_loop: SeededSimulation, metric: str
) -> None:
    async def main() -> None:
        policies = {name: {"step_size": 8, "max_staleness": 0} for name in Pair.seats}
        config = config_for(steps=5, policies=policies, best={"metric": metric, "window": 1})
        run = SmallRun(config=config, environment=Pair, script=skilled_at(2), tasks=[TASKS[7]])
        await run.run()
        measured = run.orchestrator.best.measured
        assert measured.best == 1.0
        assert {policy: version.step for policy, version in measured.versions.items()} == {"left": 2, "right": 2}

    simulated_loop.run(main)


def test_evaluations_choose_the_versions_they_are_of(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        sections = {"best": {"metric": "evaluation/reward", "window": 1}, "evaluation": {"tasks": 8, "every": 1}}
        run = SmallRun(config=config_for(steps=6, **sections), held_out=TASKS[:8])
        await run.run()
        rewards = [metrics["guesser"]["evaluation/reward"] for metrics in run.seen.evaluations]
        measured = run.orchestrator.best.measured
        assert measured.best == max(rewards)
        assert measured.versions["guesser"].step == run.seen.evaluated[rewards.index(max(rewards))]

    simulated_loop.run(main)


def evaluated_scenario(*percents: int, steps: int, every: int) -> Evaluated:
    """A run whose best version is chosen by evaluations of all tasks, with a checkpoint before every second one."""
    changes: dict[str, Any] = {
        "steps": steps,
        "policies": {"guesser": {"step_size": 4, "max_staleness": 0}},
        "checkpoint": {"every": 2, "versions": 1},
        "evaluation": {"tasks": NUM_TASKS, "every": every},
        "best": {"metric": "evaluation/reward", "window": 1},
    }
    return Evaluated(Answer, changes=changes, script=with_skills(*percents), held_out=held_out())


def times_played(log: RunLog) -> Counter[tuple[int, int]]:
    """Numbers of committed held-out episodes, keyed by the step of their version and their seed."""
    played = members(log, purpose="evaluate")
    return Counter((header.trajectories[0].oldest_step, spec.seed) for spec, header in played)


def test_a_kill_after_an_evaluation_keeps_its_version() -> None:
    scenario = evaluated_scenario(30, 30, 95, 60, steps=6, every=2)
    assert scenario.run(scenario.new_machine(), seed=0) is None
    expected = scenario.orchestrator.best.measured
    machine = scenario.new_machine()
    disk, journal = machine.disk, machine.journal

    def is_evaluated() -> bool:
        return bool(journal.rows("SELECT 1 FROM metrics WHERE name = 'evaluation/reward' AND step = 2"))

    disk.before = lambda *_: is_evaluated() and disk.crash()
    scenario.run(machine, seed=1)
    machine = machine.after_crash("kill")
    manifest = scenario.recovery(machine).manifest
    assert manifest is not None
    assert manifest.versions["guesser"].step == 2
    assert manifest.measured.versions["guesser"].step == 0, "the checkpoint has the result"
    assert scenario.run(machine, seed=2) is None
    measured = scenario.orchestrator.best.measured
    assert measured.versions["guesser"].step == expected.versions["guesser"].step == 2
    assert measured.best == expected.best
    assert set(times_played(machine.journal).values()) == {1}, "nothing is played twice"


@pytest.mark.parametrize("code_changed", [False, True])
@pytest.mark.parametrize("every", [0, 2])
def test_the_last_evaluation_of_a_finished_run_counts_after_a_resume(every: int, code_changed: bool) -> None:
    scenario = evaluated_scenario(30, 30, 95, 60, steps=2, every=every)
    machine = scenario.new_machine()
    assert scenario.run(machine, seed=0) is None
    machine = machine.after_crash("kill")
    scenario.config = scenario.config.model_copy(update={"steps": 4})
    if code_changed:
        start = RunStart(lineage=1, began_at=0.0, reward_code_changed=("env.py",))
        machine.journal.starts = lambda: [start]  # type: ignore[method-assign]
    assert scenario.run(machine, seed=1) is None
    played = times_played(machine.journal)
    if code_changed:
        assert {played[key] for key in played if key[0] == 2} == ({2} if every else {1}), "rewards of other code"
    else:
        assert scenario.orchestrator.best.measured.versions["guesser"].step == 2
        assert set(played.values()) == {1}, "nothing is played twice"
