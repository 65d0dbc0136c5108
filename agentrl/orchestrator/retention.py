"""Which published versions stay on disk: the newest few of each policy.

A version's files are needed while an engine may load them again; checkpoints hold weights of their own, and the link
`policies/NAME` points at the newest. A version that an evaluation pins is kept by the engine in memory.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from agentrl.core.files import LOCAL, Disk
from agentrl.core.records import PolicyVersion, WeightsRef

_NAME = re.compile(r"(\d+)\.(\d+)")


class VersionRetention:
    """Deletes what falls out of the window, whichever life of the run wrote it.

    Args:
        keep: how many of the newest versions of each policy stay; 0 keeps all.
        disk: where they lie.
    """

    def __init__(self, *, keep: int, disk: Disk = LOCAL) -> None:
        self._keep = keep
        self._disk = disk

    async def published(self, weights: WeightsRef, pinned: Collection[PolicyVersion] = ()) -> None:
        """A version became current; those that are `pinned` stay for now."""
        if self._keep:
            policy = weights.version.policy
            stay = {(version.lineage, version.step) for version in pinned if version.policy == policy}
            await self._disk.apart(lambda: self._prune(Path(weights.path).parent, stay))

    def _prune(self, directory: Path, stay: Collection[tuple[int, int]]) -> None:
        for lineage, step in versions_in(directory, disk=self._disk)[: -self._keep]:
            if (lineage, step) not in stay:
                self._disk.remove_tree(directory / f"{lineage}.{step}")


def versions_in(directory: Path, *, disk: Disk = LOCAL) -> list[tuple[int, int]]:
    """Lineage and step of each version of a policy that lies in its directory, oldest first."""
    matches = [_NAME.fullmatch(name) for name in disk.names(directory)]
    return sorted((int(match[1]), int(match[2])) for match in matches if match)
