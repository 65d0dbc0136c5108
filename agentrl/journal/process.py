"""The process that leads a run: a lock while it lives, and a record of how it ended.

Each run, and each partition of its turns, has one writer, which holds an advisory lock that ends with its process,
however it ends. `process.json` in the run's directory is written when a process begins to lead the run, when episodes
begin to run in it, and when it ends. After `kill -9` it still has its last state: `running` without a holder of the
lock is a run that was killed, and `is_playing` without one is a death among its episodes. `standing` reads both for
displays; a resume reads the whole record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, Protocol, TypeVar

import msgspec

from agentrl.core import ids
from agentrl.core.errors import RunDirectoryError, StorageError
from agentrl.core.files import open_regular, read_at_most, remedy, replace_file
from agentrl.core.text import safe_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agentrl.core.clock import Clock
    from agentrl.core.records import EpisodeSpec, Purpose

T = TypeVar("T")

LOCK_FILE = "run.lock"
LOCK_WAIT_S = 30
"""Longest time, in seconds, that a process may take to release a partition: a worker that Ray started survives a killed
run by some seconds, in which it plays and writes on."""
_held: weakref.WeakSet[RunLock] = weakref.WeakSet()

PROCESS_FILE = "process.json"
MAX_RECORD_BYTES = 16 << 20
_BOOT = os.urandom(4).hex()
"""Process ids are used again, in containers by the very next process."""

State = Literal["", "running", "finished", "stopped", "failed", "unknown"]
"""The state of the process: `stopped` by Ctrl-C or SIGTERM, `failed` with an error, `unknown` where the record cannot
be read. Empty: no process ever led the run, as after an import."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A record that counts beyond it is none of ours."""


class RunLock:
    """Holds a file of a run's directory from construction to `release`; the file names the holder's process id."""

    def __init__(self, directory: Path, name: str = LOCK_FILE) -> None:
        """Take the lock.

        Raises:
            RunDirectoryError: a live process holds it; the message names its id.
            StorageError: the file cannot be made or written.
        """
        path = directory / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened ({error.strerror}); {remedy(error)}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise RunDirectoryError(
                f"{directory}: process {holder} is writing this run; "
                "wait for it, stop it, or give the new run another name"
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise StorageError(f"{path}: cannot be written ({error.strerror}); {remedy(error)}") from error
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def writer_of(directory: Path) -> int | None:
    """The live process that writes a run, found without touching its lock; None: none that is seen from here.

    Inodes are numbered by device, and overlay file systems report another device than the kernel's list of locks: a
    lock of the same inode is this one if its device is the same too, or its holder the process that the file names.
    """
    try:
        with open_regular(directory / LOCK_FILE) as file:
            found, named = os.fstat(file.fileno()), _holder(file)
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    for line in locks:  # such as `7: FLOCK  ADVISORY  WRITE 4711 08:01:1311768 0 EOF`
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK":
            where, _, inode = words[5].rpartition(":")
            holder = int(words[4])
            if inode == str(found.st_ino) and (where == device or holder == named):
                return holder
    return None


def _holder(file: BinaryIO) -> int | None:
    """The process id that a lock file names; None: it names none."""
    named = file.read(32).strip()
    return int(named) if named.isdigit() and len(named) < 12 else None


def check_partitions(directory: Path) -> None:
    """Whether a worker of an earlier process of the run is still there.

    Raises:
        RunDirectoryError: one is; the message names its id.
    """
    for path in sorted(directory.glob("turns-*.lock")):
        RunLock(directory, path.name).release()


async def when_unlocked(take: Callable[[], T], tell: Callable[[str], None], clock: Clock) -> T:
    """The result of `take`, once the holder of the lock has released it.

    Args:
        take: raises `RunDirectoryError` until then.
        tell: receives a line for people if there is a wait.
        clock: times the waits.

    Raises:
        RunDirectoryError: the lock is held for longer than an ending process needs.
    """
    for waited in range(LOCK_WAIT_S):
        try:
            return take()
        except RunDirectoryError as error:
            if not waited:
                tell(f"{error}; it is given {LOCK_WAIT_S} s to end")
            await clock.sleep(1.0)
    return take()


def _forget_in_child() -> None:
    """A process forked from the holder holds nothing: it may outlive the run, and would keep others out of it."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)


# --- the record -------------------------------------------------------------------------------------------------------


class PlayedJournal(Protocol):
    """The parts of a run's journal that a record reads."""

    def unfinished(self, purpose: Purpose) -> Sequence[EpisodeSpec]:
        """Episodes of a purpose whose newest attempt has not ended."""
        ...

    def progress(self, episode_id: str, attempt: int) -> tuple[int, int]:
        """Number of entries and of partials of an attempt on disk."""
        ...

    def next_number(self, prefix: str) -> int:
        """The largest number of a root episode `<prefix><number>`, plus one."""
        ...


class EpisodeProgress(msgspec.Struct, frozen=True, array_like=True):
    """An unfinished episode's progress on disk, and the number of consecutive deaths of the process without any."""

    attempt: _Count
    entries: _Count
    partials: _Count
    deaths: _Count

    def is_beyond(self, since: EpisodeProgress) -> bool:
        """Whether something new of the episode is on disk; the record of its start does not count."""
        return (self.attempt, max(self.entries, 1), self.partials) != (
            since.attempt,
            max(since.entries, 1),
            since.partials,
        )


class ProcessRecord(msgspec.Struct, kw_only=True):
    """`process.json`: the state of the process that leads a run, and the episodes it resumed."""

    state: State = ""
    """State of the newest process; still `running` after it was killed."""
    process: str = ""
    """The newest process in which episodes ran; all that follows is of it."""
    is_playing: bool = False
    """Whether episodes run in it. Where it has ended, it died under them."""
    fault: str = ""
    """The fault of an environment that broke the process, as a sentence; empty if none is known."""
    workers: _Count = 1
    """Worker processes of the run; 1: episodes ran in the process itself."""
    has_killer: bool = False
    """An episode killed a worker process or broke the event loop: the next one will not run in the run's process."""
    episodes: dict[str, EpisodeProgress] = {}
    """Unfinished training episodes, by id."""
    evaluated: dict[str, _Count] = {}
    """Consecutive deaths by id of a held-out task; evaluations start over at each start."""
    next_evaluation: _Count = 0
    """Number of the first evaluation episode since this start."""
    machine: str = ""
    """The boot and the process-id namespace that the newest process runs in: only there its id means anything."""

    @staticmethod
    def read(run: Path) -> ProcessRecord:
        """Read the record of a run; an empty one if there is none.

        One that cannot be read is taken for the worst that it may have said, since how often episodes killed their
        process is lost with it: the process died under its episodes, and one of them may do so again.
        """
        path = run / PROCESS_FILE
        try:
            with open_regular(path) as file:
                return msgspec.json.decode(read_at_most(file, MAX_RECORD_BYTES), type=ProcessRecord)
        except FileNotFoundError:
            return ProcessRecord()
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            why = error.strerror if isinstance(error, OSError) else error
            fault = f"nobody knows how, since {path} cannot be read ({safe_line(str(why))[:200]})"
            return ProcessRecord(state="unknown", is_playing=True, fault=fault, has_killer=True)

    def write(self, run: Path) -> None:
        """Write the record, whole or not at all.

        Raises:
            StorageError: the disk refused.
        """
        path = run / PROCESS_FILE
        try:
            replace_file(path, msgspec.json.encode(self))
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be written ({error.strerror}); make room or permission there"
            ) from error

    @property
    def is_of_this_process(self) -> bool:
        """Whether the newest episodes ran in the calling process."""
        return self.process == _this_process()

    def running(self, unfinished: Callable[[Purpose], Sequence[EpisodeSpec]]) -> list[EpisodeSpec]:
        """Episodes that had not ended when the process did; parents stay with their children.

        Args:
            unfinished: returns the unfinished episodes of a purpose, as the journal has them.
        """
        evaluations = unfinished("evaluate")
        return [
            *unfinished("train"),
            *(spec for spec in evaluations if ids.root_number(spec.episode_id) >= self.next_evaluation),
        ]

    def next(self, journal: PlayedJournal) -> ProcessRecord:
        """The record of a process that resumes the run; it is written when its episodes start."""
        is_death = self.is_playing and self.workers == 1
        episodes, evaluated = dict[str, EpisodeProgress](), dict[str, int]()
        for spec in self.running(journal.unfinished):
            if spec.purpose == "evaluate":
                evaluated[spec.task.id] = self.evaluated.get(spec.task.id, 0) + 1
                continue
            now = EpisodeProgress(spec.attempt, *journal.progress(spec.episode_id, spec.attempt), 0)
            before = self.episodes.get(spec.episode_id)
            deaths = 0 if before is None or now.is_beyond(before) else before.deaths
            episodes[spec.episode_id] = msgspec.structs.replace(now, deaths=deaths + is_death)
        return ProcessRecord(
            state="running",
            process=_this_process(),
            is_playing=True,
            has_killer=self.has_killer,
            episodes=episodes,
            evaluated=evaluated if is_death else {},
            next_evaluation=journal.next_number("v"),
            machine=_machine(),
        )

    def deaths(self, spec: EpisodeSpec) -> int:
        """Number of consecutive processes that died while an unfinished episode ran in them without progress."""
        if spec.purpose == "evaluate":
            return self.evaluated.get(spec.task.id, 0)
        progress = self.episodes.get(spec.episode_id)
        return 0 if progress is None else progress.deaths


