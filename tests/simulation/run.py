"""Runs the production loop in virtual time, with emulated engines and a trainer that only takes time.

`simulate_run` stops after the given number of steps and returns a `SimulationResult`: busy shares, lags of tokens,
durations of episodes, and whether long and short episodes were trained equally. The first steps, in which the pipeline
fills, are not measured. `Recorder` holds the minimum of records needed for these results; `RecordingJournal` and
`RecordingEngine` fill it. The journal stores nothing else, so a simulated week is not written to disk.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.app.assemble import RunParts, assemble_orchestrator
from agentrl.app.plan import resolve
from agentrl.core.clock import LoopClock
from agentrl.core.errors import CheckFailedError
from agentrl.core.holds import Hold
from agentrl.core.records import PolicyVersion
from agentrl.engines.router import EngineRouter
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import Admission, EpisodeEnd, StepRow, UnitDropped
from agentrl.orchestrator.versions import ServedVersions
from agentrl.testing.virtual_time import VirtualTimeEventLoop
from tests.simulation.engine import EmulatedEngine
from tests.simulation.simulated_environments import (
    LengthChatFormat,
    SimulatedTasks,
    make_root_environment,
    requested_turn_length,
)
from tests.simulation.timeline import RunTimeline, span_occupancy
from tests.support.recording_trainer import RecordingTrainer

if TYPE_CHECKING:
    from agentrl.core.ports import Engine, GenerateRequest
    from agentrl.core.records import (
        TrainBatch,
    )
    from agentrl.journal.port import ControlRecord
    from agentrl.orchestrator.loop import Orchestrator
    from tests.simulation.engine import EmulatedSession
    from tests.simulation.plan import SimulationPlan

PARTS = 72
"""Number of intervals of a timeline."""
SNAPSHOTS_PER_STEP = 24
"""Approximate number of times per step at which the simulation records the reason that holds admission back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Plan and length of a simulation."""

    plan: SimulationPlan
    steps: int = 40
    """Number of steps of the first policy that learns."""
    skipped: int = 12
    """Number of first steps that are not measured."""
    is_closed: bool = False
    """Whether admission stops after the steps and all admitted work is trained on, to measure the total time."""
    alter: Callable[[Orchestrator], None] = lambda orchestrator: None
    """Replaces parts of the production loop, for comparison."""
    reserves: bool = True
    """Whether calls reserve memory of the engines."""


def simulate_run(scenario: Scenario) -> SimulationResult:
    """Simulate a scenario to its last step.

    Raises:
        ConfigError: production refuses the plan.
    """
    loop = VirtualTimeEventLoop(scenario.plan.seed, max_steps=1 << 40, trace=0)
    began = time.process_time()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, _no_collections():
        recorder = runner.run(_run(scenario))
    loop.raise_failure()
    return compute_simulation_result(scenario.plan, recorder, scenario.skipped, time.process_time() - began)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disable cyclic garbage collection within the context: an episode leaves 6 KiB, and collections take a fifth of
    the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


async def _run(scenario: Scenario) -> Recorder:
    plan, clock = scenario.plan, LoopClock()
    config = plan.config(scenario.steps if scenario.is_closed else 1 << 20)
    recorder = Recorder(plan, plan.grain)
    journal = RecordingJournal(recorder, None if scenario.is_closed else scenario.steps)
    versions = {name: PolicyVersion(name, 0, 0) for name in config.policies}
    trainer = RecordingTrainer(
        list(config.trained),
        clock=clock,
        step_seconds=step_seconds(plan, recorder),
        publish_seconds=plan.trainer.publish_seconds,
    )
    served = ServedVersions(_engine(scenario, recorder, versions))
    for name in config.trained:
        await served.make_current(await trainer.publish(name, versions[name]))
    parts = RunParts(
        served=served,
        trainer=trainer,
        chat_format=LengthChatFormat(),
        store=journal,
        observer=_Nobody(),
        clock=clock,
        tasks=SimulatedTasks(plan.seed, plan.jump),
        past=PastRun(journal, {}, group_size=config.credit.group_size),
        versions=versions,
    )
    journal.orchestrator = orchestrator = assemble_orchestrator(resolve(config, make_root_environment(plan)), parts)
    scenario.alter(orchestrator)
    looks = asyncio.get_running_loop().create_task(_look(plan, recorder, orchestrator))
    await orchestrator.run()
    looks.cancel()
    return recorder


def _engine(scenario: Scenario, recorder: Recorder, versions: Mapping[str, PolicyVersion]) -> Engine:
    plan = scenario.plan
    grain, rates = recorder.grain, plan.rates
    for _ in range(plan.engine.replicas):
        recorder.engines.append(
            RecordingEngine(
                recorder,
                requested_turn_length,
                versions=versions,
                slots=plan.engine.slots,
                rate=lambda count: rates(count) / grain,
                kv_tokens=None if plan.kv_tokens is None else plan.kv_tokens // grain,
                prefill_rate=plan.prefill_rate / grain,
                reserves=scenario.reserves,
            )
        )
    return recorder.engines[0] if len(recorder.engines) == 1 else EngineRouter(recorder.engines)


def step_seconds(plan: SimulationPlan, recorder: Recorder) -> Callable[[TrainBatch], float]:
    """Return a function from a batch to the duration of its step, in seconds."""
    rate = plan.train_rate()

    def seconds(batch: TrainBatch) -> float:
        of_unit = plan.unit_seconds(batch.policy)
        if of_unit is not None:
            return len(batch.units) * of_unit
        return sum(recorder.contexts[unit.episode_id] for unit in batch.units) * recorder.grain / rate

    return seconds


async def _look(plan: SimulationPlan, recorder: Recorder, orchestrator: Orchestrator) -> None:
    """Record regularly the reason that holds admission back and the use of the engine."""
    every = plan.least_step_seconds() / SNAPSHOTS_PER_STEP
    while True:
        recorder.record_snapshot(
            orchestrator.scheduler.why_not(),
            waits_for_memory=any(engine.kv_budget.waiting for engine in recorder.engines),
        )
        await asyncio.sleep(every)


class _Nobody:
    """Observer that ignores all calls."""

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Do nothing."""


