"""The runs behind the viewer's server: one run, or all runs of a directory, of which each question names one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from agentrl.core.errors import InputError
from agentrl.inspection.reader import RunReader, convert_damage_errors, list_runs
from agentrl.inspection.run_comparison import CURVES, compare_runs
from agentrl.inspection.viewer.queries import answer_viewer_query, as_json
from agentrl.journal.schema import CONTROL_FILE

MAX_COMPARED = 20
"""Maximum number of runs in a comparison."""


class ServedRuns:
    """Answers questions about one run, or about the runs of a directory. Used in one thread."""

    def __init__(self, place: str | Path) -> None:
        """Open the run, or the directory.

        Raises:
            InputError: `place` is neither a run nor a directory with runs.
            JournalError: the run cannot be read.
        """
        self._place = Path(place)
        self.is_directory = self._place.is_dir() and not any(
            (self._place / name).is_file() for name in (CONTROL_FILE, f"journal/{CONTROL_FILE}")
        )
        if self.is_directory and not any(_is_run(path) for path in self._place.iterdir()):
            self.is_directory = False  # so that the error names the missing journal
        self._open: dict[str, _OpenRun] = {} if self.is_directory else {"": _OpenRun.at(self._place)}

    def answer(self, question: str, parameters: Mapping[str, str]) -> bytes:
        """Answer a question of the page, as JSON. Raises as `answer_viewer_query`."""
        if question == "runs":
            if self.is_directory:
                return as_json(list_runs(self._place))
            with convert_damage_errors(self._reader("").log):
                return as_json([self._reader("").line()])
        if question == "comparison":
            names = [name for name in parameters.get("runs", "").split("\n") if name]
            if len(names) > MAX_COMPARED:
                raise InputError(f"{len(names)} runs are too many for one comparison: choose at most {MAX_COMPARED}")
            metrics = [name for name in parameters.get("metrics", "").split("\n") if name]
            readers = [self._reader(name) for name in names]
            with contextlib.ExitStack() as stack:
                for reader in readers:
                    stack.enter_context(convert_damage_errors(reader.log))
                return as_json(compare_runs(readers, axis=parameters.get("by") or "step", metrics=[*CURVES, *metrics]))
        reader = self._reader(parameters.get("run", ""))
        with convert_damage_errors(reader.log):
            return answer_viewer_query(reader, question, parameters)

    def close(self) -> None:
        """Close all runs."""
        for run in self._open.values():
            run.reader.close()

    def _reader(self, name: str) -> RunReader:
        name, path = (name, self._place / name) if self.is_directory else ("", self._place)
        run = self._open.pop(name, None)
        if run is not None and run.file != _control_file(path):
            run.reader.close()  # it was deleted, and may have been made again
            run = None
        if run is None:
            if self.is_directory and (not name or Path(name).name != name or not _is_run(path)):
                raise InputError(f"{self._place}: no run {name!r}; choose one of the list")
            if len(self._open) >= MAX_COMPARED:  # close the run that was asked for first
                self._open.pop(next(iter(self._open))).reader.close()
            run = _OpenRun.at(path)
        self._open[name] = run  # the newest
        return run.reader


class _OpenRun(NamedTuple):
    """A run that is open, and the file that it was read from."""

    reader: RunReader
    file: tuple[int, int] | None

    @staticmethod
    def at(path: Path) -> _OpenRun:
        """Open a run. Raises as `RunReader`."""
        file = _control_file(path)
        return _OpenRun(RunReader(path), file)


def _control_file(path: Path) -> tuple[int, int] | None:
    """Return the device and number of the file that is a run's control log now; None if there is none."""
    for file in (path / "journal" / CONTROL_FILE, path / CONTROL_FILE):
        with contextlib.suppress(OSError):
            status = file.stat()
            return status.st_dev, status.st_ino
    return None


def _is_run(path: Path) -> bool:
    with contextlib.suppress(OSError):  # such as a directory of another user
        return (path / "journal" / CONTROL_FILE).is_file()
    return False
