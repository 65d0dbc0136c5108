"""One command in a sandbox: bubblewrap, its arguments and limits, and what runs below it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import signal
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.sandbox import SEARCH_PATH
from agentrl_sandbox.file_tree import HOST_FILES, check, libc, memory_file
from agentrl_sandbox.lease import KeeperError

if TYPE_CHECKING:
    from agentrl_sandbox.lease import Lease

NEWNET = 0x40000000
SET_DEATH_SIGNAL = 1
_SIZE = re.compile(rb"^(\w+):\s+(\d+) kB$", re.MULTILINE)
"""A size in /proc/PID/status."""
_PRIVATE_SIZES = (b"RssAnon", b"VmSwap", b"VmPTE", b"HugetlbPages")
_START_S = 10.0
"""Seconds within which bubblewrap has to set up a sandbox."""


def die_with(parent: int) -> None:
    """End with the parent process, also if it has ended already."""
    libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Isolation(NamedTuple):
    """What isolates all commands of a keeper."""

    bwrap: str
    """Path of bubblewrap."""
    filter_file: int
    """Program of the filter of system calls."""


class Command:
    """A command that runs in a lease. Nothing here waits for bubblewrap or the command: the keeper serves others.

    Raises:
        KeeperError: its network cannot be made.
        FileError: an earlier command left something where it mounts.
    """

    def __init__(self, lease: Lease, files: list[int], options: dict[str, Any], isolation: Isolation) -> None:
        self.lease, self.options = lease, options
        self.killed = ""
        self.has_ended = False
        self.peak = 0
        self.problem = ""
        """Why bubblewrap made no sandbox."""
        self.listener: int | None = None
        self.init = 0
        self.init_pidfd: int | None = None
        """Process 1 of the sandbox, once bubblewrap has made it."""
        self.started = time.monotonic()
        self.deadline = self.started + _START_S
        self._report_text = b""
        lease.make_mount_points()
        with lease.mounts() as mounts:
            namespace = None
            if options["network"] == "gateway":
                self.listener, namespace = _listen(options["port"])
            self.report, report_write = os.pipe()
            """Receives what bubblewrap reports: process 1 at first, and the exit status if the program could start."""
            block_read, self._block = os.pipe()
            os.set_blocking(self.report, False)
            self.process = self._fork(files, isolation, mounts, namespace, report_write, block_read)
        self.pidfd = os.pidfd_open(self.process)

    def _fork(
        self,
        files: list[int],
        isolation: Isolation,
        mounts: dict[str, int],
        namespace: int | None,
        report: int,
        block: int,
    ) -> int:
        filter_file = os.open(f"/proc/self/fd/{isolation.filter_file}", os.O_RDONLY)
        text = [
            *_arguments(self.lease, self.options, mounts),
            *("--seccomp", str(filter_file), "--json-status-fd", str(report), "--block-fd", str(block)),
        ]
        # In a file, since other users of the machine can read a process's arguments, and these hold the environment.
        arguments = memory_file(b"".join(os.fsencode(argument) + b"\0" for argument in text))
        keeper = os.getpid()
        process = os.fork()
        if process == 0:
            try:
                die_with(keeper)
                os.setsid()
                if namespace is not None:
                    check(libc.setns(namespace, NEWNET))
                for target, file in enumerate(files[:3]):
                    os.dup2(file, target)
                _limit(self.lease, self.options)
                _keep_open({0, 1, 2, report, block, filter_file, arguments, *mounts.values()})
                os.execv(isolation.bwrap, [isolation.bwrap, "--args", str(arguments), "--", *self.options["argv"]])
            except BaseException as error:
                os.write(report, f"{type(error).__name__}: {error}".encode())
                os._exit(127)
        for file in (report, block, filter_file, arguments, *([namespace] if namespace is not None else [])):
            os.close(file)
        return process

    def read_report(self) -> bool:
        """Read what bubblewrap reports. Once it has made the sandbox, let the command start and return True."""
        with contextlib.suppress(BlockingIOError):
            part = os.read(self.report, 4096)
            self._report_text += part
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self.init = int(json.loads(self._report_text)["child-pid"])
                self._start()
                return True
            if not part:
                self.fail(self._report_text.decode("utf-8", "replace").strip())
        return False

    def _start(self) -> None:
        """Let the command start, unless bubblewrap has failed because of the sandbox's files."""
        with contextlib.suppress(ProcessLookupError):
            self.init_pidfd = os.pidfd_open(self.init)
        if self.killed:
            self.kill(self.killed)
            return
        try:
            _limit_processes(self.lease, self.init, self.options["processes"])
        except KeeperError as error:
            self.fail(str(error))
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._block, b"1")
        self.started = time.monotonic()
        self.deadline = self.started + self.options["seconds"]

    def fail(self, why: str) -> None:
        """End a command that cannot be isolated."""
        self.problem = f"bubblewrap did not start the command{': ' + why if why else ''}"
        self.kill("")

    def kill(self, why: str) -> None:
        """End all processes: the sandbox's process 1 first, with which the kernel ends all others.

        Before there is a process 1, that waits for it: bubblewrap's end alone could leave one behind.
        """
        self.killed = self.killed or why
        if not self.init and not self.problem:
            return
        for process in (self.init_pidfd, self.pidfd):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)

    @property
    def is_ending(self) -> bool:
        """Whether its processes have been killed or have ended."""
        return self.has_ended or bool(self.problem) or (bool(self.killed) and self.init != 0)

    def keep_limits(self) -> None:
        """End the command at a limit on time or memory."""
        if self.is_ending:
            return
        if time.monotonic() >= self.deadline:
            if self.init:
                self.kill("time")
            else:
                self.fail(f"it needed more than {_START_S:.0f} s")
        elif self.init:
            self.peak = max(self.peak, self.private_memory())
            if self.peak > self.options["memory_mb"] << 20:
                self.kill("memory")

    def reap(self) -> dict[str, Any]:
        """Return the outcome of a command; all its processes are gone."""
        _, status, usage = os.wait4(self.process, 0)
        has_started = bool(self.killed)
        with contextlib.suppress(BlockingIOError):
            has_started = bool(os.read(self.report, 4096).strip()) or has_started
        files = [self.report, self.pidfd, self.init_pidfd, self.listener]
        if self.init or status != signal.SIGKILL:  # else bubblewrap's child may be left, and wait for this file's end
            files.append(self._block)
        for file in files:
            if file is not None:
                os.close(file)
        return {
            "status": os.waitstatus_to_exitcode(status),
            "has_started": has_started,
            "killed": self.killed,
            "peak_bytes": self.peak,
            "seconds": time.monotonic() - self.started,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
        }

    def private_memory(self) -> int:
        """Private memory of the command's processes and their page tables, in bytes. Files have their own limit."""
        total, processes = 0, [self.init]
        while processes:
            process = processes.pop()
            with contextlib.suppress(OSError, ValueError):
                with open(f"/proc/{process}/status", "rb") as file:
                    sizes = dict(_SIZE.findall(file.read()))
                total += sum(int(sizes.get(name, 0)) for name in _PRIVATE_SIZES) << 10
                for task in os.listdir(f"/proc/{process}/task"):
                    with open(f"/proc/{process}/task/{task}/children", "rb") as file:
                        processes += map(int, file.read().split())
        return total


