"""Which published versions stay on disk: the newest few of each policy, and what an evaluation pins.

A version's files are needed while an engine may load them again; checkpoints hold weights of their own, and the link
`policies/NAME` points at the newest. A version that is pinned is kept by the engine in memory.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import defaultdict, deque

from agentrl.core.records import WeightsRef


class VersionRetention:
    """Deletes what falls out of the window.

    Args:
        keep: how many of the newest versions of each policy stay; 0 keeps all.
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._published: defaultdict[str, deque[WeightsRef]] = defaultdict(deque)

    async def published(self, weights: WeightsRef) -> None:
        """A version became current."""
        versions = self._published[weights.version.policy]
        versions.append(weights)
        while self._keep and len(versions) > self._keep:
            await asyncio.to_thread(shutil.rmtree, versions.popleft().path, ignore_errors=True)
