"""External policies, which no engine of the run serves: behind an endpoint (`remote_policy.py`), or programs (bots).

Owns: the routing of calls to policies, and the calls of bots. An external policy receives the conversation as JSON
lines (`rollout/chat/byte_formats.py`), one token per byte; its completion is such a line with logprob 0, recorded and
replayed like any other and never trained.
Invariants: a bot's random numbers depend only on the call id of its turn, so a replayed turn is the same; a bot that
raises, or returns something other than text, ends the episode with an error.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol

import numpy as np

from agentrl.core.errors import EngineError, EpisodeError, format_foreign_error
from agentrl.core.ids import random_stream
from agentrl.core.ports import EngineCapabilities
from agentrl.core.records import Completion, Message, PolicyVersion, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from agentrl.core.ports import Engine, EngineSession, GenerateRequest, NewTokensCallback, Sampler
    from agentrl.core.records import FinishReason, Float32Array, Int32Array, WeightsRef

MAX_CHARACTERS = 1 << 20
"""Maximum length of a bot's turn, in characters: all of it goes to the journal."""
Program = Callable[[Sequence[Message], Random], "str | Awaitable[str]"]
"""Maps a conversation, newest message last, to the reply."""


class ExternalPolicy(Protocol):
    """A policy that no engine of the run serves."""

    async def generate(self, request: GenerateRequest, where: str) -> Completion:
        """Request a turn; `where` names episode and seat, for messages."""
        ...

    def abort(self, request_id: str) -> None:
        """End a call in flight without a token; does nothing if it is not in flight."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ExternalSession:
    """See `agentrl.core.ports.EngineSession`; holds no resources."""

    external: ExternalPolicy
    session_id: str

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        """See `agentrl.core.ports.EngineSession.generate`; the whole answer comes at once."""
        return await self.external.generate(request, f"episode and seat {self.session_id}")

    def close(self) -> None: ...


class SamplerWithExternalPolicies:
    """See `agentrl.core.ports.Sampler`: combines a sampler with external policies."""

    def __init__(self, sampler: Sampler, policies: Mapping[str, ExternalPolicy]) -> None:
        self.capabilities: EngineCapabilities = sampler.capabilities
        self._sampler = sampler
        self._external = policies

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        if policy in self._external:
            return ExternalSession(self._external[policy], session_id)
        return self._sampler.open(session_id, policy, pin=pin)

    def abort(self, request_id: str) -> None:
        for each in self._external.values():
            each.abort(request_id)
        self._sampler.abort(request_id)


class EngineWithExternalPolicies(SamplerWithExternalPolicies):
    """See `agentrl.core.ports.Engine`: combines an engine with external policies."""

    def __init__(self, engine: Engine, policies: Mapping[str, ExternalPolicy]) -> None:
        super().__init__(engine, policies)
        self.engine = engine
        """Engine of the other policies."""

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        await self.engine.serve(current, pinned)

    async def ping(self) -> None:
        await self.engine.ping()

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        return await self.engine.score(version, token_ids, temperature)

    def busy_seconds(self) -> float:
        """See `Engine.busy_seconds`: those of the engine."""
        return self.engine.busy_seconds()

    async def close(self) -> None:
        for each in self._external.values():
            await each.close()
        await self.engine.close()


class NoEngine:
    """See `agentrl.core.ports.Engine`: the engine of a run whose policies are all external."""

    capabilities = EngineCapabilities(
        name="none", refresh=frozenset(), expert_routing=False, sampling_mask=False, adapters=0, max_context=1 << 20
    )

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        """Refuse: this engine serves no policy."""
        raise EngineError(f"{session_id}: policy {policy!r} has no engine: all policies of the run are external")

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`; no call is ever in flight."""

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """Refuse any version: external policies have no weights."""
        for weights in (*current, *pinned):
            raise EngineError(
                f"{weights.path} cannot be loaded: all policies of the run are external, so there is no engine"
            )

    async def ping(self) -> None:
        """See `Engine.ping`; there is no process to fail."""

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        """Refuse: external policies have no weights."""
        raise EngineError(
            f"tokens of {version} cannot be scored: all policies of the run are external, so there is no engine"
        )

    def busy_seconds(self) -> float:
        """Return 0: this engine is never busy."""
        return 0.0

    async def close(self) -> None:
        """See `Engine.close`; nothing to release."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bot:
    """See `ExternalPolicy`: a policy that is a program."""

    policy: str
    program: Program

    async def generate(self, request: GenerateRequest, where: str) -> Completion:
        """Ask the program."""
        lines = bytes(request.token_ids.tolist()).decode().split("\n")[:-1]
        told = [line for line in map(json.loads, lines) if "tools" not in line]
        conversation = [Message(role=line["role"], content=line["content"]) for line in told]
        try:
            said = self.program(conversation, random_stream("bot", request.seed))
            if inspect.isawaitable(said):
                said = await said
        except EpisodeError:
            raise
        except Exception as error:
            raise self._failed(where, f"raised {format_foreign_error(error)}") from error
        if not isinstance(said, str):
            raise self._failed(where, f"returned {said!r:.200}; it must return text")
        if len(said) > MAX_CHARACTERS:
            raise self._failed(where, f"returned {len(said)} characters; at most {MAX_CHARACTERS} are allowed")
        line = json.dumps({"role": "assistant", "content": said}, ensure_ascii=False) + "\n"
        return external_completion(self.policy, line.encode("utf-8", "replace"), "stop")

    def abort(self, request_id: str) -> None:
        """Do nothing: turns of a bot end at once, or are awaited."""

    async def close(self) -> None:
        """Do nothing: a bot holds no resources."""

    def _failed(self, where: str, what: str) -> EpisodeError:
        return EpisodeError(f"{where}, policy {self.policy!r}: the bot {what}", reason="bot_error")


def external_completion(policy: str, said: bytes, reason: FinishReason) -> Completion:
    """Make the completion of an external policy from the bytes of its line."""
    version = PolicyVersion(policy, 0, 0)
    return Completion(
        token_ids=np.frombuffer(said, dtype=np.uint8).astype(np.int32),
        logprobs=np.zeros(len(said), dtype=np.float32),
        finish_reason=reason,
        spans=(VersionSpan(0, len(said), version),) if said else (),
    )
