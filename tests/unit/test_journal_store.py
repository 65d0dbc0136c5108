"""The SQLite journal: what was written comes back, in one process and after the death of another."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EpisodeError, InputError, JournalError, RunDirectoryError, StorageError
from agentrl.core.records import PolicyVersion, Task, TrajectoryHeader
from agentrl.journal.entries import BeginEntry, JournalEntry, encode_body
from agentrl.journal.port import EpisodeEnd, JournalStore, TurnLog, UnitDropped, VersionPublication
from agentrl.journal.run_log import RunLog, SqliteRunLog
from agentrl.journal.schema import MAX_VALUE_BYTES
from agentrl.journal.store import GroupCommitWriter, SqliteJournal, WriterDatabase
from tests.journal_cases import entry, header, one_episode, spec, step_of, weights, write
from tests.support.dispatched import ready_units


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
        ready = list(ready_units(journal, {"policy": PolicyVersion("policy", 0, 0)}))
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
        await journal.commit(EpisodeEnd(spec(5), header(spec(5), 0, dropped="env_error")))
        assert list(journal.unfinished()) == [spec(1), spec(2, attempt=1), spec(4, parent="e0")]
        assert journal.next_number("e") == 6
        ready = ready_units(journal, {"policy": PolicyVersion("policy", 0, 0)})
        assert [each.episode_id for each, _ in ready] == ["e0"]
        await journal.close()

    asyncio.run(main())


def test_only_units_of_surviving_steps_are_consumed(tmp_path: Path) -> None:
    """Steps 1 to 3 of lineage 0; a crash; the manifest says 2; lineage 1 goes on from there."""
    episodes = [spec(number) for number in range(6)]

    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        await write(journal, episodes)
        journal.record(VersionPublication(weights("policy", 0, 0), None))
        for step in (1, 2, 3):
            journal.record(step_of("policy", 0, step, [episodes[step - 1]]))
            journal.record(VersionPublication(weights("policy", 0, step), PolicyVersion("policy", 0, step - 1)))
        await journal.flush()

        def ready(lineage: int, step: int) -> list[str]:
            through = {"policy": PolicyVersion("policy", lineage, step)}
            return [each.episode_id for each, _ in ready_units(journal, through)]

        assert ready(0, 3) == ["e3", "e4", "e5"]
        assert ready(0, 2) == ["e2", "e3", "e4", "e5"]
        assert ready(0, 0) == [each.episode_id for each in episodes]
        journal.record(VersionPublication(weights("policy", 1, 3), PolicyVersion("policy", 0, 2)))
        journal.record(step_of("policy", 1, 3, [episodes[4]]))
        journal.record(UnitDropped("e5", 0, "policy", "stale"))
        await journal.flush()
        assert ready(1, 3) == ["e2", "e3"]
        assert ready(0, 3) == ["e3", "e4"]
        assert journal.highest_lineage() == 1
        journal.record(step_of("policy", 7, 1, [episodes[0]]))
        await journal.flush()
        with pytest.raises(JournalError, match=r"policy@7\.9"):
            ready(7, 9)
        assert [each.episode_id for each, _ in ready_units(journal, {"old": PolicyVersion("old", 0, 0)})] == [
            each.episode_id for each in episodes
        ]
        assert list(ready_units(journal, {"frozen": PolicyVersion("frozen", 0, 0)})) == []
        assert len(list(ready_units(journal, {}))) == 6  # no manifest: nothing was consumed
        await journal.close()

    asyncio.run(main())


def test_published_weights_are_those_that_lie_in_the_run(tmp_path: Path) -> None:
    published, stray, users = (
        weights("policy", 0, 3),
        weights("../../elsewhere", 0, 3),
        weights("policy", -1, 3),
    )
    versions = tmp_path / "run" / "versions"

    async def main() -> None:
        journal = SqliteJournal(tmp_path / "run" / "journal")
        for each in (published, stray, users):
            journal.record(VersionPublication(each, None))
        await journal.flush()
        here = replace(published, path=str(versions / "policy" / "0.3"))
        assert journal.published(published.version) == here, "wherever it was written"
        assert journal.published(PolicyVersion("policy", 0, 4)) is None
        assert journal.published(users.version) is None, "a resumed run takes no path from its journal"
        assert journal.published(users.version, outside=True) == users
        (versions / "policy").mkdir(parents=True)
        (versions / "policy" / "0.3").symlink_to(tmp_path)
        for outside in (published, stray):
            with pytest.raises(JournalError, match="outside"):
                journal.published(outside.version)
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


class Between(tuple[Any, ...]):
    """Lets something happen before each of its items."""

    happens: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.happens()
            yield item


def test_a_round_that_begins_in_the_middle_of_a_commit_takes_all_of_it_or_nothing(tmp_path: Path) -> None:
    """The writer is a thread: a round may begin between any two lines, and a kill may come after it."""

    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        reader = SqliteRunLog(tmp_path)

        def a_round() -> None:
            other = threading.Thread(target=lambda: asyncio.run(journal.flush()))
            other.start()
            other.join()
            ended = reader.rows("SELECT count(*) FROM episodes")[0][0]
            units = reader.rows("SELECT count(*) FROM trajectories")[0][0]
            assert units == 2 * ended, "a kill now would leave an episode without its units, trained by nobody"

        its_header = header(spec(0), 0)
        units = Between(its_header.trajectories)
        units.happens = a_round
        await journal.commit(EpisodeEnd(spec(0), dataclasses.replace(its_header, trajectories=units)))
        a_round()
        assert len(units) == 2
        reader.close()
        await journal.close()

    asyncio.run(main())


def test_a_group_with_a_task_that_cannot_be_written_is_not_admitted_at_all(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        bad = dataclasses.replace(spec(1), task=Task(id="t", data={}))
        bad.task.data["f"] = object()  # type: ignore[index]  # a task refuses it only when it is made
        with pytest.raises(TypeError):
            journal.admit(spec(0), bad)
        await journal.flush()
        assert journal.unfinished() == []
        await journal.close()

    asyncio.run(main())


def broken(connection: sqlite3.Connection, table: str, items: list[Any]) -> None:
    """A table whose rows the writer cannot make."""
    raise RuntimeError("a bug")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_ever_for_a_writer_that_failed_as_nobody_foresaw(tmp_path: Path) -> None:
    async def main() -> None:
        path, writer = tmp_path / "broken.db", GroupCommitWriter("writer")
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        database = WriterDatabase(path, connection, broken, order=0)
        writer.add(database)
        writer.put(database, ("table", "row"))
        async with asyncio.timeout(200):
            with pytest.raises(StorageError, match="RuntimeError: a bug"):
                await writer.wait()
            with pytest.raises(StorageError, match="RuntimeError: a bug"):
                await writer.wait()
        await writer.close()

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
        bad = dataclasses.replace(spec(1), task=Task(id="t", data={}))
        bad.task.data["f"] = object()  # type: ignore[index]
        with pytest.raises(TypeError):
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


def test_a_round_waits_longer_for_commits_if_many_shared_the_last_one(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        loop, waited = asyncio.get_running_loop(), list[float | None]()

        class Recorded(threading.Event):
            """Returns once every commit that was called is queued."""

            def wait(self, timeout: float | None = None) -> bool:
                waited.append(None if self.is_set() else timeout)
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
                return self.is_set()

        async def commit(*numbers: int) -> None:
            ended = [spec(number) for number in numbers]
            await asyncio.gather(*(journal.commit(EpisodeEnd(each, header(each, 0))) for each in ended))

        journal._writer._urgent = Recorded()
        await commit(1, 2, 3)
        await commit(4)
        await commit(5)
        await commit(*range(6, 106))
        await commit(106)
        assert waited == [0.004, 0.012, 0.004, 0.004, 0.05]
        await commit(*range(107, 207))
        await journal.flush()
        assert waited[-1] is None, "who flushes does not wait for commits"
        await journal.close()

    asyncio.run(main())


def test_begin_entries_decode(tmp_path: Path) -> None:
    body = BeginEntry("calculator", "hash", "t", {"q": "2+3"}, 2**64 - 1, {"solver": "policy"}, "train", "g", 1, None)
    assert JournalEntry("e0", 0, "begin", b"", encode_body(body)).decode() == body


def test_a_step_that_was_fed_nothing_is_whole_and_one_that_lacks_its_last_record_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        journal.record(step_of("policy", 0, 1, []))
        journal.record(step_of("policy", 0, 2, [spec(0), spec(1)]))
        await journal.close()

    asyncio.run(main())
    log = SqliteRunLog(tmp_path)
    log.verify()
    log.close()
    with sqlite3.connect(tmp_path / "control.db") as connection:
        connection.execute("DELETE FROM step_units WHERE step = 2 AND position = 1")
    connection.close()
    log = SqliteRunLog(tmp_path)
    with pytest.raises(JournalError, match="step 2"):
        log.verify()
    log.close()


def test_frozen_weights_do_not_age_an_episode(tmp_path: Path) -> None:
    def oldest(directory: Path, *kinds: str, described: bool = False) -> Any:
        policies = {name: {"kind": kind} for name, kind in zip(("solver", "judge"), kinds, strict=True)}

        async def main() -> None:
            info = {"config": {"policies": policies}}
            journal, each = SqliteJournal(directory, info={} if described else info), spec(0)
            if described:
                await journal.describe(**info)
            parts = [TrajectoryHeader(name, 0, name, 1.0, 4, step, 0) for name, step in (("solver", 7), ("judge", 0))]
            journal.admit(each)
            await journal.commit(EpisodeEnd(each, replace(header(each, 0), trajectories=tuple(parts))))
            await journal.close()

        asyncio.run(main())
        log = SqliteRunLog(directory)
        [[found]] = log.rows("SELECT oldest_step FROM episodes")
        log.close()
        return found

    assert oldest(tmp_path / "one", "trained", "frozen") == 7
    assert oldest(tmp_path / "described", "trained", "frozen", described=True) == 7
    assert oldest(tmp_path / "two", "trained", "trained") == 0
    assert oldest(tmp_path / "none", "remote", "frozen") is None


def test_a_negative_zero_is_a_zero_and_no_damage(tmp_path: Path) -> None:
    """SQLite keeps -0.0 as 0: a checksum over what was given would not fit what comes back."""
    row = step_of("policy", 0, 1, [spec(0)])
    row = replace(row, report=replace(row.report, loss=-0.0, grad_norm=-0.0))

    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        each = spec(0)
        journal.admit(each)
        await journal.commit(EpisodeEnd(each, header(each, 0, reward=-0.0)))
        journal.record(row)
        await journal.close()

    asyncio.run(main())
    log = SqliteRunLog(tmp_path)
    log.verify()
    assert log.rows("SELECT loss, grad_norm FROM steps") == [(0.0, 0.0)]
    log.close()
