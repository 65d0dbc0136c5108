"""A worker on another host writes its partition through the receiver: acknowledged entries are on disk, a revoked
connection writes nothing more, and what another worker had is taken over."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from agentrl.cluster.journal_stream import JournalReceiver, StreamedTurnLog
from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineLostError, EpisodeError
from agentrl.journal.entries import JournalEntry
from agentrl.journal.reader import TurnLogReader
from agentrl.journal.schema import MAX_VALUE_BYTES
from agentrl.journal.store import SqliteJournal


def entry(number: int, body: bytes = b"body") -> JournalEntry:
    return JournalEntry("e-1", 0, f"r#{number}", b"", body)


async def receiving(directory: Path) -> tuple[SqliteJournal, JournalReceiver]:
    journal = SqliteJournal(directory)
    receiver = JournalReceiver(
        directory, "127.0.0.1", log=directory / "receiver.log", clock=SystemClock(), tell=lambda line: None
    )
    return journal, receiver


def kept(directory: Path, partition: str) -> list[str]:
    reader = TurnLogReader(directory)
    try:
        return [each.call_id for each in reader.read(partition, "e-1", 0)]
    finally:
        reader.close()


def test_what_was_acknowledged_is_on_disk_and_another_worker_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        journal, receiver = await receiving(tmp_path)
        first = await StreamedTurnLog.open(await receiver.grant(0), 0)
        for number in range(3):
            first.append(entry(number))
        first.append_partial(entry(3))
        await first.flush()
        assert kept(tmp_path, "turns-0.db") == ["r#0", "r#1", "r#2"]
        second = await StreamedTurnLog.open(await receiver.grant(1), 1)
        await second.take_over("e-1", 0)
        assert [each.call_id for each in second.read("e-1", 0)] == ["r#0", "r#1", "r#2"]
        assert [each.call_id for each in second.read_partials("e-1", 0)] == ["r#3"]
        assert await second.advanced() == []
        second.append(entry(3))
        assert await second.advanced() == ["e-1"]
        assert kept(tmp_path, "turns-1.db") == ["r#0", "r#1", "r#2", "r#3"]
        shown = []
        while not shown or shown[-1] in ("receives 0.0 kB/s", shown[0]):  # it is told once a second
            first.append(entry(4 + len(shown), b"x" * 50_000))
            shown.append(receiver.status().doing)
            await asyncio.sleep(0.05)
        assert float(shown[-1].split()[1].replace(",", "")) > 1
        with pytest.raises(EpisodeError, match="at most"):
            second.append(entry(4, b"x" * (MAX_VALUE_BYTES + 1)))
        await second.close()
        await first.close()
        await receiver.close()
        await journal.close()

    asyncio.run(run())


_CUT_OFF = """
import asyncio, sys
from agentrl.cluster.journal_stream import StreamedTurnLog
from agentrl.journal.entries import JournalEntry


async def run():
    journal = await StreamedTurnLog.open(sys.argv[1], 0)
    journal.append(JournalEntry("e-1", 0, "r#0", b"", b"body"))
    await journal.flush()
    print("flushed", flush=True)
    sys.stdin.readline()
    journal.append(JournalEntry("e-1", 0, "r#1", b"", b"body"))
    await journal.flush()
    print("written though revoked", flush=True)


asyncio.run(run())
"""


def test_a_revoked_worker_writes_nothing_more_and_ends(tmp_path: Path) -> None:
    async def run() -> None:
        journal, receiver = await receiving(tmp_path)
        address = await receiver.grant(0)
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CUT_OFF, address), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"flushed\n"
        following = await StreamedTurnLog.open(await receiver.grant(0), 0)
        said, _ = await worker.communicate(b"go on\n")
        assert (said, worker.returncode) == (b"", 1)
        await following.flush()
        assert kept(tmp_path, "turns-0.db") == ["r#0"]
        with pytest.raises(EngineLostError, match="reached"):
            await StreamedTurnLog.open(address, 0)
        await following.close()
        await receiver.close()
        await journal.close()

    asyncio.run(run())
