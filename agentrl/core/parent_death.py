"""Ends a child process with the process that started it, by a signal of the kernel."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when the thread that started it dies; end now if `parent` is dead.

    SIGUSR1, which Slurm sends to every process of a job step as a warning, does not end it before.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent_hook(parent, number)()


def die_with_parent_hook(parent: int | None = None, number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a function for a forked child to call before its program starts, which then dies with this process.

    Args:
        parent: the parent of the calling process; None: this process.
        number: the signal that the child receives.
    """
    prctl, starter = getattr(ctypes.CDLL(None), "prctl", None), os.getpid() if parent is None else parent

    def ask() -> None:
        if prctl is not None:  # only Linux has it
            prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != starter:
            os._exit(1)

    return ask
