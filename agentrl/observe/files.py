"""Writing what lies in a run directory, where others may have put something in the way.

A run directory may come from somebody else: a link, pipe or device under the name of a file of ours is never written
through. Owns nothing; raises `OSError`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO
    from pathlib import Path

_OPENED = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, readable by its owner alone; what lay there before is replaced.

    Raises:
        OSError: it cannot be written; what lay there is as it was.
    """
    partial = path.with_name(f".{path.name}")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_EXCL | _OPENED, 0o600), "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def open_lines(path: Path) -> FileIO:
    """Open a file of lines to append, unbuffered; a last line that was cut short by a kill is ended first.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | _OPENED, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        return os.fdopen(descriptor, "ab", buffering=0)  # nothing stays behind that a full disk refused
    except BaseException:
        os.close(descriptor)
        raise


def write_line(file: FileIO, record: Mapping[str, Any]) -> None:
    """Append a record as a line of JSON.

    Raises:
        OSError: the disk refused; what it took of the line is removed again.
    """
    line = (json.dumps(record) + "\n").encode()
    written = file.write(line)
    if written != len(line):  # a full disk takes the beginning, and refuses only the next call
        file.truncate(file.seek(0, os.SEEK_END) - (written or 0))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
