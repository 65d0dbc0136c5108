"""Keeps a copy of a run on another disk up to date while the run is written: `agentrl run mirror`.

`Mirror` reads the run's directory and changes nothing in it; `RunCopy` writes the copy, here or, as a Ray actor, on
another node. A copy consists of two directories, `.NAME.0` and `.NAME.1`, and a link `NAME` to the complete one: a
round brings the other one up to date, syncs it, and moves the link. So the link always leads to a run that can be
read and resumed, even if a process is killed; the copy lacks the data written since its round began.

The order of a round yields a state that the run itself could have left: checkpoints, then a snapshot of the control
log with the entries that it names, then the files that it names. Partials are left out: turns in flight are not
copied, and a resume samples them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.core.clock import SystemClock
from agentrl.core.errors import AgentRLError, InputError, JournalError, StorageError
from agentrl.core.files import LOCAL, open_regular, os_error_advice, refuse_links
from agentrl.journal.requests import REQUESTS_FILE
from agentrl.journal.routing import ROUTING
from agentrl.journal.run_process import ERROR_FILE, LOCK_FILE
from agentrl.journal.schema import CONTROL_FILE, open_database_to_read, open_database_to_write, read_meta_table
from agentrl.observe.run_state import MIRRORS_FILE

CALL_S = 120.0
"""Timeout for an answer of a node, in seconds."""
BLOCK_BYTES = 1 << 16
"""Size of the blocks in which changed files are compared and sent, in bytes."""
PIECE_BYTES = 4 << 20
"""Maximum number of bytes in one call."""
TRIES = 64
"""Maximum number of snapshots of the control log; one is discarded if a version was published while new entries were
read."""
ROUTING_DIRECTORY = f"journal/{ROUTING}"
MIRRORED_DIRECTORIES = ("checkpoints", "versions", "steps", "models", ROUTING_DIRECTORY)
"""Directories whose files never change after they are written."""
LINK_DIRECTORIES = ("policies", "best")
"""Directories of links to versions."""
CONTROL = f"journal/{CONTROL_FILE}"

Stamp = tuple[int, int]
"""Size in bytes and time of the last change in nanoseconds; files with equal stamps count as equal."""
Row = tuple[Any, ...]


class CopiedPartition(NamedTuple):
    """Entries of a partition that a copy has."""

    newest: int
    """Largest id; 0 if there are no entries."""
    entries: int
    """Number of entries."""


class RunCopy:
    """A copy of a run on this machine's disk.

    Args:
        place: path of the link.
    """

    def __init__(self, place: str) -> None:
        self._link = Path(place).absolute()
        self._side = self._link
        """Directory that this round brings up to date."""
        self._other = self._link
        self._partitions: dict[str, sqlite3.Connection] = {}
        self._pruned: dict[Path, set[Row]] = {}
        """Pruned attempts, whose entries were deleted, by partition."""

    def begin(self, run: str) -> dict[str, Stamp]:
        """Begin a round. Returns the stamps of the files in the directory to bring up to date.

        Raises:
            InputError: the path is inside a run, or exists and is no mirror; the copy is of another run or was resumed.
            StorageError: the disk failed.
        """
        link = self._link
        while self._partitions:  # of a round that failed
            self._partitions.popitem()[1].close()
        parent = link.parent.resolve()
        if any((folder / CONTROL).exists() for folder in (parent, *parent.parents)):
            raise InputError(f"{link} is inside the directory of a run; mirror to a path outside")
        sides = [link.with_name(f".{link.name}.{number}") for number in (0, 1)]
        if link.exists() and not link.is_symlink():
            raise InputError(f"{link} exists and is not a mirror; choose another path")
        for side in sides:
            if (side / "journal" / LOCK_FILE).exists():
                raise InputError(f"{link}: this copy was resumed and is now a separate run; mirror to another path")
        if link.is_symlink():
            with contextlib.closing(open_database_to_read(link / CONTROL, "control")) as control:
                if (copied_run := read_meta_table(control).get("run")) != run:
                    raise InputError(f"{link}: this is a mirror of run {copied_run}, not of {run}; choose another path")
        old_copy = os.path.basename(os.readlink(link)) if link.is_symlink() else ""
        self._side, self._other = sides if old_copy == sides[1].name else sides[::-1]
        with _disk(link):
            (self._side / "journal").mkdir(parents=True, exist_ok=True, mode=0o700)
            os.chmod(self._side, 0o700)
            return {name: _stamp(self._side / name) for name in LOCAL.files(self._side)}

    def reuse(self, stamps: Mapping[str, Stamp]) -> list[str]:
        """Link unchanged files from the other directory. Returns the names of missing ones."""
        missing = []
        with _disk(self._link):
            for name, stamp in stamps.items():
                path, other_path = self._path_of(name), self._other / name
                # Unlink rather than write: the other directory may have a hard link to the same file.
                path.unlink(missing_ok=True)
                if other_path.is_file() and _stamp(other_path) == stamp:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.link(other_path, path)
                else:
                    missing.append(name)
        return missing

    def digests(self, name: str) -> list[bytes]:
        """Return the digests of the blocks of a file; empty if the file does not exist."""
        path = self._path_of(name)
        with _disk(path), contextlib.suppress(FileNotFoundError), open_regular(path) as file:
            return [hashlib.blake2b(block, digest_size=16).digest() for block in _blocks(file)]
        return []

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Write a part of a file."""
        path = self._path_of(name)
        with _disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                while data:  # a full disk takes only the beginning, and refuses the next call
                    written = os.pwrite(descriptor, data, offset)
                    data, offset = data[written:], offset + written
            finally:
                os.close(descriptor)

    def seal(self, name: str, stamp: Stamp) -> None:
        """Sync a file that is written completely."""
        size, mtime_ns = stamp
        path = self._path_of(name)
        self.write(name, 0, b"")  # an empty file has no pieces but must exist
        with _disk(path):
            os.truncate(path, size)
            LOCAL.sync(path)
            os.utime(path, ns=(mtime_ns, mtime_ns))

    def partition(self, name: str, run: str, pruned_rows: Sequence[Row]) -> CopiedPartition:
        """Delete the entries of pruned attempts from a partition. Returns the state of the remaining entries."""
        path = self._path_of(f"journal/{name}")
        if name not in self._partitions:
            self._partitions[name] = open_database_to_write(path, "turns", {"run": run}, run=run)
        connection = self._partitions[name]
        with _disk(path):
            pruned_here = self._pruned.setdefault(path, set())
            connection.executemany(
                "DELETE FROM entries WHERE episode = ? AND attempt = ?", set(pruned_rows) - pruned_here
            )
            pruned_here.update(pruned_rows)
            return CopiedPartition(*connection.execute("SELECT coalesce(max(id), 0), count(*) FROM entries").fetchone())

    def insert(self, name: str, rows: Sequence[Row]) -> None:
        """Add entries to a partition."""
        with _disk(self._path_of(f"journal/{name}")):
            connection = self._partitions[name]
            connection.execute("BEGIN")
            connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            connection.execute("COMMIT")

    def finish(self, names: Sequence[str], links: Mapping[str, str]) -> None:
        """Remove files that the run no longer has, and point the link to this directory."""
        names_to_keep = set(names)
        with _disk(self._link):
            while self._partitions:
                self._partitions.popitem()[1].close()
            for name in LOCAL.files(self._side):
                if name not in names_to_keep:
                    (self._side / name).unlink()
            for folder in LINK_DIRECTORIES:
                shutil.rmtree(self._side / folder, ignore_errors=True)
            for name, target in links.items():
                path = self._path_of(name)
                path.parent.mkdir(exist_ok=True)
                path.symlink_to(target)
            for folder, inner, files in os.walk(self._side, topdown=False):
                if inner or files or folder == str(self._side):
                    LOCAL.sync(Path(folder))
                else:
                    Path(folder).rmdir()
            new_link = self._link.with_name(f".{self._link.name}.link")
            new_link.unlink(missing_ok=True)
            new_link.symlink_to(self._side.name)
            os.replace(new_link, self._link)
            LOCAL.sync(self._link.parent)

    def _path_of(self, name: str) -> Path:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise InputError(f"{name!r} is outside the run's directory")
        return self._side / name


