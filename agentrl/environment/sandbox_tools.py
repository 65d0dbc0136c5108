"""Tools with which a policy works in the sandbox of a `ToolEnvironment`: a shell, and reading and changing files.

    class Shell(agentrl.ToolEnvironment):
        sandbox = agentrl.Sandbox()
        bash = agentrl.bash(seconds=30)

They are ordinary tools: what they call on `self.box` is journaled, and their observations follow from that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentrl.environment.tools import ToolEnvironment, tool

if TYPE_CHECKING:
    from agentrl.sandbox.driver import CommandResult

Tool = Callable[..., Any]

MAX_FILE_BYTES = 1 << 20
"""Maximum size of a file that a tool reads or changes."""
_SPARE_S = 60.0
"""Seconds that a tool may wait beyond its command's time limit, while the sandbox starts or others run in it."""


def bash(*, seconds: float = 60.0, characters: int = 16_000) -> Tool:
    """A tool that runs commands with bash, in the working directory. Files last for the episode, processes do not.

    Args:
        seconds: time limit of a command, if it is shorter than the sandbox's.
        characters: length of the output that the policy sees; the middle of longer output is left out.
    """

    @tool(timeout_s=seconds + _SPARE_S)
    async def bash(self: ToolEnvironment, command: str) -> str:
        """Run a command with bash and return its output. Files and directories last, variables and processes do not."""
        ran = await self.box.run(["bash", "-c", f"exec 2>&1\n{command}"], seconds=seconds)
        return describe_result(ran, characters)

    return bash


def read_file(*, lines: int = 500) -> Tool:
    """A tool that returns lines of a file.

    Args:
        lines: maximum number of lines of one call.
    """

    @tool(timeout_s=_SPARE_S)
    async def read_file(self: ToolEnvironment, path: str, first_line: int = 1) -> str:
        """Return lines of a text file, from `first_line` on, counted from 1."""
        # `str.splitlines` would also split at form feeds and at separators of Unicode, which grep and sed do not count.
        content = re.findall(r"[^\n]*\n|[^\n]+", (await _content(self, path)).decode("utf-8", "replace"))
        start = max(first_line - 1, 0)
        lines_to_return, num_more = content[start : start + lines], len(content) - start - lines
        return "".join(lines_to_return) + (f"[{num_more} more lines]" if num_more > 0 else "")

    return read_file


def write_file() -> Tool:
    """A tool that writes a file."""

    @tool(timeout_s=_SPARE_S)
    async def write_file(self: ToolEnvironment, path: str, content: str) -> str:
        """Write a text file; missing directories are made."""
        await self.box.write({_absolute(self, path): content})
        return f"wrote {len(content)} characters to {path}"

    return write_file


def edit_file() -> Tool:
    """A tool that replaces text in a file."""

    @tool(timeout_s=_SPARE_S)
    async def edit_file(self: ToolEnvironment, path: str, old: str, new: str) -> str:
        """Replace the text `old`, which must stand exactly once in the file, by `new`."""
        content, old_bytes = await _content(self, path), old.encode()
        count = content.count(old_bytes) if old else 0
        if count != 1:
            raise ValueError(f"the old text stands {count} times in {path}, and must stand there once")
        await self.box.write({_absolute(self, path): content.replace(old_bytes, new.encode())})
        return f"edited {path}"

    return edit_file


async def _content(environment: ToolEnvironment, path: str) -> bytes:
    content = await environment.box.read(_absolute(environment, path), limit=MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is longer than {MAX_FILE_BYTES:,} bytes")
    return content


def _absolute(environment: ToolEnvironment, path: str) -> str:
    assert environment.sandbox is not None
    return path if path.startswith("/") else f"{environment.sandbox.directory}/{path}"


def describe_result(ran: CommandResult, characters: int) -> str:
    """Return the output of a command for a policy, with what it does not show: status, limits, text left out."""
    text, notes = ran.output, []
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    if ran.truncated:
        notes.append("the output is longer than is kept")
    if ran.killed:
        notes.append(f"ended by the limit on {ran.killed}")
    elif ran.status:
        notes.append(f"exit status {ran.status}")
    text += ran.stderr.decode("utf-8", "replace")  # of a command that could not start; others write to the output
    return "\n".join([text.rstrip("\n"), *(f"[{note}]" for note in notes)]).strip("\n")
