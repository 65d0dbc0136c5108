"""Expert routing beside the journal: a file per turn, named by its digest in the turn's entry.

The routing of a mixture of experts has 30 times as many bytes as everything else about a token. So it is written where
it arises, by the episode's worker, and read by the rank that trains it; neither the journal's receiver nor its readers
on the run's host handle it. On the run's host it lies in the journal's directory and is pruned with its attempt. On
another host it lies in a directory of that host, which keeps the newest (`HostRoutingStore`).

Files are written before their entry, and not synced: a killed process loses none, a power cut may. A lost or damaged
file costs replay, not the turn: the turn is trained through the experts that the trainer chooses, and counted
(`lost_routing`). Content is checked against the digest; names from a journal lead to no other directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentrl.core.errors import JournalError
from agentrl.core.files import CREATE_FLAGS, file_size, open_regular, refuse_links
from agentrl.core.text import escape_line
from agentrl.core.tokens import ExpertRouting, RoutingReference

if TYPE_CHECKING:
    from agentrl.core.records import Trajectory, Unit
    from agentrl.core.tokens import TrajectoryRow
    from agentrl.journal.entries import TurnEntry
    from agentrl.journal.port import TurnLog

ROUTING = "routing"
"""Directory of the files, inside the journal's."""
MAX_BYTES = 1 << 30
"""Maximum size of a file that is read."""
HOST_BYTES = 64 << 30
"""Size from which a host other than the run's removes its oldest files, for all runs together; also half of what the
disk could hold."""
CHECK_BYTES = 1 << 28
"""Number of bytes that a process writes between two looks at that size."""
_FOLDER = re.compile(r"[0-9a-f]{32}")

LostRouting = str
"""Reason why a routing cannot be read."""
ReadRouting = Callable[[Sequence[RoutingReference]], Sequence[bytes | LostRouting]]
"""Returns the content of each reference."""


def move_routing(turn: TurnEntry, log: TurnLog, episode_id: str, attempt: int) -> TurnEntry:
    """Store the routing of a turn beside the journal, if its log does that; returns the entry that names it."""
    routing = turn.tokens.columns.get("experts")
    reference = None if routing is None else log.store_routing(episode_id, attempt, routing)
    if reference is None:
        return turn
    columns = {name: column for name, column in turn.tokens.columns.items() if name != "experts"}
    return msgspec.structs.replace(
        turn, tokens=msgspec.structs.replace(turn.tokens, columns=columns), routing=reference
    )


# --- files ------------------------------------------------------------------------------------------------------------


class RoutingStore:
    """The files of one host.

    Args:
        directory: directory of the files; made with the first.
        host: address of the host; "" for the run's.
    """

    def __init__(self, directory: Path, host: str = "") -> None:
        self._directory = directory
        self._host = host
        self._has_failed = False

    @staticmethod
    def of_journal(journal: Path) -> RoutingStore:
        """Return the store of a journal's directory."""
        return RoutingStore(journal / ROUTING)

    def put(self, episode_id: str, attempt: int, routing: bytes) -> RoutingReference:
        """Write a file. An error is printed once; readers find the file missing."""
        reference = RoutingReference(hashlib.sha256(routing).digest(), _folder(episode_id, attempt), self._host)
        try:
            path = self._path(reference)
            self._make(path.parent)
            # A file of this name has the same content, or was cut off by the death of its writer.
            with open(os.open(path, os.O_WRONLY | os.O_TRUNC | CREATE_FLAGS, 0o600), "wb", buffering=0) as file:
                content = memoryview(routing)
                while content:
                    content = content[file.write(content) :]
        except (OSError, JournalError) as error:
            if not self._has_failed:
                sys.stderr.write(f"agentrl: {self._directory}: expert routing could not be written ({error})\n")
            self._has_failed = True
        return reference

    def read(self, references: Sequence[RoutingReference]) -> list[bytes | LostRouting]:
        """Read files; see `ReadRouting`."""
        return list(map(self._read, references))

    def remove(self, episode_id: str, attempt: int) -> None:
        """Remove all files of an attempt."""
        refuse_links(self._directory)
        shutil.rmtree(self._directory / _folder(episode_id, attempt), ignore_errors=True)

    def size(self, episode_id: str, attempt: int) -> int:
        """Return the bytes of an attempt's files."""
        refuse_links(self._directory)
        return _size(self._directory / _folder(episode_id, attempt))

    def _read(self, reference: RoutingReference) -> bytes | LostRouting:
        try:
            path = self._path(reference)
            refuse_links(path.parent.parent, path.parent)
            with open_regular(path) as file:
                if (size := file_size(file)) > MAX_BYTES:
                    return f"{path} has {size:,} bytes"
                content = file.read()
        except FileNotFoundError:
            return f"{path} does not exist"
        except (OSError, JournalError) as error:
            return f"{error}"
        return content if hashlib.sha256(content).digest() == reference.digest else f"{path} is damaged"

    def _path(self, reference: RoutingReference) -> Path:
        if not _FOLDER.fullmatch(reference.folder):
            raise JournalError(f"{reference.folder[:100]!r} is no directory of expert routing; the entry is damaged")
        if len(reference.digest) != hashlib.sha256().digest_size:
            raise JournalError("its digest has another length than a SHA-256; the entry is damaged")
        return self._directory / reference.folder / reference.digest.hex()

    def _make(self, folder: Path) -> None:
        for directory in (self._directory, folder):
            directory.mkdir(mode=0o700, exist_ok=True)
        refuse_links(self._directory, folder)


