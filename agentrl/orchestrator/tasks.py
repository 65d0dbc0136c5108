"""Tasks of a run: chooses the task of each root group, and remembers proposed tasks.

`Curriculum` draws from the environment's source, `PassRateCurriculum` by the rewards of earlier groups,
`MixtureCurriculum` from the members of a mixture. `ProposalNoveltyTracker` remembers the tasks that episodes proposed
for their children.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.core import ids
from agentrl.core.errors import AgentRLError, InputError, describe_user_code_error
from agentrl.core.ids import random_stream
from agentrl.core.records import EpisodeHeader, Proposal, ProposalNovelty, Task
from agentrl.environment.environment import SelectingTaskSource, TaskSource
from agentrl.environment.mixture import MEMBER, MixedTasks, with_task_id_prefix


class GroupResult(NamedTuple):
    """The rewards of a root group that ended."""

    group: int
    task: Task
    rewards: tuple[float, ...]
    """Reward of each committed episode, summed over its agents; episodes without a reward are left out."""

    @staticmethod
    def of(group: int, task: Task, headers: Iterable[EpisodeHeader]) -> GroupResult:
        """Make the result of a group from the headers of its members."""
        return GroupResult(group, task, tuple(header.reward for header in headers if header.reward is not None))


class Curriculum:
    """Endless tasks from a finite source: a seeded permutation per pass, or the choices of a source with `select`.

    Without `select` a task is a pure function of the group's number. With `select`, it is a function of the number and
    of the results visible to the group: all recorded before or, in a deterministic run, those of the batches that had
    ended when its own began. The journal holds both the tasks of admitted groups and the results, so a resumed run
    selects as the uninterrupted run would have.

    Args:
        source: source of the tasks.
        seed: seed of the run.
        selection: arguments of `PassRateCurriculum`, which then selects; empty: the source selects, if it can.
        visible: `Scheduler.visible_groups`.
        is_current: whether a recorded task still has the same data; a selection by results uses no others.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        seed: int,
        selection: Mapping[str, Any] | None = None,
        visible: Callable[[int], int | None] = lambda group: None,
        is_current: Callable[[Task], bool] = lambda task: True,
    ) -> None:
        if len(source) == 0:
            raise InputError("the environment's task source is empty; check environment.options")
        self._seed = seed
        self._visible = visible
        self._shuffled_tasks = ShuffledTasks(source, seed)
        self.selector: SelectingTaskSource | None = None
        if isinstance(source, MixedTasks):
            self.selector = MixtureCurriculum(source, seed=seed, selection=selection or {})
        else:
            self.selector = _selector(source, self._shuffled_tasks, selection or {})
        self._is_current = is_current
        self.results: list[GroupResult] = []
        """Results that `select` has not received yet, in the order in which their groups ended."""

    def record_group(self, result: GroupResult) -> None:
        """Record the result of a root group."""
        if self.selector is not None and self._is_current(result.task):
            self.results.append(result)

    def receive(self, number: int) -> None:
        """Give the results visible to a root group to the source, before it selects the group's task."""
        if self.selector is not None:
            for result in self._take_visible(number):
                self.selector.record_result(result.task, result.rewards)

    def task(self, number: int) -> Task:
        """Return the task of a root group, its data checked again."""
        try:
            if self.selector is None:
                return with_task_id_prefix(self._shuffled_tasks(number))
            self.receive(number)
            selected_task = self.selector.select(number, random_stream(self._seed, "select", number))
            if not isinstance(selected_task, Task):
                raise InputError(f"the task source's select returned {type(selected_task).__name__}; it must be a Task")
            return with_task_id_prefix(selected_task)
        except AgentRLError:
            raise
        except Exception as error:
            raise InputError(f"the task source raised {describe_user_code_error(error)}") from error

    def _take_visible(self, number: int) -> list[GroupResult]:
        """Remove and return the results visible to a group, in the order in which the source receives them."""
        first = self._visible(number)
        if first is None:
            results, self.results = self.results, []
            return results
        results = sorted((result for result in self.results if result.group < first), key=lambda result: result.group)
        self.results = [result for result in self.results if result.group >= first]
        return results


class ShuffledTasks:
    """Endless tasks of a source: a seeded permutation per pass, so that a task is a pure function of its number.

    Args:
        source: source of the tasks.
        seed: seed of the run.
        name: distinguishes the permutations of a mixture's members.
    """

    def __init__(self, source: TaskSource, seed: int, *name: str) -> None:
        self._source = source
        self._key = (seed, *name)
        self._pass = -1
        self._order: list[int] = []

    def __call__(self, number: int) -> Task:
        """Return the task of a number."""
        length = len(self._source)
        # longer sources are sampled with replacement
        if length > 1_000_000:
            return self._source[random_stream(*self._key, "task", number).randrange(length)]
        number_of_pass, position = divmod(number, length)
        if number_of_pass != self._pass:
            self._pass = number_of_pass
            self._order = list(range(length))
            random_stream(*self._key, "tasks", number_of_pass).shuffle(self._order)
        return self._source[self._order[position]]

    def other(self, number: int, rng: random.Random) -> Task:
        """Return a random task of the pass to which a number belongs."""
        length = len(self._source)
        return self(number - number % length + rng.randrange(length))


