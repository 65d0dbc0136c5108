"""A worker on another host writes its partition through the receiver: acknowledged entries are on disk, a revoked
connection writes nothing more, and what another worker had is taken over."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl.cluster.journal_stream import JournalReceiver, StreamedTurnLog
from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineLostError, EpisodeError, StorageError
from agentrl.core.tokens import ExpertRouting
from agentrl.journal.entries import JournalEntry, encode_body
from agentrl.journal.reader import TurnLogReader
from agentrl.journal.routing import RoutingStore, move_routing
from agentrl.journal.schema import MAX_VALUE_BYTES
from agentrl.journal.store import SqliteJournal
from tests.unit.test_journal_rows import turn as sampled_turn


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
        first = await StreamedTurnLog.open(await receiver.grant(0), 0, RoutingStore.of_journal(tmp_path))
        for number in range(3):
            first.append(entry(number))
        first.append_partial(entry(3))
        await first.flush()
        assert kept(tmp_path, "turns-0.db") == ["r#0", "r#1", "r#2"]
        second = await StreamedTurnLog.open(await receiver.grant(1), 1, RoutingStore.of_journal(tmp_path))
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


def test_entries_of_a_dead_worker_are_on_disk_before_its_episodes_are_reassigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_connection(log: StreamedTurnLog, why: str) -> None:
        """End the connection, and not the process."""
        log._connection.close(EngineLostError(why))

    monkeypatch.setattr(StreamedTurnLog, "_on_end", end_connection)

    async def run() -> None:
        journal, receiver = await receiving(tmp_path)
        logs = [
            await StreamedTurnLog.open(await receiver.grant(worker), worker, RoutingStore.of_journal(tmp_path))
            for worker in range(2)
        ]
        dead, alive = logs
        dead.append(entry(0))
        await dead.flush()
        dead.append(entry(1))
        await dead.advanced()  # the receiver has the entry, and nothing waits for the disk
        await receiver.revoke(0)
        await alive.take_over("e-1", 0)
        assert [each.call_id for each in alive.read("e-1", 0)] == ["r#0", "r#1"]
        for log in logs:
            await log.close()
        await receiver.close()
        await journal.close()

    asyncio.run(run())


def test_a_partition_that_cannot_be_opened_is_named_to_the_run(tmp_path: Path) -> None:
    async def run() -> None:
        journal, receiver = await receiving(tmp_path)
        (tmp_path / "turns-0.db").write_bytes(b"no database" * 1000)
        with pytest.raises(StorageError, match=r"turns-0\.db"):
            await receiver.grant(0)
        assert await receiver.grant(1)
        await receiver.close()
        await journal.close()

    asyncio.run(run())


def test_expert_routing_does_not_pass_the_receiver(tmp_path: Path) -> None:
    """A turn's entry names it; the file is on the worker's host, and the partition does not hold it."""

    async def run() -> None:
        journal, receiver = await receiving(tmp_path)
        store = RoutingStore(tmp_path / "of the worker", "10.0.0.2")
        log = await StreamedTurnLog.open(await receiver.grant(0), 0, store)
        routing = np.random.default_rng(0).integers(0, 128, (1024, 48, 8), np.uint8)
        turn = move_routing(sampled_turn(0, [1], [2], experts=ExpertRouting(routing)), log, "e-1", 0)
        log.append(entry(0, encode_body(turn)))
        await log.close()
        await receiver.close()
        await journal.close()
        assert turn.routing is not None
        assert turn.routing.host == "10.0.0.2"
        (content,) = store.read([turn.routing])
        assert isinstance(content, bytes)
        assert np.array_equal(ExpertRouting.decode(content, plain=False).rows, routing)

    asyncio.run(run())
    assert sum(path.stat().st_size for path in tmp_path.glob("turns-0.db*")) < 1 << 17


_CUT_OFF = """
import asyncio, sys
from pathlib import Path
from agentrl.cluster.journal_stream import StreamedTurnLog
from agentrl.journal.entries import JournalEntry
from agentrl.journal.routing import RoutingStore


async def run():
    journal = await StreamedTurnLog.open(sys.argv[1], 0, RoutingStore.of_journal(Path("journal")))
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
        following = await StreamedTurnLog.open(await receiver.grant(0), 0, RoutingStore.of_journal(tmp_path))
        said, _ = await worker.communicate(b"go on\n")
        assert (said, worker.returncode) == (b"", 1)
        await following.flush()
        assert kept(tmp_path, "turns-0.db") == ["r#0"]
        with pytest.raises(EngineLostError, match="reached"):
            await StreamedTurnLog.open(address, 0, RoutingStore.of_journal(tmp_path))
        await following.close()
        await receiver.close()
        await journal.close()

    asyncio.run(run())
