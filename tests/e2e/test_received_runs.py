"""A run directory from someone else: whatever it recorded, no command runs its code, connects, or opens other files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.received_runs import (
    ACTING,
    HARMS,
    PLANTED,
    ReceivedRun,
    Watch,
    attack,
    cases,
    chosen_cases,
    planted,
    record_model_run,
    record_scripted_run,
    watched,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.*its expert routing is lost"),  # as it warns, without ending the command
]

SHARDS = 16
RECORDERS = {"scripted": record_scripted_run, "model": record_model_run}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory in memory, if there is one: commands sync what they write."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="received-", dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture(scope="module", params=["scripted", pytest.param("model", marks=pytest.mark.exhaustive)])
def recorded(request: pytest.FixtureRequest, place: Path) -> Iterator[tuple[ReceivedRun, Watch]]:
    """A recorded run, of a script or of a small model, and the observer of what commands do."""
    with watched(RECORDERS[request.param], place / request.param) as run:
        yield run


def test_the_unchanged_run_is_read_and_acted_on_without_harm(recorded: tuple[ReceivedRun, Watch], place: Path) -> None:
    """So the refusals of the other tests are not refusals of everything."""
    run, watch = recorded
    verdict = attack(run, None, watch, place / "copy", strict=True)
    refused = [f"run {name}" for name in ("pause", "resume", "drain", "set")]  # it is not running
    refused += [] if run.has_model else ["step replay"]  # its `model.path` is no directory, and only the run names it
    assert [fault for fault in verdict.faults if not any(f": {name}: " in fault for name in refused)] == []
    assert {*ACTING, "run list", "run serve"} - {*verdict.commands, "evaluate"} == set()


def test_a_sample_of_changed_fields_does_no_harm(recorded: tuple[ReceivedRun, Watch], place: Path) -> None:
    run, watch = recorded
    verdicts = [attack(run, case, watch, place / "copy") for case in chosen_cases(run, watch, shards=600)]
    assert [fault for verdict in verdicts for fault in verdict.faults] == []
    assert verdicts


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_changed_field_does_harm(recorded: tuple[ReceivedRun, Watch], place: Path, shard: int) -> None:
    run, watch = recorded
    verdicts = [
        attack(run, case, watch, place / "copy") for case in chosen_cases(run, watch, shard=shard, shards=SHARDS)
    ]
    assert [fault for verdict in verdicts for fault in verdict.faults] == []


@pytest.mark.parametrize("recorded", ["scripted"], indirect=True)
@pytest.mark.parametrize(
    "field", ["admissions.spec.pins.{key}", "admissions.spec.pins.*.policy", "admissions.spec.seats.*.policy"]
)
def test_an_episode_of_an_unknown_policy_is_dropped_on_resume(
    recorded: tuple[ReceivedRun, Watch], place: Path, field: str
) -> None:
    run, watch = recorded
    (case,) = (case for case in cases(run, watch) if (case.field, case.name) == (field, "escape"))
    assert attack(run, case, watch, place / "copy", ["train --resume"], strict=True).faults == []


@pytest.mark.parametrize("recorded", ["scripted"], indirect=True)
@pytest.mark.parametrize("field", ["trajectories.tokens", "TurnEntry.finish_reason"])
def test_records_that_no_run_writes_are_damage_to_every_command(
    recorded: tuple[ReceivedRun, Watch], place: Path, field: str
) -> None:
    """Types are the journal's own check: SQLite keeps text in a column of integers."""
    run, watch = recorded
    (case,) = (case for case in cases(run, watch) if (case.field, case.name) == (field, "escape"))
    assert attack(run, case, watch, place / "copy").faults == []


@pytest.mark.parametrize("recorded", ["model"], indirect=True)
def test_what_the_gate_holds_back_is_found_without_it(recorded: tuple[ReceivedRun, Watch], place: Path) -> None:
    run, watch = recorded
    assert planted(run, watch, place / "copy", gate=True) == dict.fromkeys(PLANTED, False)
    assert planted(run, watch, place / "copy", gate=False) == dict.fromkeys(HARMS, True)