# --- records while it runs --------------------------------------------------------------------------------------------


class OptimizerStep(NamedTuple):
    """Optimizer step of a simulation."""

    policy: str
    at: float
    """Time at which the step's version was published, in seconds."""
    seconds: float
    units: tuple[str, ...]
    """Ids of the episodes."""
    engine: tuple[float, float, float, float]
    """Totals over all engines so far: slot seconds in use, capacity seconds in use, seconds in which any call ran, and
    sampled blocks."""


class Snapshot(NamedTuple):
    """State of the simulation at one moment."""

    at: float
    full_seconds: float
    held: Hold | None
    waits_for_memory: bool
    """Whether calls waited for room in the engines' memory."""


class StartedEpisode(NamedTuple):
    """Admitted episode."""

    environment: str
    at: float
    steps: Mapping[str, int]
    """Number of steps that each policy had taken at admission."""


class Recorder:
    """Records of a simulation. Lengths are in blocks of `grain` tokens."""

    def __init__(self, plan: SimulationPlan, grain: int) -> None:
        self.plan = plan
        self.grain = grain
        self.engines: list[RecordingEngine] = []
        self.begun: dict[str, StartedEpisode] = {}
        self.ended: dict[str, float] = {}
        self.lengths: dict[str, int] = {}
        """Number of sampled blocks of committed episodes."""
        self.spans: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
        """Number of sampled blocks, keyed by episode, then by version."""
        self.asked: Counter[str] = Counter()
        """Number of blocks to sample in calls that run or wait for a slot, keyed by episode."""
        self.contexts: Counter[str] = Counter()
        """Length of all conversations of an episode, in blocks, keyed by episode."""
        self.steps: list[OptimizerStep] = []
        self.snapshots: list[Snapshot] = []
        self.taken: Counter[str] = Counter()
        """Number of steps taken, keyed by policy."""
        self.wasted = 0
        """Number of blocks sampled for units that were dropped."""

    def busy(self) -> tuple[float, float, float, float]:
        """Return the totals over all engines; see `OptimizerStep.engine`."""
        active = sum(engine.busy_seconds() for engine in self.engines)
        return (
            sum(engine.slot_seconds for engine in self.engines),
            sum(engine.full_seconds for engine in self.engines),
            active,
            sum(engine.sampled for engine in self.engines),
        )

    def record_snapshot(self, held: Hold | None, *, waits_for_memory: bool) -> None:
        """Record a snapshot."""
        self.snapshots.append(Snapshot(asyncio.get_running_loop().time(), self.busy()[1], held, waits_for_memory))


