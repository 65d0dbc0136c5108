"""The ledger counted from a control log: holds on a sound one, and names what a spoilt one lost or trained twice."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import msgspec
import pytest

from agentrl.cli.main import main
from agentrl.core.errors import JournalError
from agentrl.core.records import PolicyVersion, VersionSpan
from agentrl.core.tokens import EncodedTokens
from agentrl.inspection.ledger import RunLedger
from agentrl.inspection.reader import RunReader
from agentrl.journal.control_rows import CHECKED_TABLES, row_checksum
from agentrl.journal.entries import JournalEntry, RewardEntry, TurnEntry, encode_body, entry_checksum
from tests.journal_cases import write_run

ONE_TOKEN = EncodedTokens(b"1234", (), {"logprobs": b"\0" * 4})


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
        for table in CHECKED_TABLES:
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


def test_an_attempt_below_the_first_is_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(run, "UPDATE admissions SET attempt = -3")
    assert main(["run", "ledger", str(run)]) == 1
    assert "attempt 0 ended and was never admitted" in capsys.readouterr().out


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
            "INSERT INTO unit_drops VALUES ('e0', 0, 'policy', 'no_reward', 0.0, 0, 0)",
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


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("DELETE FROM versions WHERE step = 0", "tokens are of policy@0.0"),
        ("UPDATE versions SET sha256 = '' WHERE step = 0", "of policy@0.0, of which the control log has no digest"),
        ("DELETE FROM steps WHERE step = 1", "of policy@0.1, and"),
    ],
)
def test_a_version_that_tokens_name_has_its_row_digest_and_step(run: Path, statement: str, problem: str) -> None:
    if "step = 1" in statement:
        by_version_1(run)
    spoil(run, statement)
    assert any(problem in line for line in ledger(run).problems), ledger(run).problems


def by_version_1(run: Path) -> None:
    """Have a turn of e0 sampled by another version."""
    spans = (VersionSpan(0, 2, PolicyVersion("policy", 0, 1)),)
    change_entries(run, "e0", TurnEntry, tokens=EncodedTokens(b"\0" * 8, spans, {"logprobs": b"\0" * 8}))


def change_entries(run: Path, name: str, kind: type[TurnEntry | RewardEntry], **fields: object) -> None:
    """Change fields of an episode's entries of a kind, with checksums that fit."""
    path = run / "journal" / "turns-w0.db"
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT id, episode, attempt, call, asked, body FROM entries WHERE episode = ?", (name,)
        )
        for number, episode, attempt, call, asked, body in rows.fetchall():
            entry = JournalEntry(episode, attempt, call, asked, body).decode()
            if isinstance(entry, kind):
                body = encode_body(msgspec.structs.replace(entry, **fields))
                checksum = entry_checksum(episode, attempt, call, asked, body)
                connection.execute("UPDATE entries SET body = ?, checksum = ? WHERE id = ?", (body, checksum, number))
    connection.close()


@pytest.mark.parametrize(
    ("kind", "fields", "problems"),
    [
        (RewardEntry, {"seat": "judge"}, ["solver has 2 tokens and no reward"]),
        (RewardEntry, {"index": 1}, ["solver has 2 tokens and no reward"]),
        (RewardEntry, {"value": 2.5}, ["solver has 2 tokens and the reward 2.5"]),
        (RewardEntry, {"weight": 0.5}, ["solver has 2 tokens and the reward 1.5"]),
        (RewardEntry, {"turn": 0}, ["solver has 2 tokens and the reward 3.0 ([[0,3.0]] by turn)"]),
        (TurnEntry, {"seat": "judge"}, ["judge has 2 tokens and no reward", "solver has no turn"]),
        (TurnEntry, {"index": 1}, ["solver has no turn", "solver[1] has 2 tokens and no reward"]),
        (
            TurnEntry,
            {"tokens": EncodedTokens(b"1234", (), {"logprobs": b"\0" * 4})},
            ["solver has 1 token and the reward 3.0"],
        ),
        (TurnEntry, {"turn": 1}, ["solver has turns [1]"]),
    ],
)
@pytest.mark.damages_journal
def test_an_agent_whose_entries_are_not_its_trajectory_is_named(
    run: Path, kind: type[TurnEntry | RewardEntry], fields: dict[str, object], problems: list[str]
) -> None:
    change_entries(run, "e3", kind, **fields)
    found = ledger(run)
    assert [line.removeprefix("episode e3 attempt 0: ").partition(" in its")[0] for line in found.problems] == problems
    assert not found.holds


def test_a_partition_that_is_missing_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run / "journal").glob("turns-w0.db*"):
        path.unlink()
    assert main(["run", "ledger", str(run)]) == 1
    assert "turns-w0.db is missing" in " ".join(capsys.readouterr().out.split())


def test_entries_that_are_missing_are_named(run: Path) -> None:
    with sqlite3.connect(run / "journal" / "turns-w0.db") as connection:
        connection.execute("DELETE FROM entries WHERE episode = 'e2' AND call = 'r#3'")
    connection.close()
    assert ledger(run).problems == ["episode e2 attempt 0: 4 entries were committed, turns-w0.db has 3"]


@pytest.mark.damages_journal
def test_an_entry_that_is_damaged_is_named_beside_the_equations(run: Path) -> None:
    with sqlite3.connect(run / "journal" / "turns-w0.db") as connection:
        connection.execute("UPDATE entries SET body = x'00' WHERE episode = 'e2' AND call = 'r#3'")
    connection.close()
    found = ledger(run)
    (problem,) = found.problems
    assert "episode 'e2', call 'r#3'" in problem
    assert "turns-w0.db was not read" in problem
    assert found.units["policy"].consumed == 4


def test_how_far_it_has_read_is_told(run: Path) -> None:
    reader = RunReader(run)
    told: list[tuple[int, int]] = []
    reader.ledger(lambda read, of: told.append((read, of)))
    reader.close()
    assert told == [(number, 5) for number in range(1, 6)]


def test_units_of_a_rolled_back_step_are_ready_again(run: Path) -> None:
    spoil(run, "INSERT INTO versions VALUES ('policy', 1, 1, 0, 1, 'p', 'full', 'x', 0.0, 0, 0)")
    units = ledger(run).units["policy"]
    assert (units.ready, units.consumed) == (3, 2)


@pytest.mark.damages_journal
def test_a_row_whose_checksum_does_not_fit_is_an_error_by_name(run: Path) -> None:
    with sqlite3.connect(run / "journal" / "control.db") as connection:
        connection.execute("UPDATE step_units SET policy = 'policz' WHERE episode = 'e2'")
    connection.close()
    with pytest.raises(JournalError, match="`step_units`"):
        ledger(run)


def test_the_command_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ledger", str(run), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["holds"] is True
    assert printed["units"]["policy"]["consumed"] == 4
