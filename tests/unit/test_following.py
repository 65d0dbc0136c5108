"""`--follow`: what is new in a run, or in an episode, is printed as it comes, until nothing more can come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.cli.main import main
from agentrl.core.clock import SystemClock
from agentrl.journal.entries import EntryBody, JournalEntry, RewardEntry, TurnEntry, TurnPause, encode_body
from agentrl.journal.port import VersionPublication
from agentrl.journal.run_process import record_process_state
from agentrl.journal.store import SqliteJournal
from agentrl.observe.run_state import RunSnapshot, write_run_snapshot
from tests.journal_cases import entries_with, header, spec, weights, write_run

Happening = Callable[[Path], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One that goes on."""
    path = tmp_path / "run"
    asyncio.run(write_run(path))
    record_process_state(path, "running")
    write_run_snapshot(path, RunSnapshot(phase="", wall=SystemClock().wall()))  # else it would have been killed
    return path


def between_looks(monkeypatch: pytest.MonkeyPatch, run: Path, *happenings: Happening) -> list[Happening]:
    """After each look something happens; what is left of it."""
    left = list(happenings)

    def meanwhile(*_: object) -> tuple[list[object], list[object], list[object]]:
        asyncio.run(left.pop(0)(run))
        return [], [], []

    monkeypatch.setattr("agentrl.cli.output.select.select", meanwhile)
    return left


async def end_another(run: Path) -> None:
    journal = SqliteJournal(run / "journal")
    each = spec(50)
    journal.admit(each)
    await journal.commit_episode(each, header(each, 0), b"", {})
    await journal.close()


async def end_the_run(run: Path) -> None:
    record_process_state(run, "finished")


async def take_a_turn(run: Path) -> None:
    turn = entries_with(99, "What is new?")[1]
    assert isinstance(turn, TurnEntry)
    await append(run, "r#0", msgspec.structs.replace(turn, pauses=(TurnPause(1, 0.25, "parked"),)))


async def publish_and_take_another(run: Path) -> None:
    journal = SqliteJournal(run / "journal")
    journal.record(VersionPublication(weights("policy", 0, 7), None))
    await journal.flush()
    await journal.close()
    turn = entries_with(99, "And now?")[1]
    assert isinstance(turn, TurnEntry)
    await append(run, "r#1", msgspec.structs.replace(turn, turn=1, started=4e9))


async def end_the_episode(run: Path) -> None:
    await append(run, "r#2", RewardEntry("solver", 0, 0.5, None))
    journal = SqliteJournal(run / "journal")
    await journal.commit_episode(spec(99), header(spec(99), 4, reward=0.5), b"", {})
    await journal.close()


async def append(run: Path, call: str, body: EntryBody) -> None:
    journal = SqliteJournal(run / "journal")
    log = journal.turn_log("w0")
    log.append(JournalEntry("e99", 0, call, b"", encode_body(body)))
    await log.flush()
    await journal.close()


def test_episodes_and_steps_are_printed_as_they_come(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = between_looks(monkeypatch, run, end_another, end_the_run)
    assert main(["episode", "list", str(run), "--follow", "--json"]) == 0
    told = [json.loads(line)["episode"] for line in capsys.readouterr().out.splitlines()]
    assert told == ["e0", "e1", "e2", "e3", "e4", "e5", "e50"]
    assert left == []
    assert main(["episode", "list", str(run), "--follow", "--where", "reward > 3"]) == 0
    assert "e4" in capsys.readouterr().out
    assert main(["step", "list", str(run), "--follow", "--json"]) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [1, 2]


def test_an_episode_is_followed_to_its_end(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = between_looks(monkeypatch, run, take_a_turn, publish_and_take_another, end_the_episode)
    assert main(["episode", "show", str(run), "--follow"]) == 0, "the one that runs, and the run goes on after it"
    assert left == []
    shown = capsys.readouterr().out
    places = [shown.index(text) for text in ("What is new?", "parked, 0.250 s after 1", "policy@0.7", "And now?")]
    assert places == sorted(places)
    assert shown.count("What is new?") == 2, "told and said, and printed once"
    assert shown.index("reward 0.5 to solver[0]") > places[-1]
    assert shown.rindex("completed") > shown.index("reward 0.5 to solver[0]"), "and at last what it came to"


def test_an_episode_is_followed_as_data(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    between_looks(monkeypatch, run, take_a_turn, publish_and_take_another, end_the_episode)
    assert main(["episode", "show", str(run), "e99", "--follow", "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each.get("kind") for each in told] == ["turn", *["update"] * 4, "turn", "reward", None]
    assert told[-1]["reward"] == 0.5
    assert told[0]["pauses"] == [[1, 0.25, "parked"]]