class RecordingJournal(MemoryJournal):
    """Discards its records after it has passed them to a `Recorder`, and stops the loop after the last step.

    Args:
        recorder: receives the records.
        steps: number of steps of the first policy that learns; None: the loop ends by itself.
    """

    def __init__(self, recorder: Recorder, steps: int | None) -> None:
        super().__init__(keeps=False)
        self._recorder = recorder
        self._steps = steps
        self._first = next(iter(recorder.plan.trained))
        self.orchestrator: Orchestrator | None = None

    def write(self, *records: ControlRecord) -> None:
        now, recorder = asyncio.get_running_loop().time(), self._recorder
        for record in records:
            match record:
                case Admission(spec=spec):
                    name = spec.environment.rpartition(":")[2]
                    recorder.begun[spec.episode_id] = StartedEpisode(name, now, dict(recorder.taken))
                case UnitDropped() if not self._is_over():
                    recorder.wasted += recorder.lengths[record.episode_id]
                case StepRow(version=version):
                    units = tuple(unit.episode_id for unit in record.batch.units)
                    step = OptimizerStep(version.policy, now, record.report.seconds, units, recorder.busy())
                    recorder.steps.append(step)
                    recorder.taken[version.policy] = version.step
                    if self._is_over() and self.orchestrator is not None:
                        self.orchestrator.stop()

    async def commit(self, end: EpisodeEnd) -> None:
        """Record the length of an episode.

        Raises:
            CheckFailedError: an episode was dropped, although none can fail in a simulation.
        """
        header, name = end.header, end.spec.episode_id
        if not header.committed and header.drop_reason != "run_ended" and not self._is_over():
            raise CheckFailedError(f"episode {name} was dropped ({header.drop_reason}): {end.detail}")
        await super().commit(end)
        self._recorder.lengths[name] = header.tokens
        self._recorder.ended[name] = asyncio.get_running_loop().time()

    def _is_over(self) -> bool:
        return self._steps is not None and self._recorder.taken[self._first] >= self._steps


