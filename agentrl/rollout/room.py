"""Which conversations of a worker have a place in the engine's memory for keys and values, and who waits for one.

Owns: the budget in tokens, the places in it, the order of those that wait, and how long a place is kept. Does not know
episodes or engines.

A conversation takes its place with its first call. While it rests between two turns, to keep its n of M tokens for t
seconds costs n/M of what the engine could do in them; to compute them again, at p tokens a second, costs all that the
engine could do in n/p seconds. The two are the same after M/p seconds, whatever n is. So a place is kept for that long,
as one rents skis before one buys them, or not at all where this would have cost more in the rests of its kind so far.
Then whoever waits may have it.

Where the engine holds once what conversations begin with alike, one is not charged for what the one before it of its
kind began with too: instructions and tools, and the task where that was a sibling. This is too little once that one has
left, and errs on the side where nobody waits for room that there is.

Invariants: who has a place is not held up; the others pass by their priorities, then by arrival, none before one that
cannot; one that is larger than the budget passes when nobody else has a place. No sibling is told from any other.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable

    from agentrl.core.ports import EngineCapabilities
    from agentrl.core.records import Int32Array

HEADROOM = 0.1
"""Share of the memory that is left to what running calls sample."""
MEMORY = 64
"""Rests of a kind over which costs are averaged, about."""


class Room:
    """The places of one worker's conversations.

    Args:
        kv_tokens: that the engine holds; None: a conversation takes nothing from others.
        prefill_rate: tokens of context that it computes per second.
        shares_prefixes: whether it holds once what conversations begin with alike.
    """

    def __init__(self, kv_tokens: int | None, prefill_rate: float = math.inf, *, shares_prefixes: bool = False) -> None:
        self._budget = math.inf if kv_tokens is None else kv_tokens * (1 - HEADROOM)
        self._costs = _Costs(0.0 if kv_tokens is None else kv_tokens / prefill_rate)
        self._beginnings: dict[Hashable, Int32Array] | None = {} if shares_prefixes else None
        """Of the newest conversation of each kind."""
        self._taken = 0
        self._kept: dict[Place, None] = {}
        """Those between two turns that are kept, the longest first."""
        self._spare: dict[Place, None] = {}
        """Those between two turns that whoever waits may have."""
        self._spare_tokens = 0
        self._waiting: list[tuple[int, int, int, Place, asyncio.Future[None]]] = []
        """A heap of (priority, arrival, tokens, place, future)."""
        self._arrivals = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Calls that wait for a place, about."""
        return len(self._waiting)

    def place(self, kind: Hashable) -> Place:
        """Of one conversation, not taken yet; what keeping places costs is learned for each kind."""
        return Place(self, kind)

    def shared(self, kind: Hashable, beginning: Int32Array) -> int:
        """How much of its beginning a new conversation has in common with the one before it of its kind."""
        if self._beginnings is None or math.isinf(self._budget):
            return 0
        before, self._beginnings[kind] = self._beginnings.get(kind), beginning
        if before is None:
            return 0
        length = min(len(before), len(beginning))
        differing = np.flatnonzero(before[:length] != beginning[:length])
        return int(differing[0]) if len(differing) else length

    def take(self, place: Place, tokens: int) -> bool:
        """See `Place.take`."""
        if math.isinf(self._budget):
            return True
        if place.rests_since is not None:
            self._costs.learn(place.kind, asyncio.get_running_loop().time() - place.rests_since)
            place.rests_since = None
        if not place.tokens and (self._waiting or not self._make_room(tokens)):
            return False
        self._use(place)
        self._hold(place, tokens)
        return True

    async def wait(self, place: Place, tokens: int, priority: int) -> None:
        """See `Place.wait`."""
        self._arrivals += 1
        place.passes = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, self._arrivals, tokens, place, place.passes))
        self._let_pass()
        try:
            await place.passes
        except asyncio.CancelledError:
            self._let_pass()
            raise

    def rest(self, place: Place, tokens: int) -> None:
        """See `Place.rest`."""
        if place.tokens:
            keep_s = self._costs.keep_s(place.kind)
            place.rests_since = asyncio.get_running_loop().time()
            place.kept_until = place.rests_since + keep_s
            self._hold(place, tokens)
            if keep_s:
                self._kept[place] = None
            else:
                self._spare_now(place)
            self._let_pass()

    def leave(self, place: Place) -> None:
        """See `Place.leave`."""
        place.rests_since = None
        self._give_up(place)
        if place.passes is not None and not place.passes.done():
            place.passes.set_result(None)
        self._let_pass()

    def _hold(self, place: Place, tokens: int) -> None:
        """What has grown beyond the memory pushes those out of the engine that rested longest."""
        self._taken += tokens - place.tokens
        place.tokens = tokens
        while self._taken > self._budget and (self._spare or self._kept):
            self._give_up(next(iter(self._spare or self._kept)))

    def _spare_now(self, place: Place) -> None:
        self._spare[place] = None
        self._spare_tokens += place.tokens

    def _use(self, place: Place) -> None:
        """It rests no more."""
        self._kept.pop(place, None)
        if place in self._spare:
            del self._spare[place]
            self._spare_tokens -= place.tokens

    def _give_up(self, place: Place) -> None:
        self._use(place)
        self._taken -= place.tokens
        place.tokens = 0

    def _make_room(self, tokens: int) -> bool:
        """Have as many places given up as it takes, of those that need not be kept; none where that is not enough."""
        now = asyncio.get_running_loop().time()
        while self._kept and (longest := next(iter(self._kept))).kept_until <= now:
            del self._kept[longest]
            self._spare_now(longest)
        needed = self._taken - self._spare_tokens
        if needed and needed + tokens > self._budget:
            return False
        while self._taken + tokens > self._budget and self._spare:
            self._give_up(next(iter(self._spare)))
        return True

    def _let_pass(self) -> None:
        """Give places to those that wait, as far as there is room; look again when one need not be kept any more."""
        while self._waiting:
            _, _, tokens, place, passes = self._waiting[0]
            if not passes.done():  # else it waits no more
                if not self._make_room(tokens):
                    break
                self._hold(place, tokens)
                passes.set_result(None)
            heapq.heappop(self._waiting)
        if self._waiting and self._kept and self._timer is None:
            until = next(iter(self._kept)).kept_until
            self._timer = asyncio.get_running_loop().call_at(until, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._let_pass()


class Place:
    """One conversation's place in the engine's memory; made by `Room.place`."""

    __slots__ = ("_room", "_shared", "kept_until", "kind", "passes", "rests_since", "tokens")

    def __init__(self, room: Room, kind: Hashable) -> None:
        self._room = room
        self._shared: int | None = None
        self.kind = kind
        self.tokens = 0
        """That it is charged for, when its context was last told; 0: it has no place."""
        self.rests_since: float | None = None
        self.kept_until = 0.0
        self.passes: asyncio.Future[None] | None = None
        """Of its newest wait."""

    def begin(self, context: Int32Array) -> None:
        """The conversation's first call has this context; those after the first do not count."""
        if self._shared is None:
            self._shared = self._room.shared(self.kind, context)

    def take(self, tokens: int) -> bool:
        """Whether a call with so much context may begin now: then it has its place until `leave`, or until it rests and
        others need it.
        """
        return self._room.take(self, self._charged(tokens))

    async def wait(self, tokens: int, priority: int) -> None:
        """Until `take` may be tried again."""
        await self._room.wait(self, self._charged(tokens), priority)

    def rest(self, tokens: int) -> None:
        """The call has ended; the conversation has so many tokens by now."""
        self._room.rest(self, self._charged(tokens))

    def leave(self) -> None:
        """Nothing is held any more, and nothing waited for. Idempotent."""
        self._room.leave(self)

    def _charged(self, tokens: int) -> int:
        return max(tokens - (self._shared or 0), 1)


class _Costs:
    """What it costs to keep the places of a kind, where to forget them at once costs 1."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._rests: Counter[Hashable] = Counter()
        self._means: dict[Hashable, float] = {}

    def learn(self, kind: Hashable, seconds: float) -> None:
        """A conversation has rested for so long."""
        cost = seconds / self._most_s if seconds < self._most_s else 2.0
        self._rests[kind] += 1
        before = self._means.get(kind, 0.0)
        self._means[kind] = before + (cost - before) / min(self._rests[kind], MEMORY)

    def keep_s(self, kind: Hashable) -> float:
        """How long to keep one."""
        return self._most_s if self._means.get(kind, 0.0) < 1.0 else 0.0


def room_of(engine: EngineCapabilities) -> Room:
    """What an engine says it has."""
    return Room(engine.kv_tokens, engine.prefill_rate, shares_prefixes=engine.shares_prefixes)


UNBOUNDED = Room(None)
"""Of conversations that take nothing of the engine's memory."""
