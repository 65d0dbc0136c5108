"""Kills of a sandbox's owner, of its keeper, and of both, while sandboxes start and while they run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path

from agentrl_sandbox.bubblewrap import BubblewrapDriver

from agentrl.sandbox.sandbox import Sandbox
from tests.sandboxes.limits import below

SANDBOXES = 3
SETTLE_S = 10.0
"""What a kill leaves for longer is a leak; a busy machine takes a second to end ten processes."""
_PROGRAM = """
import os, signal, time
# MARK
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
for _ in range(3):
    if os.fork() == 0: os.setsid()
open('/box/x', 'wb').write(b'x' * 5_000_000)
time.sleep(300)
"""


async def _own(mark: str) -> None:
    """Keep sandboxes busy until this process is killed."""
    driver = BubblewrapDriver()
    leases = [await driver.create(Sandbox(disk_mb=16, seconds=400)) for _ in range(SANDBOXES)]
    os.write(1, b"made")
    await asyncio.gather(*(lease.run(["/usr/bin/python3", "-c", _PROGRAM.replace("MARK", mark)]) for lease in leases))


def _fork_owner(mark: str) -> tuple[int, int]:
    """Start a process that owns sandboxes; return it, and a pipe that says when they are made."""
    read_end, write_end = os.pipe()
    process = os.fork()  # as it is: what an ordinary user could not import again has been imported
    if process == 0:
        try:
            os.dup2(write_end, 1)
            os.close(read_end)
            asyncio.run(_own(mark))
        finally:
            os._exit(1)
    os.close(write_end)
    return process, read_end


def marked(mark: str) -> list[int]:
    """Processes with the mark in their command line, this one and its parents left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
            except OSError:
                pass
    return found


def _mounts() -> list[str]:
    return [line for line in Path("/proc/mounts").read_text().splitlines() if line.startswith("agentrl ")]


def leaks(kills: int) -> int:
    """Number of kills after which a process, a mount or a file of a sandbox was left."""
    rng, leaked = random.Random(kills), 0
    for number in range(kills):
        mark = f"agentrl-mark-{os.getpid()}-{number}-{os.getuid()}"
        owner, made = _fork_owner(mark)
        if number % 4:  # else in the middle of the keeper's start
            os.read(made, 16)
        time.sleep(rng.random() * (0.3 if number % 2 else 0.08))
        keepers = below(owner)
        for process in {0: [owner], 1: keepers[:1], 2: [*keepers[:1], owner]}[number % 3]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        deadline = time.monotonic() + SETTLE_S
        while (left := [*marked(mark), *_mounts()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            leaked += 1
            print(f"  kill {number}: left {left}")
            for process in marked(mark):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        os.close(made)
    return leaked
