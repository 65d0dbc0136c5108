"""What sandboxes cost: time, CPU time and memory, beside a bare process."""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import time
from pathlib import Path

from agentrl.sandbox.bubblewrap import BubblewrapDriver
from agentrl.sandbox.sandbox import Sandbox
from agentrl.sandbox.state import FileState, hashed_files
from benchmarks.sandboxes_limits import below

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


def figures(quick: bool) -> dict[str, float | None]:
    """Medians of the cost of a lease and of a command."""
    return asyncio.run(_measure(15 if quick else 100, 20 if quick else 200))
