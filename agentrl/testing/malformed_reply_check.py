"""Checks whether an environment rewards breaking the format: compares unreadable with well-formed random replies.

A policy that earns more by unreadable output than by bad moves learns to produce nothing else, and then has no gradient
left. Owns the two kinds of policy and the comparison; the checker plays the episodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
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

    reward: float
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
    play: Play, tasks: Sequence[Task], random_policy: Script, *, has_tools: bool, limit: TimeLimit
) -> FormatFaults:
    """Return faults in an environment's rewards for the format.

    Args:
        play: plays one episode.
        tasks: tasks to play; only the first 16 are used.
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
    garbage: dict[str, list[float]] = {text: [] for text in GARBAGE}
    valid_rewards: list[float] = []
    played = 0
    # First one episode of each kind on each task, so that slow episodes can be compared, too.
    rounds = [*itertools.product(enumerate(tasks), [*((text, 0) for text in GARBAGE), (None, 0)])]
    rounds += itertools.product(enumerate(tasks), [(None, repeat) for repeat in range(1, REPEATS)])
    for (number, task), (text, repeat) in rounds:
        if limit.left < 0:
            break
        played += 1
        seed = number if text is not None else number * REPEATS + repeat
        outcome = play(task, seed, policy if text is None else always(text))
        if isinstance(outcome, str):
            # The reply is named only if it matters.
            other = None if text is None else play(task, seed, random_policy)
            return FormatFaults([f"task {task.id!r}{'' if other == outcome else f', {_reply_kind(text)}'}: {outcome}"])
        if text is not None:
            garbage[text].append(outcome.reward)
        elif not outcome.broken:
            valid_rewards.append(outcome.reward)
    compared = [(fmean(rewards), text) for text, rewards in garbage.items() if len(rewards) >= MIN_REWARDS]
    if len(valid_rewards) < MIN_REWARDS or not compared:
        return FormatFaults([], played, len(rounds))
    mean, text = max(compared, key=lambda item: item[0])
    rewards = garbage[text]
    error = math.sqrt(variance(valid_rewards) / len(valid_rewards) + variance(rewards) / len(rewards))
    if mean <= fmean(valid_rewards) + 2 * error + 1e-9:
        return FormatFaults([], played, len(rounds))
    return FormatFaults(
        [
            f"breaking the format pays: a policy whose every turn says {text!r} earns {mean:.3f} on average, "
            f"well-formed chance {fmean(valid_rewards):.3f} ({len(rewards)} and {len(valid_rewards)} episodes), so the "
            "policy would learn to break it; reward a broken format below every legal end (including "
            "`truncated_reward`, if it runs into a limit)"
        ]
    )


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


def _one_of(texts: Sequence[str]) -> Script:
    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        return [*random_stream("format", request.seed).choice(texts).encode(), STOP_TOKEN]

    return script
