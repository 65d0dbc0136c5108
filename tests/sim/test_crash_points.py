"""A run dies at any operation, of the journal or of the disk, and goes on as promised; mutants of it are noticed."""

from __future__ import annotations

from typing import ClassVar

import pytest

import agentrl
from agentrl.core.errors import StorageError
from agentrl.orchestrator.checkpoints import CheckpointWriter, Manifest
from tests.sim import MANY_SEEDS
from tests.sim.crash_cases import (
    MUTANTS,
    AcknowledgeBeforeCommit,
    CursorInItsOwnFile,
    FailingEngine,
    NoSyncBeforeRename,
    RoundsAnywhere,
    Talk,
    VersionReuse,
)
from tests.sim.small_run import TASKS, Ask, guess
from tests.support.crash_oracle import compared, finished
from tests.support.crash_scenario import CHECKPOINTS, CrashScenario, Machine
from tests.support.crashes import crash_everywhere, crash_test
from tests.support.sim_disk import Fault

pytestmark = pytest.mark.sim


class Total(agentrl.ToolEnvironment):
    """Adds up what a tool is given; its tasks say where to begin."""

    called: ClassVar[set[str]] = set()

    def prompt(self, task: agentrl.Task) -> str:
        self.total = int(task.data["start"])
        return "Add numbers. " * 60

    @agentrl.tool
    def add_to_the_running_total_of_this_episode(self, number: int) -> int:
        """Add a number."""
        self.total += number
        return self.total

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        Total.called |= {task.id for turn in episode.turns if turn.tool_calls}
        return self.total / 1000

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{start}", data={"start": start}) for start in range(100)]


EVERY_POINT = MANY_SEEDS
SHARE = 1 if EVERY_POINT else 12
"""Every twelfth crash point, unless many seeds are asked for."""


def test_a_run_that_dies_at_any_operation_goes_on_as_promised() -> None:
    report = crash_test(Talk, share=SHARE)
    assert len(report.operations) > 250
    assert {name.split()[0] for name in report.operations} == {"commit", "make", "remove", "rename", "sync", "write"}
    assert report.crashes > 4 * len(report.operations) // SHARE
    assert not report.violations, report


def test_a_run_that_dies_between_any_two_records_goes_on_with_whole_groups() -> None:
    changes = {"policies": {"guesser": {"step_size": 12, "max_staleness": 0}}, "steps": 2}
    scenario = RoundsAnywhere(Ask, tasks=TASKS, script=guess, changes=changes)
    report = crash_everywhere(scenario, where="commit control.db", share=1 if EVERY_POINT else 3)
    assert report.crashes > 60
    assert not report.violations, report


def test_an_environment_is_crashed_on_its_own_tasks_and_its_tools_are_called() -> None:
    Total.called.clear()
    report = crash_test(Total, share=60)
    assert not report.violations, report
    assert Total.called == {"0", "1", "2"}


class Outside(Total):
    """Acts that must happen once, one of them in a thread, and a resource that dies with its process."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.resource(list, level="pinned").call("append", 1)
        await ctx.effect("open", lambda: 1, guarantee="once")
        await super().run(ctx)

    @agentrl.tool(external=True, guarantee="once")
    def ship(self) -> str:
        """Ship it."""
        Outside.called.add(f"shipped {self.total}")
        return "shipped"


@pytest.mark.exhaustive
def test_what_an_environment_declares_that_a_crash_costs_it_is_no_violation() -> None:
    Outside.called.clear()
    report = crash_test(Outside, share=20)
    assert not report.violations, report
    assert any(what.startswith("shipped") for what in Outside.called)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "operation",
    [
        "rename /run/checkpoints",
        "sync /run/checkpoints/.tmp-step",
        "rename /run/versions/left",
    ],
)
def test_a_recovery_that_dies_at_any_operation_is_recovered_from(operation: str) -> None:
    report = crash_everywhere(CrashScenario(Talk), where=operation, every_recovery=True, share=1 if EVERY_POINT else 20)
    assert report.crashes
    assert not report.violations, report


def test_an_engine_that_fails_after_the_crash_ends_the_run_and_not_an_episode() -> None:
    report = crash_everywhere(FailingEngine(Talk), share=2 * SHARE, seed=1)
    assert not report.violations, report


LONG = (AcknowledgeBeforeCommit, CursorInItsOwnFile, NoSyncBeforeRename, VersionReuse)
"""Mutants that are noticed only after many crashes."""


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, marks=pytest.mark.exhaustive) if each in LONG else each for each in MUTANTS]
)
def test_a_mutant_of_the_protocol_is_noticed(mutant: type[CrashScenario]) -> None:
    report = crash_everywhere(mutant(Talk), share=5, enough=1)
    assert {violation.what.split(":")[0] for violation in report.violations} == {MUTANTS[mutant]}, report


KEEP_NOTHING = {"journal": {"keep": 0}}


@pytest.mark.parametrize("where", ["prune turns-0.db", "remove /run/checkpoints", "rename /run/checkpoints"])
def test_a_run_that_dies_while_it_prunes_has_all_it_needs(where: str) -> None:
    scenario = CrashScenario(Talk, changes=KEEP_NOTHING)
    report = crash_everywhere(scenario, where=where)
    assert report.operations.count("prune turns-0.db") >= 2
    assert report.crashes
    assert not report.violations, report


class NewestAlone(CheckpointWriter):
    """Takes the newest checkpoint for the only one."""

    def sealed(self) -> list[Manifest]:
        return super().sealed()[:1]


class PrunesTooMuch(CrashScenario):
    """Gives up what an older checkpoint, that is kept, makes ready again."""

    def checkpoints(self, machine: Machine) -> CheckpointWriter:
        return NewestAlone(CHECKPOINTS, disk=machine.disk)


@pytest.mark.exhaustive
def test_a_pruning_that_forgets_an_older_checkpoint_is_noticed() -> None:
    report = crash_everywhere(PrunesTooMuch(Talk, changes=KEEP_NOTHING), share=5, enough=1)
    assert {violation.what.split(":")[0] for violation in report.violations} == {"pruned"}, report


@pytest.mark.parametrize("seed", range(3))
def test_a_full_disk_ends_the_run_by_name_and_nothing_is_lost(seed: int) -> None:
    scenario = CrashScenario(Talk, changes=KEEP_NOTHING if seed else None)
    undisturbed = scenario.new_machine()
    assert scenario.run(undisturbed, seed=seed) is None
    expected = finished(undisturbed, steps=3, trainable=scenario.trainable)
    for operation in range(1 + seed, undisturbed.disk.operations, 3 * SHARE):
        machine = scenario.new_machine()
        machine.disk.plan(Fault(operation=operation, kind="full"))
        ended = scenario.run(machine, seed=seed)
        if ended is not None:  # what was to be removed may stay
            assert isinstance(ended, StorageError), f"operation {operation}: {ended!r}"
            machine = machine.after_crash("kill")
            assert scenario.run(machine, seed=seed) is None
        found = finished(machine, steps=3, trainable=scenario.trainable)
        assert [*found.violations, *compared(found, expected)] == [], f"operation {operation}"
