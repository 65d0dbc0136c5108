"""How much memory this machine has left, as far as the kernel and a container's limit say."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """In bytes."""

    free: int
    total: int


def memory() -> Memory:
    """What is free now, or what a container's limit leaves."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free, total = (int(lines[key].split()[0]) << 10 for key in ("MemAvailable", "MemTotal"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdecimal():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        free, total = min(free, int(text) - used), min(total, int(text))
    return Memory(free, total)
