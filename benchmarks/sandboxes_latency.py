"""What sandboxes cost: time, CPU time and memory, beside a bare process."""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from agentrl_sandbox.bubblewrap import BubblewrapDriver, BubblewrapLease

from agentrl.sandbox.sandbox import Sandbox
from agentrl.sandbox.state import FileState, hashed_files
from tests.sandboxes.limits import below

TRUE = "/bin/true"


def _memory_kb(processes: list[int]) -> int:
    """Private memory of processes, in KiB."""
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_"):
                total += int(line.split()[1])
    return total


async def _bare() -> float:
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(TRUE)
    await process.wait()
    return time.perf_counter() - started


async def _snapshot_ms(driver: BubblewrapDriver, repeats: int) -> float:
    """Median time to read 5 changed files of 200, with 1.4 MB in all, and to add them to the state."""
    lease, state, times = await driver.create(Sandbox()), FileState(), []
    await lease.write({f"/box/{number}": os.urandom(7000) for number in range(200)})
    for repeat in range(repeats + 1):
        await asyncio.sleep(0.06)  # else files are read again, since a clock tick may hide a change
        started = time.perf_counter()
        records, gone, contents = await lease.changes()
        change = state.take(state.difference(hashed_files(records, contents), gone))
        if repeat:
            times.append(time.perf_counter() - started)
            assert change is not None
            assert len(records) == len(change["changed"]) == 5, len(records)
        await asyncio.sleep(0.06)
        await lease.write({f"/box/{number}": os.urandom(7000) for number in range(5)})
    await lease.close()
    return statistics.median(times) * 1e3


async def _measure(repeats: int, sandboxes: int) -> dict[str, float | None]:
    driver = BubblewrapDriver()
    try:
        lease = await driver.create(Sandbox())
        await lease.run([TRUE])
        keeper = below(os.getpid())
        before = _memory_kb(keeper)
        leases, creations = [], []
        for _ in range(sandboxes):
            started = time.perf_counter()
            leases.append(await driver.create(Sandbox()))
            creations.append(time.perf_counter() - started)
        idle_kb = (_memory_kb(keeper) - before) / sandboxes
        runs, bare, cpu = [], [], []
        for _ in range(repeats):  # by turns
            bare.append(await _bare())
            started, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            result = await lease.run([TRUE])
            runs.append(time.perf_counter() - started)
            now = resource.getrusage(resource.RUSAGE_SELF)
            cpu.append(result.cpu_seconds + now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
        started = time.perf_counter()
        results = await asyncio.gather(
            *(lease.run(["/bin/sh", "-c", "sleep 1; echo $$ > /box/x"], seconds=60) for lease in leases)
        )
        at_once = time.perf_counter() - started
        print(f"  {sandboxes} at once: {sum(result.ok for result in results)} ok in {at_once:.1f} s")
        return {
            "lease_ms": statistics.median(creations) * 1e3,
            "run_ms": (statistics.median(runs) - statistics.median(bare)) * 1e3,
            "snapshot_ms": await _snapshot_ms(driver, repeats),
            "run_cpu_ms": statistics.median(cpu) * 1e3,
            "idle_kb_per_lease": idle_kb,
            "at_once": sum(result.ok for result in results),
        }
    finally:
        await driver.close()


NAMES = 19_900
_LONG_NAMES = f"""
for number in range({NAMES}):
    open(f"/box/{{number:0240}}", "w").close()
"""


async def _longest(work: Coroutine[Any, Any, object], request: Callable[[], Awaitable[object]]) -> float:
    """Longest time of a request while something else is worked on."""
    longest, task = 0.0, asyncio.create_task(work)
    while not task.done():
        started = time.perf_counter()
        await request()
        longest = max(longest, time.perf_counter() - started)
        await asyncio.sleep(0)
    await task
    return longest


async def _held(repeats: int) -> dict[str, float | None]:
    """What the names of one sandbox cost the others of its worker."""
    driver = BubblewrapDriver()
    try:
        full, other = await driver.create(Sandbox()), await driver.create(Sandbox())
        assert (await full.run(["/usr/bin/python3", "-c", _LONG_NAMES])).ok
        await other.write({"/box/file": b"content"})
        held, loop_held, walks = [], [], []

        async def read() -> object:
            return await other.read("/box/file")

        async def pause() -> None:
            await asyncio.sleep(0.001)

        for _ in range(repeats):
            received: list[int] = []
            usual = [await _longest(asyncio.sleep(0.3), request) for request in (read, pause)]
            started = time.perf_counter()
            walk = full._client.ask("changed", on_files=received.extend, lease=full._name, everything=True)
            held.append(await _longest(walk, read) - usual[0])
            walks.append(time.perf_counter() - started)
            for file in received:
                os.close(file)
            loop_held.append(await _longest(_whole_state(full), pause) - usual[1])
        return {
            "keeper_held_ms": max(0.0, statistics.median(held)) * 1e3,
            "loop_held_ms": max(0.0, statistics.median(loop_held)) * 1e3,
            "walk_ms": statistics.median(walks) * 1e3,
        }
    finally:
        await driver.close()


async def _whole_state(lease: BubblewrapLease) -> None:
    records, gone, contents = await lease.changes(everything=True)
    assert len(records) == NAMES
    files = await asyncio.to_thread(hashed_files, records, contents)
    await asyncio.to_thread(FileState().difference, files, gone)


def figures(quick: bool) -> dict[str, float | None]:
    """Medians of the cost of a lease and of a command, and of what one sandbox costs the others."""
    measured = asyncio.run(_measure(15 if quick else 100, 20 if quick else 200))
    return measured | asyncio.run(_held(3 if quick else 11))
