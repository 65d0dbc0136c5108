"""Commands that take all they can get, and what they got."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from textwrap import dedent

from agentrl_sandbox.bubblewrap import BubblewrapDriver

from agentrl.sandbox.driver import CommandResult
from agentrl.sandbox.sandbox import Sandbox

SANDBOX = Sandbox(memory_mb=256, seconds=4, disk_mb=64, inodes=5_000, processes=64)
PYTHON = "/usr/bin/python3"


def _python(program: str) -> tuple[str, ...]:
    return PYTHON, "-c", dedent(program)


def _files(path: str, number: int, size: int) -> tuple[str, ...]:
    return _python(f"""
        for number in range({number}):
            with open(f"{path}/{{number}}", "wb") as file:
                file.write(b"x" * {size})
        print("reached")
    """)


MIB = 1 << 20
BOMBS = {
    "forks": _python("""
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """),
    "forks of a shell": ("/bin/sh", "-c", "f() { f | f & }; f; sleep 30"),
    "memory of a process": _python("""
        held = [bytearray(1 << 20) for _ in range(3000)]
        print("reached")
    """),
    "memory of many processes": _python("""
        import os, time
        for _ in range(20):
            if os.fork() == 0:
                held = bytearray(60 << 20)
                time.sleep(20)
                os._exit(0)
        time.sleep(20)
        print("reached")
    """),
    "memory files": _python("""
        import os
        os.memfd_create("x")
        print("reached")
    """),
    "shared mappings": _python("""
        import mmap
        held = mmap.mmap(-1, 1000 << 20)
        for place in range(0, len(held), 4096):
            held[place] = 1
        print("reached")
    """),
    "shared mappings of a device": _python("""
        import mmap
        with open("/dev/zero", "rb") as device:
            held = mmap.mmap(device.fileno(), 1000 << 20, mmap.MAP_SHARED, mmap.PROT_READ)
        for place in range(0, len(held), 4096):
            held[place]
        print("reached")
    """),
    "page tables": _python("""
        import ctypes
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
        for _ in range(4):
            start = libc.mmap(None, 1 << 38, 1, 0x4022, -1, 0)
            for offset in range(0, 1 << 38, 2 << 20):
                ctypes.c_ubyte.from_address(start + offset).value
        print("reached")
    """),
    "shared memory": _files("/dev/shm", 300, MIB),
    "disk": _files("/box", 200, MIB),
    "disk in /tmp": _files("/tmp", 200, MIB),
    "one file": _python("""
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("/box/x", "wb", 0) as file:
            for _ in range(200):
                assert file.write(b"x" * (1 << 20)) == 1 << 20
        print("reached")
    """),
    "inodes": _files("/box", 6000, 0),
    "output": ("/bin/sh", "-c", "yes 0123456789012345678901234567890123456789"),
    "deaf to signals": _python("""
        import os, signal
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except OSError:
                pass
        if os.fork() == 0:
            os.setsid()
        while True:
            pass
    """),
    "descriptors": _python("""
        import os
        for _ in range(100000):
            os.open("/dev/null", 0)
        print("reached")
    """),
}


class _Processes(threading.Thread):
    """Counts the processes below this one, as often as it can."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            self.most = max(self.most, len(below(os.getpid())))
            time.sleep(0.05)

    def __enter__(self) -> _Processes:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def below(root: int) -> list[int]:
    """All processes below one."""
    found, todo = [], [root]
    while todo:
        process = todo.pop()
        try:
            for task in os.listdir(f"/proc/{process}/task"):
                children = [int(number) for number in Path(f"/proc/{process}/task/{task}/children").read_text().split()]
                found += children
                todo += children
        except OSError:
            pass
    return found


def _is_held(name: str, result: CommandResult, processes: int, left: int) -> bool:
    """Whether the limit held, and the sandbox is whole afterwards."""
    if left or result.seconds > SANDBOX.seconds + 3:
        return False
    if name.startswith("forks"):
        return (
            processes <= SANDBOX.processes + 8 and result.killed == "time"
        )  # the keeper's two, bwrap's two, the sampler's lag
    if name == "output":
        return len(result.stdout) == SANDBOX.output_bytes and result.truncated
    if name == "deaf to signals":
        return result.killed == "time"
    return b"reached" not in result.stdout


async def _bombs() -> list[str]:
    """Names of the limits that do not hold."""
    driver = BubblewrapDriver()
    broken = []
    try:
        idle = await driver.create(SANDBOX)
        await idle.run(["/bin/true"])
        resting = len(below(os.getpid()))
        for name, command in BOMBS.items():
            lease = await driver.create(SANDBOX)
            with _Processes() as watch:
                result = await lease.run(command)
            left = len(below(os.getpid())) - resting
            held = _is_held(name, result, watch.most - resting, left)
            detail = f"{result.seconds:.1f} s, killed {result.killed!r}, {watch.most - resting} processes, {left} left"
            print(f"  {'held  ' if held else 'BROKEN'} {name}: {detail}")
            if not held:
                broken.append(name)
            await lease.close()
        if not (await idle.run(["/bin/echo", "ok"])).ok:
            broken.append("another sandbox afterwards")
    finally:
        await driver.close()
    return broken


def bombs() -> list[str]:
    """Run all commands; return the names of the limits that do not hold."""
    return asyncio.run(_bombs())
