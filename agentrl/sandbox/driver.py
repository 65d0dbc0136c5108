"""The port between a sandbox and what isolates it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from agentrl.sandbox.sandbox import CommandResult, Sandbox


class SandboxLease(Protocol):
    """One sandbox: files, and commands over them. No process outlives its command."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        directory: str = "/box",
        seconds: float | None = None,
        listener: Callable[[socket.socket], None] | None = None,
    ) -> CommandResult:
        """Run a command.

        Args:
            argv: the program and its arguments.
            files: written before the command starts, by absolute path or path below `directory`.
            stdin: the standard input.
            environment: variables beside PATH, HOME and LANG.
            directory: the working directory.
            seconds: a shorter time limit than the sandbox's.
            listener: receives the socket that listens at 127.0.0.1:8080 of the sandbox, with `network = "gateway"`.

        Raises:
            SandboxError: the sandbox is gone, or the command could not be started.
        """
        ...

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files by absolute path; parent directories are made, and links on the way are refused."""
        ...

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """Return at most `limit` bytes of a plain file.

        Raises:
            FileNotFoundError: there is no plain file, or a link is on the way.
        """
        ...

    async def close(self) -> None:
        """End the sandbox's commands and remove its files. Idempotent."""
        ...


class SandboxDriver(Protocol):
    """What isolates sandboxes on this machine."""

    async def create(self, sandbox: Sandbox) -> SandboxLease:
        """Make a sandbox with an empty /box.

        Raises:
            SandboxError: this machine cannot isolate it.
        """
        ...

    async def close(self) -> None:
        """Close all sandboxes."""
        ...
