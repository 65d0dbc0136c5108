"""A child episode in flight: its parent waits for its result, which the journal holds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.core.records import EpisodeHeader, PolicyVersion
from agentrl.environment.context import ChildEpisode, ChildResult
from agentrl.journal.entries import ChildResultEntry, request_hash

if TYPE_CHECKING:
    from agentrl.rollout.calls.journal import JournaledCall
    from agentrl.rollout.episode import LiveEpisode

T = TypeVar("T")


class LiveChildEpisode(ChildEpisode):
    """A child episode in flight."""

    __slots__ = ("_measured_against", "_parent", "_result", "episode_id")

    def __init__(self, parent: LiveEpisode, measured_against: dict[str, PolicyVersion]) -> None:
        """`measured_against` is the parent's dict; the child adds the versions behind the rewards that the parent
        gets.
        """
        self._parent = parent
        self._measured_against = measured_against
        self._result: asyncio.Future[ChildResult] = asyncio.get_running_loop().create_future()
        self.episode_id = ""

    def end(self, header: EpisodeHeader) -> None:
        """Receive the end of the child from the host."""
        rewards: dict[str, float] = {}
        versions: dict[str, PolicyVersion] = {}
        for trajectory in header.trajectories:
            if trajectory.reward is not None:
                rewards[trajectory.seat] = rewards.get(trajectory.seat, 0.0) + trajectory.reward
            version = trajectory.oldest_version
            versions[trajectory.policy] = min(versions.get(trajectory.policy, version), version)
        if not self._result.done():
            self._result.set_result(
                ChildResult(
                    episode_id=header.episode_id, drop_reason=header.drop_reason, rewards=rewards, versions=versions
                )
            )

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> ChildResult:
        parent = self._parent
        entry = await parent.journal.call(
            request_hash(self.episode_id.encode()),
            lambda: f"the wait for {self.episode_id}",
            ChildResultEntry,
            self._wait_for_end,
            memoised="the wait for a child",
            limit=parent.limit,  # it pauses, because the child has its own
        )
        versions = {policy: PolicyVersion(policy, *at) for policy, at in entry.versions.items()}
        for policy, version in versions.items():
            self._measured_against[policy] = min(self._measured_against.get(policy, version), version)
        return ChildResult(
            episode_id=entry.child, drop_reason=entry.drop_reason, rewards=entry.rewards, versions=versions
        )

    async def _wait_for_end(self, call: JournaledCall) -> ChildResultEntry:
        with self._parent.waiting_for("children"):
            result = await asyncio.shield(self._result)
        at = {policy: (version.lineage, version.step) for policy, version in result.versions.items()}
        return ChildResultEntry(result.episode_id, result.drop_reason, dict(result.rewards), at)