def record_state(run: Path, state: State) -> None:
    """Record the state of the process that leads a run; the rest of the record stays.

    Raises:
        StorageError: writing failed.
    """
    msgspec.structs.replace(ProcessRecord.read(run), state=state).write(run)


@contextlib.contextmanager
def leading(run: Path) -> Iterator[None]:
    """Record that this process leads a run, and where an error ends the block, that the run `failed` or was `stopped`.

    Raises:
        StorageError: the disk refused at the beginning. At the end nothing is said: the run then counts as killed.
    """
    msgspec.structs.replace(ProcessRecord.read(run), state="running", machine=_machine()).write(run)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(StorageError):
            record_state(run, "failed" if isinstance(error, Exception) else "stopped")
        raise


def standing(run: Path) -> str:
    """The state of a run: a `State`, or `killed`. Reads the kernel's locks and a small file."""
    if writer_of(run / "journal") is not None:
        return "running"
    state = ProcessRecord.read(run).state
    return "killed" if state == "running" else state


def is_writer_dead(run: Path) -> bool:
    """Whether the process that last led a run is known to have ended; False where it may live on another machine."""
    try:
        with open_regular(run / "journal" / LOCK_FILE) as file:
            holder = _holder(file)
    except OSError:
        return False
    machine = _machine()
    if holder is None or not machine or ProcessRecord.read(run).machine != machine:
        return False
    try:
        status = Path(f"/proc/{holder}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return isinstance(error, FileNotFoundError | ProcessLookupError)
    return status.rpartition(")")[2].split()[:1] in (["Z"], ["X"])  # it has ended, and its parent has not looked yet


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, ValueError):
        return ""


def _this_process() -> str:
    return f"{os.getpid()} {_BOOT}"
