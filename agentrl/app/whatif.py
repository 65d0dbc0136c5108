"""`whatif`: what changed code of the environment would have done to recorded episodes.

Each episode is executed again over its journal. Up to the first call that differs, everything comes from the record:
replies, results of tools, random draws. From there, a fork samples the rest, with the weights that the episode used. An
episode without such a call needs no model: its rewards are computed again. So only what the change touches costs
tokens, and each episode is compared with itself.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentrl.app.forks import ForkParent, find_parent, fork_parents, forks_directory
from agentrl.app.received import ReceivedRun, class_name, recorded_environment_code
from agentrl.app.replays import replay
from agentrl.core import ids
from agentrl.core.betting import AnytimeInterval, verdict_words
from agentrl.core.errors import InputError
from agentrl.core.files import expand_path
from agentrl.core.intervals import half_width_of_few
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.records import PolicyVersion, Task
from agentrl.environment.registry import resolve
from agentrl.environment.task_contents import task_digest
from agentrl.inspection.comparisons import FORKS, WhatIfEffect, WhatIfEpisode, WhatIfResult, agent_rewards
from agentrl.inspection.reader import RunReader
from agentrl.inspection.run_comparison import first_lineage, held_out_task_keys
from agentrl.journal.entries import BeginEntry, EffectEntry, SpawnEntry, ToolEntry, TurnEntry
from agentrl.journal.reader import AT_END

if TYPE_CHECKING:
    from agentrl.app.run_parts import RunFactories
    from agentrl.core.records import EpisodeHeader
    from agentrl.inspection.comparisons import ReplayResult
    from agentrl.inspection.reader import EpisodeView

MIN_TASKS = 6
"""Number of tasks from which on equal differences decide."""
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
    received = ReceivedRun(Path(expand_path(run)), overrides)
    replays = partial(replay, run, environment=environment, overrides=overrides, factories=factories)
    first = replays(list(dict.fromkeys(episodes)), on_progress=on_progress)
    departed = [(result.episode, result.attempt) for result in first if result.outcome == "departed"]
    rescored = replays(departed, rescoring=True, on_progress=on_progress) if departed else []
    new_rewards = {
        (result.episode, result.attempt): _of_seats(result.after)
        for result in rescored
        if result.outcome == "identical"
    }
    with contextlib.closing(RunReader(received.run)) as reader:
        classes = _recorded_classes(reader, environment)
        judged = [
            _judged(reader, result, new_rewards.get((result.episode, result.attempt)), classes) for result in first
        ]
    if differing := [episode for episode in judged if episode.outcome == "resampled"]:
        forks = _resample(differing, received, environment, factories, on_progress)
        judged = [forks.get((episode.episode, episode.attempt), episode) for episode in judged]
    counted = [episode for episode in judged if episode.outcome not in ("failed", "left_out")]
    tokens, sampled = sum(episode.tokens for episode in counted), sum(episode.sampled for episode in judged)
    return WhatIfResult(
        episodes=judged,
        effects=_effects(counted),
        sampled=sampled,
        saved=max(1.0 - sampled / tokens, 0.0) if tokens else None,
    )


def newest_evaluation(reader: RunReader) -> list[tuple[str, int | None]]:
    """Return the episodes of a run's newest evaluation, children left out.

    Raises:
        InputError: the run has none.
    """
    roots = [
        line
        for line in reader.episodes("purpose = 'evaluate'", sort="admitted_at", limit=1 << 20)
        if line.parent is None and line.status != "repeated"
    ]
    sampled_by = _sampled_by(reader)
    versions: dict[str, PolicyVersion] = {}
    ended_at = -math.inf
    for line in roots:
        of_episode = sampled_by.get((line.episode, line.attempt), {})
        if any(versions.get(policy, version) != version for policy, version in of_episode.items()):
            ended_at = line.admitted_at
            break
        versions |= of_episode
    if not versions:
        raise InputError(f"{reader.path}: the run has no evaluation; choose episodes with --where, such as 'turns > 0'")
    # an episode without turns has no version, but was admitted after all of the evaluation before
    newest = [(line.episode, line.attempt) for line in roots if line.admitted_at > ended_at]
    # Of a task that was played again, since the reward's code had changed, the newest episode counts.
    keys = held_out_task_keys(reader, newest)
    by_task: dict[object, tuple[str, int | None]] = {}
    for episode in newest:
        by_task.setdefault(keys.get(episode, episode), episode)
    return list(reversed(by_task.values()))


def _sampled_by(reader: RunReader) -> Mapping[tuple[str, int], Mapping[str, PolicyVersion]]:
    """Return the versions that sampled each held-out episode, by policy, under the first id of their weights: a resume
    plays the rest of an evaluation under another one."""
    parents, versions = reader.log.parents(), dict[tuple[str, int], dict[str, PolicyVersion]]()
    for episode, attempt, policy, lineage, step in reader.log.rows(
        "SELECT t.episode, t.attempt, t.policy, t.lineage, t.oldest_step FROM trajectories t"
        " JOIN episodes e ON e.episode = t.episode AND e.attempt = t.attempt WHERE e.purpose = 'evaluate'"
    ):
        version = PolicyVersion(policy, lineage, step)
        versions.setdefault((episode, attempt), {})[policy] = version._replace(lineage=first_lineage(version, parents))
    return versions


def _recorded_classes(reader: RunReader, environment: type | str) -> Mapping[str, bool]:
    """Return the names of the run's environments, and whether the changed code has a class for each. If none of its
    classes has a recorded name, the changed class replaces the only environment of the run."""
    references = recorded_environment_code(reader.info())
    changed = resolve(environment)
    module = sys.modules.get(changed.__module__)
    names = {name: class_name(reference) for name, reference in references.items()}
    has_class = {name: isinstance(getattr(module, recorded, None), type) for name, recorded in names.items()}
    return has_class if changed.__name__ in names.values() else {}


def _judged(
    reader: RunReader, result: ReplayResult, new_rewards: Rewards | None, classes: Mapping[str, bool]
) -> WhatIfEpisode:
    """Return what replays say of an episode; `resampled` if a fork must sample its rest."""
    view = reader.episode(result.episode, result.attempt)
    line = view.summary
    before = _of_seats(agent_rewards(view.agents))
    found = WhatIfEpisode(
        episode=line.episode,
        attempt=line.attempt,
        task=_task_key(view),
        outcome="left_out",
        before=before,
        call=result.call,
        text=result.text,
        tokens=line.tokens or 0,
        has_effects=any(
            isinstance(body, EffectEntry) or (isinstance(body, ToolEntry) and body.external) for _, body in view.entries
        ),
    )
    if reason := _why_left_out(view, result, classes):
        return msgspec.structs.replace(found, text=reason)
    if result.outcome == "identical":
        return msgspec.structs.replace(found, outcome="identical", after=before)
    if new_rewards is not None:
        return msgspec.structs.replace(found, outcome="rescored", after=dict(new_rewards))
    return msgspec.structs.replace(found, outcome="failed" if result.call is None else "resampled")


def _task_key(view: EpisodeView) -> str:
    """Return a key of an episode's task: tasks of several splits may have the same id."""
    begin = next((body for _, body in view.entries if isinstance(body, BeginEntry)), None)
    digest = "" if begin is None else task_digest(Task(id=begin.task_id, data=begin.task)).hex()
    return f"{view.summary.environment} {view.summary.task} {digest}"


