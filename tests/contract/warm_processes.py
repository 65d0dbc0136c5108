"""Processes of engines, forked from a warm one: they start at once."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from multiprocessing.context import ForkServerProcess

from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE, ChildProgram, PrivateDirectory
from agentrl.engines.remote import server
from tests.support.warm import WARM


def _serve(connection: socket.socket, directory: str) -> None:
    """Be `python -m agentrl.engines.remote.server`; the process to end with is the one it was forked from."""
    os.environ[PRIVATE_DIRECTORY_VARIABLE] = directory
    sys.argv = [server.__file__, str(connection.detach()), str(os.getppid())]
    server.main()


class WarmPlacement:
    """A `ProcessPlacement` on this machine."""

    gpus = ()

    async def start(self, program: ChildProgram) -> WarmChild:
        """Fork a process; only programs of engines, which all run the same module."""
        assert program.module == server.__name__
        ours, theirs = socket.socketpair()
        files = PrivateDirectory()
        with theirs:
            process = WARM.Process(target=_serve, args=(theirs, str(files.path)))
            process.start()
        return WarmChild(process, files, *await asyncio.open_connection(sock=ours))

    async def close(self) -> None:
        """Nothing to release."""


class WarmChild:
    """A `ConnectedChildProcess` that was forked."""

    host = ""
    is_drained = False

    def __init__(
        self,
        process: ForkServerProcess,
        files: PrivateDirectory,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        assert process.pid is not None
        self.process_id = process.pid
        self.reader = reader
        self.writer = writer
        self.kill = process.kill
        self._process = process
        self._files = files

    async def wait(self) -> str:
        """See `ChildProcessHandle.wait`; its private files are removed too."""
        await asyncio.to_thread(self._process.join)
        self._files.remove()
        return f"died (exit code {self._process.exitcode})"
