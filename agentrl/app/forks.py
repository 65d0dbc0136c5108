"""`fork`: an episode of a run, played on from one of its turns, again and otherwise.

A fork takes over what was recorded before the turn, by reference, and goes its own way from there: its own sampling
seeds, its own random streams, its own effects. Forks are kept in a journal of their own, `RUN/forks`, which is read
like a run; the run itself, which may be going on, is not touched. They are neither trained nor counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.app.beside import play_beside, with_weights
from agentrl.app.parts import Adapters
from agentrl.app.players import Parent, Players, players
from agentrl.app.replays import environment_to_run, recorded_code
from agentrl.app.weights import load_weights
from agentrl.config.recorded import recorded_config
from agentrl.config.run import RunConfig
from agentrl.core import ids
from agentrl.core.errors import InputError, JournalError
from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, SeatBinding, Task
from agentrl.core.words import plural
from agentrl.environment.base import Environment
from agentrl.environment.registry import name_of, resolve
from agentrl.inspection.comparisons import FORKS
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import Begin, JournalEntry, TurnEntry
from agentrl.journal.forks import read_prefix
from agentrl.journal.reader import TurnReader
from agentrl.journal.rows import decode_entries
from agentrl.journal.run_log import SqliteRunLog
from agentrl.observe.run_directory import ENGINE_LOG
from agentrl.rollout.turn_entries import message_of


def fork(  # noqa: PLR0913 (one keyword per choice)
    run: str | Path,
    episode_id: str,
    *,
    at: int,
    n: int = 1,
    attempt: int | None = None,
    policy: str | Path | Sequence[str | Path] = (),
    edit: str | Sequence[Mapping[str, Any]] | None = None,
    environment: type | str | None = None,
    adapters: Adapters | None = None,
) -> list[EpisodeHeader]:
    """Play an episode on from one of its turns, which is sampled anew; nothing is trained.

    Children that the episode had got the results of, or that ended since, are taken over; others are started anew.

    Args:
        run: the run's directory, or `RUN/forks` to fork a fork.
        episode_id: as `agentrl episode list` shows it.
        at: the turn, from 0 over all agents in the order they were recorded; negative numbers count from the end.
        n: how many forks.
        attempt: which attempt of the episode; default: the newest.
        policy: who plays instead, one or several, see `app.players`: a directory of trained weights, a version of a
            policy of the run (`solver@0.5`), another policy in a seat (`checker=solver`, `checker=solver@0.5`).
            Default: the policies of the parent, each with its weights as of that turn, if they are still on disk.
        edit: what the policy is told at that turn instead: the content of the last message, or all messages, with
            `role` and `content`.
        environment: a class, a name, `module:Class` or a path, in place of what the episode names, which is refused
            unless it is installed or imported already: a journal is data, and does not say what code is run.
        adapters: who makes the engine and the chat format; default: what the run's configuration asks for.

    Returns:
        How the forks ended. They lie in `RUN/forks`, which `agentrl episode show` reads like a run.

    Raises:
        InputError: there is no such episode or turn, or the weights are gone.
        JournalError: the episode cannot be read.
    """
    path = Path(run)
    reader = RunReader(path)
    try:
        info = reader.info()
        journal = reader.journal
    finally:
        reader.close()
    parent = edited(find_parent(journal, episode_id, attempt, at), edit)
    config = recorded_config(info)
    chosen = environment_to_run(
        parent.begin.environment,
        None if environment is None else resolve(environment),
        recorded=recorded_code(info),
        code_hash=parent.begin.code_hash,
        command=f"agentrl episode fork {shlex.quote(str(path))} {episode_id} --at {at}",
    )
    where = path if info.get("forks") else path / FORKS
    asked = [policy] if isinstance(policy, str | Path) else policy
    who = players(config, parent, asked)
    kept = {"name": f"forks of {where.parent.name}", "forks": True, "code": info.get("code", {})}
    return asyncio.run(_fork(config, chosen, parent, where, n, who, adapters or Adapters(), kept))


def find_parent(journal: Path, episode_id: str, attempt: int | None, at: int) -> Parent:
    """The turn of an episode to fork at.

    Raises:
        InputError: there is no such episode or turn.
        JournalError: it cannot be read.
    """
    partition, own = _entries(journal, episode_id, attempt)
    begin = decode_entries(own[:1])[0]
    if not isinstance(begin, Begin):
        raise JournalError(f"{journal}: the entries of episode {episode_id} lack their beginning")
    points = _points(journal, partition, own[0], begin)
    whole = own if begin.fork is None else [*read_prefix(journal, begin.fork), *own]
    turns = [(entry, body) for entry in whole if isinstance(body := entry.decode(), TurnEntry)]
    if not -len(turns) <= at < len(turns):
        raise InputError(
            f"episode {episode_id} has {plural(len(turns), 'turn')}, so there is no turn {at} to fork it at"
        )
    at %= len(turns)
    entry = turns[at][0]
    point = replace(points[entry.episode_id], call_id=entry.call_id)
    directories = {name: known.journal for name, known in points.items()}
    return Parent(begin=begin, point=point, turns=[body for _, body in turns[: at + 1]], ancestors=directories)


def edited(parent: Parent, edit: str | Sequence[Mapping[str, Any]] | None) -> Parent:
    """The same parent, with other words for the policy at the fork point.

    Raises:
        InputError: they are no messages, or there is none whose content could be edited.
    """
    if edit is None:
        return parent
    messages = [dict(message) for message in parent.turns[-1].messages]
    if isinstance(edit, str):
        if not messages:
            raise InputError("at that turn the policy is told nothing, so there is nothing to edit")
        messages[-1]["content"] = edit
    else:
        messages = [dict(message) for message in edit]
    try:
        for message in messages:
            message_of(message)
    except JournalError as error:
        raise InputError(f'{error}; write [{{"role": "user", "content": "…"}}]') from error
    return replace(parent, point=replace(parent.point, messages=tuple(messages)))


def fork_spec(
    parent: Parent,
    number: int,
    journal: Path,
    environment: type[Environment],
    n: int,
    seats: Mapping[str, str] = MappingProxyType({}),
) -> EpisodeSpec:
    """Fork `number` of an episode, to be written to a journal directory; one of `n`. `seats` others hold than there."""
    begin, episode_id = parent.begin, ids.episode_id("f", number)
    return EpisodeSpec(
        episode_id=episode_id,
        environment=name_of(environment),
        task=Task(id=begin.task_id, data=begin.task),
        seed=ids.key64("fork", begin.seed, episode_id, parent.point.episode_id, parent.point.call_id),
        seats={seat: SeatBinding(policy) for seat, policy in {**begin.seats, **seats}.items()},
        group_id=f"{parent.point.episode_id}.{parent.point.attempt}.{parent.point.call_id}",
        group_size=n,
        purpose="fork",
        fork=replace(parent.point, journal=os.path.relpath(parent.point.journal, journal)),
    )


async def _fork(
    config: RunConfig,
    environment: type[Environment],
    parent: Parent,
    where: Path,
    n: int,
    who: Players,
    adapters: Adapters,
    kept: Mapping[str, Any],
) -> list[EpisodeHeader]:
    from agentrl.journal.store import SqliteJournal

    config = with_weights(config, who.weights)
    chat_format = adapters.chat_format(config)
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteJournal(where / "journal", info={**kept, "config": config.model_dump(mode="json")})
        stack.push_async_callback(store.close)
        versions = {known: PolicyVersion(known, 0, 0) for known in config.policies}
        engine = await adapters.engine(config, versions, lambda death: None, where / ENGINE_LOG)
        stack.push_async_callback(engine.close)
        await load_weights(config, engine, store, who.weights)
        first = store.next_number("f")
        journal = where / "journal"
        specs = [fork_spec(parent, first + index, journal, environment, n, who.seats) for index in range(n)]
        ended = ended_children(parent)
        return await play_beside(
            config, environment, engine, chat_format, store, lambda dispatcher: dispatcher.play_forks(specs, ended)
        )


def _entries(journal: Path, episode_id: str, attempt: int | None) -> tuple[str, list[JournalEntry]]:
    """The partition of an episode's attempt and its own entries."""
    log, turns = SqliteRunLog(journal), TurnReader(journal)
    try:
        attempts = [row[0] for row in log.rows("SELECT attempt FROM admissions WHERE episode = ?", episode_id)]
        if not attempts or (attempt is not None and attempt not in attempts):
            name = episode_id if attempt is None else f"{episode_id}, attempt {attempt}"
            raise InputError(f"{journal.parent}: no episode {name}; `agentrl episode list {journal.parent}` shows them")
        asked = max(attempts) if attempt is None else attempt
        statement = "SELECT partition FROM episodes WHERE episode = ? AND attempt = ? AND partition IS NOT NULL"
        committed = log.rows(statement, episode_id, asked)
        partition: str | None = committed[0][0] if committed else turns.partition_of(episode_id, asked)
        entries = [] if partition is None else turns.read(partition, episode_id, asked)
        if partition is not None and entries:
            return partition, entries
        turns.check_pruned(episode_id, asked)
    finally:
        log.close()
        turns.close()
    raise InputError(f"{journal.parent}: episode {episode_id} has no entries yet; fork it later")


