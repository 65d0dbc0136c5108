"""`agentrl.Sandbox`: untrusted commands of an environment."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.errors import InputError
from agentrl.core.machine import install_command
from agentrl.sandbox.driver import DriverName, SandboxCheck, SandboxError, SandboxLimits
from agentrl.sandbox.files import LinkTarget, Program

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
                directory of this machine, which is copied with its links.
            stdin: the standard input.
            environment: variables in addition to the sandbox's.
            seconds: a shorter time limit than the sandbox's.

        Raises:
            SandboxError: this machine cannot isolate the command, or lacks its program.
            InputError: the command or a path cannot be used.
        """
        lease = await open_lease(self)
        try:
            content = {path: as_bytes(body) for path, body in read_sources(files or {}, any_links=True).items()}
            return await lease.run(argv, files=content, stdin=as_bytes(stdin), environment=environment, seconds=seconds)
        finally:
            await lease.close()


def read_sources(files: Mapping[str, str | bytes | Path], *, any_links: bool = False) -> dict[str, str | bytes]:
    """Read the files and directories of this machine among the contents of files.

    An empty directory gets a path that ends with a slash.

    Args:
        files: contents by path.
        any_links: also copy links that leave their directory, as an agent may make them.

    Raises:
        InputError: there is no such file or directory, or it holds what cannot be copied.
    """
    contents: dict[str, str | bytes] = {}
    for path, source in files.items():
        if not isinstance(source, Path):
            contents[path] = source
        elif source.is_dir():
            if (refusals := copy_refusals(source)) and not any_links:
                raise InputError(f"sandbox: {refusals[0]}")
            top = path.rstrip("/")
            if not any(source.iterdir()):
                contents[f"{top}/"] = b""
            for inner in sorted(source.rglob("*")):
                place = f"{top}/{inner.relative_to(source)}"
                if inner.is_symlink():
                    contents[place] = LinkTarget(os.fsencode(inner.readlink()))
                elif inner.is_file():
                    contents[place] = _read_file(inner)
                elif inner.is_dir() and not any(inner.iterdir()):
                    contents[f"{place}/"] = b""
        elif source.is_file():
            contents[path] = _read_file(source)
        else:
            raise InputError(f"sandbox: {source} is neither a file nor a directory, so it cannot be copied to {path}")
    return contents


def _read_file(path: Path) -> bytes:
    return (Program if path.stat().st_mode & 0o111 else bytes)(path.read_bytes())


def copy_refusals(source: Path) -> list[str]:
    """Return what in a directory cannot be copied: links that leave it, pipes, sockets and devices."""
    refusals = []
    for inner in sorted(source.rglob("*")):
        if inner.is_symlink():
            target = os.path.normpath(inner.parent.relative_to(source) / inner.readlink())
            if os.path.isabs(target) or target.split("/")[0] == "..":
                refusals.append(
                    f"{inner}: a link to {inner.readlink()}, outside of {source}; only relative links that stay inside "
                    "are copied"
                )
        elif not (inner.is_file() or inner.is_dir()):
            refusals.append(f"{inner}: neither a file, a directory nor a link")
    return refusals


def as_bytes(content: str | bytes) -> bytes:
    """Return text as UTF-8."""
    return content.encode() if isinstance(content, str) else content


ENTRY_POINT_GROUP = "agentrl.sandbox_drivers"
_drivers: dict[tuple[asyncio.AbstractEventLoop, DriverName], SandboxDriver] = {}
"""One driver, and so one keeper process, for each event loop; a worker has one loop."""
_chosen: DriverName = "bubblewrap"


def choose_driver(name: DriverName) -> None:
    """Choose the driver of all sandboxes that this process makes from now on."""
    global _chosen
    _chosen = name


def make_driver(name: DriverName) -> SandboxDriver:
    """Return a new driver, which has started nothing yet.

    Raises:
        SandboxError: no installed package has it.
    """
    points = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if not points:
        raise SandboxError(
            f"no package with the sandbox driver {name!r} is installed: {install_command(package='sandbox')}"
        )
    driver: SandboxDriver = next(iter(points)).load()()
    return driver


async def check_sandboxes(name: DriverName = "bubblewrap") -> list[SandboxCheck]:
    """Check every promise on this machine; see `SandboxDriver.check`."""
    try:
        driver = make_driver(name)
    except SandboxError as error:
        return [SandboxCheck("sandboxes", False, str(error))]
    try:
        return await driver.check()
    finally:
        await driver.close()


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