def _selector(source: TaskSource, tasks: ShuffledTasks, selection: Mapping[str, Any]) -> SelectingTaskSource | None:
    """Return the selector of one environment's tasks; None if there is none."""
    if selection:
        return PassRateCurriculum(tasks, **selection)
    return source if isinstance(source, SelectingTaskSource) else None


class MixtureCurriculum:
    """Selects the tasks of a mixture: draws a member for each group by the rates, then one of its tasks.

    Each member has its own permutation, selection and count, as if it were trained alone with the groups it gets.

    Args:
        tasks: task sources of the members.
        seed: seed of the run.
        selection: arguments of each member's `PassRateCurriculum`.
    """

    def __init__(self, tasks: MixedTasks, *, seed: int, selection: Mapping[str, Any]) -> None:
        self._seed = seed
        self._names = [member.name for member in tasks.members]
        self._rates = [tasks.rates[name] for name in self._names]
        self._shuffled_tasks: dict[str, ShuffledTasks] = {}
        self._selectors: dict[str, SelectingTaskSource | None] = {}
        for member in tasks.members:
            if len(member) == 0:
                raise InputError(f"the task source of {member.name} is empty; check environment.options")
            shuffled_tasks = self._shuffled_tasks[member.name] = ShuffledTasks(member, seed, member.name)
            self._selectors[member.name] = _selector(member, shuffled_tasks, selection)
        self._draws: list[tuple[str, int]] = []
        """Member of each group, and the number of earlier groups with this member."""
        self._count: Counter[str] = Counter()

    def select(self, group: int, rng: random.Random) -> Task:
        """Return the task of a root group."""
        while len(self._draws) <= group:
            rng_of_group = random_stream(self._seed, "mixture", len(self._draws))
            name = rng_of_group.choices(self._names, self._rates)[0]
            self._draws.append((name, self._count[name]))
            self._count[name] += 1
        name, number = self._draws[group]
        selector = self._selectors[name]
        return self._shuffled_tasks[name](number) if selector is None else selector.select(number, rng)

    def record_result(self, task: Task, rewards: Sequence[float]) -> None:
        """Record the rewards of a group for its member."""
        selector = self._selectors[task.id.partition(MEMBER)[0]]
        if selector is not None:
            selector.record_result(task, rewards)


class PassRateCurriculum:
    """Selects tasks by the mean reward of their last group: repeats some within a band, and retires solved ones.

    A `replay` share of the groups gets a task with a last mean reward p within [`low`, `high`], in
    proportion to p (1 - p), the variance of a reward of 0 or 1 and the weight of its gradient (learnability, Foster et
    al. 2025, arXiv:2502.12272). The others get the tasks of the usual permutation; a task whose last `retire_after`
    groups were all above `high` is replaced by a random one. Rewards are assumed to be between 0 and 1.

    Args:
        tasks: the usual permutation.
        low: smallest mean reward of a replayed task.
        high: largest mean reward of a replayed task.
        replay: share of groups with a replayed task, once there is one.
        retire_after: number of groups above `high` after which a task is retired; 0: never.
    """

    def __init__(
        self,
        tasks: ShuffledTasks,
        low: float = 0.1,
        high: float = 0.9,
        replay: float = 0.5,
        retire_after: int = 2,
    ) -> None:
        self._shuffled_tasks = tasks
        self._low = low
        self._high = high
        self._replay = replay
        self._retire_after = retire_after
        self._in_band: dict[str, tuple[Task, float]] = {}
        self._solved_counts: Counter[str] = Counter()
        """Number of groups above `high` in a row, keyed by task."""

    def record_result(self, task: Task, rewards: Sequence[float]) -> None:
        """Record the rewards of a group."""
        if not rewards:
            return
        mean = math.fsum(rewards) / len(rewards)
        self._solved_counts[task.id] = self._solved_counts[task.id] + 1 if mean > self._high else 0
        self._in_band.pop(task.id, None)
        if self._low <= mean <= self._high and 0 < mean < 1:
            self._in_band[task.id] = task, mean * (1 - mean)

    def select(self, group: int, rng: random.Random) -> Task:
        """Return the task of a root group."""
        if self._in_band and rng.random() < self._replay:
            tasks = list(self._in_band.values())
            return rng.choices([task for task, _ in tasks], [weight for _, weight in tasks])[0]
        first = self._shuffled_tasks(group)
        if not self._is_retired(first):
            return first
        candidates = (self._shuffled_tasks.other(group, rng) for _ in range(64))
        return next((task for task in candidates if not self._is_retired(task)), first)

    def _is_retired(self, task: Task) -> bool:
        return bool(self._retire_after) and self._solved_counts[task.id] >= self._retire_after


MEMORY_SIZE = 2000
"""Number of newest proposals that a run remembers. Each comparison traverses all of them."""
NEWEST = 100
"""Number of newest proposals whose structures are compared."""

