"""Builds exports next to their target.

`staging_path` makes a directory for an export next to its target. The directory is locked while in use, so several
processes may build for one target at once; the next export removes the directories of dead processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from agentrl.core.files import STAGING, staging_directory

_NAME = "export-"


@contextlib.contextmanager
def staging_path(target: Path) -> Iterator[Path]:
    """Yield a path on the same disk at which to build `target`. At the end it is removed unless it was renamed.

    Raises:
        OSError: the disk failed.
    """
    with contextlib.ExitStack() as until_built:
        # Holds the parent's lock, so that cleanups do not take it for a leftover before it is locked.
        with _lock(target.parent):
            _remove_stale_files(target.parent)
            directory = until_built.enter_context(staging_directory(target.with_name(_NAME + secrets.token_hex(8))))
            until_built.enter_context(_lock(directory))
        yield directory / target.name


def _remove_stale_files(parent: Path) -> None:
    for directory in parent.glob(f"{STAGING}{_NAME}*"):
        # Raised for a link, or if it is in use.
        with contextlib.suppress(OSError), _lock(directory, os.O_NOFOLLOW, fcntl.LOCK_NB):
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _lock(directory: Path, extra_open_flags: int = 0, extra_lock_flags: int = 0) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | extra_open_flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | extra_lock_flags)
        yield
    finally:
        os.close(descriptor)
