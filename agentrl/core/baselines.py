"""What the members of a group are compared with, as it was frozen when the first of them was released."""

from __future__ import annotations

from typing import NamedTuple


class EarlierMean(NamedTuple):
    """What a policy used to get in a seat, when the group was admitted."""

    policy: str
    seat: str
    mean: float


class BaselineSet(NamedTuple):
    """Frozen and recorded once per group that is released before all of it has ended; see `credit.release`."""

    group_id: str
    finishers: tuple[str, ...]
    """Ids of the episodes that were waited for, in the order in which they ended."""
    earlier: tuple[EarlierMean, ...] = ()
