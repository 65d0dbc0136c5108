"""What the tasks of a source are: tasks that two splits share, and tasks that changed since a run began.

A task is compared by its data. One without data is known by its id, and so are tasks that all have the same data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentrl.core.clock import SystemClock
from agentrl.core.errors import describe_user_code_error
from agentrl.core.files import open_regular, read_at_most, replace_file
from agentrl.core.records import Task
from agentrl.core.text import plural
from agentrl.environment.environment import MAX_READ_TASKS, TaskSource

DIGEST_BYTES = 8
_ENDLESS = 10_000_000
"""Number of tasks from which on a source draws them as they are read, so that reading more tells little."""
_READ_OF_ENDLESS = 1_000
"""Number of tasks that a run reads of such a source."""
_FILE = "tasks.json"
_MAX_FILE_BYTES = 64 << 20


ANSWER_KEYS = ("answer", "target", "solution", "expected", "ground_truth", "label", "gold", "reference")
"""Names under which a task's data usually holds its right answer."""


def answer_of(data: Mapping[str, Any]) -> str:
    """Return the right answer in a task's data; "" if it has none that is a short text or a number."""
    for key in ANSWER_KEYS:
        value = data.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, str) and value.strip() and len(value) <= 200:
            return value
    return ""


def task_digest(task: Task) -> bytes:
    """Return the digest of a task's data, or of its id if it has none."""
    content = msgspec.json.encode(dict(task.data) or task.id, order="sorted")
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


class SourceContents(NamedTuple):
    """The tasks of a source, as far as they were read."""

    size: int
    """Number of tasks of the source."""
    digests: Mapping[str, bytes]
    """Digest of each task that was read, by id, in order; of several tasks with one id, the first."""
    num_read: int
    repeated: list[str]
    """Ids of tasks that repeat earlier ones, data included."""
    problem: str = ""
    """What is wrong with the task at which reading ended; empty if nothing is."""


def read_contents(
    source: TaskSource,
    *,
    seconds: float,
    of_endless: int = _READ_OF_ENDLESS,
    clock: Callable[[], float] = SystemClock.monotonic,
) -> SourceContents:
    """Read the first tasks of a source, up to `MAX_READ_TASKS`.

    Args:
        source: the tasks.
        seconds: time after which no more are read.
        of_endless: number of tasks to read of a practically endless source.
        clock: returns the time in seconds.
    """
    digests, repeated, num_read, index = dict[str, bytes](), list[str](), 0, None
    size, end = 0, clock() + seconds
    try:
        size = len(source)
        for index in range(min(size, MAX_READ_TASKS if size < _ENDLESS else of_endless)):
            if clock() > end:
                break
            task = source[index]
            digest = task_digest(task)
            num_read += 1
            if task.id not in digests:
                digests[task.id] = digest
            elif digests[task.id] == digest:
                repeated.append(task.id)
            else:
                problem = (
                    f"[{index}] has the id {task.id!r} of an earlier task, and other data; curricula and evaluations "
                    "would take both for one: give each task its own id"
                )
                return SourceContents(size, digests, num_read, repeated, problem)
    except Exception as error:  # noqa: BLE001 - foreign code: any exception is a finding
        place = "" if index is None else f"[{index}]"
        return SourceContents(size, digests, num_read, repeated, f"{place} raised {describe_user_code_error(error)}")
    return SourceContents(size, digests, num_read, repeated)


# --- two splits -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SplitOverlap:
    """Tasks that a training split shares with held-out ones, and tasks that repeat others."""

    also_held_out: list[str] = field(default_factory=list)
    """Training tasks, by id, whose data is also that of a held-out task."""
    shared_ids: list[str] = field(default_factory=list)
    """Ids of training tasks that are also ids of held-out tasks, with other data."""
    repeated_ids: dict[str, list[str]] = field(default_factory=dict)
    """Ids of tasks that repeat earlier ones, data included, keyed by split."""

    @staticmethod
    def of(train: SourceContents | None, held_out: Mapping[str, SourceContents]) -> SplitOverlap:
        """Compare training tasks with those of the splits that are evaluated."""
        contents = {**held_out, **({} if train is None else {"train": train})}
        overlap = SplitOverlap(repeated_ids={name: each.repeated for name, each in contents.items() if each.repeated})
        training = {} if train is None else train.digests
        held_out_ids = {name: digest for each in held_out.values() for name, digest in each.digests.items()}
        held_out_digests = set(held_out_ids.values())
        overlap.also_held_out = [name for name, digest in training.items() if digest in held_out_digests]
        is_same = len({*training.values(), *held_out_digests}) == 1
        if is_same and max(len(training), len(held_out_ids)) > 1:
            overlap.also_held_out = [name for name in overlap.also_held_out if name in held_out_ids]
        shared = training.keys() & held_out_ids.keys()
        overlap.shared_ids = sorted(shared.difference(overlap.also_held_out))
        return overlap

    @property
    def warnings(self) -> list[str]:
        """Sentences for the user."""
        warnings = []
        if self.also_held_out:
            verb = "is" if len(self.also_held_out) == 1 else "are"
            warnings.append(
                f"{plural(len(self.also_held_out), 'training task')} {verb} also held out, such as "
                f"{self.also_held_out[0]!r}. Evaluations then measure memorization, not learning: let "
                "tasks('held_out') list other tasks, or ignore this if there are no others."
            )
        if self.shared_ids:
            verb = "names" if len(self.shared_ids) == 1 else "name"
            warnings.append(
                f"{plural(len(self.shared_ids), 'id')} of training tasks, such as {self.shared_ids[0]!r}, {verb} a "
                "held-out task with other data."
            )
        for split, repeated in self.repeated_ids.items():
            verb = "repeats" if len(repeated) == 1 else "repeat"
            warnings.append(
                f"{plural(len(repeated), 'task')} of {split}, such as {repeated[0]!r}, {verb} an earlier one."
            )
        return warnings


