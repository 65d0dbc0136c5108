"""Dispatch of episodes: builds specs from tasks, hands them to the worker, and receives their headers.

`Dispatcher` owns episode numbers, seeds, seat bindings, child episodes (it is the `EpisodeHost`) and evaluation
episodes. Training episodes go to the buffer; others never do. An `AdmissionPolicy`, the run's scheduler, decides which
versions an episode plays with and which policies learn. `ChildUnitReservations` counts the units that children of
running episodes will still contribute, and `ChangeCondition` wakes waiters when the state changes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from agentrl.core import ids
from agentrl.core.clock import SystemClock
from agentrl.core.errors import CheckFailedError, ConfigError, EnvironmentDefinitionError
from agentrl.core.ports import PolicyCounts, SpawnedGroup, Worker
from agentrl.core.records import (
    EpisodeHeader,
    EpisodeSpec,
    ForkPoint,
    GroupScores,
    GroupStart,
    PolicyVersion,
    Proposal,
    ProposalNovelty,
    Purpose,
    SeatBinding,
    Task,
    dropped_header,
)
from agentrl.core.text import plural, shorten_lines
from agentrl.environment.environment import Environment, child_environments
from agentrl.environment.mixture import root_environment_of_task, root_environments, seat_prefix
from agentrl.environment.registry import name_of, resolve
from agentrl.journal.port import JournalStore
from agentrl.observe.bottleneck import ActivityClock
from agentrl.observe.metrics import find_registered_metric, metrics_owner
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.group_scores import GroupScoring, RecordEnd
from agentrl.orchestrator.score_limits import ScoreLimits
from agentrl.orchestrator.tasks import MEMORY_SIZE, ProposalNoveltyTracker, VisibleRange
from agentrl.orchestrator.tree_leases import TreeLeases, unfinished_tree_members
from agentrl.rollout.episode_context import MAX_CHILD_DEPTH

PREFIX: Mapping[Purpose, str] = {"train": "e", "evaluate": "v", "replay": "p", "fork": "f"}
LATER: Mapping[Purpose, int] = {"train": 0, "fork": 1, "replay": 1, "evaluate": 2}
"""Steps added to the deadline of other purposes, relative to the running training episodes: they never delay those, and
training episodes admitted much later do not delay them."""
OnEnd = Callable[[EpisodeHeader], None]


PolicyOf = Callable[[str, int], str]
"""Maps a seat (`Env.seat` or its bare name) and the number of a root group to the policy that holds the seat."""


class ChangeCondition:
    """Wakes every waiter whose predicate has become true; predicates are checked again after every notification.

    Example:
        await changed.wait_for(lambda: buffer.ready("solver") >= 64)
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Announce a change; safe to call from any callback of the event loop."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return when `predicate()` is true; there is no await between its last check and the return."""
        while not predicate():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)


class AdmissionPolicy(Protocol):
    """The decisions a dispatcher leaves to the scheduler: versions an episode plays with, and policies that learn."""

    def pins(self, group: int) -> Mapping[str, PolicyVersion]:
        """Return the versions to which a root group and its children are pinned, independent of later updates."""
        ...

    def deadline(self, number: int) -> int:
        """Return the `EpisodeSpec.deadline` of a root training episode; it grows with the number, by one for each
        step.
        """
        ...

    def resumable(self, spec: EpisodeSpec) -> EpisodeSpec | None:
        """Return the spec with which an episode of a previous attempt can continue now; None if it must wait."""
        ...

    def seen(self) -> VisibleRange | None:
        """Return the proposals that an episode sees; None: all that were made. Constant within a run."""
        ...

    def learning(self) -> Collection[str]:
        """Return the policies that learn now: neither frozen nor over."""
        ...

    def is_over(self, policy: str) -> bool:
        """Whether a policy has taken its last step."""
        ...

    def record_end(self, spec: EpisodeSpec, header: EpisodeHeader, learning: Collection[str]) -> str | None:
        """Record the end of a training episode, with `learning()` now; returns why the run must end, if it must."""
        ...


class UnrestrictedAdmission:
    """The `AdmissionPolicy` of episodes outside training: they play the current versions."""

    def pins(self, group: int) -> Mapping[str, PolicyVersion]:
        """Return no pins."""
        return {}

    def deadline(self, number: int) -> int:
        """Return 0: all episodes have equal priority."""
        return 0

    def resumable(self, spec: EpisodeSpec) -> EpisodeSpec | None:
        """Return the spec unchanged."""
        return spec

    def seen(self) -> VisibleRange | None:
        """Return None: every proposal is visible."""
        return None

    def learning(self) -> Collection[str]:
        """Return no policies."""
        return ()

    def is_over(self, policy: str) -> bool:
        """Return False: nothing is trained."""
        return False

    def record_end(self, spec: EpisodeSpec, header: EpisodeHeader, learning: Collection[str]) -> str | None:
        """Return None: the end of an episode never ends the run."""
        return None


