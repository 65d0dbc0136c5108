"""Work on hostile input, done in a process with limits of memory and CPU time.

No check of it can bound some input: a chat template is a program, and a JSON schema may take hours to compile.
`LimitedProcess` sends a request to a process, as JSON over a socket pair, and gets its answer. The process serves with
`serve`. It limits its address space, and its CPU time per request by a timer, so that the verdict does not depend on
the machine's load. It ends when the other end of its socket is closed, and when its memory is full, which earlier
requests may have filled. It ignores the signals that stop a run, because Slurm and systemd send them to every process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from agentrl.core.files import os_error_advice

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MEMORY_BYTES = 1 << 30
"""Maximum memory of the process, beyond what it holds before its first request."""
_LENGTH_BYTES = 8
_OUT_OF_MEMORY = 12
"""Exit code of the process when its memory is full."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class LimitedProcess:
    """The process of a module that calls `serve`. It starts when it is needed, and again after it ended.

    Args:
        module: module that the process runs.
        arguments: arguments of its command line, after the socket and `cpu_s`.
        cpu_s: maximum CPU seconds of a request.
        wall_s: maximum seconds until an answer, the start of the process included; None: no limit.
    """

    def __init__(self, module: str, *arguments: str, cpu_s: float, wall_s: float | None = None) -> None:
        self._module = module
        self._arguments = arguments
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._closed = False
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def ask(self, *requests: Any) -> tuple[str, Any]:
        """Send a request; returns the kind of its answer, and the answer.

        Besides the kinds of `serve`, the kind is `error` if the request used up its CPU time, `failed` if it filled the
        memory or crashed the process, `ended` if the process was killed or closed, and `late` after `wall_s`. After an
        answer of kind `unknown`, `failed` or `ended`, the next of `requests` is sent instead.

        Raises:
            TypeError, ValueError, RecursionError: a request is no JSON data.
            OSError: the process cannot be started; its text says why, and what to do.
        """
        kind, answer = "", None
        with self._lock:
            for request in requests:
                kind, answer = self._exchange(_encode(request))
                if kind not in ("unknown", "failed", "ended"):
                    break
        return kind, answer

    def close(self) -> None:
        """End the process, and start no other. Idempotent."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        line, process = self._line, self._process
        self._line = self._process = None
        if line is not None and process is not None:
            line.close()
            process.kill()
            process.wait()

    def _forget(self) -> None:
        """Leave the process to the one that this one was forked from."""
        self._lock = threading.Lock()
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.returncode = 0  # no child of this process
        self._line = self._process = None

    def _exchange(self, frame: bytes) -> tuple[str, Any]:
        if self._closed:
            return "ended", "the process that computes it is closed"
        line, process = self._start()
        if self._closed:  # by another thread in the meantime, which may not have seen the process
            self._end()
            return "ended", "the process that computes it is closed"
        try:
            line.settimeout(self._wall_s)
            line.sendall(frame)
            kind, answer = json.loads(_receive(line))
        except TimeoutError:
            self._end()
            return "late", f"the process that computes it did not answer within {self._wall_s:g} s"
        except (OSError, EOFError):
            code = process.wait()
            self._end()
            if code == -signal.SIGPROF:
                return "error", f"it takes more than {self._cpu_s:g} s of CPU time"
            if code == _OUT_OF_MEMORY:
                return "failed", f"it needs more than {MAX_MEMORY_BYTES >> 20:,} MiB"
            return "failed" if -code in _CRASHES else "ended", f"the process that computes it ended ({code})"
        except BaseException:
            self._end()  # its answer would be taken for that of the next request
            raise
        return kind, answer

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        if self._line is not None and self._process is not None:
            return self._line, self._process
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LD_", "PATH"))}
        # The same imports as here, and none from the working directory alone.
        environment |= {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"}
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module, str(theirs.fileno()), str(self._cpu_s), *self._arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for this process, which may ask until it has stopped
                )
        except OSError as error:
            ours.close()
            reason = f"no process can be started for it ({error.strerror}); {os_error_advice(error)}"
            raise OSError(reason) from error
        self._line, self._process = ours, process
        return ours, process


def _encode(value: Any) -> bytes:
    content = json.dumps(value).encode()
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


def _receive(line: socket.socket) -> bytes:
    """Read a frame.

    Raises:
        OSError, EOFError: the other end is closed.
    """
    return _exactly(line, int.from_bytes(_exactly(line, _LENGTH_BYTES), "little"))


def _exactly(line: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        if not (part := line.recv(min(count - len(content), 1 << 20))):
            raise EOFError
        content += part
    return bytes(content)


# --- in the process ---------------------------------------------------------------------------------------------------


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY_BYTES, size + MAX_MEMORY_BYTES))


def serve(load: Callable[[], Callable[[Any], tuple[str, Any]]]) -> None:
    """Answer the requests of a `LimitedProcess` with what `load` returns, until its end; then end this process.

    The answer of `load` gets a request and returns the kind of the answer (`done`, `error` or `unknown`), and the
    answer. It raises MemoryError if memory is full.
    """
    line, cpu_s = socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        answer_of = load()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a process starts with its parent's ignored and blocked signals
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        with contextlib.suppress(OSError, ValueError):  # where there is no /proc
            _limit_memory()
        with contextlib.suppress(OSError, EOFError):
            while True:
                frame = _receive(line)
                signal.setitimer(signal.ITIMER_PROF, cpu_s)  # at its end, SIGPROF ends the process
                content = _encode(answer_of(json.loads(frame)))
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                line.sendall(content)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    os._exit(0)
