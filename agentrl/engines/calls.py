"""Sessions and calls of the embedded engine: one conversation's place, and one request in flight.

Owns: which version samples a call from which token on, and the completion built from it.
Does not schedule; the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.core.records import Completion, VersionSpan
from agentrl.engines.sessions import Session, empty_completion

if TYPE_CHECKING:
    import asyncio

    from agentrl.core.ports import Delta, GenerateRequest
    from agentrl.core.records import FinishReason
    from agentrl.engines.capture import KeptSets, RoutingTap
    from agentrl.engines.serving import Serving
    from agentrl.engines.slot_columns import SlotColumns


@dataclass(slots=True, eq=False)
class EmbeddedSession(Session["Serving"]):
    """One conversation, and its slot while it has one. Made by `EmbeddedEngine.open`."""

    slot: int = -1

    @property
    def has_kv(self) -> bool:
        """Whether its keys and values still lie in a slot."""
        return self.slot >= 0


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
