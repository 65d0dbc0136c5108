"""Runs a module of the checks in a new process, which imports the user's code again and plays episodes with it.

The process may hang, die, or leave other processes behind. `run_in_new_process` bounds the import and the playing
separately, says which of them failed, and ends whatever the process started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.engines.process import die_with_parent

IMPORT_S = 60.0
"""Time limit of the import: code that waits for something at its import would block the check."""
PLAYING_S = 600.0
"""Time limit of the episodes."""
_PLAYED, _RAISED = 83, 84
"""Exit codes of a process that played, and of one that raised an exception; the user's code may use any other."""


class SilentProcessError(Exception):
    """A process did not answer in time, or was killed by others."""


class DeadProcessError(Exception):
    """The user's code ended the process while episodes played."""


def run_in_new_process(module: str, arguments: Sequence[str | Path], *, hash_seed: int) -> bool:
    """Run a module that calls `serve_new_process`, without input and output.

    Args:
        module: name of the module.
        arguments: its arguments.
        hash_seed: value of PYTHONHASHSEED.

    Returns:
        Whether it played. If not, it could not import the user's code, or raised an exception.

    Raises:
        SilentProcessError: the import or the episodes took too long, or it was killed: the machine lacks memory, or
            everything is to end.
        DeadProcessError: it ended while episodes played.
    """
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", module, str(os.getpid()), str(write_end), *map(str, arguments)]
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": paths}
    null = subprocess.DEVNULL
    with open(read_end, "rb", buffering=0) as imported, contextlib.ExitStack() as stack:
        with open(write_end, "wb", buffering=0):
            process = subprocess.Popen(
                command, env=environ, stdin=null, stdout=null, stderr=null, pass_fds=[write_end], start_new_session=True
            )
        stack.callback(_end, process)
        poll = select.poll()  # `select` takes no descriptor above 1,023
        poll.register(imported, select.POLLIN)
        if not poll.poll(IMPORT_S * 1000):
            raise SilentProcessError(f"a second process did not import it within {IMPORT_S:g} s")
        has_imported = bool(imported.read(1))
        try:
            code = process.wait(PLAYING_S)
        except subprocess.TimeoutExpired:
            raise SilentProcessError(f"episodes in a second process took more than {PLAYING_S:g} s") from None
        if has_imported and code not in (_PLAYED, _RAISED):
            if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                raise SilentProcessError(f"a second process was killed ({signal.Signals(-code).name})")
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            raise DeadProcessError(f"their process ended ({how})")
        return code == _PLAYED


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and what it started
    process.wait()


def serve_new_process(load: Callable[[Sequence[str]], Callable[[], None]]) -> None:
    """Run in the new process.

    Args:
        load: imports the user's code, and returns a function that plays. Receives the arguments.
    """
    parent, write_end, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    try:
        play = load(arguments)
        os.write(int(write_end), b"1")
        play()
    except Exception:  # noqa: BLE001 - the check plays in its own process then, where the user sees the exception
        os._exit(_RAISED)
    os._exit(_PLAYED)
