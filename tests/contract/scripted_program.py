"""The scripted engine of the contract suite, also for a process of its own, where torch need not be imported."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.core.errors import EngineError, EngineLostError
from agentrl.core.ports import EngineSession, GenerateRequest, NewTokensCallback, TokenScores
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.tokens import Completion
from agentrl.engines.scripted import ScriptedEngine
from tests.support.builders import make_completion

if TYPE_CHECKING:
    from agentrl.core.records import Int32Array

VOCABULARY = 97
SCRIPTED_END = "max_tokens"
"""Stop reason of the episodes: the script never stops, so that every turn is cut."""


def scripted_engine(
    versions: Mapping[str, PolicyVersion],
    *,
    max_context: int,
    refresh: Any,
    slots: int = 0,
    seconds_per_token: float = 5e-4,
    kv_tokens: int | None = None,
) -> ScriptedEngine:
    """Replies keyed by the seed; with `kv_tokens` it says that it holds so many, and computes 1000 a second."""

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        return np.random.default_rng(request.seed).integers(3, VOCABULARY, 600).tolist()  # type: ignore[no-any-return]

    engine = ScriptedEngine(
        script,
        versions=versions,
        seconds_per_token=seconds_per_token,
        refresh=refresh,
        seeded_logprobs=True,
        max_context=max_context,
    )
    engine.capabilities = replace(engine.capabilities, kv_tokens=kv_tokens, prefill_rate=1e3)
    return engine


def confused_engine(versions: Mapping[str, PolicyVersion]) -> ScriptedEngine:
    """Says token ids that are none."""
    return ScriptedEngine(lambda *_: [-7] * 600, versions=versions, seconds_per_token=5e-4)


class FaultyEngine(ScriptedEngine):
    """Has a bug that shows in the first update."""

    def __init__(self, versions: Mapping[str, PolicyVersion]) -> None:
        super().__init__([[3]], versions=versions)

    async def load(self, weights: WeightsRef) -> None:
        """Raises what no engine should."""
        raise ZeroDivisionError("a bug")


class HangingEngine(ScriptedEngine):
    """Serves, but for what computes."""

    def __init__(self, versions: Mapping[str, PolicyVersion]) -> None:
        super().__init__([[3]], versions=versions)

    async def ping(self) -> None:
        """Never heard from."""
        await asyncio.Event().wait()


class ListingEngine(ScriptedEngine):
    """Scores are the steps of the versions it has loaded."""

    def __init__(self, versions: Mapping[str, PolicyVersion]) -> None:
        super().__init__([[3]], versions=versions)

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        """The steps, after a 0."""
        steps = sorted(weights.version.step for weights in self._loaded_weights)
        return TokenScores.after_first(np.array(steps, np.float32))


class FileEngine(ListingEngine):
    """Refuses a version whose file is missing; reads no other file."""

    async def load(self, weights: WeightsRef) -> None:
        """See `ScriptedEngine.load`."""
        if not await asyncio.to_thread(os.path.exists, weights.path):
            raise EngineError(f"weights {weights.version} refused: there is no {weights.path}")


class OnePlaceEngine(ScriptedEngine):
    """Loads a version when no other one is pinned."""

    def __init__(self, versions: Mapping[str, PolicyVersion]) -> None:
        super().__init__([[3]], versions=versions)

    async def load(self, weights: WeightsRef) -> None:
        """See `ScriptedEngine.load`."""
        while self._request.pinned - {weights}:
            await asyncio.sleep(0.01)


class FragileEngine(ScriptedEngine):
    """Dies of version 1, and of version 2 like vLLM when it can neither load a version nor go back."""

    def __init__(self, versions: Mapping[str, PolicyVersion]) -> None:
        super().__init__([[3]], versions=versions)

    async def load(self, weights: WeightsRef) -> None:
        """See `ScriptedEngine.load`."""
        if weights.version.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if weights.version.step == 2:
            raise EngineLostError("it serves no version now")


class MortalEngine(ScriptedEngine):
    """Dies of its third call, like an engine over a process that is dead: each call delivers what it has, and fails."""

    def __init__(self, versions: Mapping[str, PolicyVersion]) -> None:
        super().__init__([[3]], versions=versions)
        self.calls = asyncio.Barrier(3)

    def open(self, session_id: str, policy: str, **_: Any) -> EngineSession:
        """See `agentrl.core.ports.Engine.open`."""
        return _MortalSession(self, self.version_for(policy, None))


class _MortalSession:
    def __init__(self, engine: MortalEngine, version: PolicyVersion) -> None:
        self._engine = engine
        self._version = version

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        await self._engine.calls.wait()
        if on_delta is not None:
            on_delta(request.request_id, make_completion([7], logprobs=[-1.0], version=self._version))
        raise EngineLostError("dead")

    def close(self) -> None:
        pass
