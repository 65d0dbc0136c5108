"""A journal that keeps nothing but the entries of episodes in flight: a simulation of a week is not written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentrl.journal.port import Pruned

if TYPE_CHECKING:
    from agentrl.core.baselines import BaselineSet
    from agentrl.core.proposals import Proposal
    from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, WeightsRef
    from agentrl.journal.entries import JournalEntry
    from agentrl.journal.port import PruneRule, StepRow


class BriefTurnLog:
    """One worker's partition; see `TurnLog`."""

    name = "turns-0.db"

    def append(self, entry: JournalEntry) -> None:
        """Forget an entry."""

    async def flush(self) -> None:
        """Nothing is written."""

    def read(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Nothing was kept."""
        return []

    async def take_over(self, episode_id: str, attempt: int) -> None:
        """Nothing was kept."""

    def append_partial(self, entry: JournalEntry) -> None:
        """Forget it."""

    def remove_partials(self, episode_id: str, attempt: int, call_id: str | None = None) -> None:
        """Nothing was kept."""

    def read_partials(self, episode_id: str, attempt: int) -> list[JournalEntry]:
        """Nothing was kept."""
        return []

    def prefix(self, point: ForkPoint) -> list[JournalEntry]:
        """Nothing was kept."""
        return []


class BriefJournal:
    """See `JournalStore`; a commit yields once, as a disk would."""

    def __init__(self) -> None:
        self._log = BriefTurnLog()

    def turn_log(self, worker: str) -> BriefTurnLog:
        """The one partition."""
        return self._log

    def admit(self, *specs: EpisodeSpec) -> None:
        """Forget it, as all that follows."""

    async def commit_episode(
        self, spec: EpisodeSpec, header: EpisodeHeader, digest: bytes, metrics: Mapping[str, float], detail: str = ""
    ) -> None:
        """Yield."""
        await asyncio.sleep(0)

    def record_drop(self, episode_id: str, attempt: int, policy: str, reason: str) -> None:
        """A unit will not be trained."""

    def record_proposal(self, proposal: Proposal) -> None:
        """A proposal."""

    def record_baselines(self, baselines: BaselineSet) -> None:
        """What a group is compared with."""

    def record_version(self, weights: WeightsRef, parent: PolicyVersion | None) -> None:
        """A version."""

    def record_step(self, row: StepRow) -> None:
        """A step."""

    def record_metrics(self, policy: str, step: int, values: Mapping[str, Any]) -> None:
        """Metrics."""

    async def prune(self, rule: PruneRule, *, stopped: Callable[[], bool] = lambda: False) -> Pruned:
        """Nothing is kept."""
        return Pruned(rule=str(rule))

    async def flush(self) -> None:
        """Nothing is written."""

    async def close(self) -> None:
        """Nothing to release."""
