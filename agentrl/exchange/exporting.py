"""Exports episodes of a run as a file or a directory in another format, completely or not at all.

Owns the placement of an export. It is built beside its target, synced, and then renamed, so a killed process leaves no
partial export. An existing name is refused, and no link is followed.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agentrl.core.errors import InputError, StorageError
from agentrl.core.files import LOCAL, remedy, rename_durably
from agentrl.exchange.files import building
from agentrl.exchange.formats import EXPORTS
from agentrl.inspection.search import matches

if TYPE_CHECKING:
    from agentrl.inspection.reader import RunReader


class Selection(NamedTuple):
    """Episodes of a run to export."""

    reader: RunReader
    keys: list[tuple[str, int]]
    """Ids and attempts, in order of admission."""
    problems: list[str]
    """Unreadable data with its episode; filled by the writer."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an export."""

    format: str
    path: str
    episodes: int
    problems: list[str]
    """Problems of episodes that could be read only in part."""


def export(
    reader: RunReader,
    format: str,
    out: Path | None = None,
    *,
    where: str = "",
    match: str = "",
    force: bool = False,
) -> Exported:
    """Write the episodes that pass a filter and a search.

    Args:
        reader: reader of the run.
        format: one of `EXPORTS`.
        out: file or directory to create; by default in the run's directory.
        where: filter, as in `RunReader.episodes`.
        match: search term, as in `search.matches`.
        force: replace an existing file.

    Raises:
        InputError: no episode passes, the target exists, or the package that writes the format is not installed.
        StorageError: the run cannot be read, or the disk failed.
    """
    target = out or reader.path / EXPORTS[format].file
    _check(target, format, force=force)
    selection = Selection(reader, reader.keys(where, among=matches(reader, match) if match else None), [])
    if not selection.keys:
        raise InputError(f"{reader.path}: no episode matches the filter; `agentrl episode list` shows what there is")
    module, _, function = EXPORTS[format].write.partition(":")
    write = getattr(import_module(module), function)
    try:
        with building(target) as built:
            write(selection, built)
            _settle(built, target, format, force=force)
    except OSError as error:
        what = os.strerror(error.errno) if error.errno else str(error)
        raise StorageError(f"{target}: the export cannot be written ({what}); {remedy(error)}") from error
    return Exported(format=format, path=str(target), episodes=len(selection.keys), problems=selection.problems)


def _settle(built: Path, target: Path, format: str, *, force: bool) -> None:
    """Rename the finished export to its target."""
    try:
        if built.is_dir():
            _check(target, format)
            rename_durably(built, target)
            return
        LOCAL.sync(built)
        if force:
            os.replace(built, target)
        else:
            os.link(built, target)  # unlike a rename, a link never replaces a file
        LOCAL.sync(target.parent)
    except FileExistsError:  # created by someone else in the meantime
        _check(target, format)


def _check(target: Path, format: str, *, force: bool = False) -> None:
    """Refuse an existing target; with `force`, a file may replace a file or a link."""
    if target.name in ("", ".."):
        raise InputError(f"{target}: is a directory; give a path inside it with --out")
    if not os.path.lexists(target):
        return
    is_file = target.is_symlink() or target.is_file()
    may_replace = is_file and not EXPORTS[format].is_directory
    if not (force and may_replace):
        removable = is_file or target.is_dir()  # never remove a device
        mend = "use --force to replace it, or " if may_replace else "remove it, or " if removable else ""
        raise InputError(f"{target}: exists; {mend}name another place with --out")
