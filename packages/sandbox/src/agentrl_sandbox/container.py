"""The driver that runs each command in a container of podman or docker, for machines that refuse namespaces to users.

It promises less than bubblewrap: docs/how-to/sandboxes.md lists the differences. The files of a sandbox
are directories of this machine, mounted in its containers. They lie below a directory that the driver holds a lock on,
so the next driver of the user removes the files and containers of a killed worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import io
import itertools
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agentrl.sandbox import SEARCH_PATH, CommandResult, InputError, SandboxCheck, SandboxError, SandboxLimits
from agentrl_sandbox.checks import check_driver
from agentrl_sandbox.commands import NO_PROGRAM, Capture, check_program, memory_file, prepare
from agentrl_sandbox.file_tree import (
    ETC,
    FIRST_UID,
    HOST_FILES,
    FileError,
    SandboxFiles,
    empty_file,
    in_file,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agentrl.sandbox import FileRecord

T = TypeVar("T")

ContainerProgram = Literal["podman", "docker"]
_HOST_NAMES = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
_KERNEL_NAMES = ("proc", "dev", "sys", "etc")
_OWN_FAILURE = 125
"""Exit status of a container program that made no container; a command may have it, too."""
_MEASURE_S = 1.0
"""Seconds between measurements of the files while a command runs."""
_END_S = 30.0
"""Seconds within which the container program must end a container."""
_PROCESSES_OF_USER = 16_384
"""Given since runtimes refuse to raise their own limit without CAP_SYS_RESOURCE; `--pids-limit` is lower."""


class ContainerDriver:
    """Implements `SandboxDriver` with one container for each command."""

    def __init__(self, program: ContainerProgram) -> None:
        self.program = program
        self._directory: Path | None = None
        self._lock = -1
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._images: set[str] = set()
        self.uid = FIRST_UID if os.getuid() == 0 else None
        """User of the commands; None: the user of this process."""

    @property
    def directory(self) -> Path:
        """Directory with the files of all sandboxes; its name is the label of their containers."""
        assert self._directory is not None
        return self._directory

    async def create(self, limits: SandboxLimits) -> ContainerLease:
        if limits.network == "gateway":
            raise InputError(
                f"sandbox: sandbox.driver = {self.program!r} cannot serve network = 'gateway'; it needs 'bubblewrap'"
            )
        async with self._starting:
            if self._directory is None:
                await self._start()
        image, mounts = await self._import_image(limits)
        name = f"s{next(self._numbers)}"
        path = str(self.directory / name)
        fields = {"writable": limits.writable, "disk_mb": limits.disk_mb}
        files = SandboxFiles(path, self.uid, fields)
        os.mkdir(path, 0o700)
        await _in_thread(files.make_directories)
        return ContainerLease(self, name, limits, files, image, mounts)

    async def check(self) -> list[SandboxCheck]:
        return await check_driver(self, self.program, lambda: shutil.which(self.program))

    async def close(self) -> None:
        if self._directory is not None:
            await self._remove(self._directory)
            os.close(self._lock)
            self._directory = None

    async def call(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Return the output of the container program.

        Raises:
            SandboxError: it failed.
        """
        with memory_file(stdin) as source:
            process = await asyncio.create_subprocess_exec(
                self.program, *arguments, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            output, problem = await process.communicate()
        if process.returncode:
            message = problem.decode("utf-8", "replace").strip()
            raise SandboxError(f"sandbox: {self.program} {arguments[0]}: {message[-300:]}")
        return output

    async def _start(self) -> None:
        """Remove what killed workers of this user left, and make the directory."""
        if shutil.which(self.program) is None:
            raise SandboxError(f"there is no program {self.program}; install it, or choose another sandbox.driver")
        prefix = f"agentrl-{self.program}-{os.getuid()}-"
        for left in await asyncio.to_thread(_directories, prefix):
            if (lock := _locked(left)) is not None:
                try:
                    await self._remove(left)
                finally:
                    os.close(lock)
        while self._directory is None:
            made = Path(tempfile.mkdtemp(prefix=prefix))
            if (lock := _locked(made)) is not None:  # else another driver took it for a killed worker's
                self._directory, self._lock = made, lock

    async def _remove(self, directory: Path) -> None:
        """Remove the containers and files of a driver."""
        left = await self.call("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label=agentrl={directory.name}")
        for container in left.decode().split():
            with contextlib.suppress(SandboxError):  # it has ended and was removed
                await self.call("rm", "--force", container)
        await remove_tree(directory)

    async def _import_image(self, limits: SandboxLimits) -> tuple[str, list[str]]:
        """Import an image with the links and the /etc of a root. Return its name, and the mounts of the rest."""
        content, mounts = await asyncio.to_thread(_root_parts, limits, self.directory)
        image = f"agentrl-root:{hashlib.sha256(content).hexdigest()[:16]}"
        if image not in self._images:
            try:
                await self.call("image", "inspect", image)
            except SandboxError:
                await self.call("import", "-", image, stdin=content)
            self._images.add(image)
        return image, mounts


def _root_parts(limits: SandboxLimits, directory: Path) -> tuple[bytes, list[str]]:
    """Return an archive with a root's links and its /etc, and the mounts of its other files."""
    base = limits.root or "/"
    hidden = {*_KERNEL_NAMES, "box", "tmp", *(path.split("/")[1] for path in limits.writable)}
    names = sorted(set(os.listdir(base)) - hidden) if limits.root else _HOST_NAMES
    mounts, archive = dict[str, str](), io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in names:
            path = os.path.join(base, name)
            if os.path.islink(path):
                tar.add(path, name, filter=_without_times)
            elif os.path.exists(path):
                mounts[f"/{name}"] = path
        if limits.root and os.path.isdir(f"{base}/etc"):
            tar.add(f"{base}/etc", "etc", filter=_without_times)
        for name, text in {} if limits.root else ETC.items():
            entry = tarfile.TarInfo(f"etc/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    mounts |= {path: path for path in ([] if limits.root else filter(os.path.exists, HOST_FILES))}
    mounts |= {path.rstrip("/"): path for path in limits.read}
    if limits.network == "none":  # these programs write the machine's names and addresses into them
        for name, text in (("hosts", ETC["hosts"]), ("resolv.conf", "")):
            (directory / name).write_text(text)
            mounts[f"/etc/{name}"] = str(directory / name)
    return archive.getvalue(), [text for target, source in mounts.items() for text in _mount(source, target)]


def podman() -> ContainerDriver:
    """Return the driver that uses podman."""
    return ContainerDriver("podman")


def docker() -> ContainerDriver:
    """Return the driver that uses docker."""
    return ContainerDriver("docker")


class ContainerLease:
    """Implements `SandboxLease`."""

    def __init__(
        self,
        driver: ContainerDriver,
        name: str,
        limits: SandboxLimits,
        files: SandboxFiles,
        image: str,
        mounts: Sequence[str],
    ) -> None:
        self.limits = limits
        self._driver, self._name, self._files = driver, name, files
        self._numbers = itertools.count(1)
        self._running: dict[str, asyncio.Task[int]] = {}
        self._is_closed = False
        user = os.getuid() if driver.uid is None else driver.uid
        group = os.getgid() if driver.uid is None else driver.uid
        memory = f"{limits.memory_mb}m"
        ulimits = {"core": 0, "fsize": limits.disk_mb << 20, "nofile": 512, "nproc": _PROCESSES_OF_USER, "msgqueue": 0}
        self._arguments = [
            "run", "--rm", "--pull", "never", "--log-driver", "none", "--stop-timeout", "0", "--label",
            f"agentrl={driver.directory.name}", "--hostname", "sandbox", "--ipc", "private", "--read-only",
            "--network", "none" if limits.network == "none" else "host",
            "--cap-drop", "all", "--security-opt", "no-new-privileges", "--user", f"{user}:{group}",
            "--pids-limit", str(limits.processes), "--memory", memory, "--memory-swap", memory, "--shm-size", "16m",
            *(text for name, value in ulimits.items() for text in ("--ulimit", f"{name}={value}")),
            *mounts, *(text for name in files.writable for text in _mount(f"{files.path}/{name}", f"/{name}", "")),
            "--workdir", limits.directory,
        ]  # fmt: skip
        if driver.program == "podman":
            self._arguments += ["--read-only-tmpfs=false", *(["--userns", "keep-id"] if driver.uid is None else [])]
        self._image = image

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
        if self._is_closed:
            raise SandboxError("sandbox: the sandbox is closed")
        if listener is not None:
            raise InputError("sandbox: give `listener` with network = 'gateway', and only then")
        variables = {**self.limits.environment, **(environment or {})}
        for key, value in variables.items():
            if "\n" in key + value or key.startswith("#") or key != key.strip():
                raise InputError(
                    f"sandbox: {self._driver.program} cannot set the variable {key!r}: it has a newline, or its name "
                    "begins with '#' or has spaces around it"
                )
        if refused := await prepare(self, argv, files or {}, variables, seconds, directory=self.limits.directory):
            return refused
        name = f"{self._driver.directory.name}-{self._name}-{next(self._numbers)}"
        limit, started = self.limits.seconds_of(seconds), time.monotonic()
        variables = {"PATH": SEARCH_PATH, "HOME": "/box", "LANG": "C.UTF-8", **variables}
        options = ["--name", name, *(["--interactive"] if stdin else [])]
        if self._driver.program == "podman":
            options += ["--timeout", str(int(limit) + 2)]  # if this process is killed
        streams = [Capture(self.limits.output_bytes) for _ in range(2)]
        with (
            memory_file(stdin) as source,
            tempfile.TemporaryDirectory(dir=self._files.path) as own,
            self._mounts(),
        ):
            options += ["--cidfile", f"{own}/id", "--env-file", _variables_file(f"{own}/env", variables)]
            if self._is_closed:
                raise SandboxError("sandbox: the sandbox is closed")
            try:
                process = await asyncio.create_subprocess_exec(
                    self._driver.program, *self._arguments, *options,
                    self._image, *(text.encode("utf-8", "replace") for text in argv),
                    stdin=source, stdout=streams[0].write_end, stderr=streams[1].write_end, start_new_session=True,
                    cwd=own,  # podman's monitor writes a file there when memory runs out
                )  # fmt: skip
                ended = self._running[name] = asyncio.get_running_loop().create_task(process.wait())
                killed = await self._watch(ended, name, started + limit)
                outputs = [await stream.finish() for stream in streams]
            finally:
                self._running.pop(name, None)
                for stream in streams:
                    stream.close()
            has_container = await asyncio.to_thread(os.path.exists, f"{own}/id")
        if process.returncode == _OWN_FAILURE and not has_container and not killed:
            message = outputs[1].decode("utf-8", "replace").strip()
            raise SandboxError(f"sandbox: {self._driver.program} made no container: {message[-300:]}")
        if process.returncode == NO_PROGRAM and not killed:
            check_program(argv[0], self.limits, variables)
        return CommandResult(
            status=process.returncode or 0,
            stdout=outputs[0],
            stderr=outputs[1],
            killed=killed,
            truncated=any(stream.is_truncated for stream in streams),
            seconds=time.monotonic() - started,
            cpu_seconds=0.0,
        )

    @contextlib.contextmanager
    def _mounts(self) -> Iterator[None]:
        """Hold the mounted directories open: the container program follows links, and they are none."""
        try:
            with self._files.mounts():
                yield
        except FileError as error:
            raise SandboxError(f"sandbox: a mounted directory was exchanged: {error}") from error

    async def _watch(
        self, ended: asyncio.Task[int], name: str, deadline: float
    ) -> Literal["", "time", "disk", "closed"]:
        """Wait for the end of a command, and end it at a limit. Returns the limit."""
        try:
            while True:
                await asyncio.wait({ended}, timeout=max(0.0, min(_MEASURE_S, deadline - time.monotonic())))
                if self._is_closed:
                    await self._end(ended, name)
                    return "closed"
                if not ended.done() and time.monotonic() >= deadline:
                    await self._end(ended, name)
                    return "time"
                if await self._is_over_limit(is_running=not ended.done()):
                    await self._end(ended, name)
                    return "disk"
                if ended.done():
                    return ""
        except asyncio.CancelledError:
            await asyncio.shield(self._end(ended, name))
            raise

    async def _end(self, ended: asyncio.Task[int], name: str) -> None:
        """Kill a command's container; also while it is being made."""
        last = time.monotonic() + _END_S
        while not ended.done():
            if time.monotonic() > last:
                raise SandboxError(f"sandbox: {self._driver.program} did not end a container in {_END_S:.0f} s")
            with contextlib.suppress(SandboxError):
                await self._driver.call("kill", name)
            await asyncio.wait({ended}, timeout=0.2)

    async def _is_over_limit(self, added: int = 0, *, is_running: bool = False) -> bool:
        """Whether the files with `added` bytes exceed a limit. Files closed to their owner are opened for that."""
        path = self._files.path
        status, size = await _output("du", "--summarize", "--block-size=1", path)
        if status and not is_running:
            await _output("chmod", "-R", "u+rX", path)
            _, size = await _output("du", "--summarize", "--block-size=1", path)
        _, count = await _output("du", "--summarize", "--inodes", path)
        used, files = (int(text.split()[0]) if text else 0 for text in (size, count))
        return used + added > self.limits.disk_mb << 20 or files > self.limits.inodes

    async def write(self, files: Mapping[str, bytes]) -> None:
        if await self._is_over_limit(sum(map(len, files.values()))):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), next(iter(files)))
        await _in_thread(self._write, files)

    def _write(self, files: Mapping[str, bytes]) -> None:
        for path, content in files.items():
            with in_file(path):
                self._files.write(path, content)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        return await _in_thread(self._read, path, limit)

    def _read(self, path: str, limit: int) -> bytes:
        with in_file(path), open(self._files.open(path), "rb") as file:
            return file.read(limit)

    async def changes(self, *, everything: bool = False) -> tuple[list[FileRecord], list[str], bytes]:
        return await _in_thread(self._changes, everything)

    def _changes(self, everything: bool) -> tuple[list[FileRecord], list[str], bytes]:
        with open(empty_file(), "rb") as file:
            records, gone = self._files.changed(file.fileno(), everything=everything)
            file.seek(0)
            return records, gone, file.read()

    async def restore(self, records: Sequence[FileRecord], contents: bytes) -> None:
        with memory_file(contents) as source:
            await _in_thread(self._files.restore, records, source)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for name, ended in list(self._running.items()):
                await self._end(ended, name)
            await remove_tree(Path(self._files.path))


