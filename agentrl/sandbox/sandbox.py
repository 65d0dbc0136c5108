"""`agentrl.Sandbox`: untrusted commands of an environment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.errors import InputError
from agentrl.sandbox.bubblewrap import BubblewrapDriver
from agentrl.sandbox.container import ContainerDriver
from agentrl.sandbox.driver import DriverName, SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentrl.sandbox.driver import CommandResult, SandboxDriver, SandboxLease


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox(SandboxLimits):
    """Isolation and limits for untrusted commands.

    `ctx.sandbox(...)` makes a sandbox that keeps its files for the episode. `run` makes one for a single command.
    """

    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes | Path] | None = None,
        stdin: str | bytes = b"",
        environment: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> CommandResult:
        """Run one command in a new sandbox.

        Args:
            argv: the program and its arguments; no shell reads them.
            files: written before the command starts, by path below the working directory. A `Path` is a file or a
                directory of this machine, whose plain files are copied.
            stdin: the standard input.
            environment: variables in addition to the sandbox's.
            seconds: a shorter time limit than the sandbox's.

        Raises:
            SandboxError: this machine cannot isolate the command, or lacks its program.
            InputError: the command or a path cannot be used.
        """
        lease = await open_lease(self)
        try:
            content = {path: as_bytes(body) for path, body in read_sources(files or {}).items()}
            return await lease.run(argv, files=content, stdin=as_bytes(stdin), environment=environment, seconds=seconds)
        finally:
            await lease.close()


def read_sources(files: Mapping[str, str | bytes | Path]) -> dict[str, str | bytes]:
    """Read the files and directories of this machine among the contents of files.

    Raises:
        InputError: there is no such file or directory.
    """
    contents: dict[str, str | bytes] = {}
    for path, source in files.items():
        if not isinstance(source, Path):
            contents[path] = source
        elif source.is_dir():
            found = sorted(inner for inner in source.rglob("*") if inner.is_file() and not inner.is_symlink())
            contents |= {f"{path.rstrip('/')}/{inner.relative_to(source)}": inner.read_bytes() for inner in found}
        elif source.is_file():
            contents[path] = source.read_bytes()
        else:
            raise InputError(f"sandbox: {source} is neither a file nor a directory, so it cannot be copied to {path}")
    return contents


def as_bytes(content: str | bytes) -> bytes:
    """Return text as UTF-8."""
    return content.encode() if isinstance(content, str) else content


_drivers: dict[tuple[asyncio.AbstractEventLoop, DriverName], SandboxDriver] = {}
"""One driver, and so one keeper process, for each event loop; a worker has one loop."""
_chosen: DriverName = "bubblewrap"


def choose_driver(name: DriverName) -> None:
    """Choose the driver of all sandboxes that this process makes from now on."""
    global _chosen
    _chosen = name


def make_driver(name: DriverName) -> SandboxDriver:
    """Return a new driver, which has started nothing yet."""
    return BubblewrapDriver() if name == "bubblewrap" else ContainerDriver(name)


async def open_lease(limits: SandboxLimits) -> SandboxLease:
    """Make an empty sandbox.

    Raises:
        SandboxError: this machine cannot isolate it.
    """
    key = (asyncio.get_running_loop(), _chosen)
    if key not in _drivers:
        for ended in [other for other in _drivers if other[0].is_closed()]:
            await _drivers.pop(ended).close()
        _drivers[key] = make_driver(_chosen)
    return await _drivers[key].create(limits)
