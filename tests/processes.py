"""What the kernel says of processes: which belong together, what their sockets are bound to; and rights taken away."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_LISTENS = 0x10000
"""Of the flags in `/proc/net/unix`."""


class Process(NamedTuple):
    """A process that has not ended."""

    number: int
    name: str
    parent: int
    session: int


def running() -> Iterator[Process]:
    """All processes of the machine."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        state, parent, _, session = rest.split()[:4]
        if state != "Z":
            yield Process(int(status.parent.name), name, int(parent), int(session))


def session_of(leader: int) -> dict[int, str]:
    """The processes of a session that still run, by name."""
    return {process.number: process.name for process in running() if process.session == leader}


def descendants(ancestor: int) -> dict[int, str]:
    """A process and what it, or what it started, has started; by name."""
    everyone = list(running())
    found = {process.number: process.name for process in everyone if process.number == ancestor}
    while new := [each for each in everyone if each.parent in found and each.number not in found]:
        found.update((each.number, each.name) for each in new)
    return found


def can_be_reached(processes: Iterable[int]) -> Iterator[str]:
    """What processes listen on or have bound: `tcp 127.0.0.1:80`, `unix /path`, `unix @abstract`."""
    sockets = {inode for process in processes for inode in _sockets(process)}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in sockets and fields[3] in ("0A", "07"):
                yield f"{table} {_address(fields[1])}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if fields[6] in sockets and int(fields[3], 16) & _LISTENS:
            yield f"unix {fields[7]}"


def is_loopback(socket_name: str) -> bool:
    """Whether a socket of `can_be_reached` can be reached from this machine only."""
    kind, _, where = socket_name.partition(" ")
    return kind == "unix" or ipaddress.ip_address(where.rpartition(":")[0]).is_loopback


def _sockets(process: int) -> Iterator[str]:
    try:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:
        return  # it has ended


def _address(written: str) -> str:
    """As people write it; the kernel writes 32-bit words of the machine's order."""
    words, _, port = written.partition(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    address = ipaddress.ip_address(socket.inet_ntop(family, packed))
    return f"{getattr(address, 'ipv4_mapped', None) or address}:{int(port, 16)}"


def without_the_rights_of_root() -> None:
    """To be called between fork and exec: root may then read and write what its permissions allow, and nothing else."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
