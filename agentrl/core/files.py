"""Opening files that others may have put there: a run directory may come from anyone.

Owns nothing. A file opened here is a regular one: no device, pipe or link that never ends or leads elsewhere.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read.

    Raises:
        OSError: it is missing, a symbolic link, a device, a pipe or a directory, or may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not wait
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def size_of(file: BufferedReader) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size
