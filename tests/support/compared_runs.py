"""Runs with held-out episodes of chosen rewards, for comparing them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    PolicyVersion,
    SeatBinding,
    Task,
    TrajectoryHeader,
)
from agentrl.journal.port import EpisodeEnd, MetricRow, VersionPublication
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import weights

Rewards = Mapping[str, float]
"""Held-out reward by task."""


def write_compared_run(
    directory: Path,
    rewards: Rewards,
    *,
    config: Mapping[str, Any] | None = None,
    curve: Sequence[float] = (),
    tokens: float = 100.0,
    evaluated: str = "",
) -> Path:
    """Write a run whose policy `solver` took as many steps as `curve` has rewards, and was then evaluated; with
    `evaluated`, the run of an evaluation of these weights."""
    info = {"name": directory.name, "config": dict(config or {}), **({"evaluated": evaluated} if evaluated else {})}
    asyncio.run(_write(directory, rewards, info, curve, tokens))
    return directory


async def _write(
    directory: Path, rewards: Rewards, info: dict[str, Any], curve: Sequence[float], tokens: float
) -> None:
    journal = SqliteJournal(directory / "journal", info=info)
    newest = len(curve)
    for step in range(newest + 1):
        before = PolicyVersion("solver", 0, step - 1) if step else None
        journal.record(VersionPublication(weights("solver", 0, step), before))
        if step:
            measured = {"reward/mean": curve[step - 1], "step/tokens": tokens, "run/seconds": 2.0 * step}
            journal.record(MetricRow("solver", step, measured))
    if rewards:
        mean = sum(rewards.values()) / len(rewards)
        journal.record(MetricRow("solver", newest, {"evaluation/reward": mean, "evaluation/reward_error": 0.05}))

    version = PolicyVersion("solver", 0, newest)
    plays = (play(journal, number, task, reward, version) for number, (task, reward) in enumerate(rewards.items()))
    await asyncio.gather(*plays)
    await journal.close()


async def play(
    journal: SqliteJournal, number: int, task: str, reward: float, version: PolicyVersion, *, seed: int | None = None
) -> None:
    """Commit a held-out episode of a version; its seed is `number` by default."""
    spec = EpisodeSpec(
        episode_id=f"e{number}",
        environment="calculator",
        task=Task(id=task, data={"question": task}),
        seed=number if seed is None else seed,
        seats={"solver": SeatBinding("solver", version)},
        group_id=f"g{number}",
        purpose="evaluate",
    )
    journal.admit(spec)
    header = EpisodeHeader(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        attempt=0,
        purpose="evaluate",
        parent_id=None,
        stop_reason="completed",
        drop_reason=None,
        turns=1,
        tokens=1,
        seconds=0.1,
        trajectories=(TrajectoryHeader("solver", 0, "solver", reward, 1, version.step, version.lineage),),
        location=EpisodeDataLocation("turns-w0.db", 0),
    )
    await journal.commit(EpisodeEnd(spec, header))