def _arguments(lease: Lease, options: dict[str, Any], mounts: dict[str, int]) -> list[str]:
    """Return bubblewrap's arguments for a command.

    What the sandbox owns is bound by descriptor: bubblewrap fails if the path leads elsewhere by then.
    """
    arguments = [
        "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try",
        "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox",
    ]  # fmt: skip
    if options["network"] == "none":
        arguments += ["--unshare-net"]
    if lease.root:
        user = "1000" if lease.uid is not None else "0"
        arguments += ["--uid", user, "--gid", user, "--bind-fd", str(mounts["/"]), "/"]
    else:
        arguments += ["--uid", "1000", "--gid", "1000", "--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64", "lib32"):
            if os.path.islink(f"/{name}"):
                arguments += ["--symlink", f"usr/{name}", f"/{name}"]
            elif os.path.isdir(f"/{name}"):
                arguments += ["--ro-bind", f"/{name}", f"/{name}"]
        for path in HOST_FILES:
            arguments += ["--ro-bind-try", path, path]
        for path, descriptor in mounts.items():
            arguments += ["--ro-bind-fd" if path.startswith("/etc/") else "--bind-fd", str(descriptor), path]
    for path in lease.limits["read"]:
        arguments += ["--ro-bind", path, path]
    arguments += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--size",
        str(16 << 20),
        "--tmpfs",
        "/dev/shm",
        "--ro-bind",
        f"{lease.path}/zero",
        "/dev/zero",
        "--remount-ro",
        "/dev",
    ]
    if not lease.root:
        arguments += ["--remount-ro", "/"]
    environment = {
        "PATH": SEARCH_PATH,
        "HOME": "/box",
        "LANG": "C.UTF-8",
        **options["environment"],
    }
    for key, value in environment.items():
        arguments += ["--setenv", key, value]
    return [*arguments, "--chdir", options["directory"]]


