"""Which published versions stay on disk: the newest few of each policy, and what an evaluation pins.

A version's files are needed while an engine may load them again, in a process that replaces a dead one; checkpoints
hold weights of their own, and the link `policies/NAME` points at the newest.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import defaultdict
from collections.abc import Collection

from agentrl.core.records import PolicyVersion, WeightsRef


class VersionRetention:
    """Deletes what falls out of the window.

    Args:
        keep: how many of the newest versions of each policy stay; 0 keeps all.
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._published: defaultdict[str, list[WeightsRef]] = defaultdict(list)

    async def published(self, weights: WeightsRef, pinned: Collection[PolicyVersion] = ()) -> None:
        """A version became current; those that are `pinned` stay for now."""
        versions = self._published[weights.version.policy]
        versions.append(weights)
        surplus = len(versions) - self._keep if self._keep else 0
        for old in [each for each in versions[: max(surplus, 0)] if each.version not in pinned]:
            versions.remove(old)
            await asyncio.to_thread(shutil.rmtree, old.path, ignore_errors=True)
