"""The loop: episodes in, versions out. One loop, no modes: synchronous training is `max_staleness = 0`.

    tasks → admit → workers → buffer (credit) → trainer → engine → board
              ▲                                               │
              └───────────── a new version makes room ◀───────┘

| loop            | consumes       | waits for                               | is unblocked by                    |
|-----------------|----------------|-----------------------------------------|------------------------------------|
| `_admit_groups` | tasks          | permits, bounds, rules about the task   | an episode's end, a policy's step  |
| episode         | engine, tools  | its own turns                           | nothing of the loop                |
| `_train`        | ready units    | step_size units, or all that can come   | a released group, closed admission |
| `_checkpoint`   | nothing        | the trainer to be between two steps     | the step's end                     |
| evaluation      | held-out tasks | permits; the engine, behind training    | an episode's end                   |
| `_adjust_limit` | nothing        | turns to end, with `max_in_flight = "auto"` | time                           |
| `_watch`        | nothing        | that nothing runs or may start          | the end of training                |

To follow one episode (docs/explanation/follow_one_episode.md): `Orchestrator._admit_groups` →
`orchestrator/dispatch.py` → `rollout/worker.py` → `rollout/runner.py` → the environment's `run` →
`rollout/turn/agent.py` → `orchestrator/buffer.py` → `learn/trainer.py` → `credit/samples.py` → `learn/losses.py`.

Only headers pass through here. Errors that are no episode's fault end the run through `RunStop.fail`; all others stay
with their episode. `StepMetrics` (`step_metrics.py`) measures the steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from agentrl.core.clock import Clock
from agentrl.core.errors import RUN_ENDED, CheckFailedError, NonFiniteError, UntrainableUnitsError
from agentrl.core.holds import SET_LIMIT, AdmissionWait, HoldKind, InFlightLimit
from agentrl.core.machine import rare_collections
from agentrl.core.ports import Observer, Trainer
from agentrl.core.records import PolicyVersion, StepReport, TrainBatch, WeightsRef
from agentrl.core.text import format_seconds, plural
from agentrl.credit.baselines import RoleMeans
from agentrl.credit.step_credit import OptimizerStepCreditAssigner
from agentrl.journal.port import MetricRow, StepRow
from agentrl.journal.run_log import RunJournal
from agentrl.observe.bottleneck import (
    TURNS,
    ActivityClock,
    Bottleneck,
    BottleneckWatch,
    commonest_error,
    failing_calls,
)
from agentrl.observe.run_state import DRAINING, EVALUATING, PAUSED, TRAINING, RunSnapshot
from agentrl.orchestrator.admission_limit import LOOK_S, AdmissionController
from agentrl.orchestrator.buffer import EpisodeBuffer, ReadyUnit
from agentrl.orchestrator.checkpoints import CheckpointWriter, JournalRetention, VersionRetention
from agentrl.orchestrator.dispatch import ChangeCondition, Dispatcher
from agentrl.orchestrator.evaluation import Evaluator
from agentrl.orchestrator.opponents import OpponentPools
from agentrl.orchestrator.scheduler import Scheduler
from agentrl.orchestrator.staleness import StalenessController
from agentrl.orchestrator.step_metrics import StepMetrics
from agentrl.orchestrator.tasks import Curriculum
from agentrl.orchestrator.versions import (
    BestCheckpointTracker,
    PolicyBoard,
    ServedVersions,
    publish,
)

DRAIN_S = 5.0
"""Maximum number of seconds that episodes in flight have to end after a stop was requested."""


MEANINGFUL_SHARE = 0.5
"""Share of a step's episodes that must have ended for an estimate of the step's time: the first to end are the
shortest."""
SKIPPED_IN_A_ROW = 3
"""Number of skipped steps of a policy in a row that ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoopSettings:
    """The part of the configuration that the loop needs."""

    step_size: Mapping[str, int]
    tokens_per_unit: int
    """Divisor of a step's summed token losses, per unit of the step; 0: the step's number of sampled tokens."""
    evaluate_every: int = 0
    checkpoint_every: int = 0
    stop_seconds: float = 8.0
    """Seconds that a stop may take, half of them for the episodes in flight."""


