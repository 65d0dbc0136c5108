"""Which published versions stay on disk: the newest few of each policy.

A version's files are needed while an engine may load them again; checkpoints hold weights of their own, and the link
`policies/NAME` points at the newest. A version that an evaluation pins is kept by the engine in memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.core.files import LOCAL, Disk
from agentrl.core.records import WeightsRef

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

    async def published(self, weights: WeightsRef) -> None:
        """A version became current."""
        if self._keep:
            await self._disk.apart(lambda: self._prune(Path(weights.path).parent))

    def _prune(self, directory: Path) -> None:
        for lineage, step in versions_in(directory, disk=self._disk)[: -self._keep]:
            self._disk.remove_tree(directory / f"{lineage}.{step}")


def versions_in(directory: Path, *, disk: Disk = LOCAL) -> list[tuple[int, int]]:
    """Lineage and step of each version of a policy that lies in its directory, oldest first."""
    matches = [_NAME.fullmatch(name) for name in disk.names(directory)]
    return sorted((int(match[1]), int(match[2])) for match in matches if match)
