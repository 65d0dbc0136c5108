"""Records of the files of a sandbox. A driver's own process imports them, so this uses the standard library only."""

from __future__ import annotations

from typing import NamedTuple

SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
"""PATH of commands, unless they are given another."""
_HOLES_BYTES = 48 << 20
"""Maximum size of holes in files that are read at once."""


class LinkTarget(bytes):
    """Target of a symbolic link, in place of a file's content."""


class Program(bytes):
    """Content of a file that is executable whatever it begins with."""


class FileRecord(NamedTuple):
    """A file of a sandbox, without its content."""

    path: str
    """Path below the sandbox's root, without the first slash."""
    kind: str
    """Kind: `file`, `directory`, `link`, `pipe`, `same` (another name of a file) or `none` (removed from the root)."""
    mode: int
    modified: int
    """Time of the last modification in nanoseconds, since build tools compare it; 0 unless it is a plain file."""
    size: int
    target: str
    """Target of a link, or of `same`; `opaque` for a directory that hides the root's."""


def contents_limit(disk_mb: int) -> int:
    """Return the maximum size of a sandbox's plain files: more than its disk holds, since files may have holes."""
    return (disk_mb << 20) + _HOLES_BYTES