class MirrorRound(NamedTuple):
    """Duration and volume of one round of a mirror."""

    seconds: float
    sent: int
    """Bytes sent to the copy."""


class Mirror:
    """Brings a copy of a run up to date, round by round.

    Args:
        run: the run's directory.
        call: calls a method of the copy by name.

    Raises:
        InputError: the run is a server's.
    """

    def __init__(self, run: Path, call: Callable[..., Any]) -> None:
        if (run / "journal" / REQUESTS_FILE).exists():
            raise InputError(
                f"{run}: a mirror would lack the requests of this server's clients. Stop the server, and copy the "
                "directory"
            )
        self._run = run
        self._call = call
        self._sent = 0

    def round(self) -> MirrorRound:
        """Copy all changes since the last round.

        Raises:
            InputError: the copy is of another run, or was resumed.
            JournalError: a directory of the run is a symbolic link, or contains one that leads out of the run.
            StorageError: a disk failed, or steps are too fast to take a snapshot between two of them.
        """
        refuse_links(*(self._run / folder for folder in (*MIRRORED_DIRECTORIES, *LINK_DIRECTORIES)))
        clock = SystemClock()
        began, self._sent = clock.monotonic(), 0
        with (
            _disk(self._run),
            tempfile.TemporaryDirectory(prefix="agentrl-mirror-") as scratch,
            contextlib.closing(open_database_to_read(self._run / CONTROL, "control")) as control,
        ):
            run = read_meta_table(control)["run"]
            had: dict[str, Stamp] = self._call("begin", run)
            target = Path(scratch) / CONTROL_FILE
            state_files = self._send_state(run, control, target, had)
            self._send(CONTROL, target)
        for folder in ("versions", "steps", "models", ROUTING_DIRECTORY, "."):
            state_files += self._send_all(folder, had)
        self._call("finish", [*state_files, CONTROL], self._links())
        return MirrorRound(clock.monotonic() - began, self._sent)

    # --- the journal --------------------------------------------------------------------------------------------------

    def _send_state(self, run: str, control: sqlite3.Connection, target: Path, had: dict[str, Stamp]) -> list[str]:
        """Send checkpoints and new entries, and write the control log that matches them into `target`. Returns their
        names.

        Newer entries are read within one snapshot of the control log. The snapshot is dropped if a version was
        published while they were read, because the control log would not contain it, or if entries were pruned: then
        checkpoints newer than the sent ones exist, unless one of those is still there.
        """
        pruned_rows: list[Row] | None = None
        newest: dict[str, int] = {}
        for _ in range(TRIES):
            now = control.execute("SELECT episode, attempt FROM pruned").fetchall()
            if pruned_rows is None or len(pruned_rows) < len(now):
                pruned_rows, newest = now, {name: self._send_entries(name, run, now) for name in self._partitions()}
            files = self._send_all("checkpoints", had)
            control.execute("BEGIN")
            try:
                counts = _control_log_counts(control)
                rows = {name: list(self._entries(name, run, newest.get(name, 0))) for name in self._partitions()}
                existing_files = [name for name in files if (self._run / name).exists()]
                with contextlib.closing(open_database_to_read(self._run / CONTROL, "control")) as new_control:
                    if (
                        _control_log_counts(new_control) != counts
                        or counts.pruned != len(pruned_rows)
                        or (files and not existing_files)
                    ):
                        continue
                with contextlib.closing(sqlite3.connect(target)) as copy:
                    control.backup(copy)
            finally:
                control.execute("ROLLBACK")
            for name in rows:
                self._call("partition", name, run, ())
                self._insert(name, rows[name])
            return [*existing_files, *(f"journal/{name}" for name in rows)]
        raise StorageError(
            f"{self._run}: {TRIES} attempts to read a consistent state failed, because versions or checkpoints were "
            "replaced while they were read; the copy's last complete state is intact"
        )

    def _partitions(self) -> list[str]:
        return sorted(path.name for path in (self._run / "journal").glob("turns-*.db"))

    def _entries(self, name: str, run: str, after: int) -> Iterator[Row]:
        with contextlib.closing(open_database_to_read(self._run / "journal" / name, "turns", run)) as source:
            yield from source.execute(
                "SELECT id, episode, attempt, call, asked, body, checksum FROM entries WHERE id > ? ORDER BY id",
                (after,),
            )

    def _send_entries(self, name: str, run: str, pruned_rows: Sequence[Row]) -> int:
        """Send the entries that the copy lacks. Returns the largest id."""
        copy = CopiedPartition(*self._call("partition", name, run, pruned_rows))
        newest = copy.newest
        if pruned_rows:  # pruned row ids are reused
            with contextlib.closing(open_database_to_read(self._run / "journal" / name, "turns", run)) as source:
                (count,) = source.execute("SELECT count(*) FROM entries WHERE id <= ?", (newest,)).fetchone()
                newest = newest if count == copy.entries else 0
        piece: list[Row] = []
        size = 0
        for row in self._entries(name, run, newest):
            newest = row[0]
            piece.append(row)
            size += len(row[5])
            if size >= PIECE_BYTES:
                self._insert(name, piece)
                piece, size = [], 0
        self._insert(name, piece)
        return newest

    def _insert(self, name: str, rows: Sequence[Row]) -> None:
        if rows:
            self._sent += sum(len(row[5]) for row in rows)
            self._call("insert", name, rows)

    # --- files --------------------------------------------------------------------------------------------------------

    def _send_all(self, folder: str, had: dict[str, Stamp]) -> list[str]:
        """Send the files of a folder that the copy lacks; `.` stands for the run's directory itself. Returns their
        names."""
        while True:
            stamps: dict[str, Stamp] = {}
            try:
                for path in self._files(folder):
                    stamps[str(path.relative_to(self._run))] = _stamp(path)
                new = {name: stamp for name, stamp in stamps.items() if had.get(name) != stamp}
                for name in self._call("reuse", new) if folder in MIRRORED_DIRECTORIES else new:
                    self._send(name, self._run / name)
                    had[name] = stamps[name]
            except FileNotFoundError:  # a checkpoint or version was removed during the copy
                continue
            return list(stamps)

    def _files(self, folder: str) -> Iterator[Path]:
        if folder == ".":
            yield from (
                path
                for path in (*self._run.glob("*.json*"), self._run / ERROR_FILE)
                if path.is_file() and not path.is_symlink() and path.name != MIRRORS_FILE
            )
            return
        for name in LOCAL.files(self._run / folder):
            if not any(part.startswith(".") for part in Path(name).parts):  # hidden directories are still being written
                yield self._run / folder / name

    def _send(self, name: str, path: Path) -> None:
        """Send the blocks of a file that differ from the copy."""
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            stamp = status.st_size, status.st_mtime_ns
            digests: list[bytes] = self._call("digests", name)
            piece, start = bytearray(), 0
            for number, block in enumerate(_blocks(file)):
                is_new = number >= len(digests) or hashlib.blake2b(block, digest_size=16).digest() != digests[number]
                if piece and (not is_new or len(piece) >= PIECE_BYTES):
                    self._write(name, start, bytes(piece))
                    piece.clear()
                if is_new:
                    start = start if piece else number * BLOCK_BYTES
                    piece += block
            if piece:
                self._write(name, start, bytes(piece))
        self._call("seal", name, stamp)

    def _write(self, name: str, offset: int, data: bytes) -> None:
        self._sent += len(data)
        self._call("write", name, offset, data)

    def _links(self) -> dict[str, str]:
        """Return the links to versions in the run's directory, with their targets; others are refused."""
        targets: dict[str, str] = {}
        for folder in LINK_DIRECTORIES:
            for path in (self._run / folder).glob("*"):
                if path.is_symlink():
                    target = targets[str(path.relative_to(self._run))] = os.readlink(path)
                    parts = Path(target).parts
                    if parts[:2] != ("..", "versions") or ".." in parts[2:]:
                        raise JournalError(
                            f"{path}: this link leads to {target}, but links here lead to versions of the run, such as "
                            "../versions/NAME/0.1; remove it"
                        )
        return targets


