"""`whatif`: what changed code of the environment would have done to recorded episodes.

Each episode is executed again over its journal. Up to the first call that differs, everything comes from the record:
replies, results of tools, random draws. From there, a fork samples the rest, with the weights that the episode used. An
episode without such a call needs no model: its rewards are computed again. So only what the change touches costs
tokens, and each episode is compared with itself.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentrl.app.forks import ForkParent, find_parent, fork_parents
from agentrl.app.received import ReceivedRun
from agentrl.app.replays import replay
from agentrl.core import ids
from agentrl.core.betting import AnytimeInterval, verdict_words
from agentrl.core.errors import InputError
from agentrl.core.files import expand_path
from agentrl.core.intervals import confidence_half_width
from agentrl.core.own_loop import outside_event_loop
from agentrl.inspection.comparisons import FORKS, WhatIfEffect, WhatIfEpisode, WhatIfResult
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import SpawnEntry, TurnEntry
from agentrl.journal.reader import AT_END

if TYPE_CHECKING:
    from agentrl.app.run_parts import RunFactories
    from agentrl.core.records import EpisodeHeader
    from agentrl.inspection.comparisons import ReplayResult
    from agentrl.inspection.reader import EpisodeView

Rewards = Mapping[str, float]
"""Reward of each rewarded seat, summed over its agents."""


@outside_event_loop
def whatif(
    run: str | Path,
    episodes: Sequence[tuple[str, int | None]],
    *,
    environment: type | str,
    overrides: Sequence[str] = (),
    factories: RunFactories | None = None,
    on_progress: Callable[[str, float], None] = lambda part, share: None,
) -> WhatIfResult:
    """Execute recorded episodes in a changed environment.

    Args:
        run: the run's directory, which is not changed; forks go to `RUN/forks`.
        episodes: id and attempt of each episode; None: the newest attempt.
        environment: the changed class, or a reference to it; see `fork`.
        overrides: see `fork`.
        factories: see `fork`.
        on_progress: receives the current part, and its share that is done.

    Raises:
        InputError: there is no such episode, the weights of one are gone, or only the run names what it needs.
        JournalError: the control log is damaged.
    """
    replays = partial(replay, run, environment=environment, overrides=overrides, factories=factories)
    first = replays(episodes, on_progress=on_progress)
    departed = [result for result in first if result.outcome == "departed"]
    named = [(result.episode, result.attempt) for result in departed]
    rescored = replays(named, rescoring=True, on_progress=on_progress) if named else []
    new_rewards = {
        (result.episode, result.attempt): _of_seats(result.after)
        for result in rescored
        if result.outcome == "identical"
    }
    with contextlib.closing(RunReader(run)) as reader:
        judged = [_judged(reader, result, new_rewards.get((result.episode, result.attempt))) for result in first]
    if differing := [episode for episode in judged if episode.outcome == "resampled"]:
        received = ReceivedRun(Path(expand_path(run)), overrides)
        forks = _resample(differing, received, environment, factories, on_progress)
        judged = [forks.get(episode.episode, episode) for episode in judged]
    sampled, tokens = sum(episode.sampled for episode in judged), sum(episode.tokens for episode in judged)
    return WhatIfResult(
        episodes=judged,
        effects=_effects(judged),
        sampled=sampled,
        saved=1.0 - sampled / tokens if tokens else 0.0,
    )


def newest_evaluation(reader: RunReader) -> list[tuple[str, int | None]]:
    """Return the episodes of a run's newest evaluation.

    Raises:
        InputError: the run has none.
    """
    lines = reader.episodes("purpose = 'evaluate' and status = 'finished'", sort="admitted_at", limit=1)
    if not lines:
        raise InputError(f"{reader.path}: the run has no evaluation; choose episodes with --where, such as 'turns > 0'")
    newest = lines[0]
    where = f"purpose = 'evaluate' and status = 'finished' and oldest_step = {newest.oldest_step}"
    where += f" and lineage = {newest.lineage}" if newest.oldest_step is not None else ""
    lines = reader.episodes(where if newest.oldest_step is not None else "purpose = 'evaluate'", limit=1 << 20)
    return [(line.episode, line.attempt) for line in lines if line.parent is None]


def _judged(reader: RunReader, result: ReplayResult, new_rewards: Rewards | None) -> WhatIfEpisode:
    """Return what replays say of an episode; `resampled` if a fork must sample its rest."""
    view = reader.episode(result.episode, result.attempt)
    line = view.summary
    before = _of_seats({f"{agent.seat}[{agent.index}]": agent.reward for agent in view.agents})
    found = WhatIfEpisode(
        episode=line.episode,
        attempt=line.attempt,
        task=line.task,
        outcome="left_out",
        before=before,
        call=result.call,
        text=result.text,
        tokens=line.tokens or 0,
    )
    if reason := _why_left_out(view, result):
        return msgspec.structs.replace(found, text=reason)
    if result.outcome == "identical":
        return msgspec.structs.replace(found, outcome="identical", after=before)
    if new_rewards is not None:
        return msgspec.structs.replace(found, outcome="rescored", after=dict(new_rewards))
    return msgspec.structs.replace(found, outcome="failed" if result.call is None else "resampled")


def _why_left_out(view: EpisodeView, result: ReplayResult) -> str:
    """Return why an episode's rest cannot be judged; empty if it can."""
    line = view.summary
    if result.outcome in ("damaged", "not_replayable"):
        return result.text
    if line.stop_reason is None:
        return f"it was dropped as {line.drop_reason}" if line.drop_reason else "it has not ended"
    if any(isinstance(body, SpawnEntry) for _, body in view.entries):
        return "it has child episodes, in which the change would not show"
    if any(isinstance(body, TurnEntry) and not ids.has_call_number(call) for call, body in view.entries):
        return "its agent runs outside the environment and sends its own requests"
    if "~" in line.episode:
        return "it is a branch or a child of another episode"
    return ""


