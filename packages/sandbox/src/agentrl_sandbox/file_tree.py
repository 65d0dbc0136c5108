"""The files of one sandbox below a directory of this machine.

A sandboxed command may have written anything there, and a run directory of someone else may ask for anything to be
restored: paths are opened beneath the directory, part by part, without following links. The keeper imports this module,
so it uses the standard library and records only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import stat
import struct
import time
from typing import TYPE_CHECKING, Any

from agentrl.sandbox import FileRecord, LinkTarget, Program, contents_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

libc = ctypes.CDLL(None, use_errno=True)
_OPENAT2 = 437
_BENEATH = 1 | 2 | 4 | 8  # RESOLVE_NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH
_NAMES_BYTES = 8 << 20
"""Maximum size of the names of all files of a sandbox."""
_TICK_NS = 50_000_000
"""Upper bound of the resolution of file times."""
_FARTHEST_NS = 1 << 62
"""Greatest distance of a recorded file time from 1970; commands can set farther ones, which no journal can hold."""
FIRST_UID = 2_000_000_000
"""First user id of sandboxes, where this is root."""
HOST_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/localtime")
"""Files of the host's /etc that a sandbox sees, read-only."""
ETC = {
    "passwd": "root:x:0:0::/box:/bin/sh\nuser:x:1000:1000::/box:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


KINDS = {kind.__name__: kind for kind in (bytes, LinkTarget, Program)}
"""Kinds of content, by the name that the keeper's requests use."""


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


def check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path below a directory's descriptor, without following links or leaving its file system."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, _BENEATH)
    return check(libc.syscall(_OPENAT2, directory, os.fsencode(path), how, len(how)))


def parts_of(path: str) -> list[str]:
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


def empty_file() -> int:
    """Return the descriptor of an empty file in memory."""
    return os.memfd_create("agentrl", os.MFD_CLOEXEC)


def write_rows(file: int, rows: Iterable[Any]) -> None:
    """Write rows as JSON, one a line: reading many at once would hold an interpreter's lock, and so its event loop."""
    with open(file, "wb", closefd=False) as lines:
        for row in rows:
            lines.write(json.dumps(row).encode())
            lines.write(b"\n")


def read_rows(file: int) -> Iterator[Any]:
    """Read what `write_rows` wrote."""
    os.lseek(file, 0, os.SEEK_SET)
    with open(file, "rb", closefd=False) as lines:
        for line in lines:
            yield json.loads(line)


class FileChanges:
    """The files of a sandbox that differ from their signatures of an earlier walk.

    A signature holds the time of a file's last change, which nothing in a sandbox can set. A clock tick may hide a
    second change, so a file that changed just before the earlier walk, or after it, differs.

    Args:
        earlier: signatures of the earlier walk, by path.
        settled: time before which a change was seen by the earlier walk.
        contents: file that receives the contents of the plain files among the records, one after another.
        contents_room: maximum size of the contents, in bytes.
        names_room: maximum size of the names of all files, in bytes.
        is_overlay: whether the files are the upper directory of an overlay.
    """

    def __init__(
        self,
        earlier: dict[str, tuple[int, ...]],
        settled: int,
        contents: int,
        contents_room: int,
        names_room: int = _NAMES_BYTES,
        *,
        is_overlay: bool = False,
    ) -> None:
        self.signatures: dict[str, tuple[int, ...]] = {}
        self.records: list[FileRecord] = []
        """Records, parents first."""
        self._contents = contents
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
                    directory = open_beneath(base, parent or ".", os.O_RDONLY | os.O_DIRECTORY)
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
        first = self._first.setdefault(found.st_ino, path) if found.st_nlink > 1 else path
        # A renamed directory changes which name of its files is visited first, but not the files.
        signature = (found.st_mode, found.st_ino, found.st_size, found.st_ctime_ns, int(first != path))
        self.signatures[path] = signature
        if first != path:
            self._take("names of files", len(os.fsencode(first)))
            self.records.append(record._replace(kind="same", target=first))
        elif self._earlier.get(path) != signature or found.st_ctime_ns >= self._settled:
            if kind == "file":
                self._take("files", found.st_size)
                _append(self._contents, directory, name, found.st_size)
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
    file = open_beneath(directory, name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while size and (copied := os.sendfile(contents, file, None, size)):
            size -= copied
    finally:
        os.close(file)


def _mode_of(directory: int, name: str, content: bytes) -> int:
    """Return the mode of a plain file, or that of a new one: scripts and programs are executable."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            return stat.S_IMODE(found.st_mode)
    return 0o755 if isinstance(content, Program) or content.startswith((b"#!", b"\x7fELF")) else 0o644


def _is_opaque(directory: int, name: str) -> bool:
    file = open_beneath(directory, name, os.O_RDONLY | os.O_DIRECTORY)
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
        inner = open_beneath(directory, name, os.O_RDONLY | os.O_DIRECTORY)
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

    def __init__(self, path: str, uid: int | None, limits: dict[str, Any]) -> None:
        self.path, self.uid, self.limits = path, uid, limits
        self.signatures: dict[str, tuple[int, ...]] = {}
        """What `changed` saw of each file when it was last called, at `scanned`."""
        self.scanned = 0
        self.writable = list(dict.fromkeys(["box", "tmp", *(parts_of(name)[0] for name in limits["writable"])]))
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
            directory = self.open_directory(parts_of(name), make=True)
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
                deeper = open_beneath(directory, part, os.O_RDONLY | os.O_DIRECTORY)
            finally:
                os.close(directory)
            directory = deeper
        return directory

    def write(self, path: str, content: bytes, mode: int | None = None, *, modified: int | None = None) -> None:
        """Write a file, a link, or a directory, whose path ends with a slash."""
        *parents, name = parts_of(path)
        above = [*parents, name] if path.endswith("/") else parents
        if not self.root and (not above or above[0] not in self.writable):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if path.endswith("/"):
            os.close(self.open_directory([*parents, name], make=True))
            return
        directory = self.open_directory(parents, make=True)
        try:
            if isinstance(content, LinkTarget):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
                os.symlink(content, os.fsencode(name), dir_fd=directory)
                if self.uid is not None:
                    os.chown(name, self.uid, self.uid, dir_fd=directory, follow_symlinks=False)
                return
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

    def changed(
        self, contents: int, *, everything: bool, room: int | None = None
    ) -> tuple[list[FileRecord], list[str]]:
        """Return the files that changed since the last call and the paths that are gone; write contents to a file.

        No command may run meanwhile. With `everything`, all files are returned. `room` limits names and contents.
        """
        started = time.time_ns()
        rooms = (contents_limit(self.limits["disk_mb"]), _NAMES_BYTES) if room is None else (room, room)
        earlier = {} if everything else self.signatures
        changes = FileChanges(earlier, self.scanned - _TICK_NS, contents, *rooms, is_overlay=self.root is not None)
        if self.root:
            changes.walk(f"{self.path}/upper", "")
        else:
            for name in self.writable:
                changes.walk(self.path, name)
        self.signatures, self.scanned = changes.signatures, started
        return changes.records, changes.gone()

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
                    directory = self.open_directory(parts_of(f"/{record.path}"), make=False)
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
        parts = parts_of(f"/{path}")
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
                    descriptors[f"/{name}"] = file = open_beneath(top, name, os.O_PATH)
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
            *parents, first = parts_of(f"/{record.target}")
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
        *parents, name = parts_of(path)
        directory = self.open_directory(parents, make=False)
        try:
            file = open_beneath(directory, name, os.O_RDONLY | os.O_NONBLOCK)
        finally:
            os.close(directory)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a plain file")
        return file
