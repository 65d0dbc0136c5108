"""The advantages of docs/journal_format.md, for the second reader of journals: it imports nothing of agentrl."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
Credit = tuple[float, float, "list[float] | None"]
"""Advantage, baseline, advantages by turn."""

COMPARED = ("leave_one_out", "group_mean", "group_std", "none", "gae")
"""Estimators that `advantages` computes."""


def advantages(estimator: str, rewards: Sequence[float], episodes: Sequence[str]) -> list[tuple[float, float]]:
    """(advantage, baseline) of rewards that are compared with each other, or with nothing."""
    if estimator in ("none", "gae"):
        return [(reward, 0.0) for reward in rewards]
    if len(set(episodes)) < 2 or len(set(rewards)) < 2:
        return [(0.0, reward) for reward in rewards]
    total, count = math.fsum(rewards), len(rewards)
    if estimator == "leave_one_out":
        own: dict[str, list[float]] = defaultdict(list)
        for episode, reward in zip(episodes, rewards, strict=True):
            own[episode].append(reward)
        means = {name: (total - math.fsum(given)) / (count - len(given)) for name, given in own.items()}
        return [(reward - means[name], means[name]) for name, reward in zip(episodes, rewards, strict=True)]
    mean = total / count
    scale = 1.0
    if estimator == "group_std":
        scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1)) + 1e-6
    return [((reward - mean) / scale, mean) for reward in rewards]


def by_state(
    members: Sequence[Row], discount: float = 0.95, step_weight: float = 1.0, divide_by_std: bool = False
) -> dict[tuple[str, int, str, int], Credit]:
    """The credit of trajectories that are compared with each other turn by turn (`gigpo`), by agent."""
    estimator = "group_std" if divide_by_std else "group_mean"
    met: dict[bytes, list[tuple[int, int, float]]] = defaultdict(list)
    for number, row in enumerate(members):
        states = row["turn_states"] or b""
        turns = len(states) // 8
        paid: dict[int, float] = dict(map(tuple, json.loads(row["turn_rewards"] or "[]")))
        at_end = row["reward"] - math.fsum(paid.values())
        for turn in range(turns):
            later = [discount ** (k - turn) * paid.get(k, 0.0) for k in range(turn, turns)]
            value = math.fsum([*later, discount ** (turns - 1 - turn) * at_end])
            met[states[8 * turn : 8 * turn + 8]].append((number, turn, value))
    whole = advantages(estimator, [row["reward"] for row in members], [row["episode"] for row in members])
    by_turn = [
        [value] * max(1, len(row["turn_states"] or b"") // 8) for row, (value, _) in zip(members, whole, strict=True)
    ]
    for places in met.values():
        values = advantages(estimator, [value for _, _, value in places], [str(at) for at in range(len(places))])
        for (number, turn, _), (value, _) in zip(places, values, strict=True):
            by_turn[number][turn] += step_weight * value
    return {
        agent_of(row): (turns[0], row["reward"] - turns[0], turns) for row, turns in zip(members, by_turn, strict=True)
    }


def agent_of(row: Row) -> tuple[str, int, str, int]:
    return row["episode"], row["attempt"], row["seat"], row["agent"]
