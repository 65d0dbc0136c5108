"""Keeps what environments do to their process from ending more than their episode.

`sys.exit` and bare `BaseException`s of a program become errors of its episode. A process that an environment forked is
ended once it leaves the environment's code: the files and connections of the event loop are its parent's. `os._exit`, a
signal or a crash does end the process; the resumed run names its episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

from agentrl.core.errors import EpisodeError
from agentrl.environment.base import described

_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Event loops that run episodes."""
_is_child = False
"""Whether this process was forked while an event loop ran episodes."""


@contextlib.contextmanager
def forks_ended() -> Iterator[None]:
    """Within: the running event loop runs episodes, and stops in a process that is forked from this one.

    Whoever runs the loop calls `end_if_forked` when it has stopped.
    """
    loop = asyncio.get_running_loop()
    _loops.add(loop)
    try:
        yield
    finally:
        _loops.discard(loop)


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
    """End this process, with exit code 1, if an environment forked it."""
    if _is_child:
        os.write(2, b"agentrl: a process that an environment forked came back from its code, and was ended\n")
        os._exit(1)


def _forked() -> None:
    global _is_child
    _is_child = bool(_loops)
    for loop in _loops:
        loop.stop()


os.register_at_fork(after_in_child=_forked)
