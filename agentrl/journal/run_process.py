"""The main process of a run: a lock while it lives, and a record of its end.

Each run, and each partition of its turns, has one writer, which holds an advisory lock that ends with its process.
`process.json` in the run's directory is written when a process begins to lead the run, when episodes begin to run in
it, and when it ends. After `kill -9` it still holds the last state: `running` without a lock holder means that the run
was killed, and `is_playing` without one that the process died while episodes ran. `read_process_state` reads both for
displays; a resume reads the whole record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import traceback
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, Protocol, TypeVar

import msgspec

from agentrl.core.errors import AgentRLError, RunDirectoryError, StorageError, format_foreign_error
from agentrl.core.files import open_regular, os_error_advice, read_at_most, replace_file, resume_advice
from agentrl.core.masking import mask_text
from agentrl.core.text import escape_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agentrl.core.clock import Clock
    from agentrl.core.records import EpisodeSpec, Purpose

T = TypeVar("T")

LOCK_FILE = "run.lock"
LOCK_WAIT_S = 30
"""Seconds that a process may take to release a partition: a worker that Ray started outlives a killed run by some
seconds, in which it still writes."""
_open_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()

PROCESS_FILE = "process.json"
ERROR_FILE = "error.txt"
"""The error that ended the newest process of a run, with its traceback if it is no error of agentrl's own."""
MAX_RECORD_BYTES = 16 << 20
MAX_SENTENCE = 500
"""Maximum number of characters of a failure that displays show."""
NAMED = 16
"""Maximum number of episodes that a message names; it only counts the rest."""
_BOOT = os.urandom(4).hex()
"""Random id of this process: process ids are reused, in containers by the very next process."""

State = Literal["", "running", "finished", "stopped", "failed", "unknown"]
"""State of the main process: `stopped` by Ctrl-C or SIGTERM, `failed` with an error, `unknown` if the record cannot be
read. Empty: no process ever led the run, as after an import."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Bounded count: a larger one marks a record as invalid."""


