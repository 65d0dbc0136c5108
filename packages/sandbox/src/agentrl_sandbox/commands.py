"""What all drivers do around a command: checks before it starts, and its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from agentrl.sandbox import SEARCH_PATH, CommandResult, InputError, SandboxError, check_variables, is_below
from agentrl_sandbox.file_tree import memory_file as open_memory_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agentrl.sandbox import SandboxLease, SandboxLimits

LONGEST_ARGUMENT = (128 << 10) - 1
"""Bytes of one argument; the kernel's limit."""
LONGEST_COMMAND = 1 << 20
"""Bytes of all arguments; the kernel allows a quarter of the stack for them and the environment."""
CANNOT_START, NO_PROGRAM = 126, 127
"""Exit status of a command that cannot be started, and of one whose program does not exist, as shells use them."""
_VISIBLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Directories of this machine that a sandbox without a root sees."""
_CHUNK = 1 << 16


async def prepare(
    lease: SandboxLease,
    argv: Sequence[str],
    files: Mapping[str, bytes],
    variables: Mapping[str, str],
    seconds: float | None,
    *,
    directory: str,
) -> CommandResult | None:
    """Check a command and write its files. Returns the result of a command that cannot start, None if it can.

    Raises:
        InputError: the caller's arguments cannot be used.
    """
    if not argv:
        raise InputError("sandbox: a command needs a program")
    check_variables(variables)
    if seconds is not None and not seconds >= 0:
        raise InputError(f"sandbox: seconds = {seconds} is no time limit")
    if refusal := _unusable(argv):
        return not_started(refusal)
    try:
        if files:
            await lease.write(
                {path if path.startswith("/") else f"{directory}/{path}": body for path, body in files.items()}
            )
    except OSError as error:  # an earlier command may have filled the disk, or made a link of a directory
        return not_started(str(error))
    return None


def _unusable(argv: Sequence[str]) -> str:
    """Return why the kernel would refuse a command line; empty if it would not."""
    sizes = [len(text.encode("utf-8", "replace")) for text in argv]
    if max(sizes) > LONGEST_ARGUMENT or sum(sizes) > LONGEST_COMMAND:
        return (
            f"the command line has {sum(sizes):,} bytes, and one argument {max(sizes):,}; at most {LONGEST_COMMAND:,} "
            f"and {LONGEST_ARGUMENT:,} fit. Put large content in a file"
        )
    return "an argument contains NUL" if any("\0" in text for text in argv) else ""


def not_started(why: str) -> CommandResult:
    """Return the result of a command that cannot be started because of the command itself."""
    return CommandResult(
        status=CANNOT_START,
        stdout=b"",
        stderr=f"sandbox: {why}\n".encode("utf-8", "replace"),
        killed="",
        truncated=False,
        seconds=0.0,
        cpu_seconds=0.0,
    )


def exec_status(stderr: bytes) -> int:
    """Return the exit status of a command that bubblewrap could not start; it wrote the reason."""
    return NO_PROGRAM if b"execvp" in stderr and b"No such file" in stderr else CANNOT_START


def check_program(program: str, limits: SandboxLimits, variables: Mapping[str, str]) -> None:
    """Refuse a program that could not start if it is missing here and no command can have removed it.

    Raises:
        SandboxError: this machine, or the root, lacks the program.
    """
    path = variables.get("PATH", SEARCH_PATH)
    places = [f"{directory}/{program}" for directory in path.split(":")]
    if "/" in program:
        if limits.root is not None:  # commands may be asked to make it
            return
        places = [os.path.join(limits.directory, program)]
    places = [os.path.normpath(place).lstrip("/") for place in places]
    if any(is_below(place, ("/box", "/tmp", *limits.writable)) for place in places):
        return
    visible = [f"/{place}" for place in places if is_below(place, limits.read)]
    if limits.root is not None:
        visible += [f"{limits.root}/{place}" for place in places]
    else:
        visible += [f"/{place}" for place in places if is_below(place, _VISIBLE)]
    if not any(map(os.path.lexists, visible)):
        where = f"in {path} " if "/" not in program else ""
        raise SandboxError(
            f"sandbox: there is no program {program!r} {where}of {limits.root or 'this machine'}; install it, or name "
            "its directory in `read`"
        )


class Capture:
    """Reads one output stream of a command to its end, and keeps its first bytes."""

    def __init__(self, limit: int) -> None:
        self.is_truncated = False
        self._limit = limit
        self._kept = bytearray()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(self._read_end, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._read_end, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._read_end)
            self._ended.set()
            return
        room = self._limit - len(self._kept)
        self._kept += data[:room]
        self.is_truncated = self.is_truncated or len(data) > room

    async def finish(self) -> bytes:
        """Return the kept bytes after all holders have closed the other end."""
        os.close(self.write_end)
        self.write_end = -1
        await self._ended.wait()
        return bytes(self._kept)

    def close(self) -> None:
        self._loop.remove_reader(self._read_end)
        for end in (self._read_end, self.write_end):
            if end >= 0:
                os.close(end)


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """A file in memory with this content."""
    file = open_memory_file(content)
    try:
        yield file
    finally:
        os.close(file)
