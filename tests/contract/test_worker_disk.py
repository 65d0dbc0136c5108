"""A worker process whose partition cannot be written: the run hears of it, in words that name file and remedy.

A limit on the size of its files is its full disk.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.core.errors import StorageError
from agentrl.journal.store import SqliteJournal, SqliteTurnLog
from tests.contract.worker_cases import run, workplace

ROOM = 4_096
"""Bytes of each file of a worker; no turn fits."""
OPEN = """
import resource, sys
from pathlib import Path
from agentrl.core.errors import StorageError
from agentrl.journal.store import SqliteTurnLog
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    SqliteTurnLog.open(Path(sys.argv[1]), "0")
except StorageError as error:
    print(error)
"""
SAY = """
import asyncio, socket
from agentrl.core.rpc import error_reply, read_frame, send

async def main():
    ours, theirs = socket.socketpair()
    reader, ours_too = await asyncio.open_connection(sock=ours)
    _, writer = await asyncio.open_connection(sock=theirs)
    send(writer, error_reply(0, RuntimeError("a bug")))
    print(await read_frame(reader))

asyncio.run(main())
"""


def test_a_partition_that_cannot_be_written_ends_the_run_though_its_episodes_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with workplace(tmp_path, 2) as at:
            await at.until(lambda: all(each.is_ready for each in at.pool.processes))
            full = at.pool.processes[1]
            assert full.supervisor.process_id is not None
            resource.prlimit(full.supervisor.process_id, resource.RLIMIT_FSIZE, (ROOM, ROOM))
            at.submit(*(at.spec(f"e{number}") for number in range(4)))  # they wait, and nobody lets them go on
            with pytest.raises(StorageError, match=r"turns-1\.db: could not be written .*--resume"):
                await at.until(lambda: False)
            assert not at.ends
            assert not at.told

    run(main)


@pytest.mark.parametrize(
    ("is_there", "room", "named"), [(False, 0, "turns-0.lock"), (False, ROOM, "turns-0.db"), (True, ROOM, "turns-0.db")]
)
def test_a_partition_there_is_no_room_to_open_is_not_called_damaged(
    tmp_path: Path, is_there: bool, room: int, named: str
) -> None:
    async def main() -> str:
        journal = SqliteJournal(tmp_path)
        await journal.flush()
        if is_there:
            await SqliteTurnLog.open(tmp_path, "0").close()
        said = await asyncio.to_thread(
            subprocess.check_output, [sys.executable, "-c", OPEN, str(tmp_path), str(room)], text=True
        )
        await journal.close()
        return str(said)

    said = asyncio.run(main())
    assert named in said
    assert "free" in said or "ulimit" in said
    assert "damaged" not in said


def test_a_worker_says_why_there_is_none_though_its_error_stream_lies_on_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", SAY], stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert "RuntimeError: a bug" in done.stdout  # the exit code is 120 where Python cannot empty its error stream
