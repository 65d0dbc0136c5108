"""The forks of a run as a tree: who was played on from whom, at which call, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agentrl.core.errors import InputError, JournalError
from agentrl.core.records import PolicyVersion
from agentrl.inspection.lines import EpisodeLine
from agentrl.inspection.reader import RunReader
from agentrl.journal.control import ADMISSION_COLUMNS, read_spec
from agentrl.journal.entries import TurnEntry

if TYPE_CHECKING:
    from agentrl.core.records import ForkPoint

FORKS = "forks"
"""Directory of a run's forks, inside the run's."""


class Fork(msgspec.Struct, frozen=True):
    """A fork, in the order of the tree."""

    depth: int
    """0: the episode that was forked, which lies in the run itself."""
    line: EpisodeLine
    at: str
    """The call that it took otherwise; empty for the first of all."""
    is_edited: bool
    """Whether it was told something else there."""
    version: str | None = None
    """Which weights took the turn it was forked at; None where it took none."""


@contextmanager
def located(reader: RunReader, name: str) -> Iterator[tuple[RunReader, str]]:
    """Who reads an episode by its name in a run, and its id there: `forks/f0` is f0 of the run's forks.

    An episode of the run itself that is called so, as one that was imported may be, goes before.

    Raises:
        InputError: the run has no forks.
        JournalError: the forks cannot be read.
    """
    own = not name.startswith(f"{FORKS}/") or reader.log.rows(
        "SELECT 1 FROM admissions WHERE episode = ? LIMIT 1", name
    )
    if own:
        yield reader, name
        return
    try:
        forks = RunReader(reader.path / FORKS)
    except InputError as error:
        raise InputError(f"{reader.path}: no episode {name!r}: nothing of this run was forked") from error
    try:
        yield forks, name.removeprefix(f"{FORKS}/")
    finally:
        forks.close()


def fork_tree(reader: RunReader) -> list[Fork]:
    """Each episode of a run that was forked, and below it its forks, and theirs.

    Raises:
        JournalError: the forks' control log is damaged.
    """
    try:
        forks = RunReader(reader.path / FORKS)
    except InputError:
        return []
    try:
        points, attempts = _points(forks)
        lines = {line.episode: line for line in forks.lines(list(attempts.items()))}
        versions = {episode: _version(forks, episode) for episode in lines}
    finally:
        forks.close()
    below: dict[str, list[str]] = {}
    for episode, point in points.items():
        below.setdefault(point.episode_id, []).append(episode)
    tree: list[Fork] = []
    whole = _Forks(below, points, lines, versions)
    for parent in [name for name in below if name not in points]:
        attempt = points[below[parent][0]].attempt
        tree += [Fork(0, line, "", is_edited=False) for line in reader.lines([(parent, attempt)])]
        _grow(tree, parent, 1, whole)
    return tree


class _Forks(NamedTuple):
    """All forks of a run, by their ids."""

    below: dict[str, list[str]]
    points: dict[str, ForkPoint]
    lines: dict[str, EpisodeLine]
    versions: dict[str, str | None]


def _grow(tree: list[Fork], parent: str, depth: int, whole: _Forks) -> None:
    for episode in whole.below.pop(parent, []):  # popped: references that go round in a circle come to an end
        if episode in whole.lines:
            point = whole.points[episode]
            version = whole.versions[episode]
            tree.append(Fork(depth, whole.lines[episode], point.call_id, bool(point.messages), version))
            _grow(tree, episode, depth + 1, whole)


def _version(forks: RunReader, episode: str) -> str | None:
    """The weights that took a fork's first turn of its own."""
    view = forks.episode(episode)
    for _, body in view.entries[1 + view.inherited :]:
        if isinstance(body, TurnEntry) and body.spans:
            span = body.spans[0]
            return str(PolicyVersion(body.weights_of or body.policy, span.lineage, span.step))
    return None


def _points(forks: RunReader) -> tuple[dict[str, ForkPoint], dict[str, int]]:
    """By fork, where it leaves its parent, and its newest attempt."""
    columns = ", ".join([*ADMISSION_COLUMNS.split(), "checksum"])
    points: dict[str, ForkPoint] = {}
    attempts: dict[str, int] = {}
    for row in forks.log.rows(
        f"SELECT {columns} FROM admissions WHERE purpose = 'fork' ORDER BY length(episode), episode, attempt"
    ):
        try:
            spec = read_spec(row)
        except JournalError:
            continue  # `episode list` names it
        if spec.fork is not None:
            points[spec.episode_id], attempts[spec.episode_id] = spec.fork, spec.attempt
    return points, attempts
