"""Calls of the vLLM engine: one request in flight.

Owns: what was sampled so far and by whom. Does not ask vLLM for anything; the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from agentrl.core.records import Completion, VersionSpan
from agentrl.engines.sessions import Session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.outputs import CompletionOutput

    from agentrl.core.clock import Clock
    from agentrl.core.ports import Delta, GenerateRequest
    from agentrl.core.records import FinishReason, PolicyVersion
    from agentrl.engines.vllm_updates import VllmVersion

_DELTA_SECONDS = 0.2


VllmSession: TypeAlias = Session["VllmVersion"]
"""One conversation: its pin or lease. Its keys and values are vLLM's to keep."""


@dataclass(slots=True, eq=False)
class VllmCall:
    """One request in flight, over as many requests to vLLM as its weights changed."""

    request: GenerateRequest
    session: VllmSession
    on_delta: Delta | None
    clock: Clock
    serving: VllmVersion
    """Whose weights sample it, or sampled it last."""
    name: str = ""
    """Of vLLM's request."""
    asked: bool = False
    """vLLM works on it: it is counted among the calls of `serving`."""
    ending: bool = False
    """Aborted: it returns what it has."""
    moving: bool = False
    """Other weights sample it from here on, in a new request."""
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    _delivered: int = 0
    _next_delta: float = 0.0

    def take(self, chosen: CompletionOutput) -> None:
        """Add what vLLM sampled since it last spoke."""
        if chosen.token_ids:
            if self._next_delta == 0.0:
                self._next_delta = self.clock.monotonic() + _DELTA_SECONDS
            self.tokens.extend(chosen.token_ids)
            self.logprobs.extend(_logprobs_of(chosen))
            if self.on_delta is not None and self.clock.monotonic() >= self._next_delta:
                self.deliver()

    def deliver(self) -> None:
        """Give `on_delta` what it was not given yet, sampled by the version that serves; not while that is on trial."""
        if self.serving.is_on_trial:
            return
        first, self._delivered = self._delivered, len(self.tokens)
        self._next_delta = self.clock.monotonic() + _DELTA_SECONDS
        if self.on_delta is not None and self._delivered > first:
            self.on_delta(self.request.request_id, self.tokens[first:], self.logprobs[first:], self.serving.version)

    def cut(self) -> None:
        """Forget what was held back: the version that sampled it is none."""
        del self.tokens[self._delivered :], self.logprobs[self._delivered :]

    def close_spans(self, spans: Sequence[tuple[int, PolicyVersion]]) -> None:
        """All tokens so far belong to the versions of `spans`, which say where each ends."""
        for stop, version in spans:
            start = self.spans[-1].stop if self.spans else 0
            if stop > start:
                if self.spans and self.spans[-1].version == version:
                    start = self.spans.pop().start
                self.spans.append(VersionSpan(start, stop, version))

    def complete(self, reason: FinishReason) -> Completion:
        """What was sampled, as the engine's reply."""
        return Completion(
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            finish_reason=reason,
            spans=tuple(self.spans),
            prompt_tokens=len(self.request.token_ids),
            cached_tokens=self.cached,
        )


def _logprobs_of(chosen: CompletionOutput) -> list[float]:
    """The sampled tokens' log-probabilities, one each."""
    flat: Any = chosen.logprobs
    return [float(flat.logprobs[start]) for start in flat.start_indices]
