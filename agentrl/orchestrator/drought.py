"""Ends a run in which a policy gets nothing to train on, episode after episode, though admission is open.

Two ways lead there: the episodes that seat the policy fail, or never reward it; or no episode seats it at all, as where
a gate refuses whatever its children were to be started for. While somebody else learns from those episodes, the second
may pass, so it ends the run only where they are in vain for all who learn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from agentrl.core.records import EpisodeHeader
from agentrl.core.words import plural

FAILED_IN_A_ROW = 32
"""Episodes that seat a policy and give it nothing, before the run gives up; at least two groups."""
FAILED_GROUPS = 8
"""Groups of child episodes they must be of, where they are children: one bad proposal fails in all of its own."""
VAIN_IN_A_ROW = 256
"""Root episodes that give nothing to anybody who learns, children included, before the run gives up."""


class Drought:
    """Counts, for each policy, what has ended since it was given a unit.

    Args:
        group_size: of root groups.
    """

    def __init__(self, group_size: int) -> None:
        self._failures = max(FAILED_IN_A_ROW, 2 * group_size)
        self._failed: Counter[str] = Counter()
        self._failed_groups: defaultdict[str, set[str]] = defaultdict(set)
        self._waiting: Counter[str] = Counter()
        """Root episodes that ended since the policy was given a unit."""

    def ended(self, header: EpisodeHeader, seated: Collection[str], learning: Collection[str]) -> str | None:
        """Why the run is to end, if it is.

        Args:
            header: of a training episode.
            seated: policies with a seat of it whose units are trained.
            learning: policies that learn now.
        """
        given = {trajectory.policy for trajectory in header.trajectories if trajectory.reward is not None}
        for policy in given:
            self._failed[policy] = self._waiting[policy] = 0
            self._failed_groups.pop(policy, None)
        not_given = set(learning) - given
        in_vain = not_given.intersection(seated)
        for policy in in_vain:
            self._failed[policy] += 1
        if header.parent_id is None:
            for policy in not_given:
                self._waiting[policy] += 1
        for policy in sorted(in_vain):
            self._failed_groups[policy].add(header.parent_id or header.episode_id)
            of_enough_groups = header.parent_id is None or len(self._failed_groups[policy]) >= FAILED_GROUPS
            if self._failed[policy] >= self._failures and of_enough_groups:
                return self._failing(policy, header)
        if learning and min(self._waiting[policy] for policy in learning) >= VAIN_IN_A_ROW:
            return self._in_vain(learning, header)
        return None

    def _failing(self, policy: str, header: EpisodeHeader) -> str:
        acted = any(trajectory.policy == policy for trajectory in header.trajectories)
        why = header.drop_reason or f"its seat {'was given no reward' if acted else 'never acted'}"
        return (
            f"{plural(self._failed[policy], 'episode')} in a row gave {policy} nothing to train on, the last one, "
            f"{header.episode_id}, because of {why}"
        )

    def _in_vain(self, learning: Collection[str], header: EpisodeHeader) -> str:
        names = " and ".join(sorted(learning))
        return (
            f"the last {VAIN_IN_A_ROW} root episodes, with their children, gave {names} nothing to train on, and no "
            f"other policy learns: no episode seats {names}, or none rewards it. `agentrl episode show` says what "
            f"became of {header.episode_id}. Where a gate refuses all that is proposed: a base model that makes "
            "valid proposals, a wider gate, a higher temperature, or a proposer that learns from its penalty"
        )
