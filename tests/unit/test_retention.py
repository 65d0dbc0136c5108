"""Published versions stay while they are among the newest, or pinned."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.orchestrator.retention import VersionRetention


def publish(root: Path, step: int, policy: str = "solver") -> WeightsRef:
    path = root / policy / f"0.{step}"
    path.mkdir(parents=True)
    return WeightsRef(version=PolicyVersion(policy, 0, step), path=str(path), kind="full", sha256="")


def test_the_newest_and_the_pinned_versions_stay(tmp_path: Path) -> None:
    async def main() -> None:
        retention = VersionRetention(keep=2)
        pinned = {PolicyVersion("solver", 0, 1)}
        for step in range(6):
            await retention.published(publish(tmp_path, step), pinned if step < 5 else ())
            await retention.published(publish(tmp_path, step, "other"))
            left = sorted(path.name for path in (tmp_path / "solver").iterdir())
            assert left[-min(step + 1, 2) :] == [f"0.{kept}" for kept in range(max(step - 1, 0), step + 1)]
            assert ("0.1" in left) == (1 <= step < 5)
        assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["0.4", "0.5"]

    asyncio.run(main())
