"""An engine, but for the policies that live outside of it: behind an endpoint (`remote.py`), or programs (`bots.py`).

Owns: which policy is asked where. Such a policy is told the conversation as JSON lines, a byte a token, and its
completion is a line like them, with logprob 0: recorded and replayed like any other, and never trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from agentrl.core.errors import EngineError
from agentrl.core.ports import EngineCapabilities
from agentrl.core.records import Completion, PolicyVersion, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentrl.core.ports import Delta, Engine, EngineSession, GenerateRequest, Sampler
    from agentrl.core.records import FinishReason, Float32Array, Int32Array, WeightsRef


class Outside(Protocol):
    """One policy that no engine of ours serves."""

    async def generate(self, request: GenerateRequest, where: str) -> Completion:
        """Ask it for a turn; `where` names episode and seat, for messages."""
        ...

    def abort(self, request_id: str) -> None:
        """End a call in flight, without a token; nothing where it is not in flight."""
        ...

    async def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class OutsideSession:
    """See `agentrl.core.ports.EngineSession`; there is nothing to hold."""

    outside: Outside
    session_id: str

    async def generate(self, request: GenerateRequest, on_delta: Delta | None = None) -> Completion:
        """See `agentrl.core.ports.EngineSession.generate`; the answer comes all at once."""
        return await self.outside.generate(request, f"episode and seat {self.session_id}")

    def close(self) -> None:
        """See `agentrl.core.ports.EngineSession.close`."""


class RoutedSampler:
    """See `agentrl.core.ports.Sampler`: one, but for the policies that live outside of it."""

    def __init__(self, sampler: Sampler, outside: Mapping[str, Outside]) -> None:
        self.capabilities: EngineCapabilities = sampler.capabilities
        self._sampler = sampler
        self._outside = outside

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        """See `agentrl.core.ports.Sampler.open`."""
        if policy in self._outside:
            return OutsideSession(self._outside[policy], session_id)
        return self._sampler.open(session_id, policy, pin=pin)

    def abort(self, request_id: str) -> None:
        """See `agentrl.core.ports.Sampler.abort`."""
        for outside in self._outside.values():
            outside.abort(request_id)
        self._sampler.abort(request_id)


class RoutedEngine(RoutedSampler):
    """See `agentrl.core.ports.Engine`: an engine, but for the policies that live outside of it."""

    def __init__(self, engine: Engine, outside: Mapping[str, Outside]) -> None:
        super().__init__(engine, outside)
        self.engine = engine
        """Ours."""

    async def update(self, weights: WeightsRef, *, keep: bool = False) -> None:
        """See `agentrl.core.ports.Engine.update`."""
        await self.engine.update(weights, keep=keep)

    def release(self, version: PolicyVersion) -> None:
        """See `agentrl.core.ports.Engine.release`."""
        self.engine.release(version)

    async def pause(self) -> None:
        """See `agentrl.core.ports.Engine.pause`."""
        await self.engine.pause()

    async def resume(self) -> None:
        """See `agentrl.core.ports.Engine.resume`."""
        await self.engine.resume()

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        """See `agentrl.core.ports.Engine.score`."""
        return await self.engine.score(version, token_ids, temperature)

    def busy_seconds(self) -> float:
        """The engine's own."""
        return self.engine.busy_seconds()

    async def close(self) -> None:
        """See `agentrl.core.ports.Engine.close`."""
        for outside in self._outside.values():
            await outside.close()
        await self.engine.close()


class NoEngine:
    """See `agentrl.core.ports.Engine`: what stands for one where every policy lives outside."""

    capabilities = EngineCapabilities(
        name="none", refresh=frozenset(), expert_routing=False, sampling_mask=False, adapters=0, max_context=1 << 20
    )

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        """Refused: no policy is here."""
        raise EngineError(f"{session_id}: no engine serves policy {policy!r}: all policies of the run live outside")

    def abort(self, request_id: str) -> None:
        """Nothing is in flight."""

    async def update(self, weights: WeightsRef, *, keep: bool = False) -> None:
        """Refused: nothing here has weights."""
        raise EngineError(f"no engine takes {weights.path}: all policies of the run live outside")

    def release(self, version: PolicyVersion) -> None:
        """Nothing is held."""

    async def pause(self) -> None:
        """Nothing samples."""

    async def resume(self) -> None:
        """Nothing samples."""

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        """Refused: nothing here has weights."""
        raise EngineError(f"no engine scores tokens of {version}: all policies of the run live outside")

    def busy_seconds(self) -> float:
        """Never busy."""
        return 0.0

    async def close(self) -> None:
        """Nothing is held."""


def completion(policy: str, said: bytes, reason: FinishReason) -> Completion:
    """What a policy that lives outside has said, in the bytes of its line."""
    version = PolicyVersion(policy, 0, 0)
    return Completion(
        token_ids=np.frombuffer(said, dtype=np.uint8).astype(np.int32),
        logprobs=np.zeros(len(said), dtype=np.float32),
        finish_reason=reason,
        spans=(VersionSpan(0, len(said), version),) if said else (),
    )
