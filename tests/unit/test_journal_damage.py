"""Damage of every kind: a changed, missing or foreign row is an error that names it; the rest stays readable."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.core.errors import JournalError, StorageError
from agentrl.core.records import FrozenGroupBaselines, PolicyVersion, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.control_rows import decode_admission_row, encode_admission_row, with_checksum
from agentrl.journal.entries import JournalEntry
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import MetricRow
from agentrl.journal.reader import AttemptLocation, TurnLogReader
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.store import SqliteJournal
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.execution import POLICY, plain_rollout_settings, wire_dispatcher
from tests.journal_cases import one_episode, spec, write, write_run
from tests.received_runs import edit_table
from tests.support.builders import no_lost_group
from tests.support.dispatched import ready_units

Rows = list[dict[str, Any]]


@pytest.mark.parametrize("file", ["control.db", "turns-w0.db"])
def test_another_format_is_refused_by_name(tmp_path: Path, file: str) -> None:
    asyncio.run(one_episode(tmp_path))
    with sqlite3.connect(tmp_path / file) as connection:
        connection.execute("UPDATE meta SET value = '7' WHERE key = 'format'")
    connection.close()
    with pytest.raises(JournalError, match="'7'"):
        SqliteRunLog(tmp_path) if file == "control.db" else TurnLogReader(tmp_path).read(file, "e0", 0)


def test_tables_of_their_own_are_refused(tmp_path: Path) -> None:
    asyncio.run(one_episode(tmp_path))
    with sqlite3.connect(tmp_path / "control.db") as connection:
        connection.execute("CREATE TRIGGER evil AFTER INSERT ON metrics BEGIN DELETE FROM episodes; END")
    connection.close()
    with pytest.raises(JournalError, match=r"control\.db: .*tables"):
        SqliteRunLog(tmp_path)


def test_a_partition_of_another_run_is_refused(tmp_path: Path) -> None:
    asyncio.run(one_episode(tmp_path / "a"))
    asyncio.run(one_episode(tmp_path / "b"))
    (tmp_path / "a" / "turns-w0.db").replace(tmp_path / "b" / "turns-w0.db")

    async def main() -> None:
        journal = SqliteJournal(tmp_path / "b")
        with pytest.raises(JournalError, match="belongs"):
            journal.turn_log("w0")
        await journal.close()

    asyncio.run(main())


def test_a_partition_that_cannot_take_more_is_told_as_damaged_not_as_a_full_disk(tmp_path: Path) -> None:
    asyncio.run(one_episode(tmp_path))
    with sqlite3.connect(tmp_path / "turns-w0.db") as connection:
        ((root,),) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'entries'")
        ((size,),) = connection.execute("PRAGMA page_size")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with (tmp_path / "turns-w0.db").open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * size)

    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        with pytest.raises(StorageError, match=r"turns-w0\.db"):
            await write(journal, [spec(1)])
        await journal.close()

    asyncio.run(main())


def test_what_is_no_database_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "control.db").write_bytes(b"not a database at all, but longer than a header" * 100)
    with pytest.raises(JournalError, match=r"control\.db"):
        SqliteRunLog(tmp_path)
    with pytest.raises(JournalError, match=r"control\.db"):
        SqliteJournal(tmp_path)
    with pytest.raises(JournalError, match=r"turns-w9\.db"):
        TurnLogReader(tmp_path).read("turns-w9.db", "e0", 0)
    with pytest.raises(JournalError, match="name"):
        TurnLogReader(tmp_path).read("../../etc/passwd", "e0", 0)


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
    reader = TurnLogReader(tmp_path)
    with pytest.raises(JournalError, match=r"episode 'e1', call"):
        reader.read("turns-w0.db", "e1", 0)
    assert len(reader.read("turns-w0.db", "e2", 0, entries=3)) == 3
    reader.close()


def test_missing_entries_are_found(tmp_path: Path) -> None:
    asyncio.run(one_episode(tmp_path))
    with sqlite3.connect(tmp_path / "turns-w0.db") as connection:
        connection.execute("DELETE FROM entries WHERE call = 'r#1'")
    connection.close()
    with pytest.raises(JournalError, match=r"2 .*turns-w0\.db.* 3"):
        TurnLogReader(tmp_path).read_many([AttemptLocation("turns-w0.db", "e0", 0, 3)])


def test_entries_that_are_whole_but_not_those_of_the_commit_are_found(tmp_path: Path) -> None:
    asyncio.run(one_episode(tmp_path))
    log = SqliteRunLog(tmp_path)
    ((digest,),) = log.rows("SELECT digest FROM episodes")
    log.close()
    reader = TurnLogReader(tmp_path)
    assert len(reader.read("turns-w0.db", "e0", 0, entries=3, digest=digest)) == 3
    reader.close()
    with sqlite3.connect(tmp_path / "turns-w0.db") as connection:  # one for another, each with its checksum
        copied = "INSERT INTO entries SELECT 99, episode, attempt, call, asked, body, checksum FROM entries"
        connection.execute(f"{copied} WHERE call = 'r#0'")
        connection.execute("DELETE FROM entries WHERE call = 'r#1'")
    connection.close()
    reader = TurnLogReader(tmp_path)
    assert len(reader.read("turns-w0.db", "e0", 0, entries=3)) == 3
    with pytest.raises(JournalError, match=r"e0 .*turns-w0\.db"):
        reader.read("turns-w0.db", "e0", 0, entries=3, digest=digest)
    reader.close()


def test_a_changed_control_row_is_found(tmp_path: Path) -> None:
    asyncio.run(one_episode(tmp_path))
    with sqlite3.connect(tmp_path / "control.db") as connection:
        connection.execute("UPDATE trajectories SET reward = 2.0 WHERE seat = 'solver'")
    connection.close()
    log = SqliteRunLog(tmp_path)
    with pytest.raises(JournalError, match=r"'e0'.*`trajectories`"):
        list(ready_units(log, {"policy": PolicyVersion("policy", 0, 0)}))
    log.close()


def _without(number: int, rows: Rows) -> Rows:
    return [row for row in rows if row["seq"] != number]


def _numbered(old: int, new: int | str, rows: Rows) -> Rows:
    return [{**row, "seq": new if row["seq"] == old else row["seq"]} for row in rows]


def _read_past(log: SqliteRunLog) -> PastRun:
    log.next_seq()
    return PastRun(log, {}, group_size=1)


@pytest.mark.damages_journal
@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("admissions", partial(_without, 1), "record 1 is missing"),
        ("episodes", partial(_numbered, 8, 6), "two records have the number 6"),
        ("episodes", partial(_numbered, 8, 80), "record 8 is missing"),
        ("episodes", partial(_numbered, 8, "x"), "record 8 is missing"),
        (
            "admissions",
            lambda rows: [{**row, "purpose": "other"} for row in rows],
            "record 2 is the end of e0, which was not admitted",
        ),
        ("admissions", lambda rows: [{**row, "spec": b"\x00"} for row in rows], "episode e0: its admission record"),
    ],
)
def test_a_log_with_a_gap_or_an_unknown_record_is_refused_and_stays(
    tmp_path: Path, table: str, change: Callable[[Rows], Rows], message: str
) -> None:
    asyncio.run(write_run(tmp_path))
    edit_table(tmp_path, table, change)
    control = tmp_path / "journal/control.db"
    before = control.read_bytes()
    with contextlib.closing(SqliteRunLog(control.parent)) as log, pytest.raises(JournalError, match=message):
        _read_past(log)
    assert control.read_bytes() == before


@pytest.mark.damages_journal
def test_an_end_before_its_admission_is_refused(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path))
    with contextlib.closing(SqliteRunLog(tmp_path / "journal")) as log:
        ((admitted,),) = log.rows("SELECT seq FROM admissions WHERE episode = 'e0'")
        ((ended,),) = log.rows("SELECT seq FROM episodes WHERE episode = 'e0'")
    edit_table(tmp_path, "admissions", partial(_numbered, admitted, ended))
    edit_table(tmp_path, "episodes", partial(_numbered, ended, admitted))
    message = f"record {admitted} is the end of e0, which was not admitted yet"
    with contextlib.closing(SqliteRunLog(tmp_path / "journal")) as log, pytest.raises(JournalError, match=message):
        _read_past(log)


def test_a_record_that_was_there_leaves_no_gap(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        for name in ("first", "second"):
            journal.record(FrozenGroupBaselines("g0", (name,)), MetricRow("solver", 1, {"loss": 1.0}))
        await journal.flush()
        journal.admit(spec(0))
        await journal.close()

    asyncio.run(main())
    with contextlib.closing(SqliteRunLog(tmp_path)) as log:
        assert (log.next_seq(), log.baselines()["g0"].finishers) == (3, ("first",))


def test_a_changed_index_entry_is_found(tmp_path: Path) -> None:
    """Else a unit that was trained would seem not to be, and be trained again."""
    asyncio.run(write_run(tmp_path))
    path = tmp_path / "journal" / "control.db"
    with sqlite3.connect(path) as connection:
        ((root,),) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'step_units_by_episode'")
        ((size,),) = connection.execute("PRAGMA page_size")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(path.read_bytes())
    page = content[(root - 1) * size : root * size]
    assert page.count(b"e3") == 1
    content[(root - 1) * size : root * size] = page.replace(b"e3", b"e4")
    path.write_bytes(content)
    log = SqliteRunLog(tmp_path / "journal")
    with pytest.raises(JournalError, match="step_units_by_episode"):
        log.verify()
    log.close()


@pytest.mark.parametrize("change", ["body = x'00'", "asked = 'text'", "call = 'r#1'", "attempt = 'one'"])
def test_a_changed_partial_is_left_out(tmp_path: Path, change: str) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path)
        log = journal.turn_log("w0")
        for number in range(3):
            log.append_partial(JournalEntry("e0", 0, "r#0", b"asked", bytes([number])))
        await log.flush()
        await journal.close()
        with sqlite3.connect(tmp_path / "turns-w0.db") as connection:
            connection.execute(f"UPDATE partials SET {change} WHERE id = 2")
        connection.close()
        reader = TurnLogReader(tmp_path)
        found = [entry.body for entry in reader.partials("turns-w0.db", "e0", 0)]
        reader.close()
        assert found == [b"\x00", b"\x02"]

    asyncio.run(main())


def test_a_schema_that_is_no_text_is_damage_by_name(tmp_path: Path) -> None:
    asyncio.run(one_episode(tmp_path))
    file = tmp_path / "control.db"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"WITHOUT ROWID", b"WITHOUT R\xceWID"))  # SQLite quotes it in its message
    with pytest.raises(JournalError, match=r"control\.db"):
        SqliteRunLog(tmp_path)


def test_an_index_that_names_another_episode_is_damage_or_changes_nothing(tmp_path: Path) -> None:
    asyncio.run(one_episode(tmp_path))
    log = SqliteRunLog(tmp_path)
    number = log.next_number("e")
    log.close()
    file = tmp_path / "turns-w0.db"
    sound = file.read_bytes()
    places = [at for at in range(len(sound)) if sound.startswith(b"e0", at)]
    named = 0
    for at in places:
        file.write_bytes(sound[:at] + b"e7" + sound[at + 2 :])
        log = SqliteRunLog(tmp_path)
        try:
            assert log.next_number("e") == number
        except JournalError as error:
            named += "turns-w0.db" in str(error)
        log.close()
    assert named


class Waiting(agentrl.Environment):
    """Acts, and waits for the next life."""

    gate: ClassVar[asyncio.Event]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("agent").act(agentrl.user("?"))
        await self.gate.wait()
        ctx.agent("agent").reward(float(len(turn.text)))


async def life(directory: Path, *, goes_on: bool) -> dict[str, str | None]:
    """A life of a run of three episodes: why each was dropped."""
    Waiting.gate = asyncio.Event()
    store, failures = SqliteJournal(directory), list[BaseException]()
    engine = ScriptedEngine(lambda *_: [*b"yes", STOP_TOKEN], versions={POLICY: PolicyVersion(POLICY, 0, 0)})
    dispatcher, _ = wire_dispatcher(Waiting, engine, store, plain_rollout_settings(), failures)
    if goes_on:
        dispatcher.resume(PastRun(store, {}, group_size=1), no_lost_group)
        Waiting.gate.set()
        await dispatcher.worker.drain()
    else:
        for number in range(3):
            dispatcher.admit_group(Task(id=f"t{number}", data={}))
        while len(store.turn_log("0").read("e2", 0)) < 2:
            await asyncio.sleep(0.01)
        await dispatcher.worker.cancel()
    await store.close()
    assert not failures
    with sqlite3.connect(directory / "control.db") as connection:
        return dict(connection.execute("SELECT episode, drop_reason || ': ' || detail FROM episodes"))


def test_a_damaged_entry_of_an_episode_in_flight_costs_that_episode_by_name(tmp_path: Path) -> None:
    assert asyncio.run(life(tmp_path, goes_on=False)) == {}
    with sqlite3.connect(tmp_path / "turns-0.db") as connection:
        connection.execute("UPDATE entries SET body = x'00' WHERE episode = 'e1' AND call = 'r#0'")
    ends = asyncio.run(life(tmp_path, goes_on=True))
    assert ends == {"e0": None, "e1": ends["e1"], "e2": None}
    assert "journal_damaged: " in str(ends["e1"])
    assert "r#0" in str(ends["e1"])


@pytest.mark.parametrize("altered", ["[1]", "{", "NaN"])
def test_task_data_that_no_version_wrote_is_damage(altered: str) -> None:
    row = list(encode_admission_row(replace(spec(1), task=Task(id="t", data={"plain": 1})), 0.0))
    assert row[5] == '{"plain":1}'
    row[5] = altered
    with pytest.raises(JournalError, match="episode e1: its admission record cannot be read"):
        decode_admission_row(with_checksum("admissions", row))
