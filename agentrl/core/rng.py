"""Seeded randomness. Streams are keyed, so that one branch's draws cannot shift another's."""

from __future__ import annotations

import random
import uuid

from agentrl.core.ids import key64


def stream(*key: object) -> random.Random:
    """A random stream of its own for `key` (run seed, episode, branch, …).

    Example:
        >>> stream(0, "e1").random() == stream(0, "e1").random()
        True
    """
    return random.Random(key64(*key))


def uuid4(source: random.Random) -> str:
    """A UUID of version 4 drawn from a stream."""
    return str(uuid.UUID(int=source.getrandbits(128), version=4))