@dataclass(slots=True, kw_only=True, eq=False)
class Dispatcher:
    """Starts episodes and receives their headers."""

    environment: type[Environment]
    """Class of root episodes, or a mixture of classes."""
    policy_of: PolicyOf
    run_seed: int
    group_size: int
    max_in_flight: int
    """Maximum number of root episodes of an evaluation, or of forks, that run at once. For training, the scheduler
    decides."""
    buffer: EpisodeBuffer
    store: JournalStore
    changed: ChangeCondition
    next_number: int = 0
    """Number of the next root training episode."""
    next_evaluation: int = 0
    """Number of the next evaluation episode."""
    ended_children: dict[str, EpisodeHeader] = field(default_factory=dict)
    """Headers of children that ended in a previous attempt of the run, or of the episodes that forks were made from."""
    score_limits: ScoreLimits | None = None
    """What scorers may spend; None: no limit."""
    admission: AdmissionPolicy = field(default_factory=UnrestrictedAdmission)
    """Admission policy, set by `govern`."""
    group_scoring: GroupScoring | None = None
    """Holds the ended members of groups until the groups are scored; None: no scorer scores groups."""
    memory: ProposalNoveltyTracker = field(init=False)
    worker: Worker = field(init=False)
    """Worker, set once by the composition root: the worker's runner needs this host first."""
    fail: Callable[[CheckFailedError], None] = field(init=False)
    """Callback that ends the run; set with the worker."""
    tell: Callable[[str], None] = lambda line: None
    """Receives a line for the user."""
    is_paused: bool = False
    """Whether all episodes are parked, including new ones."""
    activity: ActivityClock = field(default_factory=lambda: ActivityClock(SystemClock()))
    """Counts the episodes in flight."""
    examples: dict[str, str] = field(default_factory=dict)
    """Newest training episode with a nonzero built-in metric, a stop reason or a drop reason, keyed by its name."""
    _environment_errors: int = 0
    """Number of episodes dropped as `environment_error`, held-out ones and children included."""
    _running: dict[str, EpisodeSpec] = field(default_factory=dict)
    _in_flight: Counter[Purpose] = field(default_factory=Counter)
    """Number of `_running` episodes of each purpose, children included."""
    _pins: Counter[PolicyVersion] = field(default_factory=Counter)
    """Number of training episodes in flight that are pinned to each version."""
    _to_resume: list[EpisodeSpec] = field(default_factory=list)
    """Episodes of a previous attempt that cannot continue yet."""
    _children: dict[str, dict[str, EpisodeHeader]] = field(default_factory=dict)
    """Headers of ended children, keyed by running parent: a re-executed parent requests them again."""
    _rejoined: dict[str, OnEnd] = field(default_factory=dict)
    """Callbacks of re-executed parents, keyed by a child in flight that was not started by that execution."""
    _resumed: set[str] = field(default_factory=set)
    """Resumed episodes and their children; the journal may hold their entries, admitted or not."""
    _sharers: dict[str, list[OnEnd]] = field(default_factory=dict)
    """Callbacks of forks that wait for a child of the episode they were forked from."""
    reservations: ChildUnitReservations = field(init=False)
    leases: TreeLeases | None = None
    """Leases of trees; None: the engine serves one version, as in checks of environments."""
    _evaluating: Sequence[asyncio.Future[EpisodeHeader]] = ()
    _evaluated: list[EpisodeHeader] = field(default_factory=list)
    """Ended child episodes of the newest evaluation."""
    _first_evaluated: int = 0
    """Number of the newest evaluation's first episode."""
    _evaluation_counts: dict[str, Mapping[str, PolicyCounts]] = field(default_factory=dict)
    """Counts of the newest evaluation's episodes, by episode id."""
    _root_end: OnEnd = field(init=False)
    """Bound method `_end_root`, made once."""
    _roots: dict[str, type[Environment]] = field(init=False)
    """Classes of root episodes, keyed by name."""

    def __post_init__(self) -> None:
        self._root_end = self._end_root
        self._roots = {name_of(root): root for root in root_environments(self.environment)}
        self.govern(self.admission)
        self.reservations = ChildUnitReservations(self.buffer.trainable, self.policy_of)

    def govern(self, admission: AdmissionPolicy) -> None:
        """Set the `AdmissionPolicy`; must be called before the first episode starts."""
        self.admission = admission
        self.memory = ProposalNoveltyTracker(MEMORY_SIZE, group_size=self.group_size, visible_range=admission.seen())

    @property
    def next_group(self) -> int:
        """Number of the next root group."""
        return self.next_number // self.group_size

    def pause(self) -> int:
        """Park all episodes, until `unpause`; returns their number."""
        self.is_paused = True
        return sum([self.worker.park(episode_id) for episode_id in self._running])

    def unpause(self) -> None:
        """Resume all parked episodes."""
        self.is_paused = False
        self.worker.unpark(len(self._running) + 1)

    def running(self) -> Iterable[str]:
        """Return the ids of the training episodes in flight, children and those that wait for scores included."""
        playing = (name for name, spec in self._running.items() if spec.purpose == "train")
        return playing if self.group_scoring is None else (*playing, *self.group_scoring.waiting())

    def pinned(self) -> Collection[PolicyVersion]:
        """Return the versions to which training episodes in flight are pinned, children and those that wait for scores
        included."""
        return self._pins.keys() if self.group_scoring is None else {*self._pins, *self.group_scoring.pins()}

    def admit_group(self, start: GroupStart, held_by: str = "") -> None:
        """Start a root group: `group_size` episodes from one start. `held_by` is `EpisodeSpec.held_by`."""
        first = self.next_number
        self.next_number += self.group_size
        specs = self._training_specs(start, range(first, self.next_number), held_by)
        self._start([(spec, None) for spec in specs])

    def restore(
        self,
        ended: Sequence[tuple[EpisodeSpec, EpisodeHeader]],
        unfinished: Sequence[EpisodeSpec],
        lost: Sequence[tuple[int, GroupStart]] = (),
        proposals: Sequence[Proposal] = (),
        metrics: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Take over the episodes that the previous attempt of the run left.

        Args:
            ended: committed members of open groups. A group is complete when its remaining members have ended: dropped
                members do not return.
            unfinished: episodes to continue.
            lost: numbers and starts of root episodes whose admission never reached the disk, although some of their
                entries may have.
            proposals: proposals that the previous attempt remembered.
            metrics: metrics of the ended episodes, by id. The journal does not divide them between policies, so that
                those of episodes with several are left out.
        """
        specs = [spec for number, start in lost for spec in self._training_specs(start, (number,))]
        self.store.admit(*specs)
        self.memory.restore(proposals)
        unfinished = [*unfinished, *specs]
        members = Counter(spec.group_id for spec in (*(spec for spec, _ in ended), *unfinished))
        for spec, _ in ended:
            self.buffer.admit(spec, members[spec.group_id])
        for spec in unfinished:
            self._record_start(spec, members[spec.group_id])
        for spec, header in ended:
            policies = {trajectory.policy for trajectory in header.trajectories}
            if len(policies) == 1 and header.episode_id in metrics:
                counts = PolicyCounts(header.turns, dict(metrics[header.episode_id]))
                self.buffer.hold_metrics(header.episode_id, dict.fromkeys(policies, counts), policies)
            self._hold(spec, header, self._record_in_buffer)
        self._restore_trees(unfinished, [spec for spec, _ in ended])
        self._resumed = {spec.episode_id for spec in unfinished}
        self._to_resume = unfinished
        self.resume_unfinished()

    def resume_unfinished(self) -> None:
        """Resume the episodes of a previous attempt that can continue now; called again after every step.

        Some must wait in deterministic mode only, until the weights they began with have been recomputed.
        """
        held, self._to_resume = self._to_resume, []
        for spec in held:
            resumable = self.admission.resumable(replace(spec, deadline=self._deadline(spec.purpose, spec.episode_id)))
            if resumable is None:
                self._to_resume.append(spec)
            else:
                self._set_running(resumable)
                self.worker.submit(resumable, partial(self._end, resumable, None), resume=True)
                if self.is_paused:
                    self.worker.park(resumable.episode_id)

    def spawn(
        self,
        parent: EpisodeSpec,
        environment: str,
        tasks: Sequence[Task],
        spawn_call: str,
        on_end: Callable[[int, EpisodeHeader], None],
        known: Sequence[str] = (),
    ) -> SpawnedGroup:
        """Start child episodes of a running one; children of an admitted parent are always admitted."""
        child = resolve(environment)
        group = self._group(parent.purpose, parent.episode_id)
        seats = {seat: SeatBinding(self.policy_of(f"{child.__name__}.{seat}", group)) for seat in child.seats}
        self.reservations.hand_over(parent.episode_id, child, len(tasks), spawn_call)
        group_id = ids.spawned_group_id(parent.episode_id, parent.attempt, spawn_call)
        episode_ids = []
        starting: list[tuple[EpisodeSpec, OnEnd]] = []
        for index, task in enumerate(tasks):
            episode_id = ids.child_episode_id(parent.episode_id, parent.attempt, spawn_call, index)
            shared = known[index] if index < len(known) else episode_id
            if shared != episode_id and self._share(parent, shared, partial(on_end, index)):
                episode_ids.append(shared)
                continue
            episode_ids.append(episode_id)
            if self._rejoin(parent.episode_id, episode_id, partial(on_end, index)):
                continue
            spec = parent.start_another(
                *(spawn_call, index),
                episode_id=episode_id,
                environment=environment,
                task=task,
                seats=seats,
                group_id=group_id,
                group_size=len(tasks),
                parent_id=parent.episode_id,
            ).pinned(parent.pins)
            starting.append((spec, partial(on_end, index)))
        self._start(starting)
        return SpawnedGroup(group_id=group_id, episode_ids=tuple(episode_ids))

    async def branch(
        self, main: EpisodeSpec, point: ForkPoint, count: int, versions: Mapping[str, PolicyVersion]
    ) -> Mapping[str, PolicyVersion]:
        """Start the branches of a running episode: further members of its group, which are always admitted."""
        pins: dict[str, PolicyVersion] = {}
        if self.leases is not None and self._is_current(main):  # nothing would end the lease of a superseded attempt
            trained = self.buffer.trainable.difference(main.pins)
            pins = {policy: version for policy, version in versions.items() if policy in trained}
            for version in pins.values():
                await self.leases.acquire(main, version)
        if not self._is_current(main):
            return pins  # the episode was dropped or restarted, perhaps while it waited
        running = self._running[main.episode_id]
        started = {**self.ended_children, **self._children.get(main.episode_id, {}), **self._running}
        specs = []
        for number in range(1, count + 1):
            episode_id = ids.branch_episode_id(main.episode_id, main.attempt, point.call_id, number)
            if episode_id not in started:
                spec = running.start_another(
                    *(point.call_id, number),
                    episode_id=episode_id,
                    parent_id=main.episode_id,
                    fork=replace(point, branch=number),
                )
                specs.append(spec.pinned({**main.pins, **pins}))
                if self.leases is not None:
                    self.leases.add(main.episode_id, main.attempt, episode_id)
        if not point.probe:
            self.reservations.hand_over_branches(main.episode_id, count, point.call_id)
        self._start([(spec, None) for spec in specs])
        return pins

    def _is_current(self, spec: EpisodeSpec) -> bool:
        """Whether an attempt is in flight: not ended, and not superseded by a further one."""
        running = self._running.get(spec.episode_id)
        return running is not None and running.attempt == spec.attempt

    def _restore_trees(self, unfinished: Sequence[EpisodeSpec], ended: Sequence[EpisodeSpec]) -> None:
        """Count the members of unfinished trees, whose versions are served again."""
        for main, member, version in unfinished_tree_members(unfinished, ended, self.buffer.trainable):
            if self.leases is not None:
                self.leases.add(*main, member, version)

    def _rejoin(self, parent_id: str, episode_id: str, on_end: OnEnd) -> bool:
        """Attach a re-executed parent to an existing child; returns whether it exists. `on_end` is called when it has
        ended."""
        ended = self._children.get(parent_id, {}).get(episode_id) or self.ended_children.get(episode_id)
        if ended is not None:
            asyncio.get_running_loop().call_soon(on_end, ended)
            return True
        if episode_id in self._running:
            self._rejoined[episode_id] = on_end
            return True
        return False

    def _share(self, fork: EpisodeSpec, episode_id: str, on_end: OnEnd) -> bool:
        """Attach a fork to a child of the forked episode; returns whether it has ended or still runs."""
        if episode_id not in self._running:
            return fork.fork is not None and self._rejoin(fork.fork.episode_id, episode_id, on_end)
        self._sharers.setdefault(episode_id, []).append(on_end)
        return True

    async def remember(self, spec: EpisodeSpec, call_id: str, key: str, structure: str) -> ProposalNovelty:
        """Compare a proposal with the remembered ones; record and remember it if its episode is for training."""
        made_by = (spec.episode_id, spec.attempt, call_id)
        proposal = Proposal(self.memory.next_number, *made_by, spec.environment, key, structure)
        known = self.memory.recall(proposal)
        if spec.purpose == "train" and self.memory.remember(proposal):
            self.store.record(proposal)
            self.buffer.counts.count_proposal(is_repeated=known.times > 0)
        return known

    def readmit(self, spec: EpisodeSpec) -> None:
        """Note that a further attempt of a running episode begins."""
        self.store.admit(spec)
        self._leave_tree(spec.episode_id, spec.attempt - 1)
        self.memory.forget(spec.episode_id)
        self._reserve(spec)
        self._set_running(spec)

    async def evaluate(self, tasks: Sequence[Task], pins: Mapping[str, PolicyVersion]) -> list[EpisodeHeader]:
        """Run each task once, outside buffer and ledger; `pins` fixes policies at versions. Children come last.

        Returns when the last child has ended, whether or not its parent waited for it.
        Seeds and line-ups depend only on the place of a task, so evaluations of a run differ only by their weights.
        """
        first = self._first_evaluated = self.next_evaluation
        self.next_evaluation += len(tasks)
        self._evaluated = []
        self._evaluation_counts = {}
        specs = [
            replace(spec, seed=ids.stable_hash64(self.run_seed, f"evaluation {index}"))
            for index, task in enumerate(tasks)
            for spec in self._root_specs(GroupStart(task), "evaluate", (first + index,), f"v{first + index}", 1, pins)
        ]
        self._evaluating = [asyncio.get_running_loop().create_future() for _ in specs]
        roots = await self._play(specs, self._evaluating)
        await self.changed.wait_for(lambda: not self._in_flight["evaluate"])
        return [*roots, *self._evaluated]

    async def play_forks(
        self, specs: Sequence[EpisodeSpec], ended_children: Mapping[str, EpisodeHeader]
    ) -> list[EpisodeHeader]:
        """Run forks to their ends, outside buffer and ledger; they share their parents' ended children."""
        self.ended_children = {**self.ended_children, **ended_children}
        return await self._play(specs, [asyncio.get_running_loop().create_future() for _ in specs])

    async def end_running(self, reason: str) -> None:
        """Stop every episode in flight; training episodes are dropped with `reason`."""
        await self.worker.cancel()
        if self.group_scoring is not None:
            self.group_scoring.drop_held(reason, self._record_in_buffer)
        running, self._running = self._running, {}
        self._in_flight.clear()
        self._pins.clear()
        headers = []
        for spec in running.values():
            if spec.purpose != "train":
                continue
            header = dropped_header(spec, reason)
            self.reservations.cancel(spec.episode_id)
            self._record_in_buffer(spec, header)
            headers.append((spec, header))
        await asyncio.gather(*(self.store.commit_episode(spec, header, b"", {}) for spec, header in headers))

    def evaluated(self) -> tuple[int, int]:
        """Numbers of ended and of all episodes in the newest evaluation."""
        return sum(end.done() for end in self._evaluating), len(self._evaluating)

    def record_episode_metrics(
        self, spec: EpisodeSpec, header: EpisodeHeader, counted: Mapping[str, PolicyCounts]
    ) -> None:
        """Keep the metrics of a committed episode: of a training episode until its steps, of an evaluated one for its
        evaluation."""
        if self.score_limits is not None:
            self.score_limits.add(counted.values())
            self._check_score_limits(self.score_limits)
        if spec.purpose == "train":
            self.buffer.counts.count_committed(counted)
            self.buffer.hold_metrics(header.episode_id, counted, self.admission.learning())
            metrics = {name for counts in counted.values() for name, value in counts.metrics.items() if value}
            built_in = filter(find_registered_metric, metrics)
            self.examples |= dict.fromkeys([*built_in, header.stop_reason or ""], header.episode_id)
        elif spec.purpose == "evaluate":
            self._evaluation_counts[header.episode_id] = counted
            self.examples.setdefault(header.stop_reason or "", header.episode_id)

    def record_group_scores(self, policies: Collection[str], scores: GroupScores) -> None:
        """Count the scores of a group, whose members are agents of these policies."""
        for policy in policies:
            self.buffer.counts.count_group_scores(policy, scores)

    def record_group_request(self, scorer: str, requests: int, tokens: int) -> None:
        """Count what a scorer of groups has spent."""
        if self.score_limits is not None:
            self.score_limits.add_spent(scorer, requests, tokens)
            self._check_score_limits(self.score_limits)

    def _check_score_limits(self, limits: ScoreLimits) -> None:
        error = limits.exceeded()
        if error is not None:
            self.fail(error)

    def evaluation_metrics(self, policy: str, policies: Collection[str]) -> dict[str, Mapping[str, float]]:
        """Return the values of `ctx.metric` by episode id, of the newest evaluation's episodes whose metrics belong to
        `policy`, one of the evaluated `policies`."""
        return {
            episode: counted[policy].metrics
            for episode, counted in self._evaluation_counts.items()
            if policy == metrics_owner(policies, counted)
        }

    def _root_specs(
        self,
        start: GroupStart,
        purpose: Purpose,
        numbers: Iterable[int],
        group: str,
        size: int,
        pins: Mapping[str, PolicyVersion],
        held_by: str = "",
    ) -> Iterator[EpisodeSpec]:
        """Make the specs of one group's root episodes, which share equal parts."""
        pins = dict(pins)
        root = root_environment_of_task(self.environment, start.task)
        name, prefix = name_of(root), seat_prefix(self.environment, root)
        seats: dict[str, SeatBinding] = {}
        for number in numbers:
            episode_id = ids.episode_id(PREFIX[purpose], number)
            if not seats:
                at = self._group(purpose, episode_id)
                policies = {seat: self.policy_of(f"{prefix}{seat}", at) for seat in root.seats}
                seats = {seat: SeatBinding(policy, pins.get(policy)) for seat, policy in policies.items()}
            yield EpisodeSpec(
                episode_id=episode_id,
                environment=name,
                task=start.task,
                fork=start.point,
                seed=ids.stable_hash64(self.run_seed, episode_id),
                seats=seats,
                group_id=group,
                group_size=size,
                purpose=purpose,
                pins=pins,
                deadline=self._deadline(purpose, episode_id),
                held_by=held_by,
            )

    def _deadline(self, purpose: Purpose, episode_id: str) -> int:
        number = ids.root_episode_number(episode_id) if purpose == "train" else self.next_number
        return self.admission.deadline(number) + LATER[purpose]

    def _group(self, purpose: Purpose, episode_id: str) -> int:
        """Return the root group of an episode; outside training, each episode is its own group."""
        number = ids.root_episode_number(episode_id)
        if purpose == "train":
            return number // self.group_size
        return number - self._first_evaluated if purpose == "evaluate" else number

    def _training_specs(self, start: GroupStart, numbers: Sequence[int], held_by: str = "") -> Iterator[EpisodeSpec]:
        """Make the specs of one group's root training episodes."""
        group = numbers[0] // self.group_size
        name, pins = f"g{group * self.group_size}", self.admission.pins(group)
        return self._root_specs(start, "train", numbers, name, self.group_size, pins, held_by)

    def _start(self, starting: Sequence[tuple[EpisodeSpec, OnEnd | None]]) -> None:
        """Admit episodes, a whole group atomically, and run them: a resumed run must not take a part for the group."""
        self.store.admit(*(spec for spec, _ in starting))
        for spec, on_end in starting:
            self._record_start(spec)
            # The journal may hold entries of a resumed parent's child even if its admission was lost with the process.
            resume = spec.parent_id in self._resumed
            if resume:
                self._resumed.add(spec.episode_id)
            end = self._root_end if on_end is None else partial(self._end, spec, on_end)
            self.worker.submit(spec, end, resume=resume)
            if self.is_paused:
                self.worker.park(spec.episode_id)

    async def _play(
        self, specs: Sequence[EpisodeSpec], ends: Sequence[asyncio.Future[EpisodeHeader]]
    ) -> list[EpisodeHeader]:
        """Run root episodes that are not trained, `max_in_flight` at once; a header settles its future in `ends`."""
        waiting = zip(specs, ends, strict=True)

        async def play_one_after_another() -> None:
            for spec, end in waiting:
                self._start([(spec, partial(_settle, end))])
                await end

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.max_in_flight, len(specs))):
                tasks.create_task(play_one_after_another())
        return [end.result() for end in ends]

    def _end_root(self, header: EpisodeHeader) -> None:
        """Receive the header of a root episode."""
        spec = self._running.get(header.episode_id)
        if spec is None:
            self.buffer.counts.count_superseded()
        else:
            self._end(spec, None, header)

    def _end(self, spec: EpisodeSpec, on_end: OnEnd | None, header: EpisodeHeader) -> None:
        """Receive the header of an episode, and hand it to the buffer and its waiters."""
        running = self._running.get(spec.episode_id)
        if running is None or running.attempt != header.attempt:
            self.buffer.counts.count_superseded()
            return
        self._leave_tree(spec.episode_id, header.attempt, spec.fork)
        self._remove_running(spec.episode_id)
        self._resumed.discard(spec.episode_id)
        self._children.pop(spec.episode_id, None)
        self.reservations.cancel(spec.episode_id)
        if spec.parent_id in self._running:
            self._children.setdefault(spec.parent_id, {})[spec.episode_id] = header
        on_end = self._rejoined.pop(spec.episode_id, on_end)
        if header.drop_reason == "environment_error":
            self._report_environment_error()
        if spec.purpose == "train":
            if header.drop_reason is not None:
                self.examples[header.drop_reason] = header.episode_id
            if not header.committed:
                self.memory.forget(spec.episode_id)
            self._hold(spec, header, self._record_end)
        elif spec.purpose == "evaluate" and spec.parent_id is not None:
            self._evaluated.append(header)
        for waiting in ([on_end] if on_end is not None else []) + self._sharers.pop(spec.episode_id, []):
            waiting(header)
        self.changed.notify()

    def _report_environment_error(self) -> None:
        """Tell the user about the first dropped episode, the tenth, the hundredth, and so on."""
        self._environment_errors += 1
        if str(self._environment_errors).rstrip("0") == "1":
            self.tell(
                f"{plural(self._environment_errors, 'episode')} dropped as environment_error; `agentrl episode list "
                "--where 'drop_reason = environment_error'` lists all. Last failure: "
                + shorten_lines(self.worker.last_failure, 1500)
            )

    def _hold(self, spec: EpisodeSpec, header: EpisodeHeader, record: RecordEnd) -> None:
        """Record the end of a training episode, once its group is scored if a scorer scores groups."""
        if self.group_scoring is None:
            record(spec, header)
        else:
            self.group_scoring.hold(spec, header, record, running=self.buffer.running(spec.group_id))

    def _record_in_buffer(self, spec: EpisodeSpec, header: EpisodeHeader) -> None:
        """Hand an ended training episode to the buffer."""
        for drop in self.buffer.record_end(spec, header):
            self.store.record(drop)

    def _record_end(self, spec: EpisodeSpec, header: EpisodeHeader) -> None:
        """Hand an ended training episode to the buffer, and end the run if a policy starves."""
        self._record_in_buffer(spec, header)
        learning = self.admission.learning()
        self._drop_units_of_others(learning)
        self.buffer.counts.count_end(header, header.winner)
        why = self.admission.record_end(spec, header, learning)
        if why is not None:
            scoring = self.group_scoring
            failure = (scoring and scoring.last_failure) or self.worker.last_failure
            hint = f"Last failure: {failure}" if failure else f"See `agentrl episode show {header.episode_id}`"
            self.fail(CheckFailedError(f"{why}. {hint}"))

    def _leave_tree(self, episode_id: str, attempt: int, fork: ForkPoint | None = None) -> None:
        """Note that an attempt no longer needs the version of its tree."""
        if self.leases is not None:
            self.leases.member_ended(episode_id, attempt, episode_id)
            if fork is not None and fork.branch:
                self.leases.member_ended(fork.episode_id, fork.attempt, episode_id)

    def drop_frozen(self) -> None:
        """Drop the ready units of frozen policies, which would be far out of date when those policies learn again, and
        of policies that have taken their last step."""
        self._drop_units_of_others(self.admission.learning())

    def _drop_units_of_others(self, learning: Collection[str]) -> None:
        for policy in self.buffer.trainable.difference(learning) if learning else ():
            ready = self.buffer.pop_ready(policy, self.buffer.ready(policy))
            for drop in self.buffer.drop(ready, "run_ended" if self.admission.is_over(policy) else "frozen"):
                self.store.record(drop)

    def _record_start(self, spec: EpisodeSpec, members: int | None = None) -> None:
        """Count an episode in: in the buffer, in the reservations for its children, and as running."""
        if spec.purpose == "train":
            self.buffer.admit(spec, members)
        self._reserve(spec)
        self._set_running(spec)

    def _set_running(self, spec: EpisodeSpec) -> None:
        """Note that an episode is in flight with this spec, which replaces that of an earlier attempt."""
        self._remove_running(spec.episode_id)
        self._running[spec.episode_id] = spec
        self._in_flight[spec.purpose] += 1
        self.activity.change("episodes", 1)
        if spec.purpose == "train":
            self._pins.update(spec.pins.values())

    def _remove_running(self, episode_id: str) -> None:
        spec = self._running.pop(episode_id, None)
        if spec is None:
            return
        self._in_flight[spec.purpose] -= 1
        self.activity.change("episodes", -1)
        if spec.purpose != "train":
            return
        for pin in spec.pins.values():
            self._pins[pin] -= 1
            if not self._pins[pin]:
                del self._pins[pin]

    def _reserve(self, spec: EpisodeSpec) -> None:
        if spec.purpose != "train":
            return
        try:
            root = self._roots.get(spec.environment) if spec.parent_id is None else None
            environment = root or resolve(spec.environment)
            branching = () if spec.branched_from is not None else self.buffer.policies_of(spec)
            group = self._group(spec.purpose, spec.episode_id)
            self.reservations.reserve(spec.episode_id, environment, group, branching=branching)
        except (EnvironmentDefinitionError, ConfigError):
            # the code was edited since the child was spawned; its runner reports the error
            self.reservations.cancel(spec.episode_id)