def _keep_open(files: set[int]) -> None:
    """Close all other files, and let the next program inherit these."""
    for file in [int(name) for name in os.listdir("/proc/self/fd")]:
        if file not in files:
            with contextlib.suppress(OSError):
                os.close(file)
    for file in files:
        os.set_inheritable(file, True)


def _limit(lease: Lease, options: dict[str, Any]) -> None:
    """Set the limits that a process inherits, and become the lease's user."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: lease.limits["disk_mb"] << 20,
        resource.RLIMIT_NOFILE: 512,
        resource.RLIMIT_CPU: (int(options["seconds"]) + 2) * (os.cpu_count() or 1),  # threads add up
        resource.RLIMIT_MEMLOCK: 1 << 16,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_DATA: options["memory_mb"] << 20,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))
    if lease.uid is not None:
        os.setgroups([])
        os.setresgid(lease.uid, lease.uid, lease.uid)
        os.setresuid(lease.uid, lease.uid, lease.uid)
        libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)  # a change of user clears it


def _limit_processes(lease: Lease, init: int, processes: int) -> None:
    """Limit the number of processes inside, where only the sandbox's own are counted."""
    if lease.uid is None:
        with contextlib.suppress(ProcessLookupError):  # bubblewrap failed since, because of the sandbox's files
            resource.prlimit(init, resource.RLIMIT_NPROC, (processes, processes))
        return
    helper = os.fork()  # root may lack the right to change others' limits; the lease's own user has it
    if helper == 0:
        try:
            os.setresgid(lease.uid, lease.uid, lease.uid)
            os.setresuid(lease.uid, lease.uid, lease.uid)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(init, resource.RLIMIT_NPROC, (processes, processes))
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(helper, 0)
    if status:
        raise KeeperError("the limit on processes cannot be set")


def _listen(port: int) -> list[int]:
    """Return a socket that listens at 127.0.0.1:port in a new network namespace, and the namespace."""
    ours, theirs = socket.socketpair()
    helper = os.fork()
    if helper == 0:
        try:
            check(libc.unshare(NEWNET))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                fcntl.ioctl(control, 0x8914, struct.pack("16sH14s", b"lo", 0x1 | 0x40, b""))  # SIOCSIFFLAGS: up
            server = socket.create_server(("127.0.0.1", port), backlog=64)
            namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
            socket.send_fds(theirs, [b"1"], [server.fileno(), namespace])
            os._exit(0)
        except BaseException as error:
            theirs.send(str(error).encode()[:200])
            os._exit(1)
    theirs.close()
    text, files, _, _ = socket.recv_fds(ours, 256, 2)
    ours.close()
    os.waitpid(helper, 0)
    if len(files) != 2:
        raise KeeperError(f"the sandbox's network namespace cannot be made: {text.decode('utf-8', 'replace')}")
    return files
