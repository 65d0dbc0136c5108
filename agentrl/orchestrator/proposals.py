"""What the run remembers of its proposals: which were made before, and how alike the newest are.

Owns: the newest proposals, and what an episode may see of them. They are a fold of the control log, where each is
recorded before its episode can be committed. An unfinished episode tells its own again when it is resumed.
Invariants: a proposal counts once, by the call that made it, and never for itself. It counts for nobody once its
episode was dropped or begins anew: nobody learns from it. And it does not count for the other episodes of its root
group, which are compared: a repeat would be the slower one's fault, and its penalty a part of the others' baselines.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from agentrl.core import ids
from agentrl.core.proposals import Proposal, Recollection

MEMORY_SIZE = 2000
"""Proposals a run remembers; the oldest go. An answer walks over all of them."""
NEWEST = 100
"""Proposals whose structures are compared."""

Seen = Callable[[str], tuple[int, int]]
"""From an episode to its wave, and the first wave whose proposals it does not see."""


class ProposalMemory:
    """The newest proposals of a run.

    What an episode sees is what was made before it asked. In a deterministic run that would depend on who is faster, so
    `seen` gives it the proposals of the waves that had ended when its own began, and no others.

    Args:
        size: how many are remembered; the oldest go.
        group_size: of root groups.
        seen: see `Seen`; None: all that there is.
    """

    def __init__(self, size: int, *, group_size: int, seen: Seen | None = None) -> None:
        self._size = size
        self._group_size = group_size
        self._seen = seen
        self._made: list[tuple[tuple[int, ...], Proposal]] = []
        self._known: set[tuple[str, int, str]] = set()
        self.next_number = 0

    def restore(self, proposals: Iterable[Proposal]) -> None:
        """Take over what an earlier life remembered; what is told again by an unfinished episode is known for good."""
        unfinished = set()
        for proposal in proposals:
            self._add(proposal)
            unfinished.add(proposal.made_by)
        self._known |= unfinished

    def recall(self, proposal: Proposal) -> Recollection:
        """What is known of a proposal, itself and those of the episodes it is compared with left out."""
        times = same = newest = 0
        for _, other in self._visible_to(proposal.episode_id):
            if other.made_by == proposal.made_by or self._are_compared(other.episode_id, proposal.episode_id):
                continue
            if other.environment == proposal.environment:
                times += other.key == proposal.key
                if newest < NEWEST:
                    newest += 1
                    same += other.structure == proposal.structure
        return Recollection(times, same / newest if newest else 0.0)

    def remember(self, proposal: Proposal) -> bool:
        """Remember a proposal; False where it is already."""
        if proposal.made_by in self._known:
            return False
        self._add(proposal)
        return True

    def forget(self, episode_id: str) -> None:
        """What an episode proposed will not be trained: it was dropped, or begins anew."""
        lost = {proposal.made_by for _, proposal in self._made if proposal.episode_id == episode_id}
        if lost:
            self._made = [made for made in self._made if made[1].made_by not in lost]
            self._known -= lost

    def structure_entropy(self) -> float | None:
        """Entropy, in nats, of the structures of the newest proposals that have one; None before the second."""
        newest = Counter((p.environment, p.structure) for _, p in self._made[-NEWEST:] if p.structure)
        count = newest.total()
        return -sum(n / count * math.log(n / count) for n in newest.values()) if count > 1 else None

    def _add(self, proposal: Proposal) -> None:
        self.next_number = max(self.next_number, proposal.number + 1)
        self._known.add(proposal.made_by)
        bisect.insort(self._made, (self._place(proposal), proposal))
        self._forget()

    def _place(self, proposal: Proposal) -> tuple[int, ...]:
        if self._seen is None:
            return (proposal.number,)
        wave, _ = self._seen(proposal.episode_id)
        episode, call = ids.order_key(proposal.episode_id), ids.order_key(proposal.call_id)
        return (wave, *episode, -1, proposal.attempt, *call)

    def _are_compared(self, one: str, other: str) -> bool:
        """Whether two training episodes belong to one root group."""
        if one == other or one[0] != other[0]:
            return False
        return ids.root_number(one) // self._group_size == ids.root_number(other) // self._group_size

    def _visible_to(self, episode_id: str) -> Iterator[tuple[tuple[int, ...], Proposal]]:
        """The newest `size` that an episode may see, newest first."""
        end = len(self._made)
        if self._seen is not None:
            end = bisect.bisect_left(self._made, self._seen(episode_id)[1], key=lambda made: made[0][0])
        return reversed(self._made[max(end - self._size, 0) : end])

    def _forget(self) -> None:
        """Let the oldest go that no episode to come can see: those in flight are at most two waves' bounds apart."""
        surplus = len(self._made) - self._size
        if surplus > 0 and self._seen is not None:
            wave, unseen = self._seen(self._made[-1][1].episode_id)
            oldest_asker_sees = unseen - (wave - unseen)
            surplus = bisect.bisect_left(self._made, oldest_asker_sees, key=lambda made: made[0][0]) - self._size
        for _, proposal in self._made[: max(surplus, 0)]:
            self._known.discard(proposal.made_by)
        del self._made[: max(surplus, 0)]
