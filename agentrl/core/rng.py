"""Seeded randomness. Streams are keyed, so that one branch's draws cannot shift another's."""

from __future__ import annotations

import random

from agentrl.core.ids import key64


def stream(*key: object) -> random.Random:
    """A random stream of its own for `key` (run seed, episode, branch, …).

    Example:
        >>> stream(0, "e1").random() == stream(0, "e1").random()
        True
    """
    return random.Random(key64(*key))
