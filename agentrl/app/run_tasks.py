"""The tasks of a run or an evaluation as they are read at its start: which splits share some, and which changed since
the previous start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from agentrl.core.errors import StorageError
from agentrl.core.files import resume_advice
from agentrl.core.records import Task
from agentrl.environment.environment import TaskSource
from agentrl.environment.mixture import MEMBER, MixedTasks
from agentrl.environment.task_contents import (
    RecordedContents,
    SourceContents,
    SplitOverlap,
    TaskRecord,
    read_contents,
    task_digest,
)
from agentrl.orchestrator.evaluation import HeldOutSplit

READ_S = 5.0
"""Seconds after which no further tasks of a source are read: a run must start, however slow its sources are."""
TRAIN = "train"
CONSEQUENCE = (
    "Episodes keep the data they began with; evaluations on other tasks are not compared with the earlier ones"
)
"""What follows from a change of tasks."""


@dataclass(frozen=True)
class RunTasks:
    """The tasks of a run, as far as they were read."""

    contents: Mapping[str, SourceContents]
    """Keyed by split; in a mixture by `Environment@split`."""

    @staticmethod
    def read(training: TaskSource | None, held_out: Sequence[HeldOutSplit]) -> RunTasks:
        """Read the tasks of all sources, each for at most `READ_S`.

        Args:
            training: the training tasks; None: they are not needed.
            held_out: the evaluated splits.
        """
        sources: dict[str, TaskSource] = {}
        if isinstance(training, MixedTasks):
            sources = {f"{member.name}@{TRAIN}": member.source for member in training.members}
        elif training is not None:
            sources = {TRAIN: training}
        sources |= {split.name: split.tasks if split.source is None else split.source for split in held_out}
        return RunTasks({name: read_contents(source, seconds=READ_S) for name, source in sources.items()})

    def warnings(self) -> list[str]:
        """Return what `agentrl env check` says about these tasks: splits that share some, and faulty ones."""
        lines = [f"tasks of {name}{each.problem}" for name, each in self.contents.items() if each.problem]
        by_environment: dict[str, dict[str, SourceContents]] = {}
        for name, each in self.contents.items():
            environment, _, split = name.rpartition("@")
            by_environment.setdefault(environment, {})[split] = each
        for environment, splits in by_environment.items():
            prefix = f"{environment}: " if environment else ""
            held_out = {split: each for split, each in splits.items() if split != TRAIN}
            lines += [f"{prefix}{line}" for line in SplitOverlap.of(splits.get(TRAIN), held_out).warnings]
        return lines

    def changes_since(self, run: Path) -> list[str]:
        """Return a clause for each split whose tasks differ from those of the run's previous start, as it recorded
        them. If its record cannot be read, a clause says that changes are unknown."""
        try:
            return self._record().changes_since(TaskRecord.read(run))
        except ValueError as error:
            return [f"unknown whether tasks changed ({error})"]

    def _record(self) -> TaskRecord:
        return TaskRecord({name: RecordedContents.of(each) for name, each in self.contents.items()})

    def write(self, run: Path) -> None:
        """Replace the record in a run's directory.

        Raises:
            StorageError: the disk failed.
        """
        try:
            self._record().write(run)
        except OSError as error:
            raise StorageError(f"{run}: cannot be written ({error.strerror}); {resume_advice(error)}") from error

    def is_current(self, task: Task) -> bool:
        """Whether a recorded training task still has the same data, or belongs to no list of tasks."""
        return self._training_digests.get(task.id) in (None, task_digest(task))

    @cached_property
    def _training_digests(self) -> Mapping[str, bytes]:
        return {
            f"{name.removesuffix(TRAIN).removesuffix('@')}{MEMBER if '@' in name else ''}{task}": digest
            for name, each in self.contents.items()
            if name.rpartition("@")[2] == TRAIN
            for task, digest in each.digests.items()
        }
