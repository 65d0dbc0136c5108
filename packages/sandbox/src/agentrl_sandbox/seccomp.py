"""The seccomp program of a sandbox: a classic BPF filter that refuses system calls with EPERM.

It refuses kernel interfaces that no namespace separates (keyrings, vsock, io_uring, bpf, the clock), memory that no
limit counts (memfd, System V IPC, shared mappings without a file), new namespaces, and system calls that are newer than
this table. Everything else is allowed.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import NamedTuple

from agentrl.sandbox import InputError

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1, _ARGUMENT_3 = 0, 4, 16, 24, 40
"""Offsets in the kernel's `struct seccomp_data`, in bytes; arguments are little-endian, their low halves come first."""
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""
_FAMILIES = (1, 2, 10, 16)
"""Address families a sandbox may use: Unix, IPv4, IPv6, netlink."""
_TERMINAL_REQUESTS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""


_UNKNOWN = 470
"""System calls from this number on are newer than Linux 6.17, or x32 variants on x86-64; they are absent."""


class _Architecture(NamedTuple):
    audit: int
    """Identifier in `seccomp_data.arch`."""
    clone: int
    clone3: int
    socket: int
    socketpair: int
    ioctl: int
    mmap: int
    refused: tuple[int, ...]


_COMMON = (
    *range(425, 434),  # io_uring_*, open_tree, move_mount, fsopen … fspick
    438,  # pidfd_getfd
    442,  # mount_setattr
    443,  # quotactl_fd
    447,  # memfd_secret
    450,  # set_mempolicy_home_node
    467,  # open_tree_attr
)
"""System calls since Linux 5.0 have one number on all architectures."""

_X86_64 = _Architecture(
    audit=0xC000003E,
    clone=56,
    clone3=435,
    socket=41,
    socketpair=53,
    ioctl=16,
    mmap=9,
    refused=(
        29, 30, 31, 64, 68,  # shmget, shmat, shmctl, semget, msgget
        103,  # syslog
        134, 135, 136, 139, 153, 155, 156, 159,  # uselib, personality, ustat, sysfs … adjtimex
        161, 163, 164, 165, 166, 167, 168, 169, 170, 171,  # chroot, acct, settimeofday, mount … setdomainname
        172, 173, 174, 175, 176, 179, 180, 212,  # iopl, ioperm, create_module … lookup_dcookie
        101, 310, 311, 312,  # ptrace, process_vm_readv, process_vm_writev, kcmp
        227, 305,  # clock_settime, clock_adjtime
        237, 238, 256, 279,  # mbind, set_mempolicy, migrate_pages, move_pages
        246, 313, 320,  # kexec_load, finit_module, kexec_file_load
        248, 249, 250,  # add_key, request_key, keyctl
        272, 308,  # unshare, setns
        278,  # vmsplice
        298, 300, 303, 304, 319, 321, 323,  # perf_event_open, fanotify_init, … userfaultfd
    ),
)  # fmt: skip
_AARCH64 = _Architecture(
    audit=0xC00000B7,
    clone=220,
    clone3=435,
    socket=198,
    socketpair=199,
    ioctl=29,
    mmap=222,
    refused=(
        194, 195, 196, 190, 186,  # shmget, shmctl, shmat, semget, msgget
        116,  # syslog
        92, 58, 41, 171,  # personality, vhangup, pivot_root, adjtimex
        51, 89, 170, 40, 39, 224, 225, 142, 161, 162,  # chroot, acct, settimeofday, mount … setdomainname
        105, 106, 60, 42, 18,  # init_module, delete_module, quotactl, nfsservctl, lookup_dcookie
        117, 270, 271, 272,  # ptrace, process_vm_readv, process_vm_writev, kcmp
        112, 266,  # clock_settime, clock_adjtime
        235, 237, 238, 239,  # mbind, set_mempolicy, migrate_pages, move_pages
        104, 273, 294,  # kexec_load, finit_module, kexec_file_load
        217, 218, 219,  # add_key, request_key, keyctl
        97, 268,  # unshare, setns
        75,  # vmsplice
        241, 262, 264, 265, 279, 280, 282,  # perf_event_open, fanotify_init, … userfaultfd
    ),
)  # fmt: skip
_ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}


class _Jump(NamedTuple):
    """Compare the loaded word; skip `yes` instructions if the comparison holds, else `no`."""

    code: int
    operand: int
    yes: int
    no: int


def program(machine: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`, the form that bubblewrap's `--seccomp` reads.

    Args:
        machine: the architecture, as `platform.machine()` names it; None: this one.

    Raises:
        InputError: there is no table for the architecture.
    """
    machine = machine or platform.machine()
    table = _ARCHITECTURES.get(machine)
    if table is None:
        raise InputError(
            f"sandboxes need a table of system calls, and there is none for {machine}; "
            f"use a machine of {' or '.join(_ARCHITECTURES)}"
        )
    code: list[bytes] = []

    def load(offset: int) -> None:
        code.append(struct.pack("<HBBI", _LOAD, 0, 0, offset))

    def jump(step: _Jump) -> None:
        code.append(struct.pack("<HBBI", step.code, step.yes, step.no, step.operand))

    def result(action: int) -> None:
        code.append(struct.pack("<HBBI", _RETURN, 0, 0, action))

    def refuse_bits(number: int, argument: int, *masks: int) -> None:
        """Refuse a call if its argument has a bit of every mask."""
        jump(_Jump(_EQUAL, number, 0, len(masks) + 3))
        load(argument)
        for index, mask in enumerate(masks):
            jump(_Jump(_ANY_BIT, mask, 0, len(masks) - index))
        result(refuse)
        result(_ALLOW)

    refuse, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    load(_ARCHITECTURE)
    jump(_Jump(_EQUAL, table.audit, 1, 0))
    result(_KILL)
    load(_NUMBER)
    jump(_Jump(_AT_LEAST, _UNKNOWN, 0, 1))
    result(absent)
    # The flags of clone3 are in memory, out of the filter's reach: libraries fall back to clone.
    jump(_Jump(_EQUAL, table.clone3, 0, 1))
    result(absent)
    refuse_bits(table.clone, _ARGUMENT_0, _NEW_NAMESPACES)
    refuse_bits(table.mmap, _ARGUMENT_3, _MAP_ANONYMOUS, _MAP_SHARED)  # MAP_SHARED_VALIDATE has the second bit too
    for number, families in ((table.socket, _FAMILIES), (table.socketpair, _FAMILIES[:1])):
        jump(_Jump(_EQUAL, number, 0, len(families) + 3))
        load(_ARGUMENT_0)
        for index, family in enumerate(families):
            jump(_Jump(_EQUAL, family, len(families) - index, 0))
        result(refuse)
        result(_ALLOW)
    jump(_Jump(_EQUAL, table.ioctl, 0, len(_TERMINAL_REQUESTS) + 3))
    load(_ARGUMENT_1)
    for index, request in enumerate(_TERMINAL_REQUESTS):
        after = len(_TERMINAL_REQUESTS) - 1 - index
        jump(_Jump(_EQUAL, request, after, 0 if after else 1))
    result(refuse)
    result(_ALLOW)
    for number in sorted({*table.refused, *_COMMON}):
        jump(_Jump(_EQUAL, number, 0, 1))
        result(refuse)
    result(_ALLOW)
    return b"".join(code)
