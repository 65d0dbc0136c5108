"""What would end the process from within an episode ends that episode: `sys.exit`, `os._exit`, a bare `BaseException`.

Thousands of episodes share a process, and none of them may end it, least of all without a word. Owns `os._exit` while
`none_ends_the_process` is entered. What a library does below Python (an abort, a crash) it does not see.
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
"""Ends this process at once, for who means it."""
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""That play episodes."""
_is_child = False
"""This process was forked while they did."""


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
    """An error that came out of an environment's program, as one that ends no more than its episode.

    Cancellations are as they were. A `KeyboardInterrupt` is not Ctrl-C: that is a signal the run handles itself. A
    `GeneratorExit` while the program's task does not run is not the program's: Python closes a coroutine whose event
    loop has ended, and it must end.

    Args:
        error: what was raised.
        task: the one that the program runs in.
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
