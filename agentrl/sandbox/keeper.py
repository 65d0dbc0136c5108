"""The keeper: the process that owns a worker's sandboxes. A separate program, started by `bubblewrap.py`.

It runs as process 1 of a PID namespace, in its own mount namespace. All commands run below it, so the kernel ends
them when it ends, and its files are sized tmpfs mounts that end with its mount namespace: a killed worker leaves
neither processes nor files behind. It uses the standard library only, and starts in about 20 ms.

Requests arrive as JSON over a SOCK_SEQPACKET pair, with attached file descriptors; replies carry the request's
number. Paths within a lease are opened beneath its directory and never follow a link, since a sandboxed command may
have written anything there.

    python -I -S keeper.py SOCKET OWNER FILTER BWRAP
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Fields = dict[str, Any]
Answer = tuple[Fields | None, list[int]]
"""Fields of a reply and its attached files; None: the reply comes later, or none is due."""

_MESSAGE_BYTES = 100_000
_SPILLED = b"@"
"""Message with its content in the last attached file."""
_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE, _DETACH = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 2
_SET_DEATH_SIGNAL = 1
_OPENAT2 = 437
_BENEATH = 1 | 2 | 4 | 8  # RESOLVE_NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH
FIRST_UID, _UIDS = 2_000_000_000, 512
"""As root, each lease has its own user id: limits on processes bind every user but the real root."""
_NAMES_BYTES = 8 << 20
"""Maximum size of the names of all files of a sandbox."""
_HOLES_BYTES = 48 << 20
"""Maximum size of holes in files that are read at once."""
_TICK_NS = 50_000_000
"""Upper bound of the resolution of file times."""
_FARTHEST_NS = 1 << 62
"""Greatest distance of a recorded file time from 1970; commands can set farther ones, which no journal can hold."""
_ZERO_BYTES = 1 << 62
"""Size of the empty file that replaces /dev/zero: shared mappings of the device are memory that no limit counts."""
_SAMPLE_S = 0.02
_SIZE = re.compile(rb"^(\w+):\s+(\d+) kB$", re.MULTILINE)
"""A size in /proc/PID/status."""
_PRIVATE_SIZES = (b"RssAnon", b"VmSwap", b"VmPTE", b"HugetlbPages")
_START_S = 10.0
"""Seconds within which bubblewrap has to set up a sandbox."""
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
"""PATH of commands, unless they are given another."""
HOST_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/localtime")
"""Files of the host's /etc that a sandbox sees, read-only."""
ETC = {
    "passwd": "root:x:0:0::/box:/bin/sh\nuser:x:1000:1000::/box:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class KeeperError(Exception):
    """A request that cannot be served; its text is the answer."""


class FileError(Exception):
    """A failure to read or write a file of a sandbox, which its commands may cause: error number, message and path."""


@contextlib.contextmanager
def in_file(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(error.errno, error.strerror, path) from error
    except ValueError as error:  # NUL or a lone surrogate in a name
        raise FileError(errno.EINVAL, str(error), path) from error


def memory_file(content: bytes) -> int:
    """Return the descriptor of a file in memory that cannot change: a command may receive it as standard input."""
    file = os.memfd_create("agentrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    )
    os.lseek(file, 0, os.SEEK_SET)
    return file


def send(line: socket.socket, message: Fields, files: Sequence[int] = ()) -> None:
    """Send a message of any size; the files stay open here."""
    body = json.dumps(message).encode()
    if len(body) <= _MESSAGE_BYTES:
        socket.send_fds(line, [body], list(files))
        return
    spilled = memory_file(body)
    try:
        socket.send_fds(line, [_SPILLED], [*files, spilled])
    finally:
        os.close(spilled)


def receive(line: socket.socket) -> tuple[Fields | None, list[int]]:
    """Return a message and its attached files; None at the end of the line."""
    data, files, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 8)
    if data == _SPILLED:
        with open(files.pop(), "rb") as file:
            data = file.read()
    return (json.loads(data) if data else None), files


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _check(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()))


def _die_with(parent: int) -> None:
    """End with the parent process, also if it has ended already."""
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path below a directory's descriptor, without following links or leaving its file system."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, _BENEATH)
    return _check(_libc.syscall(_OPENAT2, directory, os.fsencode(path), how, len(how)))


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts or not parts:
        raise OSError(errno.EINVAL, "not an absolute path without '..'")
    try:
        unusable = b"\0" in os.fsencode(path)
    except UnicodeEncodeError:
        unusable = True
    if unusable:
        raise OSError(errno.EINVAL, "a path may contain neither NUL nor lone surrogates")
    return parts


def contents_limit(disk_mb: int) -> int:
    """Return the maximum size of a sandbox's plain files: more than its disk holds, since files may have holes."""
    return (disk_mb << 20) + _HOLES_BYTES


class FileRecord(NamedTuple):
    """A file of a sandbox, without its content."""

    path: str
    """Path below the sandbox's root, without the first slash."""
    kind: str
    """Kind: `file`, `directory`, `link`, `pipe`, `same` (another name of a file) or `none` (removed from the root)."""
    mode: int
    modified: int
    """Time of the last modification in nanoseconds, since build tools compare it; 0 unless it is a plain file."""
    size: int
    target: str
    """Target of a link, or of `same`; `opaque` for a directory that hides the root's."""


class FileChanges:
    """The files of a sandbox that differ from their signatures of an earlier walk.

    A signature holds the time of a file's last change, which nothing in a sandbox can set. A clock tick may hide a
    second change, so a file that changed just before the earlier walk, or after it, differs.

    Args:
        earlier: signatures of the earlier walk, by path.
        settled: time before which a change was seen by the earlier walk.
        contents_room: maximum size of the contents, in bytes.
        names_room: maximum size of the names of all files, in bytes.
        is_overlay: whether the files are the upper directory of an overlay.
    """

    def __init__(
        self,
        earlier: dict[str, tuple[int, ...]],
        settled: int,
        contents_room: int,
        names_room: int = _NAMES_BYTES,
        *,
        is_overlay: bool = False,
    ) -> None:
        self.signatures: dict[str, tuple[int, ...]] = {}
        self.records: list[FileRecord] = []
        """Records, parents first."""
        self.contents = os.memfd_create("agentrl", os.MFD_CLOEXEC)
        """Contents of the plain files among them, one after another."""
        self._earlier, self._settled, self._is_overlay = earlier, settled, is_overlay
        self._room = {"files": contents_room, "names of files": names_room}
        self._taken = dict.fromkeys(self._room, 0)
        self._first: dict[int, str] = {}
        """First path of each file with several names, by inode."""

    def walk(self, top: str, path: str) -> None:
        """Visit everything below `path`, which is relative to `top`."""
        base = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        waiting = [path]
        try:
            while waiting:
                parent = waiting.pop()
                with in_file(parent):
                    directory = _open_beneath(base, parent or ".", os.O_RDONLY | os.O_DIRECTORY)
                    try:
                        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
                            path = f"{parent}/{entry.name}" if parent else entry.name
                            if self._visit(directory, entry.name, path, entry.stat(follow_symlinks=False)):
                                waiting.append(path)
                    finally:
                        os.close(directory)
        finally:
            os.close(base)

    def _visit(self, directory: int, name: str, path: str, found: os.stat_result) -> bool:
        """Compare a file with its earlier signature; return whether it is a directory."""
        kind = _KINDS.get(stat.S_IFMT(found.st_mode))
        if kind is None:  # a socket: nothing listens behind it any more
            return False
        self._take("names of files", len(os.fsencode(path)))
        record = FileRecord(path, kind, stat.S_IMODE(found.st_mode), 0, 0, "")
        if kind == "directory":
            if self._is_overlay and _is_opaque(directory, name):
                record = record._replace(target="opaque")
            self.signatures[path] = (found.st_mode, len(record.target))
            if self._earlier.get(path) != self.signatures[path]:
                self.records.append(record)
            return True
        signature = self.signatures[path] = (found.st_mode, found.st_ino, found.st_size, found.st_ctime_ns)
        if found.st_nlink > 1 and (first := self._first.setdefault(found.st_ino, path)) != path:
            self._take("names of files", len(os.fsencode(first)))
            self.records.append(record._replace(kind="same", target=first))
        elif self._earlier.get(path) != signature or found.st_ctime_ns >= self._settled:
            if kind == "file":
                self._take("files", found.st_size)
                _append(self.contents, directory, name, found.st_size)
                modified = max(-_FARTHEST_NS, min(found.st_mtime_ns, _FARTHEST_NS))
                record = record._replace(modified=modified, size=found.st_size)
            elif kind == "link":
                record = record._replace(target=os.readlink(name, dir_fd=directory))
                self._take("names of files", len(os.fsencode(record.target)))
            self.records.append(record)
        return False

    def gone(self) -> list[str]:
        """Return the paths of the earlier walk that are gone."""
        return [path for path in self._earlier if path not in self.signatures]

    def _take(self, what: str, size: int) -> None:
        self._taken[what] += size
        if self._taken[what] > self._room[what]:
            raise OSError(errno.EFBIG, f"{what} of more than {self._room[what] >> 20} MiB")


_RESTORED = ("file", "directory", "link", "pipe", "same", "none")
_OPAQUE = {"trusted.overlay.opaque", "user.overlay.opaque"}
"""Marks of an overlay; those that a command sets itself, in an overlay, get a longer name."""
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "pipe",
    stat.S_IFCHR: "none",  # an overlay's mark; nothing in a sandbox can make a device
}


