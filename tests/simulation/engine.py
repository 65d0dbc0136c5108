"""An emulated engine that samples nothing but takes realistic time: continuous batching, bounded KV memory, prefill.

Running calls share every forward pass: with b of them, each gets r(b) tokens per second. All of them advance equally,
so one number (`_advanced`) counts their progress, and a call ends when it has grown by the call's length.

1. At most `slots` calls run; the others wait, in order of priority, then of arrival.
2. The part of a call's context that is no longer in memory is computed first, at `prefill_rate`, for one call after
   another in the order in which they began. No other call advances during that time.
3. A conversation keeps its KV between turns while memory lasts; the conversation that was idle longest is evicted
   first. When running calls exceed the memory, the one that began last waits and recomputes its context later. A
   single call that exceeds the memory alone continues.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from agentrl.core.errors import EngineError
from agentrl.core.ports import EngineCapabilities, TokenScores
from agentrl.core.records import VersionSpan
from agentrl.core.tokens import Completion
from agentrl.engines.kv_budget import KVBudget, kv_budget_of

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest, NewTokensCallback
    from agentrl.core.records import FinishReason, Float32Array, Int32Array, PolicyVersion, WeightsRef

HEADROOM = 0.05
"""Share of the memory left free for running calls when a call begins; otherwise their next tokens would evict it at
once."""

Length = Callable[["GenerateRequest"], int]
"""Returns the number of tokens that a call samples."""

Rate = Callable[[int], float]
"""Returns r(b), the tokens per second of each of b calls that run together."""


@dataclass(slots=True, eq=False)
class _EmulatedCall:
    session: EmulatedSession
    request: GenerateRequest
    length: int
    context: int
    """Number of tokens before the first sampled token."""
    order: tuple[int, int]
    future: asyncio.Future[None]
    said: float = 0.0
    """Number of tokens sampled before the call was last taken from a slot."""
    began: float | None = None
    """Value of `_advanced` when the call got its slot; None without a slot."""
    reason: FinishReason = "stop"
    spans: list[VersionSpan] = field(default_factory=list)
    """Spans of versions before `version`."""
    version: PolicyVersion | None = None

    def __lt__(self, other: _EmulatedCall) -> bool:
        return self.order < other.order


class EmulatedEngine:
    """See `agentrl.core.ports.Engine`; every policy moves to newer weights between two tokens.

    Args:
        length: returns the number of tokens of a call.
        versions: first version of each policy.
        slots: maximum number of concurrent calls.
        rate: returns r(b).
        kv_tokens: maximum number of context tokens of all conversations together; None: no bound.
        prefill_rate: context tokens computed per second.
        max_context: maximum context including the completion, in tokens; None: no bound.
        reserves: whether calls reserve memory before they begin, as in a real engine; if not, running calls evict each
            other.
    """

    def __init__(
        self,
        length: Length,
        *,
        versions: Mapping[str, PolicyVersion],
        slots: int,
        rate: Rate,
        kv_tokens: int | None = None,
        prefill_rate: float = math.inf,
        max_context: int | None = None,
        reserves: bool = True,
    ) -> None:
        if kv_tokens is not None and max_context is not None and kv_tokens < max_context:
            raise EngineError(
                f"a context may have {max_context} tokens, but the KV cache has room for {kv_tokens}, so one episode "
                "could exceed it. Lower max_context, or give more memory"
            )
        self.capabilities = EngineCapabilities(
            name="emulated",
            refresh=frozenset({"token"}),
            expert_routing=False,
            sampling_mask=False,
            adapters=1 << 20,
            max_context=max_context or 1 << 20,
            kv_tokens=kv_tokens,
            prefill_rate=prefill_rate,
            places=slots,
        )
        self.kv_budget = kv_budget_of(self.capabilities) if reserves else KVBudget(None)
        self._length = length
        self._current = dict(versions)
        self._slots = slots
        self._rate = rate
        self._room = math.inf if kv_tokens is None else kv_tokens
        self._prefill_rate = prefill_rate
        self._waiting: list[_EmulatedCall] = []
        self._running: list[_EmulatedCall] = []
        self._ends: list[tuple[float, int, _EmulatedCall, float]] = []
        """Ends of running calls, on the scale of `_advanced`: (end, arrival, call, `began` of the call)."""
        self._idle: OrderedDict[EmulatedSession, None] = OrderedDict()
        self._kept = 0.0
        """Number of tokens of running and idle conversations whose keys and values are held."""
        self._advanced = 0.0
        self._computing: dict[_EmulatedCall, float] = {}
        """Seconds that the rest of each running call's context takes, in order of their starts."""
        self._computing_seconds = 0.0
        """Seconds of prefill of all calls."""
        self._now = 0.0
        self._arrivals = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_dirty = False
        self.sampled = 0.0
        """Number of tokens sampled so far."""
        self.slot_seconds = 0.0
        """Seconds in which slots had a call, summed over slots."""
        self.full_seconds = 0.0
        """Seconds in which the engine was at capacity: a call waited, or contexts were computed. Other seconds count by
        the share of slots in use."""
        self.preemptions = 0
        self._busy = 0.0

    # --- the port -----------------------------------------------------------------------------------------------------

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EmulatedSession:
        if policy not in self._current:
            raise EngineError(f"no policy {policy!r} in this engine; it serves: {', '.join(sorted(self._current))}")
        return EmulatedSession(self, policy, pin)

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """See `agentrl.core.ports.Engine.serve`; reads no file, and calls can be pinned to any version."""
        self._advance()
        for weights in current:
            version = weights.version
            if version == self._current[version.policy]:
                continue
            for call in (*self._running, *self._waiting):
                if call.session.policy == version.policy and call.session.pin is None:
                    self._split(call)
                    call.version = version
            self._current[version.policy] = version

    async def ping(self) -> None:
        """See `agentrl.core.ports.Engine.ping`; the engine computes in the event loop."""

    def abort(self, request_id: str) -> None:
        for call in (*self._running, *self._waiting):
            if call.request.request_id == request_id and not call.future.done():
                call.reason = "abort"
                call.future.set_result(None)

    def cut(self, unwanted: Callable[[GenerateRequest], bool]) -> None:
        """End calls now, as if they were complete."""
        self._advance()
        for call in (*self._running, *self._waiting):
            if unwanted(call.request) and not call.future.done():
                call.length = max(self._said(call), 1)
                call.future.set_result(None)

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        """Return a log-probability of -1 for each simulated token."""
        return TokenScores.after_first(np.full(len(token_ids) - 1, -1.0, np.float32))

    def busy_seconds(self) -> float:
        """Return the seconds in which any call ran."""
        self._advance()
        return self._busy

    async def close(self) -> None:
        """See `Engine.close`; nothing to release."""

    # --- calls --------------------------------------------------------------------------------------------------------

    def submit(self, session: EmulatedSession, request: GenerateRequest) -> _EmulatedCall:
        """Queue a new call."""
        self._advance()  # advance to now, when it begins to wait
        self._arrivals += 1
        length = min(self._length(request), request.sampling.max_tokens) - request.sampled_before
        call = _EmulatedCall(
            session=session,
            request=request,
            length=max(length, 1),
            context=len(request.token_ids),
            order=(request.priority, self._arrivals),
            future=asyncio.get_running_loop().create_future(),
            version=session.pin or self._current[session.policy],
        )
        insort(self._waiting, call)
        self._change()
        return call

    def finish(self, call: _EmulatedCall) -> Completion:
        """End a call, finished or cut, and return its completion. Its conversation keeps its KV while memory lasts."""
        self._advance()
        if call.began is not None:
            self._take_out(call)
        elif call in self._waiting:
            self._waiting.remove(call)
        self._split(call)
        self._change()
        count = call.spans[-1].stop if call.spans else 0
        call.session.context = call.context + count
        return Completion(
            token_ids=_tokens(count),
            logprobs=_logprobs(count),
            finish_reason=call.reason,
            spans=tuple(call.spans),
        )

    def forget(self, session: EmulatedSession) -> None:
        """Release the resources of a conversation that has ended."""
        self._kept -= session.kept
        session.kept = 0.0
        self._idle.pop(session, None)

    def _said(self, call: _EmulatedCall) -> int:
        ran = 0.0 if call.began is None else self._advanced - call.began
        return min(math.floor(call.said + ran + 1e-6), call.length)

    def _split(self, call: _EmulatedCall) -> None:
        """Attribute the tokens since the last split to `call.version`."""
        start = call.spans[-1].stop if call.spans else 0
        said = self._said(call)
        if said > start and call.version is not None:
            call.spans.append(VersionSpan(start, said, call.version))

    # --- time ---------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Update `_advanced` and all values that depend on it to the current time."""
        now = asyncio.get_running_loop().time()
        seconds, self._now = now - self._now, now
        count = len(self._running)
        if seconds <= 0 or not count:
            return
        computing = self._compute(seconds)
        sampling = seconds - computing
        tokens = self._rate(count) * sampling
        self._advanced += tokens
        self.sampled += tokens * count
        self._kept += tokens * count
        self._busy += seconds
        self.slot_seconds += seconds * count
        self.full_seconds += computing + sampling * (
            1.0 if self._waiting or self.kv_budget.waiting else count / self._slots
        )

    def _compute(self, seconds: float) -> float:
        """Compute contexts for at most the given seconds. Returns the seconds used."""
        left = seconds
        while self._computing and left > 0:
            call = next(iter(self._computing))
            needed = self._computing[call]
            if needed > left:
                self._computing[call] = needed - left
                left = 0.0
            else:
                del self._computing[call]
                left -= needed
        self._computing_seconds = self._computing_seconds - (seconds - left) if self._computing else 0.0
        return seconds - left

    def _change(self) -> None:
        """Schedule an update of the slots after all events of the current instant."""
        if not self._is_dirty:
            self._is_dirty = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        self._is_dirty = False
        self._advance()
        self._end_those_that_are_due()
        self._evict()
        while self._waiting and len(self._running) < self._slots and self._begin(self._waiting[0]):
            self._waiting.pop(0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            self._timer = asyncio.get_running_loop().call_at(self._next_change(), self._settle)

    def _next_change(self) -> float:
        """Return the next time at which a call ends or memory is full while another conversation can be evicted."""
        rate = self._rate(len(self._running))
        seconds = max(self._ends[0][0] - self._advanced, 0.0) / rate
        if self._idle or len(self._running) > 1:  # a single call may exceed the memory and continue
            seconds = min(seconds, max(self._room - self._kept, 0.0) / (rate * len(self._running)) + 1e-6)
        at = self._now + self._computing_seconds + seconds
        return max(at, math.nextafter(self._now, math.inf))  # a tiny interval may vanish in the floating-point sum

    def _end_those_that_are_due(self) -> None:
        while self._ends:
            end, _, call, began = self._ends[0]
            if call.began != began:  # the call was removed in the meantime
                heapq.heappop(self._ends)
            elif end <= self._advanced + 1e-6:
                heapq.heappop(self._ends)
                self._take_out(call)
                if not call.future.done():
                    call.future.set_result(None)
            else:
                return

    def _begin(self, call: _EmulatedCall) -> bool:
        """Give a call a slot if its context fits; return whether it does."""
        session, context = call.session, call.context + self._said(call)
        self._idle.pop(session, None)
        new = max(context - session.kept, 0.0)
        limit = self._room * (1 - HEADROOM) if self._running else self._room
        while self._kept + new > limit and self._idle:
            self.forget(next(iter(self._idle)))
        if self._kept + new > limit and self._running:
            if session.kept:
                self._idle[session] = None  # an idle session may lose its KV cache
            return False
        self._kept += new
        session.kept += new
        self._running.append(call)
        call.began = self._advanced
        seconds = new / self._prefill_rate
        if seconds > 0:
            self._computing[call] = seconds
            self._computing_seconds += seconds
        heapq.heappush(self._ends, (call.began + call.length - call.said, call.order[1], call, call.began))
        return True

    def _evict(self) -> None:
        """Make room when running calls exceed the memory: evict idle conversations, then preempt the newest call."""
        while self._kept > self._room and (self._idle or len(self._running) > 1):
            if self._idle:
                self.forget(next(iter(self._idle)))
                continue
            call = self._running[-1]
            self._take_out(call)
            self.forget(call.session)
            insort(self._waiting, call)
            self.preemptions += 1

    def _take_out(self, call: _EmulatedCall) -> None:
        """Take a call's slot; its conversation keeps its KV while memory lasts."""
        self._running.remove(call)
        assert call.began is not None
        session, grown = call.session, self._advanced - call.began
        call.said, call.began = float(self._said(call)), None
        now = call.context + call.said
        seconds = self._computing.pop(call, 0.0)
        if seconds > 0:  # the call was aborted during prefill
            self._computing_seconds = self._computing_seconds - seconds if self._computing else 0.0
            now -= seconds * self._prefill_rate
        self._kept += now - session.kept - grown
        session.kept = now
        if session.is_open:
            self._idle[session] = None
        else:
            self.forget(session)


class EmulatedSession:
    """Conversation with the emulated engine."""

    def __init__(self, engine: EmulatedEngine, policy: str, pin: PolicyVersion | None) -> None:
        self._engine = engine
        self.policy = policy
        self.pin = pin
        self.kept = 0.0
        """Number of tokens of the conversation whose keys and values are held."""
        self.context = 0
        """Number of tokens of the conversation after its newest turn."""
        self.is_open = True
        self._reservation = engine.kv_budget.reservation((policy, pin))

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        return await self._reservation.sample(request, lambda: self._sample(request))

    async def wait_for_room(self) -> None:
        await self._reservation.wait()

    async def _sample(self, request: GenerateRequest) -> Completion:
        call = self._engine.submit(self, request)
        try:
            await call.future
        finally:
            completion = self._engine.finish(call)
        return completion

    def close(self) -> None:
        self.is_open = False
        self._reservation.release()
        self._engine.forget(self)


_TEXT: dict[int, Int32Array] = {}
_FLAT: dict[int, Float32Array] = {}


def _tokens(count: int) -> Int32Array:
    """Return placeholder token ids, shared by all completions of a length."""
    found = _TEXT.get(count)
    if found is None:
        found = _TEXT[count] = np.full(count, ord("."), np.int32)
        found.flags.writeable = False
    return found


def _logprobs(count: int) -> Float32Array:
    found = _FLAT.get(count)
    if found is None:
        found = _FLAT[count] = np.full(count, -1.0, np.float32)
        found.flags.writeable = False
    return found
