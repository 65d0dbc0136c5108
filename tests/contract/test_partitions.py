"""Several workers, a partition each: an attempt that goes on elsewhere is whole there, and read whole by everybody."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from agentrl.app.forks import find_parent
from agentrl.core.errors import JournalError
from agentrl.core.records import EpisodeDataLocation, EpisodeSpec
from agentrl.core.tokens import EncodedTokens
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import JournalEntry, PartialTurnTokens, encode_body, encode_partial_turn, episode_digest
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.store import SqliteJournal
from tests.contract.journal_kinds import AnyJournal, OnJournal, entry
from tests.journal_cases import entries_with
from tests.support.builders import make_episode_header, make_spec


def partial(spec: EpisodeSpec, start: int, call: str = "r#2") -> JournalEntry:
    body = encode_partial_turn(PartialTurnTokens(start, EncodedTokens(b"\1\0\0\0", (), {"logprobs": b"\0\0\0\0"})))
    return JournalEntry(spec.episode_id, spec.attempt, call, b"asked", body)


def test_what_another_worker_has_begun_is_copied_whole(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        spec, other = make_spec("e0"), make_spec("e0", attempt=1)
        dead, alive = journal.turn_log("0"), journal.turn_log("1")
        for number in range(2):
            dead.append(entry(spec, number))
        dead.append(entry(other, 0))
        dead.append_partial(partial(spec, 0))
        dead.append_partial(partial(spec, 1))
        await dead.flush()
        await alive.take_over("e0", 0)
        assert alive.read("e0", 0) == dead.read("e0", 0) == [entry(spec, 0), entry(spec, 1)]
        assert alive.read_partials("e0", 0) == [partial(spec, 0), partial(spec, 1)]
        assert alive.read("e0", 1) == []

    on_journal(scenario)


def test_an_attempt_goes_to_and_fro_and_nothing_is_there_twice(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        spec = make_spec("e0")
        first, second = journal.turn_log("0"), journal.turn_log("1")
        first.append(entry(spec, 0))
        first.append_partial(partial(spec, 0, "r#1"))
        await first.flush()
        await second.take_over("e0", 0)
        second.append(entry(spec, 1))
        second.remove_partials("e0", 0, "r#1")
        second.append_partial(partial(spec, 0))
        await second.flush()
        await first.take_over("e0", 0)
        assert first.read("e0", 0) == [entry(spec, 0), entry(spec, 1)]
        assert first.read_partials("e0", 0) == [partial(spec, 0)]
        await first.take_over("e0", 0)
        assert first.read("e0", 0) == [entry(spec, 0), entry(spec, 1)]
        assert journal.recorded("e0", 0) == (first.read("e0", 0), first.read_partials("e0", 0))

    on_journal(scenario)


def test_two_histories_of_an_attempt_are_not_joined(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        spec = make_spec("e0")
        first, second = journal.turn_log("0"), journal.turn_log("1")
        for log, calls in ((first, (0, 1)), (second, (0, 2, 3))):
            for number in calls:
                log.append(entry(spec, number))
            await log.flush()
        with pytest.raises(JournalError, match=r"turns-0\.db.*turns-1\.db"):
            await first.take_over("e0", 0)
        assert first.read("e0", 0) == [entry(spec, 0), entry(spec, 1)]

    on_journal(scenario)


def test_a_copy_that_was_cut_is_not_taken_for_the_whole(on_journal: OnJournal) -> None:
    """A worker that dies while it copies leaves less than there was: entries, or entries without the partials."""

    async def scenario(journal: AnyJournal) -> None:
        spec = make_spec("e0")
        whole, cut, third = journal.turn_log("2"), journal.turn_log("1"), journal.turn_log("0")
        for number in range(3):
            whole.append(entry(spec, number))
        whole.append_partial(partial(spec, 0))
        for number in range(2):
            cut.append(entry(spec, number))
        await whole.flush()
        await cut.flush()
        assert journal.recorded("e0", 0) == (whole.read("e0", 0), [partial(spec, 0)])
        cut.append(entry(spec, 2))
        await cut.flush()
        await third.take_over("e0", 0)
        assert (third.read("e0", 0), third.read_partials("e0", 0)) == (whole.read("e0", 0), [partial(spec, 0)])

    on_journal(scenario)


def test_nothing_is_there_of_an_attempt_nobody_began(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        journal.turn_log("0").append(entry(make_spec("e0"), 0))
        await journal.turn_log("0").flush()
        await journal.turn_log("1").take_over("e1", 0)
        assert journal.recorded("e1", 0) == ([], [])

    on_journal(scenario)


async def moved(path: Path, *, committed: bool) -> list[JournalEntry]:
    """A run in which an episode was begun by one worker and went on with another; its entries."""
    spec = make_spec("e0")
    journal = SqliteJournal(path / "journal")
    journal.admit(spec)
    first, second = journal.turn_log("0"), journal.turn_log("1")
    begin, turn, *_ = entries_with(0, "words")
    first.append(JournalEntry("e0", 0, "begin", b"", encode_body(begin)))
    first.append(JournalEntry("e0", 0, "r#0", b"", encode_body(turn)))
    await journal.flush()
    await second.take_over("e0", 0)
    second.append(entry(spec, 1))
    await journal.flush()
    entries = second.read("e0", 0)
    if committed:
        header = make_episode_header(spec, location=EpisodeDataLocation(second.name, 3))
        await journal.commit(EpisodeEnd(spec, header, episode_digest(entries), {}))
        first.append(entry(spec, 1))  # a worker that was given up, and lived on: nobody asks it any more
        first.append(entry(spec, 2))
        await journal.flush()
    await journal.close()
    return entries


@pytest.mark.parametrize("committed", [False, True])
def test_a_reader_finds_an_episode_that_has_moved_once(tmp_path: Path, *, committed: bool) -> None:
    entries = asyncio.run(moved(tmp_path, committed=committed))
    reader = RunReader(tmp_path)
    (line,) = reader.episodes()
    assert reader.recorded(line)[0] == entries
    reader.close()
    assert find_parent(tmp_path / "journal", "e0", None, 0).point.partition == "turns-1.db"


@pytest.mark.damages_journal
def test_damage_to_what_is_to_be_taken_over_is_an_error_by_name(tmp_path: Path) -> None:
    asyncio.run(moved(tmp_path, committed=False))
    with sqlite3.connect(tmp_path / "journal" / "turns-1.db") as connection:
        connection.execute("UPDATE entries SET body = x'00' WHERE call = 'r#1'")

    async def resume() -> None:
        journal = SqliteJournal(tmp_path / "journal")
        try:
            await journal.turn_log("2").take_over("e0", 0)
        finally:
            await journal.close()

    with pytest.raises(JournalError, match=r"turns-1\.db: episode 'e0', call 'r#1'.*checksum"):
        asyncio.run(resume())