def _append(contents: int, directory: int, name: str, size: int) -> None:
    """Append a file of this size to `contents`."""
    file = _open_beneath(directory, name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while size and (copied := os.sendfile(contents, file, None, size)):
            size -= copied
    finally:
        os.close(file)


def _keep_open(files: set[int]) -> None:
    """Close all other files, and let the next program inherit these."""
    for file in [int(name) for name in os.listdir("/proc/self/fd")]:
        if file not in files:
            with contextlib.suppress(OSError):
                os.close(file)
    for file in files:
        os.set_inheritable(file, True)


def _release(block: int) -> None:
    """Let bubblewrap start its command, unless it has failed because of the sandbox's files."""
    with contextlib.suppress(BrokenPipeError):
        os.write(block, b"1")


def _mode_of(directory: int, name: str, content: bytes) -> int:
    """Return the mode of a plain file, or that of a new one: scripts and programs are executable."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            return stat.S_IMODE(found.st_mode)
    return 0o755 if content.startswith((b"#!", b"\x7fELF")) else 0o644


def _is_opaque(directory: int, name: str) -> bool:
    file = _open_beneath(directory, name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return not _OPAQUE.isdisjoint(os.listxattr(file))
    finally:
        os.close(file)


def _remove(directory: int, name: str) -> None:
    """Remove a file, or a directory with all it holds."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        inner = _open_beneath(directory, name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for entry in os.listdir(inner):
                _remove(inner, entry)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=directory)


