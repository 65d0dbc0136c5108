"""An engine's process as a child of this one; implements `placement.Placement` and its `EngineChild`.

The connection is a socket pair: no path, no port, nobody else can connect. Owns the command, the child's private files,
and its end: what it had started goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from agentrl.engines.private_files import VARIABLE, PrivateFiles

if TYPE_CHECKING:
    from asyncio.subprocess import Process

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
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, files: PrivateFiles
    ) -> None:
        super().__init__(process)
        self.reader = reader
        self.writer = writer
        self._files = files

    async def wait(self) -> str:
        """See `Child.wait`; its files are gone, too."""
        how = await super().wait()
        self._files.remove()
        return how


class ThisMachine:
    """Engines as children of this process."""

    async def start(self, program: EngineProgram) -> EngineProcess:
        """See `Placement.start`."""
        ours, theirs = socket.socketpair()
        files = PrivateFiles()
        command = [sys.executable, "-m", program.host, str(theirs.fileno()), str(os.getpid())]
        # it imports what this process would, and nothing that only lies in the working directory
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", VARIABLE: str(files.path)}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # a start that is cancelled, too: the child, if there is one, ends with its connection
            ours.close()
            files.remove()
            raise
        finally:
            theirs.close()
        return EngineProcess(process, reader, writer, files)

    async def close(self) -> None:
        """Nothing is held."""


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
