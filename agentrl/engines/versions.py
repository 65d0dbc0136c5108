"""The versions that an engine is to serve: the state that `Engine.serve` asks for, to which every engine reconciles."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import EngineError

if TYPE_CHECKING:
    from agentrl.core.records import PolicyVersion, WeightsRef


@dataclass(frozen=True, slots=True)
class WantedVersions:
    """The state that an engine's owner asked for last."""

    current: Mapping[str, WeightsRef] = field(default_factory=dict)
    """By policy; one that is absent stays at the version it began with."""
    pinned: frozenset[WeightsRef] = frozenset()

    def followed_by(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef]) -> WantedVersions:
        """The state after a further `Engine.serve`."""
        return WantedVersions(
            {**self.current, **{weights.version.policy: weights for weights in current}}, frozenset(pinned)
        )

    def without_pins_but(self, wanted: WantedVersions) -> WantedVersions:
        """The same versions without pins that are not `wanted` any more."""
        return WantedVersions(self.current, self.pinned & wanted.pinned)

    @property
    def all(self) -> frozenset[WeightsRef]:
        """Current and pinned ones."""
        return self.pinned | frozenset(self.current.values())

    def is_current(self, weights: WeightsRef) -> bool:
        """Whether these are to be their policy's current weights."""
        return self.current.get(weights.version.policy) == weights

    def has_pin(self, version: PolicyVersion) -> bool:
        """Whether sessions may be pinned to the version although it is not current."""
        return any(weights.version == version for weights in self.pinned)


def in_order(current: Iterable[WeightsRef], pinned: Iterable[WeightsRef]) -> list[WeightsRef]:
    """The order in which an engine loads versions: older before newer ones of their policy."""
    return sorted({*current, *pinned}, key=lambda weights: weights.version)


async def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run work to its end even if the caller is cancelled, who then hears of it when the work has ended."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # the caller is gone: nobody else hears of it
        raise


def refusal(weights: WeightsRef, reason: str) -> EngineError:
    """The error that says why a version is not served."""
    return EngineError(f"weights {weights.version} refused: {reason}. The version before it keeps serving")
