"""The lease of a sandbox: its files as the keeper mounts them."""

from __future__ import annotations

import errno
import os
from typing import Any

from agentrl_sandbox.file_tree import (
    ETC,
    SandboxFiles,
    check,
    in_file,
    libc,
    open_beneath,
    parts_of,
    read_rows,
    write_rows,
)

NOSUID, NODEV, NOEXEC, REC, PRIVATE, DETACH = 2, 4, 8, 16384, 1 << 18, 2
"""Flags of mounts."""
SMALL_ROOM = 1 << 18
"""Names or contents that the keeper reads or writes itself, in bytes."""
_SMALL_BYTES, _SMALL_COUNT = 16 << 20, 256
_ZERO_BYTES = 1 << 62
"""Size of the empty file that replaces /dev/zero: shared mappings of the device are memory that no limit counts."""


class KeeperError(Exception):
    """A request that cannot be served; its text is the answer."""


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()))


class Lease(SandboxFiles):
    """The files of one sandbox: a sized tmpfs, and with its own root directory an overlay over that."""

    def __init__(self, path: str, uid: int | None, limits: dict[str, Any]) -> None:
        super().__init__(path, uid, limits)
        self.slot: int | None = None
        """Number of its user id."""
        self.signatures_file: int | None = None
        """File in memory with what the last walk saw. Only helpers read it."""
        self.root = limits["root"]
        os.mkdir(path, 0o700)
        options = f"size={limits['disk_mb']}m,nr_inodes={limits['inodes']},mode=755"
        mount("agentrl", path, "tmpfs", NOSUID | NODEV, options)
        try:
            self._prepare()
        except BaseException:
            libc.umount2(path.encode(), DETACH)
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
            mount("agentrl", f"{self.path}/top", "overlay", NOSUID | NODEV, options + ",userxattr")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise KeeperError(f"root {root!r}: the kernel refuses the overlay: {error.strerror}") from error
            mount("agentrl", f"{self.path}/top", "overlay", NOSUID | NODEV, options)

    def is_small(self) -> bool:
        """Whether all its files can be read within milliseconds, and compared with those seen before, whatever commands
        made of them."""
        used = os.statvfs(self.path)
        is_little = (used.f_blocks - used.f_bfree) * used.f_frsize <= _SMALL_BYTES
        saw_little = self.signatures_file is None or os.fstat(self.signatures_file).st_size <= SMALL_ROOM
        return is_little and saw_little and used.f_files - used.f_ffree <= _SMALL_COUNT

    def load_signatures(self) -> None:
        if self.signatures_file is not None:
            rows = read_rows(self.signatures_file)
            self.scanned = next(rows)
            self.signatures = {path: tuple(signature) for path, *signature in rows}

    def store_signatures(self, signatures_file: int) -> None:
        write_rows(signatures_file, [self.scanned, *((path, *values) for path, values in self.signatures.items())])
        self.signatures = {}  # the keeper keeps the file alone

    def replace_signatures(self, signatures_file: int) -> None:
        if self.signatures_file is not None:
            os.close(self.signatures_file)
        self.signatures_file = signatures_file

    def close(self) -> None:
        """Remove the files; commands have ended."""
        if self.root:
            check(libc.umount2(f"{self.path}/top".encode(), DETACH))
        check(libc.umount2(self.path.encode(), DETACH))
        os.rmdir(self.path)

    def _mounted_names(self) -> list[str]:
        return [] if self.root else [*(f"etc/{name}" for name in ETC), *self.writable]

    def make_mount_points(self) -> None:
        """Make what bubblewrap mounts on, in a sandbox with its own root. It would follow links of earlier commands."""
        if not self.root:
            return
        for path in ("/proc", "/dev", *self.limits["read"]):
            *parents, name = parts_of(path)
            with in_file(path):
                if os.path.isdir(path):
                    os.close(self.open_directory([*parents, name], make=True))
                    continue
                directory = self.open_directory(parents, make=True)
                try:
                    os.close(open_beneath(directory, name, os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
                finally:
                    os.close(directory)
