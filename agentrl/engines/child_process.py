"""An engine's process as a child of this one; implements `placement.Placement` and its `EngineChild`.

The connection is a socket pair: no path, no port, nobody else can connect. Owns the command, the child's private files,
where its error stream goes, and its end: what it had started goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from agentrl.core.errors import StorageError
from agentrl.core.files import remedy
from agentrl.engines.private_files import VARIABLE, PrivateFiles

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from pathlib import Path

    from agentrl.engines.placement import EngineProgram


class ChildProcess:
    """See `supervision.Child`: a process that leads a session of its own, so that Ctrl-C is its parent's."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._how = ""

    @property
    def process_id(self) -> int:
        """Of the child."""
        return self._process.pid

    async def wait(self) -> str:
        """See `Child.wait`."""
        if not self._how:
            code = await self._process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # what it had started
            self._how = f"died ({_cause(code)})"
        return self._how

    def kill(self) -> None:
        """See `Child.kill`."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class EngineProcess(ChildProcess):
    """See `placement.EngineChild`."""

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        files: PrivateFiles,
        log: Path | None,
    ) -> None:
        super().__init__(process)
        self.reader = reader
        self.writer = writer
        self._files = files
        self._log = log

    async def wait(self) -> str:
        """See `Child.wait`; its files are gone, too."""
        how = await super().wait()
        self._files.remove()
        return how if self._log is None else f"{how}; what it said is in {self._log}"


class ThisMachine:
    """Engines as children of this process.

    Args:
        log: takes what they write to their error streams, after what is there; None: this process's own does.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log

    async def start(self, program: EngineProgram) -> EngineProcess:
        """See `Placement.start`."""
        with contextlib.ExitStack() as stack:
            errors = None
            if self._log is not None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    errors = os.open(self._log, flags, 0o600)
                except OSError as error:
                    raise StorageError(
                        f"{self._log}: cannot be opened to write ({error.strerror}); {remedy(error)}"
                    ) from error
                stack.callback(os.close, errors)
            return await self._start(program, errors)

    async def _start(self, program: EngineProgram, errors: int | None) -> EngineProcess:
        ours, theirs = socket.socketpair()
        files = PrivateFiles()
        command = [sys.executable, "-m", program.host, str(theirs.fileno()), str(os.getpid())]
        # it imports what this process would, and nothing that only lies in the working directory
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", VARIABLE: str(files.path)}
        process: Process | None = None
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # a start that is cancelled, too
            ours.close()
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            files.remove()
            raise
        finally:
            theirs.close()
        return EngineProcess(process, reader, writer, files, self._log)

    async def close(self) -> None:
        """Nothing is held."""


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
