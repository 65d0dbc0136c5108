"""Which versions an engine is to serve: each policy's newest, and those that are kept.

Owns the table, and what an engine lacks of it. Does not know engines.
Invariant: what is lacking of one policy is told oldest first, since engines take the version they are given last for
the newest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from agentrl.core.records import PolicyVersion, WeightsRef


@dataclass(slots=True)
class Served:
    """Versions that are to be served, or are."""

    newest: dict[str, WeightsRef] = field(default_factory=dict)
    """By policy; without those that were never updated."""
    kept: Counter[WeightsRef] = field(default_factory=Counter)
    """How often each was kept and not released."""

    def take(self, weights: WeightsRef, *, keep: bool) -> None:
        """A version is its policy's newest from now on, and kept once more."""
        self.newest[weights.version.policy] = weights
        if keep:
            self.kept[weights] += 1

    def take_back(self, weights: WeightsRef, before: WeightsRef | None, *, keep: bool) -> None:
        """Undo a `take`; `before` was the newest."""
        policy = weights.version.policy
        if before is None:
            del self.newest[policy]
        else:
            self.newest[policy] = before
        if keep:
            self._release(weights)

    def release(self, version: PolicyVersion) -> bool:
        """Take one `keep` back; False: it was not kept."""
        weights = self._kept(version)
        if weights is None:
            return False
        self._release(weights)
        return True

    def _release(self, weights: WeightsRef) -> None:
        self.kept -= Counter([weights])  # which leaves out what is kept no more

    def is_kept(self, version: PolicyVersion) -> bool:
        """Whether the version stays although a newer one may be served."""
        return self._kept(version) is not None

    def _kept(self, version: PolicyVersion) -> WeightsRef | None:
        return next((weights for weights in self.kept if weights.version == version), None)

    def lacks(self, wanted: Served) -> dict[str, tuple[WeightsRef, bool]]:
        """By policy the next update that brings these versions nearer to those `wanted`: the weights, and whether they
        are kept; none where nothing is lacking."""
        updates = [(weights, True) for weights, times in wanted.kept.items() if self.kept[weights] < times]
        updates.sort(key=lambda update: update[0].version)
        updates += [(weights, False) for policy, weights in wanted.newest.items() if self.newest.get(policy) != weights]
        lacking: dict[str, tuple[WeightsRef, bool]] = {}
        for weights, keep in updates:
            lacking.setdefault(weights.version.policy, (weights, keep))
        return lacking


async def finished(update: Coroutine[Any, Any, None], *, forsaken: Callable[[], None] | None) -> None:
    """Wait for an update that is finished once it has begun: also where its caller is cancelled, who then does not hear
    that it succeeded; `forsaken`, if it is given, is called then."""
    task = asyncio.get_running_loop().create_task(update, name="engine update")

    def end(ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and ended.exception() is None and forsaken is not None:
            forsaken()

    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(end)
        raise
