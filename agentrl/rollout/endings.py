"""`sys.exit`, `os._exit` or a bare `BaseException` in an environment ends its episode, not the process.

Thousands of episodes share a process, and none of them may end it. `none_ends_the_process` replaces `os._exit` while it
is entered. An abort or a crash of a library below Python is not seen here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from agentrl.core.errors import EpisodeError
from agentrl.environment.base import described

leave = os._exit
"""The original `os._exit`, which ends this process at once."""
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Event loops that run episodes."""
_is_child = False
"""Whether this process was forked while an event loop ran episodes."""


@contextlib.contextmanager
def none_ends_the_process() -> Iterator[None]:
    """Make `os._exit` raise in this process. One that is forked from it ends as it asks to, and at the latest where it
    comes back into the running event loop, whose connections are its parent's."""
    owner, before = os.getpid(), os._exit
    _loops.add(asyncio.get_running_loop())

    def refuse(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        code = sys._getframe(1)
        raise EpisodeError(
            f"os._exit({status}) was called at {code.f_code.co_filename}:{code.f_lineno} in {code.f_code.co_name}: "
            "it would have ended every episode of the process; raise an exception",
            reason="environment_error",
        )

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = before
        _loops.discard(asyncio.get_running_loop())


def of_the_episode(error: BaseException, task: asyncio.Task[Any] | None) -> BaseException:
    """An error of an environment's program as one that ends only its episode.

    Cancellations stay as they are. A `KeyboardInterrupt` is not Ctrl-C: that is a signal the run handles itself. A
    `GeneratorExit` while the program's task does not run is not the program's: Python closes a coroutine whose event
    loop has ended, and it must end.

    Args:
        error: the raised error.
        task: the task that the program runs in.
    """
    is_closed = isinstance(error, GeneratorExit) and _current_task() is not task
    if isinstance(error, Exception | asyncio.CancelledError) or is_closed:
        return error
    ended = EpisodeError(f"run() raised {described(error)}; raise an exception", reason="environment_error")
    ended.__cause__ = error
    return ended


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


def end_if_forked() -> None:
    """End a process that an environment forked, and that has come back from its code: all it could do here would be
    done to its parent's files and connections."""
    if _is_child:
        os.write(2, b"agentrl: a process that an environment forked came back from its code, and was ended\n")
        leave(1)


def _forked() -> None:
    global _is_child
    _is_child = bool(_loops)
    for loop in _loops:
        loop._ready.appendleft(asyncio.Handle(end_if_forked, (), loop))  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forked)