class RecordingEngine(EmulatedEngine):
    """Emulated engine that records the versions that sampled an episode and the remaining length of its calls."""

    def __init__(self, recorder: Recorder, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._recorder = recorder

    def submit(self, session: EmulatedSession, request: GenerateRequest) -> Any:
        """See `EmulatedEngine.submit`; records the call."""
        call = super().submit(session, request)
        self._recorder.asked[request_episode_id(request)] += call.length
        return call

    def finish(self, call: Any) -> Any:
        """See `EmulatedEngine.finish`; records the call."""
        before = call.session.context
        completion = super().finish(call)
        episode = request_episode_id(call.request)
        self._recorder.contexts[episode] += call.session.context - before
        by_version = self._recorder.spans[episode]
        for span in completion.spans:
            by_version[span.version.policy, span.version.step] += span.stop - span.start
        if call.reason == "abort":  # an aborted call requests its remaining tokens again
            self._recorder.asked[episode] -= call.length - len(completion.token_ids)
        return completion


def request_episode_id(request: GenerateRequest) -> str:
    """Return the episode of a call from its request id, which consists of episode, attempt and call id."""
    return request.request_id.rsplit(".", 2)[0]


# --- what is measured from them ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class SimulationResult:
    """Results of a simulation over the steps after the skipped ones; lengths in tokens, times in seconds."""

    seconds: float
    steps_per_hour: Mapping[str, float]
    """Steps per hour of each policy."""
    tokens_per_s: float
    """Tokens sampled per second, without wasted ones."""
    engine_busy: float
    """Share of the engines' capacity in use; 1 while a call waits for a slot or for memory, or contexts are
    computed.
    """
    slots_busy: float
    """Share of all slots' time in which the slots had a call."""
    engine_active: float
    """Share of the time in which an engine had any call; `engine/busy_share` of a real run."""
    trainer_busy: float
    token_lag: float
    """Mean staleness of the trained tokens."""
    older: float
    """Share of the trained tokens older than `max_staleness`."""
    unit_lag: float
    """Mean over trained units of the steps taken between admission and training."""
    lag_p99: float
    """99th percentile of the same."""
    lag_max: float
    length_ratio: float
    """Mean length of trained episodes divided by that of all episodes that began."""
    waste: float
    """Share of the sampled tokens whose units were dropped."""
    episodes: int
    episode_seconds: Mapping[str, Sequence[float]]
    """Median, P90 and P99 of the seconds from admission to the end, keyed by environment."""
    held: Mapping[str, float]
    """Share of the time in which admission was held back, by reason."""
    no_room: float
    """Share of the time in which calls waited for room in the engines' memory."""
    preemptions: int
    """Number of calls evicted from memory."""
    steps_per_bound: float
    """Steps per second, divided by the bound for engines with full slots or a trainer that never waits."""
    makespan_over_bound: float
    """Time divided by a lower bound for any schedule of all work that was begun; for closed runs."""
    timeline: RunTimeline
    step_times: Sequence[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """CPU seconds of the simulation."""


def compute_simulation_result(
    plan: SimulationPlan, recorder: Recorder, skipped: int, cpu_seconds: float
) -> SimulationResult:
    """Compute the results from the records after the skipped steps."""
    first = next(iter(plan.trained))
    own = [step for step in recorder.steps if step.policy == first]
    begin, end = own[skipped - 1], own[-1]
    seconds = end.at - begin.at
    window = [step for step in recorder.steps if begin.at < step.at <= end.at]
    slots, full, active, sampled = (now - before for now, before in zip(end.engine, begin.engine, strict=True))
    engines = plan.engine.replicas
    lags, units = _lags(recorder, window)
    tokens = sum(count for _, _, count in lags)
    kinds = _kinds_with(plan, first)
    fed = [name for name in recorder.asked if _kind(recorder, name) in kinds]
    waste = recorder.wasted / max(sum(engine.sampled for engine in recorder.engines), 1.0)
    mean = fmean(recorder.asked[name] for name in fed)
    own_units = [name for step in window if step.policy == first for name in step.units]
    return SimulationResult(
        seconds=seconds,
        steps_per_hour={name: 3600 * sum(step.policy == name for step in window) / seconds for name in plan.trained},
        tokens_per_s=(1 - waste) * sampled * recorder.grain / seconds,
        engine_busy=full / (engines * seconds),
        slots_busy=slots / (engines * plan.engine.slots * seconds),
        engine_active=active / (engines * seconds),
        trainer_busy=sum(step.seconds for step in window) / seconds,
        token_lag=sum(lag * count for _, lag, count in lags) / tokens,
        older=sum(count for name, lag, count in lags if lag > plan.trained[name].largest_staleness) / tokens,
        unit_lag=fmean(units),
        lag_p99=quantiles(units, n=100)[-1],
        lag_max=max(units),
        length_ratio=fmean(recorder.lengths[name] for name in own_units) / mean,
        waste=waste,
        episodes=len(recorder.asked),
        episode_seconds=_tails(recorder, begin.at),
        held=_held(recorder, begin.at, end.at),
        no_room=fmean(look.waits_for_memory for look in recorder.snapshots if begin.at <= look.at <= end.at),
        preemptions=sum(engine.preemptions for engine in recorder.engines),
        steps_per_bound=(len(own) - skipped) / seconds / _steps_per_second(plan, recorder, len(fed)),
        makespan_over_bound=end.at / _least_seconds(plan, recorder, own),
        timeline=_timeline(plan, recorder, begin.at, end.at),
        step_times=[step.at for step in own],
        cpu_seconds=cpu_seconds,
    )


def _kind(recorder: Recorder, episode: str) -> tuple[str, bool]:
    """Return an episode's environment and whether it is a child."""
    return recorder.begun[episode].environment, "~" in episode


def _kinds_with(plan: SimulationPlan, policy: str) -> set[tuple[str, bool]]:
    """Return the kinds of episodes in which a policy plays."""
    config = plan.config(1)
    return {
        (name, is_child)
        for name, environment in plan.environments.items()
        for is_child in (False, True)
        for seat in environment.seats
        if config.seat_assignment.policy_of(f"{name}.{seat}" if is_child else seat, 0) == policy
    }


def _lags(recorder: Recorder, window: Sequence[OptimizerStep]) -> tuple[list[tuple[str, int, int]], list[int]]:
    """Return the trained tokens as (policy, lag, number), and for each unit the steps from admission to training."""
    counts: Counter[tuple[str, int]] = Counter()
    units = []
    taken = Counter(dict.fromkeys({step.policy for step in recorder.steps}, 0))
    chosen = set(map(id, window))
    for step in recorder.steps:
        if id(step) in chosen:
            for name in step.units:
                units.append(taken[step.policy] - recorder.begun[name].steps.get(step.policy, 0))
                for (policy, version), count in recorder.spans[name].items():
                    if policy == step.policy:
                        counts[policy, taken[policy] - version] += count
        taken[step.policy] += 1
    return [(policy, lag, count) for (policy, lag), count in counts.items()], units


def _tails(recorder: Recorder, since: float) -> dict[str, tuple[float, float, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in recorder.plan.environments}
    for name, at in recorder.ended.items():
        if at >= since:
            seconds[recorder.begun[name].environment].append(at - recorder.begun[name].at)
    found = {}
    for name, values in seconds.items():
        if len(values) > 1:
            cuts = quantiles(values, n=100)
            found[name] = (cuts[49], cuts[89], cuts[98])
    return found


def _held(recorder: Recorder, begin: float, end: float) -> dict[str, float]:
    looks = [look for look in recorder.snapshots if begin <= look.at <= end]
    kinds = Counter("nothing" if look.held is None else look.held.kind for look in looks)
    return {kind: count / len(looks) for kind, count in kinds.most_common()}


def _steps_per_second(plan: SimulationPlan, recorder: Recorder, units: int) -> float:
    """Return an upper bound on the first policy's steps per second for any schedule that never ends.

    `units` is the number of units of that policy that were started.
    """
    size = next(iter(plan.trained.values())).step_size
    work = sum(recorder.asked.values()) * recorder.grain / units * size
    return min(plan.capacity() / work, 1 / max(fmean(step.seconds for step in recorder.steps), 1e-9))


def _least_seconds(plan: SimulationPlan, recorder: Recorder, own: Sequence[OptimizerStep]) -> float:
    """Return a lower bound on the seconds of any schedule of the started work. It is the largest of three times: all
    work through all slots plus one step, all steps, and the longest parent and child plus one step."""
    longest: dict[str, int] = {}
    for name, blocks in recorder.asked.items():
        parent = name.partition("~")[0]
        longest.setdefault(parent, 0)
        if name != parent:
            longest[parent] = max(longest[parent], blocks)
    path = max(recorder.asked[parent] + blocks for parent, blocks in longest.items()) * recorder.grain
    work = sum(recorder.asked.values()) * recorder.grain / plan.capacity()
    step = fmean(step.seconds for step in own)
    return max(work + step, len(own) * step, path / plan.rates(1) + step)


def _timeline(plan: SimulationPlan, recorder: Recorder, begin: float, end: float) -> RunTimeline:
    part = (end - begin) / PARTS
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in plan.environments}
    for name, begun in recorder.begun.items():
        stop = recorder.ended.get(name, end)
        if stop > begin and begun.at < end:
            spans[begun.environment].append((max(begun.at, begin) - begin, min(stop, end) - begin))
    trainers: dict[str, list[tuple[float, float]]] = {name: [] for name in plan.trained}
    publish = plan.trainer.publish_seconds
    for step in recorder.steps:
        stop = step.at - publish
        if begin < stop <= end:
            trainers[step.policy].append((max(stop - step.seconds, begin) - begin, stop - begin))
    at_work = {name: span_occupancy(found, PARTS, part) for name, found in trainers.items()}
    engine = _engine_shares(plan, recorder, begin, part)
    ends = [int((at - begin) / part) for at in recorder.ended.values() if begin <= at < end]
    counts = Counter(ends)
    return RunTimeline(
        began=begin,
        seconds=end - begin,
        part=part,
        in_flight={name: span_occupancy(found, PARTS, part) for name, found in spans.items()},
        committed=[counts[place] for place in range(PARTS)],
        dropped=[0] * PARTS,
        trainers=at_work,
        engine=list(engine),
        versions=[
            (step.at - begin, f"{step.policy}@0.{number}")
            for number, step in enumerate(recorder.steps, start=1)
            if begin < step.at < end
        ],
        idle={
            **{f"trainer of {name}": 1 - sum(shares) / PARTS for name, shares in at_work.items()},
            "engine": 1 - sum(engine) / PARTS,
        },
        problems=[],
    )


def _engine_shares(plan: SimulationPlan, recorder: Recorder, begin: float, part: float) -> list[float]:
    """Return the used share of the engines' capacity in each interval, interpolated between snapshots."""
    looks = recorder.snapshots
    at = 0
    totals = []
    for number in range(PARTS + 1):
        edge = begin + number * part
        while at + 2 < len(looks) and looks[at + 1].at <= edge:
            at += 1
        before, after = looks[at], looks[at + 1]
        share = (edge - before.at) / max(after.at - before.at, 1e-12)
        totals.append(before.full_seconds + share * (after.full_seconds - before.full_seconds))
    return [min(max((totals[n + 1] - totals[n]) / (part * plan.engine.replicas), 0.0), 1.0) for n in range(PARTS)]