# --- two starts of a run ----------------------------------------------------------------------------------------------


class RecordedContents(msgspec.Struct, frozen=True):
    """The tasks of a source in the form of the file in a run's directory: digests of ids and data, in order."""

    size: int
    digests: bytes
    """For each task, `DIGEST_BYTES` of its id and as many of its data."""

    @staticmethod
    def of(contents: SourceContents) -> RecordedContents:
        """Convert the contents of a source."""
        pairs = (_id_digest(name) + digest for name, digest in contents.digests.items())
        return RecordedContents(contents.size, b"".join(pairs))

    def by_id(self) -> dict[bytes, bytes]:
        """Return the digest of each task by that of its id, in order."""
        width = 2 * DIGEST_BYTES
        pairs = (self.digests[start : start + width] for start in range(0, len(self.digests), width))
        return {pair[:DIGEST_BYTES]: pair[DIGEST_BYTES:] for pair in pairs}


def _id_digest(name: str) -> bytes:
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


class ContentsChange(NamedTuple):
    """How the tasks of a source differ from those of the previous start of a run."""

    changed: int
    """Number of tasks with other data."""
    added: int
    removed: int
    is_reordered: bool
    compared: int
    """Number of tasks of the previous start that were compared."""
    size_before: int
    size: int

    @staticmethod
    def between(before: RecordedContents, now: RecordedContents) -> ContentsChange:
        """Compare the tasks of two starts; of sources that were not read whole, the first tasks that both read."""
        old, new = before.by_id(), now.by_id()
        if len(old) < before.size or len(new) < now.size:
            count = min(len(old), len(new))
            old, new = dict(list(old.items())[:count]), dict(list(new.items())[:count])
        common = old.keys() & new.keys()
        order = [[name for name in table if name in common] for table in (old, new)]
        return ContentsChange(
            changed=sum(old[name] != new[name] for name in common),
            added=len(new) - len(common),
            removed=len(old) - len(common),
            is_reordered=order[0] != order[1],
            compared=len(old),
            size_before=before.size,
            size=now.size,
        )

    def describe(self, kind: str) -> str:
        """Return a clause such as "4 of 16 held-out tasks changed"; empty if nothing did."""
        tasks = f"{'' if self.compared == self.size_before else 'the first '}{self.compared:,} {kind} tasks"
        lost = [(count, verb) for count, verb in ((self.changed, "changed"), (self.removed, "removed")) if count]
        if lost:
            (count, verb), *others = [*lost, *([(self.added, "added")] if self.added else [])]
            return f"{count:,} of {tasks} {verb}" + "".join(f", {count:,} {verb}" for count, verb in others)
        if self.added:
            return f"{self.added:,} added to {tasks}"
        if self.size != self.size_before:
            return f"{self.size:,} {kind} tasks instead of {self.size_before:,}"
        return f"order of the {kind} tasks changed" if self.is_reordered else ""


def task_kind(name: str) -> str:
    """Return an adjective for the tasks of a split, such as "held-out" for `held_out`, or "Sum's test" for
    `Sum@test`."""
    environment, _, split = name.rpartition("@")
    kind = {"train": "training", "held_out": "held-out"}.get(split, split)
    return f"{environment}'s {kind}" if environment else kind


class TaskRecord(NamedTuple):
    """The tasks of a run at a start: contents by name of the split."""

    contents: Mapping[str, RecordedContents]
    """Keyed by split, as `task_kind` reads it."""

    @staticmethod
    def read(run: Path) -> TaskRecord:
        """Read the record of the previous start; empty if there is none.

        Raises:
            ValueError: it cannot be read.
        """
        try:
            with open_regular(run / _FILE) as file:
                data = msgspec.json.decode(read_at_most(file, _MAX_FILE_BYTES), type=dict[str, RecordedContents])
        except FileNotFoundError:
            return TaskRecord({})
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise ValueError(f"{run / _FILE} cannot be read") from error
        return TaskRecord(data)

    def write(self, run: Path) -> None:
        """Replace the record.

        Raises:
            OSError: the disk failed.
        """
        replace_file(run / _FILE, msgspec.json.encode(dict(self.contents)))

    def changes_since(self, before: TaskRecord) -> list[str]:
        """Return a clause for each split whose tasks differ; splits that only one record has are not compared."""
        clauses = []
        for name, now in self.contents.items():
            if name in before.contents:
                change = ContentsChange.between(before.contents[name], now)
                clauses.append(change.describe(task_kind(name)))
        return [clause for clause in clauses if clause]
