"""A child's own place for files, in memory where there is room: its parent removes it when the child is dead.

Owns: one directory, and what lies beside it under its name (shared memory has names, not paths). Invariants: only this
user can read it; what a parent that was killed has left behind goes when the next one is made; nothing else goes: no
directory without the mark that was set here, and no failure to remove is anybody's failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "AGENTRL_PRIVATE_FILES"
"""Tells a child where its directory is."""
_PREFIX = "agentrl-child-"
_MARK = "made_for_a_child"
"""An empty file: whoever else makes a directory of such a name does not lose it."""
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 1 << 30
"""Bytes that are to be free in shared memory for a child: adapters are copied to its place. Docker's has 64 MiB."""
MAKE_ROOM = "make room there; a process that finds less than 1 GiB free in /dev/shm has its files under TMPDIR"


class PrivateFiles:
    """Made for one child; locked by this process, so that others see that it is in use."""

    def __init__(self) -> None:
        _remove_leftovers()
        made = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}", dir=_root()))
        self._lock = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (made / _MARK).touch()
        self.path = made.with_name(made.name.removeprefix("new-"))
        made.rename(self.path)  # only now others may take it for a leftover, and it is locked

    def remove(self) -> None:
        """The child is dead. Idempotent."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def _root() -> Path:
    has_room = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= _ROOM
    return _SHARED_MEMORY if has_room else _disk()


def _disk() -> Path:
    return Path(tempfile.gettempdir())


def _remove(path: Path) -> None:
    for pattern in (f"{path.name}-*", f"sem.{path.name}-*"):
        for each in _SHARED_MEMORY.glob(pattern):  # wherever its directory is
            with contextlib.suppress(OSError):  # not ours: shared memory is everybody's, and so are its names
                each.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers() -> None:
    for path in (*_SHARED_MEMORY.glob(f"{_PREFIX}*"), *_disk().glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # no directory, gone already, another's, or in use
            _remove_leftover(path)


def _remove_leftover(path: Path) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(lock).st_uid == os.getuid() and (path / _MARK).is_file():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
    finally:
        os.close(lock)
