"""The files of a run directory, and safe ways to write them.

config.json      the resolved configuration          journal/       control and turn databases
metrics.jsonl    one line per optimizer step         versions/      published weights
summary.json     written at the end                  checkpoints/   what a run resumes from
policies/NAME    link to a policy's last version     steps/         columns of optimizer steps
engine.log       error streams of engine processes   process.json   which process leads the run, or how it ended
error.txt        the error that ended the run         tasks.json     digests of the tasks at the newest start
best/NAME        link to its version when the metric was best
models/          versions of other runs that this run starts from

A run directory may be untrusted: nothing is ever written through a link, pipe or device that has the name of
one of our files.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import os
import shlex
import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import InputError, RunDirectoryError, StorageError
from agentrl.core.files import (
    LOCAL,
    open_regular,
    read_at_most,
    refuse_links,
    refuse_links_below,
    replace_file,
    sync_directory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agentrl.core.records import WeightsRef

ENGINE_LOG = "engine.log"
WORKERS_LOG = "workers.log"
"""File name for the error streams of the processes of engines and workers."""
_FINISH = "make room or permission there, then finish the run with --resume"


_MAX_CONFIG_BYTES = 1 << 20
_MAX_SUMMARY_BYTES = 64 << 20
FILES_OF_A_START = frozenset(
    [
        *("config.json", "process.json", "status.json", "error.txt", "metrics.jsonl", "alarms.jsonl", "control.sock"),
        *("journal", "models", ENGINE_LOG, WORKERS_LOG, "tensorboard", "wandb", "trackio"),
    ]
)
"""What a run's directory may have before its first version is published."""
_BEFORE_CONFIG = (".config.json", "models")
"""What a process writes before `config.json`, the first with `replace_file`. If it was killed, another may start."""


def run_argument(path: str | Path) -> str:
    """Return a run as an argument of a command in a shell: its name if it is in `runs/`, else its path."""
    path, runs = Path(path), {Path("runs")}
    with contextlib.suppress(FileNotFoundError):  # an environment may have removed the working directory
        runs.add(Path("runs").absolute())
    return shlex.quote(path.name if path.parent in runs else str(path))


def describe_missing_run(path: Path) -> str:
    """Say that a path is no run, where it was searched, and which run was probably meant."""
    inside = _runs_in(path)
    if inside:
        return f"{path.absolute()} is a directory of runs, not a run; name one: {', '.join(inside[:5])}"
    if path.exists():
        return f"{path.absolute()} contains no run (no journal/control.db in it)"
    is_name = path.parent == Path()
    folder = Path("runs") if is_name else path.parent
    names = _runs_in(folder)
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = f"did you mean {close[0] if is_name else folder / close[0]}?" if close else ""
    hint = hint or (f"the runs there: {', '.join(names[:5])}{', …' * (len(names) > 5)}" if names else "")
    where = f"no run {path.name} in {folder.absolute()}" + (f", and no directory {path.absolute()}" if is_name else "")
    return f"{where}; {hint or f'there is no run in {folder.absolute()}'}"


