"""Foreign code in a child process, which may crash, exit, fork or hang."""

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
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NoReturn

from agentrl.core.clock import SystemClock
from agentrl.core.errors import is_user_code

LONGEST_S = 600.0
"""Time limit of an answer, in seconds since the last one or the last progress."""
_POLL_S = 0.2
_FRAME = re.compile(rb'File "(.*)", line (\d+) in (.*)')
_END = b"end"
"""Line after the last answer."""
_PROGRESS = b""
"""Line that restarts the time limit."""
_send: Callable[[bytes], None] | None = None
"""Sends a line to the parent; None if this is no child."""


def report_progress() -> None:
    """Restart the time limit of the next answer, from the code in a child; in other processes, do nothing.

    Only its main thread can: other threads may run while code blocks it without end.
    """
    if _send is not None and threading.current_thread() is threading.main_thread():
        _send(_PROGRESS)


def run_in_forked_child(call: Callable[[], Any], *, longest_s: float = LONGEST_S) -> tuple[Any, str]:
    """Call foreign code in a child process, and return its value; see `answers_from_forked_child`.

    Returns:
        The value of `call`; and the reason if there is no value, else "".
    """

    def answers() -> Iterator[Any]:
        yield call()

    with contextlib.closing(answers_from_forked_child(answers, longest_s=longest_s)) as received:
        return next(received)


def answers_from_forked_child(
    answers: Callable[[], Iterable[Any]], *, longest_s: float = LONGEST_S
) -> Generator[tuple[Any, str]]:
    """Run foreign code in a child process, and yield its answers as they come.

    The child and its process group end with this process in any case. Output of the code goes to standard error; its
    standard input is empty. This is not a sandbox: the code runs with the caller's rights. Call it while the process
    has one thread, because the child is a fork.

    Args:
        answers: returns JSON data, one by one.
        longest_s: seconds without an answer or `report_progress` after which the child is killed.

    Yields:
        An answer and ""; or, once and as the last, None and the reason why there are no more.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    life, parent_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.close(parent_end)
        _answer(answers, write_end, life)
    os.close(write_end)
    os.close(life)
    content = b""
    try:
        while True:
            code, content = _read_line(child, read_end, longest_s, content)
            line, newline, content = content.partition(b"\n")
            if line == _END and newline:
                return
            if line == _PROGRESS and newline:
                continue
            if not newline:
                if code is None:
                    yield None, f"it made no progress within {longest_s:g} s{_whereabouts(child, read_end)}"
                else:
                    yield None, f"its process ended ({_exit_words(code)}) before it could answer"
                return
            value, problem = json.loads(line)
            yield value, problem
    finally:
        _end(child)
        os.close(read_end)
        os.close(parent_end)


def _answer(answers: Callable[[], Iterable[Any]], write_end: int, life: int) -> NoReturn:
    """Send the answers, and exit, in the child."""
    me = os.getpid()
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, write_end, all_threads=False)
    with contextlib.suppress(OSError, ValueError):  # in tests, streams have no file descriptor
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    encode = json.JSONEncoder().encode  # made before the code under test can patch `json`

    def send(line: bytes) -> None:
        sys.stdout.flush()  # flush the child's output before the parent kills it
        content = line + b"\n"
        while content and os.getpid() == me:  # a process that the code forked must not answer
            content = content[os.write(write_end, content) :]

    global _send
    _send = send
    try:
        for value in answers():
            send(encode((value, "")).encode())
    except BaseException as error:  # noqa: BLE001 - foreign code: any exception is the answer
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error}".removesuffix(": ")
        send(encode((None, f"it was ended by {message} ({frame.filename}:{frame.lineno}, in {frame.name})")).encode())
    send(_END)
    os._exit(0)


def _end_with_parent(life: int) -> None:
    os.read(life, 1)  # nothing is ever written, so this returns when the parent closes its end
    os.killpg(0, signal.SIGKILL)


def _read_line(child: int, read_end: int, longest_s: float, content: bytes) -> tuple[int | None, bytes]:
    """Return the child's exit code (None while it lives), and its output with a whole line, or up to its end or the
    deadline."""
    clock = SystemClock()
    deadline = clock.monotonic() + longest_s
    while b"\n" not in content and clock.monotonic() < deadline:
        # Look first: output written before the exit is then in the pipe. The child is waited for at the end.
        exit = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        while select.select([read_end], [], [], 0.0 if exit else _POLL_S)[0] and (part := os.read(read_end, 1 << 16)):
            content += part
            if b"\n" in content:
                return None, content
        if exit:
            return exit.si_status if exit.si_code == os.CLD_EXITED else -exit.si_status, content
    return None, content


def _whereabouts(child: int, read_end: int) -> str:
    """Return the innermost line of user code in a child that does not end."""
    stack = b""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGUSR1)
    while select.select([read_end], [], [], _POLL_S)[0] and (part := os.read(read_end, 1 << 16)):
        stack += part
    frames = [tuple(part.decode(errors="replace") for part in frame) for frame in _FRAME.findall(stack)]
    user_frames = [frame for frame in frames if is_user_code(frame[0])] or frames
    return f"; it was at {user_frames[0][0]}:{user_frames[0][1]}, in {user_frames[0][2]}" if user_frames else ""


def _end(child: int) -> None:
    """End the child and the rest of its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
