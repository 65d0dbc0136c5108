"""Objects in child processes: a crash or an endless loop of an object is an error of its call, not of this process.

`isolated(factory)` makes a factory for `ctx.resource`. This process starts a fork server per module (`python -m
agentrl.environment.isolated FD MODULE PARENT`), which imports the module once and forks a child per object;
`IsolatedObject` talks to its child in msgpack over a socket pair. Nothing is pickled.
Invariants: a call ends within its time limit; a child ends with its object, its fork server, or this process, whichever
ends first.
Not a sandbox: a child has the operator's rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NoReturn

import msgspec

from agentrl.core.errors import EnvironmentDefinitionError, format_foreign_error
from agentrl.core.parent_death import die_with_parent
from agentrl.core.rpc import HEAD_BYTES, encode_frame
from agentrl.core.text import valid_unicode
from agentrl.environment.containment import GlobalRandomState
from agentrl.environment.registry import load_module, module_of

_LONGEST_BYTES = 64 << 20
"""Largest message."""

_START_S = 60.0
"""Longest time a process may take to import a module on a busy machine."""
_STATES = ("get_state", "set_state")
_servers: dict[tuple[int, str], _ServerProcess] = {}
"""Fork servers, keyed by process id and module."""


class IsolatedObjectError(Exception):
    """An exception of an object in a child process, raised under a type of the same name; or the end of that
    process."""


def isolated(
    factory: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0, memory_bytes: int | None = None
) -> Callable[[], IsolatedObject]:
    """Make a factory for `ctx.resource` whose object lives in a child process.

    If the process ends (a crash, `os._exit`, too much memory) or a call takes longer than `timeout_s`, the call raises
    an `EffectError`, as for any exception of the object. Use the levels `replay` or `pinned`; `snapshot` does not work.

    Args:
        factory: makes the object in the child: a function or class at the top level of a module.
        arguments: arguments of the factory, JSON data.
        timeout_s: time limit of a call in seconds; construction gets a minute more, because it may have to import the
            module.
        memory_bytes: address space of the process in bytes, including what importing the module needs.

    Example:
        >>> from agentrl.environment.isolated import isolated
        >>> from fractions import Fraction
        >>> make = isolated(Fraction, 1, timeout_s=5.0)
    """
    name = getattr(factory, "__qualname__", "")
    target: Any = sys.modules.get(getattr(factory, "__module__", ""))
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is not factory:
        raise EnvironmentDefinitionError(
            f"isolated({name or factory!r}): give a function or class defined at the top level of a module, and pass "
            "what it needs as arguments"
        )
    module = module_of(factory)
    return lambda: IsolatedObject(module, name, arguments, timeout_s=timeout_s, memory_bytes=memory_bytes)


class IsolatedObject:
    """Proxy of an object in a child process; each method of the object is a coroutine here."""

    def __init__(
        self, module: str, name: str, arguments: tuple[Any, ...], *, timeout_s: float, memory_bytes: int | None
    ) -> None:
        self._name = name.rpartition(".")[2]
        self._timeout_s = timeout_s
        self._end_reason = ""
        # The seed comes from the global random state, which belongs to the resource while it is made.
        self._first: Any = [name, list(arguments), random.getrandbits(64), memory_bytes]
        # In a separate context: this is no effect of the environment, and ends with the object.
        self._line = contextvars.Context().run(lambda: _server_of(module).fork())
        self._end = weakref.finalize(self, self._line.close)  # the server ends when its connection closes
        self._one_at_a_time = asyncio.Lock()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_") or method in _STATES:
            raise AttributeError(method)

        async def call(*arguments: Any) -> Any:
            async with self._one_at_a_time:
                if self._first is not None:
                    first, self._first = self._first, None
                    await self._make(first)
                return await self._ask([method, list(arguments)], f"{self._name}.{method}")

        return call

    async def _make(self, first: Any) -> None:
        try:
            await self._ask(first, self._name, more_s=_START_S)
        except IsolatedObjectError as error:
            self._end_reason = self._end_reason or f"{self._name} raised {format_foreign_error(error)}"
            self._end()
            raise

    async def _ask(self, message: Any, act: str, *, more_s: float = 0.0) -> Any:
        if self._end_reason:
            raise IsolatedObjectError(f"the process of {self._name} has ended: {self._end_reason}")
        try:
            async with asyncio.timeout(self._timeout_s + more_s):
                await asyncio.get_running_loop().sock_sendall(self._line, encode_frame(message))
                kind, answer = await self._receive()
        except TimeoutError:
            kind, answer = "ended", f"it took longer than {self._timeout_s:g} s and was killed"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            kind, answer = "ended", f"it can no longer be understood ({error})"
        except BaseException:
            self._end_reason = f"{act} was cancelled"
            self._end()
            raise
        if kind == "ended":
            self._end_reason = f"{answer}, in {act}"
            self._end()
            raise IsolatedObjectError(f"the process of {self._name} ended: {self._end_reason}")
        if kind != "returned":
            raise type(kind, (IsolatedObjectError,), {})(answer)
        return answer

    async def _receive(self) -> tuple[str, Any]:
        length = int.from_bytes(await self._exactly(HEAD_BYTES), "little")
        if length > _LONGEST_BYTES:
            raise ValueError(f"a message of {length} bytes; at most {_LONGEST_BYTES} are allowed")
        return msgspec.msgpack.decode(await self._exactly(length), type=tuple[str, Any])

    async def _exactly(self, length: int) -> bytes:
        loop, content = asyncio.get_running_loop(), bytearray()
        while len(content) < length:
            part = await loop.sock_recv(self._line, length - len(content))
            if not part:
                raise ValueError("its connection was closed")
            content += part
        return bytes(content)


class _ServerProcess:
    """A fork server as this process sees it; it ends with this process."""

    def __init__(self, module: str) -> None:
        self._line, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "agentrl.environment.isolated", str(child_socket.fileno()), module]
        command.append(str(os.getpid()))
        # Every start of a run gets the same set order and the same imports, none of them from the working directory
        # alone.
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        with child_socket:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=[child_socket.fileno()],
                env=environment,
                start_new_session=True,
            )
        weakref.finalize(self, _end, self._process, self._line)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> socket.socket:
        """Fork a child; returns the socket to it."""
        parent_socket, child_socket = socket.socketpair()
        parent_socket.setblocking(False)
        with child_socket, contextlib.suppress(OSError):  # the process died in between; the first call reports it
            socket.send_fds(self._line, [b"+"], [child_socket.fileno()])
        return parent_socket


def _server_of(module: str) -> _ServerProcess:
    key = (os.getpid(), module)
    server = _servers.get(key)
    if server is None or not server.is_alive:
        server = _servers[key] = _ServerProcess(module)
    return server


def _end(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    line.close()  # closing the connection ends the server and its children
    for end in (process.terminate, process.kill):
        try:
            process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:  # a fork of this process may hold the connection open, too
            end()
    process.wait()


@dataclass(frozen=True, slots=True)
class _Child:
    """A child as its fork server sees it."""

    process: int
    line: socket.socket
    """Copy of the child's socket, to report how the child ended."""