class HostRoutingStore(RoutingStore):
    """The files of a host other than the run's, for all runs of this user. The oldest are removed.

    Args:
        host: address of the host.
    """

    def __init__(self, host: str) -> None:
        super().__init__(Path(tempfile.gettempdir()) / f"agentrl-routing-{os.getuid()}", host)
        self._unchecked = CHECK_BYTES

    def put(self, episode_id: str, attempt: int, routing: bytes) -> RoutingReference:
        reference = super().put(episode_id, attempt, routing)
        self._unchecked += len(routing)
        if self._unchecked >= CHECK_BYTES:
            self._unchecked = 0
            threading.Thread(target=self.remove_oldest, name="remove old routing", daemon=True).start()
        return reference

    def remove_oldest(self, limit: int = HOST_BYTES) -> None:
        """Remove the attempts that were written to longest ago, until the rest fits the limit."""
        with contextlib.suppress(OSError, JournalError):  # another worker removes the same, or `put` said why
            self._check_private()
            folders = [folder for folder in self._directory.iterdir() if _FOLDER.fullmatch(folder.name)]
            folders.sort(key=lambda folder: folder.lstat().st_mtime)
            sizes = list(map(_size, folders))
            excess = sum(sizes) - min(limit, (sum(sizes) + shutil.disk_usage(self._directory).free) // 2)
            for folder, size in zip(folders, sizes, strict=True):
                if excess <= 0:
                    break
                shutil.rmtree(folder, ignore_errors=True)
                excess -= size

    def _make(self, folder: Path) -> None:
        super()._make(folder)
        self._check_private()

    def _check_private(self) -> None:
        """Refuse a directory or link that another user made: anyone may make names in /tmp."""
        refuse_links(self._directory)
        status = self._directory.lstat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise JournalError(f"{self._directory} belongs to another user, or others may enter it; remove it")

    def _read(self, reference: RoutingReference) -> bytes | LostRouting:
        answer = super()._read(reference)
        return f"on host {self._host}, {answer}" if isinstance(answer, str) else answer


def read_locally(journal: Path) -> ReadRouting:
    """Make a reader of the routing on the run's host."""
    store = RoutingStore.of_journal(journal)

    def read(references: Sequence[RoutingReference]) -> list[bytes | LostRouting]:
        local = iter(store.read([reference for reference in references if not reference.host]))
        return [f"host {reference.host[:100]} has it" if reference.host else next(local) for reference in references]

    return read


def _folder(episode_id: str, attempt: int) -> str:
    return hashlib.blake2b(f"{episode_id}\x1f{attempt}".encode(), digest_size=16).hexdigest()


def _size(folder: Path) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return 0


# --- rows -------------------------------------------------------------------------------------------------------------


class RoutingReader:
    """Completes rows with their routing; warns of the first that is lost.

    Args:
        read: reads the files.
    """

    def __init__(self, read: ReadRouting) -> None:
        self._read = read
        self._has_warned = False

    def attach(self, units: Sequence[Unit], episodes: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
        """Return the trajectories of each unit's episode with the routing of their rows, as far as it can be read."""
        rows = [row for episode in episodes for trajectory in episode for row in trajectory.rows]
        references = [recorded.reference for row in rows for recorded in row.recorded_routing]
        contents = iter(self._read(references) if references else ())
        completed: list[list[Trajectory]] = []
        for unit, episode in zip(units, episodes, strict=True):
            completed.append([])
            for trajectory in episode:
                name = f"episode {unit.episode_id}, {trajectory.seat}[{trajectory.index}]"
                attached = tuple(self._complete(row, contents, name) for row in trajectory.rows)
                completed[-1].append(replace(trajectory, rows=attached))
        return completed

    def _complete(self, row: TrajectoryRow, contents: Iterator[bytes | LostRouting], name: str) -> TrajectoryRow:
        if not row.recorded_routing:
            return row
        parts = [] if row.experts is None else [row.experts]
        for recorded in row.recorded_routing:
            try:
                routing = decode_routing(next(contents), recorded.end, plain=False)
                if any(part.rows.shape[1:] != routing.rows.shape[1:] for part in parts):
                    raise ValueError("it does not fit its row")
                parts.append(routing)
            except ValueError as error:
                self._warn(f"{name}, turn {recorded.turn}: its expert routing is lost: {error}")
        experts = ExpertRouting.of_stretches(stretch for part in parts for stretch in part.stretches())
        lost = len(row.recorded_routing) + (row.experts is not None) - len(parts)
        return msgspec.structs.replace(row, experts=experts, recorded_routing=(), lost_routing=lost)

    def _warn(self, line: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{escape_line(line)}. Such turns are trained through experts that the trainer chooses, and counted as "
                "lost_routing",
                stacklevel=2,
            )


def decode_routing(content: bytes | LostRouting, end: int, *, plain: bool) -> ExpertRouting:
    """Decode what `ReadRouting` returned; see `ExpertRouting.decode`.

    Args:
        content: the content of a file, or why there is none.
        end: length of the row after the turn.
        plain: see `ExpertRouting.decode`.

    Raises:
        ValueError: the routing is lost, damaged, or that of a longer row.
    """
    if isinstance(content, LostRouting):
        raise ValueError(content)
    routing = ExpertRouting.decode(content, plain=plain)
    if routing.end > end:
        raise ValueError("it does not fit its row")
    return routing
