"""Engine and worker processes, forked from a warm one: they start at once."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
from multiprocessing.context import ForkServerProcess
from typing import Any

from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE, ChildProgram, PrivateDirectory, _cause
from tests.support.warm import WARM


def _serve(module: str, connection: socket.socket, variables: dict[str, str]) -> None:
    """Be `python -m MODULE`, in a session of its own; the process to end with is the one it was forked from."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    program: Any = importlib.import_module(module)
    sys.argv = [str(program.__file__), str(connection.detach()), str(os.getppid())]
    program.main()


class WarmPlacement:
    """A `ProcessPlacement` on this machine."""

    gpus = ()

    async def start(self, program: ChildProgram) -> WarmChild:
        """Fork a process."""
        ours, theirs = socket.socketpair()
        files = PrivateDirectory()
        variables = {**os.environ, PRIVATE_DIRECTORY_VARIABLE: str(files.path)}
        with theirs:
            process = WARM.Process(target=_serve, args=(program.module, theirs, variables))
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
        self._process = process
        self._files = files

    def kill(self) -> None:
        """See `ChildProcessHandle.kill`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process_id, signal.SIGKILL)
        self._process.kill()  # it may not lead its session yet

    async def wait(self) -> str:
        """See `ChildProcessHandle.wait`; its private files are removed too."""
        await asyncio.to_thread(self._process.join)
        self._files.remove()
        assert self._process.exitcode is not None
        return f"died ({_cause(self._process.exitcode)})"
