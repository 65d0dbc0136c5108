"""Numbers of things, in messages."""

from __future__ import annotations


def plural(count: float, one: str, several: str = "") -> str:
    """So many of something; `several` where it is not `one` with an s.

    Example:
        >>> plural(1, "turn"), plural(0, "turn"), plural(1200, "entry", "entries")
        ('1 turn', '0 turns', '1,200 entries')
    """
    return f"{count:,.12g} {one if count == 1 else several or f'{one}s'}"