def _why_left_out(view: EpisodeView, result: ReplayResult, classes: Mapping[str, bool]) -> str:
    """Return why an episode cannot be judged; empty if it can."""
    line = view.summary
    if result.outcome in ("damaged", "not_replayable"):
        return result.text
    if line.stop_reason is None:
        return f"it was dropped as {line.drop_reason}" if line.drop_reason else "it has not ended"
    if line.status == "repeated":
        return "a later attempt replaced it"
    if line.parent is not None:
        return "it is a branch or a child of another episode"
    if not classes.get(line.environment, True):
        return f"the changed code has no class for {line.environment}"
    if any(isinstance(body, SpawnEntry) for _, body in view.entries):
        return "it has child episodes, in which the change would not show"
    if any(isinstance(body, TurnEntry) and not ids.has_call_number(call) for call, body in view.entries):
        return (
            "its agent runs outside the environment and sends its own requests: evaluate both versions, or use "
            "`agentrl episode fork`"
        )
    return ""


def _resample(
    episodes: Sequence[WhatIfEpisode],
    received: ReceivedRun,
    environment: type | str,
    factories: RunFactories | None,
    on_progress: Callable[[str, float], None],
) -> dict[tuple[str, int], WhatIfEpisode]:
    """Sample the rest of episodes from the first call that differs; returns the episodes by id and attempt."""
    found: dict[tuple[str, int], WhatIfEpisode] = {}
    parents: list[tuple[WhatIfEpisode, ForkParent]] = []
    with contextlib.closing(RunReader(received.run)) as reader:
        directory = forks_directory(received.run, reader.info())
        for episode in episodes:
            try:
                parents.append((episode, _parent(reader, episode)))
            except InputError as error:
                found[episode.episode, episode.attempt] = msgspec.structs.replace(
                    episode, outcome="left_out", text=str(error)
                )
    if not parents:
        return found
    headers = fork_parents(
        [parent for _, parent in parents],
        received=received,
        command=received.command("run whatif", environment=environment),
        environment=environment,
        factories=factories,
        on_progress=on_progress,
    )
    with contextlib.closing(RunReader(directory)) as forks:
        for (episode, parent), header in zip(parents, headers, strict=True):
            detail = forks.lines([(header.episode_id, header.attempt)])[0].detail
            found[episode.episode, episode.attempt] = _resampled(episode, parent, header, detail or "")
    return found


