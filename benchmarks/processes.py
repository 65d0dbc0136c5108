"""Commands in processes of their own, and CPU seconds of a process and all its descendants."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path


def command(*arguments: str, directory: Path) -> str:
    """The output of an `agentrl` command that must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"agentrl {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def children_cpu_seconds() -> float:
    """CPU seconds of all processes that this one has started and waited for, their children included."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def command_cpu_seconds(*arguments: str, directory: Path, readings: int) -> float:
    """CPU seconds of an `agentrl` command that must succeed: the median of several readings, after one that caches
    bytecode as an installation has it."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds = []
    for _ in range(readings + 1):
        before = children_cpu_seconds()
        command(*arguments, directory=directory)
        seconds.append(children_cpu_seconds() - before)
    median = statistics.median(seconds[1:])
    print(f"  {median:.2f} CPU s: agentrl {' '.join(arguments)}", flush=True)
    return median


class ProcessTree:
    """CPU seconds of this process, or of `root`, and everything it started, from /proc; never goes back.

    Ray's daemons and finished children are included.

    A process that ends between two readings keeps the CPU seconds it was last seen with.
    """

    def __init__(self, root: int | None = None) -> None:
        self._root = os.getpid() if root is None else root
        self._seen: dict[tuple[int, int], float] = {}
        """By (pid, start time)."""

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        parents: dict[int, int] = {}
        spent: dict[int, tuple[tuple[int, int], float]] = {}
        ticks = os.sysconf("SC_CLK_TCK")
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            pid = int(entry.name)
            parents[pid] = int(fields[1])
            spent[pid] = ((pid, int(fields[19])), (int(fields[11]) + int(fields[12])) / ticks)
        for pid, (key, seconds) in spent.items():
            if key in self._seen or self._descends(pid, parents):
                self._seen[key] = seconds
        return sum(self._seen.values())

    def _descends(self, pid: int, parents: dict[int, int]) -> bool:
        while pid > 1:
            if pid == self._root:
                return True
            pid = parents.get(pid, 0)
        return False
