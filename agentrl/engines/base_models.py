"""Combines one engine per base model into one engine: calls and versions go to the engine of their policy."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agentrl.core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Mapping, Sequence

    from agentrl.core.ports import Engine, EngineCapabilities, EngineSession, Sampler
    from agentrl.core.records import Float32Array, Int32Array, PolicyVersion, WeightsRef


SamplerT = TypeVar("SamplerT", bound="Sampler")


class SamplerPerBaseModel(Generic[SamplerT]):
    """See `agentrl.core.ports.Sampler`. Policies of different base models share nothing in an engine: neither weights,
    nor tokens, nor KV.

    Args:
        samplers: samplers by policy; policies of one base model have the same one.
        capabilities: combined capabilities.
    """

    def __init__(self, samplers: Mapping[str, SamplerT], capabilities: EngineCapabilities) -> None:
        self.capabilities = capabilities
        self.samplers: tuple[SamplerT, ...] = tuple(dict.fromkeys(samplers.values()))
        """Samplers, one per base model."""
        self._of = dict(samplers)

    def of_policy(self, policy: str) -> SamplerT:
        """Return the sampler of a policy.

        Raises:
            EngineError: the policy has no sampler.
        """
        sampler = self._of.get(policy)
        if sampler is None:
            raise EngineError(f"no policy {policy!r} in this run's engines; they serve: {', '.join(sorted(self._of))}")
        return sampler

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        return self.of_policy(policy).open(session_id, policy, pin=pin)

    def abort(self, request_id: str) -> None:
        for sampler in self.samplers:
            sampler.abort(request_id)


class EnginePerBaseModel(SamplerPerBaseModel["Engine"]):
    """See `agentrl.core.ports.Engine`.

    Args:
        engines: engines by policy; policies of one base model have the same one.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        super().__init__(engines, _together([engine.capabilities for engine in dict.fromkeys(engines.values())]))

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """See `agentrl.core.ports.Engine.serve`; calls every engine, so that each unpins the versions that are not
        named."""
        await self._all(
            [
                engine.serve(
                    [weights for weights in current if self.of_policy(weights.version.policy) is engine],
                    [weights for weights in pinned if self.of_policy(weights.version.policy) is engine],
                )
                for engine in self.samplers
            ]
        )

    async def ping(self) -> None:
        await self._all([engine.ping() for engine in self.samplers])

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        policy = version if isinstance(version, str) else version.policy
        return await self.of_policy(policy).score(version, token_ids, temperature)

    def busy_seconds(self) -> float:
        """See `agentrl.core.ports.Engine.busy_seconds`: the mean of the engines."""
        return sum(engine.busy_seconds() for engine in self.samplers) / len(self.samplers)

    async def close(self) -> None:
        await self._all([engine.close() for engine in self.samplers])

    @staticmethod
    async def _all(asked: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Wait for all engines, then raise the first error: a failure must not leave the other calls half done."""
        for result in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


def _together(engines: Sequence[EngineCapabilities]) -> EngineCapabilities:
    """Combine the capabilities of engines that serve different policies.

    Refreshes and the policies that keep versions are united, counts and rates added, `max_context` is the smallest; any
    other capability needs all engines to have it.
    """
    held = [each.kv_tokens for each in engines if each.kv_tokens is not None]
    return replace(
        engines[0],
        refresh=frozenset[Any]().union(*(each.refresh for each in engines)),
        expert_routing=all(each.expert_routing for each in engines),
        sampling_mask=all(each.sampling_mask for each in engines),
        adapters=sum(each.adapters for each in engines),
        max_context=min(each.max_context for each in engines),
        exact_continuation=all(each.exact_continuation for each in engines),
        kv_tokens=sum(held) if len(held) == len(engines) else None,
        prefill_rate=sum(each.prefill_rate for each in engines),
        keeps_version=frozenset[str]().union(*(each.keeps_version for each in engines)),
        shares_prefixes=all(each.shares_prefixes for each in engines),
    )