async def _in_thread(use: Callable[..., T], *arguments: Any) -> T:
    try:
        return await asyncio.to_thread(use, *arguments)
    except FileError as error:
        raise OSError(*error.args) from error


async def _output(*command: str) -> tuple[int, bytes]:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    output, _ = await process.communicate()
    return process.returncode or 0, output


async def remove_tree(directory: Path) -> None:
    """Remove a directory; commands may have closed directories below it to their owner, or nested very many."""
    await _output("chmod", "-R", "u+rwX", str(directory))
    await _output("rm", "-rf", str(directory))


def _locked(directory: Path) -> int | None:
    """Lock a directory of this user. Returns the lock's descriptor; None if another process has it."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.getuid() and directory.exists():
            return lock
    os.close(lock)
    return None


def _directories(prefix: str) -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*"))


def _variables_file(path: str, variables: Mapping[str, str]) -> str:
    """Write environment variables to a file, since other users of the machine can read a process's arguments."""
    with open(path, "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in variables.items())
    return path


def _mount(source: str, target: str, options: str = ",readonly") -> list[str]:
    if not {*source, *target}.isdisjoint(',"\n'):
        raise InputError(f"sandbox: {source!r}: the path of a container's mount may have no comma, quote or newline")
    return ["--mount", f"type=bind,source={source},target={target}{options}"]


def _without_times(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.mtime = 0
    return entry if entry.isfile() or entry.isdir() or entry.issym() else None
