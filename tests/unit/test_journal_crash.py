"""Death of the writer and a full disk: nothing acknowledged is lost, nothing half is left."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.core.records import PolicyVersion
from agentrl.journal import schema
from agentrl.journal.entries import episode_digest
from agentrl.journal.reader import TurnLogReader
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.schema import open_database_to_write
from agentrl.journal.store import SqliteJournal, SqliteTurnLog
from tests.journal_cases import spec, write
from tests.support.dispatched import ready_units

ROOT = Path(__file__).parents[2]


def _python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout


_WRITER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from tests.journal_cases import entry, header, spec
from agentrl.journal.entries import episode_digest
from agentrl.journal.port import EpisodeEnd
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
        await journal.commit(EpisodeEnd(each, header(each, 5), episode_digest(written), {}))
        print(number, flush=True)
    number = 0
    while True:
        await asyncio.gather(*(one(n) for n in range(number, number + 16)))
        number += 16

asyncio.run(main())
"""


@pytest.mark.parametrize("after", [1, 40, 200])
def test_kill_9_loses_nothing_acknowledged(tmp_path: Path, after: int) -> None:
    command = [sys.executable, "-c", _WRITER, str(tmp_path), str(ROOT)]
    acknowledged = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged.append(int(line))
            if len(acknowledged) == after:
                process.send_signal(signal.SIGKILL)
                break
        acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
    log, reader = SqliteRunLog(tmp_path), TurnLogReader(tmp_path)
    committed = list(ready_units(log, {"policy": PolicyVersion("policy", 0, 0)}))
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


_MAKERS = """
import asyncio, os, sys
from pathlib import Path
from agentrl.journal import schema
from agentrl.journal.store import SqliteJournal

left = 0
class Dying:
    def __init__(self, connection): self.connection = connection
    def __getattr__(self, name): return getattr(self.connection, name)
    def execute(self, statement, *rest):
        global left
        if statement.startswith(("CREATE", "PRAGMA journal", "BEGIN", "COMMIT")):
            left -= 1
            if left < 0:
                os._exit(9)
        return self.connection.execute(statement, *rest)

connect = schema._connect_to_write
schema._connect_to_write = lambda path: Dying(connect(path))

async def main(directory):
    journal = SqliteJournal(directory)
    journal.turn_log("0")
    await journal.close()

for number in range(40):
    child = os.fork()
    if child == 0:
        left = number
        asyncio.run(main(Path(sys.argv[1], str(number))))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(number, code)
    if code == 0:
        break
"""
"""Makes one journal after another, each in a process of its own that dies one statement later than the one before."""


def test_a_journal_whose_making_was_killed_at_any_statement_is_made_by_the_next(tmp_path: Path) -> None:
    *killed, last = [tuple(map(int, line.split())) for line in _python(_MAKERS, str(tmp_path)).splitlines()]
    assert {code for _, code in killed} == {9}
    assert last[1] == 0
    assert last[0] > 20

    async def again(directory: Path) -> None:
        journal = SqliteJournal(directory)
        assert journal.next_number("e") == 0
        await write(journal, [spec(1)])
        await journal.close()

    for number, _ in (*killed, last):
        asyncio.run(again(tmp_path / str(number)))


_FULL_DISK = """
import asyncio, resource, signal, sys
sys.path.insert(0, sys.argv[2])
from tests.journal_cases import entry, header, spec
from agentrl.core.errors import StorageError
from agentrl.journal.port import EpisodeEnd
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
        await journal.commit(EpisodeEnd(each, header(each, 1)))
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
    answer = _python(_FULL_DISK, str(tmp_path), str(ROOT)).splitlines()
    first_failed = int(answer[0])
    assert first_failed > 0
    assert "turns-w0.db: " in answer[1]
    assert "--resume" in answer[1]
    log, reader = SqliteRunLog(tmp_path), TurnLogReader(tmp_path)
    committed = {episode for (episode,) in log.rows("SELECT episode FROM episodes")}
    assert committed == {f"e{number}" for number in range(first_failed)}
    for episode in committed:
        assert len(reader.read("turns-w0.db", episode, 0)) == 1
    assert reader.read("turns-w0.db", "e9999", 0) == []
    log.close()
    reader.close()


_APPENDER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.journal_cases import entry, spec
from agentrl.journal.store import SqliteTurnLog

async def main():
    log = SqliteTurnLog.open(Path(sys.argv[1]), "w0")
    for n in range(4):
        print(n, flush=True)
        sys.stdin.readline()
        log.append(entry(spec(0), n, 0))
        await log.flush()

asyncio.run(main())
"""


def _entries(partition: Path) -> int:
    """Number of entries that a process of its own finds."""
    program = (
        "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM entries').fetchone()[0])"
    )
    return int(_python(program, str(partition)))


@pytest.mark.parametrize("published", [0, 2])
@pytest.mark.parametrize("by", ["nobody", "who takes the episode over", "its next writer"])
def test_what_a_killed_writer_left_unpublished_never_comes_back(tmp_path: Path, by: str, published: int) -> None:
    asyncio.run(SqliteJournal(tmp_path).close())
    partition, index = tmp_path / "turns-w0.db", tmp_path / "turns-w0.db-shm"
    command = [sys.executable, "-c", _APPENDER, str(tmp_path), str(ROOT)]
    header = ["dd", f"if={index}", f"of={tmp_path / 'header'}", "bs=96", "count=1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for n in range(4):
            assert process.stdout.readline() == f"{n}\n"
            if n == published:  # SQLite publishes a commit by this header, after it has written the log
                subprocess.run(header, check=True, capture_output=True)
            if n < 3:
                process.stdin.write("\n")
                process.stdin.flush()
        reader = TurnLogReader(tmp_path)
        assert len(reader.read("turns-w0.db", "e0", 0)) == 3
        process.kill()
    back = ["dd", f"if={tmp_path / 'header'}", f"of={index}", "bs=96", "count=1", "conv=notrunc"]
    subprocess.run(back, check=True, capture_output=True)
    assert len(reader.read("turns-w0.db", "e0", 0)) == published

    async def taken_over() -> int:
        journal = SqliteTurnLog.open(tmp_path, "w1")
        await journal.take_over("e0", 0)
        count = len(journal.read("e0", 0))
        await journal.close()
        return count

    if by == "who takes the episode over":
        assert asyncio.run(taken_over()) == published
    elif by == "its next writer":
        asyncio.run(SqliteTurnLog.open(tmp_path, "w0").close())
    reader.close()
    assert _entries(partition) == (3 if by == "nobody" else published)


def test_a_partition_is_opened_while_its_writer_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(SqliteJournal(tmp_path).close())
    asyncio.run(SqliteTurnLog.open(tmp_path, "w0").close())
    partition = tmp_path / "turns-w0.db"
    with closing(sqlite3.connect(partition, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(schema, "BUSY_MS", 10)
        open_database_to_write(partition, "turns", {}).close()