class SandboxFiles:
    """The files of one sandbox below a directory of this machine, opened without following links.

    Args:
        path: the directory.
        uid: user of the commands; None: the user of this process.
        limits: `disk_mb` and `writable` of `SandboxLimits`, and for a lease the other fields.
    """

    root: str | None = None

    def __init__(self, path: str, uid: int | None, limits: Fields) -> None:
        self.path, self.uid, self.limits = path, uid, limits
        self.signatures: dict[str, tuple[int, ...]] = {}
        """What `changed` saw of each file when it was last called, at `scanned`."""
        self.scanned = 0
        self.writable = list(dict.fromkeys(["box", "tmp", *(_parts(name)[0] for name in limits["writable"])]))
        """Directories that commands may write to, if there is no root of its own."""

    @property
    def top(self) -> str:
        """The directory that a sandbox's absolute paths are relative to."""
        return f"{self.path}/top" if self.root else self.path

    def make_directories(self) -> None:
        """Make the directories that commands may write to."""
        if not self.root:
            os.mkdir(f"{self.path}/box", 0o755)
            os.mkdir(f"{self.path}/tmp")
            os.chmod(f"{self.path}/tmp", 0o1777)
        if self.uid is not None:
            for name in ("upper", "upper/box") if self.root else ("box", "tmp"):
                os.chown(f"{self.path}/{name}", self.uid, self.uid)
        for name in self.limits["writable"]:
            directory = self.open_directory(_parts(name), make=True)
            if self.uid is not None:
                os.fchown(directory, self.uid, self.uid)
            os.close(directory)

    def open_directory(self, parts: list[str], *, make: bool) -> int:
        """Open a directory below the top, one step at a time; create missing ones."""
        directory = os.open(self.top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=directory)
                    if self.uid is not None:
                        os.chown(part, self.uid, self.uid, dir_fd=directory, follow_symlinks=False)
            try:
                deeper = _open_beneath(directory, part, os.O_RDONLY | os.O_DIRECTORY)
            finally:
                os.close(directory)
            directory = deeper
        return directory

    def write(self, path: str, content: bytes, mode: int | None = None, *, modified: int | None = None) -> None:
        *parents, name = _parts(path)
        if not self.root and (not parents or parents[0] not in self.writable):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        directory = self.open_directory(parents, make=True)
        try:
            if mode is None:
                mode = _mode_of(directory, name, content)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)  # it may be a link, a pipe, or another file's second name
            file = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory
            )
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(file, view) :]
                if self.uid is not None:
                    os.fchown(file, self.uid, self.uid)
                os.fchmod(file, mode)  # last, since a change of owner clears setuid bits
                if modified is not None:
                    os.utime(file, ns=(modified, modified))
            finally:
                os.close(file)
        finally:
            os.close(directory)

    def changed(self, *, everything: bool) -> tuple[list[FileRecord], list[str], int]:
        """Return the files that changed since the last call, the paths that are gone, and a file with the contents.

        No command may run meanwhile. With `everything`, all files are returned.
        """
        started = time.time_ns()
        room = contents_limit(self.limits["disk_mb"])
        earlier = {} if everything else self.signatures
        changes = FileChanges(earlier, self.scanned - _TICK_NS, room, is_overlay=self.root is not None)
        gone: list[str] = []
        try:
            if self.root:
                changes.walk(f"{self.path}/upper", "")
            else:
                for name in self.writable:
                    changes.walk(self.path, name)
            gone = changes.gone()
        except BaseException:
            os.close(changes.contents)
            raise
        self.signatures, self.scanned = changes.signatures, started
        return changes.records, gone, changes.contents

    def restore(self, records: Sequence[FileRecord], contents: int) -> None:
        """Make files as `changed` returned them, parents first, in a sandbox that has run nothing yet.

        The records are data of a run directory, which may come from others: nothing outside the sandbox's own
        directories is made, changed or linked to.
        """
        offset, end = 0, os.fstat(contents).st_size
        for record in records:
            with in_file(record.path):
                *parents, name = self._restorable(record, end - offset)
                directory = self.open_directory(parents, make=True)
                try:
                    if record.kind != "directory" or record.target == "opaque":
                        _remove(directory, name)
                    if record.kind == "file":
                        content = os.pread(contents, record.size, offset)
                        self.write(f"/{record.path}", content, record.mode, modified=record.modified)
                        offset += record.size
                    elif record.kind != "none":
                        self._make(record, directory, name)
                finally:
                    os.close(directory)
        for record in reversed(records):  # last, since a directory may be closed to its owner
            if record.kind == "directory":
                with in_file(record.path):
                    directory = self.open_directory(_parts(f"/{record.path}"), make=False)
                    os.fchmod(directory, record.mode)
                    os.close(directory)
        self.signatures = {record.path: () for record in records}

    def _restorable(self, record: FileRecord, content_bytes: int) -> list[str]:
        """Return the parts of a record's path, if `changed` can have returned the record."""
        parts = self._inner_parts(record.path)
        if record.kind not in _RESTORED or (record.kind == "none" and not self.root):
            raise OSError(errno.EINVAL, f"no kind of file: {record.kind!r}")
        if record.kind == "same":
            self._inner_parts(record.target)
        if record.mode != stat.S_IMODE(record.mode) or abs(record.modified) > _FARTHEST_NS:
            raise OSError(errno.EINVAL, f"no mode or time of a file: {record.mode}, {record.modified}")
        if not 0 <= record.size <= (content_bytes if record.kind == "file" else 0):
            raise OSError(errno.EINVAL, f"no size of a file: {record.size}")
        return parts

    def _inner_parts(self, path: str) -> list[str]:
        """Return the parts of a recorded path, which must be below a directory that commands may write to."""
        parts = _parts(f"/{path}")
        if "/".join(parts) != path:
            raise OSError(errno.EINVAL, "not the path of a file")
        if not self.root and (len(parts) == 1 or parts[0] not in self.writable):
            raise OSError(errno.EROFS, "outside the directories that the sandbox can write to")
        return parts

    @contextlib.contextmanager
    def mounts(self) -> Iterator[dict[str, int]]:
        """Open the sandbox's own files that commands see, without following links, by path in the sandbox."""
        with contextlib.ExitStack() as opened:
            top = os.open(self.top, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, top)
            descriptors = {"/": top} if self.root else {}
            for name in self._mounted_names():
                with in_file(f"/{name}"):
                    descriptors[f"/{name}"] = file = _open_beneath(top, name, os.O_PATH)
                    opened.callback(os.close, file)
                    if stat.S_ISLNK(os.fstat(file).st_mode):
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            yield descriptors

    def _mounted_names(self) -> list[str]:
        return self.writable

    def _make(self, record: FileRecord, directory: int, name: str) -> None:
        if record.kind == "directory":
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=directory)
        elif record.kind == "link":
            os.symlink(record.target, name, dir_fd=directory)
        elif record.kind == "pipe":
            os.mkfifo(name, dir_fd=directory)
        elif record.kind == "same":
            *parents, first = _parts(f"/{record.target}")
            source = self.open_directory(parents, make=False)
            try:
                os.link(first, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
            finally:
                os.close(source)
        if self.uid is not None and record.kind != "same":
            os.chown(name, self.uid, self.uid, dir_fd=directory, follow_symlinks=False)
        if record.kind == "pipe":
            os.chmod(name, record.mode, dir_fd=directory)

    def open(self, path: str) -> int:
        """Open a plain file for reading."""
        *parents, name = _parts(path)
        directory = self.open_directory(parents, make=False)
        try:
            file = _open_beneath(directory, name, os.O_RDONLY | os.O_NONBLOCK)
        finally:
            os.close(directory)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a plain file")
        return file


class Lease(SandboxFiles):
    """The files of one sandbox: a sized tmpfs, and with its own root directory an overlay over that."""

    def __init__(self, path: str, uid: int | None, limits: Fields) -> None:
        super().__init__(path, uid, limits)
        self.slot: int | None = None
        self.root = limits["root"]
        os.mkdir(path, 0o700)
        options = f"size={limits['disk_mb']}m,nr_inodes={limits['inodes']},mode=755"
        _mount("agentrl", path, "tmpfs", _NOSUID | _NODEV, options)
        try:
            self._prepare()
        except BaseException:
            _libc.umount2(path.encode(), _DETACH)
            os.rmdir(path)
            raise

    def _prepare(self) -> None:
        """Make the directories and files that every sandbox has."""
        path = self.path
        with open(f"{path}/zero", "wb") as file:
            file.truncate(_ZERO_BYTES)
        if self.root:
            for name in ("upper", "work", "top"):
                os.mkdir(f"{path}/{name}", 0o755)
            os.makedirs(f"{path}/upper/box", 0o755)
            self._mount_overlay(self.root)
        else:
            os.mkdir(f"{path}/etc", 0o755)
            for name, text in ETC.items():
                with open(f"{path}/etc/{name}", "w") as file:
                    file.write(text)
        self.make_directories()

    def _mount_overlay(self, root: str) -> None:
        if any(character in root for character in ":,\\"):
            raise KeeperError(f"root {root!r}: a root directory's path may not contain ':', ',' or '\\'")
        options = f"lowerdir={root},upperdir={self.path}/upper,workdir={self.path}/work"
        try:
            _mount("agentrl", f"{self.path}/top", "overlay", _NOSUID | _NODEV, options + ",userxattr")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise KeeperError(f"root {root!r}: the kernel refuses the overlay: {error.strerror}") from error
            _mount("agentrl", f"{self.path}/top", "overlay", _NOSUID | _NODEV, options)

    def close(self) -> None:
        if self.root:
            _check(_libc.umount2(f"{self.path}/top".encode(), _DETACH))
        _check(_libc.umount2(self.path.encode(), _DETACH))
        os.rmdir(self.path)

    def _mounted_names(self) -> list[str]:
        return [] if self.root else [*(f"etc/{name}" for name in ETC), *self.writable]

    def make_mount_points(self) -> None:
        """Make what bubblewrap mounts on, in a sandbox with its own root. It would follow links of earlier commands."""
        if not self.root:
            return
        for path in ("/proc", "/dev", *self.limits["read"]):
            *parents, name = _parts(path)
            with in_file(path):
                if os.path.isdir(path):
                    os.close(self.open_directory([*parents, name], make=True))
                    continue
                directory = self.open_directory(parents, make=True)
                try:
                    os.close(_open_beneath(directory, name, os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
                finally:
                    os.close(directory)


class RunningCommand:
    """One command that runs in a lease."""

    def __init__(self, lease: Lease, process: int, init: int, status_file: int, deadline: float, memory: int) -> None:
        self.lease, self.process, self.init, self.deadline, self.memory = lease, process, init, deadline, memory
        self.status_file = status_file
        """Receives bubblewrap's report of the exit status, if the program could be started."""
        self.started = time.monotonic()
        self.killed = ""
        self.peak = 0
        self.pidfd = os.pidfd_open(process)
        try:
            self.init_pidfd = os.pidfd_open(init)
        except ProcessLookupError:
            self.init_pidfd = os.dup(self.pidfd)

    def kill(self, why: str) -> None:
        self.killed = self.killed or why
        for process in (
            self.init_pidfd,
            self.pidfd,
        ):  # the sandbox's process 1 first: the kernel ends all others with it
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)

    def private_memory(self) -> int:
        """Private memory of the command's processes and their page tables, in bytes. Files have their own limit."""
        total, processes = 0, [self.init]
        while processes:
            process = processes.pop()
            with contextlib.suppress(OSError, ValueError):
                with open(f"/proc/{process}/status", "rb") as file:
                    sizes = dict(_SIZE.findall(file.read()))
                total += sum(int(sizes.get(name, 0)) for name in _PRIVATE_SIZES) << 10
                for task in os.listdir(f"/proc/{process}/task"):
                    with open(f"/proc/{process}/task/{task}/children", "rb") as file:
                        processes += map(int, file.read().split())
        return total


class Keeper:
    """Serves the owner's requests."""

    def __init__(self, line: socket.socket, filter_file: int, bwrap: str, *, is_root: bool, number: int) -> None:
        self.line, self.filter_file, self.bwrap, self.is_root = line, filter_file, bwrap, is_root
        bases = [path for path in ("/srv", "/mnt", "/media", "/opt") if os.path.isdir(path)]
        if not bases:
            raise KeeperError("the keeper mounts its files on /srv, /mnt, /media or /opt, but none of them exists")
        self.base = bases[0]
        _mount("agentrl", self.base, "tmpfs", _NOSUID | _NODEV, "size=4m,mode=755")
        self.leases: dict[str, Lease] = {}
        self.commands: dict[int, RunningCommand] = {}
        self.free_uids = list(range(_UIDS)) if is_root else []
        self.first_uid = FIRST_UID + number % 4_000_000 * _UIDS
        self.poller = select.poll()
        self.poller.register(line, select.POLLIN)

    def serve(self) -> NoReturn:
        while True:
            now = time.monotonic()
            wait = min([_SAMPLE_S] + [max(0.0, command.deadline - now) for command in self.commands.values()])
            ready = dict(self.poller.poll(wait * 1000 if self.commands else None))
            for number, command in list(self.commands.items()):
                if command.pidfd in ready:
                    self.finish(number)
                elif time.monotonic() >= command.deadline:
                    command.kill("time")
                else:
                    command.peak = max(command.peak, command.private_memory())
                    if command.peak > command.memory:
                        command.kill("memory")
            if self.line.fileno() in ready:
                self.answer()

    def answer(self) -> None:
        try:
            request, files = receive(self.line)
        except ConnectionError:  # the owner was killed
            os._exit(0)
        if request is None:
            os._exit(0)  # the owner has closed its end
        number, operation = request.pop("number"), request.pop("operation")
        try:
            reply, sent = getattr(self, f"do_{operation}")(number, files, **request)
        except KeeperError as error:
            reply, sent = {"error": str(error)}, []
        except FileError as error:
            reply, sent = {"file_error": error.args}, []
        except Exception as error:  # any other one would end all sandboxes of the worker
            reply, sent = {"error": f"{operation}: {type(error).__name__}: {error}"}, []
        for file in files:
            os.close(file)
        if reply is not None:
            self.reply(number, reply, sent)

    def reply(self, number: int, reply: Fields, files: Sequence[int] = ()) -> None:
        try:
            send(self.line, {"number": number, **reply}, files)
        except OSError:
            os._exit(0)
        for file in files:
            os.close(file)

    def lease(self, name: str) -> Lease:
        try:
            return self.leases[name]
        except KeyError:
            raise KeeperError(f"there is no sandbox {name}") from None

    def do_create(self, number: int, files: list[int], lease: str, **limits: Any) -> Answer:
        if limits["root"] and os.path.realpath(limits["root"]).startswith(self.base + "/"):
            raise KeeperError(f"root {limits['root']!r}: {self.base} is covered by the keeper's own files; move it")
        slot = None
        if self.is_root:
            if not self.free_uids:
                raise KeeperError(f"{_UIDS} sandboxes are open in one worker; close some")
            slot = self.free_uids.pop()
        try:
            made = Lease(f"{self.base}/{lease}", None if slot is None else self.first_uid + slot, limits)
        except BaseException:
            if slot is not None:
                self.free_uids.append(slot)
            raise
        made.slot = slot
        self.leases[lease] = made
        return {}, []

    def do_destroy(self, number: int, files: list[int], lease: str) -> Answer:
        sandbox = self.lease(lease)
        for key, command in list(self.commands.items()):
            if command.lease is sandbox:
                command.kill("closed")
                self.finish(key)
        sandbox.close()
        del self.leases[lease]
        if sandbox.slot is not None:
            self.free_uids.append(sandbox.slot)
        return {}, []

    def do_write(self, number: int, files: list[int], lease: str, entries: list[tuple[str, int]]) -> Answer:
        """Write files with contents stored one after another in `files[0]`."""
        sandbox, offset = self.lease(lease), 0
        for path, size in entries:
            with in_file(path):
                sandbox.write(path, os.pread(files[0], size, offset))
            offset += size
        return {}, []

    def do_open(self, number: int, files: list[int], lease: str, path: str) -> Answer:
        sandbox = self.lease(lease)
        with in_file(path):
            file = sandbox.open(path)
        return {"size": os.fstat(file).st_size}, [file]

    def do_changed(self, number: int, files: list[int], lease: str, everything: bool) -> Answer:
        records, gone, contents = self.lease(lease).changed(everything=everything)
        return {"records": records, "gone": gone}, [contents]

    def do_restore(self, number: int, files: list[int], lease: str, records: list[list[Any]]) -> Answer:
        self.lease(lease).restore([FileRecord(*record) for record in records], files[0])
        return {}, []

    def do_kill(self, number: int, files: list[int], command: int) -> Answer:
        if command in self.commands:
            self.commands[command].kill("cancelled")
        return None, []

    def do_run(self, number: int, files: list[int], lease: str, **options: Any) -> Answer:
        sandbox = self.lease(lease)
        sandbox.make_mount_points()
        with sandbox.mounts() as mounts:
            process, init, status_file, listener = self.start(sandbox, files, options, mounts)
        deadline = time.monotonic() + options["seconds"]
        command = RunningCommand(sandbox, process, init, status_file, deadline, options["memory_mb"] << 20)
        self.commands[number] = command
        self.poller.register(command.pidfd, select.POLLIN)
        if listener is not None:
            self.reply(number, {"listening": True}, [listener])
        return None, []

    def finish(self, number: int) -> None:
        """Answer once all processes of an ended command are gone."""
        command = self.commands.pop(number)
        self.poller.unregister(command.pidfd)
        command.kill("")  # bubblewrap ends with the command, its process 1 a moment later
        ended = select.poll()
        ended.register(command.init_pidfd, select.POLLIN)
        ended.poll()
        os.close(command.pidfd)
        os.close(command.init_pidfd)
        _, status, usage = os.wait4(command.process, 0)
        has_started = bool(os.read(command.status_file, 4096)) or bool(command.killed)
        os.close(command.status_file)
        self.reap_orphans()
        self.reply(
            number,
            {
                "status": os.waitstatus_to_exitcode(status),
                "has_started": has_started,
                "killed": command.killed,
                "peak_bytes": command.peak,
                "seconds": time.monotonic() - command.started,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
            },
        )

    def reap_orphans(self) -> None:
        """Reap the children that processes below left to this one, process 1, and leave the commands."""
        commands = {command.process for command in self.commands.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in commands:
                    return  # the kernel names it first each time; its own end is near
                os.waitpid(ended.si_pid, 0)

    def arguments(self, lease: Lease, options: Fields, mounts: dict[str, int]) -> list[str]:
        """Return bubblewrap's arguments for a command.

        What the sandbox owns is bound by descriptor: bubblewrap fails if the path leads elsewhere by then.
        """
        arguments = [
            "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try",
            "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox",
        ]  # fmt: skip
        if options["network"] == "none":
            arguments += ["--unshare-net"]
        if lease.root:
            user = "1000" if self.is_root else "0"
            arguments += ["--uid", user, "--gid", user, "--bind-fd", str(mounts["/"]), "/"]
        else:
            arguments += ["--uid", "1000", "--gid", "1000", "--ro-bind", "/usr", "/usr"]
            for name in ("bin", "sbin", "lib", "lib64", "lib32"):
                if os.path.islink(f"/{name}"):
                    arguments += ["--symlink", f"usr/{name}", f"/{name}"]
                elif os.path.isdir(f"/{name}"):
                    arguments += ["--ro-bind", f"/{name}", f"/{name}"]
            for path in HOST_FILES:
                arguments += ["--ro-bind-try", path, path]
            for path, descriptor in mounts.items():
                arguments += ["--ro-bind-fd" if path.startswith("/etc/") else "--bind-fd", str(descriptor), path]
        for path in lease.limits["read"]:
            arguments += ["--ro-bind", path, path]
        arguments += [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--size",
            str(16 << 20),
            "--tmpfs",
            "/dev/shm",
            "--ro-bind",
            f"{lease.path}/zero",
            "/dev/zero",
            "--remount-ro",
            "/dev",
        ]
        if not lease.root:
            arguments += ["--remount-ro", "/"]
        environment = {
            "PATH": SEARCH_PATH,
            "HOME": "/box",
            "LANG": "C.UTF-8",
            **options["environment"],
        }
        for key, value in environment.items():
            arguments += ["--setenv", key, value]
        return [*arguments, "--chdir", options["directory"]]

    def start(
        self, lease: Lease, files: list[int], options: Fields, mounts: dict[str, int]
    ) -> tuple[int, int, int, int | None]:
        """Start a command.

        Return bubblewrap's process, the sandbox's process 1, the file with bubblewrap's report of the exit status, and
        the listening socket, if any.
        """
        listener = namespace = None
        if options["network"] == "gateway":
            listener, namespace = self.listen(options["port"])
        info_read, info_write = os.pipe()
        block_read, block_write = os.pipe()
        filter_file = os.open(f"/proc/self/fd/{self.filter_file}", os.O_RDONLY)
        extra = ["--seccomp", str(filter_file), "--json-status-fd", str(info_write), "--block-fd", str(block_read)]
        # In a file, since other users of the machine can read a process's arguments, and these hold the environment.
        text = [*self.arguments(lease, options, mounts), *extra]
        arguments = memory_file(b"".join(os.fsencode(argument) + b"\0" for argument in text))
        argv = [self.bwrap, "--args", str(arguments), "--", *options["argv"]]
        keeper = os.getpid()
        process = os.fork()
        if process == 0:
            try:
                _die_with(keeper)
                os.setsid()
                if namespace is not None:
                    _check(_libc.setns(namespace, _NEWNET))
                for target, file in enumerate(files[:3]):
                    os.dup2(file, target)
                self.limit(lease, options)
                _keep_open({0, 1, 2, info_write, block_read, filter_file, arguments, *mounts.values()})
                os.execv(self.bwrap, argv)
            except BaseException as error:
                os.write(info_write, f"{type(error).__name__}: {error}".encode())
                os._exit(127)
        for file in (info_write, block_read, filter_file, arguments, *([namespace] if namespace is not None else [])):
            os.close(file)
        try:
            init = self.sandbox_init(info_read)
            self.limit_processes(lease, init, options["processes"])
            _release(block_write)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(info_read)
            if listener is not None:
                os.close(listener)
            raise
        finally:
            os.close(block_write)
        return process, init, info_read, listener

    def sandbox_init(self, info: int) -> int:
        """Return the id of the sandbox's process 1, once bubblewrap has made it."""
        data, end = b"", time.monotonic() + _START_S
        while True:
            ready, _, _ = select.select([info], [], [], max(0.0, end - time.monotonic()))
            part = os.read(info, 4096) if ready else b""
            data += part
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(json.loads(data)["child-pid"])
            if not part:
                message = data.decode("utf-8", "replace").strip()
                raise KeeperError(f"bubblewrap did not start the command{': ' + message if message else ''}")

    def limit(self, lease: Lease, options: Fields) -> None:
        """Set the limits that a process inherits, and become the lease's user."""
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: lease.limits["disk_mb"] << 20,
            resource.RLIMIT_NOFILE: 512,
            resource.RLIMIT_CPU: int(options["seconds"]) + 2,
            resource.RLIMIT_MEMLOCK: 1 << 16,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_DATA: options["memory_mb"] << 20,
        }
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))
        if lease.uid is not None:
            os.setgroups([])
            os.setresgid(lease.uid, lease.uid, lease.uid)
            os.setresuid(lease.uid, lease.uid, lease.uid)
            _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # a change of user clears it

    def limit_processes(self, lease: Lease, init: int, processes: int) -> None:
        """Limit the number of processes inside, where only the sandbox's own are counted."""
        if lease.uid is None:
            with contextlib.suppress(ProcessLookupError):  # bubblewrap failed since, because of the sandbox's files
                resource.prlimit(init, resource.RLIMIT_NPROC, (processes, processes))
            return
        helper = os.fork()  # root may lack the right to change others' limits; the lease's own user has it
        if helper == 0:
            try:
                os.setresgid(lease.uid, lease.uid, lease.uid)
                os.setresuid(lease.uid, lease.uid, lease.uid)
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(init, resource.RLIMIT_NPROC, (processes, processes))
                os._exit(0)
            except BaseException:
                os._exit(1)
        _, status = os.waitpid(helper, 0)
        if status:
            raise KeeperError("the limit on processes cannot be set")

    def listen(self, port: int) -> list[int]:
        """Return a socket that listens at 127.0.0.1:port in a new network namespace, and the namespace."""
        ours, theirs = socket.socketpair()
        helper = os.fork()
        if helper == 0:
            try:
                _check(_libc.unshare(_NEWNET))
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                    fcntl.ioctl(control, 0x8914, struct.pack("16sH14s", b"lo", 0x1 | 0x40, b""))  # SIOCSIFFLAGS: up
                server = socket.create_server(("127.0.0.1", port), backlog=64)
                namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
                socket.send_fds(theirs, [b"1"], [server.fileno(), namespace])
                os._exit(0)
            except BaseException as error:
                theirs.send(str(error).encode()[:200])
                os._exit(1)
        theirs.close()
        text, files, _, _ = socket.recv_fds(ours, 256, 2)
        ours.close()
        os.waitpid(helper, 0)
        if len(files) != 2:
            raise KeeperError(f"the sandbox's network namespace cannot be made: {text.decode('utf-8', 'replace')}")
        return files


