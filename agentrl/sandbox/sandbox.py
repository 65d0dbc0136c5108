"""`agentrl.Sandbox`: what an environment's commands may see and use."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.core.errors import InfrastructureError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentrl.sandbox.driver import SandboxDriver

Network = Literal["none", "gateway", "open"]
"""`gateway`: only a port that the sandbox's owner serves; `open`: the machine's own network."""
_FLOORS = {"memory_mb": 32, "seconds": 0.1, "disk_mb": 1, "inodes": 64, "processes": 4, "output_bytes": 1}


class SandboxError(InfrastructureError):
    """A sandbox cannot be made or used, for a reason that lies with the machine and not with the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Outcome of one command."""

    status: int
    """Exit status; minus the signal's number if a signal ended the command."""
    stdout: bytes
    stderr: bytes
    killed: Literal["", "time", "memory", "closed"]
    """The limit that ended the command."""
    truncated: bool
    """Whether output beyond `SandboxSpec.output_bytes` was discarded."""
    seconds: float
    cpu_seconds: float

    @property
    def ok(self) -> bool:
        """Whether the command ended with status 0, within its limits."""
        return self.status == 0 and not self.killed

    @property
    def output(self) -> str:
        """The standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Isolation and limits for commands that nobody trusts.

    `run` makes a sandbox for one command: no state survives it, so a repeated command gives the same result as far as
    the command itself does. Call it through `ctx.effect`, which journals the result::

        ran = await ctx.effect("tests", lambda: self.sandbox.run(["python3", "main.py"], files={"main.py": code}))

    Raises:
        InputError: a limit is out of its range.
    """

    memory_mb: int = 512
    """Private memory of all processes of a command, in MiB."""
    seconds: float = 60.0
    """Wall-clock time of a command."""
    disk_mb: int = 64
    """Bytes of all files together, in MiB. They lie in memory."""
    inodes: int = 20_000
    """Number of files and directories."""
    processes: int = 64
    output_bytes: int = 1 << 20
    """Bytes that are kept of each of the two output streams; the rest is discarded."""
    network: Network = "none"
    root: str | None = None
    """Directory with a file system of its own, read-only below the sandbox's changes; None: this machine's /usr."""
    read: tuple[str, ...] = ()
    """Further paths of this machine that are visible, read-only."""

    def __post_init__(self) -> None:
        for name, floor in _FLOORS.items():
            if getattr(self, name) < floor:
                raise InputError(
                    f"sandbox: {name} = {getattr(self, name)} is too small; the least that works is {floor}"
                )
        if self.network not in ("none", "gateway", "open"):
            raise InputError(f"sandbox: network = {self.network!r}; write 'none', 'gateway' or 'open'")
        for path in (*self.read, *([self.root] if self.root is not None else [])):
            if not path.startswith("/"):
                raise InputError(f"sandbox: {path!r} is not an absolute path")
            if not Path(path).exists():
                raise InputError(f"sandbox: {path} does not exist")
        if self.root is not None and not Path(self.root).is_dir():
            raise InputError(f"sandbox: root {self.root} is not a directory")

    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = b"",
        environment: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> CommandResult:
        """Run one command in a sandbox of its own.

        Args:
            argv: the program and its arguments; no shell reads them.
            files: written before the command starts, by path below /box.
            stdin: the standard input.
            environment: variables beside PATH, HOME and LANG.
            seconds: a shorter time limit than the sandbox's.

        Raises:
            SandboxError: this machine cannot isolate the command.
            InputError: the command or a path cannot be used.
        """
        lease = await _driver().create(self)
        try:
            content = {path: _as_bytes(body) for path, body in (files or {}).items()}
            return await lease.run(
                argv, files=content, stdin=_as_bytes(stdin), environment=environment, seconds=seconds
            )
        finally:
            await lease.close()


def _as_bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


_drivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, SandboxDriver] = weakref.WeakKeyDictionary()
"""One driver, and so one keeper process, for each event loop; a worker has one loop."""


def _driver() -> SandboxDriver:
    from agentrl.sandbox.bubblewrap import BubblewrapDriver

    loop = asyncio.get_running_loop()
    if loop not in _drivers:
        _drivers[loop] = BubblewrapDriver()
    return _drivers[loop]
