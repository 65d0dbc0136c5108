"""Dispatch of episodes: hands their specs to the worker, and receives their headers.

Training episodes go to the buffer; others never do. An `AdmissionPolicy`, the run's scheduler, decides which versions
an episode plays with and which policies learn. `host.py` is what running episodes call. `ChangeCondition` wakes waiters
when the state changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentrl.core import ids
from agentrl.core.clock import SystemClock
from agentrl.core.errors import (
    RUN_ENDED,
    CheckFailedError,
    ConfigError,
    EnvironmentDefinitionError,
    JournalError,
)
from agentrl.core.holds import AdmissionWait
from agentrl.core.ports import PolicyCounts, Worker
from agentrl.core.records import (
    EpisodeHeader,
    EpisodeSpec,
    GroupScores,
    Lines,
    PolicyVersion,
    Proposal,
    Task,
    dropped_header,
)
from agentrl.core.text import plural, shorten_lines, strip_numbers
from agentrl.environment.environment import Environment
from agentrl.journal.entries import BeginEntry, JournalEntry, decode_entries
from agentrl.journal.past_run import PastRun, without_collections
from agentrl.journal.port import (
    Admission,
    ControlRecord,
    EpisodeEnd,
    JournalStore,
    Repinning,
    UnitDropped,
    VersionPublication,
)
from agentrl.observe.alarms import ADVICE_ON_DROPS, EXPECTED_DROPS, fill_commands
from agentrl.observe.bottleneck import ActivityClock
from agentrl.observe.metrics import find_registered_metric
from agentrl.orchestrator.admission import AdmissionPolicy, UnrestrictedAdmission
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.child_episodes import ChildEpisodes, OnEnd
from agentrl.orchestrator.child_reservations import ChildUnitReservations, PolicyOf
from agentrl.orchestrator.episode_specs import PREFIX, EpisodeNumbers, EpisodeSpecs
from agentrl.orchestrator.group_scores import GroupScoring
from agentrl.orchestrator.in_flight import EpisodesInFlight
from agentrl.orchestrator.tasks import MEMORY_SIZE, ProposalNoveltyTracker
from agentrl.orchestrator.tree_leases import TreeLeases


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


class EvaluatedEpisodes:
    """The episodes of the newest evaluation; for forks, only their ends."""

    def __init__(self) -> None:
        self.ends: Sequence[asyncio.Future[EpisodeHeader]] = ()
        """Headers of the root episodes."""
        self.number = 0
        """Number of evaluations that have begun."""
        self.children: list[EpisodeHeader] = []
        """Headers of ended child episodes."""

    def begin(self, count: int) -> Sequence[asyncio.Future[EpisodeHeader]]:
        """Forget the evaluation before; returns the futures of so many root episodes."""
        self.children = []
        self.number += 1
        loop = asyncio.get_running_loop()
        self.ends = [loop.create_future() for _ in range(count)]
        return self.ends

    def progress(self) -> tuple[int, int]:
        """Numbers of ended and of all root episodes."""
        return sum(end.done() for end in self.ends), len(self.ends)


@dataclass(slots=True, kw_only=True, eq=False)
class Dispatcher:
    """Starts episodes, once `run` has given it a worker, and receives their headers."""

    specs: EpisodeSpecs
    in_flight: EpisodesInFlight
    children: ChildEpisodes
    reservations: ChildUnitReservations
    memory: ProposalNoveltyTracker
    admission: AdmissionPolicy
    buffer: EpisodeBuffer
    store: JournalStore
    changed: ChangeCondition
    fail: Callable[[BaseException], None]
    """Callback that ends the run."""
    tell: Callable[[str], None] = lambda line: None
    """Receives a line for the user."""
    run_name: str = ""
    """The run in the commands of messages; see `run_argument`. Empty if no command can read its episodes."""
    group_scoring: GroupScoring | None = None
    """Holds the ended members of groups until the groups are scored; None: no scorer scores groups."""
    leases: TreeLeases | None = None
    """Leases of trees; None: the engine serves one version, as in checks of environments."""
    evaluated: EvaluatedEpisodes = field(default_factory=EvaluatedEpisodes)
    lines: Lines = field(default_factory=Lines)
    """The run's lineages."""
    examples: dict[str, str] = field(default_factory=dict)
    """Newest training episode with a nonzero built-in metric, a stop reason or a drop reason, keyed by its name."""
    is_paused: bool = False
    """Whether all episodes are parked, including new ones."""
    worker: Worker = field(init=False)
    past: PastRun | None = None
    """The run's past while the records of its earlier processes are applied."""
    begin_group: Callable[[int], None] = lambda group: None
    """Receives the number of each root group that an earlier process began."""
    begin_version: Callable[[PolicyVersion], None] = lambda version: None
    """Receives each version that an earlier process published."""
    repinned: Callable[[EpisodeSpec], EpisodeSpec | None] = lambda spec: None
    """Returns the spec of an episode of an earlier process with another opponent, if its own is gone; else None."""
    _unreported: set[tuple[str, int]] = field(default_factory=set)
    """Attempts whose ends were recorded, and whose worker has not told that they are on disk."""
    _drops: Counter[str] = field(default_factory=Counter)
    """Number of dropped episodes by reason, held-out ones and children included."""
    _shown_failures: set[str] = field(default_factory=set)
    """Failures that were shown, without their numbers."""
    _is_failing: bool = False
    """Whether the run ends because of its episodes."""
    _to_resume: list[EpisodeSpec] = field(default_factory=list)
    """Episodes of a previous attempt that cannot continue yet."""
    _resumed: set[str] = field(default_factory=set)
    """Resumed episodes and their children; the journal may hold their entries, admitted or not."""
    _root_end: OnEnd = field(init=False)
    """`_end` of a root episode, made once."""

    def __post_init__(self) -> None:
        self._root_end = partial(self._end, None)
        self.store.apply = self.apply

    def run(self, worker: Worker) -> None:
        """Start episodes with a worker, whose episodes call back through an `EpisodeHost` of this dispatcher."""
        self.worker = worker

    @property
    def next_group(self) -> int:
        """Number of the next root group."""
        return self.specs.numbers.next_group

    def pause(self) -> int:
        """Park all episodes, until `unpause`; returns their number."""
        self.is_paused = True
        return sum([self.worker.park(episode_id) for episode_id in self.in_flight])

    def unpause(self) -> None:
        """Resume all parked episodes."""
        self.is_paused = False
        self.worker.unpark(len(self.in_flight) + 1)

    def admit_group(self, task: Task, waited: tuple[AdmissionWait, ...] = ()) -> None:
        """Start a root group: `group_size` episodes of one task. `waited` is `EpisodeSpec.waited`."""
        self.start([(spec, None) for spec in self.specs.next_group(task, waited)])

    # --- the log ------------------------------------------------------------------------------------------------------

    def apply(self, record: ControlRecord) -> None:
        """Change the state of the loop by a record of the log: in this process when it is recorded, and in a resume for
        each record of earlier processes. Nothing else changes it."""
        try:
            match record:
                case Admission():
                    self._apply_admission(record.spec)
                case Repinning():
                    self.in_flight.add(record.spec)
                case EpisodeEnd():
                    self._apply_end(record)
                case GroupScores() if self.group_scoring is not None:
                    self.group_scoring.apply_scores(record)
                case UnitDropped() if self.group_scoring is not None:
                    self.group_scoring.apply_drop(record.episode_id, record.reason)
                case Proposal():
                    self.memory.remember(record)
                case VersionPublication():
                    self.lines.add(record.weights.version, record.parent, record.weights.sha256)
        except Exception as error:
            if self.past is not None or isinstance(record, Admission):
                raise
            # It is the run's, such as an estimator's, and not that of the episode that ends.
            self.fail(error)

    @without_collections()
    def resume(
        self,
        past: PastRun,
        task_of_group: Callable[[int], Task],
        *,
        recorded: Callable[[str, int], tuple[Sequence[JournalEntry], Any]] = lambda episode_id, attempt: ((), ()),
        refusal: Callable[[EpisodeSpec], str] = lambda spec: "",
        versions: Iterable[PolicyVersion] = (),
    ) -> None:
        """Apply the records of the previous processes of the run, and continue their episodes.

        Args:
            past: the run's past.
            task_of_group: returns the task of a root group whose admission never reached the disk.
            recorded: see `RunJournal.recorded`.
            refusal: returns why an episode whose task only the journal names cannot be played; empty if it can.
            versions: first versions of this process.
        """
        numbers = self.specs.numbers
        scoring = [*filter(None, [self.group_scoring])]
        self.past = self.buffer.past = past
        for part in scoring:
            part.past = past
        try:
            for record in past.records:
                if isinstance(record, VersionPublication):
                    self.begin_version(record.weights.version)
                elif isinstance(record, Admission) and (group := self.specs.group_begun_by(record.spec)) is not None:
                    self.begin_group(group)
                self.apply(record)
        except LookupError as error:
            raise JournalError(f"{past.log.path}: a record contradicts those before it ({error!r})") from error
        for version in versions:
            self.begin_version(version)
        self.past = self.buffer.past = None
        self._unreported.clear()  # the workers of earlier processes tell nothing any more
        for part in scoring:
            part.end_past()
        numbers.next_training, numbers.next_evaluation = past.next_training, past.log.next_number(PREFIX["evaluate"])
        self.store.record(*map(past.log.repinning, filter(None, map(self.repinned, self.in_flight.specs()))))
        # Tasks follow the results of ended groups, so these were counted first.
        lost, specs, tasks = past.lost_numbers(), list[EpisodeSpec](), dict[int, Task]()
        known_tasks = self._known_tasks(past, lost, recorded)
        for number in lost:
            group = number // past.group_size
            if group not in tasks:
                task = task_of_group(group)  # also of a known group, since a source that selects counts its calls
                known = known_tasks.get(group, task)
                is_refused = known is not task and any(map(refusal, self.specs.training(known, (number,))))
                tasks[group] = task if is_refused else known
            specs += self.specs.training(tasks[group], (number,))
        for spec in self.in_flight.specs():
            self._reserve(spec)
        self.store.admit(*specs)
        if self.leases is not None:
            self.leases.take_over()
        self._to_resume = self.in_flight.specs()
        self._resumed = {spec.episode_id for spec in self._to_resume}
        self.resume_unfinished()

    def _apply_admission(self, spec: EpisodeSpec) -> None:
        if spec.attempt and self.in_flight.get(spec.episode_id) is not None:
            if self.leases is not None:
                self.leases.attempt_ended(spec.episode_id, spec.attempt - 1)
            self.memory.forget(spec.episode_id)
        elif spec.purpose == "train":
            self.buffer.admit(spec)
        if self.leases is not None and spec.fork is not None and spec.fork.branch:
            self.leases.add(spec.fork.episode_id, spec.fork.attempt, spec.episode_id)
        if self.past is None:
            self._reserve(spec)
        self.in_flight.add(spec)

    def _apply_end(self, end: EpisodeEnd) -> None:
        """Apply the end of an attempt that runs, and not of a superseded one."""
        header = end.header
        spec = self.in_flight.get_attempt(header.episode_id, header.attempt)
        if spec is None:
            return
        if self.leases is not None:
            self.leases.attempt_ended(spec.episode_id, header.attempt, spec.fork)
        self.in_flight.remove(spec.episode_id)
        self.reservations.cancel(spec.episode_id)
        self.children.record_end(spec, header)
        self._unreported.add((spec.episode_id, header.attempt))
        self.examples.setdefault(header.stop_reason or "", header.episode_id)
        if spec.purpose == "train":
            self._count(spec, header, end.counted)
            if not header.committed:
                self.memory.forget(spec.episode_id)
            if self.group_scoring is None:
                self._record_end(spec, header)
            else:
                self.group_scoring.hold(spec, header, self._record_end, running=self.buffer.running(spec.group_id))
        elif spec.purpose == "evaluate" and spec.parent_id is not None:
            self.evaluated.children.append(header)

    def _count(self, spec: EpisodeSpec, header: EpisodeHeader, counted: Mapping[str, PolicyCounts]) -> None:
        """Count a training episode, and keep its metrics until its steps."""
        if header.drop_reason is not None:
            self.examples[header.drop_reason] = header.episode_id
            return
        self.buffer.counts.count_committed(counted)
        self.buffer.hold_metrics(header.episode_id, spec.environment, counted, self.admission.learning())
        metrics = {name for counts in counted.values() for name, value in counts.metrics.items() if value}
        built_in = filter(find_registered_metric, metrics)
        self.examples |= dict.fromkeys([*built_in, header.stop_reason or ""], header.episode_id)

    def _record_end(self, spec: EpisodeSpec, header: EpisodeHeader) -> None:
        """Hand an ended training episode to the buffer, and end the run if a policy starves."""
        for drop in self.buffer.record_end(spec, header):
            self.store.record(drop)
        if header.drop_reason == RUN_ENDED:
            return
        learning = self.admission.learning()
        self.buffer.counts.count_end(header, header.winner)
        why = self.admission.record_end(spec, header, learning)
        if self.past is not None:
            return
        self._drop_units_of_others(learning)
        if why is not None:
            scoring = self.group_scoring
            failure = (scoring and scoring.last_failure) or self.worker.last_failure
            hint = (
                f"; `agentrl episode show {self.run_name} {header.episode_id}` shows the last episode, and `agentrl "
                f"run ledger {self.run_name}` counts drops"
            )
            last_failure = f". Last failure: {failure}" if failure else ""
            self._is_failing = True
            self.fail(CheckFailedError(f"{why}{hint if self.run_name else ''}{last_failure}"))

    def _known_tasks(
        self,
        past: PastRun,
        lost: Sequence[int],
        recorded: Callable[[str, int], tuple[Sequence[JournalEntry], Any]],
    ) -> dict[int, Task]:
        """Return the tasks of root groups with lost admissions, as far as the journal has them: the source may have
        other tasks since, and a source that selects may choose another one now."""
        specs = (*past.unfinished, *past.ended)
        tasks = {
            ids.root_episode_number(spec.episode_id) // past.group_size: spec.task
            for spec in specs
            if spec.parent_id is None and spec.fork is None
        }
        for number in lost:  # worker processes do not wait for admissions, so entries may be on disk without them
            group = number // past.group_size
            if group in tasks:
                continue
            with contextlib.suppress(JournalError, TypeError):  # the episode's worker reports the damage
                entries, _ = recorded(ids.episode_id(PREFIX["train"], number), 0)
                begin = next(iter(decode_entries(entries[:1])), None)
                if isinstance(begin, BeginEntry):
                    task = Task(id=begin.task_id, data=begin.task)
                    if self.specs.plays(begin.environment, task):
                        tasks[group] = task
        return tasks

    def resume_unfinished(self) -> None:
        """Resume the episodes of a previous attempt that can continue now; called again after every step.

        Some must wait in deterministic mode only, until the weights they began with have been recomputed.
        """
        held, self._to_resume = self._to_resume, []
        for spec in held:
            deadline = self.specs.deadline(spec.purpose, spec.episode_id)
            resumable = self.admission.resumable(replace(spec, deadline=deadline))
            if resumable is None:
                self._to_resume.append(spec)
            else:
                self.in_flight.add(resumable)
                self.worker.submit(resumable, self._root_end, resume=True)
                if self.is_paused:
                    self.worker.park(resumable.episode_id)
        self.in_flight.unresumed = len(self._to_resume)

    async def evaluate(
        self, tasks: Sequence[Task], pins: Mapping[str, PolicyVersion], places: Sequence[int] | None = None
    ) -> list[EpisodeHeader]:
        """Run each task once, outside buffer and ledger; `pins` fixes policies at versions. Children come last.

        Returns when the last child has ended, whether or not its parent waited for it. `places` are the positions of
        the tasks in the evaluation; None: the tasks are the whole evaluation.
        """
        specs = self.specs.evaluation(tasks, pins, range(len(tasks)) if places is None else places)
        roots = await self._play(specs, self.evaluated.begin(len(specs)))
        await self.changed.wait_for(lambda: not self.in_flight.count("evaluate"))
        return [*roots, *self.evaluated.children]

    async def play_forks(
        self, specs: Sequence[EpisodeSpec], ended_children: Mapping[str, EpisodeHeader]
    ) -> list[EpisodeHeader]:
        """Run forks to their ends, outside buffer and ledger; they share their parents' ended children."""
        self.children.add_ended(ended_children)
        return await self._play(specs, self.evaluated.begin(len(specs)))

    async def end_running(self, reason: str) -> None:
        """Stop every episode in flight; training episodes are dropped with `reason`."""
        await self.worker.cancel()
        if self.group_scoring is not None:
            self.group_scoring.drop_held(reason)
        headers = [(spec, dropped_header(spec, reason)) for spec in self.in_flight.specs() if spec.purpose == "train"]
        await asyncio.gather(*(self.store.commit(EpisodeEnd(spec, header)) for spec, header in headers))
        self.in_flight.clear()

    def drop_frozen(self) -> None:
        """Drop the ready units of frozen policies, which would be far out of date when those policies learn again, and
        of policies that have taken their last step."""
        self._drop_units_of_others(self.admission.learning())

    def start(self, starting: Sequence[tuple[EpisodeSpec, OnEnd | None]]) -> None:
        """Admit episodes, a whole group atomically, and run them: a resumed run must not take a part for the group."""
        self.store.admit(*(spec for spec, _ in starting))
        for spec, on_end in starting:
            # The journal may hold entries of a resumed parent's child even if its admission was lost with the process.
            resume = spec.parent_id in self._resumed
            if resume:
                self._resumed.add(spec.episode_id)
            end = self._root_end if on_end is None else partial(self._end, on_end)
            self.worker.submit(spec, end, resume=resume)
            if self.is_paused:
                self.worker.park(spec.episode_id)

    async def _play(
        self, specs: Sequence[EpisodeSpec], ends: Sequence[asyncio.Future[EpisodeHeader]]
    ) -> list[EpisodeHeader]:
        """Run root episodes that are not trained, each once it gets a permit; a header settles its future in `ends`."""
        self.in_flight.waiting = len(specs)
        try:
            for spec, end in zip(specs, ends, strict=True):
                await self.changed.wait_for(self.admission.may_play)
                self.in_flight.waiting -= 1
                self.start([(spec, partial(_settle, end))])
        finally:
            self.in_flight.waiting = 0
        return [await end for end in ends]

    def _end(self, on_end: OnEnd | None, header: EpisodeHeader) -> None:
        """Hear that the end of an episode is on disk, and tell those who wait for it."""
        if (header.episode_id, header.attempt) not in self._unreported:
            return  # superseded, or told twice
        self._unreported.discard((header.episode_id, header.attempt))
        self._resumed.discard(header.episode_id)
        self._report_drop(header)
        for waiting in self.children.pop_waiting(header.episode_id, on_end):
            waiting(header)
        self.changed.notify()

    def _report_drop(self, header: EpisodeHeader) -> None:
        """Tell the user about the first episode dropped for a reason, the tenth, the hundredth, and so on."""
        reason = header.drop_reason
        if reason is None or reason in EXPECTED_DROPS or self._is_failing:
            return
        self._drops[reason] += 1
        if str(self._drops[reason]).rstrip("0") == "1":
            advice = fill_commands(ADVICE_ON_DROPS.get(reason, ""), self.run_name, header.episode_id)
            all_dropped = f"; `agentrl episode list {self.run_name} --where 'drop_reason = {reason}'` lists all"
            self.tell(
                f"{plural(self._drops[reason], 'episode')} dropped as {reason}"
                f"{f': {advice}' if advice and self.run_name else ''}{all_dropped if self.run_name else ''}. Last "
                f"failure: {self._failure_once(shorten_lines(self.worker.last_failure, 1500))}"
            )

    def _failure_once(self, failure: str) -> str:
        """Return the text of a failure; only its first line if the same output was shown for another episode."""
        first, newline, _ = failure.partition("\n")
        key = strip_numbers(failure)
        if newline and key in self._shown_failures:
            return f"{first} (same output as in an earlier message)"
        self._shown_failures.add(key)
        return failure

    def _drop_units_of_others(self, learning: Collection[str]) -> None:
        for policy in self.buffer.trainable.difference(learning) if learning else ():
            ready = self.buffer.pop_ready(policy, self.buffer.ready(policy))
            for drop in self.buffer.drop(ready, RUN_ENDED if self.admission.is_over(policy) else "frozen"):
                self.store.record(drop)

    def _reserve(self, spec: EpisodeSpec) -> None:
        if spec.purpose != "train":
            return
        try:
            environment = self.specs.environment_of(spec)
            branching = () if spec.branched_from is not None else self.buffer.policies_of(spec)
            group = self.specs.group_of(spec.purpose, spec.episode_id)
            self.reservations.reserve(spec.episode_id, environment, group, branching=branching)
        except (EnvironmentDefinitionError, ConfigError):
            # the code was edited since the child was spawned; its runner reports the error
            self.reservations.cancel(spec.episode_id)