def main() -> None:
    line_number, owner, filter_file, bwrap = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    _die_with(owner)
    line = socket.socket(fileno=line_number)
    uid, gid = os.getuid(), os.getgid()
    try:
        if uid == 0:
            _check(_libc.unshare(_NEWNS | _NEWPID))
        else:
            _check(_libc.unshare(_NEWNS | _NEWUSER | _NEWPID))
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
            _die_with(owner)  # new credentials clear the signal
    except OSError as error:
        line.send(json.dumps({"number": 0, "error": f"namespaces are refused: {error.strerror}"}).encode())
        os._exit(1)
    number = os.getpid()  # differs between the keepers of a machine
    alive_read, alive_write = os.pipe()
    child = os.fork()
    if child:
        line.close()
        os.close(alive_read)
        os.write(alive_write, b"1")
        os.waitpid(child, 0)
        os._exit(0)
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    os.close(alive_write)
    if os.read(alive_read, 1) != b"1":  # the parent ended before its end could be signalled
        os._exit(1)
    os.close(alive_read)
    try:
        _mount("none", "/", "", _REC | _PRIVATE)
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
        keeper = Keeper(line, filter_file, bwrap, is_root=uid == 0, number=number)
    except (OSError, KeeperError) as error:
        line.send(json.dumps({"number": 0, "error": f"the keeper's files cannot be mounted: {error}"}).encode())
        os._exit(1)
    keeper.reply(0, {})
    keeper.serve()


if __name__ == "__main__":
    main()
