"""Foreign code in a process of its own: it may crash, end its process, fork or never end, and one answer comes back.

Owns the child process and its group, which end with this process, however that ends. What the code prints goes to the
error stream, and it has nothing to read. Not a sandbox: the code runs with the caller's rights.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from agentrl.core.clock import SystemClock

LONGEST_S = 600.0
_POLL_S = 0.2
_FRAME = re.compile(rb'File "(.*)", line (\d+) in (.*)')


def run_apart(
    call: Callable[[], Any], *, meanwhile: AbstractContextManager[object], longest_s: float = LONGEST_S
) -> tuple[Any, str]:
    """What `call` returns in a child process, and, where it returned nothing, why not, in words.

    Call it while the process has one thread: the child is a fork of it.

    Args:
        call: returns JSON data.
        meanwhile: entered in this process while the child works.
        longest_s: seconds after which the child is ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    life, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.close(ours)
        _answer(call, writing, life)
    os.close(writing)
    os.close(life)
    try:
        with meanwhile:
            status, content = _read(child, reading, longest_s)
            if status is None and not content.endswith(b"\n"):
                return None, f"it did not end within {longest_s:g} s{_whereabouts(child, reading)}"
    finally:
        _end(child)
        os.close(reading)
        os.close(ours)
    if content.endswith(b"\n"):
        value, problem = json.loads(content)
        return value, problem
    return None, f"its process ended ({_told(status or 0)}) before it could answer"


def _answer(call: Callable[[], Any], writing: int, life: int) -> NoReturn:
    """The child's life."""
    me = os.getpid()
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, writing, all_threads=False)
    with contextlib.suppress(OSError, ValueError):  # streams without a file, in tests
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    encode = json.JSONEncoder().encode  # what the code does to `json` is not our concern
    try:
        answer: tuple[Any, str] = (call(), "")
    except BaseException as error:  # noqa: BLE001 - foreign code: whatever it raises is the answer
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        answer = (None, f"it was ended by {what} ({frame.filename}:{frame.lineno}, in {frame.name})")
    sys.stdout.flush()  # what the child printed goes to standard error, before the parent ends it
    content = encode(answer).encode() + b"\n"
    while content and os.getpid() == me:  # a process that the code forked has nothing to say
        content = content[os.write(writing, content) :]
    os._exit(0)


def _end_with_parent(life: int) -> None:
    os.read(life, 1)  # nothing is ever written: it returns when the parent's end is closed
    os.killpg(0, signal.SIGKILL)


def _read(child: int, reading: int, longest_s: float) -> tuple[int | None, bytes]:
    """The child's exit status, None while it lives, and what it wrote: all of it, or up to the deadline."""
    clock, content = SystemClock(), b""
    deadline = clock.monotonic() + longest_s
    while clock.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)  # asked first: what it wrote before is in the pipe
        while select.select([reading], [], [], 0.0 if ended else _POLL_S)[0] and (part := os.read(reading, 1 << 16)):
            content += part
            if content.endswith(b"\n"):
                return status if ended else None, content
        if ended:
            return status, content
    return None, content


def _whereabouts(child: int, reading: int) -> str:
    """Where a child that does not end is: its innermost line of Python that is not a library's or ours."""
    from agentrl.observe.blocked import is_users

    stack = b""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGUSR1)
    while select.select([reading], [], [], _POLL_S)[0] and (part := os.read(reading, 1 << 16)):
        stack += part
    frames = [tuple(part.decode(errors="replace") for part in frame) for frame in _FRAME.findall(stack)]
    own = [frame for frame in frames if is_users(frame[0])] or frames
    return f"; it was at {own[0][0]}:{own[0][1]}, in {own[0][2]}" if own else ""


def _end(child: int) -> None:
    """End the child and what it left in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _told(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
