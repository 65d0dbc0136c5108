"""The port between a sandbox and what isolates it, with its records."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from agentrl.core.errors import InfrastructureError, InputError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from agentrl.sandbox.files import FileRecord

Network = Literal["none", "gateway", "open"]
"""`gateway`: only a port that the sandbox's owner serves; `open`: the machine's own network."""
DriverName = Literal["bubblewrap", "podman", "docker"]
"""What isolates the sandboxes of a run (`sandbox.driver`)."""
_FIXED = ("bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "sbin", "usr")
"""Directories below / that no sandbox without a `root` can write to."""
_LONGEST_PATH = 2048
"""Longest path of a directory that is made, in bytes; the kernel's limit of 4,096 includes the keeper's own part."""
_RANGES = {
    "memory_mb": (32, 1 << 24),
    "seconds": (0.1, 30 * 86_400),
    "disk_mb": (1, 1 << 24),
    "inodes": (64, 1 << 30),
    "processes": (4, 1 << 22),
    "output_bytes": (1, 1 << 30),
}
"""Least and greatest value of each limit."""


GATEWAY_PORT = 8080
"""Port of a sandbox with `network = "gateway"` on which its owner listens."""
NAME_BYTES = 1 << 10
"""A file's name takes as long as so many bytes of content."""
_SMALL = 1 << 19
"""Bytes that are worked on within a few milliseconds."""
T = TypeVar("T")