class RunLock:
    """Holds a run, or a partition, from construction to `release`; its lock file names the holder's process id.

    A run is locked by its journal's directory: a lock file may be deleted, and a second writer would make another one.
    """

    def __init__(self, directory: Path, name: str = LOCK_FILE) -> None:
        """Take the lock.

        Raises:
            RunDirectoryError: a live process holds it; the message names its id.
            StorageError: the lock cannot be taken, or the file cannot be created or written.
        """
        path = directory / name
        try:
            descriptor = file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if name == LOCK_FILE:
                descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened ({error.strerror}); {os_error_advice(error)}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            os.close(descriptor)
            raise RunDirectoryError(
                f"{directory}: process {find_writing_process(directory, name) or 'unknown'} is writing this run; wait "
                "for it, stop it, or give the new run another name"
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise StorageError(f"{path}: cannot be locked ({error.strerror}); {os_error_advice(error)}") from error
        finally:
            if file != descriptor:
                os.close(file)
        self._descriptor = descriptor
        _open_locks.add(self)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child forked just now still has a copy of the descriptor
            self.close()

    def close(self) -> None:
        """Close the descriptor; another process that has a copy of it keeps the lock. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def find_writing_process(directory: Path, name: str = LOCK_FILE) -> int | None:
    """Find the live process that holds the lock of a run or a partition, without touching the lock; None if there is
    none on this machine.

    Overlay file systems report another device than the kernel's list of locks. A listed lock with the same inode is
    therefore this one if its device is the same too, or if its holder is the process that the file names.
    """
    try:
        lock_stat, holder_id = (directory if name == LOCK_FILE else directory / name).stat(follow_symlinks=False), None
        with contextlib.suppress(FileNotFoundError), open_regular(directory / name) as file:
            holder_id = _holder(file)
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    device = f"{os.major(lock_stat.st_dev):02x}:{os.minor(lock_stat.st_dev):02x}"
    for line in locks:  # such as `7: FLOCK  ADVISORY  WRITE 4711 08:01:1311768 0 EOF`
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK":
            device_id, _, inode = words[5].rpartition(":")
            holder = int(words[4])
            if inode == str(lock_stat.st_ino) and (device_id == device or holder == holder_id):
                return holder
    return None


def _holder(file: BinaryIO) -> int | None:
    """Return the process id that a lock file names; None if it names none."""
    text = file.read(32).strip()
    return int(text) if text.isdigit() and len(text) < 12 else None


def check_partitions_unlocked(directory: Path) -> None:
    """Check that no worker of an earlier process of the run still holds a partition.

    Raises:
        RunDirectoryError: a worker does; the message names its process id.
    """
    for path in sorted(directory.glob("turns-*.lock")):
        RunLock(directory, path.name).release()


async def retry_until_writer_exits(take: Callable[[], T], tell: Callable[[str], None], clock: Clock) -> T:
    """Call `take` until the holder of the lock has released it, and return its result.

    Args:
        take: takes the lock; raises `RunDirectoryError` while it is held.
        tell: receives a line for people if there is a wait.
        clock: times the waits.

    Raises:
        RunDirectoryError: the lock was not released in `LOCK_WAIT_S`.
    """
    for elapsed_s in range(LOCK_WAIT_S):
        try:
            return take()
        except RunDirectoryError as error:
            if not elapsed_s:
                tell(f"{error}; it is given {LOCK_WAIT_S} s to end")
            await clock.sleep(1.0)
    return take()


def _forget_in_child() -> None:
    """Drop the locks in a forked child, which may outlive the run and would keep other processes out of it."""
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)


# --- the record -------------------------------------------------------------------------------------------------------


class EpisodeProgressReader(Protocol):
    """The parts of a run's journal that a record reads."""

    def unfinished(self, purpose: Purpose) -> Sequence[EpisodeSpec]:
        """Return the episodes of a purpose whose newest attempt has not ended."""
        ...

    def progress(self, episode_id: str, attempt: int) -> tuple[int, int]:
        """Return the number of entries and of partials of an attempt on disk."""
        ...


class EpisodeProgress(msgspec.Struct, frozen=True, array_like=True):
    """An unfinished episode's progress on disk, and the number of consecutive deaths of the process without any."""

    attempt: _Count
    entries: _Count
    partials: _Count
    deaths: _Count

    def is_beyond(self, since: EpisodeProgress) -> bool:
        """Whether the episode has new entries on disk; the record of its start does not count."""
        return (self.attempt, max(self.entries, 1), self.partials) != (
            since.attempt,
            max(since.entries, 1),
            since.partials,
        )


class RunProcessRecord(msgspec.Struct, kw_only=True):
    """The content of `process.json`: the state of the process that leads a run, and the episodes it resumed."""

    state: State = ""
    """State of the newest process; still `running` after it was killed."""
    process: str = ""
    """Id of the newest process in which episodes ran; the fields below belong to it."""
    is_playing: bool = False
    """Whether episodes run in the process. If it has ended, it died while they ran."""
    fault: str = ""
    """Fault of an environment that broke the process, as a sentence; empty if none is known."""
    workers: _Count = 1
    """Number of worker processes of the run; 1: episodes ran in the main process."""
    has_killer: bool = False
    """Whether an episode killed a worker process or broke the event loop, so that later episodes do not run in the main
    process."""
    episodes: dict[str, EpisodeProgress] = {}
    """Progress of unfinished training episodes, keyed by id."""
    evaluated: dict[str, _Count] = {}
    """Number of consecutive deaths, keyed by the id of a held-out task; evaluations start over at each start."""
    machine: str = ""
    """Boot id and process-id namespace of the newest process, outside of which its process id has no meaning."""

    @staticmethod
    def read(run: Path) -> RunProcessRecord:
        """Read the record of a run; an empty one if there is none.

        An unreadable record counts as the worst case, because the counts of deaths are lost with it: the process died
        while its episodes ran, and one of them may kill it again.
        """
        path = run / PROCESS_FILE
        try:
            with open_regular(path) as file:
                return msgspec.json.decode(read_at_most(file, MAX_RECORD_BYTES), type=RunProcessRecord)
        except FileNotFoundError:
            return RunProcessRecord()
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            reason = error.strerror if isinstance(error, OSError) else error
            fault = f"how it ended is unknown, because {path} cannot be read ({escape_line(str(reason))[:200]})"
            return RunProcessRecord(state="unknown", is_playing=True, fault=fault, has_killer=True)

    def write(self, run: Path) -> None:
        """Write the record atomically, with the secrets of `fault` masked.

        Raises:
            StorageError: writing failed.
        """
        path = run / PROCESS_FILE
        try:
            replace_file(path, msgspec.json.encode(msgspec.structs.replace(self, fault=mask_text(self.fault))))
        except OSError as error:
            raise StorageError(f"{path}: cannot be written ({error.strerror}); {resume_advice(error)}") from error

    @property
    def is_of_this_process(self) -> bool:
        """Whether the newest episodes ran in the calling process."""
        return self.process == _this_process()

    def running(self, find_unfinished: Callable[[Purpose], Sequence[EpisodeSpec]]) -> list[EpisodeSpec]:
        """Return the episodes that had not ended when the process did; parents stay with their children.

        Args:
            find_unfinished: returns the unfinished episodes of a purpose from the journal.
        """
        return [*find_unfinished("train"), *find_unfinished("evaluate")]

    def next(self, journal: EpisodeProgressReader) -> RunProcessRecord:
        """Return the record of a process that resumes the run, to be written when its episodes start."""
        is_death = self.is_playing and self.workers == 1
        episodes, evaluation_counts = dict[str, EpisodeProgress](), dict[str, int]()
        for spec in self.running(journal.unfinished):
            if spec.purpose == "evaluate":
                evaluation_counts[spec.task.id] = self.evaluated.get(spec.task.id, 0) + 1
                continue
            now = EpisodeProgress(spec.attempt, *journal.progress(spec.episode_id, spec.attempt), 0)
            before = self.episodes.get(spec.episode_id)
            deaths = 0 if before is None or now.is_beyond(before) else before.deaths
            episodes[spec.episode_id] = msgspec.structs.replace(now, deaths=deaths + is_death)
        return RunProcessRecord(
            state="running",
            process=_this_process(),
            is_playing=True,
            has_killer=self.has_killer,
            episodes=episodes,
            evaluated=evaluation_counts if is_death else {},
            machine=_machine(),
        )

    def deaths(self, spec: EpisodeSpec) -> int:
        """Return the number of consecutive processes that died while an unfinished episode ran in them without
        progress."""
        if spec.purpose == "evaluate":
            return self.evaluated.get(spec.task.id, 0)
        progress = self.episodes.get(spec.episode_id)
        return 0 if progress is None else progress.deaths


def format_episode_list(specs: Sequence[EpisodeSpec], max_named: int = NAMED) -> str:
    """List the ids and tasks of episodes, for a message."""
    if not specs:
        return "no episode"
    names = ", ".join(f"{spec.episode_id} (task {spec.task.id!r})" for spec in specs[:max_named])
    return names + (f" and {len(specs) - max_named} more" if len(specs) > max_named else "")


def record_process_state(run: Path, state: State) -> None:
    """Record the state of the process that leads a run; the rest of the record stays.

    Raises:
        StorageError: writing failed.
    """
    msgspec.structs.replace(RunProcessRecord.read(run), state=state).write(run)


@contextlib.contextmanager
def recording_process_state(run: Path) -> Iterator[None]:
    """Record that this process leads a run and, if an error ends the block, that the run `failed` or was `stopped`.

    Raises:
        StorageError: writing failed at the beginning. A failure at the end is ignored: the run then counts as killed.
    """
    msgspec.structs.replace(RunProcessRecord.read(run), state="running", machine=_machine()).write(run)
    with contextlib.suppress(OSError):
        (run / ERROR_FILE).unlink(missing_ok=True)  # the error of an earlier process
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(StorageError):
            record_process_state(run, "failed" if isinstance(error, Exception) else "stopped")
        if isinstance(error, Exception):
            write_error(run, error)
        raise


def write_error(run: Path, error: Exception) -> None:
    """Write the error that ended this process, as the command line tells it, with the traceback of one that is not
    agentrl's own. A failure is ignored."""
    text = f"{error}\n"
    if not isinstance(error, AgentRLError):
        text = f"{format_foreign_error(error)}\n\n{''.join(traceback.format_exception(error))}"
    with contextlib.suppress(OSError):
        replace_file(run / ERROR_FILE, mask_text(text).encode("utf-8", "backslashreplace"))


def read_failure(run: Path) -> str:
    """Return the first sentence of the error that ended a failed run, and the file that has all of it; empty if the run
    has not failed, or left no error."""
    if RunProcessRecord.read(run).state != "failed":
        return ""
    try:
        with open_regular(run / ERROR_FILE) as file:
            text = read_at_most(file, MAX_RECORD_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    first_line = text.partition("\n")[0]
    sentence = re.split(r"(?<=[.;!?])\s", first_line, maxsplit=1)[0].rstrip(".;")[:MAX_SENTENCE]
    return f"{sentence} (all of it: {run / ERROR_FILE})" if sentence else ""


def read_process_state(run: Path) -> str:
    """Return the state of a run: a `State`, or `killed`. Reads the kernel's locks and a small file."""
    if find_writing_process(run / "journal") is not None:
        return "running"
    state = RunProcessRecord.read(run).state
    return "killed" if state == "running" else state


def is_writer_dead(run: Path) -> bool:
    """Whether the process that last led a run has certainly ended; False if it may live on another machine."""
    try:
        with open_regular(run / "journal" / LOCK_FILE) as file:
            holder = _holder(file)
    except OSError:
        return False
    machine = _machine()
    if holder is None or not machine or RunProcessRecord.read(run).machine != machine:
        return False
    try:
        status = Path(f"/proc/{holder}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return isinstance(error, FileNotFoundError | ProcessLookupError)
    return status.rpartition(")")[2].split()[:1] in (["Z"], ["X"])  # a zombie: ended, but not yet reaped by its parent


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, ValueError):
        return ""


def _this_process() -> str:
    return f"{os.getpid()} {_BOOT}"
