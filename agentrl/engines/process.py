"""Child processes of engines and episode workers: program, placement, private files, supervision.

`LocalPlacement` starts a program as a child of this process; `agentrl.cluster.engine_actors` starts it wherever Ray has
resources. `Supervisor` keeps one such process running and restarts it when it dies. This module does not know the
messages of the connection.
Invariants: the connection is a socket pair (no path and no port, so no other process can connect); one child at a time;
`serving` returns only while a child is ready; `died` is called before the next child starts; a child's descendants die
with it; a child that has sent a message and then falls silent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.core.errors import AgentRLError, EngineError, EngineLostError, StorageError
from agentrl.core.files import os_error_advice

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Mapping, Sequence

    from agentrl.core.clock import Clock, RetryBudget
    from agentrl.core.rpc import ConnectionWriter

PRIVATE_DIRECTORY_VARIABLE = "AGENTRL_PRIVATE_FILES"
"""Environment variable with the path of the child's private directory."""
LOG_VARIABLE = "AGENTRL_LOG"
"""Environment variable that is set if a child's standard error is its log file."""
INTERFACE_VARIABLE = "AGENTRL_NETWORK_INTERFACE"
"""Environment variable with the network interface on which a child on a cluster reaches the other machines."""
_PREFIX = "agentrl-child-"
_MARK = "made_for_a_child"
"""Name of an empty file that marks a directory as a child's, so that no other directory is removed."""
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 1 << 30
"""Bytes that should be free in shared memory for a child, to which adapters are copied. Docker's default is 64 MiB."""
MAKE_ROOM = (
    "make room there; a process that finds less than 1 GiB and the size of its full weights free in /dev/shm has its "
    "files under TMPDIR"
)
_LOG_TAIL = 1 << 16
"""Bytes at the end of a log that are searched for an error."""
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception)(?:: .*\S|$)")
_ASSERTION = re.compile(r"\bassert .*\S")
"""The statement in a traceback, which says more than an assertion without a message."""
_ERROR_LENGTH = 300
SILENCE_S = 300.0
"""Seconds of silence after which a child process counts as hung."""
_PIECES = 10
"""Number of intervals into which `silence_s` is divided: an interval that passes while this process is suspended counts
against the child only once."""


@dataclass(frozen=True, slots=True)
class ChildProgram:
    """The program of a child process: a module, and the engine that it makes, if it makes one."""

    factory: str
    """Factory of the engine as `module:name`, called as `name(versions=…, **arguments)`."""
    arguments: Mapping[str, Any]
    """Arguments of the factory, plain values."""
    module: str = "agentrl.engines.remote.engine_server"
    """Module that the process runs."""
    weight_bytes: int = 0
    """Size of a full set of weights that the process receives as files; 0: it receives adapters at most."""


class ChildProcessHandle(Protocol):
    """A child process."""

    @property
    def process_id(self) -> int:
        """Process id of the child, on its machine."""
        ...

    async def wait(self) -> str:
        """Wait until the child and its descendants are dead; returns how it died. Can be called again."""
        ...

    def kill(self) -> None:
        """Kill the child and its descendants. Idempotent."""
        ...


class ConnectedChildProcess(ChildProcessHandle, Protocol):
    """A process that runs a `ChildProgram`, and the connection to it."""

    @property
    def host(self) -> str:
        """Address of the child's machine, which reads no files of this one; "" for this machine."""
        ...

    @property
    def is_drained(self) -> bool:
        """Whether its machine is about to be taken away."""
        ...

    @property
    def reader(self) -> asyncio.StreamReader:
        """Replies of the process; ends when it is dead."""
        ...

    @property
    def writer(self) -> ConnectionWriter:
        """Requests to the process."""
        ...