async def work_on(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """Do work on `size` bytes, in a thread if it would hold the event loop: a thread takes longer on a busy machine."""
    return work(*arguments) if size <= _SMALL else await asyncio.to_thread(work, *arguments)


class SandboxError(InfrastructureError):
    """A sandbox cannot be made or used because of the machine, not the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Outcome of one command."""

    status: int
    """Exit status: 128 plus the signal's number if a signal ended the command; negative if agentrl killed it."""
    stdout: bytes
    stderr: bytes
    killed: Literal["", "time", "memory", "disk", "closed"]
    """The limit that ended the command. `disk` only with a container program: its files were over the limit when they
    were measured, while it ran or at its end."""
    truncated: bool
    """Whether output beyond `SandboxSpec.output_bytes` was discarded."""
    seconds: float
    cpu_seconds: float
    """CPU time of the command; 0 with a container program, which does not report it."""

    @property
    def ok(self) -> bool:
        """Whether the command ended with status 0, within its limits."""
        return self.status == 0 and not self.killed

    @property
    def output(self) -> str:
        """The standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Visible files and limits of a sandbox.

    Raises:
        InputError: a limit is out of its range.
    """

    memory_mb: int = 512
    """Private memory of all processes of a command, in MiB."""
    seconds: float = 60.0
    """Wall-clock time of a command."""
    disk_mb: int = 64
    """Total size of all files, in MiB. They are in memory."""
    inodes: int = 20_000
    """Number of files and directories."""
    processes: int = 64
    output_bytes: int = 1 << 20
    """Bytes that are kept of each of the two output streams; the rest is discarded."""
    network: Network = "none"
    root: str | None = None
    """Directory with a complete file system, read-only below the sandbox's changes; None: this machine's /usr."""
    read: tuple[str, ...] = ()
    """Further paths of this machine that are visible, read-only."""
    writable: tuple[str, ...] = ()
    """Further directories that commands may write to, such as `/app`; they are made. /box and /tmp always are."""
    directory: str = "/box"
    """Working directory of the commands."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all commands, in addition to PATH, HOME and LANG."""

    def seconds_of(self, seconds: float | None) -> float:
        """Return the time of a command that asks for some seconds; None: it asks for no other than the limit."""
        return self.seconds if seconds is None else min(seconds, self.seconds)

    def __post_init__(self) -> None:
        for name, (least, greatest) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= greatest:
                what = "too large" if value > greatest else "too small"
                raise InputError(f"sandbox: {name} = {value} is {what}; it must be from {least} to {greatest:,}")
        if self.network not in ("none", "gateway", "open"):
            raise InputError(f"sandbox: network = {self.network!r}; write 'none', 'gateway' or 'open'")
        check_variables(self.environment)
        here = (*self.read, *([self.root] if self.root is not None else []))
        for path in (*here, *self.writable, self.directory):
            if not path.startswith("/") or ".." in path.split("/"):
                raise InputError(f"sandbox: {path!r} is not an absolute path without '..'")
        for path in (*self.writable, self.directory):
            if not _is_possible(path):
                raise InputError(f"sandbox: {path[:100]!r} is no possible path: too long, or it has NUL or surrogates")
        for path in here:
            if not Path(path).exists():
                raise InputError(f"sandbox: {path} does not exist")
        if self.root is not None:
            self._check_root(Path(self.root))
        elif fixed := [path for path in self.writable if path.split("/")[1] in ("", *_FIXED)]:
            raise InputError(f"sandbox: {fixed[0]} cannot be writable, since it lies in this machine's /; give a root")

    def _check_root(self, root: Path) -> None:
        if not root.is_dir():
            raise InputError(f"sandbox: root {root} is not a directory")
        owner = root.stat().st_uid
        if owner not in (0, os.getuid()):
            raise InputError(
                f"sandbox: root {root} belongs to user {owner}, who could change it while commands run; copy it"
            )


def _is_possible(path: str) -> bool:
    """Whether a file of a sandbox can have a path."""
    try:
        names = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        return False
    return b"\0" not in b"/".join(names) and max(map(len, names)) <= 255 and len(b"/".join(names)) <= _LONGEST_PATH


def check_variables(variables: Mapping[str, str]) -> None:
    """Check the environment variables of a command.

    Raises:
        InputError: no process can have one of them.
    """
    for name, value in variables.items():
        try:
            unusable = not name or "=" in name or b"\0" in os.fsencode(name + value)
        except UnicodeEncodeError:
            unusable = True
        if unusable:
            raise InputError(
                f"sandbox: the environment variable {name!r} is unusable: a name needs a character and may have no "
                "'=', and neither NUL nor lone surrogates may occur"
            )


@dataclass(frozen=True, slots=True)
class SandboxCheck:
    """One promise, and whether this machine keeps it."""

    name: str
    holds: bool
    result: str
    fix: str = ""


class SandboxLease(Protocol):
    """One sandbox: files, and commands over them. No process outlives its command."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        seconds: float | None = None,
        listener: Callable[[socket.socket], None] | None = None,
    ) -> CommandResult:
        """Run a command.

        Args:
            argv: the program and its arguments.
            files: written before the command starts, by absolute path or path below the working directory.
            stdin: the standard input.
            environment: variables in addition to the sandbox's.
            seconds: a shorter time limit than the sandbox's.
            listener: receives the socket that listens at 127.0.0.1:8080 of the sandbox, with `network = "gateway"`.

        Raises:
            SandboxError: the sandbox is gone, the command could not be isolated, or the machine lacks its program.
        """
        ...

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files by absolute path; parent directories are made, and a file that exists keeps its mode. A new
        script (`#!`) or program is executable. A path that ends with a slash is a directory; see also `LinkTarget`.

        Raises:
            OSError: the disk is full, or a link or a file is on the way.
        """
        ...

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Return at most `limit` bytes of a plain file.

        Raises:
            OSError: there is no plain file, or a link is on the way.
        """
        ...

    async def changes(self, *, everything: bool = False) -> tuple[list[FileRecord], list[str], bytes]:
        """Return the files that changed since the last call, the paths that are gone, and the contents of the plain
        files among the first, one after another. No command may run meanwhile.

        Args:
            everything: return all files.

        Raises:
            OSError: too much changed, or a path is too long.
        """
        ...

    async def restore(self, records: Sequence[FileRecord], contents: bytes) -> None:
        """Make files as `changes` returned them, parents first, in a sandbox that has run nothing yet."""
        ...

    async def close(self) -> None:
        """End the sandbox's commands and remove its files. Idempotent."""
        ...


class SandboxDriver(Protocol):
    """What isolates sandboxes on this machine."""

    async def create(self, limits: SandboxLimits) -> SandboxLease:
        """Make a sandbox with an empty /box.

        Raises:
            SandboxError: this machine cannot isolate it.
        """
        ...

    async def check(self) -> list[SandboxCheck]:
        """Check every promise on this machine; the first one names the isolation, or the reason for its absence."""
        ...

    async def close(self) -> None:
        """Close all sandboxes."""
        ...