@dataclass(slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run."""

    interrupted: bool = False


class RunStop:
    """Why a run ends before its last step. Resumed episodes and groups may fail before `Orchestrator.run` begins.

    Args:
        changed: is notified.
    """

    def __init__(self, changed: ChangeCondition) -> None:
        self.is_requested = False
        """Whether the run should end with a checkpoint."""
        self.requested_at = 0.0
        """Time of the first request, of the event loop's clock."""
        self.failed_check: CheckFailedError | None = None
        self.error: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with the error that ends the run at once."""
        self._changed = changed

    def request(self) -> None:
        """End the run with a checkpoint."""
        if not self.is_requested:
            self.is_requested, self.requested_at = True, asyncio.get_running_loop().time()
        self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """End the run with an error that is no episode's fault; if all parts of the run are well, write a checkpoint
        first."""
        if isinstance(error, CheckFailedError):
            if not self.is_requested:
                self.failed_check = error
                self.request()
        elif not self.error.done():
            self.error.set_exception(error)


@dataclass(slots=True, kw_only=True, eq=False)
class Orchestrator:
    """Moves headers between parts that are independent of each other; `app.assemble` wires it."""

    plan: TrainingLoopSettings
    curriculum: Curriculum
    dispatcher: Dispatcher
    scheduler: Scheduler
    buffer: EpisodeBuffer
    board: PolicyBoard
    trainer: Trainer
    versions: ServedVersions
    store: RunJournal
    checkpoints: CheckpointWriter | None
    changed: ChangeCondition
    stopping: RunStop
    clock: Clock
    observer: Observer
    evaluator: Evaluator
    retention: VersionRetention
    journal_retention: JournalRetention
    opponents: OpponentPools
    best: BestCheckpointTracker
    roles: RoleMeans | None = None
    """Role-conditioned baselines; None if rewards are compared in groups."""
    step_advantages: OptimizerStepCreditAssigner | None = None
    """Estimator over the units of each step; None if rewards are compared in groups."""
    tell: Callable[[str], None] = lambda line: None
    """Callback that shows a warning to the user."""
    say: Callable[[str], None] = lambda line: None
    """Callback that shows information to the user."""
    code_changes: int = 0
    """Value of the metric `run/code_changes`."""
    admission: AdmissionController | None = None
    """Adjusts the number of episodes in flight; None: the configuration sets it."""
    staleness: Mapping[str, StalenessController] = field(default_factory=dict)
    """Adjusts the bound on staleness of each policy whose configuration sets none."""
    limit_workers: Callable[[int], None] = lambda count: None
    """Tells worker processes the number of episodes that may run at once."""
    _last_evaluation: dict[str, int] = field(default_factory=dict)
    """Number of evaluations that had begun at each policy's last step."""
    activity: ActivityClock = field(init=False)
    outcome: RunOutcome = field(default_factory=RunOutcome)
    _trainer_free: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended_early: str | None = None
    """The reason if a metric or a request ended the run before its last step; else None."""
    paused_by: str = ""
    """Who paused the run; empty: it is not paused."""
    drained_by: str = ""
    """Who asked the run to drain; empty: it does not drain."""
    _is_over: bool = False
    """Whether every policy had taken its last step."""
    _checkpoint_steps: Mapping[str, int] = field(default_factory=dict)
    _num_skipped: Counter[str] = field(default_factory=Counter)
    _untrainable: Counter[str] = field(default_factory=Counter)
    _metrics: StepMetrics = field(init=False)
    _phase: str = "starting"
    _open_steps: dict[str, int] = field(default_factory=dict)
    """Number of the step in progress, by policy."""
    _bottleneck: BottleneckWatch = field(init=False)

    def __post_init__(self) -> None:
        self.activity = self.dispatcher.in_flight.activity
        if self.admission is not None:
            self.scheduler.limit(self.admission.limit, self.admission.reason)
        for policy, controller in self.staleness.items():
            self.scheduler.bound(policy, controller.bound)
        self._bottleneck = BottleneckWatch(
            self.activity_totals,
            lambda: {policy: self.scheduler.max_staleness(policy) for policy in self.board.trainable},
            self.versions.engine.capabilities.places,
        )
        self._metrics = StepMetrics(
            engine=self.versions.engine,
            dispatcher=self.dispatcher,
            buffer=self.buffer,
            board=self.board,
            clock=self.clock,
        )

    # --- from outside -----------------------------------------------------------------------------------------------

    async def run(self) -> RunOutcome:
        """Train until every policy has taken its steps, a metric ends the run, or `stop` is called.

        Raises:
            AgentRLError: the error passed to `RunStop.fail`, or raised in a loop; the newest checkpoint stays valid.
        """
        failure = self.stopping.error
        with rare_collections():
            main = asyncio.get_running_loop().create_task(self._main(), name="main")
            try:
                await asyncio.wait({main, failure}, return_when=asyncio.FIRST_COMPLETED)
                if not main.done():
                    failure.result()
                await main
            finally:
                if not main.done():
                    main.cancel()
                    await asyncio.wait({main})
                await self.dispatcher.worker.cancel()
                if self.dispatcher.group_scoring is not None:
                    self.dispatcher.group_scoring.close()
                await self.journal_retention.close()
                failure.cancel()
        return self.outcome

    def stop(self) -> None:
        """Stop admitting, let steps in progress end, write a checkpoint, return from `run`."""
        self.outcome.interrupted = True
        self.stopping.request()

    def unfinished(self) -> str:
        """Return what a stop still has to do, for a message; may be called from any thread. Empty if nothing."""
        parts = [f"finishing step {step} of {policy}" for policy, step in list(self._open_steps.items())]
        if self.checkpoints is not None and self._checkpoint_steps != {
            policy: version.step for policy, version in self._versions().items()
        }:
            parts.append("writing a checkpoint of the newest step")
        return " and ".join(parts)

    def pause(self, who: str) -> int:
        """Stop sampling at the next turns and training after the steps in progress; returns the number of parked
        episodes."""
        self.paused_by, self.scheduler.is_paused = who, True
        count = self.dispatcher.pause()
        self.changed.notify()
        return count

    def unpause(self) -> None:
        """Continue after `pause`; does nothing if the run is not paused."""
        if self.paused_by:
            self.paused_by, self.scheduler.is_paused = "", False
            self._bottleneck.start()
            for controller in self.staleness.values():
                controller.leave_out_step()
            self.dispatcher.unpause()
            self.changed.notify()

    def drain(self, who: str) -> int:
        """Admit no more, train on what is in flight, and end the run; returns the number of episodes in flight."""
        self.drained_by, self.scheduler.is_draining = who, True
        self.unpause()
        self.changed.notify()
        return self.buffer.ledger.in_flight

    def change(
        self,
        plan: TrainingLoopSettings,
        *,
        max_in_flight: int,
        admission: AdmissionController | None,
        steps: Mapping[str, int],
    ) -> None:
        """Take other settings from now on."""
        self.plan, self.admission = plan, admission
        self.scheduler.end_after(steps)
        self.limit(max_in_flight, SET_LIMIT if admission is None else admission.reason)

    def limit(self, max_in_flight: int, reason: InFlightLimit = SET_LIMIT) -> None:
        """Let as many episodes run at once from now on."""
        self.scheduler.limit(max_in_flight, reason)
        self.limit_workers(max_in_flight)
        self.changed.notify()

    def status(self) -> RunSnapshot:
        """Return the state of the run between steps: counts, and what each part waits for. Cheap: read every second."""
        ledger = self.buffer.ledger
        num_evaluated, total = self.dispatcher.evaluated.progress()
        phase, is_training = self._phase, self._phase == TRAINING
        bottleneck = self._bottleneck.recent() if is_training else self._bottleneck.whole()
        if self.paused_by:
            resume = f"`agentrl run resume {self.dispatcher.run_name}`"
            phase, bottleneck = PAUSED, Bottleneck("paused", f"{resume} continues the run")
        elif self.drained_by and is_training:
            phase = DRAINING
        totals = self.activity_totals()
        return RunSnapshot(
            phase=phase,
            progress=(num_evaluated, total) if num_evaluated < total else None,
            waits=self._waits() if is_training else (),
            in_flight=ledger.in_flight,
            ready=ledger.ready,
            trained=ledger.trained,
            dropped=dict(ledger.dropped),
            bottleneck="" if bottleneck is None else bottleneck.line,
            raised=commonest_error(totals),
            failing=failing_calls(totals),
            examples=dict(self.dispatcher.examples),
            pace=self._pace() if is_training else "",
        )

    def _pace(self) -> str:
        """Return how far a first step is, and from its first ended episode on the seconds that sampling it takes; empty
        after the first steps."""
        totals, paces = self.activity_totals(), list[tuple[float, str]]()
        elapsed_s, turns = totals.get("run", 0.0), totals.get(TURNS, 0.0)
        for policy, size in self.plan.step_size.items():
            counts = self.buffer.counts
            ended, turns_of_ended = counts.of("committed", policy=policy), counts.of_all_policies("turns")
            if self.board.step(policy) or policy in self.scheduler.phases.frozen() or not turns:
                continue
            so_far = f"so far {ended:,.0f} of {plural(size, 'episode')}"
            waiting = size - self.buffer.ready(policy)
            if policy in self.scheduler.stepping or (ended >= size and waiting <= 0):
                paces.append((elapsed_s, f"{plural(size, 'episode')} sampled; the trainer works on the step"))
            elif ended >= size:
                paces.append((elapsed_s, f"waits for the groups of {plural(waiting, 'episode')} to end"))
            elif (
                ended >= MEANINGFUL_SHARE * size and turns_of_ended
            ):  # the turns of unfinished episodes count too, the current ones as half
                sampled = turns + self.buffer.ledger.in_flight / 2
                seconds = max(elapsed_s * size / (ended * sampled / turns_of_ended), elapsed_s)
                paces.append((seconds, f"about {format_seconds(seconds)} to sample a step; {so_far}"))
            else:
                paces.append((elapsed_s, so_far))
        return max(paces, default=(0.0, ""))[1]

    def activity_totals(self) -> Mapping[str, float]:
        """What the loop and its workers have spent their time on; see `ActivityClock.totals`."""
        return Counter(self.dispatcher.worker.activity()) + Counter(self.activity.totals())

    def _waits(self) -> tuple[str, ...]:
        waits = [f"paused by {self.paused_by}"] if self.paused_by else []
        waits += [f"draining for {self.drained_by}"] if self.drained_by else []
        for policy, size in self.plan.step_size.items():
            owner = "trainer" if len(self.plan.step_size) == 1 else f"trainer of {policy}"
            if policy in self._open_steps:
                waits.append(f"{owner} works on step {self._open_steps[policy]}")
            elif policy in self.scheduler.phases.frozen():
                waits.append(f"{owner} waits for its phase")
            elif not self.scheduler.phases.is_over(policy):
                waits.append(f"{owner} waits for episodes: {self.buffer.ready(policy)} of {size} are in whole groups")
        hold = self.scheduler.why_not()
        waits.append("new episodes start" if hold is None else f"sampling waits {hold.text}")
        return tuple(waits)

    # --- the loops --------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        self._phase = EVALUATING[0]
        await self.retention.keep_for(self.checkpoints, self.board)
        is_at_start = max(map(self.board.step, self.board.trainable), default=0) == 0
        if self.evaluator.tasks and is_at_start:
            await self.evaluator.now(self._versions(), self._is_stopping)
        self._phase = TRAINING
        self._metrics.start()
        self.activity.forget_most()
        self._bottleneck.start()
        try:
            self.scheduler.is_training = True
            with self.activity.during("run"):
                async with asyncio.TaskGroup() as loops:
                    loops.create_task(self._admit_groups(), name="admit")
                    loops.create_task(self._watch(), name="watch")
                    loops.create_task(self._adjust_limit(), name="adjust the limit")
                    for policy in self.board.trainable:
                        loops.create_task(self._train(policy, loops), name=f"train {policy}")
                    if self.evaluator.tasks and not (is_at_start or self._finished()):
                        self._resume_evaluations(loops)
        except BaseExceptionGroup as group:
            raise _first(group) from None
        self.scheduler.is_training = False
        self._bottleneck.stop()
        self._phase = "ending: episodes in flight"
        if self.stopping.is_requested:
            await self._drain()
        else:
            if unfinished := self.buffer.ledger.in_flight:
                self.say(f"{plural(unfinished, 'episode')} in flight at the end: dropped (run_ended)")
            await self.dispatcher.end_running(RUN_ENDED)
            self._drop_ready()
        self._phase = "writing the last checkpoint"
        await self._checkpoint()
        if not self.stopping.is_requested:
            await self.journal_retention.wait()
        self._phase = EVALUATING[1]
        if self.evaluator.tasks and not self.stopping.is_requested:
            await self.evaluator.now(self._versions(), self._is_stopping)
        await self.store.flush()
        if self.stopping.failed_check is not None:
            raise self.stopping.failed_check

    async def _admit_groups(self) -> None:
        """Draw the task of each root group once the rules let the group start, and start it."""
        waits = dict[HoldKind, AdmissionWait]()  # how long the next group waited for each rule
        while not self._finished():
            hold = self.scheduler.why_not()
            if hold is None:
                task = self.curriculum.task(self.dispatcher.next_group)
                self.dispatcher.admit_group(task, tuple(waits.values()))
                waits.clear()
            else:
                since = self.clock.monotonic() - (waits[hold.kind].seconds if hold.kind in waits else 0.0)
                with self.activity.during(hold.kind):
                    await self.changed.wait_for(partial(self._is_held_otherwise, hold.kind))
                waits[hold.kind] = AdmissionWait(self.clock.monotonic() - since, hold)
        if self._is_over:  # what no step needs must not slow an evaluation down
            for episode_id in list(self.dispatcher.in_flight.training()):
                self.dispatcher.worker.park(episode_id)

    def _is_held_otherwise(self, kind: HoldKind) -> bool:
        """Whether the next root group may start, or another rule than `kind` holds it back."""
        hold = self.scheduler.why_not()
        return hold is None or hold.kind != kind or self._finished()

    async def _adjust_limit(self) -> None:
        """Let more or fewer episodes run at once, as the engine keeps up with them."""
        while True:
            await self.changed.wait_for(lambda: self._finished() or self.admission is not None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.changed.wait_for(self._finished)
            if self._finished():
                return
            admission = self.admission
            if admission is None:  # the limit was set in the meantime
                continue
            num_evaluated, total = self.dispatcher.evaluated.progress()
            if num_evaluated < total:
                admission.restart()
                continue
            hold, in_flight = self.scheduler.why_not(), self.buffer.ledger.in_flight
            is_held = hold is not None and hold.kind == "max_in_flight"
            totals = self.dispatcher.worker.activity()
            admission.places = self.versions.engine.capabilities.places
            if admission.look(self.clock.monotonic(), totals, in_flight, is_held=is_held):
                self.limit(admission.limit, admission.reason)

    async def _train(self, policy: str, loops: asyncio.TaskGroup) -> None:
        while True:
            # A policy that has taken its last step waits here as well, because `change` may give it more.
            await self.changed.wait_for(lambda: self._finished() or self.scheduler.may_step(policy))
            if self._finished():
                return
            if not await self._step(policy):
                continue
            step = self.board.step(policy)
            self.dispatcher.drop_frozen()
            self.dispatcher.resume_unfinished()
            if _is_due(step, self.plan.checkpoint_every) and not self.scheduler.phases.is_over(policy):
                await self._checkpoint()
            evaluates = self.evaluator.tasks and _is_due(step, self.plan.evaluate_every)
            phases = self.scheduler.phases
            if evaluates and not phases.is_over(policy) and not self._finished():
                self._evaluate(policy, loops)

    def _resume_evaluations(self, loops: asyncio.TaskGroup) -> None:
        """Take up the evaluation that the previous process did not finish. Begin those that it had not begun because
        one policy was ahead of the others."""
        versions, training = self._versions(), self._in_training()
        due = [policy for policy, version in versions.items() if _is_due(version.step, self.plan.evaluate_every)]
        if (unfinished := self.evaluator.unfinished(versions, is_due=len(due) == len(versions))) is not None:
            loops.create_task(self.evaluator.take_up(unfinished, self._is_stopping), name="evaluate again")
            return
        for policy in due:
            if policy in training and any(self.board.step(other) < self.board.step(policy) for other in training):
                self._evaluate(policy, loops)

    def _in_training(self) -> set[str]:
        """Return the policies that take further steps in this phase."""
        phases = self.scheduler.phases
        frozen_policies = phases.frozen()
        return {name for name in self.board.trainable if not phases.is_over(name) and name not in frozen_policies}

    def _evaluate(self, policy: str, loops: asyncio.TaskGroup) -> None:
        """Evaluate the current version of a policy beside training, once the others that train are as far."""
        training = self._in_training()
        evaluation = self.evaluator.in_background(policy, self.board.trainable, training, self._is_stopping)
        loops.create_task(evaluation, name=f"evaluate {self.board.current(policy)}")

    async def _step(self, policy: str) -> bool:
        """Take one optimizer step and serve its version; returns False if the step was skipped."""
        ready_units = self._assign_credit(policy, self.scheduler.pop_units(policy))
        self.scheduler.stepping.add(policy)
        try:
            async with self._trainer_free:
                self._bottleneck.places = self.versions.engine.capabilities.places
                self._bottleneck.step_begins()
                with self.activity.during("step"):
                    taken = await self._step_with(policy, ready_units)
                self._bottleneck.step_ended()
                return taken
        finally:
            self._open_steps.pop(policy, None)
            self.scheduler.stepping.discard(policy)
            self.changed.notify()

    def _assign_credit(self, policy: str, ready_units: Sequence[ReadyUnit]) -> Sequence[ReadyUnit]:
        """Return the units of a step, with advantages of an estimator over the step if the run uses one."""
        if self.roles is not None:
            samples = [(ready.environment, ready.unit, ready.trajectories) for ready in ready_units]
            units = self.roles.credited(self.board.next_version(policy), samples, self.board.lines)
        elif self.step_advantages is not None:
            units = self.step_advantages.credited(policy, [(ready.environment, ready.unit) for ready in ready_units])
        else:
            return ready_units
        return [ready._replace(unit=unit) for ready, unit in zip(ready_units, units, strict=True)]

    async def _step_with(self, policy: str, ready_units: Sequence[ReadyUnit]) -> bool:
        """Take the step while holding the trainer until its version is current, so that no checkpoint falls between.

        The way of a version, in this order (docs/explanation/follow_one_update.md follows it through the files):

        1. optimizer step: the trainer applies the gradient (`_train_on`).
        2. write: the trainer writes the weights as files (`publish`).
        3. journal: the journal records the version and the step on disk (`publish`).
        4. offer: the engine receives the version to serve (`ServedVersions.make_current`).
        5. confirmed: the engine, or one replica of it, serves the version; otherwise the one before it keeps serving.
        6. admit: the units are consumed, so new episodes may start, and the board names the version current.
        """
        version = self.board.next_version(policy)
        batch = TrainBatch(
            step_id=version.step,
            policy=policy,
            units=tuple(ready.unit for ready in ready_units),
            normalizer=self._normalizer(policy, ready_units),
            lines=self.board.lines,
        )
        waited_s = self._metrics.before_step(policy)
        self._open_steps[policy] = batch.step_id
        try:
            report = await self._train_on(batch)
        except NonFiniteError as error:
            self._skip(policy, ready_units, error)
            return False
        except UntrainableUnitsError as error:
            self._drop_untrainable(policy, ready_units, error)
            return False
        self._num_skipped[policy] = self._untrainable[policy] = 0
        step = StepRow(report=report, version=version, batch=batch)
        with self.activity.during("publishing"):
            weights = await publish(self.trainer, self.store, version, self.board.current(policy), step)
            if self.roles is not None:
                self.roles.commit_step(policy)
            await self.versions.make_current(weights)
        # Consume only now: it frees capacity for episodes, which should begin with the new version.
        self.buffer.consume(ready_units)
        metrics = self._metrics.of_step(report, ready_units, waited_s)
        if self.admission is not None:
            metrics["episodes/limit"] = float(self.admission.limit)
        metrics |= self._adjust_staleness(policy, metrics["step/seconds"])
        metrics |= {"run/lineage": float(version.lineage), "run/code_changes": float(self.code_changes)}
        measured_versions = self.best.sampled_by(self.board, (ready.sampled_by for ready in ready_units))
        self.board.advance(version)
        self.store.record(MetricRow(policy, version.step, metrics))
        self.best.record_metrics(policy, metrics, measured_versions)
        self.observer.on_step(policy, version.step, metrics)
        await self.opponents.add_version(weights)
        await self.retention.prune(weights, self._needed_versions())
        return True

    def _adjust_staleness(self, policy: str, seconds: float) -> Mapping[str, float]:
        """Time a step of a policy, if the run chooses its bound on staleness; returns the metrics of the choice."""
        controller = self.staleness.get(policy)
        if controller is None:
            return {}
        evaluated = self.dispatcher.evaluated
        num_ended, total = evaluated.progress()
        is_disturbed = num_ended < total or evaluated.number != self._last_evaluation.get(policy, 0)
        self._last_evaluation[policy] = evaluated.number
        if not is_disturbed and not self.scheduler.phases.frozen() and controller.step_ended(seconds):
            self.scheduler.bound(policy, controller.bound)
            self.say(f"policy {policy}: {controller.reason}")
        return controller.metrics()

    def _normalizer(self, policy: str, ready_units: Sequence[ReadyUnit]) -> float:
        """Return the divisor of the step's loss, in tokens; the trainer computes that of a mean over sequences."""
        if self.plan.tokens_per_unit:
            return float(self.plan.step_size[policy] * self.plan.tokens_per_unit)
        num_sampled = sum(trajectory.tokens for ready in ready_units for trajectory in ready.trajectories)
        return float(max(1, num_sampled))

    async def _watch(self) -> None:
        """End the run with a reason when nothing runs, nothing can start, and a policy still waits."""
        await self.changed.wait_for(lambda: self._finished() or self.scheduler.is_starved() is not None)
        if self._finished():
            return
        if (starved := self.scheduler.is_starved()) is not None:
            raise CheckFailedError(
                f"policy {starved} will get no more units: its seats never act, or "
                f"are never rewarded. Last dropped episode: {self.dispatcher.worker.last_failure or 'none'}"
            )

    def _skip(self, policy: str, ready_units: Sequence[ReadyUnit], error: NonFiniteError) -> None:
        """Drop the units of a step whose gradient is not finite; `SKIPPED_IN_A_ROW` such steps end the run."""
        for drop in self.buffer.drop(ready_units, "nonfinite_gradient"):
            self.store.record(drop)
        self._num_skipped[policy] += 1
        message = (
            f"{error}. Skipped steps of the policy in a row: {self._num_skipped[policy]}; "
            f"{SKIPPED_IN_A_ROW} end the run"
        )
        if self._num_skipped[policy] == SKIPPED_IN_A_ROW:
            raise NonFiniteError(message) from error
        self.tell(message)

    def _drop_untrainable(self, policy: str, ready_units: Sequence[ReadyUnit], error: UntrainableUnitsError) -> None:
        """Drop the units of a step whose rows cannot be trained; put the others back."""
        why = {(episode, attempt): why for episode, attempt, why in error.units}
        dropped_units = [ready for ready in ready_units if (ready.unit.episode_id, ready.unit.attempt) in why]
        other_units = [ready for ready in ready_units if (ready.unit.episode_id, ready.unit.attempt) not in why]
        self._untrainable[policy] += len(dropped_units)
        # this many in a row, with no step in between, end the run
        if not dropped_units or self._untrainable[policy] > 4096:
            raise error
        for drop in self.buffer.drop(dropped_units, "untrainable"):
            self.store.record(drop)
        self.buffer.put_back(policy, other_units)
        first = dropped_units[0].unit
        self.tell(
            f"{plural(len(dropped_units), 'unit')} of {policy} dropped as `untrainable`, and the run continues; the "
            f"first is of episode {first.episode_id}: {why[first.episode_id, first.attempt]}"
        )

    async def _train_on(self, batch: TrainBatch) -> StepReport:
        with self.activity.during("training"):
            await self.store.flush()  # the trainer reads the entries of the episodes from disk
            await self.trainer.forward_backward(batch)
            return await self.trainer.optim_step(batch.policy, batch.step_id)

    async def _checkpoint(self) -> None:
        """Write a consistent cut: while the trainer saves, no policy is between a step and its version."""
        if self.checkpoints is None:
            return
        async with self._trainer_free:
            versions = self._versions()
            steps = {policy: version.step for policy, version in versions.items()}
            if steps == self._checkpoint_steps:
                return
            self.buffer.ledger.check()
            measured = self.best.measured  # an evaluation that ends meanwhile counts for the next checkpoint
            weights = self._weights_of_checkpoint()
            with self.activity.during("step"), self.activity.during("checkpoint"):
                await self.store.flush()
                await self.retention.make_durable(weights)
                await self.checkpoints.write(
                    self.trainer,
                    versions,
                    self.roles,
                    measured,
                    self.opponents.drawn_from(),
                )
                await self.retention.keep_for(self.checkpoints, self.board)
            self._checkpoint_steps = steps
        self.journal_retention.start_pruning(self.stopping.fail)

    # --- ending -----------------------------------------------------------------------------------------------------

    def _versions(self) -> dict[str, PolicyVersion]:
        return {policy: self.board.current(policy) for policy in self.board.trainable}

    def _needed_versions(self) -> set[PolicyVersion]:
        """Return the older versions that this process needs; `VersionRetention` knows what checkpoints need."""
        return {*self.versions.pinned(), *self.best.needed(self.board)}

    def _weights_of_checkpoint(self) -> list[WeightsRef]:
        """Return the published versions that a resumed run may load besides its checkpoint: the best ones and
        opponents. Adapters are durable once published."""
        opponents = chain.from_iterable(pool.served for pool in self.opponents.pools.values())
        versions = {*self.best.needed(self.board), *opponents}
        known_weights = map(self.store.published, versions)
        return [weights for weights in known_weights if weights is not None]

    def _is_stopping(self) -> bool:
        return self.stopping.is_requested

    def _finished(self) -> bool:
        # Keep the first reason, because later values may no longer meet the condition.
        self.ended_early = self.ended_early or self.best.why_stop()
        if self.drained_by and self.ended_early is None and self.scheduler.is_starved() is not None:
            self.ended_early = f"drained by {self.drained_by}"
        # Keep the end too: some of the loops have returned by the time that `change` sets a later last step.
        self._is_over = self._is_over or all(map(self.scheduler.phases.is_over, self.board.trainable))
        return self.stopping.is_requested or self.ended_early is not None or self._is_over

    async def _drain(self) -> None:
        """Let training episodes end for a while, then cut all. Held-out episodes are not waited for."""
        with contextlib.suppress(TimeoutError):
            drain_s = 0.0 if self.paused_by else min(DRAIN_S, self.plan.stop_seconds / 2)  # parked episodes do not end
            async with asyncio.timeout_at(self.stopping.requested_at + drain_s):
                await self.changed.wait_for(lambda: not self.dispatcher.in_flight.count("train"))
        await self.dispatcher.worker.cancel()

    def _drop_ready(self) -> None:
        for policy in self.board.trainable:
            leftover: list[ReadyUnit] = self.buffer.pop_ready(policy, self.buffer.ready(policy))
            for drop in self.buffer.drop(leftover, RUN_ENDED):
                self.store.record(drop)


def _is_due(step: int, every: int) -> bool:
    """Whether something done after `every` steps is due after this one; 0: never."""
    return bool(every) and step % every == 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
