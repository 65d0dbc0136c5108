"""The KV-cache budget of an engine: conversations hold reservations of its memory, and calls wait for them.

Owns the budget in tokens, the reservations in it, the order of waiting calls, and the time for which an idle
conversation keeps its reservation. Does not know episodes. Each engine has one budget, and each of its sessions one
reservation, whichever process opened the session: so a conversation is admitted only if it fits next to those of all
workers. A session that ends, because its worker was killed for example, returns its reservation.

A conversation reserves memory with its first call, and again when it begins a new row. Its reservation grows with it.
Growth takes the memory of idle conversations first, but is never refused: running conversations may outgrow the memory
together, and the engine then preempts some. No other conversation is admitted meanwhile.

Between two turns a conversation is idle: keeping its n of M tokens for t seconds costs n/M of the engine's capacity in
that time; recomputing them at p tokens per second costs the full capacity for n/p seconds. The costs are equal after
M/p seconds, for any n. An idle reservation is therefore kept for that long (the break-even rule of the ski-rental
problem), or not at all if, over the recent idle times of its kind, keeping has cost more than recomputing. After that
it is evictable: a waiting call may take its memory.

If the engine stores shared prefixes once (system prompt and tools, the task of a group), a prefix is charged once for
all conversations that share it.

Invariants: a conversation that holds a reservation never waits; waiting calls are admitted by priority, then by
arrival, and none overtakes a call that does not fit; a conversation larger than the budget is admitted when no other
holds a reservation. Scheduling never depends on the content of siblings, shared prefixes aside.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import NoRoomError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable

    from agentrl.core.ports import EngineCapabilities, GenerateRequest
    from agentrl.core.records import Int32Array
    from agentrl.core.tokens import Completion

HEADROOM = 0.1
"""Share of the memory left free for the tokens that running calls sample."""
MAX_IDLE_S = 60.0
"""Maximum time an idle reservation is kept, in seconds, however slow the engine."""


class KVBudget:
    """The KV-cache memory of one engine, and the reservations in it.

    Args:
        kv_tokens: tokens that the engine's KV cache holds; None: unbounded.
        prefill_rate: tokens of context that the engine computes per second.
        shares_prefixes: whether the engine stores a prefix that several conversations share once.
    """

    def __init__(self, kv_tokens: int | None, prefill_rate: float = math.inf, *, shares_prefixes: bool = False) -> None:
        self._budget = math.inf if kv_tokens is None else kv_tokens * (1 - HEADROOM)
        self.is_bounded = kv_tokens is not None
        """Whether a reservation can be refused, because the engine reports its KV capacity."""
        self._costs = _KeepingCosts(0.0 if kv_tokens is None else min(kv_tokens / prefill_rate, MAX_IDLE_S))
        self._shares_prefixes = shares_prefixes
        self._tokens = _Tokens()
        self._kept_reservations: dict[Reservation, None] = {}
        """Idle reservations that are not evictable yet, the longest idle first."""
        self._evictable: dict[Reservation, None] = {}
        """Idle reservations whose memory a waiting call may take."""
        self._waiting: list[tuple[int, int, Reservation, asyncio.Future[None]]] = []
        """A heap of (priority, arrival, reservation, future)."""
        self._arrivals = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of waiting calls; cancelled ones may still be counted."""
        return len(self._waiting)

    @property
    def reserved(self) -> int:
        """Tokens that reservations hold, shared prefixes counted once."""
        return self._tokens.reserved

    def reservation(self, weights: Hashable = None) -> Reservation:
        """Make a handle for one conversation, which holds no memory yet.

        Args:
            weights: weights that sample the conversation; prefixes are shared only under the same weights.
        """
        return Reservation(self, weights)

    def reserve(
        self, reservation: Reservation, kind: Hashable, tokens: int, context: Int32Array | None, row: int
    ) -> bool:
        if not self.is_bounded:
            return True
        reservation.kind = kind
        if reservation.idle_since is not None:
            self._costs.learn(reservation.kind, asyncio.get_running_loop().time() - reservation.idle_since)
            reservation.idle_since = None
        if row != reservation.row:
            self._evict(reservation)
            reservation.row = row
        if reservation.is_held:
            self._pin(reservation)
        else:
            reservation.tokens, reservation.parts = tokens, self._parts(reservation.weights, context)
            reservation.common = sum([count for _, count in reservation.parts])
            if self._waiting or not self._make_space(reservation):
                return False
        self._hold(reservation, tokens)
        return True

    def queue(self, reservation: Reservation, priority: int) -> None:
        self._leave_queue(reservation)
        self._arrivals += 1
        reservation.admitted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, self._arrivals, reservation, reservation.admitted))
        self._admit_waiting()

    def idle(self, reservation: Reservation, tokens: int) -> None:
        if reservation.is_held:
            keep_s = self._costs.keep_s(reservation.kind)
            reservation.idle_since = asyncio.get_running_loop().time()
            reservation.kept_until = reservation.idle_since + keep_s
            self._hold(reservation, tokens)
            if keep_s:
                self._kept_reservations[reservation] = None
            else:
                self._make_evictable(reservation)
            self._admit_waiting()

    def release(self, reservation: Reservation) -> None:
        reservation.idle_since = None
        self._evict(reservation)
        self._leave_queue(reservation)
        self._admit_waiting()

    def _leave_queue(self, reservation: Reservation) -> None:
        if reservation.admitted is not None and not reservation.admitted.done():
            reservation.admitted.set_result(None)  # `_admit_waiting` then skips it

    def _parts(self, weights: Hashable, context: Int32Array | None) -> tuple[tuple[int, int], ...]:
        """Split the context into parts that others may share: (hash of all tokens up to the part's end, tokens of the
        part)."""
        if context is None or not self._shares_prefixes:
            return ()
        parts, key, start = [], hash(weights), 0
        while start < len(context):
            # The first part of a prefix has 64 tokens. Each part ends at twice the tokens of the previous one, so parts
            # are few.
            stop = min(max(2 * start, 64), len(context))
            key = hash((key, context[start:stop].tobytes()))
            parts.append((key, stop - start))
            start = stop
        return tuple(parts)

    def _hold(self, reservation: Reservation, tokens: int) -> None:
        """Account for `tokens`; beyond the budget, evict the reservations that have been idle longest."""
        self._tokens.hold(reservation, tokens)
        while self._tokens.reserved > self._budget and (self._evictable or self._kept_reservations):
            self._evict(next(iter(self._evictable or self._kept_reservations)))

    def _make_evictable(self, reservation: Reservation) -> None:
        self._evictable[reservation] = None
        self._tokens.make_evictable(reservation)

    def _pin(self, reservation: Reservation) -> None:
        """Pin a conversation, so that its memory cannot be evicted."""
        self._kept_reservations.pop(reservation, None)
        if reservation in self._evictable:
            del self._evictable[reservation]
            self._tokens.pin(reservation)

    def _evict(self, reservation: Reservation) -> None:
        """Take the memory of a conversation, if it holds any."""
        self._pin(reservation)  # removes it from the idle ones, as `_Tokens.evict` expects
        if reservation.is_held:
            self._tokens.evict(reservation)

    def _make_space(self, reservation: Reservation) -> bool:
        """Evict as many evictable reservations as `reservation` needs, or none if all are not enough; returns whether
        it fits."""
        now = asyncio.get_running_loop().time()
        while self._kept_reservations and (longest := next(iter(self._kept_reservations))).kept_until <= now:
            del self._kept_reservations[longest]
            self._make_evictable(longest)
        tokens = self._tokens
        if tokens.pinned and tokens.pinned + tokens.new_pinned(reservation) > self._budget:
            return False
        while self._evictable and tokens.reserved + tokens.new(reservation) > self._budget:
            self._evict(next(iter(self._evictable)))
        return True

    def _admit_waiting(self) -> None:
        """Admit waiting calls as far as they fit; try again when the next idle reservation becomes evictable."""
        while self._waiting:
            _, _, reservation, gate = self._waiting[0]
            if not gate.done():  # otherwise it no longer waits
                if not self._make_space(reservation):
                    break
                self._hold(reservation, reservation.tokens)
                gate.set_result(None)
            heapq.heappop(self._waiting)
        if self._waiting and self._kept_reservations and self._timer is None:
            expires_at = next(iter(self._kept_reservations)).kept_until
            self._timer = asyncio.get_running_loop().call_at(expires_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._admit_waiting()


class Reservation:
    """One conversation's share of the engine's KV cache; made by `KVBudget.reservation`."""

    __slots__ = (
        "_budget",
        "admitted",
        "common",
        "idle_since",
        "is_held",
        "kept_until",
        "kind",
        "parts",
        "row",
        "tokens",
        "weights",
    )

    def __init__(self, budget: KVBudget, weights: Hashable) -> None:
        self._budget = budget
        self.kind: Hashable = None
        """Kind of the conversation; the cost of keeping idle reservations is learned per kind."""
        self.weights = weights
        self.is_held = False
        self.row = 0
        """Row of the newest call."""
        self.tokens = 0
        """Number of tokens of the conversation, as last stated."""
        self.parts: tuple[tuple[int, int], ...] = ()
        """Prefix that others may share, see `KVBudget._parts`."""
        self.common = 0
        """Number of tokens in `parts`."""
        self.idle_since: float | None = None
        """Time at which the conversation became idle; None during a call, and before the first."""
        self.kept_until = 0.0
        """Time from which an idle reservation is evictable."""
        self.admitted: asyncio.Future[None] | None = None
        """Future that resolves when the newest place in the queue ends."""

    def sample(
        self, request: GenerateRequest, generate: Callable[[], Coroutine[Any, Any, Completion]]
    ) -> Coroutine[Any, Any, Completion]:
        """Make a call of the conversation while it holds its memory.

        Args:
            request: the call.
            generate: samples it.

        Raises:
            NoRoomError: the memory has no room for the context. The call is in the queue; `wait` waits for its turn.
        """
        # An unbounded call gets no frame of ours, which would stay in memory for each call in flight.
        return self._sample(request, generate) if self._budget.is_bounded else generate()

    async def _sample(
        self, request: GenerateRequest, generate: Callable[[], Coroutine[Any, Any, Completion]]
    ) -> Completion:
        tokens = len(request.token_ids)
        context = request.token_ids[: tokens - request.sampled_before]
        if not self.reserve(tokens, context, request.seat, request.row):
            self.queue(request.priority)
            raise NoRoomError(f"call {request.request_id}: the KV cache has no room for {tokens} tokens now")
        try:
            completion = await generate()
        except BaseException:
            self.release()
            raise
        self.idle(tokens + len(completion.token_ids))  # also after an abort, which may have come at the last token
        return completion

    def reserve(self, tokens: int, context: Int32Array | None = None, kind: Hashable = None, row: int = 0) -> bool:
        """Try to reserve memory for a call; returns whether the call may begin. The memory is held until `release`, or
        until it is idle and evicted.

        Args:
            tokens: length of the context.
            context: tokens of the context that others may share, `[T]`; None: none are shared.
            kind: kind of the conversation.
            row: row of the conversation. A new row gives the memory of the last one back.
        """
        return self._budget.reserve(self, kind, tokens, context, row)

    def queue(self, priority: int) -> None:
        """Queue for the memory that `reserve` refused; lower priorities go first."""
        self._budget.queue(self, priority)

    async def wait(self) -> None:
        """Wait until the queued reservation is held, or is released."""
        if self.admitted is None:
            return
        try:
            await self.admitted
        except asyncio.CancelledError:
            self.release()
            raise

    def idle(self, tokens: int) -> None:
        """Mark the conversation as idle, with `tokens` tokens, after a call."""
        self._budget.idle(self, tokens)

    def release(self) -> None:
        """Give the memory back and end any wait. Idempotent."""
        self._budget.release(self)


class _Tokens:
    """Counts of tokens over all reservations; a part that several share is counted once.

    A part is pinned while any of its reservations is pinned, and evictable while all are.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self.pinned = 0
        """Number of tokens left if everything evictable were evicted."""
        self._holders: Counter[int] = Counter()
        """Number of reservations by part."""
        self._evictables: Counter[int] = Counter()
        """Number of evictable reservations by part."""

    def new(self, reservation: Reservation) -> int:
        """Return the tokens that a reservation would add to `reserved`."""
        return reservation.tokens - sum([tokens for key, tokens in reservation.parts if key in self._holders])

    def new_pinned(self, reservation: Reservation) -> int:
        """Return the tokens that a reservation would add to `pinned`."""
        return reservation.tokens - sum([tokens for key, tokens in reservation.parts if self._is_pinned(key)])

    def hold(self, reservation: Reservation, tokens: int) -> None:
        """Set the tokens of a pinned reservation."""
        if reservation.is_held:
            tokens = max(tokens, reservation.common)  # shared parts are counted whole until the reservation is evicted
            self.reserved += tokens - reservation.tokens
            self.pinned += tokens - reservation.tokens
        else:
            num_unshared = tokens - reservation.common
            self.reserved += num_unshared
            self.pinned += num_unshared
            for key, count in reservation.parts:
                if not self._is_pinned(key):
                    self.pinned += count
                if key not in self._holders:
                    self.reserved += count
                self._holders[key] += 1
        reservation.is_held, reservation.tokens = True, tokens

    def make_evictable(self, reservation: Reservation) -> None:
        """Make a pinned reservation evictable."""
        self.pinned -= reservation.tokens - reservation.common
        for key, count in reservation.parts:
            self._evictables[key] += 1
            if not self._is_pinned(key):
                self.pinned -= count

    def pin(self, reservation: Reservation) -> None:
        """Pin an evictable reservation."""
        self.pinned += reservation.tokens - reservation.common
        for key, count in reservation.parts:
            if not self._is_pinned(key):
                self.pinned += count
            self._evictables[key] -= 1

    def evict(self, reservation: Reservation) -> None:
        """Remove a pinned reservation."""
        num_unshared = reservation.tokens - reservation.common
        self.reserved -= num_unshared
        self.pinned -= num_unshared
        for key, count in reservation.parts:
            self._holders[key] -= 1
            if not self._is_pinned(key):
                self.pinned -= count
            if not self._holders[key]:
                self.reserved -= count
                del self._holders[key], self._evictables[key]
        reservation.is_held = False

    def _is_pinned(self, key: int) -> bool:
        return self._holders.get(key, 0) > self._evictables.get(key, 0)


class _KeepingCosts:
    """Mean cost of keeping idle reservations per kind, relative to the cost of evicting them at once."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._idles: Counter[Hashable] = Counter()
        self._means: dict[Hashable, float] = {}

    def learn(self, kind: Hashable, seconds: float) -> None:
        """Record an idle time of a conversation, in seconds."""
        # A reservation reused in time cost its idle memory; otherwise the memory for `_most_s`, and the recomputation.
        cost = seconds / self._most_s if seconds < self._most_s else 2.0
        self._idles[kind] += 1
        before = self._means.get(kind, 0.0)
        # the cost of keeping, averaged over about 64 idle times of a kind
        self._means[kind] = before + (cost - before) / min(self._idles[kind], 64)

    def keep_s(self, kind: Hashable) -> float:
        """Return for how many seconds to keep an idle reservation of a kind."""
        return self._most_s if self._means.get(kind, 0.0) < 1.0 else 0.0


def kv_budget_of(engine: EngineCapabilities) -> KVBudget:
    """Make the budget of an engine from its capabilities."""
    return KVBudget(engine.kv_tokens, engine.prefill_rate, shares_prefixes=engine.shares_prefixes)
