"""Checks whether an environment rewards breaking the format: compares unreadable with well-formed random replies.

A policy that earns more by unreadable output than by bad moves learns to produce nothing else, and then has no gradient
left. Owns the two kinds of policy and the comparison; the checker plays the episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agentrl.core.clock import SystemClock
from agentrl.core.ids import random_stream
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.scripted import Script
from agentrl.rollout.chat.byte_formats import STOP_TOKEN

GARBAGE = ("@@ %% zz !!", '<tool_call>{"name": ', "")
"""Unreadable replies: noise, a call that cannot be parsed, an empty text."""
CANDIDATES = (
    *("left", "right", "up", "down", "north", "south", "east", "west", "yes", "no", "stick", "hit", "pass"),
    *(str(number) for number in range(10)),
    *("[0]", "[4]", "a", "b", "c", "hello world"),
)
"""Short actions common in games; actions that an environment counts as illegal are not played."""
TASKS = 16
REPEATS = 4
"""Number of well-formed episodes per task."""
BUDGET_S = 15.0
"""Seconds after which no further episode is started, because an environment may be slow."""


class EpisodeFormatReward(NamedTuple):
    """Parts of an episode that this check needs."""

    reward: float
    broken: bool
    """Whether a turn broke the format, as counted by the runner and the environment."""


Play = Callable[[Task, int, Script], EpisodeFormatReward | str]
"""Plays a task with a seed and a policy; returns a sentence if it failed."""


def find_format_reward_faults(
    play: Play, tasks: Sequence[Task], random_policy: Script, *, has_tools: bool
) -> list[str]:
    """Return faults in an environment's rewards for the format, for the user.

    Args:
        play: plays one episode.
        tasks: tasks to play; only the first 16 are used.
        random_policy: calls tools with valid arguments, or replies with a short text.
        has_tools: whether the environment has tools; otherwise the texts that it accepts are determined first.
    """
    clock = SystemClock()
    end = clock.monotonic() + BUDGET_S
    tasks = tasks[:TASKS]
    policy: Script | str = random_policy if has_tools or not tasks else _legal_policy(play, tasks[0], random_policy)
    if isinstance(policy, str):
        return [policy]
    garbage: dict[str, list[float]] = {text: [] for text in GARBAGE}
    valid_rewards: list[float] = []
    for number, task in enumerate(tasks):
        for repeat, text in enumerate((*GARBAGE, *[None] * REPEATS)):
            if clock.monotonic() > end:
                break
            seed = number if text is not None else number * REPEATS + repeat - len(GARBAGE)
            outcome = play(task, seed, policy if text is None else always(text))
            if isinstance(outcome, str):
                # The reply is named only if it matters.
                other = None if text is None else play(task, seed, random_policy)
                return [f"task {task.id!r}{'' if other == outcome else f', {_reply_kind(text)}'}: {outcome}"]
            if text is not None:
                garbage[text].append(outcome.reward)
            elif not outcome.broken:
                valid_rewards.append(outcome.reward)
    text, rewards = max(garbage.items(), key=lambda item: _mean(item[1]))
    if len(valid_rewards) < 4 or len(rewards) < 4:
        return []
    error = math.sqrt(_variance(valid_rewards) / len(valid_rewards) + _variance(rewards) / len(rewards))
    if _mean(rewards) <= _mean(valid_rewards) + 2 * error + 1e-9:
        return []
    return [
        f"breaking the format pays: a policy whose every turn says {text!r} earns {_mean(rewards):.3f} on average, "
        f"well-formed chance {_mean(valid_rewards):.3f} ({len(rewards)} and {len(valid_rewards)} episodes), so the "
        "policy would learn to "
        "break it; reward a broken format below every legal end (including `truncated_reward`, if it runs into a limit)"
    ]


def _legal_policy(play: Play, task: Task, otherwise: Script) -> Script | str:
    """Return a policy that draws among the texts an environment accepts, or `otherwise` if there are none; a sentence
    if an episode failed."""
    legal = []
    for text in CANDIDATES:
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else -math.inf


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