VisibleRange = Callable[[str], tuple[int, int]]
"""Maps an episode id to its batch, and to the first batch whose proposals the episode does not see."""


class ProposalNoveltyTracker:
    """The newest proposals of a run: detects repetitions and measures similarity.

    The memory is computed from the control log, which records each proposal before its episode can be committed. An
    unfinished episode repeats its proposals when it is resumed.

    Invariants: a proposal counts once, by the call that made it, and never against itself. It is forgotten when its
    episode is dropped or restarts, since no policy learns from it. It does not count for the other episodes of its root
    group, which are compared with each other: the slower episode would count as the repetition, and its penalty would
    enter the baselines of the others.

    An episode sees the proposals made before its own. In a deterministic run that would depend on speed, so `seen`
    limits it to the proposals of the batches that had ended when its own began.

    Args:
        size: number of remembered proposals; the oldest are forgotten first.
        group_size: size of root groups.
        visible_range: see `VisibleRange`; None: all.
    """

    def __init__(self, size: int, *, group_size: int, visible_range: VisibleRange | None = None) -> None:
        self._size = size
        self._group_size = group_size
        self._visible_range = visible_range
        self._proposals: list[tuple[tuple[int, ...], Proposal]] = []
        self._known_attempts: set[tuple[str, int, str]] = set()
        self.next_number = 0

    def recall(self, proposal: Proposal) -> ProposalNovelty:
        """Compare a proposal with the remembered ones, except itself and those of its own root group."""
        times = num_same = newest = 0
        for _, earlier in self._visible_to(proposal.episode_id):
            if earlier.made_by == proposal.made_by or self._are_compared(earlier.episode_id, proposal.episode_id):
                continue
            if earlier.environment == proposal.environment:
                times += earlier.key == proposal.key
                if newest < NEWEST:
                    newest += 1
                    num_same += earlier.structure == proposal.structure
        return ProposalNovelty(times, num_same / newest if newest else 0.0)

    def knows(self, proposal: Proposal) -> bool:
        """Whether a proposal was remembered before."""
        return proposal.made_by in self._known_attempts

    def remember(self, proposal: Proposal) -> None:
        """Remember a proposal."""
        self._add(proposal)

    def forget(self, episode_id: str) -> None:
        """Forget the proposals of an episode that was dropped or restarts."""
        lost_attempts = {proposal.made_by for _, proposal in self._proposals if proposal.episode_id == episode_id}
        if lost_attempts:
            self._proposals = [
                keyed_proposal for keyed_proposal in self._proposals if keyed_proposal[1].made_by not in lost_attempts
            ]
            self._known_attempts -= lost_attempts

    def structure_entropy(self) -> float | None:
        """Return the entropy, in nats, of the structures of the newest proposals that have one; None before the
        second.
        """
        newest = Counter((p.environment, p.structure) for _, p in self._proposals[-NEWEST:] if p.structure)
        count = newest.total()
        return -sum(n / count * math.log(n / count) for n in newest.values()) if count > 1 else None

    def _add(self, proposal: Proposal) -> None:
        self.next_number = max(self.next_number, proposal.number + 1)
        self._known_attempts.add(proposal.made_by)
        bisect.insort(self._proposals, (self._sort_key(proposal), proposal))
        self._forget()

    def _sort_key(self, proposal: Proposal) -> tuple[int, ...]:
        if self._visible_range is None:
            return (proposal.number,)
        batch, _ = self._visible_range(proposal.episode_id)
        episode, call = ids.episode_sort_key(proposal.episode_id), ids.episode_sort_key(proposal.call_id)
        return (batch, *episode, -1, proposal.attempt, *call)

    def _are_compared(self, first: str, second: str) -> bool:
        """Whether two training episodes belong to one root group."""
        if first == second or first[0] != second[0]:
            return False
        return ids.root_episode_number(first) // self._group_size == ids.root_episode_number(second) // self._group_size

    def _visible_to(self, episode_id: str) -> Iterator[tuple[tuple[int, ...], Proposal]]:
        """Yield the newest `size` proposals that an episode may see, newest first."""
        end = len(self._proposals)
        if self._visible_range is not None:
            end = bisect.bisect_left(self._proposals, self._visible_range(episode_id)[1], key=lambda keyed: keyed[0][0])
        return reversed(self._proposals[max(end - self._size, 0) : end])

    def _forget(self) -> None:
        """Forget the oldest proposals that no later episode can see: episodes in flight are at most two batches' bounds
        apart."""
        surplus = len(self._proposals) - self._size
        if surplus > 0 and self._visible_range is not None:
            batch, unseen = self._visible_range(self._proposals[-1][1].episode_id)
            oldest_asker_sees = unseen - (batch - unseen)
            surplus = bisect.bisect_left(self._proposals, oldest_asker_sees, key=lambda keyed: keyed[0][0]) - self._size
        for _, proposal in self._proposals[: max(surplus, 0)]:
            self._known_attempts.discard(proposal.made_by)
        del self._proposals[: max(surplus, 0)]
