"""The SQLite journal: what was written comes back, in one process and after the death of another."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.core.errors import EpisodeError, InputError, JournalError, RunDirectoryError, StorageError
from agentrl.core.records import (
    DataLocation,
    EpisodeHeader,
    EpisodeSpec,
    PolicyVersion,
    SeatBinding,
    StepReport,
    Task,
    TrainBatch,
    TrajectoryCredit,
    Unit,
    UnitHeader,
    WeightsRef,
)
from agentrl.journal.checksums import episode_digest
from agentrl.journal.entries import Begin, JournalEntry, RewardEntry, encode_body
from agentrl.journal.port import JournalStore, RunLog, StepRow, TurnLog
from agentrl.journal.reader import EntryKey, TurnReader
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.schema import MAX_VALUE_BYTES
from agentrl.journal.store import SqliteJournal


def spec(number: int, *, attempt: int = 0, purpose: str = "train", parent: str | None = None) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=f"e{number}",
        environment="calculator",
        task=Task(id=f"t{number}", data={"question": "2 + 3", "nested": {"list": [1, 2.5, None]}}),
        seed=2**64 - 1 - number,
        seats={"solver": SeatBinding("policy"), "judge": SeatBinding("old", PolicyVersion("old", 0, 3))},
        group_id=f"g{number // 2}",
        group_size=2,
        attempt=attempt,
        purpose=purpose,  # type: ignore[arg-type]
        parent_id=parent,
    )


def header(of: EpisodeSpec, entries: int, *, reward: float = 1.0, dropped: str | None = None) -> EpisodeHeader:
    return EpisodeHeader(
        episode_id=of.episode_id,
        group_id=of.group_id,
        attempt=of.attempt,
        purpose=of.purpose,
        parent_id=of.parent_id,
        stop_reason=None if dropped else "completed",
        drop_reason=dropped,
        turns=2,
        tokens=7,
        seconds=0.25,
        trajectories=(UnitHeader("solver", 0, "policy", reward, 5, 3, 0), UnitHeader("judge", 0, "old", None, 2, 3, 0)),
        location=DataLocation("turns-w0.db", entries),
    )


def entry(of: EpisodeSpec, number: int, value: float = 0.5) -> JournalEntry:
    body = encode_body(RewardEntry("solver", 0, value, None))
    return JournalEntry(of.episode_id, of.attempt, f"r#{number}", b"12345678" if number % 2 else b"", body)


def step_of(policy: str, lineage: int, step: int, episodes: list[EpisodeSpec]) -> StepRow:
    version = PolicyVersion(policy, lineage, step)
    units = tuple(
        Unit(
            episode_id=each.episode_id,
            attempt=each.attempt,
            policy=policy,
            location=DataLocation("turns-w0.db", 3),
            credits=(TrajectoryCredit("solver", 0, 1.0, 0.5, 0.5),),
        )
        for each in episodes
    )
    report = StepReport(
        step_id=step,
        policy=policy,
        started_from=PolicyVersion(policy, lineage, step - 1),
        loss=float("nan"),
        grad_norm=0.5,
        samples=len(units),
        tokens=10,
        seconds=0.1,
        metrics={"entropy": 1.5},
        input_digest="ab",
    )
    return StepRow(
        report=report, version=version, batch=TrainBatch(step_id=step, policy=policy, units=units, normaliser=8.0)
    )


def weights(policy: str, lineage: int, step: int) -> WeightsRef:
    return WeightsRef(version=PolicyVersion(policy, lineage, step), path="/tmp/w", kind="full", sha256="00")


async def write(journal: SqliteJournal, episodes: list[EpisodeSpec], entries: int = 3) -> None:
    log = journal.turn_log("w0")

    async def one(each: EpisodeSpec) -> None:
        journal.admit(each)
        written = [entry(each, number) for number in range(entries)]
        for item in written:
            log.append(item)
        await journal.commit_episode(each, header(each, entries), episode_digest(written), {"x": 1.0})

    await asyncio.gather(*(one(each) for each in episodes))


def test_is_a_journal_store_a_turn_log_and_a_run_log(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        store: JournalStore = journal
        log: TurnLog = store.turn_log("w0")
        run: RunLog = journal
        assert log.name == "turns-w0.db"
        assert run.admitted() == 0
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
        assert journal.admitted() == 70
        assert journal.unfinished() == []
        await journal.close()

    asyncio.run(main())


def test_files_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "journal"
    asyncio.run(_one_episode(directory))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def _one_episode(directory: Path) -> None:
    journal = SqliteJournal(directory)
    await write(journal, [spec(0)])
    await journal.close()


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
        assert list(journal.unfinished()) == [spec(1), spec(2, attempt=1)]
        assert journal.admitted() == 4
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
        assert list(journal.ready_units({})) == []
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
        assert second.admitted() == 2
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


@pytest.mark.parametrize("file", ["control.db", "turns-w0.db"])
def test_another_format_is_refused_by_name(tmp_path: Path, file: str) -> None:
    asyncio.run(_one_episode(tmp_path))
    with sqlite3.connect(tmp_path / file) as connection:
        connection.execute("UPDATE meta SET value = '7' WHERE key = 'format'")
    connection.close()
    with pytest.raises(JournalError, match="format '7'"):
        SqliteRunLog(tmp_path) if file == "control.db" else TurnReader(tmp_path).read(file, "e0", 0)


def test_tables_of_their_own_are_refused(tmp_path: Path) -> None:
    asyncio.run(_one_episode(tmp_path))
    with sqlite3.connect(tmp_path / "control.db") as connection:
        connection.execute("CREATE TRIGGER evil AFTER INSERT ON metrics BEGIN DELETE FROM episodes; END")
    connection.close()
    with pytest.raises(JournalError, match=r"control\.db: not the tables"):
        SqliteRunLog(tmp_path)


def test_a_partition_of_another_run_is_refused(tmp_path: Path) -> None:
    asyncio.run(_one_episode(tmp_path / "a"))
    asyncio.run(_one_episode(tmp_path / "b"))
    (tmp_path / "a" / "turns-w0.db").replace(tmp_path / "b" / "turns-w0.db")

    async def main() -> None:
        journal = SqliteJournal(tmp_path / "b")
        with pytest.raises(JournalError, match="belongs to run"):
            journal.turn_log("w0")
        await journal.close()

    asyncio.run(main())


def test_what_is_no_database_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "control.db").write_bytes(b"not a database at all, but longer than a header" * 100)
    with pytest.raises(JournalError, match=r"control\.db"):
        SqliteRunLog(tmp_path)
    with pytest.raises(JournalError, match=r"control\.db"):
        SqliteJournal(tmp_path)
    with pytest.raises(JournalError, match="no such file"):
        TurnReader(tmp_path).read("turns-w9.db", "e0", 0)
    with pytest.raises(JournalError, match="not the name"):
        TurnReader(tmp_path).read("../../etc/passwd", "e0", 0)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entries SET body = x'00' WHERE episode = 'e1' AND call = 'r#1'",
        "UPDATE entries SET call = 'r#9' WHERE episode = 'e1' AND call = 'r#1'",
        "UPDATE entries SET episode = 'e1' WHERE episode = 'e0' AND call = 'r#1'",
        "UPDATE entries SET asked = x'' WHERE episode = 'e1' AND call = 'r#1'",
        "UPDATE entries SET body = 5 WHERE episode = 'e1' AND call = 'r#1'",
        "UPDATE entries SET call = CAST(x'ff23' AS TEXT) WHERE episode = 'e1' AND call = 'r#1'",
    ],
)
def test_a_changed_entry_is_an_error_that_names_it_and_others_stay_readable(tmp_path: Path, change: str) -> None:
    episodes = [spec(0), spec(1), spec(2)]

    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        await write(journal, episodes)
        await journal.close()

    asyncio.run(main())
    with sqlite3.connect(tmp_path / "turns-w0.db") as connection:
        assert connection.execute(change).rowcount == 1
    connection.close()
    reader = TurnReader(tmp_path)
    with pytest.raises(JournalError, match=r"episode 'e1', call"):
        reader.read("turns-w0.db", "e1", 0)
    assert len(reader.read("turns-w0.db", "e2", 0, entries=3)) == 3
    reader.close()


def test_missing_entries_are_found(tmp_path: Path) -> None:
    asyncio.run(_one_episode(tmp_path))
    with sqlite3.connect(tmp_path / "turns-w0.db") as connection:
        connection.execute("DELETE FROM entries WHERE call = 'r#1'")
    connection.close()
    with pytest.raises(JournalError, match=r"2 entries in turns-w0\.db, but it was committed with 3"):
        TurnReader(tmp_path).read_many([EntryKey("turns-w0.db", "e0", 0, 3)])


def test_a_changed_control_row_is_found(tmp_path: Path) -> None:
    asyncio.run(_one_episode(tmp_path))
    with sqlite3.connect(tmp_path / "control.db") as connection:
        connection.execute("UPDATE trajectories SET reward = 2.0 WHERE seat = 'solver'")
    connection.close()
    log = SqliteRunLog(tmp_path)
    with pytest.raises(JournalError, match="'e0': its record in `trajectories`"):
        list(log.ready_units({"policy": PolicyVersion("policy", 0, 0)}))
    log.close()


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
    assert SqliteRunLog(tmp_path).admitted() == 1


def test_a_reader_in_another_process_sees_commits_while_the_run_is_written(tmp_path: Path) -> None:
    program = (
        "import sys; from agentrl.journal.reader import TurnReader; from agentrl.journal.run_log import SqliteRunLog;"
        "d = sys.argv[1]; print(SqliteRunLog(d).admitted(), len(TurnReader(d).read('turns-w0.db', 'e0', 0)))"
    )

    async def main() -> str:
        journal = SqliteJournal(tmp_path)
        await write(journal, [spec(0)])
        answer = await asyncio.to_thread(_python, program, str(tmp_path))
        await journal.close()
        return answer

    assert asyncio.run(main()) == "1 3\n"


def _python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


_WRITER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from test_journal_store import entry, header, spec
from agentrl.journal.checksums import episode_digest
from agentrl.journal.store import SqliteJournal

async def main():
    journal = SqliteJournal(sys.argv[1])
    log = journal.turn_log("w0")
    async def one(number):
        each = spec(number)
        journal.admit(each)
        written = [entry(each, n, number) for n in range(5)]
        for item in written:
            log.append(item)
            await asyncio.sleep(0)
        await journal.commit_episode(each, header(each, 5), episode_digest(written), {})
        print(number, flush=True)
    number = 0
    while True:
        await asyncio.gather(*(one(n) for n in range(number, number + 16)))
        number += 16

asyncio.run(main())
"""


