"""Where an export or an import is built: a directory of its own beside the place it will have.

Owns the directories of that name. Each is locked by who builds in it, so that several may build for one place at once,
and what a process that was killed left there goes when the next one builds beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from agentrl.core.files import STAGING, staged

_NAME = "exchange-"


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """A path to build `target` at, on the same disk; gone at the end, unless what is there was given its name.

    Raises:
        OSError: the disk refused.
    """
    with contextlib.ExitStack() as until_built:
        target.parent.mkdir(exist_ok=True)
        with _locked(target.parent):  # nobody takes it for a dead one's before it is locked
            _remove_those_of_the_dead(target.parent)
            directory = until_built.enter_context(staged(target.with_name(_NAME + secrets.token_hex(8))))
            until_built.enter_context(_locked(directory))
        yield directory / target.name


def _remove_those_of_the_dead(parent: Path) -> None:
    for directory in parent.glob(f"{STAGING}{_NAME}*"):
        with contextlib.suppress(OSError), _locked(directory, os.O_NOFOLLOW, fcntl.LOCK_NB):  # a link, or in use
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path, opening: int = 0, waiting: int = 0) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | opening)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | waiting)
        yield
    finally:
        os.close(descriptor)
