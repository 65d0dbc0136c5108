"""Processes that are measured, and stopped with the benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.anchors.cases import ROOT


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    cpu_s: float
    """CPU seconds of it and of the processes that it waited for."""
    peak_mib: float
    """Memory of the largest of these."""
    errors: str
    """The last lines that it wrote to its error stream."""


def run_python(arguments: Sequence[str], *, python: Path = Path(sys.executable), **environment: str) -> Ended:
    """Run Python in the root of the checkout. A stop of this process stops it, so that it can write a checkpoint."""
    child = subprocess.Popen(
        [python, *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )
    return wait(child)


def wait(child: subprocess.Popen[str]) -> Ended:
    """Wait for a process, and show what it writes to its error stream, if that is a pipe."""
    errors: deque[str] = deque(maxlen=40)
    while True:
        try:
            for line in child.stderr or ():
                print(line, end="", file=sys.stderr, flush=True)
                errors.append(line)
            _, status, usage = os.wait4(child.pid, 0)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            continue
        if child.stderr is not None:
            child.stderr.close()
        child.returncode = os.waitstatus_to_exitcode(status)
        cpu_s = usage.ru_utime + usage.ru_stime
        return Ended(child.returncode, cpu_s, usage.ru_maxrss / 1024, "".join(errors))
