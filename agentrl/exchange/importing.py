"""Imports files of other tools as a run, which every reading command and the viewer read like any other.

Owns the imported run: it is built under a temporary name and renamed when complete, so a file that is refused at its
last line leaves nothing behind. The files are untrusted; each error names file and line.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.clock import SystemClock
from agentrl.core.errors import EpisodeError, InputError, StorageError
from agentrl.core.files import os_error_advice, rename_durably
from agentrl.exchange.files import check_storable, staging_path
from agentrl.exchange.formats import IMPORTS
from agentrl.exchange.imported_episodes import (
    ImportedReply,
    all_policy_replies,
    build_episode_header,
    make_episode_spec,
    make_journal_entries,
    missing_data,
)
from agentrl.journal.entries import episode_digest
from agentrl.journal.store import SqliteJournal

if TYPE_CHECKING:
    from agentrl.exchange.imported_episodes import ImportedEpisode
    from agentrl.journal.entries import JournalEntry

WORKER = "import"
BATCH_EPISODES, BATCH_BYTES = 256, 16 << 20
"""Maximum numbers of episodes and bytes written per sync of the disk."""
MAX_NAME = 300
"""Maximum length of an episode's id, in characters."""
MAX_REWARD = 1e30
LATEST = 253_402_300_800.0
"""Seconds from the epoch to the year 10,000."""


class ImportResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an import."""

    path: str
    episodes: int
    turns: int
    not_told: dict[str, int]
    """Number of episodes that lack each kind of data."""


def import_run(source: Path, format: str, target: Path) -> ImportResult:
    """Import files of another tool as a run.

    Args:
        source: a file or a directory.
        format: one of `IMPORTS`.
        target: the run's directory, which must not exist.

    Raises:
        InputError: a file does not have the format or exceeds a limit, or the target exists.
        StorageError: the disk failed.
    """
    taken = f"{target}: exists; name a directory that does not"
    if os.path.lexists(target):
        raise InputError(taken)
    module, _, function = IMPORTS[format].read.partition(":")
    episodes: Iterator[ImportedEpisode] = getattr(import_module(module), function)(source)
    told = Counter[str]()
    try:
        with staging_path(target) as built:
            asyncio.run(_write(built / "journal", episodes, {"name": target.name, "imported": format}, told))
            if not told["episodes"]:
                raise InputError(f"{source}: it contains no episode")
            rename_durably(built, target)
    except FileExistsError as error:  # created in the meantime
        raise InputError(taken) from error
    except RecursionError as error:
        raise InputError(f"{source}: values nested deeper than can be read") from error
    except (OSError, StorageError) as error:
        why, mend = "the disk is full, or refuses", "free space or repair it, then import again"
        if isinstance(error, OSError):  # the journal's own message is about resuming a run
            why, mend = error.strerror or str(error), os_error_advice(error)
        raise StorageError(f"{target}: the run cannot be written ({why}); {mend}") from error
    counts = {name: told.pop(name) for name in ("episodes", "turns")}
    return ImportResult(path=str(target), **counts, not_told=dict(told))


class _Times(SystemClock):
    """Clock that returns the times of the imported episodes, if they have any."""

    at = 0.0

    def wall(self) -> float:
        return self.at or super().wall()


async def _write(
    directory: Path, episodes: Iterator[ImportedEpisode], info: dict[str, Any], told: Counter[str]
) -> None:
    clock = _Times()
    journal = SqliteJournal(directory, info=info, clock=clock)
    names: set[str] = set()

    async def commit(played: ImportedEpisode, entries: list[JournalEntry]) -> None:
        spec, log = make_episode_spec(played), journal.turn_log(WORKER)
        header = build_episode_header(played, log.name, len(entries))
        try:
            clock.at = played.started
            journal.admit(spec)
            for entry in entries:
                log.append(entry)
        except (EpisodeError, InputError) as error:
            raise InputError(f"{played.where}: {error}") from error
        clock.at = played.ended or played.started
        await journal.commit_episode(spec, header, episode_digest(entries), played.metrics, played.detail)

    try:
        batch: list[tuple[ImportedEpisode, list[JournalEntry]]] = []
        size = 0
        for played in episodes:
            _check_names(played, names)
            _check_values(played)
            entries = make_journal_entries(played)
            batch.append((played, entries))
            size += sum(len(entry.body) for entry in entries)
            told["episodes"] += 1
            told["turns"] += len(all_policy_replies(played))
            told.update(missing_data(played))
            if len(batch) >= BATCH_EPISODES or size >= BATCH_BYTES:
                await asyncio.gather(*(commit(*each) for each in batch))
                batch, size = [], 0
        await asyncio.gather(*(commit(*each) for each in batch))
    finally:
        await journal.close()


def _check_names(played: ImportedEpisode, names: set[str]) -> None:
    """Refuse duplicate ids and names that are too long to show."""
    if played.name in names:
        raise InputError(f"{played.where}: the id {played.name[:100]!r} is already used by another episode")
    names.add(played.name)
    seats = [agent.seat for agent in played.agents] + [agent.policy for agent in played.agents]
    for name in (played.name, played.environment, played.task_id, played.group, *seats):
        if len(name) > MAX_NAME:
            raise InputError(f"{played.where}: a name of {len(name):,} characters; at most {MAX_NAME}")


def _check_values(played: ImportedEpisode) -> None:
    """Refuse values that the journal cannot store, and numbers out of range."""
    check_storable(played.task, played.where)
    for agent in played.agents:
        for item in (item for row in agent.rows for item in row):
            check_storable(
                [call.arguments for call in item.calls] if isinstance(item, ImportedReply) else item, played.where
            )
        if not all((turn or 0) in range(1 << 31) and abs(value) <= MAX_REWARD for turn, value in agent.rewards):
            raise InputError(f"{played.where}: a reward of more than {MAX_REWARD:g}, or for a turn that does not exist")
    if played.oldest_step not in range(-1, 1 << 31):
        raise InputError(f"{played.where}: weights of a step that does not exist")
    replies = all_policy_replies(played)
    times = [played.started, played.ended, *(time for reply in replies for time in (reply.started, reply.seconds))]
    times += [call.seconds for reply in replies for call in reply.calls]
    if not all(0 <= time < LATEST for time in times):
        raise InputError(f"{played.where}: a time before 1970, or after the year 9999")