def _settle(future: asyncio.Future[EpisodeHeader], header: EpisodeHeader) -> None:
    """Set a future's result unless it was cancelled."""
    if not future.done():
        future.set_result(header)


def make_dispatcher(  # noqa: PLR0913 (one keyword per choice)
    *,
    environment: type[Environment],
    policy_of: PolicyOf,
    run_seed: int,
    group_size: int,
    max_in_flight: int,
    buffer: EpisodeBuffer,
    store: JournalStore,
    changed: ChangeCondition,
    fail: Callable[[BaseException], None],
) -> Dispatcher:
    """Make a dispatcher without a scheduler: episodes play the current versions."""
    in_flight = EpisodesInFlight(ActivityClock(SystemClock()))
    admission = UnrestrictedAdmission(in_flight, max_in_flight)
    numbers = EpisodeNumbers(group_size=group_size)
    return Dispatcher(
        specs=EpisodeSpecs(
            environment=environment, policy_of=policy_of, run_seed=run_seed, numbers=numbers, admission=admission
        ),
        in_flight=in_flight,
        children=ChildEpisodes(in_flight),
        reservations=ChildUnitReservations(buffer.trainable, policy_of),
        memory=ProposalNoveltyTracker(MEMORY_SIZE, group_size=group_size),
        admission=admission,
        buffer=buffer,
        store=store,
        changed=changed,
        fail=fail,
    )
