"""Exports episodes of a run as a file or a directory in another format, completely or not at all.

Owns the placement of an export. It is built next to its target, synced, and then renamed, so a killed process leaves no
partial export. An existing name is refused, and no link is followed.

`--to html` is the viewer and all the answers that it requests, as one file that opens without a server. Answers are
compressed separately, but those about one episode together, so the page opens before they are unpacked.
"""

from __future__ import annotations

import errno
import gzip
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from agentrl.core.errors import AgentRLError, InputError, StorageError
from agentrl.core.files import LOCAL, os_error_advice
from agentrl.core.text import plural
from agentrl.inspection.comparisons import FORKS, fork_tree
from agentrl.inspection.export.formats import EXPORTS
from agentrl.inspection.export.staging import staging_path
from agentrl.inspection.search import episodes_with_words
from agentrl.inspection.tokens import read_step_rows
from agentrl.inspection.viewer.page import self_contained_page
from agentrl.inspection.viewer.queries import QUESTIONS, Parameters, answer_episode_queries, as_json, run_summary
from agentrl.observe.run_directory import run_argument

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.inspection.reader import RunReader


T = TypeVar("T")
PROGRESS_EPISODES = 100
"""Number of episodes between two reports of progress."""


class ExportSelection(NamedTuple):
    """Episodes of a run to export."""

    reader: RunReader
    keys: list[tuple[str, int]]
    """Ids and attempts, in order of admission."""
    problems: list[str]
    """Unreadable data with its episode; filled by the writer."""
    on_progress: Callable[[str, float], None]
    """Receives the current part of a long export, and the share that is done."""
    missing: list[str]
    """Ids of episodes that could not be written; filled by the writer."""

    def leave_out(self, episode: str, why: str) -> None:
        """Record that an episode cannot be written."""
        self.missing.append(episode)
        self.problems.append(f"{episode}: left out: {why}")

    def reported(self, episodes: Sequence[T], forks: int = 0) -> Iterator[T]:
        """Iterate over episodes to write, the last ones `forks`, and report the progress."""
        total = plural(len(episodes), "episode") + (f", with {plural(forks, 'fork')}" if forks else "")
        for number, episode in enumerate(episodes):
            if number and number % PROGRESS_EPISODES == 0:
                self.on_progress(f"{number:,} of {total}", number / len(episodes))
            yield episode


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an export."""

    format: str
    path: str
    episodes: int
    """Number of episodes written."""
    unreadable: int
    """Number of episodes that could not be written."""
    left_out: int
    """Number of older episodes that the limit left out."""
    problems: list[str]
    """Problems of episodes that could be read only in part, or not at all."""


def export(
    reader: RunReader,
    format: str,
    out: Path | None = None,
    *,
    where: str = "",
    match: str = "",
    limit: int | None = None,
    force: bool = False,
    on_progress: Callable[[str, float], None] = lambda part, share: None,
) -> ExportResult:
    """Write the newest episodes that pass a filter and a search.

    Args:
        reader: reader of the run.
        format: one of `EXPORTS`.
        out: file to create; by default in the run's directory.
        where: filter, as in `RunReader.episodes`.
        match: search term, as in `search.episodes_with_words`.
        limit: maximum number of episodes; by default that of the format.
        force: replace an existing file.
        on_progress: receives the current part of a long export, and the share that is done.

    Raises:
        InputError: no episode passes, the target exists, or the package that writes the format is not installed.
        StorageError: the run cannot be read, or the disk failed.
    """
    target = out or reader.path / EXPORTS[format].file
    _check(target, force=force)
    limit = EXPORTS[format].limit if limit is None else limit
    if limit is not None and limit < 1:
        raise InputError("--limit must be 1 or more")
    keys = reader.keys(where, among=episodes_with_words(reader, match) if match else None)
    selection = ExportSelection(reader, keys[-limit:] if limit is not None else keys, [], on_progress, [])
    if not selection.keys:
        raise InputError(
            f"{reader.path}: no episode matches the filter; `agentrl episode list {run_argument(reader.path)}` lists "
            "all"
        )
    module, _, function = EXPORTS[format].write.partition(":")
    write = getattr(import_module(module), function)
    try:
        with staging_path(target) as built, reader.remembering():
            write(selection, built)
            _settle(built, target, force=force)
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else str(error)
        other = ", or name another place with --out" if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else ""
        raise StorageError(
            f"{target}: the export cannot be written ({problem}); {os_error_advice(error)}{other}"
        ) from error
    return ExportResult(
        format=format,
        path=str(target),
        episodes=len(selection.keys) - len(selection.missing),
        unreadable=len(selection.missing),
        left_out=len(keys) - len(selection.keys),
        problems=selection.problems,
    )


def _settle(built: Path, target: Path, *, force: bool) -> None:
    """Rename the finished export to its target."""
    try:
        LOCAL.sync(built)
        if force:
            os.replace(built, target)
        else:
            os.link(built, target)  # unlike a rename, a link never replaces a file
        LOCAL.sync(target.parent)
    except FileExistsError:  # created by someone else in the meantime
        _check(target)


def _check(target: Path, *, force: bool = False) -> None:
    """Refuse an existing target, or one in no existing directory; with `force`, a file may replace a file or a link."""
    if target.name in ("", ".."):
        raise InputError(f"{target}: is a directory; give a path inside it with --out")
    if not target.parent.is_dir():
        nearest = next(parent for parent in target.absolute().parents if parent.is_dir())
        raise InputError(
            f"{target}: there is no directory {target.parent}, and the nearest that exists is {nearest}; create it, or "
            "name another place with --out"
        )
    if not os.path.lexists(target):
        return
    is_file = target.is_symlink() or target.is_file()
    if not (force and is_file):
        remedy = "use --force to replace it, or " if is_file else "remove it, or " if target.is_dir() else ""
        raise InputError(f"{target}: exists; {remedy}name another place with --out")


# --- one page of HTML -------------------------------------------------------------------------------------------------

MAX_EPISODES = 10_000
"""Maximum number of episodes in a page; use `agentrl run serve` for more."""


def write_html_page(selection: ExportSelection, path: Path) -> None:
    """Write the page. Damage of an episode is shown at the damaged part.

    Raises:
        InputError: there are too many episodes for one page.
    """
    if len(selection.keys) > MAX_EPISODES:
        run = run_argument(selection.reader.path)
        raise InputError(
            f"{len(selection.keys):,} episodes are too many for one page, which holds {MAX_EPISODES:,}: choose some"
            f" with --where or --limit, or browse all of them with `agentrl run serve {run}`"
        )
    index: dict[str, int] = {}
    blocks = [b""]  # the first block is the index, which is filled in last
    for name, value in _answers(selection):
        index[name] = len(blocks)
        blocks.append(_compress(value))
    blocks[0] = _compress({"blocks": index, "all": selection.reader.count()})
    path.write_text(self_contained_page(blocks), encoding="utf-8")


def _answers(selection: ExportSelection) -> Iterator[tuple[str, Any]]:
    """Yield the answers that the page requests, by name."""
    reader, problems = selection.reader, selection.problems
    # Neighboring episodes were mostly trained in neighboring steps, so a few steps' columns are kept.
    read = lru_cache(4)(read_step_rows)

    def answer_episode(reader: RunReader, parameters: Parameters) -> Any:
        return answer_episode_queries(reader, parameters, read)

    lines = reader.lines(selection.keys)
    yield "run", run_summary(reader, len(lines))
    yield "statuses", Counter(line.status for line in lines)
    yield "episodes", lines
    for question in ("overview", "metrics", "forks", "evaluations"):
        yield question, _answer(QUESTIONS[question], reader, {}, problems)
    for name in reader.metric_names():
        yield f"series {name}", _answer(QUESTIONS["series"], reader, {"metric": name}, problems)
    steps = _answer(QUESTIONS["steps"], reader, {}, problems)
    yield "steps", steps
    for step in steps if isinstance(steps, list) else []:
        parameters = {"policy": step.policy, "lineage": str(step.lineage), "step": str(step.step)}
        yield f"step {step.policy} {step.lineage} {step.step}", _answer(QUESTIONS["step"], reader, parameters, problems)
    fork_lines = [(f"{FORKS}/{fork.line.episode}", fork.line) for fork in fork_tree(reader) if fork.depth]
    for name, line in selection.reported([*((line.episode, line) for line in lines), *fork_lines], len(fork_lines)):
        parameters = {"episode": name, "attempt": str(line.attempt)}
        yield f"episode {name} {line.attempt}", _answer(answer_episode, reader, parameters, problems)


def _answer(
    ask: Callable[[RunReader, Parameters], Any], reader: RunReader, parameters: Parameters, problems: list[str]
) -> Any:
    try:
        return ask(reader, parameters)
    except AgentRLError as error:
        problems.append(str(error))
        return {"error": str(error)}


def _compress(value: Any) -> bytes:
    return gzip.compress(as_json(value), 6, mtime=0)
