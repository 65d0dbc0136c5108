"""Between turns and their journal entries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agentrl.core.errors import EngineError, JournalError
from agentrl.core.records import Completion, Message, PolicyVersion, RoutingBreak, SamplingMask, VersionSpan
from agentrl.journal.entries import TurnEntry

if TYPE_CHECKING:
    from agentrl.core.records import FinishReason
    from agentrl.journal.entries import Span


def message_data(message: Message) -> dict[str, Any]:
    """A message as JSON-serialisable data, empty fields left out."""
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        data["name"] = message.name
    return data


def message_of(data: Mapping[str, Any]) -> Message:
    """The message that `message_data` wrote.

    Raises:
        JournalError: it is none.
    """
    try:
        calls = data.get("tool_calls", ())
        return msgspec.convert(
            {**data, "tool_calls": [{"id": "", **call} for call in calls]} if calls else dict(data), Message
        )
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise JournalError(f"a message that was edited in cannot be read ({error})") from error


def completion_of(entry: TurnEntry) -> Completion:
    """The completion an entry recorded.

    Raises:
        EngineError: its finish reason is none we know.
    """
    finish_reason: FinishReason
    match entry.finish_reason:
        case "stop" | "length" | "abort" as finish_reason:
            pass
        case other:
            raise EngineError(f"the journal holds an unknown finish_reason {other!r}")
    mask = None
    if entry.mask_counts is not None:
        counts = np.frombuffer(entry.mask_counts, dtype="<i4")
        mask = SamplingMask(counts=counts, token_ids=np.frombuffer(entry.mask_ids or b"", dtype="<i4"))
    routing = None
    if entry.expert_routing is not None:
        routing = np.frombuffer(entry.expert_routing, dtype=np.uint8).reshape(entry.routing_shape)
    return Completion(
        token_ids=np.frombuffer(entry.token_ids, dtype="<i4"),
        logprobs=np.frombuffer(entry.logprobs, dtype="<f4"),
        finish_reason=finish_reason,
        spans=_spans(entry.weights_of or entry.policy, entry.spans),
        expert_routing=routing,
        routing_start=entry.routing_start,
        routing_breaks=tuple(RoutingBreak(*at) for at in entry.routing_breaks),
        sampling_mask=mask,
        cached_tokens=entry.cached_tokens,
    )


@lru_cache(maxsize=4096)
def _spans(policy: str, spans: tuple[Span, ...]) -> tuple[VersionSpan, ...]:
    """Shared: most turns have one span, and their lengths and versions are few."""
    return tuple(VersionSpan(s.start, s.stop, PolicyVersion(policy, s.lineage, s.step)) for s in spans)
