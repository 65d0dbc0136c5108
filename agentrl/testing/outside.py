"""What an environment's own code does to the outside world, seen through Python's audit events while it is checked.

Only code that is run again on re-execution counts: `run()`, tools that are not external, `replay` resources. Effects,
external tools and other resources may do as they like. C extensions that raise no audit event are not seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentrl.environment.base import valid_unicode
from agentrl.rollout.branches import branch_inside

if TYPE_CHECKING:
    from types import FrameType

_STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn"}
_TALKS = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"}
_CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = (os.path.dirname(os.__file__) + os.sep, "<frozen")

_watching: dict[tuple[str, str], str] | None = None
_installed = False


@contextmanager
def seen_outside() -> Iterator[list[str]]:
    """Within: environments are watched; what they did is in the list afterwards, in words."""
    global _watching, _installed
    if not _installed:
        sys.addaudithook(_hook)  # it cannot be removed, and costs next to nothing while nobody watches
        _installed = True
    found: list[str] = []
    _watching = {}
    try:
        yield found
    finally:
        found += _watching.values()
        _watching = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is None:
        return
    act = _act(event, arguments)
    if act is None:
        return
    branch = branch_inside()
    if branch is None or not branch.is_open or branch.memoised is not None:
        return
    place = _place(sys._getframe(1))
    if place is not None:
        _watching.setdefault(
            (event, place),
            f"{place} {act}, and would again on re-execution; make it an external tool (`@tool(external=True)`), "
            "`ctx.effect`, or a `snapshot` or `pinned` resource",
        )


def _act(event: str, arguments: tuple[Any, ...]) -> str | None:
    """What an audit event means, in words; None where it changes nothing outside."""
    if event == "open":
        path, mode, flags = arguments
        writes = bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool((flags or 0) & _WRITING)
        name = valid_unicode(os.fsdecode(path)) if isinstance(path, str | bytes) else ""
        if not writes or not name or name == os.devnull or "__pycache__" in name:
            return None
        return f"opens {name!r} for writing"
    if event == "sqlite3.connect":
        return None if arguments[0] in (":memory:", "") else f"opens the database {str(arguments[0])!r}"
    if event in _STARTS:
        return f"starts a process ({event})"
    if event in _TALKS:
        return f"uses the network ({event})"
    return f"changes files ({event} {str(arguments[0])!r})" if event in _CHANGES else None


def _place(frame: FrameType | None) -> str | None:
    """The nearest code that is neither Python's nor ours; None where there is none: not the environment's doing."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and (not file.startswith(_PYTHON) or "site-packages" in file):
            return f"{frame.f_code.co_qualname} ({os.path.basename(file)}:{frame.f_lineno})"
        frame = frame.f_back
    return None
