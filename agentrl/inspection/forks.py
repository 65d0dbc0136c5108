"""The forks of a run as a tree: who was played on from whom, at which call, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agentrl.core.errors import InputError, JournalError
from agentrl.inspection.lines import EpisodeLine
from agentrl.inspection.reader import RunReader
from agentrl.journal.control import ADMISSION_COLUMNS, read_spec

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
        points = _points(forks)
        lines = {line.episode: line for line in forks.lines([(episode, 0) for episode in points])}
    finally:
        forks.close()
    below: dict[str, list[str]] = {}
    for episode, point in points.items():
        below.setdefault(point.episode_id, []).append(episode)
    tree: list[Fork] = []
    for parent in [name for name in below if name not in points]:
        attempt = points[below[parent][0]].attempt
        tree += [Fork(0, line, "", is_edited=False) for line in reader.lines([(parent, attempt)])]
        _grow(tree, parent, 1, below, points, lines)
    return tree


def _grow(
    tree: list[Fork],
    parent: str,
    depth: int,
    below: dict[str, list[str]],
    points: dict[str, ForkPoint],
    lines: dict[str, EpisodeLine],
) -> None:
    for episode in below.pop(parent, []):  # popped: references that go round in a circle come to an end
        if episode in lines:
            point = points[episode]
            tree.append(Fork(depth, lines[episode], point.call_id, is_edited=bool(point.messages)))
            _grow(tree, episode, depth + 1, below, points, lines)


def _points(forks: RunReader) -> dict[str, ForkPoint]:
    columns = ", ".join([*ADMISSION_COLUMNS.split(), "checksum"])
    points = {}
    for row in forks.log.rows(
        f"SELECT {columns} FROM admissions WHERE purpose = 'fork' ORDER BY length(episode), episode"
    ):
        try:
            spec = read_spec(row)
        except JournalError:
            continue  # `episode list` names it
        if spec.fork is not None:
            points[spec.episode_id] = spec.fork
    return points
