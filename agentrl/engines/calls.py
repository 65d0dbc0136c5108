"""Sessions and calls of the embedded engine: one conversation's place, and one request in flight.

Owns: which version samples a call from which token on, and the completion built from it.
Does not schedule; the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from agentrl.core.errors import EngineError
from agentrl.core.records import Completion, VersionSpan

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Container

    from agentrl.core.ports import Delta, GenerateRequest
    from agentrl.core.records import FinishReason
    from agentrl.engines.capture import KeptSets, RoutingTap
    from agentrl.engines.embedded import EmbeddedEngine
    from agentrl.engines.serving import Serving
    from agentrl.engines.slot_columns import SlotColumns


class EmbeddedSession:
    """One conversation: its slot while it has one, its pin or lease. Made by `EmbeddedEngine.open`."""

    __slots__ = ("_engine", "call", "closed", "lease", "pin", "policy", "priority", "session_id", "slot")

    def __init__(
        self, engine: EmbeddedEngine, session_id: str, policy: str, *, pin: Serving | None, priority: int
    ) -> None:
        self._engine = engine
        self.session_id = session_id
        self.policy = policy
        self.pin = pin
        self.lease: Serving | None = None
        self.priority = priority
        self.slot = -1
        self.call: Call | None = None
        self.closed = False

    @property
    def has_kv(self) -> bool:
        """Whether its keys and values still lie in a slot."""
        return self.slot >= 0

    async def generate(self, request: GenerateRequest, on_delta: Delta | None = None) -> Completion:
        """See `agentrl.core.ports.EngineSession.generate`."""
        return await self._engine.generate(self, request, on_delta)

    def close(self) -> None:
        """Give the slot and the pin back; a call in flight is aborted. Idempotent."""
        self._engine.close_session(self)


@dataclass(slots=True, eq=False)
class Call:
    """One request in flight."""

    request: GenerateRequest
    session: EmbeddedSession
    future: asyncio.Future[Completion]
    on_delta: Delta | None
    order: int
    """Arrival number."""
    due: int = 0
    """Waiting calls are served in this order: the arrival number, put back by the priority."""
    serving: Serving | None = None
    """Whose weights sample it now; None while it waits for a slot."""
    ending: bool = False
    """Aborted or cancelled: it ends before the next pass."""
    fresh: bool = False
    """Nothing is computed yet: a prefix may be copied from a slot that has it."""
    cached: int = 0
    delivered: int = 0
    """Tokens given to `on_delta`."""
    since: int = 0
    """First token sampled by `serving`."""
    spans: list[VersionSpan] = field(default_factory=list)

    def __lt__(self, other: Call) -> bool:
        return (self.due, self.order) < (other.due, other.order)

    def close_span(self, sampled: int) -> None:
        """All tokens before the `sampled`-th belong to versions up to the present one."""
        if self.serving is None or sampled == self.since:
            return
        version, start = self.serving.version, self.since
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(start, sampled, version))
        self.since = sampled

    def deliver(self, columns: SlotColumns) -> None:
        """Give `on_delta` the tokens sampled since it was last called, apart by version."""
        if self.on_delta is None or self.serving is None:
            return
        tokens, logprobs = columns.sampled(self.session.slot, self.delivered)
        sampled, start = self.delivered + len(tokens), self.delivered
        for span in (*self.spans, VersionSpan(self.since, sampled, self.serving.version)):
            first, last = max(span.start, start) - start, span.stop - start
            if last > max(first, 0):
                piece = slice(max(first, 0), last)
                self.on_delta(self.request.request_id, tokens[piece].tolist(), logprobs[piece].tolist(), span.version)
        self.delivered = sampled

    def complete(
        self, columns: SlotColumns, reason: FinishReason, *, tap: RoutingTap | None, kept: KeptSets | None
    ) -> Completion:
        """What was sampled so far, as the engine's reply."""
        context = len(self.request.token_ids)
        if self.serving is None:
            return empty_completion(context, reason)
        slot = self.session.slot
        tokens, logprobs = columns.sampled(slot)
        self.close_span(len(tokens))
        routing = tap.take(slot, int(columns.computed[slot])) if tap else None
        return Completion(
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            spans=tuple(self.spans),
            expert_routing=routing.rows if routing else None,
            routing_start=routing.start if routing else 0,
            routing_breaks=routing.breaks if routing else (),
            sampling_mask=kept.take(slot) if kept else None,
            prompt_tokens=context,
            cached_tokens=self.cached,
        )


def empty_completion(context: int, reason: FinishReason) -> Completion:
    """The reply to a call that sampled nothing."""
    return Completion(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish_reason=reason,
        spans=(),
        prompt_tokens=context,
    )


class _Conversation(Protocol):
    """A session, as far as a new call goes."""

    @property
    def closed(self) -> bool: ...
    @property
    def call(self) -> object | None: ...


def check_request(
    request: GenerateRequest, session: _Conversation, in_flight: Container[str], *, vocabulary: int, where: str
) -> None:
    """Refuse a call that no engine takes; `in_flight` are the request ids of others, `where` names the call.

    Raises:
        EngineError: the session is closed or has a call, or the tokens or the temperature make no sense.
    """
    if session.closed:
        raise EngineError(f"{where}: the session is closed")
    if session.call is not None or request.request_id in in_flight:
        raise EngineError(f"{where}: a session has one call at a time, with a request id of its own")
    ids = request.token_ids
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise EngineError(f"{where}: the context must have tokens, all in [0, {vocabulary})")
    if not request.sampling.temperature > 0:
        raise EngineError(f"{where}: temperature {request.sampling.temperature} is not above 0")
