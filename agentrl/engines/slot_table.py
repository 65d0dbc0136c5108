"""Who holds which slot: conversations keep theirs between turns until another needs it.

Owns: free, idle and busy slots, least recently used first, and whose keys and values a slot holds.
Does not touch tokens or tensors.
Invariant: a session has at most one slot, a slot at most one session; a busy slot is never taken away.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.core.clock import Clock
    from agentrl.engines.calls import EmbeddedSession
    from agentrl.engines.serving import Serving


_LONG_IDLE_SECONDS = 1.0


class SlotTable:
    """The slots of one engine."""

    def __init__(self, slots: int, *, clock: Clock) -> None:
        self._free = list(range(slots))
        self._idle: OrderedDict[int, tuple[EmbeddedSession, float]] = OrderedDict()
        self._clock = clock
        self.computed_by: list[Serving | None] = [None] * slots
        """Which version computed all of a slot's keys and values; None: nothing there, or a mixture."""

    def has_slot(self, *, patient: bool) -> bool:
        """Whether a session without a slot gets one; if `patient`, not that of a conversation between two turns."""
        if self._free or not self._idle:
            return bool(self._free)
        _, since = next(iter(self._idle.values()))
        return not patient or self._clock.monotonic() - since > _LONG_IDLE_SECONDS

    def take(self, session: EmbeddedSession) -> int:
        """A slot for a call of `session`: its own, a free one, or else the least recently used idle one."""
        if session.slot >= 0:
            del self._idle[session.slot]
        elif self._free:
            session.slot = heapq.heappop(self._free)
            self.computed_by[session.slot] = None
        else:
            session.slot, (evicted, _) = self._idle.popitem(last=False)
            evicted.slot = -1
            self.computed_by[session.slot] = None
        return session.slot

    def rest(self, session: EmbeddedSession) -> None:
        """The session's call ended; its slot may be taken by others from now on."""
        self._idle[session.slot] = (session, self._clock.monotonic())

    def leave(self, session: EmbeddedSession) -> None:
        """An idle session gives its slot back, if it has one."""
        if session.slot >= 0:
            del self._idle[session.slot]
            heapq.heappush(self._free, session.slot)
            session.slot = -1
