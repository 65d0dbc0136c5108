"""The versions on which trees of episodes stay: an episode, and the branches that it started (`ctx.branch`).

A tree belongs to one attempt of its main episode. All its members sample with the version of the newest token before
the first branch, which stays served until the last member has ended.

Invariant: at most `limits` versions of a policy are leased at once, so that a further version always finds room in the
engine. A tree waits for a lease; an update never does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.core.errors import VERSION_GONE, EngineError, EpisodeError
from agentrl.core.records import EpisodeSpec, ForkPoint, PolicyVersion, WeightsRef
from agentrl.orchestrator.versions import ServedVersions


def tree_holder(main_id: str, attempt: int) -> str:
    """Return the name under which a tree holds versions in `ServedVersions`."""
    return f"tree of {main_id}.{attempt}"


class Changes(Protocol):
    """Wakes waiters; see `dispatch.ChangeCondition`."""

    def notify(self) -> None:
        """Announce a change."""
        ...

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return when the predicate is true."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class TreeLeases:
    """The leases of the running trees."""

    served: ServedVersions
    published: Callable[[PolicyVersion], WeightsRef | None]
    """Finds the weights of a version; None if it was never published."""
    limits: Mapping[str, int]
    """Maximum number of versions of each policy that are leased at once."""
    changed: Changes
    _mains: set[str] = field(default_factory=set)
    """Holders whose main episode asked for a lease, and runs."""
    _members: dict[str, set[str]] = field(default_factory=dict)
    """Ids of the running members of each tree, keyed by holder."""
    _versions: dict[str, set[PolicyVersion]] = field(default_factory=dict)
    """Versions that each tree leases or is about to lease, keyed by holder: they count against `limits`."""

    async def acquire(self, main: EpisodeSpec, version: PolicyVersion) -> None:
        """Lease a version for the tree of a main episode, once there is room for it; returns when the engine serves
        it. Idempotent: calls in the meantime wait for the same outcome.

        Raises:
            EpisodeError: the engine cannot serve the version any more; the main episode starts again.
        """
        holder = tree_holder(main.episode_id, main.attempt)
        self._mains.add(holder)
        await self.changed.wait_for(lambda: holder not in self._mains or self._has_room(version))
        if holder not in self._mains:
            return  # the episode was superseded while it waited
        self._versions.setdefault(holder, set()).add(version)
        try:
            weights = self.published(version)
            if weights is None:
                raise EngineError("it was never published")
            await self.served.pin(holder, weights)
        except EngineError as error:
            self._release(holder, version)
            raise EpisodeError(
                f"episode {main.episode_id} cannot branch: {version}, which sampled its newest turn, is no longer "
                f"served ({error})",
                reason=VERSION_GONE,
                begin_again=True,
            ) from error

    def add(self, main_id: str, attempt: int, branch: str) -> None:
        """Count a branch that starts, and its main episode."""
        self._members.setdefault(tree_holder(main_id, attempt), set()).update((main_id, branch))

    def take_over(self) -> None:
        """Take over the versions that a resume serves for unfinished trees."""
        for holder in self._members:
            if versions := set(self.served.pinned_by(holder)):
                self._versions[holder] = versions

    def member_ended(self, main_id: str, attempt: int, member: str) -> None:
        """Note the end of a member; the last one returns the lease."""
        holder = tree_holder(main_id, attempt)
        if member == main_id:
            self._mains.discard(holder)
        members = self._members.get(holder, set())
        members.discard(member)
        if not members:
            self._members.pop(holder, None)
            if holder in self._versions:
                self._release(holder, *self._versions[holder])
            self.changed.notify()

    def attempt_ended(self, episode_id: str, attempt: int, fork: ForkPoint | None = None) -> None:
        """Note that an attempt needs the version of its tree no more; for a branch, `fork` is the call it began at."""
        self.member_ended(episode_id, attempt, episode_id)
        if fork is not None and fork.branch:
            self.member_ended(fork.episode_id, fork.attempt, episode_id)

    @property
    def leased(self) -> Collection[PolicyVersion]:
        """The leased versions, which the engine serves."""
        return {version for holder in self._versions for version in self.served.pinned_by(holder)}

    def _has_room(self, version: PolicyVersion) -> bool:
        leased = {each for versions in self._versions.values() for each in versions}
        versions = {each for each in leased if each.policy == version.policy}
        return version in versions or len(versions) < self.limits.get(version.policy, 0)

    def _release(self, holder: str, *versions: PolicyVersion) -> None:
        self._versions[holder] = self._versions.get(holder, set()).difference(versions)
        if not self._versions[holder]:
            del self._versions[holder]
        self.served.unpin(holder, *versions)
        self.changed.notify()