class ProcessPlacement(Protocol):
    """Starts an engine's processes, one after another."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """Ids of the GPUs that the processes are given; empty: all that there are."""
        ...

    async def start(self, program: ChildProgram) -> ConnectedChildProcess:
        """Start a process; a cancelled call leaves none behind.

        Raises:
            OSError: the process cannot be started now, but may be later.
            AgentRLError: the process can never be started.
        """
        ...

    async def close(self) -> None:
        """Release everything after the last process is dead. Idempotent."""
        ...


class LocalPlacement:
    """Engines as children of this process.

    Args:
        log: file to which their error streams are appended; None: this process's error stream.
        gpus: ids of their GPUs as in `CUDA_VISIBLE_DEVICES`; empty: the GPUs of this process.
        interface: network interface toward the other machines of a cluster.
    """

    def __init__(self, log: Path | None = None, *, gpus: Sequence[str] = (), interface: str = "lo") -> None:
        self._log = log
        self.gpus = tuple(gpus)
        self._variables = {**(gpu_visibility_variables(gpus) if gpus else {}), INTERFACE_VARIABLE: interface}

    async def start(self, program: ChildProgram) -> LocalChildProcess:
        parent_socket, child_socket = socket.socketpair()
        process: EngineProcess | None = None
        try:
            process = await self.start_with(program, child_socket)
            return LocalChildProcess(process, *await asyncio.open_connection(sock=parent_socket))
        except BaseException:  # also if the start is cancelled
            parent_socket.close()
            if process is not None:
                process.kill()
                await process.wait()
            raise

    async def start_with(self, program: ChildProgram, connection: socket.socket) -> EngineProcess:
        """Start a process that serves a connection, which is closed here.

        Raises:
            OSError, AgentRLError: see `ProcessPlacement.start`.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            errors = None
            if self._log is not None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    errors = os.open(self._log, flags, 0o600)
                except OSError as error:
                    raise StorageError(
                        f"{self._log}: cannot be opened to write ({error.strerror}); {os_error_advice(error)}, "
                        "then finish the run with --resume"
                    ) from error
                stack.callback(os.close, errors)
            return await self._start(program, connection, errors)

    async def _start(self, program: ChildProgram, connection: socket.socket, errors: int | None) -> EngineProcess:
        files = PrivateDirectory(program.weight_bytes)
        command = [sys.executable, "-m", program.module, str(connection.fileno()), str(os.getpid())]
        # the child must import the same modules as this process, and none from the working directory alone
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "PYTHONSAFEPATH": "1",
            PRIVATE_DIRECTORY_VARIABLE: str(files.path),
            LOG_VARIABLE: "" if errors is None else "1",
            **self._variables,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[connection.fileno()],
                env=environment,
                start_new_session=True,
            )
        except BaseException:  # also if the start is cancelled
            files.remove()
            raise
        return EngineProcess(process, files, self._log)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def gpu_visibility_variables(gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that make only these GPUs visible, numbered as by the driver."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class ChildProcess:
    """A `ChildProcessHandle` that leads its own session, so that Ctrl-C reaches only its parent."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._how = ""

    @property
    def process_id(self) -> int:
        """The process id of the child."""
        return self._process.pid

    async def wait(self) -> str:
        if not self._how:
            code = await self._process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # also kill processes that it started
            self._how = f"died ({_cause(code)})"
        return self._how

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class EngineProcess(ChildProcess):
    """The process of a `ChildProgram`, with its private files."""

    def __init__(self, process: Process, files: PrivateDirectory, log: Path | None) -> None:
        super().__init__(process)
        self._files = files
        self._log = log

    async def wait(self) -> str:
        """Wait for the end of the process, then remove its private files."""
        how = await super().wait()
        self._files.remove()
        return how if self._log is None else f"{how}; its output is in {self._log}"


class LocalChildProcess:
    """A `ConnectedChildProcess` that is a child of this process."""

    def __init__(self, process: EngineProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process_id = process.process_id
        self.host = ""
        self.is_drained = False
        self.reader = reader
        self.writer = writer
        self.wait = process.wait
        self.kill = process.kill


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def logged_error(*, ignore: str) -> str:
    """Return the last error in the log file of this process and its descendants, and the place of that file.

    Args:
        ignore: regular expression of messages that only refer to the error.
    """
    if not os.environ.get(LOG_VARIABLE):
        return "its output above has the cause"
    try:
        log = os.readlink(f"/proc/self/fd/{sys.stderr.fileno()}")
        with Path(log).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # the system has no /proc
        return "the engine's log has the cause"
    error, statement = "no error was logged", ""
    for line in lines:
        if found := _ASSERTION.search(line):
            statement = found[0]
        elif (match := _ERROR.search(line)) and not re.search(ignore, line):
            error = f"{match[0]}: {statement}" if match[0] == "AssertionError" and statement else match[0]
    return f"{error[:_ERROR_LENGTH]}; its output is in {log}"


class PrivateDirectory:
    """The private directory of one child, locked by this process, so that others see that it is in use.

    Making one removes the directories that dead processes left behind.

    Args:
        size: bytes of full weights that it has to hold.
    """

    def __init__(self, size: int = 0) -> None:
        _remove_leftovers()
        directory = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}", dir=_root(size)))
        self._lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (directory / _MARK).touch()
        self.path = directory.with_name(directory.name.removeprefix("new-"))
        # The final name appears only once the directory is locked, so cleanups never take it for a leftover.
        directory.rename(self.path)

    def remove(self) -> None:
        """Remove the directory after the child's death. Idempotent."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def _root(size: int) -> Path:
    has_room = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= _ROOM + size
    return _SHARED_MEMORY if has_room else _disk()


def _disk() -> Path:
    return Path(tempfile.gettempdir())


def _remove(path: Path) -> None:
    for pattern in (f"{path.name}-*", f"sem.{path.name}-*"):
        for segment in _SHARED_MEMORY.glob(pattern):  # shared memory outlives the directory, wherever that was
            with contextlib.suppress(OSError):  # segments with such names may belong to other users
                segment.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers() -> None:
    for path in (*_SHARED_MEMORY.glob(f"{_PREFIX}*"), *_disk().glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # not a directory, already gone, owned by another user, or in use
            _remove_leftover(path)


def _remove_leftover(path: Path) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(lock).st_uid == os.getuid() and (path / _MARK).is_file():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
    finally:
        os.close(lock)


class SupervisedProcessOwner(Protocol):
    """The owner of a supervised child: starts it and makes it ready."""

    async def launch(self) -> ChildProcessHandle:
        """Start a child.

        Raises:
            OSError: the child cannot be started now, but may be later.
            AgentRLError: the child can never be started.
        """
        ...

    async def welcome(self) -> None:
        """Make a fresh child ready to serve.

        Raises:
            EngineLostError: the child died before it was ready; another may be tried.
            AgentRLError: a child will never serve.
        """
        ...

    async def died(self, how: str) -> None:
        """Read everything that the child sent, after its death."""
        ...


class Supervisor:
    """Keeps one child running, from construction to `stop`. Construct it in its event loop.

    Args:
        name: name of the child in messages.
        budget: how many deaths in a row are tolerated, and the wait after each.
        silence_s: seconds that a child may be silent after its first message.
        tell: receives a line for the user when a child has died and another is started.
    """

    def __init__(
        self,
        name: str,
        owner: SupervisedProcessOwner,
        *,
        budget: RetryBudget,
        silence_s: float,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self.losses = 0
        """Number of deaths of the child."""
        self._name = name
        self._owner = owner
        self._budget = budget
        self._clock = clock
        self._tell = tell
        self._child: ChildProcessHandle | None = None
        self._silence_s = silence_s
        self._silent: int | None = None
        """Number of silent intervals of `silence_s` in a row; None before the child's first message."""
        self._why = ""
        """Reason why the child was killed; empty if it was not."""
        self._serving = asyncio.Event()
        self._failure: AgentRLError | None = None
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"keep {name}")

    @property
    def process_id(self) -> int | None:
        """Process id of the child; None while there is none."""
        return None if self._child is None else self._child.process_id

    async def serving(self) -> None:
        """Wait until a child serves.

        Raises:
            AgentRLError: no child will ever serve again; the message has the reason.
        """
        while not self._serving.is_set():
            await self._serving.wait()
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def achieved(self) -> None:
        """Reset the count of losses after the child has done useful work."""
        self._budget.achieved()

    def sign_of_life(self) -> None:
        """Note a message of the child."""
        self._silent = 0

    def kill(self, why: str = "") -> None:
        """Kill the child and its descendants for a reason; it is replaced as if it had died by itself."""
        if self._child is not None:
            self._why = self._why or why
            self._child.kill()

    async def stop(self, patience_s: float = 0.0) -> None:
        """Kill the child if it does not end within `patience_s`, and start no other. Idempotent."""
        self._give_up(EngineError(f"{self._name} is closed"))
        if self._child is not None:
            if patience_s:
                await asyncio.wait({self._task}, timeout=patience_s)
            self.kill()
        else:
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _keep(self) -> None:
        try:
            while self._failure is None:
                how = await self._live()
                self._child = None
                if self._failure is not None:
                    return
                self.losses += 1
                wait = self._budget.lost()
                if wait is None:
                    self._give_up(EngineError(f"{self._name} {how}, {self.losses} times; it will not be restarted"))
                    return
                self._tell(f"{self._name} {how}; it is restarted in {wait:g} s")
                await self._clock.sleep(wait)
        except AgentRLError as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not leave callers waiting for the child
            self._give_up(EngineError(f"{self._name} could not be kept running: {type(error).__name__}: {error}"))
        finally:
            self.kill()
            if self._child is not None:
                await self._child.wait()

    async def _live(self) -> str:
        """Run one child from its start to its death; returns the cause of death."""
        self._why, self._silent = "", None
        try:
            child = self._child = await self._owner.launch()
        except OSError as error:
            return f"could not be started ({error.strerror or error})"
        loop, dead = asyncio.get_running_loop(), asyncio.Event()
        welcome_task = loop.create_task(self._welcome(child, dead), name=f"welcome {self._name}")
        watch_task = loop.create_task(self._watch(), name=f"watch {self._name}")
        try:
            how = await child.wait()
            dead.set()
            if self._failure is None:
                self._serving.clear()
            how = f"was killed: {self._why}" if self._why else how
            await self._owner.died(how)
            return how
        finally:
            welcome_task.cancel()
            watch_task.cancel()
            await asyncio.wait({welcome_task, watch_task})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / _PIECES)
            if self._silent is not None:
                self._silent += 1
                if self._silent > _PIECES:
                    self.kill(f"it gave no sign of life for {self._silence_s:g} s")

    async def _welcome(self, child: ChildProcessHandle, dead: asyncio.Event) -> None:
        try:
            await self._owner.welcome()
            if not dead.is_set():
                self._serving.set()
        except EngineLostError as error:
            if not dead.is_set():
                self.kill(str(error))
        except AgentRLError as error:
            self._give_up(error)
            child.kill()
        except Exception as error:  # noqa: BLE001 - a bug of ours must not leave callers waiting for the child
            self._give_up(EngineError(f"{self._name} could not be initialized: {type(error).__name__}: {error}"))
            child.kill()

    def _give_up(self, error: AgentRLError) -> None:
        if self._failure is None:
            self._failure = error
        self._serving.set()
