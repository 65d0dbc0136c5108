"""The log of requests reads in two threads at once: the server's, and the trainer's, which executes requests again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from agentrl.journal.requests import ClientRequest, RequestResult
from agentrl.journal.store import SqliteJournal


def test_a_request_on_disk_is_seen_while_another_thread_reads(tmp_path: Path) -> None:
    """SQLite gives a statement that begins within another, of the same connection, the state in which that began."""

    async def work() -> None:
        store = SqliteJournal(tmp_path, info={"name": "run", "config": {}, "code": {}})
        log, stops = store.request_log(), threading.Event()
        large = ClientRequest("large", "asample", "s", 0, b"x" * (4 << 20))
        log.record(large, RequestResult("large", "protobuf", b"y" * (4 << 20)))
        await log.flush()
        reads: list[bool] = []

        def read() -> None:
            while not stops.is_set():
                result = log.result("large")
                reads.append(result is not None and len(result.body) == 4 << 20)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for number in range(300):
                log.receive(ClientRequest(f"m:{number}", "optim_step", "m", number, b"{}"))
                await log.flush()
                assert log.request(f"m:{number}") is not None
        finally:
            stops.set()
            reader.join()
            log.close()
            await store.close()
        assert reads
        assert all(reads)

    asyncio.run(work())
