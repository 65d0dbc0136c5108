"""A disk in memory that crashes: what a process sees is not what a power cut leaves.

`SimDisk` is `agentrl.core.files.Disk` with a page cache. Operations are numbered from 1, those of a journal that shares
the disk (`SimJournal`) among them: operation k is the crash point at which k - 1 have happened. Writing
a file is two operations, so that a half-written one is seen; removing a tree is one for each name.

What a crash leaves is its fate:

| fate   | files                                                  | names (made, renamed, removed)             |
|--------|--------------------------------------------------------|--------------------------------------------|
| `kill` | all that was written; what was not synced still is not | the same                                   |
| `lost` | what was synced, and a torn piece of what was not      | those of synced directories                |
| `kept` | the same                                               | all: the file system got round to them     |
| `mixed`| the same                                               | of each directory, all or those synced     |

A transaction of a journal that was under way is undone by `kill`; with the others it may have landed, and nobody was
told. So the journal may know of files that are gone, and files may be there of which it does not know.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from agentrl.core.ids import random_stream

T = TypeVar("T")

Fate = Literal["kill", "lost", "kept", "mixed"]


class SimulatedCrashError(BaseException):
    """The process has ended, as far as the simulated disk is concerned. No handler of errors may survive it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong at an operation of a `SimDisk`.

    Example:
        >>> disk = SimDisk(faults=[Fault(operation=2, kind="full")])
        >>> disk.make_directory(Path("/run"))
        >>> disk.make_directory(Path("/run/checkpoints"))
        Traceback (most recent call last):
        OSError: [Errno 28] No space left on device: '/run/checkpoints'
    """

    operation: int
    kind: Literal["crash", "full", "broken"]
    """`crash`: nothing happens any more. `full`: no space left. `broken`: an input/output error."""


@dataclass(slots=True, eq=False)
class _File:
    content: bytes
    durable: bytes = b""


@dataclass(slots=True, eq=False)
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    durable: dict[str, _File | _Directory] = field(default_factory=dict)


_Node = _File | _Directory


class SimDisk:
    """See `agentrl.core.files.Disk`; paths are absolute, and `/` is there.

    Args:
        faults: what goes wrong, and when.

    Example:
        >>> disk = SimDisk(faults=[Fault(operation=4, kind="crash")])
        >>> try:
        ...     disk.write(Path("/state"), b"new"); disk.sync(Path("/state")); disk.sync(Path("/"))
        ... except SimulatedCrashError:
        ...     disk.after_crash("kill").names(Path("/")), disk.after_crash("lost").names(Path("/"))
        (['state'], [])
    """

    def __init__(self, *, faults: Iterable[Fault] = ()) -> None:
        self.operations = 0
        """How many have begun."""
        self.before: Callable[[int, str], None] | None = None
        """Called with number and name of each operation before it happens."""
        self.on_crash: Callable[[], None] | None = None
        """Called when the process ends."""
        self._faults = {fault.operation: fault for fault in faults}
        self._crashed = False
        self._root = _Directory()

    def operate(self, name: str, path: Path | None = None) -> None:
        """An operation is about to happen: count it, and let go wrong what is planned.

        Raises:
            SimulatedCrashError: it does not happen, and no later one does.
            OSError: it does not happen.
        """
        if self._crashed:
            raise SimulatedCrashError(f"{name} after the crash")
        self.operations += 1
        if self.before is not None:
            self.before(self.operations, name if path is None else f"{name} {path}")
        fault = self._faults.get(self.operations)
        if fault is None:
            return
        if fault.kind == "crash":
            self.crash()
        code = errno.ENOSPC if fault.kind == "full" else errno.EIO
        raise OSError(code, os.strerror(code), name if path is None else str(path))

    def plan(self, fault: Fault) -> None:
        """One more thing that goes wrong."""
        self._faults[fault.operation] = fault

    def crash(self) -> None:
        """End the process here: raise, now and at every later operation."""
        self._crashed = True
        if self.on_crash is not None:
            self.on_crash()
        raise SimulatedCrashError(f"at operation {self.operations}")

    def after_crash(self, fate: Fate, *, seed: int = 0) -> SimDisk:
        """The disk another process finds; this one stays as it is. `seed` draws where what was not synced is torn."""
        survivor = type(self)()
        root = (
            _copied(self._root, {}) if fate == "kill" else _cut(self._root, fate, random_stream("torn", seed).randrange)
        )
        assert isinstance(root, _Directory)
        survivor._root = root
        return survivor

    # --- Disk -------------------------------------------------------------------------------------------------------

    def make_directory(self, path: Path) -> None:
        """See `Disk.make_directory`."""
        parent = self._directory(path.parent)
        if path.name in parent.entries:
            raise _error(errno.EEXIST, path)
        self.operate("make directory", path)
        parent.entries[path.name] = _Directory()

    def write(self, path: Path, content: bytes) -> None:
        """See `Disk.write`; two operations."""
        parent = self._directory(path.parent)
        if path.name in parent.entries:
            raise _error(errno.EEXIST, path)
        self.operate("write half of", path)
        file = parent.entries[path.name] = _File(content[: len(content) // 2])
        self.operate("write the rest of", path)
        file.content = content

    def sync(self, path: Path) -> None:
        """See `Disk.sync`."""
        node = self._node(path)
        self.operate("sync", path)
        if isinstance(node, _File):
            node.durable = node.content
        else:
            node.durable = dict(node.entries)

    def rename(self, source: Path, target: Path) -> None:
        """See `Disk.rename`; within one directory."""
        parent, moved = self._directory(source.parent), self._node(source)
        if target.parent != source.parent:
            raise _error(errno.EXDEV, target)
        there = parent.entries.get(target.name)
        if isinstance(there, _File) or (there is not None and there.entries):
            raise _error(errno.ENOTEMPTY, target)
        self.operate("rename", target)
        del parent.entries[source.name]
        parent.entries[target.name] = moved

    def remove_tree(self, path: Path) -> None:
        """See `Disk.remove_tree`; one operation for each name, none where there is nothing."""
        try:
            node = self._directory(path)
            for name in sorted(node.entries):
                if isinstance(node.entries[name], _Directory):
                    self.remove_tree(path / name)
                else:
                    self.operate("remove", path / name)
                    del node.entries[name]
            self.operate("remove", path)
            del self._directory(path.parent).entries[path.name]
        except OSError:
            return

    def names(self, directory: Path) -> list[str]:
        """See `Disk.names`."""
        try:
            return sorted(self._directory(directory).entries)
        except OSError:
            return []

    def files(self, directory: Path) -> dict[str, int]:
        """See `Disk.files`."""
        try:
            entries = self._directory(directory).entries
        except OSError:
            return {}
        sizes = {}
        for name, node in entries.items():
            if isinstance(node, _File):
                sizes[name] = len(node.content)
            else:
                sizes.update({f"{name}/{below}": size for below, size in self.files(directory / name).items()})
        return dict(sorted(sizes.items()))

    def read(self, path: Path, *, limit: int) -> bytes:
        """See `Disk.read`."""
        node = self._node(path)
        if isinstance(node, _Directory):
            raise OSError(0, "not a regular file", str(path))
        if len(node.content) > limit:
            raise ValueError(f"{len(node.content)} bytes; at most {limit}")
        return node.content

    def digest(self, path: Path) -> str:
        """See `Disk.digest`."""
        return hashlib.sha256(self.read(path, limit=1 << 62)).hexdigest()

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """See `Disk.run_in_thread`: at once."""
        return work()

    def _node(self, path: Path) -> _Node:
        node: _Node = self._root
        for part in path.parts[1:]:
            if not isinstance(node, _Directory):
                raise _error(errno.ENOTDIR, path)
            if part not in node.entries:
                raise _error(errno.ENOENT, path)
            node = node.entries[part]
        return node

    def _directory(self, path: Path) -> _Directory:
        node = self._node(path)
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR, path)
        return node


def _copied(node: _Node, known: dict[int, _Node]) -> _Node:
    """A node as it is, visible and durable; what both name is one node in the copy too."""
    copy = known.get(id(node))
    if copy is None:
        if isinstance(node, _File):
            copy = known[id(node)] = _File(node.content, node.durable)
        else:
            copy = known[id(node)] = folder = _Directory()
            folder.entries = {name: _copied(below, known) for name, below in node.entries.items()}
            folder.durable = {name: _copied(below, known) for name, below in node.durable.items()}
    return copy


def _cut(node: _Node, fate: Fate, draw: Callable[[int], int]) -> _Node:
    """A node after a power cut; all of it is durable."""
    if isinstance(node, _File):
        content = node.content if node.durable == node.content else _torn(node.content, draw)
        return _File(content, content)
    are_kept = fate == "kept" or (fate == "mixed" and draw(2) == 1)
    names = node.entries if are_kept else node.durable
    entries = {name: _cut(below, fate, draw) for name, below in names.items()}
    return _Directory(entries, dict(entries))


def _torn(content: bytes, draw: Callable[[int], int]) -> bytes:
    """The first bytes of a file that was not synced; the rest is missing, or zero."""
    if not content:
        return content
    piece = content[: draw(len(content))]
    return piece.ljust(len(content), b"\0") if draw(2) else piece


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))