def _parent(reader: RunReader, episode: WhatIfEpisode) -> ForkParent:
    """Return the start of the fork: the first call that differs."""
    recorded = {call for call, _ in reader.episode(episode.episode, episode.attempt).entries}
    call = episode.call if episode.call in recorded else AT_END
    return find_parent(reader.journal, episode.episode, episode.attempt, call)


def _resampled(episode: WhatIfEpisode, parent: ForkParent, header: EpisodeHeader, detail: str) -> WhatIfEpisode:
    inherited = sum(len(turn.sampled(plain=True)) for turn in parent.prefix if isinstance(turn, TurnEntry))
    sampled = msgspec.structs.replace(
        episode,
        text="",
        fork=f"{FORKS}/{header.episode_id}",
        sampled=header.tokens,
        tokens=inherited + header.tokens,
    )
    if header.drop_reason in ("nondeterminism", "resource_lost"):
        reason = "calls made at the same time differ, so that no prefix of the record agrees"
        return msgspec.structs.replace(sampled, outcome="left_out", text=reason)
    if not header.committed:
        text = f"dropped as {header.drop_reason}" + (f": {detail}" if detail else "")
        return msgspec.structs.replace(sampled, outcome="failed", text=text)
    return msgspec.structs.replace(sampled, after=_of_seats(agent_rewards(header.trajectories)))


def _of_seats(rewards: Mapping[str, float | None]) -> dict[str, float]:
    """Return the reward of each rewarded seat from the rewards of its agents, such as `solver[0]`."""
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
        difference, error = statistics.fmean(differences), half_width_of_few(differences)
        interval = AnytimeInterval(difference - error, difference + error)
        is_known = len(differences) >= MIN_TASKS or (error > 0 and len(differences) > 1)
        effects.append(
            WhatIfEffect(
                seat=seat,
                episodes=sum(map(len, pairs.values())),
                before=statistics.fmean(before),
                after=statistics.fmean(after),
                difference=difference,
                error=error,
                verdict=verdict_words(interval) if is_known else "undecided",
            )
        )
    return effects