@contextlib.contextmanager
def open_run_copy(place: str, address: str) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls a method of a copy by name. A call to a node that was lost fails; the next one looks
    for a node with its address and continues there.

    Args:
        place: `PATH` on this machine, or `NODE:PATH`, where NODE is the address of a node of the cluster.
        address: of the cluster, as in `cluster.address`.

    Raises:
        InputError: no cluster answers at the address, or it has no such node.
    """
    node, colon, path = place.partition(":")
    if not colon or "/" in node:
        copy = RunCopy(place)
        yield lambda method, *arguments: getattr(copy, method)(*arguments)
        return
    if not path.startswith("/"):
        raise InputError(f"{place}: a path on another node must be absolute (start with /)")
    from agentrl.cluster.session import RaySession, node_scheduling_strategy, shorten_ray_error

    session = RaySession(address)
    session.start()
    import ray

    actor: Any = None

    def start() -> Any:
        nodes = session.nodes()
        target_node = next((candidate for candidate in nodes if candidate.address == node), None)
        if target_node is None:
            addresses = ", ".join(candidate.address for candidate in nodes)
            raise InputError(f"no node {node} in the cluster at {address}; there are: {addresses}")
        remote_copy: Any = ray.remote(
            num_cpus=0, max_restarts=0, scheduling_strategy=node_scheduling_strategy(target_node)
        )(RunCopy)
        return remote_copy.remote(path)

    def call(method: str, *arguments: object) -> Any:
        nonlocal actor
        try:
            actor = actor or start()
            return ray.get(getattr(actor, method).remote(*arguments), timeout=CALL_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AgentRLError):
                raise error.cause from None
            raise
        except ray.exceptions.GetTimeoutError:
            raise StorageError(f"node {node} did not answer within {CALL_S:g} s; the copy there is intact") from None
        except InputError as error:
            raise StorageError(f"{error}; the copy there is intact") from None
        except ray.exceptions.RayError as error:
            actor = None
            raise StorageError(
                f"node {node} was lost ({shorten_ray_error(error)}); the copy there is intact"
            ) from error

    try:
        actor = start()
        yield call
    finally:
        if actor is not None:
            ray.kill(actor)
        session.stop()


class ControlLogCounts(NamedTuple):
    """Numbers of versions and pruned attempts in a control log."""

    versions: int
    pruned: int


def _control_log_counts(control: sqlite3.Connection) -> ControlLogCounts:
    statement = "SELECT (SELECT count(*) FROM versions), (SELECT count(*) FROM pruned)"
    return ControlLogCounts(*control.execute(statement).fetchone())


def _stamp(path: Path) -> Stamp:
    status = path.lstat()
    return status.st_size, status.st_mtime_ns


def _blocks(file: Any) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Translate errors of the copy's disk into errors that name the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror or error}; {os_error_advice(error)}; the copy's last complete state is intact"
        ) from error
    except sqlite3.Error as error:
        raise JournalError(f"{path}: cannot be written ({error}); the copy's last complete state is intact") from error
