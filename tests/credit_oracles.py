"""Policies so small that the gradient of their reward is known, and what the estimates of it are on average."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.credit.advantages import Group

CHANCE = 0.3
"""Probability of action 1."""


def pass_at_k_ratio(
    estimator: Callable[..., Sequence[float]], *, k: int, agents: int, episodes: int = 5, **options: Any
) -> float:
    """E[Σ score · advantage] of a group over the true gradient of pass@k, by enumeration of all that can happen.

    Each agent takes action 1 with probability `CHANCE`. An episode passes, and rewards all of its agents, if one of
    them takes it. pass@k is that of k independent episodes.
    """
    names = tuple(f"e{at // agents}" for at in range(episodes * agents))
    expected = 0.0
    for actions in itertools.product((0, 1), repeat=len(names)):
        chance = CHANCE ** sum(actions) * (1 - CHANCE) ** (len(actions) - sum(actions))
        passed = {name: float(any(a for a, own in zip(actions, names, strict=True) if own == name)) for name in names}
        group = Group(rewards=tuple(passed[name] for name in names), episodes=names)
        advantages = estimator(group, k=k, **options)
        expected += chance * sum((a - CHANCE) * value for a, value in zip(actions, advantages, strict=True))
    fails = (1 - CHANCE) ** agents
    by_logit = agents * fails * CHANCE  # derivative of an episode's chance to pass
    return expected / (episodes * k * fails ** (k - 1) * by_logit)
