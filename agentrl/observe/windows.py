"""The newest steps of a policy, as alarms look at them: values, sums and means of one metric."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.observe.run_state import PolicyState, Values

WINDOW = 5
"""Steps an alarm looks at."""


def newest(policy: PolicyState, steps: int = WINDOW) -> list[Values]:
    """The metrics of the policy's newest steps, in order."""
    return list(itertools.islice(reversed(policy.steps.values()), steps))[::-1]


def values_of(window: Sequence[Values], name: str) -> list[float]:
    """What was measured of a metric."""
    return [values[name] for values in window if name in values]


def names_of(window: Sequence[Values], group: str) -> list[str]:
    """The metrics `group/<…>` that were measured."""
    return sorted({name for values in window for name in values if name.startswith(f"{group}/")})


def mean_of(values: Sequence[float]) -> float:
    """0 of none."""
    return sum(values) / len(values) if values else 0.0


def total(window: Sequence[Values], name: str) -> float:
    """The sum of a metric."""
    return sum(values_of(window, name))


def weighted(window: Sequence[Values], name: str, weight: str) -> float:
    """The mean of a share over all it is a share of."""
    return sum(v[name] * v[weight] for v in window if name in v and weight in v) / max(total(window, weight), 1e-9)
