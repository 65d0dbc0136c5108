"""What the run remembers of its proposals: which were made before, and how alike the newest are.

Owns: the newest proposals, and what an episode may see of them. They are a fold of the control log, where each is
recorded before its episode can be committed. An unfinished episode tells its own again when it is resumed.
Invariant: a proposal counts once, by the call that made it, and never for itself, nor for an episode tried again.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from agentrl.core import ids
from agentrl.core.proposals import Proposal, Recollection

NEWEST = 100
"""Proposals whose structures are compared."""

Seen = Callable[[str], tuple[int, int]]
"""From an episode to its wave, and the first wave whose proposals it does not see."""


class ProposalMemory:
    """The newest proposals of a run.

    What an episode sees is what was made before it asked. In a deterministic run that would depend on who is faster, so
    `seen` gives it the proposals of the waves that had ended when its own began, and no others. Where groups are
    released in parts it does not see those of its own root group: no reward may depend on which sibling is faster.

    Args:
        size: how many are remembered; the oldest go.
        seen: see `Seen`; None: all that there is.
        apart: size of the root groups whose members do not see each other's proposals; 0: they do.
    """

    def __init__(self, size: int, *, seen: Seen | None = None, apart: int = 0) -> None:
        self._size = size
        self._apart = apart
        self.seen = seen
        """Must be set before anything is remembered."""
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
        """What is known of a proposal, itself and what came later left out."""
        _, episode, attempt, _, environment, key, structure = proposal
        times = same = newest = 0
        for _, other in self._visible_to(episode):
            if other.episode_id == episode and (other.attempt != attempt or other.made_by == proposal.made_by):
                continue
            if other.episode_id != episode and self._are_apart(other.episode_id, episode):
                continue
            if other.environment == environment:
                times += other.key == key
                if newest < NEWEST:
                    newest += 1
                    same += other.structure == structure
        return Recollection(times, same / newest if newest else 0.0)

    def remember(self, proposal: Proposal) -> bool:
        """Remember a proposal; False where it is already."""
        if proposal.made_by in self._known:
            return False
        self._add(proposal)
        return True

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

    def _are_apart(self, one: str, other: str) -> bool:
        return self._apart > 0 and ids.root_number(one) // self._apart == ids.root_number(other) // self._apart

    def _place(self, proposal: Proposal) -> tuple[int, ...]:
        if self.seen is None:
            return (proposal.number,)
        wave, _ = self.seen(proposal.episode_id)
        episode, call = ids.order_key(proposal.episode_id), ids.order_key(proposal.call_id)
        return (wave, *episode, -1, proposal.attempt, *call)

    def _visible_to(self, episode_id: str) -> Iterator[tuple[tuple[int, ...], Proposal]]:
        """The newest `size` that an episode may see, newest first."""
        end = len(self._made)
        if self.seen is not None:
            end = bisect.bisect_left(self._made, self.seen(episode_id)[1], key=lambda made: made[0][0])
        return reversed(self._made[max(end - self._size, 0) : end])

    def _forget(self) -> None:
        """Let the oldest go that no episode to come can see: those in flight are at most two waves' bounds apart."""
        surplus = len(self._made) - self._size
        if surplus > 0 and self.seen is not None:
            wave, unseen = self.seen(self._made[-1][1].episode_id)
            oldest_asker_sees = unseen - (wave - unseen)
            surplus = bisect.bisect_left(self._made, oldest_asker_sees, key=lambda made: made[0][0]) - self._size
        for _, proposal in self._made[: max(surplus, 0)]:
            self._known.discard(proposal.made_by)
        del self._made[: max(surplus, 0)]