def _points(journal: Path, partition: str, first: JournalEntry, begin: Begin) -> dict[str, ForkPoint]:
    """Where an episode and what it was forked from lie, by episode id; call ids are not looked at."""
    directory = os.path.abspath(journal)
    points = {first.episode_id: _point(directory, partition, first)}
    while begin.fork is not None:
        if begin.fork.episode_id in points:
            raise JournalError(f"{journal}: the forks of {first.episode_id} refer to each other in a circle")
        directory = os.path.normpath(os.path.join(directory, begin.fork.journal))
        points[begin.fork.episode_id] = replace(begin.fork, journal=directory)
        _, entries = _entries(Path(directory), begin.fork.episode_id, begin.fork.attempt)
        found = decode_entries(entries[:1])[0]
        assert isinstance(found, Begin)
        begin = found
    return points


def _point(directory: str, partition: str, entry: JournalEntry) -> ForkPoint:
    return ForkPoint(
        journal=directory,
        partition=partition,
        episode_id=entry.episode_id,
        attempt=entry.attempt,
        call_id=entry.call_id,
    )


def ended_children(parent: Parent) -> dict[str, EpisodeHeader]:
    """How the children of an episode, and of what it was forked from, ended; those that run are left out."""
    ended: dict[str, EpisodeHeader] = {}
    for episode_id, directory in parent.ancestors.items():
        log = SqliteRunLog(Path(directory))
        try:
            ended.update(log.ended_children({episode_id}))
        finally:
            log.close()
    return ended