class _ForkServer:
    """The server process: forks a child per object, and reports on the child's socket how it ended.

    Has one thread, which only waits: for a request, the end of a child, the end of a socket, or SIGTERM.
    """

    def __init__(self, requests: socket.socket, module: str) -> None:
        self._requests = requests
        self._module: Any = None
        self._problem = ""
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._children: dict[int, _Child] = {}
        """Children, keyed by the descriptor that becomes readable when the child ends."""
        self._by_line: dict[int, int] = {}
        try:
            self._module = load_module(module)
            with GlobalRandomState(0).swapped_in():  # imports numpy once, before children are forked
                pass
        except BaseException as error:  # noqa: BLE001 - foreign code: any exception is reported to the caller
            self._problem = valid_unicode(f"{module} cannot be imported there: {type(error).__name__}: {error}")

    def serve(self) -> None:
        """Serve requests until the other side closes its socket, or SIGTERM arrives."""
        signals = _signals_received()
        self._poll.register(signals, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == signals.fileno():
                    if signal.SIGTERM in signals.recv(select.PIPE_BUF):
                        return
                elif descriptor == self._requests.fileno():
                    message, lines, _, _ = socket.recv_fds(self._requests, 16, 1)
                    if not message:
                        return
                    self._fork(socket.socket(fileno=lines[0]))
                elif descriptor in self._children:
                    self._reap(descriptor)
                elif descriptor in self._by_line:
                    _kill(self._children[self._by_line[descriptor]].process)
                    self._poll.unregister(descriptor)

    def close(self) -> None:
        """Kill every child and the processes it started."""
        for child in self._children.values():
            _kill(child.process)

    def _fork(self, line: socket.socket) -> None:
        if self._problem:
            with line, contextlib.suppress(OSError):
                line.sendall(encode_frame(("ended", self._problem)))
            return
        server = os.getpid()
        process = os.fork()
        if process == 0:
            _serve_object(line, self._module, server)
        watch = os.pidfd_open(process)
        self._children[watch] = _Child(process, line)
        self._by_line[line.fileno()] = watch
        self._poll.register(watch, select.POLLIN)
        self._poll.register(line, 0)  # reports only that the other end was closed

    def _reap(self, watch: int) -> None:
        child = self._children.pop(watch)
        _kill(child.process)  # also kills the rest of its process group
        _, status = os.waitpid(child.process, 0)
        self._poll.unregister(watch)
        os.close(watch)
        if self._by_line.pop(child.line.fileno(), None) is not None:
            with contextlib.suppress(KeyError):
                self._poll.unregister(child.line)
        with child.line, contextlib.suppress(OSError):
            child.line.setblocking(False)
            child.line.sendall(encode_frame(("ended", _exit_description(status))))


def _signals_received() -> socket.socket:
    """Return a socket that receives signal numbers. A handler that raised in the middle of `close` would leak
    children."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    return reader


def _kill(process: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _exit_description(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _serve_object(line: socket.socket, module: Any, server: int) -> NoReturn:
    """Make the object and answer calls until the socket is closed. Runs in the child."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(server, signal.SIGKILL)
        os.dup2(line.fileno(), 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        _answer_all(socket.socket(fileno=3), module)
    finally:
        os._exit(0)


def _answer_all(line: socket.socket, module: Any) -> None:
    reader = line.makefile("rb")
    name, arguments, seed, memory_bytes = _read(reader)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with GlobalRandomState(seed).swapped_in():
        factory: Any = module
        for part in name.split("."):
            factory = getattr(factory, part)
        instance = _answer(line, factory, arguments, keep=True)
        while True:
            method, arguments = _read(reader)
            _answer(line, partial(_call, instance, method), arguments)


def _call(instance: Any, method: str, *arguments: Any) -> Any:
    return getattr(instance, method)(*arguments)


def _answer(line: socket.socket, function: Any, arguments: list[Any], *, keep: bool = False) -> Any:
    """Call `function` and send its result or error; return the value if it stays here (`keep`)."""
    try:
        value = function(*arguments)
        message = encode_frame(("returned", None if keep else value))
    except BaseException as error:  # noqa: BLE001 - foreign code: any exception is the answer
        value, message = None, encode_frame((type(error).__name__, valid_unicode(str(error))[:2000]))
    line.sendall(message)
    return value


def _read(reader: BinaryIO) -> Any:
    try:
        return msgspec.msgpack.decode(reader.read(int.from_bytes(reader.read(HEAD_BYTES), "little")))
    except (OSError, msgspec.DecodeError):  # the client is gone
        os._exit(0)


def _serve_requests() -> None:
    """Run the fork server named on the command line, until the other end of its socket is closed."""
    die_with_parent(int(sys.argv[3]), signal.SIGTERM)
    server = _ForkServer(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    try:
        server.serve()
    finally:
        server.close()


if __name__ == "__main__":
    _serve_requests()
    os._exit(0)
