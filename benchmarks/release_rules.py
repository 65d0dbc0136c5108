"""What others do, as small changes of production's parts: each takes an orchestrator that has not begun, and alters it.

`benchmarks.scheduling` compares with them; agentrl offers none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from agentrl.core import ids
from agentrl.core.holds import Hold
from agentrl.core.records import EpisodeHeader, EpisodeSpec, TrajectoryCredit
from agentrl.credit.release import Credits, GroupReleasePolicy, OpenGroup
from agentrl.journal.port import UnitDropped
from agentrl.orchestrator.buffer import ReadyUnit
from agentrl.orchestrator.loop import Orchestrator
from tests.simulation.engine import EmulatedEngine
from tests.simulation.run import request_episode_id

POLICY = "solver"
PROPOSALS = 4
"""Of a task: episodes of a root group."""
WANTED = 8
"""Of the children that race."""


class WholeTasks:
    """What a task's root episodes and all their children bring is released together.

    Args:
        inner: decides the credits, group by group.
    """

    def __init__(self, inner: GroupReleasePolicy) -> None:
        self._inner = inner
        self.compares = inner.compares
        self._held: dict[int, list[tuple[Sequence[EpisodeHeader], Credits]]] = defaultdict(list)
        self._ended: Counter[int] = Counter()

    def record_admission(self, spec: EpisodeSpec, group: OpenGroup) -> None:
        """As it is."""
        self._inner.record_admission(spec, group)

    def record_end(self, spec: EpisodeSpec, group: OpenGroup) -> tuple[Sequence[EpisodeHeader], Credits]:
        """Nobody, or everybody of the task: parents end after their children."""
        task = ids.root_episode_number(spec.episode_id) // PROPOSALS
        self._held[task].append(self._inner.record_end(spec, group))
        self._ended[task] += spec.parent_id is None
        if self._ended[task] < PROPOSALS:
            return (), {}
        members: list[EpisodeHeader] = []
        credits: dict[tuple[str, str, int], TrajectoryCredit] = {}
        for released, of_them in self._held.pop(task):
            members += released
            credits |= of_them
        return members, credits


def by_whole_tasks(orchestrator: Orchestrator) -> None:
    """The field's rule: a task's episodes are trained when all of them have ended, in the order in which tasks do."""
    orchestrator.buffer.release = WholeTasks(orchestrator.buffer.release)


def without_stale(bound: int) -> Callable[[Orchestrator], None]:
    """The same, and what is more than `bound` steps old when a step could take it is dropped (PRIME-RL)."""

    def alter(orchestrator: Orchestrator) -> None:
        board = orchestrator.board

        def is_stale(ready: ReadyUnit) -> bool:
            return any(board.step(POLICY) - own.oldest_step > bound for own in ready.trajectories)

        by_whole_tasks(orchestrator)
        _drop_before_steps(orchestrator, is_stale, "stale")

    return alter


class FirstOfMore:
    """Of the children of a group the first `WANTED` are trained when those have ended; the others are cut and dropped.

    Args:
        inner: decides the credits.
        lose: told who is cut.
    """

    def __init__(self, inner: GroupReleasePolicy, lose: Callable[[set[str]], None]) -> None:
        self._inner = inner
        self._lose = lose
        self.compares = inner.compares
        self._running: dict[str, set[str]] = defaultdict(set)
        self._first: dict[str, list[EpisodeHeader]] = defaultdict(list)

    def record_admission(self, spec: EpisodeSpec, group: OpenGroup) -> None:
        """Note who races."""
        self._inner.record_admission(spec, group)
        self._running[spec.group_id].add(spec.episode_id)

    def record_end(self, spec: EpisodeSpec, group: OpenGroup) -> tuple[Sequence[EpisodeHeader], Credits]:
        """The winners together; a loser alone, to be dropped."""
        if spec.parent_id is None:
            return self._inner.record_end(spec, group)
        header = group.headers[-1]
        self._running[spec.group_id].discard(spec.episode_id)
        first = self._first[spec.group_id]
        if len(first) >= WANTED:
            return self._inner.record_end(spec, OpenGroup(0, headers=[header]))
        first.append(header)
        if len(first) < WANTED:
            return (), {}
        self._lose(self._running.pop(spec.group_id))
        return self._inner.record_end(spec, OpenGroup(0, headers=list(first)))


def race(orchestrator: Orchestrator) -> None:
    """Ten children are begun for eight that are wanted (APRIL, ROLL): who is slow is neither waited for nor trained."""
    losers: set[str] = set()
    engine = orchestrator.versions.engine
    assert isinstance(engine, EmulatedEngine)

    def lose(names: set[str]) -> None:
        losers.update(names)
        engine.cut(lambda request: request_episode_id(request) in names)

    orchestrator.buffer.release = FirstOfMore(orchestrator.buffer.release, lose)
    _drop_before_steps(orchestrator, lambda ready: ready.unit.episode_id in losers, "lost the race")


def one_step_off(orchestrator: Orchestrator) -> None:
    """Batches: while one is trained the next is sampled, whole, and neither goes on before the other is done."""
    scheduler, dispatcher, buffer = orchestrator.scheduler, orchestrator.dispatcher, orchestrator.buffer
    size = orchestrator.plan.step_size[POLICY]
    groups = size // scheduler.next_demand.units[POLICY]
    inner, began = scheduler.why_not, 0

    def why_not() -> Hold | None:
        nonlocal began
        if dispatcher.next_group - began >= groups:
            if buffer.ledger.in_flight:
                return Hold("max_staleness", "for the batch that is sampled")
            if buffer.ready(POLICY) >= size and POLICY in scheduler.stepping:
                return Hold("max_staleness", "for the batch that is trained")
            began = dispatcher.next_group
        return inner()

    scheduler.why_not = why_not  # type: ignore[method-assign]


def _drop_before_steps(orchestrator: Orchestrator, unwanted: Callable[[ReadyUnit], bool], reason: str) -> None:
    """Whenever a step could be taken, what is not wanted leaves the buffer first."""
    scheduler, buffer = orchestrator.scheduler, orchestrator.buffer
    inner = scheduler.may_step

    def may_step(policy: str) -> bool:
        for drop in buffer.drop(buffer.pop_ready_where(policy, unwanted), reason):
            orchestrator.store.record(UnitDropped(drop.episode_id, drop.attempt, drop.policy, drop.reason))
        return inner(policy)

    scheduler.may_step = may_step  # type: ignore[method-assign]
