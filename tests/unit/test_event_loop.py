"""Blocking calls of episodes wait neither for each other nor at the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

from agentrl.core.event_loop import run

CALLS = 64
HANGING = """
import asyncio, threading
from agentrl.core.event_loop import run

async def main():
    hanging = [asyncio.create_task(asyncio.to_thread(threading.Event().wait)) for _ in range(40)]
    print(await asyncio.to_thread(lambda: "answered"))
    for task in hanging:
        task.cancel()

run(main())
print("ended")
"""


def test_as_many_blocking_calls_run_at_once_as_are_made() -> None:
    together = threading.Barrier(CALLS)

    async def main() -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(together.wait, 60) for _ in range(CALLS)))

    assert sorted(run(main())) == list(range(CALLS))


def test_calls_that_hang_hold_up_neither_other_calls_nor_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["answered", "ended"]), done.stderr


def test_a_thread_that_started_a_process_does_not_end_with_its_call() -> None:
    """The kernel would end a process that dies with its parent."""

    async def main() -> set[int]:
        return {await asyncio.to_thread(threading.get_ident) for _ in range(20)}

    assert len(run(main())) == 1
