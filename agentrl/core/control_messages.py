"""Live control of a run: the messages on the socket in its directory, and the record of what was asked.

`app.control` answers them in the run's process, `cli.control` sends them.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from agentrl.core.masking import mask_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOCKET = "control.sock"
MAX_PATH_BYTES = 108
"""Length of a socket's path, with its final zero, in Linux."""
MAX_BYTES = 1 << 16
"""Maximum length of a request or a reply."""
MAX_ACTIONS = 500
"""Number of actions that a run records; the oldest pauses, resumes and drains are dropped first."""
CONTROLS = "controls"
"""Key of the recorded actions in `RunLog.info`."""

Act = Literal["pause", "resume", "drain", "set"]
Text = Annotated[str, msgspec.Meta(max_length=1000)]


class ControlRequest(msgspec.Struct, frozen=True):
    """A request: one line of JSON."""

    act: Act
    setting: Text = ""
    """`key=value`, for `set`."""


class ControlReply(msgspec.Struct, frozen=True):
    """The answer: one line of JSON."""

    done: bool
    text: str
    """What was done, or why not, for people."""


class ControlAction(msgspec.Struct, frozen=True):
    """An action as the journal records it."""

    at: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
    """Seconds since the epoch."""
    who: Text
    """User, host and process."""
    act: Act
    path: tuple[Text, ...] = ()
    """Keys of the setting, for `set`."""
    before: Any = None
    now: Any = None
    configured: Any = None
    """Value of the setting in the configuration of the run's start, without its command line."""

    @property
    def text(self) -> str:
        """Return the action without its time."""
        before, now = (mask_secrets(value, ".".join(self.path)) for value in (self.before, self.now))
        change = f" {'.'.join(self.path)} = {now!r} (was {before!r})" if self.path else ""
        return f"{self.act}{change} by {self.who}"

    @property
    def line(self) -> str:
        """Return the action as one line, with its time."""
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.at))}: {self.text}"


def read_actions(info: Mapping[str, Any]) -> list[ControlAction]:
    """Return the actions in a run's info, in order, without unreadable ones."""
    recorded = info.get(CONTROLS)
    actions = []
    for data in recorded[-MAX_ACTIONS:] if isinstance(recorded, list) else ():
        try:
            actions.append(msgspec.convert(data, ControlAction))
        except (msgspec.ValidationError, RecursionError):
            continue
    return actions


@contextmanager
def short_socket_path(run: Path) -> Iterator[str]:
    """Give a path of a run's socket that is short enough for the kernel, however long the run's is."""
    path = os.path.abspath(run / SOCKET)
    if len(os.fsencode(path)) < MAX_PATH_BYTES:
        yield path
        return
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user of the other end of a Unix socket, from the kernel."""
    size = struct.calcsize("3i")
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return process, user
