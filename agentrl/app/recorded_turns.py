"""Recorded turns at which training groups begin: `environment.start_from`.

Each is a fork point in the journal of another run. The turns before it are context: they are recalled, not sampled
again and not trained. What cannot be recalled exactly is refused here, before the run begins. The choice is kept in the
run's directory, so that a resumed run makes the same one even if the other run has grown.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from agentrl.app.forks import ForkParent, find_parent
from agentrl.app.received import check_recorded_turns, remember_recorded_turns
from agentrl.config.sections import RecordedTurnsConfig
from agentrl.core import ids
from agentrl.core.errors import InputError, JournalError, PrunedDataError
from agentrl.core.files import open_regular, read_at_most, replace_file
from agentrl.core.records import GroupStart
from agentrl.core.text import plural
from agentrl.environment.environment import Environment
from agentrl.environment.mixture import root_environment_of_task, trained_root_environments
from agentrl.environment.registry import name_of
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import ResourceCallEntry, SpawnEntry, code_digest
from agentrl.observe.run_directory import RECORDED_TURNS, run_argument

MAX_EPISODES = 1000
"""Maximum number of episodes whose turns are used."""
MAX_FILE_BYTES = 1 << 30


def find_recorded_turns(
    settings: RecordedTurnsConfig | None, seed: int, environment: type[Environment], run: Path
) -> Sequence[GroupStart]:
    """Return the recorded turns at which groups of a run may begin; empty if none are configured.

    Args:
        settings: `environment.start_from`.
        seed: seed of the run.
        environment: class of root episodes, or a mixture of classes.
        run: directory of the run, which need not exist.

    Raises:
        InputError: the other run does not exist, none of its episodes fits, or an episode's beginning cannot be
            recalled here.
        JournalError: its journal, or the file of the choice, is damaged.
    """
    if settings is None:
        return ()
    if os.path.lexists(run / RECORDED_TURNS):
        kept = _kept_turns(run / RECORDED_TURNS)
        check_recorded_turns(run, environment, kept)
        return kept
    roots = {name_of(root): root for root in trained_root_environments(environment)}
    parents = _parents(settings, seed)
    starts = []
    for parent in parents:
        _check_recallable(parent, roots, environment, settings)
        task = parent.spec.task
        starts.append(GroupStart(task, parent.point_for(run.absolute() / "journal")))
    return starts


def _kept_turns(path: Path) -> list[GroupStart]:
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(read_at_most(file, MAX_FILE_BYTES), type=list[GroupStart])
    except (OSError, ValueError, RecursionError) as error:
        raise JournalError(f"{path}: the turns at which groups begin cannot be read ({error})") from error


def keep_recorded_turns(starts: Sequence[GroupStart], environment: type[Environment], run: Path) -> None:
    """Keep the chosen turns in the run's directory, and remember that the user chose them."""
    if starts and not os.path.lexists(run / RECORDED_TURNS):
        remember_recorded_turns(run, environment, starts)
        replace_file(run / RECORDED_TURNS, msgspec.json.encode(starts))


def _parents(settings: RecordedTurnsConfig, seed: int) -> list[ForkParent]:
    """Return the episodes that pass the filter, each with its turn."""
    path, where = Path(settings.run), settings.where.strip()
    if not (path / "journal").is_dir():
        raise InputError(f"environment.start_from.run: {path} contains no run; `agentrl run list` shows runs")
    reader = RunReader(path)
    try:
        condition = "purpose = 'train' and turns > 0"
        keys = reader.keys(f"({where}) and {condition}" if where else condition)
        total = reader.count(condition)
        journal = reader.journal
    except InputError as error:
        raise InputError(f"environment.start_from.where, read as {error}") from None
    finally:
        reader.close()
    if not keys:
        raise InputError(
            f"environment.start_from.where: none of the {plural(total, 'finished training episode')} of {path} matches "
            f"{where!r}; `agentrl episode list {path} --where …` shows what a filter finds"
        )
    if len(keys) > MAX_EPISODES:
        keys = random.Random(ids.stable_hash64(seed, "recorded turns")).sample(keys, MAX_EPISODES)
    parents, missing = [], Counter[str]()
    for episode, attempt in keys:
        try:
            parents.append(find_parent(journal, episode, attempt, settings.at))
        except InputError:
            missing["have no such turn"] += 1
        except PrunedDataError:
            missing["were pruned"] += 1
    if not parents:
        reasons = " and ".join(f"{count:,} {reason}" for reason, count in missing.items())
        raise InputError(
            f"environment.start_from.at = {settings.at!r}: of the {plural(len(keys), 'episode')} of {path} that match, "
            f"{reasons}"
        )
    return parents


def _check_recallable(
    parent: ForkParent,
    roots: Mapping[str, type[Environment]],
    environment: type[Environment],
    settings: RecordedTurnsConfig,
) -> None:
    """Refuse a turn whose episode cannot be recalled up to it.

    Raises:
        InputError: the message has the reason.
    """
    begin, episode = parent.begin, f"episode {parent.point.episode_id} of {settings.run}"
    root = roots.get(begin.environment)
    try:
        by_task = root_environment_of_task(environment, begin.task_id)
    except KeyError:
        by_task = None
    if root is None or by_task is not root:
        raise InputError(
            f"environment.start_from: {episode} was played in {begin.environment}, which is not trained here "
            f"({', '.join(roots)}); add a condition to `where`, such as environment = '{next(iter(roots))}'"
        )
    code_hash = code_digest(root.source())
    if begin.code_hash != code_hash:
        raise InputError(
            f"environment.start_from: {episode} was played by other code of {begin.environment} ({begin.code_hash}) "
            f"than there is now ({code_hash}), so its turns may not fit. Restore that code, or record episodes with "
            "the new code"
        )
    if not ids.has_call_number(parent.point.call_id):
        raise InputError(
            f"environment.start_from: turn {settings.at} of {episode} was requested by an external agent, which cannot "
            f"be started in the middle; fork it with `agentrl episode fork {run_argument(settings.run)} "
            f"{parent.point.episode_id} --at TURN`"
        )
    for body in parent.prefix:
        if isinstance(body, SpawnEntry):
            raise InputError(
                f"environment.start_from: {episode} had started child episodes before turn {settings.at}, which belong "
                "to that run; choose an earlier turn"
            )
        if isinstance(body, ResourceCallEntry) and body.level == "pinned":
            raise InputError(
                f"environment.start_from: {episode} had used {body.resource} before turn {settings.at}, which is "
                "pinned to the process that made it; choose an earlier turn"
            )
