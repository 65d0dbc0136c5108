"""The ledger counted from a control log: holds on a sound one, and names what a spoilt one lost or trained twice."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.errors import JournalError
from agentrl.inspection.ledger import RunLedger
from agentrl.inspection.reader import RunReader
from agentrl.journal.checksums import row_checksum
from agentrl.journal.control import CHECKED
from tests.journal_cases import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    asyncio.run(write_run(tmp_path / "demo"))
    return tmp_path / "demo"


def ledger(run: Path) -> RunLedger:
    reader = RunReader(run)
    try:
        return reader.ledger()
    finally:
        reader.close()


def spoil(run: Path, statement: str) -> None:
    """Alter the log as a bug of ours would: with checksums that fit."""
    with sqlite3.connect(run / "journal" / "control.db") as connection:
        connection.create_function("checked", -1, lambda table, *values: row_checksum(table, values))
        assert connection.execute(statement).rowcount > 0
        for table in CHECKED:
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")][:-1]
            connection.execute(f"UPDATE {table} SET checksum = checked('{table}', {', '.join(names)})")
    connection.close()


def test_a_log_that_lost_its_end_does_not_know_its_newest_checkpoint(run: Path) -> None:
    for name, content in (
        ("step_000001-0", '{"versions": {"policy": [0, 1]}}'),
        ("step_000009-0", '{"versions": {"policy": [0, 9]}, "format": 0}'),
        ("step_000010-0", '{"versions": {"policy": [0, -1]}}'),
        ("step_000011-0", "not a manifest"),
    ):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "manifest.json").write_text(content)
    found = ledger(run)
    assert found.problems == ["checkpoint step_000009-0 is of policy@0.9, which the control log does not know"]
    assert not found.holds


def test_a_sound_run_is_accounted_for(run: Path) -> None:
    found = ledger(run)
    assert found.holds, found.problems
    episodes, units = found.episodes["plain"], found.units["policy"]
    assert (episodes.admitted, episodes.in_flight, episodes.ready, episodes.trained) == (6, 0, 1, 4)
    assert episodes.dropped == {"plain": 1}
    assert (units.committed, units.ready, units.consumed, units.dropped) == (5, 1, 4, {})
    assert found.through == {"policy": "policy@0.2"}


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("DELETE FROM admissions WHERE episode = 'e1'", "episode e1 attempt 0 ended and was never admitted"),
        ("UPDATE step_units SET episode = 'e0' WHERE episode = 'e2'", "e0 attempt 0: the unit of policy was trained 2"),
        (
            "INSERT INTO step_units SELECT policy, lineage, step,"
            " (SELECT count(*) FROM step_units a WHERE a.step = b.step),"
            " episode, attempt, seat, agent, reward, advantage, baseline, turn_advantages, 0 FROM step_units b"
            " WHERE episode = 'e2'",
            "e2 attempt 0: the unit of policy was trained 2 times",
        ),
        ("UPDATE step_units SET episode = 'e77' WHERE episode = 'e2'", "e77 attempt 0: trained as a unit of policy"),
        (
            "INSERT INTO unit_drops VALUES ('e0', 0, 'policy', 'no_reward', 0.0, 0)",
            "the unit of policy was trained and dro",
        ),
    ],
)
def test_what_is_lost_or_trained_twice_is_named(
    run: Path, statement: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run, statement)
    found = ledger(run)
    assert not found.holds
    assert any(problem in line for line in found.problems), found.problems
    assert main(["run", "ledger", str(run)]) == 1
    assert "does NOT hold" in capsys.readouterr().out


def test_units_of_a_rolled_back_step_are_ready_again(run: Path) -> None:
    spoil(run, "INSERT INTO versions VALUES ('policy', 1, 1, 0, 1, 'p', 'full', 'x', 0.0, 0)")
    units = ledger(run).units["policy"]
    assert (units.ready, units.consumed) == (3, 2)


def test_a_row_whose_checksum_does_not_fit_is_an_error_by_name(run: Path) -> None:
    with sqlite3.connect(run / "journal" / "control.db") as connection:
        connection.execute("UPDATE step_units SET policy = 'policz' WHERE episode = 'e2'")
    connection.close()
    with pytest.raises(JournalError, match="a record in `step_units` does not match its checksum"):
        ledger(run)


def test_the_command_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ledger", str(run), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["holds"] is True
    assert printed["units"]["policy"]["consumed"] == 4
