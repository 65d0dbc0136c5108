"""The SQLite journal: what was written comes back, in one process and after the death of another."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.core.errors import EpisodeError, InputError, JournalError, RunDirectoryError, StorageError
from agentrl.core.records import (
    EpisodeSpec,
    PolicyVersion,
    Task,
)
from agentrl.journal.entries import Begin, JournalEntry, encode_body
from agentrl.journal.port import JournalStore, RunLog, TurnLog
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.schema import MAX_VALUE_BYTES
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import entry, header, one_episode, spec, step_of, weights, write


def test_is_a_journal_store_a_turn_log_and_a_run_log(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        store: JournalStore = journal
        log: TurnLog = store.turn_log("w0")
        run: RunLog = journal
        assert log.name == "turns-w0.db"
        assert run.next_number("e") == 0
        await store.close()
        await store.close()

    asyncio.run(main())


def test_episodes_come_back_as_they_were_written(tmp_path: Path) -> None:
    episodes = [spec(number) for number in range(70)]

    async def main() -> None:
        journal = SqliteJournal(tmp_path, info={"name": "demo"})
        await write(journal, episodes)
        assert journal.turn_log("w0").read("e5", 0) == [entry(episodes[5], number) for number in range(3)]
        assert journal.info()["name"] == "demo"
        ready = list(journal.ready_units({"policy": PolicyVersion("policy", 0, 0)}))
        assert sorted(each.episode_id for each, _ in ready) == sorted(each.episode_id for each in episodes)
        by_id = {each.episode_id: (each, its_header) for each, its_header in ready}
        for each in episodes:
            found, its_header = by_id[each.episode_id]
            assert found == each
            expected = header(each, 3)
            assert its_header.trajectories == tuple(sorted(expected.trajectories, key=lambda unit: unit.seat))
            assert (its_header.location, its_header.seconds, its_header.reward) == (expected.location, 0.25, 1.0)
        assert journal.next_number("e") == 70
        assert journal.unfinished() == []
        await journal.close()

    asyncio.run(main())


def test_files_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "journal"
    asyncio.run(one_episode(directory))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_unfinished_are_the_newest_attempts_without_an_end(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        await write(journal, [spec(0)])
        journal.admit(spec(1))
        journal.admit(spec(2))
        journal.admit(spec(2, attempt=1))
        journal.admit(spec(3, purpose="evaluate"))
        journal.admit(spec(4, parent="e0"))
        journal.admit(spec(5))
        await journal.commit_episode(spec(5), header(spec(5), 0, dropped="env_error"), b"", {})
        assert list(journal.unfinished()) == [spec(1), spec(2, attempt=1), spec(4, parent="e0")]
        assert journal.next_number("e") == 6
        ready = journal.ready_units({"policy": PolicyVersion("policy", 0, 0)})
        assert [each.episode_id for each, _ in ready] == ["e0"]
        await journal.close()

    asyncio.run(main())


def test_only_units_of_surviving_steps_are_consumed(tmp_path: Path) -> None:
    """Steps 1 to 3 of lineage 0; a crash; the manifest says 2; lineage 1 goes on from there."""
    episodes = [spec(number) for number in range(6)]

    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        await write(journal, episodes)
        journal.record_version(weights("policy", 0, 0), None)
        for step in (1, 2, 3):
            journal.record_step(step_of("policy", 0, step, [episodes[step - 1]]))
            journal.record_version(weights("policy", 0, step), PolicyVersion("policy", 0, step - 1))
        await journal.flush()

        def ready(lineage: int, step: int) -> list[str]:
            through = {"policy": PolicyVersion("policy", lineage, step)}
            return [each.episode_id for each, _ in journal.ready_units(through)]

        assert ready(0, 3) == ["e3", "e4", "e5"]
        assert ready(0, 2) == ["e2", "e3", "e4", "e5"]
        assert ready(0, 0) == [each.episode_id for each in episodes]
        journal.record_version(weights("policy", 1, 3), PolicyVersion("policy", 0, 2))
        journal.record_step(step_of("policy", 1, 3, [episodes[4]]))
        journal.record_drop("e5", 0, "policy", "stale")
        await journal.flush()
        assert ready(1, 3) == ["e2", "e3"]
        assert ready(0, 3) == ["e3", "e4"]
        assert journal.highest_lineage() == 1
        journal.record_step(step_of("policy", 7, 1, [episodes[0]]))
        await journal.flush()
        with pytest.raises(JournalError, match=r"policy@7\.9"):
            ready(7, 9)
        assert [each.episode_id for each, _ in journal.ready_units({"old": PolicyVersion("old", 0, 0)})] == [
            each.episode_id for each in episodes
        ]
        assert list(journal.ready_units({"frozen": PolicyVersion("frozen", 0, 0)})) == []
        assert len(list(journal.ready_units({}))) == 6  # no manifest: nothing was consumed
        await journal.close()

    asyncio.run(main())


def test_published_weights_are_found_where_the_run_was_moved_to(tmp_path: Path) -> None:
    published = weights("policy", 0, 3)

    async def main() -> None:
        journal = SqliteJournal(tmp_path / "run" / "journal")
        journal.record_version(published, None)
        await journal.flush()
        assert journal.published(published.version) == published
        (here := tmp_path / "run" / "versions" / "policy" / "0.3").mkdir(parents=True)
        assert journal.published(published.version) == replace(published, path=str(here))
        assert journal.published(PolicyVersion("policy", 0, 4)) is None
        await journal.close()

    asyncio.run(main())


def test_reopening_keeps_identity_and_appends(tmp_path: Path) -> None:
    async def main() -> None:
        first = SqliteJournal(tmp_path, info={"name": "a"})
        await write(first, [spec(0)])
        run = first.info()["run"]
        await first.close()
        second = SqliteJournal(tmp_path, info={"name": "b"})
        assert (second.info()["run"], second.info()["name"]) == (run, "a")
        await write(second, [spec(1)])
        assert second.next_number("e") == 2
        await second.close()

    asyncio.run(main())


def test_a_second_writer_is_refused_by_process_id(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        with pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):
            SqliteJournal(tmp_path)
        await journal.close()
        await SqliteJournal(tmp_path).close()

    asyncio.run(main())


def test_entries_too_large_and_data_that_is_no_json_are_refused_at_the_call(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        with pytest.raises(EpisodeError, match="at most"):
            journal.turn_log("w0").append(JournalEntry("e0", 0, "r#0", b"", bytes(MAX_VALUE_BYTES + 1)))
        bad = EpisodeSpec(
            episode_id="e1", environment="x", task=Task(id="t", data={"f": object()}), seed=0, seats={}, group_id="g"
        )
        with pytest.raises(InputError, match="task 't'"):
            journal.admit(bad)
        with pytest.raises(InputError, match="worker"):
            journal.turn_log("../x")
        await write(journal, [spec(0)])
        await journal.close()

    asyncio.run(main())


def test_waiting_after_close_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        journal.admit(spec(0))
        await journal.close()
        with pytest.raises(StorageError, match="closed"):
            await journal.flush()

    asyncio.run(main())
    assert SqliteRunLog(tmp_path).next_number("e") == 1


def test_many_commits_share_few_transactions(tmp_path: Path) -> None:
    """200 episodes that end together: the control log grows by far fewer than 200 transactions."""

    async def main() -> int:
        journal = SqliteJournal(tmp_path)
        await write(journal, [spec(number) for number in range(200)])
        log = SqliteRunLog(tmp_path)
        committed = log.rows("SELECT count(*) FROM episodes")[0][0]
        frames = _wal_commits(tmp_path / "control.db-wal")
        log.close()
        await journal.close()
        assert committed == 200
        return frames

    assert 1 <= asyncio.run(main()) <= 20


def _wal_commits(path: Path) -> int:
    """Frames of a write-ahead log that end a transaction (https://sqlite.org/fileformat2.html#walformat)."""
    data = path.read_bytes()
    page = int.from_bytes(data[8:12], "big")
    frames = [data[at : at + 24] for at in range(32, len(data) - page, 24 + page)]
    return sum(int.from_bytes(frame[4:8], "big") > 0 for frame in frames)


def test_begin_entries_decode(tmp_path: Path) -> None:
    body = Begin("calculator", "hash", "t", {"q": "2+3"}, 2**64 - 1, {"solver": "policy"}, "train", "g", 1, None)
    assert JournalEntry("e0", 0, "begin", b"", encode_body(body)).decode() == body
