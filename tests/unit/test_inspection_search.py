"""Full-text search: what is found, that the index follows the run, and what becomes of a bad one."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from agentrl.core.errors import InputError
from agentrl.inspection.reader import RunReader
from agentrl.inspection.search import FILE, episodes_with_words
from agentrl.journal.entries import JournalEntry, ToolEntry, encode_body
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    asyncio.run(write_run(tmp_path / "demo", text="a red ball"))
    return tmp_path / "demo"


def found(run: Path, text: str) -> set[str]:
    reader = RunReader(run)
    try:
        return episodes_with_words(reader, text)
    finally:
        reader.close()


def refusal(run: Path, text: str) -> str:
    """What a search is refused with; empty where it is answered."""
    try:
        found(run, text)
    except InputError as error:
        return str(error)
    return ""


async def add(run: Path, episode: str, text: str) -> None:
    journal = SqliteJournal(run / "journal")
    body = encode_body(ToolEntry("look", {}, text, "ok", external=False, seconds=0.0))
    journal.turn_log("w0").append(JournalEntry(episode, 0, "r#9", b"", body))
    await journal.close()


def test_words_and_phrases_are_found_and_the_index_follows(run: Path) -> None:
    everything = {*(f"e{number}.0" for number in range(6)), "e99.0"}
    assert found(run, "ball") == found(run, "BALL red") == found(run, '"red ball"') == everything
    assert found(run, '"ball red"') == found(run, "green") == set()
    asyncio.run(add(run, "e3", "a green field, naïve"))
    assert found(run, "green") == found(run, "naive") == {"e3.0"}
    asyncio.run(add(run, "e99", "green"))
    assert found(run, "green field") == {"e3.0"}
    assert found(run, "green") == {"e3.0", "e99.0"}


def test_a_filter_and_a_search_come_together(run: Path) -> None:
    reader = RunReader(run)
    among = episodes_with_words(reader, "ball")
    assert [line.episode for line in reader.episodes("reward > 3", among=among)] == ["e5", "e4"]
    assert reader.count(among=among) == 7
    assert reader.episodes(among=set()) == []
    reader.close()


@pytest.mark.parametrize(
    "text", ["red OR green", "red AND NOT", "NEAR(red", "text:red", "red*", '"', "^red", "a'; DROP"]
)
def test_nothing_of_a_question_is_an_operator(run: Path, text: str) -> None:
    if told := refusal(run, text):
        assert "give words" in told
    else:
        assert found(run, text) <= {*(f"e{number}.0" for number in range(6)), "e99.0"}


def test_a_foreign_or_damaged_index_is_made_anew(run: Path) -> None:
    assert found(run, "ball")
    whole = (run / FILE).read_bytes()
    (run / FILE).write_bytes(b"rubbish" * 1000)
    assert len(found(run, "ball")) == 7
    with sqlite3.connect(run / FILE) as connection:
        connection.execute("CREATE VIEW hostile AS SELECT load_extension('x')")
    connection.close()
    assert len(found(run, "ball")) == 7
    for at in range(100, len(whole), 1009):
        (run / FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        if told := refusal(run, "ball"):
            assert FILE in told
            (run / FILE).unlink()


def test_an_index_that_is_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
    (run / FILE).symlink_to(tmp_path / "elsewhere.db")
    assert "a symbolic link" in refusal(run, "ball")
    assert not (tmp_path / "elsewhere.db").exists()


@pytest.mark.damages_journal
def test_a_damaged_entry_is_left_out_and_the_others_are_found(run: Path) -> None:
    with sqlite3.connect(run / "journal" / "turns-w0.db") as connection:
        connection.execute("UPDATE entries SET body = x'00' WHERE episode = 'e1'")
    connection.close()
    assert "e1.0" not in found(run, "ball")
    assert len(found(run, "ball")) == 6