def _resample(
    episodes: Sequence[WhatIfEpisode],
    received: ReceivedRun,
    environment: type | str,
    factories: RunFactories | None,
    on_progress: Callable[[str, float], None],
) -> dict[str, WhatIfEpisode]:
    """Sample the rest of episodes from the first call that differs; returns the episodes by id."""
    with contextlib.closing(RunReader(received.run)) as reader:
        parents = [_parent(reader, episode) for episode in episodes]
    headers = fork_parents(
        parents,
        received=received,
        command=received.command("run whatif", environment=environment),
        environment=environment,
        factories=factories,
        on_progress=on_progress,
    )
    return {
        episode.episode: _resampled(episode, parent, header)
        for episode, parent, header in zip(episodes, parents, headers, strict=True)
    }


def _parent(reader: RunReader, episode: WhatIfEpisode) -> ForkParent:
    """Return the start of the fork: the first call that differs."""
    recorded = {call for call, _ in reader.episode(episode.episode, episode.attempt).entries}
    call = episode.call if episode.call in recorded else AT_END
    return find_parent(reader.journal, episode.episode, episode.attempt, call)


def _resampled(episode: WhatIfEpisode, parent: ForkParent, header: EpisodeHeader) -> WhatIfEpisode:
    inherited = sum(len(turn.sampled(plain=True)) for turn in parent.prefix if isinstance(turn, TurnEntry))
    sampled = msgspec.structs.replace(
        episode,
        text="",
        fork=f"{FORKS}/{header.episode_id}",
        sampled=header.tokens,
        tokens=inherited + header.tokens,
    )
    if not header.committed:
        return msgspec.structs.replace(sampled, outcome="failed", text=f"dropped as {header.drop_reason}")
    rewards = {f"{unit.seat}[{unit.index}]": unit.reward for unit in header.trajectories}
    return msgspec.structs.replace(sampled, after=_of_seats(rewards))


def _of_seats(rewards: Mapping[str, float | None]) -> dict[str, float]:
    """Return the reward of each rewarded seat from those of its agents, `SEAT[INDEX]`."""
    seats: dict[str, float] = {}
    for agent, reward in rewards.items():
        if reward is not None:
            seat = agent.rpartition("[")[0]
            seats[seat] = seats.get(seat, 0.0) + reward
    return seats


def _effects(episodes: Sequence[WhatIfEpisode]) -> list[WhatIfEffect]:
    """Return the mean difference of each seat over tasks, with its interval."""
    effects = []
    for seat in dict.fromkeys(seat for episode in episodes for seat in episode.after):
        pairs: dict[str, list[tuple[float, float]]] = {}
        for episode in episodes:
            if seat in episode.before and seat in episode.after:
                pairs.setdefault(episode.task, []).append((episode.before[seat], episode.after[seat]))
        if not pairs:
            continue
        before, after = (
            [statistics.fmean(pair[side] for pair in of_task) for of_task in pairs.values()] for side in (0, 1)
        )
        differences = [new - old for old, new in zip(before, after, strict=True)]
        difference, error = statistics.fmean(differences), confidence_half_width(differences)
        interval = AnytimeInterval(difference - error, difference + error)
        effects.append(
            WhatIfEffect(
                seat=seat,
                episodes=sum(map(len, pairs.values())),
                before=statistics.fmean(before),
                after=statistics.fmean(after),
                difference=difference,
                error=error,
                verdict=verdict_words(interval) if len(differences) > 1 else "undecided",
            )
        )
    return effects
