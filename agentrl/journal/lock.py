"""One writer per run, and per partition of its turns: advisory locks that end with their process, however it ends."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agentrl.core.errors import RunDirectoryError, StorageError
from agentrl.core.files import remedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.core.clock import Clock

T = TypeVar("T")

LOCK_FILE = "run.lock"
LET_GO_S = 30
"""How long a process may take to let go of a partition: a worker that Ray started outlives a run that was killed by
some seconds, plays on and writes."""
_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """Holds a file of a run's directory from construction to `release`; the file names the holder's process id."""

    def __init__(self, directory: Path, name: str = LOCK_FILE) -> None:
        """Take the lock.

        Raises:
            RunDirectoryError: a live process holds it; the message names its id.
            StorageError: the file cannot be made or written.
        """
        path = directory / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened ({error.strerror}); {remedy(error)}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise RunDirectoryError(
                f"{directory}: process {holder} is writing this run; "
                "wait for it, stop it, or give the new run another name"
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise StorageError(f"{path}: cannot be written ({error.strerror}); {remedy(error)}") from error
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def writer_of(directory: Path) -> int | None:
    """The live process that writes a run, found without touching its lock; None: none that is seen from here."""
    try:
        held = str((directory / LOCK_FILE).stat(follow_symlinks=False).st_ino)
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in locks:  # such as `7: FLOCK  ADVISORY  WRITE 4711 08:01:1311768 0 EOF`
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == held:
            return int(words[4])
    return None


def check_partitions(directory: Path) -> None:
    """Whether a worker of an earlier process of the run is still there.

    Raises:
        RunDirectoryError: one is; the message names its id.
    """
    for path in sorted(directory.glob("turns-*.lock")):
        RunLock(directory, path.name).release()


async def let_go(take: Callable[[], T], tell: Callable[[str], None], clock: Clock) -> T:
    """What `take` returns, once whoever holds the lock that it wants has let go of it.

    Args:
        take: raises `RunDirectoryError` until then.
        tell: takes a line for people, when there is something to wait for.
        clock: for the waits.

    Raises:
        RunDirectoryError: it is held for longer than a process that ends takes.
    """
    for waited in range(LET_GO_S):
        try:
            return take()
        except RunDirectoryError as error:
            if not waited:
                tell(f"{error}; it is given {LET_GO_S} s to end")
            await clock.sleep(1.0)
    return take()


def _forget_in_child() -> None:
    """A process forked from the holder holds nothing: it may outlive the run, and would keep others out of it."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