def _settle(future: asyncio.Future[EpisodeHeader], header: EpisodeHeader) -> None:
    """Set a future's result unless it was cancelled."""
    if not future.done():
        future.set_result(header)


_NONE: Mapping[Any, int] = MappingProxyType({})


@dataclass(slots=True)
class _Parent:
    """The reservations of a running parent. Mappings are empty and shared for most episodes; they are replaced, never
    mutated."""

    environment: type[Environment]
    group: int
    left: Mapping[str, int]
    spawned: Mapping[type[Environment], int]
    calls: tuple[str, ...] = ()
    """Calls that started children or branches: a re-executed parent makes them again."""
    of_branch: Mapping[str, int] = field(default_factory=lambda: _NONE)
    """Units of one branch."""


class ChildUnitReservations:
    """Units that children of running episodes will still contribute, by policy, so that admission counts them in
    advance.

    Children are always admitted with their parent. If they were counted only then, a policy whose units all come from
    children could exceed its `max_staleness` by the number of running parents.

    An episode reserves the children declared in its environment's `fan_out` (the context refuses more) or, for
    undeclared children, the largest number that any episode of the environment has spawned here. A spawned child takes
    over its part of the reservation; the rest is returned when the parent ends.

    Args:
        trainable: policies whose units are trained.
        policy_of: see `PolicyOf`.
    """

    def __init__(self, trainable: Collection[str], policy_of: PolicyOf) -> None:
        self._trainable = frozenset(trainable)
        self._policy_of = policy_of
        self._parents: dict[str, _Parent] = {}
        self._childless: _Parent | None = None
        """Shared record of the newest episodes that are not known to start children."""
        self._most: dict[type[Environment], Counter[type[Environment]]] = {}
        self._sum: Counter[str] = Counter()

    def units(self, policy: str) -> int:
        """Return the units of the policy expected from children that have not started."""
        return self._sum[policy]

    def reserve(
        self, episode_id: str, environment: type[Environment], group: int, *, branching: Collection[str] = ()
    ) -> None:
        """Reserve the units of an episode's children, and of its branches if it has `branching` policies; replaces the
        reservation of an earlier attempt."""
        self.cancel(episode_id)
        branches = environment.branches if branching else 0
        if branches or self._children(environment):
            left = self._below(environment, group, ids.child_depth(episode_id))
            of_branch = Counter(branching) + left
            for policy, units in of_branch.items() if branches else ():
                left[policy] += branches * units
            self._parents[episode_id] = _Parent(environment, group, left, _NONE, of_branch=of_branch)
            self._sum.update(left)
            return
        shared = self._childless
        if shared is None or shared.environment is not environment or shared.group != group:
            shared = self._childless = _Parent(environment, group, _NONE, _NONE)
        self._parents[episode_id] = shared

    def hand_over(self, parent_id: str, environment: type[Environment], count: int, spawn_call: str) -> None:
        """Move units from a parent's reservation to its spawned children, which are counted themselves."""
        parent = self._parents.get(parent_id)
        if parent is None or spawn_call in parent.calls:
            return
        if not parent.calls:
            parent = self._parents[parent_id] = replace(parent)  # copy on write: siblings may share the parent's record
        parent.calls = (*parent.calls, spawn_call)
        parent.spawned = {**parent.spawned, environment: parent.spawned.get(environment, 0) + count}
        most = self._most.setdefault(parent.environment, Counter())
        most[environment] = max(most[environment], parent.spawned[environment])
        for policy, units in self._of_child(environment, parent.group, ids.child_depth(parent_id) + 1).items():
            left = parent.left.get(policy, 0)
            taken = min(units * count, left)
            if taken:
                parent.left = {**parent.left, policy: left - taken}
                self._sum[policy] -= taken

    def hand_over_branches(self, main_id: str, count: int, branch_call: str) -> None:
        """Move units from an episode's reservation to its branches, which are counted themselves."""
        main = self._parents.get(main_id)
        if main is None or branch_call in main.calls:
            return
        main.calls = (*main.calls, branch_call)
        for policy, units in main.of_branch.items():
            left = main.left.get(policy, 0)
            taken = min(units * count, left)
            main.left = {**main.left, policy: left - taken}
            self._sum[policy] -= taken

    def cancel(self, episode_id: str) -> None:
        """Cancel the rest of an episode's reservation after it has ended."""
        parent = self._parents.pop(episode_id, None)
        if parent is not None and parent.left:
            self._sum.subtract(parent.left)

    def _of_child(self, environment: type[Environment], group: int, depth: int) -> Counter[str]:
        """Count a unit for each policy that plays in a child, and the units of the child's own children."""
        held = {self._policy_of(f"{environment.__name__}.{seat}", group) for seat in environment.seats}
        return Counter(held & self._trainable) + self._below(environment, group, depth)

    def _below(self, environment: type[Environment], group: int, depth: int) -> Counter[str]:
        units: Counter[str] = Counter()
        if depth >= MAX_CHILD_DEPTH:
            return units
        for child, count in self._children(environment).items():
            for policy, of_one in self._of_child(child, group, depth + 1).items():
                units[policy] += count * of_one
        return units

    def _children(self, environment: type[Environment]) -> Mapping[type[Environment], int]:
        declared, most = child_environments(environment), self._most.get(environment)
        return Counter(declared) | most if most else declared
