"""Dispatch of episodes: hands their specs to the worker, and receives their headers.

Training episodes go to the buffer; others never do. An `AdmissionPolicy`, the run's scheduler, decides which versions
an episode plays with and which policies learn. `host.py` is what running episodes call. `ChangeCondition` wakes waiters
when the state changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentrl.core import ids
from agentrl.core.clock import SystemClock
from agentrl.core.errors import CheckFailedError, ConfigError, EnvironmentDefinitionError, JournalError
from agentrl.core.holds import AdmissionWait
from agentrl.core.ports import PolicyCounts, Worker
from agentrl.core.records import EpisodeHeader, EpisodeSpec, GroupStart, PolicyVersion, Task, dropped_header
from agentrl.core.text import plural, shorten_lines, strip_numbers
from agentrl.environment.environment import Environment
from agentrl.journal.entries import BeginEntry, JournalEntry, decode_entries
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import JournalStore
from agentrl.observe.alarms import ADVICE_ON_DROPS, EXPECTED_DROPS, fill_commands
from agentrl.observe.bottleneck import ActivityClock
from agentrl.observe.metrics import metrics_owner
from agentrl.orchestrator.admission import AdmissionPolicy, UnrestrictedAdmission
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.child_episodes import ChildEpisodes, OnEnd
from agentrl.orchestrator.child_reservations import ChildUnitReservations, PolicyOf
from agentrl.orchestrator.episode_specs import PREFIX, EpisodeNumbers, EpisodeSpecs
from agentrl.orchestrator.group_scores import GroupScoring, RecordEnd
from agentrl.orchestrator.in_flight import EpisodesInFlight
from agentrl.orchestrator.tasks import MEMORY_SIZE, ProposalNoveltyTracker
from agentrl.orchestrator.tree_leases import TreeLeases, unfinished_tree_members


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
        self.counts: dict[str, Mapping[str, PolicyCounts]] = {}
        """Counts of the episodes, by id."""
        self.environments: dict[str, str] = {}
        """Environments of the episodes, by id."""

    def begin(self, count: int) -> Sequence[asyncio.Future[EpisodeHeader]]:
        """Forget the evaluation before; returns the futures of so many root episodes."""
        self.children, self.counts, self.environments = [], {}, {}
        self.number += 1
        self.ends = _futures(count)
        return self.ends

    def progress(self) -> tuple[int, int]:
        """Numbers of ended and of all root episodes."""
        return sum(end.done() for end in self.ends), len(self.ends)

    def metrics(self, policy: str, policies: Collection[str]) -> dict[str, Mapping[str, float]]:
        """Return the values of `ctx.metric` by episode id, of the episodes whose metrics belong to `policy`, one of the
        evaluated `policies`."""
        return {
            episode: counted[policy].metrics
            for episode, counted in self.counts.items()
            if policy == metrics_owner(policies, counted)
        }


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
    examples: dict[str, str] = field(default_factory=dict)
    """Newest training episode with a nonzero built-in metric, a stop reason or a drop reason, keyed by its name."""
    is_paused: bool = False
    """Whether all episodes are parked, including new ones."""
    worker: Worker = field(init=False)
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
    """Bound method `_end_root`, made once."""

    def __post_init__(self) -> None:
        self._root_end = self._end_root

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

    def admit_group(self, start: GroupStart, waited: tuple[AdmissionWait, ...] = ()) -> None:
        """Start a root group: `group_size` episodes from one start. `waited` is `EpisodeSpec.waited`."""
        self.start([(spec, None) for spec in self.specs.next_group(start, waited)])

    def restore(
        self,
        past: PastRun,
        start_of_group: Callable[[int], GroupStart],
        *,
        recorded: Callable[[str, int], tuple[Sequence[JournalEntry], Any]] = lambda episode_id, attempt: ((), ()),
        refusal: Callable[[EpisodeSpec], str] = lambda spec: "",
    ) -> None:
        """Restore the dispatcher's parts, and take over the episodes that the previous attempts of the run left.

        Args:
            past: the run's past.
            start_of_group: returns the start of a root group whose admission never reached the disk.
            recorded: see `RunJournal.recorded`.
            refusal: returns why an episode whose task only the journal names cannot be played; empty if it can.
        """
        for part in (self.specs.numbers, self.children, self.memory, self.buffer, self.group_scoring):
            if part is not None:
                part.restore(past)
        ended, lost = past.ended, past.lost_numbers()
        metrics = past.log.episode_metrics([spec.episode_id for spec, _ in ended])
        members = Counter(spec.group_id for spec in (*(spec for spec, _ in ended), *past.unfinished))
        members.update(self.specs.group_id(number // past.group_size) for number in lost)
        for spec, _ in ended:
            self.buffer.admit(spec, members[spec.group_id])
        for spec in past.unfinished:
            self._record_start(spec, members[spec.group_id])
        for spec, header in ended:
            policies = {trajectory.policy for trajectory in header.trajectories}
            # The journal does not divide an episode's metrics between policies.
            if len(policies) == 1 and header.episode_id in metrics:
                counts = PolicyCounts(header.turns, dict(metrics[header.episode_id]))
                self.buffer.hold_metrics(header.episode_id, dict.fromkeys(policies, counts), policies)
            self._hold(spec, header, self._record_in_buffer)
        # Tasks follow the results of ended groups, so these were counted first.
        specs, starts = list[EpisodeSpec](), dict[int, GroupStart]()
        known_starts = self._known_starts(past, lost, recorded)
        for number in lost:
            group = number // past.group_size
            if group not in starts:
                start = start_of_group(group)  # also of a known group, since a source that selects counts its calls
                known = known_starts.get(group, start)
                is_refused = known is not start and any(map(refusal, self.specs.training(known, (number,))))
                starts[group] = start if is_refused else known
            specs += self.specs.training(starts[group], (number,))
        self.store.admit(*specs)
        for spec in specs:
            self._record_start(spec, members[spec.group_id])
        unfinished = [*past.unfinished, *specs]
        if self.leases is not None:  # the versions of unfinished trees are served again
            ended_specs = [spec for spec, _ in ended]
            for main, member, version in unfinished_tree_members(unfinished, ended_specs, self.buffer.trainable):
                self.leases.add(*main, member, version)
        self._resumed = {spec.episode_id for spec in unfinished}
        self._to_resume = unfinished
        self.resume_unfinished()

    def _known_starts(
        self,
        past: PastRun,
        lost: Sequence[int],
        recorded: Callable[[str, int], tuple[Sequence[JournalEntry], Any]],
    ) -> dict[int, GroupStart]:
        """Return how root groups with lost admissions started, as far as the journal knows: the source's tasks may have
        changed since, and a source that selects may choose another one now."""
        specs = (*past.unfinished, *(spec for spec, _ in past.ended))
        starts = {
            ids.root_episode_number(spec.episode_id) // past.group_size: GroupStart(spec.task)
            for spec in specs
            if spec.parent_id is None and spec.fork is None
        }
        for number in lost:  # worker processes do not wait for admissions, so entries may be on disk without them
            group = number // past.group_size
            if group in starts:
                continue
            with contextlib.suppress(JournalError, TypeError):  # the episode's worker reports the damage
                entries, _ = recorded(ids.episode_id(PREFIX["train"], number), 0)
                begin = next(iter(decode_entries(entries[:1])), None)
                if isinstance(begin, BeginEntry):
                    task = Task(id=begin.task_id, data=begin.task)
                    if self.specs.plays(begin.environment, task):
                        starts[group] = GroupStart(task, begin.fork)
        return starts

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
                self.worker.submit(resumable, partial(self._end, resumable, None), resume=True)
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
            self.group_scoring.drop_held(reason, self._record_in_buffer)
        headers = []
        for spec in self.in_flight.clear():
            if spec.purpose != "train":
                continue
            header = dropped_header(spec, reason)
            if self.leases is not None:
                self.leases.attempt_ended(spec.episode_id, spec.attempt, spec.fork)
            self.reservations.cancel(spec.episode_id)
            self._record_in_buffer(spec, header)
            headers.append((spec, header))
        await asyncio.gather(*(self.store.commit_episode(spec, header, b"", {}) for spec, header in headers))

    def drop_frozen(self) -> None:
        """Drop the ready units of frozen policies, which would be far out of date when those policies learn again, and
        of policies that have taken their last step."""
        self._drop_units_of_others(self.admission.learning())

    def start(self, starting: Sequence[tuple[EpisodeSpec, OnEnd | None]]) -> None:
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

    def restart(self, spec: EpisodeSpec) -> None:
        """Note that a further attempt of a running episode begins."""
        self.store.admit(spec)
        if self.leases is not None:
            self.leases.attempt_ended(spec.episode_id, spec.attempt - 1)
        self.memory.forget(spec.episode_id)
        self._reserve(spec)
        self.in_flight.add(spec)

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

    def _end_root(self, header: EpisodeHeader) -> None:
        """Receive the header of a root episode."""
        spec = self.in_flight.get(header.episode_id)
        if spec is None:
            self.buffer.counts.count_superseded()
        else:
            self._end(spec, None, header)

    def _end(self, spec: EpisodeSpec, on_end: OnEnd | None, header: EpisodeHeader) -> None:
        """Receive the header of an episode, and hand it to the buffer and its waiters."""
        if self.in_flight.get_attempt(spec.episode_id, header.attempt) is None:
            self.buffer.counts.count_superseded()
            return
        if self.leases is not None:
            self.leases.attempt_ended(spec.episode_id, header.attempt, spec.fork)
        self.in_flight.remove(spec.episode_id)
        self._resumed.discard(spec.episode_id)
        self.reservations.cancel(spec.episode_id)
        self.children.record_end(spec, header)
        self._report_drop(header)
        if spec.purpose == "train":
            if header.drop_reason is not None:
                self.examples[header.drop_reason] = header.episode_id
            if not header.committed:
                self.memory.forget(spec.episode_id)
            self._hold(spec, header, self._record_end)
        elif spec.purpose == "evaluate" and spec.parent_id is not None:
            self.evaluated.children.append(header)
        for waiting in self.children.pop_waiting(spec.episode_id, on_end):
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
            hint = (
                f"; `agentrl episode show {self.run_name} {header.episode_id}` shows the last episode, and `agentrl "
                f"run ledger {self.run_name}` counts drops"
            )
            last_failure = f". Last failure: {failure}" if failure else ""
            self._is_failing = True
            self.fail(CheckFailedError(f"{why}{hint if self.run_name else ''}{last_failure}"))

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
        self.in_flight.add(spec)

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


def _futures(count: int) -> list[asyncio.Future[EpisodeHeader]]:
    loop = asyncio.get_running_loop()
    return [loop.create_future() for _ in range(count)]


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
