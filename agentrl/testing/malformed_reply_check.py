"""Checks whether an environment rewards breaking the format: compares unreadable with well-formed random replies.

A policy that earns more by unreadable output than by bad moves learns to produce nothing else, and then has no gradient
left. Owns the two kinds of policy and the comparison; the checker plays the episodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

from agentrl.core.ids import random_stream
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.scripted import Script
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.load_clock import TimeLimit

GARBAGE = ("@@ %% zz !!", '<tool_call>{"name": ', "")
"""Unreadable replies: noise, a call that cannot be parsed, an empty text."""
CANDIDATES = (
    *("left", "0", "[0]", "a", "yes", "up", "1", "[4]", "b", "north", "2", "stick", "hello world"),
    *("right", "down", "no", "south", "east", "west", "hit", "pass", "c", *(str(number) for number in range(3, 10))),
)
"""Short actions common in games, the first of them of each kind; actions that an environment counts as illegal are not
played."""
TASKS = 16
REPEATS = 4
"""Number of well-formed episodes per task."""
MIN_REWARDS = 4
"""Minimum number of rewards of each kind of reply for a comparison."""


class EpisodeFormatReward(NamedTuple):
    """Parts of an episode that this check needs."""

    rewards: Mapping[str, float]
    """Rewards by seat."""
    broken: bool
    """Whether a turn broke the format, as counted by the runner and the environment."""


class FormatFaults(NamedTuple):
    """The outcome of the comparison."""

    texts: list[str]
    """Sentences for the user."""
    played: int = 0
    """Number of episodes that were compared."""
    planned: int = 0
    """Number of episodes that would have been, without the time limit."""


Play = Callable[[Task, int, Script], EpisodeFormatReward | str]
"""Plays a task with a seed and a policy; returns a sentence if it failed."""


def find_format_reward_faults(
    play: Play,
    tasks: Sequence[Task],
    seats: Sequence[str],
    random_policy: Script,
    *,
    has_tools: bool,
    limit: TimeLimit,
) -> FormatFaults:
    """Return faults in an environment's rewards for the format. One seat breaks it while the others play well-formed.

    Args:
        play: plays one episode.
        tasks: tasks to play; only the first 16 are used.
        seats: the environment's seats.
        random_policy: calls tools with valid arguments, or replies with a short text.
        has_tools: whether the environment has tools; otherwise the texts that it accepts are determined first,
            for up to a third of the time.
        limit: the time after which nothing more is played.
    """
    tasks = tasks[:TASKS]
    policy: Script | str = random_policy
    if tasks and not has_tools:
        policy = _legal_policy(play, tasks[0], random_policy, limit)
    if isinstance(policy, str):
        return FormatFaults([policy])
    broken: dict[tuple[str, str], list[float]] = {(seat, text): [] for text in GARBAGE for seat in seats}
    valid: dict[str, list[float]] = {seat: [] for seat in seats}
    played = 0
    # First one episode of each kind on each task, so that slow episodes can be compared, too.
    rounds = [*itertools.product(enumerate(tasks), [*((kind, 0) for kind in broken), (None, 0)])]
    rounds += itertools.product(enumerate(tasks), [(None, repeat) for repeat in range(1, REPEATS)])
    for (number, task), (kind, repeat) in rounds:
        if limit.left < 0:
            break
        played += 1
        seed = number if kind is not None else number * REPEATS + repeat
        outcome = play(task, seed, policy if kind is None else one_seat(*kind, policy))
        if isinstance(outcome, str):
            # The reply is named only if it matters.
            other = None if kind is None else play(task, seed, random_policy)
            reply = "" if other == outcome else f", {_reply_kind(None if kind is None else kind[1])}"
            return FormatFaults([f"task {task.id!r}{reply}: {outcome}"])
        if kind is not None:
            broken[kind].append(outcome.rewards.get(kind[0], 0.0))
        elif not outcome.broken:
            for seat, rewards in valid.items():
                rewards.append(outcome.rewards.get(seat, 0.0))
    texts = []
    for seat in seats:
        compared = [
            (fmean(rewards), text)
            for (of, text), rewards in broken.items()
            if of == seat and len(rewards) >= MIN_REWARDS
        ]
        if len(valid[seat]) < MIN_REWARDS or not compared:
            continue
        mean, text = max(compared, key=lambda item: item[0])
        rewards = broken[seat, text]
        error = math.sqrt(variance(valid[seat]) / len(valid[seat]) + variance(rewards) / len(rewards))
        if mean > fmean(valid[seat]) + 2 * error + 1e-9:
            of_seat = f" of seat {seat!r}" if len(seats) > 1 else ""
            texts.append(
                f"breaking the format pays: a policy{of_seat} whose every turn says {text!r} earns {mean:.3f} on "
                f"average, well-formed chance {fmean(valid[seat]):.3f} ({len(rewards)} and {len(valid[seat])} "
                "episodes), so the policy would learn to break it; reward a broken format below every legal end "
                "(including `truncated_reward`, if it runs into a limit)"
            )
    return FormatFaults(texts, played, len(rounds))


def _legal_policy(play: Play, task: Task, otherwise: Script, limit: TimeLimit) -> Script | str:
    """Return a policy that draws among the texts an environment accepts, or `otherwise` if there are none; a sentence
    if an episode failed."""
    legal = []
    for text in CANDIDATES:
        if limit.left < limit.seconds * 2 / 3:
            break
        outcome = play(task, 0, always(text))
        if isinstance(outcome, str):
            return f"task {task.id!r}, {_reply_kind(text)}: {outcome}"
        if not outcome.broken:
            legal.append(text)
    return _one_of(legal) if legal else otherwise


def _reply_kind(text: str | None) -> str:
    return "played at random" if text is None else f"when every turn says {text!r}"


def always(text: str) -> Script:
    """Return a policy whose every turn is a text."""
    return _one_of([text])


def one_seat(seat: str, text: str, others: Script) -> Script:
    """Return a policy whose every turn of one seat is a text."""
    said = always(text)

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
        return (said if request.seat.endswith(f".{seat}") else others)(request, policy, version)

    return script


def _one_of(texts: Sequence[str]) -> Script:
    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        return [*random_stream("format", request.seed).choice(texts).encode(), STOP_TOKEN]

    return script