@pytest.mark.parametrize("after", [1, 40, 200])
def test_kill_9_loses_nothing_acknowledged(tmp_path: Path, after: int) -> None:
    command = [sys.executable, "-c", _WRITER, str(tmp_path), str(Path(__file__).parent)]
    acknowledged = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged.append(int(line))
            if len(acknowledged) == after:
                process.send_signal(signal.SIGKILL)
                break
        acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
    log, reader = SqliteRunLog(tmp_path), TurnReader(tmp_path)
    committed = list(log.ready_units({"policy": PolicyVersion("policy", 0, 0)}))
    assert {f"e{number}" for number in acknowledged} <= {each.episode_id for each, _ in committed}
    rows = log.rows("SELECT episode, digest FROM episodes")
    digests = dict(rows)
    for each, its_header in committed:
        assert its_header.location is not None
        partition, entries = its_header.location
        found = reader.read(partition, each.episode_id, 0, entries=entries)
        assert episode_digest(found) == digests[each.episode_id]
    log.close()
    reader.close()

    async def again() -> None:  # and the next writer goes on
        journal = SqliteJournal(tmp_path)
        await write(journal, [spec(10_000)])
        await journal.close()

    asyncio.run(again())


_FULL_DISK = """
import asyncio, resource, signal, sys
sys.path.insert(0, sys.argv[2])
from test_journal_store import entry, header, spec
from agentrl.core.errors import StorageError
from agentrl.journal.entries import JournalEntry
from agentrl.journal.store import SqliteJournal

async def main():
    journal = SqliteJournal(sys.argv[1])
    log = journal.turn_log("w0")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    async def one(number):
        each = spec(number)
        log.append(JournalEntry(each.episode_id, 0, "r#0", b"", bytes(5_000)))
        await journal.commit_episode(each, header(each, 1), b"", {})
    for number in range(1000):
        results = await asyncio.gather(one(2 * number), one(2 * number + 1), return_exceptions=True)
        if any(results):
            assert all(isinstance(result, StorageError) for result in results), results
            print(2 * number, flush=True)
            print(results[0], flush=True)
            break
    log.append(entry(spec(9999), 0))  # never blocks, never raises
    for wait in (journal.flush, log.flush, lambda: one(5000)):
        try:
            await wait()
        except StorageError:
            continue
        raise SystemExit("a wait after the failure succeeded")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await journal.close()

asyncio.run(main())
"""


def test_a_full_disk_fails_every_waiter_and_leaves_no_half_transaction(tmp_path: Path) -> None:
    answer = _python(_FULL_DISK, str(tmp_path), str(Path(__file__).parent)).splitlines()
    first_failed = int(answer[0])
    assert first_failed > 0
    assert "turns-w0.db: could not be written" in answer[1]
    assert "--resume" in answer[1]
    log, reader = SqliteRunLog(tmp_path), TurnReader(tmp_path)
    committed = {episode for (episode,) in log.rows("SELECT episode FROM episodes")}
    assert committed == {f"e{number}" for number in range(first_failed)}
    for episode in committed:
        assert len(reader.read("turns-w0.db", episode, 0)) == 1
    assert reader.read("turns-w0.db", "e9999", 0) == []
    log.close()
    reader.close()


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
