"""Which conversations of a worker have a place in the engine's memory for keys and values, and who waits for one.

Owns: the budget in tokens, the places in it, the order of those that wait, and how long a place is kept. Does not know
episodes or engines.

A conversation takes its place with its first call. While it rests between two turns, to keep its n of M tokens for t
seconds costs n/M of what the engine could do in them; to compute them again, at p tokens a second, costs all that the
engine could do in n/p seconds. The two are the same after M/p seconds, whatever n is. So a place is kept for that long,
as one rents skis before one buys them, or not at all where this would have cost more in the rests of its kind so far.
Then whoever waits may have it.

Where the engine holds once what conversations begin with alike, it is charged once, for as long as any of them has a
place: instructions and tools, the task of a group.

Invariants: who has a place is not held up; the others pass by their priorities, then by arrival, none before one that
cannot; one that is larger than the budget passes when nobody else has a place. What a conversation says makes no
difference to its siblings but as to everybody.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from agentrl.core.ports import EngineCapabilities
    from agentrl.core.records import Int32Array

HEADROOM = 0.1
"""Share of the memory that is left to what running calls sample."""
LONGEST_S = 60.0
"""That a place is kept between two turns, however slow the engine."""
REMEMBERED = 64
"""Rests of a kind over which costs are averaged, about."""
LEAST_PART = 64
"""Tokens of the first part of a beginning; each ends at twice the tokens of the one before it, so there are few."""


class Room:
    """The places of one worker's conversations.

    Args:
        kv_tokens: that the engine holds; None: a conversation takes nothing from others.
        prefill_rate: tokens of context that it computes per second.
        shares_prefixes: whether it holds once what conversations begin with alike.
    """

    def __init__(self, kv_tokens: int | None, prefill_rate: float = math.inf, *, shares_prefixes: bool = False) -> None:
        self._budget = math.inf if kv_tokens is None else kv_tokens * (1 - HEADROOM)
        self._costs = _Costs(0.0 if kv_tokens is None else min(kv_tokens / prefill_rate, LONGEST_S))
        self._shares_prefixes = shares_prefixes
        self._tokens = _Tokens()
        self._kept: dict[Place, None] = {}
        """Those between two turns that are kept, the longest first."""
        self._spare: dict[Place, None] = {}
        """Those between two turns that whoever waits may have."""
        self._waiting: list[tuple[int, int, Place, asyncio.Future[None]]] = []
        """A heap of (priority, arrival, place, future)."""
        self._arrivals = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether a place can ever be refused: whether the engine says what it holds."""
        return not math.isinf(self._budget)

    @property
    def waiting(self) -> int:
        """Calls that wait for a place, about."""
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Tokens that places have."""
        return self._tokens.taken

    def place(self, kind: Hashable, weights: Hashable = None) -> Place:
        """Of one conversation, not taken yet.

        Args:
            kind: what keeping places costs is learned for each.
            weights: that sample it; others hold nothing in common with it.
        """
        return Place(self, kind, weights)

    def take(self, place: Place, tokens: int, context: Int32Array | None) -> bool:
        """See `Place.take`."""
        if math.isinf(self._budget):
            return True
        if place.rests_since is not None:
            self._costs.learn(place.kind, asyncio.get_running_loop().time() - place.rests_since)
            place.rests_since = None
        if place.is_held:
            self._use(place)
        else:
            place.tokens, place.parts = tokens, self._parts(place.weights, context)
            place.common = sum([count for _, count in place.parts])
            if self._waiting or not self._make_room(place):
                return False
        self._hold(place, tokens)
        return True

    async def wait(self, place: Place, priority: int) -> None:
        """See `Place.wait`."""
        self._arrivals += 1
        place.passes = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, self._arrivals, place, place.passes))
        self._let_pass()
        try:
            await place.passes
        except asyncio.CancelledError:
            self.leave(place)
            raise

    def rest(self, place: Place, tokens: int) -> None:
        """See `Place.rest`."""
        if place.is_held:
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

    def _parts(self, weights: Hashable, context: Int32Array | None) -> tuple[tuple[int, int], ...]:
        """What a context begins with, in parts that are known by all tokens up to their ends: (key, tokens) of each."""
        if context is None or not self._shares_prefixes:
            return ()
        parts, key, start = [], hash(weights), 0
        while start < len(context):
            stop = min(max(2 * start, LEAST_PART), len(context))
            key = hash((key, context[start:stop].tobytes()))
            parts.append((key, stop - start))
            start = stop
        return tuple(parts)

    def _hold(self, place: Place, tokens: int) -> None:
        """What has grown beyond the memory pushes those out of the engine that rested longest."""
        self._tokens.hold(place, tokens)
        while self._tokens.taken > self._budget and (self._spare or self._kept):
            self._give_up(next(iter(self._spare or self._kept)))

    def _spare_now(self, place: Place) -> None:
        self._spare[place] = None
        self._tokens.spare(place)

    def _use(self, place: Place) -> None:
        """It rests no more."""
        self._kept.pop(place, None)
        if place in self._spare:
            del self._spare[place]
            self._tokens.use(place)

    def _give_up(self, place: Place) -> None:
        self._use(place)
        if place.is_held:
            self._tokens.give_up(place)

    def _make_room(self, place: Place) -> bool:
        """Have as many places given up as it takes, of those that need not be kept; none where that is not enough."""
        now = asyncio.get_running_loop().time()
        while self._kept and (longest := next(iter(self._kept))).kept_until <= now:
            del self._kept[longest]
            self._spare_now(longest)
        tokens = self._tokens
        if tokens.firm and tokens.firm + tokens.new_to_firm(place) > self._budget:
            return False
        while self._spare and tokens.taken + tokens.new(place) > self._budget:
            self._give_up(next(iter(self._spare)))
        return True

    def _let_pass(self) -> None:
        """Give places to those that wait, as far as there is room; look again when one need not be kept any more."""
        while self._waiting:
            _, _, place, passes = self._waiting[0]
            if not passes.done():  # else it waits no more
                if not self._make_room(place):
                    break
                self._hold(place, place.tokens)
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

    __slots__ = (
        "_room",
        "common",
        "is_held",
        "kept_until",
        "kind",
        "parts",
        "passes",
        "rests_since",
        "tokens",
        "weights",
    )

    def __init__(self, room: Room, kind: Hashable, weights: Hashable) -> None:
        self._room = room
        self.kind = kind
        self.weights = weights
        self.is_held = False
        self.tokens = 0
        """Of its context, when they were last told."""
        self.parts: tuple[tuple[int, int], ...] = ()
        """Of them those that others may begin with too."""
        self.common = 0
        """Tokens of these."""
        self.rests_since: float | None = None
        self.kept_until = 0.0
        self.passes: asyncio.Future[None] | None = None
        """Of its newest wait."""

    def take(self, tokens: int, context: Int32Array | None = None) -> bool:
        """Whether a call may begin now: then it has its place until `leave`, or until it rests and others need it.

        Args:
            tokens: of its context.
            context: what it begins with, as far as others may begin with it too.
        """
        return self._room.take(self, tokens, context)

    async def wait(self, priority: int) -> None:
        """Until what `take` refused may be tried again."""
        await self._room.wait(self, priority)

    def rest(self, tokens: int) -> None:
        """The turn has ended; the conversation has so many tokens by now."""
        self._room.rest(self, tokens)

    def leave(self) -> None:
        """Nothing is held any more, and nothing waited for. Idempotent."""
        self._room.leave(self)


class _Tokens:
    """What places hold, and what is free of it: a part that several have is there once.

    It is firm while one that has it cannot be given up, spare while all of them can.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.firm = 0
        """Those that are there when all places were given up that can be."""
        self._holders: Counter[int] = Counter()
        """Of each part."""
        self._spares: Counter[int] = Counter()
        """Of them those that can be given up."""

    def new(self, place: Place) -> int:
        """Tokens that a place would add."""
        return place.tokens - sum([tokens for key, tokens in place.parts if key in self._holders])

    def new_to_firm(self, place: Place) -> int:
        """Those it would add to `firm`."""
        return place.tokens - sum([tokens for key, tokens in place.parts if self._is_firm(key)])

    def hold(self, place: Place, tokens: int) -> None:
        """A place, firm, has so many tokens now."""
        if place.is_held:
            tokens = max(tokens, place.common)
            self.taken += tokens - place.tokens
            self.firm += tokens - place.tokens
        else:
            own = tokens - place.common
            self.taken += own
            self.firm += own
            for key, count in place.parts:
                if not self._is_firm(key):
                    self.firm += count
                if key not in self._holders:
                    self.taken += count
                self._holders[key] += 1
        place.is_held, place.tokens = True, tokens

    def spare(self, place: Place) -> None:
        """It can be given up."""
        self.firm -= place.tokens - place.common
        for key, count in place.parts:
            self._spares[key] += 1
            if not self._is_firm(key):
                self.firm -= count

    def use(self, place: Place) -> None:
        """It cannot any more."""
        self.firm += place.tokens - place.common
        for key, count in place.parts:
            if not self._is_firm(key):
                self.firm += count
            self._spares[key] -= 1

    def give_up(self, place: Place) -> None:
        """A firm one is gone."""
        own = place.tokens - place.common
        self.taken -= own
        self.firm -= own
        for key, count in place.parts:
            self._holders[key] -= 1
            if not self._is_firm(key):
                self.firm -= count
            if not self._holders[key]:
                self.taken -= count
                del self._holders[key], self._spares[key]
        place.is_held = False

    def _is_firm(self, key: int) -> bool:
        return self._holders.get(key, 0) > self._spares.get(key, 0)


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
        self._means[kind] = before + (cost - before) / min(self._rests[kind], REMEMBERED)

    def keep_s(self, kind: Hashable) -> float:
        """How long to keep one."""
        return self._most_s if self._means.get(kind, 0.0) < 1.0 else 0.0


def room_of(engine: EngineCapabilities) -> Room:
    """What an engine says it has."""
    return Room(engine.kv_tokens, engine.prefill_rate, shares_prefixes=engine.shares_prefixes)
