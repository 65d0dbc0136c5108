"""A child's own place for files in memory, which its parent removes when the child is dead, however it died.

Owns: one directory, and what lies beside it under its name (shared memory has names, not paths). Invariants: only this
user can read it; what a parent that was killed has left behind goes when the next one is made.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "AGENTRL_PRIVATE_FILES"
"""Tells a child where its directory is."""
_PREFIX = "agentrl-"
_SHARED_MEMORY = Path("/dev/shm")


class PrivateFiles:
    """Made for one child; locked by this process, so that others see that it is in use."""

    def __init__(self) -> None:
        _remove_leftovers()
        made = tempfile.mkdtemp(prefix="new-agentrl-", dir=_root())
        self._lock = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = Path(made).with_name(Path(made).name.removeprefix("new-"))
        os.rename(made, self.path)  # only now others may take it for a leftover, and it is locked

    def remove(self) -> None:
        """The child is dead. Idempotent."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def _root() -> Path:
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _remove(path: Path) -> None:
    for pattern in (f"{path.name}-*", f"sem.{path.name}-*"):
        for each in path.parent.glob(pattern):
            each.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers() -> None:
    for path in _root().glob(f"{_PREFIX}*"):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(lock)
