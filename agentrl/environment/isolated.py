"""Objects in processes of their own: what they do to their process, a crash or a loop without end, is an error here.

`isolated(factory)` is what `ctx.resource` makes its object of. Owns a nursery per module (a process that has imported
it, and forks one child per object) and the line to each child. Speaks msgpack over socket pairs; nothing is pickled.
Invariants: a call ends, within its time; a child ends with its object, with its nursery, and with this process.
Not a sandbox: a child has the operator's rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import random
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from agentrl.core.errors import EnvironmentDefinitionError, error_words
from agentrl.environment.registry import module_of

LENGTH = struct.Struct("<I")
"""Length prefix of every message."""
LONGEST_BYTES = 64 << 20
"""Largest message."""

_LONGEST_END_S = 2.0
_STATES = ("get_state", "set_state")
_nurseries: dict[tuple[int, str], _Nursery] = {}
"""By process and module."""


_START_S = 60.0
"""How long a process may take to import a module on a busy machine."""


class IsolatedError(Exception):
    """An exception of an object in a child process, raised under a type of the same name; or the end of that
    process."""


def isolated(
    factory: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0, memory_bytes: int | None = None
) -> Callable[[], IsolatedObject]:
    """A factory for `ctx.resource` whose object lives in a child process.

    If the process ends (a crash, `os._exit`, too much memory) or a call takes longer than `timeout_s`, the call raises
    an `EffectError`, as for any exception of the object. Use the levels `replay` or `pinned`; `snapshot` does not work.

    Args:
        factory: makes the object in the child: a function or class at the top level of a module.
        arguments: for the factory, JSON data.
        timeout_s: longest call, in seconds; construction gets a minute more, because it may start the process that
            imports the module.
        memory_bytes: address space of the process in bytes, including what importing the module needs.

    Example:
        >>> from agentrl.environment.isolated import isolated
        >>> from fractions import Fraction
        >>> make = isolated(Fraction, 1, timeout_s=5.0)
    """
    name = getattr(factory, "__qualname__", "")
    found: Any = sys.modules.get(getattr(factory, "__module__", ""))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not factory:
        raise EnvironmentDefinitionError(
            f"isolated({name or factory!r}): give a function or class at the top level of a module, and what it needs "
            "as arguments"
        )
    module = module_of(factory)
    return lambda: IsolatedObject(module, name, arguments, timeout_s=timeout_s, memory_bytes=memory_bytes)


class IsolatedObject:
    """Stands for an object in a child process; every method of that is a coroutine here."""

    def __init__(
        self, module: str, name: str, arguments: tuple[Any, ...], *, timeout_s: float, memory_bytes: int | None
    ) -> None:
        self._name = name.rpartition(".")[2]
        self._timeout_s = timeout_s
        self._ended = ""
        # Asked of the global state, which is the resource's own while it is made.
        self._first: Any = [name, list(arguments), random.getrandbits(64), memory_bytes]
        # In a context of its own: no act of an environment's on the outside world, since it ends with the object.
        self._line = contextvars.Context().run(lambda: _nursery(module).born())
        self._end = weakref.finalize(self, self._line.close)  # which its nursery takes for its end
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
        except IsolatedError as error:
            self._ended = self._ended or f"{self._name} raised {error_words(error)}"
            self._end()
            raise

    async def _ask(self, message: Any, what: str, *, more_s: float = 0.0) -> Any:
        if self._ended:
            raise IsolatedError(f"the process of {self._name} is gone: {self._ended}")
        try:
            async with asyncio.timeout(self._timeout_s + more_s):
                await asyncio.get_running_loop().sock_sendall(self._line, framed(message))
                kind, answer = await self._received()
        except TimeoutError:
            kind, answer = "ended", f"it took longer than {self._timeout_s:g} s and was killed"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            kind, answer = "ended", f"it can no longer be understood ({error})"
        except BaseException:
            self._ended = f"{what} was cancelled"
            self._end()
            raise
        if kind == "ended":
            self._ended = f"{answer}, in {what}"
            self._end()
            raise IsolatedError(f"the process of {self._name} ended: {self._ended}")
        if kind != "returned":
            raise type(kind, (IsolatedError,), {})(answer)
        return answer

    async def _received(self) -> tuple[str, Any]:
        (length,) = LENGTH.unpack(await self._exactly(LENGTH.size))
        if length > LONGEST_BYTES:
            raise ValueError(f"a message of {length} bytes; at most {LONGEST_BYTES} are read")
        return msgspec.msgpack.decode(await self._exactly(length), type=tuple[str, Any])

    async def _exactly(self, length: int) -> bytes:
        loop, content = asyncio.get_running_loop(), bytearray()
        while len(content) < length:
            part = await loop.sock_recv(self._line, length - len(content))
            if not part:
                raise ValueError("its connection was closed")
            content += part
        return bytes(content)


def framed(message: Any) -> bytes:
    """A message as it is sent."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class _Nursery:
    """A process that has imported a module and forks a child per object; it ends with this one."""

    def __init__(self, module: str) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "agentrl.environment.isolated_host", str(theirs.fileno()), module]
        command.append(str(os.getpid()))
        # At every start of a run: the same order of sets, the same imports, and none from the working directory alone.
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        weakref.finalize(self, _end, self._process, self._line)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def born(self) -> socket.socket:
        """The line to a new child."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, contextlib.suppress(OSError):  # it died meanwhile: the line is closed, and the first call says so
            socket.send_fds(self._line, [b"+"], [theirs.fileno()])
        return ours


def _nursery(module: str) -> _Nursery:
    key = (os.getpid(), module)
    nursery = _nurseries.get(key)
    if nursery is None or not nursery.is_alive:
        nursery = _nurseries[key] = _Nursery(module)
    return nursery


def _end(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    line.close()  # which is what it ends by, and its children with it
    for end in (process.terminate, process.kill):
        try:
            process.wait(timeout=_LONGEST_END_S)
        except subprocess.TimeoutExpired:  # a process that was forked from this one holds the line, too
            end()
    process.wait()
