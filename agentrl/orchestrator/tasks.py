"""Tasks of a run: which task each root group gets, and which tasks were proposed before.

`Curriculum` draws from the environment's source. `ProposalMemory` remembers the tasks that episodes proposed for their
children.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from agentrl.core import ids
from agentrl.core.errors import AgentRLError, InputError
from agentrl.core.ids import stream
from agentrl.core.records import Proposal, Recollection, Task
from agentrl.environment.base import TaskSource, described

_SHUFFLE_LIMIT = 1_000_000
"""Sources longer than this are sampled with replacement instead of permuted."""


class Curriculum:
    """Endless tasks from a finite source: a seeded permutation per pass. A pure function of the group's number."""

    def __init__(self, source: TaskSource, *, seed: int) -> None:
        if len(source) == 0:
            raise InputError("the environment's task source is empty; check environment.options")
        self._source = source
        self._seed = seed
        self._pass = -1
        self._order: list[int] = []

    def task(self, number: int) -> Task:
        """The task of root group `number`."""
        try:
            return self._draw(number)
        except AgentRLError:
            raise
        except Exception as error:
            raise InputError(f"the task source raised {described(error)}") from error

    def _draw(self, number: int) -> Task:
        length = len(self._source)
        if length > _SHUFFLE_LIMIT:
            return self._source[stream(self._seed, "task", number).randrange(length)]
        number_of_pass, position = divmod(number, length)
        if number_of_pass != self._pass:
            self._pass = number_of_pass
            self._order = list(range(length))
            stream(self._seed, "tasks", number_of_pass).shuffle(self._order)
        return self._source[self._order[position]]


MEMORY_SIZE = 2000
"""Number of newest proposals a run remembers. Each comparison walks over all of them."""
NEWEST = 100
"""Number of newest proposals whose structures are compared."""

Seen = Callable[[str], tuple[int, int]]
"""Maps an episode id to its batch, and to the first batch whose proposals it does not see."""


class ProposalMemory:
    """The newest proposals of a run: detects repetitions and measures similarity.

    The memory is a fold of the control log, which records each proposal before its episode can be committed. An
    unfinished episode repeats its proposals when it is resumed.

    Invariants: a proposal counts once, by the call that made it, and never against itself. It is forgotten once its
    episode is dropped or starts again, since nobody learns from it. It does not count for the other episodes of its
    root group, which are compared with each other: a repetition would be the slower one's fault, and its penalty would
    enter the others' baselines.

    An episode sees the proposals made before it asked. In a deterministic run that would depend on speed, so `seen`
    limits it to the proposals of the batches that had ended when its own began.

    Args:
        size: number of remembered proposals; the oldest are forgotten first.
        group_size: size of root groups.
        seen: see `Seen`; None: all.
    """

    def __init__(self, size: int, *, group_size: int, seen: Seen | None = None) -> None:
        self._size = size
        self._group_size = group_size
        self._seen = seen
        self._made: list[tuple[tuple[int, ...], Proposal]] = []
        self._known: set[tuple[str, int, str]] = set()
        self.next_number = 0

    def restore(self, proposals: Iterable[Proposal]) -> None:
        """Take over the proposals of a previous attempt; resumed episodes that repeat theirs add nothing."""
        unfinished = set()
        for proposal in proposals:
            self._add(proposal)
            unfinished.add(proposal.made_by)
        self._known |= unfinished

    def recall(self, proposal: Proposal) -> Recollection:
        """Compare a proposal with the remembered ones, except itself and those of its own root group."""
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
        """Remember a proposal; returns False if it is known already."""
        if proposal.made_by in self._known:
            return False
        self._add(proposal)
        return True

    def forget(self, episode_id: str) -> None:
        """Forget the proposals of an episode that was dropped or starts again."""
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
        bisect.insort(self._made, (self._sort_key(proposal), proposal))
        self._forget()

    def _sort_key(self, proposal: Proposal) -> tuple[int, ...]:
        if self._seen is None:
            return (proposal.number,)
        batch, _ = self._seen(proposal.episode_id)
        episode, call = ids.order_key(proposal.episode_id), ids.order_key(proposal.call_id)
        return (batch, *episode, -1, proposal.attempt, *call)

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
        """Forget the oldest that no later episode can see: those in flight are at most two batches' bounds apart."""
        surplus = len(self._made) - self._size
        if surplus > 0 and self._seen is not None:
            batch, unseen = self._seen(self._made[-1][1].episode_id)
            oldest_asker_sees = unseen - (batch - unseen)
            surplus = bisect.bisect_left(self._made, oldest_asker_sees, key=lambda made: made[0][0]) - self._size
        for _, proposal in self._made[: max(surplus, 0)]:
            self._known.discard(proposal.made_by)
        del self._made[: max(surplus, 0)]