def _runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in a directory, the newest first; none if it cannot be read."""
    with contextlib.suppress(OSError):
        runs = [path for path in folder.iterdir() if (path / "journal").is_dir()]
        return [path.name for path in sorted(runs, key=lambda path: -path.stat().st_mtime)]
    return []


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.user_path = path
        """Path as the user gave it, for messages."""
        self.path = path = path.absolute()
        """Absolute path, valid in any working directory."""
        self.journal = path / "journal"
        self.checkpoints = path / "checkpoints"
        self.versions = path / "versions"
        self.steps = path / "steps"
        self.metrics = path / "metrics.jsonl"
        self.engine_log = path / ENGINE_LOG
        self.workers_log = path / WORKERS_LOG

    @classmethod
    def create(cls, path: Path, config_json: str) -> RunDirectory:
        """Create the directory of a new run.

        Raises:
            RunDirectoryError: the path already exists; nothing is changed.
            StorageError: the directory cannot be created.
        """
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _alone_in(path):
                cls.check_free(path)
                replace_file(path / "config.json", config_json.encode())
            for new_path in (path / "config.json", path, path.parent):
                LOCAL.sync(new_path)
        except OSError as error:
            raise StorageError(
                f"cannot create the run directory {path}: {error.strerror or error}; check the free space and the "
                "permissions there, or choose another place with --directory=DIR"
            ) from error
        return cls(path)

    @staticmethod
    def check_free(path: Path) -> None:
        """Check that a run can be created at a path.

        Raises:
            RunDirectoryError: something exists there.
        """
        if path.is_dir() and all(entry.name in _BEFORE_CONFIG for entry in path.iterdir()):
            return
        if path.exists():
            raise RunDirectoryError(f"{path} exists; resume it with --resume, choose another --name, or remove it")

    def write_config(self, config_json: str) -> None:
        """Replace `config.json` atomically.

        Raises:
            StorageError: the disk failed.
        """
        try:
            replace_file(self.path / "config.json", config_json.encode())
        except OSError as error:
            raise StorageError(
                f"{self.path / 'config.json'}: cannot be written ({error.strerror}); {_FINISH}"
            ) from error

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """Open the directory of a run to resume.

        Raises:
            RunDirectoryError: the directory contains no run.
            JournalError: something in it that a run reads, writes or deletes is a symbolic link, a pipe or a device.
        """
        directory = cls(path)
        paths = (directory.journal, directory.versions, directory.checkpoints, directory.steps)
        refuse_links(*(path / name for name in ("policies", "best", "models", "tensorboard", "wandb")))
        refuse_links_below(*paths)
        if not (directory.journal.is_dir() or (path / "config.json").is_file()):
            raise RunDirectoryError(f"nothing to resume: {describe_missing_run(path)}; or start without --resume")
        return directory

    @staticmethod
    def config(path: Path) -> Mapping[str, Any]:
        """Return the configuration with which a run was started, as data; empty if it cannot be read."""
        return _read_object(path / "config.json", _MAX_CONFIG_BYTES)

    def read_summary(self) -> dict[str, Any]:
        """Return the summary of a finished run; empty if it cannot be read."""
        return _read_object(self.path / "summary.json", _MAX_SUMMARY_BYTES)

    def forget_if_refused(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Remove the directory if the run was refused for its input before its first step; an exit callback.

        A directory that caused the refusal itself is left to its owner.
        """
        if isinstance(error, RunDirectoryError):
            return False
        if isinstance(error, InputError | ImportError) and not (self.metrics.exists() and self.metrics.stat().st_size):
            shutil.rmtree(self.path, ignore_errors=True)
        return False

    def link(self, folder: str, weights: Mapping[str, WeightsRef]) -> dict[str, Path]:
        """Point `FOLDER/NAME` to a durable version of each policy, and remove all other links there.
        If a version cannot be synced, the previous links stay.

        Raises:
            StorageError: the disk failed.
        """
        links: dict[str, Path] = {}
        directory = self.path / folder
        try:
            for weights_ref in weights.values():
                with contextlib.suppress(FileNotFoundError):  # a trainer of tests writes no files
                    sync_directory(Path(weights_ref.path), depth=3)
            if weights or directory.exists():
                directory.mkdir(exist_ok=True)
            for link in directory.glob("*"):
                if link.is_symlink():
                    link.unlink()
            for name, weights_ref in weights.items():
                (directory / name).symlink_to(os.path.relpath(weights_ref.path, directory))
                links[name] = self.user_path / folder / name
        except OSError as error:
            raise StorageError(f"{directory}: cannot be written ({error.strerror}); {_FINISH}") from error
        return links

    def unlink(self) -> None:
        """Remove the links to versions before the run continues: their versions will be neither the last nor the best,
        and their files may be deleted.

        Raises:
            StorageError: the disk failed.
        """
        self.link("policies", {})
        self.link("best", {})

    def linked(self, folder: str) -> dict[str, Path]:
        """Return the links that `link` made."""
        return {path.name: self.user_path / folder / path.name for path in sorted((self.path / folder).glob("*"))}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json` atomically.

        Raises:
            StorageError: the disk failed.
        """
        path = self.path / "summary.json"
        try:
            replace_file(path, (json.dumps(summary, indent=1) + "\n").encode())
        except OSError as error:
            raise StorageError(f"{path}: cannot be written ({error.strerror}); {_FINISH}") from error


def _read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read an object of JSON; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            data = json.loads(read_at_most(file, max_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


@contextlib.contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory, so that only one process creates a run there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
