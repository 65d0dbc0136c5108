"""The other side of `isolated.py`: `python -m agentrl.environment.isolated_host FD MODULE PARENT`.

The nursery has one thread, imports the module once, and from then on only waits: for a new line, for the end of a
child, for the end of a line, for a signal to end. It says over a child's line how the child ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import msgspec

from agentrl.environment.base import valid_unicode
from agentrl.environment.containment import GlobalRandom
from agentrl.environment.isolated import LENGTH, framed
from agentrl.environment.registry import load_module

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class _Child:
    process: int
    line: socket.socket
    """Open here as well, to say how the child ended."""


class Nursery:
    """Forks, and buries."""

    def __init__(self, requests: socket.socket, module: str) -> None:
        self._requests = requests
        self._module: Any = None
        self._problem = ""
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._children: dict[int, _Child] = {}
        """By the descriptor that becomes readable when it ends."""
        self._by_line: dict[int, int] = {}
        try:
            self._module = load_module(module)
            with GlobalRandom(0).swapped_in():  # imports numpy, so that no child has to
                pass
        except BaseException as error:  # noqa: BLE001 - foreign code: whatever it raises is told to whom it concerns
            self._problem = valid_unicode(f"{module} cannot be imported there: {type(error).__name__}: {error}")

    def serve(self) -> None:
        """Until the other side is gone, or SIGTERM comes."""
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
                    self._bury(descriptor)
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
                line.sendall(framed(("ended", self._problem)))
            return
        nursery = os.getpid()
        process = os.fork()
        if process == 0:
            _serve_object(line, self._module, nursery)
        watch = os.pidfd_open(process)
        self._children[watch] = _Child(process, line)
        self._by_line[line.fileno()] = watch
        self._poll.register(watch, select.POLLIN)
        self._poll.register(line, 0)  # when its other end is closed, and nothing else

    def _bury(self, watch: int) -> None:
        child = self._children.pop(watch)
        _kill(child.process)  # and what it has left in its group
        _, status = os.waitpid(child.process, 0)
        self._poll.unregister(watch)
        os.close(watch)
        if self._by_line.pop(child.line.fileno(), None) is not None:
            with contextlib.suppress(KeyError):
                self._poll.unregister(child.line)
        with child.line, contextlib.suppress(OSError):
            child.line.setblocking(False)
            child.line.sendall(framed(("ended", _exit_description(status))))


def _signals_received() -> socket.socket:
    """A socket that receives the numbers of signals: a handler that raised in the middle of `close` would leak
    children."""
    arrived, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    return arrived


def _kill(process: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _exit_description(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _serve_object(line: socket.socket, module: Any, nursery: int) -> NoReturn:
    """The child's life: make the object, answer calls, until the line is closed."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with(nursery, signal.SIGKILL)
        os.dup2(line.fileno(), 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        _answer_all(3, module)
    finally:
        os._exit(0)


def _answer_all(line: int, module: Any) -> None:
    made: Any = None
    with os.fdopen(line, "r+b", buffering=0, closefd=False) as stream:
        name, arguments, seed, memory_bytes = _read(stream)
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        with GlobalRandom(seed).swapped_in():
            factory: Any = module
            for part in name.split("."):
                factory = getattr(factory, part)
            made = _answer(stream, factory, arguments, keep=True)
            while True:
                method, arguments = _read(stream)
                _answer(stream, partial(_call, made, method), arguments)


def _call(made: Any, method: str, *arguments: Any) -> Any:
    return getattr(made, method)(*arguments)


def _answer(stream: Any, function: Any, arguments: list[Any], *, keep: bool = False) -> Any:
    """Call `function` and send its result or error; return the value if it stays here (`keep`)."""
    try:
        value = function(*arguments)
        message = framed(("returned", None if keep else value))
    except BaseException as error:  # noqa: BLE001 - foreign code: whatever it raises is the answer
        value, message = None, framed((type(error).__name__, valid_unicode(str(error))[:2000]))
    while message:
        message = message[stream.write(message) :]
    return value


def _read(stream: Any) -> Any:
    (length,) = LENGTH.unpack(_exactly(stream, LENGTH.size))
    return msgspec.msgpack.decode(_exactly(stream, length))


def _exactly(stream: Any, length: int) -> bytes:
    content = b""
    while len(content) < length:
        part = stream.read(length - len(content))
        if not part:
            os._exit(0)  # nobody asks any more
        content += part
    return content


def _die_with(parent: int, number: int) -> None:
    """Have the kernel send a signal when the parent dies, which may have died already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serve the line that was handed over, until it ends."""
    _die_with(int(sys.argv[3]), signal.SIGTERM)
    nursery = Nursery(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    try:
        nursery.serve()
    finally:
        nursery.close()


if __name__ == "__main__":
    main()
    os._exit(0)
