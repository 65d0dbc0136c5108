"""The loop: episodes in, versions out. One loop, no modes: synchronous training is `max_staleness = 0`.

    tasks → admit → workers → buffer → credit → trainer → engine → board
              ▲                                              │
              └───────────── a new version makes room ◀──────┘

| loop          | consumes       | waits for                               | is unblocked by                    |
|---------------|----------------|-----------------------------------------|------------------------------------|
| `_admit`      | tasks          | in-flight bound, staleness bounds       | an episode's end, a policy's step  |
| episode       | engine, tools  | its own turns                           | nothing of the loop                |
| `_train`      | ready units    | step_size units, or all that can come   | a released group, closed admission |
| `_checkpoint` | nothing        | the trainer to be between two steps     | the step's end                     |
| evaluation    | held-out tasks | the engine, behind training episodes    | nothing of the loop                |
| `_watch`      | nothing        | nothing that can move any more          | the end of training                |

To follow one episode: the environment's `run` → `environment/base.py` → `core/records.py` →
`rollout/runner.py` → `orchestrator/buffer.py` → `credit/samples.py` → `learn/trainer.py` → `learn/losses.py`
(docs/follow_one_episode.md).

Only headers pass through here. Errors no episode can be blamed for end the run through `fail`; everything else
stays where it happened.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentrl.core.clock import Clock
from agentrl.core.errors import CheckFailedError, NonFiniteError, UntrainableUnitsError
from agentrl.core.ports import Engine, Observer, Trainer
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.training_records import StepReport, TrainBatch
from agentrl.core.words import plural
from agentrl.credit.role_means import RoleMeans
from agentrl.journal.port import JournalStore, StepRow
from agentrl.observe.status import Status
from agentrl.orchestrator.buffer import EpisodeBuffer, ReadyUnit
from agentrl.orchestrator.choice import Choice
from agentrl.orchestrator.curriculum import Curriculum
from agentrl.orchestrator.dispatch import Dispatcher
from agentrl.orchestrator.evaluation import Evaluator
from agentrl.orchestrator.manifest import CheckpointWriter
from agentrl.orchestrator.opponents import Opponents
from agentrl.orchestrator.retention import JournalRetention, VersionRetention
from agentrl.orchestrator.scheduler import Demand, Scheduler
from agentrl.orchestrator.signal import Signal
from agentrl.orchestrator.step_metrics import StepMetrics
from agentrl.orchestrator.versions import PolicyBoard, publish

DRAIN_S = 5.0
"""After a stop was asked for, how long episodes in flight may still end by themselves, in seconds."""


SKIPPED_IN_A_ROW = 3
"""Steps of a policy skipped one after another, before the run gives up."""
UNTRAINABLE_IN_A_ROW = 4096
"""Units of a policy that cannot be trained, with no step in between, before the run gives up."""

NEW_OBJECTS = 50_000
"""How many more containers there are before a run looks for cyclic garbage among the newest (Python's own: 700)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run is to do, as far as the loop is concerned."""

    step_size: Mapping[str, int]
    normaliser: Mapping[str, float]
    demands: Sequence[Demand]
    """What a root group brings, group by group, and again from the first."""
    evaluate_every: int = 0
    checkpoint_every: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    interrupted: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Orchestrator:
    """Wires nothing, owns no policy: moves headers between parts that do not know each other."""

    plan: Plan
    curriculum: Curriculum
    dispatcher: Dispatcher
    scheduler: Scheduler
    buffer: EpisodeBuffer
    board: PolicyBoard
    trainer: Trainer
    engine: Engine
    store: JournalStore
    checkpoints: CheckpointWriter | None
    signal: Signal
    clock: Clock
    observer: Observer
    evaluator: Evaluator
    retention: VersionRetention
    journal_retention: JournalRetention
    opponents: Opponents
    choice: Choice
    weights: dict[str, WeightsRef]
    """Newest published weights of each trainable policy."""
    roles: RoleMeans | None = None
    """What a step's rewards are compared with, where that is not their groups."""
    tell: Callable[[str], None] = lambda line: None
    """Takes a line for people."""
    code_changes: int = 0
    """See `run/code_changes` of the metrics."""
    outcome: Outcome = field(default_factory=Outcome)
    _trainer_free: asyncio.Lock = field(default_factory=asyncio.Lock)
    _failure: asyncio.Future[None] | None = None
    ended_early: str | None = None
    """Why a metric ended the run before its last step, in words."""
    _stopping: bool = False
    _checkpointed: Mapping[str, int] = field(default_factory=dict)
    _skipped: Counter[str] = field(default_factory=Counter)
    _untrainable: Counter[str] = field(default_factory=Counter)
    _metrics: StepMetrics = field(init=False)
    _phase: str = "starting"
    _stepping: dict[str, int] = field(default_factory=dict)
    """Steps that are being taken now, by policy."""

    def __post_init__(self) -> None:
        self._metrics = StepMetrics(
            engine=self.engine,
            dispatcher=self.dispatcher,
            buffer=self.buffer,
            board=self.board,
            clock=self.clock,
            max_lag=self.scheduler.max_lag,
        )

    # --- from outside -----------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Train until every policy has taken its steps, a metric ends it, or `stop` is called.

        Raises:
            AgentRLError: what `fail` was given, or what a loop met; the newest checkpoint stays valid.
        """
        self._failure = asyncio.get_running_loop().create_future()
        with _rare_collections():
            main = asyncio.get_running_loop().create_task(self._main(), name="main")
            try:
                await asyncio.wait({main, self._failure}, return_when=asyncio.FIRST_COMPLETED)
                if not main.done():
                    self._failure.result()
                await main
            finally:
                if not main.done():
                    main.cancel()
                    await asyncio.wait({main})
                await self.dispatcher.worker.cancel()
                await self.journal_retention.end()
                self._failure.cancel()
        return self.outcome

    def stop(self) -> None:
        """Stop admitting, let steps in progress end, write a checkpoint, return from `run`."""
        self._stopping = True
        self.outcome.interrupted = True
        self.signal.notify()

    def status(self) -> Status:
        """Where the run stands between steps: counts, and who waits for whom. Cheap: asked every second."""
        ledger = self.buffer.ledger
        evaluated, of = self.dispatcher.evaluated()
        return Status(
            phase=self._phase,
            progress=(evaluated, of) if evaluated < of else None,
            waits=self._waits() if self._phase == "training" else (),
            in_flight=ledger.in_flight,
            ready=ledger.ready,
            trained=ledger.trained,
            dropped=dict(ledger.dropped),
            engine_busy_s=self.engine.busy_seconds(),
        )

    def _waits(self) -> tuple[str, ...]:
        waits = []
        for policy, size in self.plan.step_size.items():
            whose = "trainer" if len(self.plan.step_size) == 1 else f"trainer of {policy}"
            if policy in self._stepping:
                waits.append(f"{whose} works on step {self._stepping[policy]}")
            elif policy in self.scheduler.phases.frozen():
                waits.append(f"{whose} waits for its phase")
            elif not self.scheduler.phases.is_over(policy):
                waits.append(f"{whose} waits for episodes: {self.buffer.ready(policy)} of {size} units are ready")
        reason = self.scheduler.why_not(self.demand())
        waits.append("admission is open" if reason is None else f"admission waits for {reason}")
        return tuple(waits)

    def fail(self, error: BaseException) -> None:
        """End the run with an error that no episode can be blamed for."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    # --- the loops --------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        self._phase = "evaluating before training"
        if self.evaluator.tasks and max(map(self.board.step, self.board.trainable), default=0) == 0:
            await self.evaluator.now(self._versions(), self._is_stopping)
        self._phase = "training"
        self._metrics.start()
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._admit(), name="admit")
                loops.create_task(self._watch(), name="watch")
                for policy in self.board.trainable:
                    loops.create_task(self._train(policy, loops), name=f"train {policy}")
        except BaseExceptionGroup as group:
            raise _first(group) from None
        self._phase = "ending: episodes in flight"
        if self._stopping:
            await self._drain()
        else:
            await self.dispatcher.end_running("run_ended")
            self._drop_leftovers()
        self._phase = "writing the last checkpoint"
        await self._checkpoint()
        if not self._stopping:
            await self.journal_retention.wait()
        self._phase = "evaluating after training"
        if self.evaluator.tasks and not self._stopping:
            await self.evaluator.now(self._versions(), self._is_stopping)
        await self.store.flush()

    async def _admit(self) -> None:
        held_by = ""
        while not self._finished():
            while not self._finished() and self.scheduler.may_admit(self.demand()):
                self.dispatcher.admit_group(self.curriculum.task(self.dispatcher.next_group), held_by)
                held_by = ""
            why, since = self.scheduler.why_not(self.demand()), self.clock.monotonic()
            await self.signal.wait_for(lambda: self._finished() or self.scheduler.may_admit(self.demand()))
            held_by = f"{self.clock.monotonic() - since:.3g} s for {why}"

    def demand(self) -> Demand:
        """What the next root group brings."""
        return self.plan.demands[self.dispatcher.next_group % len(self.plan.demands)]

    async def _train(self, policy: str, loops: asyncio.TaskGroup) -> None:
        plan, phases = self.plan, self.scheduler.phases
        while not phases.is_over(policy):
            await self.signal.wait_for(lambda: self._finished() or self.scheduler.may_step(policy, self.demand()))
            if self._finished():
                return
            if not await self._step(policy):
                continue
            step = self.board.step(policy)
            self.dispatcher.drop_frozen()
            is_full = await self.journal_retention.stepped(self._steps_left())
            if (is_full or (plan.checkpoint_every and step % plan.checkpoint_every == 0)) and not phases.is_over(
                policy
            ):
                await self._checkpoint()
                if is_full:
                    await self.journal_retention.check()
            evaluates = self.evaluator.tasks and plan.evaluate_every and step % plan.evaluate_every == 0
            if evaluates and not phases.is_over(policy) and not self._finished():
                evaluation = self.evaluator.beside(self.weights, self._is_stopping)
                loops.create_task(evaluation, name=f"evaluate {self.board.current(policy)}")
        self.signal.notify()

    async def _step(self, policy: str) -> bool:
        """Take one optimizer step and serve its version; False where it was skipped."""
        taken = self._credited(policy, self.scheduler.take(policy))
        self.scheduler.stepping.add(policy)
        try:
            async with self._trainer_free:
                return await self._step_with(policy, taken)
        finally:
            self.scheduler.stepping.discard(policy)
            self.signal.notify()

    def _credited(self, policy: str, taken: Sequence[ReadyUnit]) -> Sequence[ReadyUnit]:
        """The units of a step, compared with what their roles used to get, where the run asks for that."""
        if self.roles is None:
            return taken
        units = self.roles.credited(policy, [(ready.environment, ready.unit) for ready in taken])
        return [ready._replace(unit=unit) for ready, unit in zip(taken, units, strict=True)]

    async def _step_with(self, policy: str, taken: Sequence[ReadyUnit]) -> bool:
        """The trainer is ours until the version is current, so that a checkpoint never falls in between."""
        version = self.board.next_version(policy)
        batch = TrainBatch(
            step_id=version.step,
            policy=policy,
            units=tuple(ready.unit for ready in taken),
            normaliser=self.plan.normaliser[policy],
        )
        waited = self._metrics.before_step(policy)
        self._stepping[policy] = batch.step_id
        try:
            report = await self._train_on(batch)
        except NonFiniteError as error:
            self._skip(policy, taken, error)
            return False
        except UntrainableUnitsError as error:
            self._leave_out(policy, taken, error)
            return False
        finally:
            del self._stepping[policy]
        self._skipped[policy] = self._untrainable[policy] = 0
        step = StepRow(report=report, version=version, batch=batch)
        weights = await publish(self.trainer, self.store, version, self.board.current(policy), step)
        if self.roles is not None:
            self.roles.taken(policy)
        self.weights[policy] = weights
        await self.engine.update(weights, keep=self.scheduler.keeps(policy))
        self.buffer.consume(taken)  # not before: it makes room for episodes, which are to begin with the new version
        metrics = self._metrics.of_step(report, taken, waited)
        metrics |= {"run/lineage": float(version.lineage), "run/code_changes": float(self.code_changes)}
        self.board.advance(version)
        if (outdated := self.scheduler.outdated(policy)) is not None:
            self.engine.release(outdated)
        self.dispatcher.resume_held()
        self.store.record_metrics(policy, version.step, metrics)
        self.choice.hear(policy, metrics, self._versions())
        self.observer.on_step(policy, version.step, metrics)
        await self.opponents.published(weights)
        await self.retention.published(weights, self._needed())
        return True

    async def _watch(self) -> None:
        """Nothing runs, nothing can start, and yet a policy waits: end the run with the reason."""
        await self.signal.wait_for(lambda: self._finished() or self.scheduler.is_starved(self.demand()) is not None)
        if not self._finished():
            raise CheckFailedError(
                f"no units can come any more for {self.scheduler.is_starved(self.demand())}: its seats never act, or "
                f"are never rewarded. Last dropped episode: {self.dispatcher.worker.last_failure or 'none'}"
            )

    def _skip(self, policy: str, taken: Sequence[ReadyUnit], error: NonFiniteError) -> None:
        """A step whose gradient is not finite is not taken; its units are dropped, and a row of them ends the run."""
        for drop in self.buffer.drop(taken, "nonfinite_gradient"):
            self.store.record_drop(drop.episode_id, drop.attempt, drop.policy, drop.reason)
        self._skipped[policy] += 1
        if self._skipped[policy] == SKIPPED_IN_A_ROW:
            raise error

    def _leave_out(self, policy: str, taken: Sequence[ReadyUnit], error: UntrainableUnitsError) -> None:
        """Drop the units of a step whose rows cannot be trained; the others wait for the step again."""
        why = {(episode, attempt): why for episode, attempt, why in error.units}
        lost = [ready for ready in taken if (ready.unit.episode_id, ready.unit.attempt) in why]
        rest = [ready for ready in taken if (ready.unit.episode_id, ready.unit.attempt) not in why]
        self._untrainable[policy] += len(lost)
        if not lost or self._untrainable[policy] > UNTRAINABLE_IN_A_ROW:
            raise error
        for drop in self.buffer.drop(lost, "untrainable"):
            self.store.record_drop(drop.episode_id, drop.attempt, drop.policy, drop.reason)
        self.buffer.give_back(policy, rest)
        first = lost[0].unit
        self.tell(
            f"{plural(len(lost), 'unit')} of {policy} dropped as `untrainable`, and the run goes on; the first is of "
            f"episode {first.episode_id}: {why[first.episode_id, first.attempt]}"
        )

    async def _train_on(self, batch: TrainBatch) -> StepReport:
        await self.trainer.forward_backward(batch)
        return await self.trainer.optim_step(batch.policy, batch.step_id)

    async def _checkpoint(self) -> None:
        """A consistent cut: no policy is between a step and its version while the trainer saves."""
        if self.checkpoints is None:
            return
        async with self._trainer_free:
            versions = self._versions()
            steps = {policy: version.step for policy, version in versions.items()}
            if steps == self._checkpointed:
                return
            self.buffer.ledger.check()
            await self.store.flush()
            await self.checkpoints.write(
                self.trainer,
                versions,
                self.buffer.ledger,
                self.roles,
                self.choice.measured,
                self.opponents.drawn_from(),
            )
            self.choice.saved()
            self.opponents.saved()
            self._checkpointed = steps
        self.journal_retention.checkpointed(self.fail)

    # --- ending -----------------------------------------------------------------------------------------------------

    def _versions(self) -> dict[str, PolicyVersion]:
        return {policy: self.board.current(policy) for policy in self.board.trainable}

    def _needed(self) -> set[PolicyVersion]:
        """Older versions whose files must stay for now."""
        return {*self.evaluator.pinned, *self.opponents.needed(), *self.choice.needed()}

    def _steps_left(self) -> int:
        phases = self.scheduler.phases
        return sum(phases.steps[policy] - self.board.step(policy) for policy in self.board.trainable)

    def _is_stopping(self) -> bool:
        return self._stopping

    def _finished(self) -> bool:
        self.ended_early = self.ended_early or self.choice.why_stop()  # for good: a later value may be another
        if self._stopping or self.ended_early is not None:
            return True
        return all(map(self.scheduler.phases.is_over, self.board.trainable))

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await self.dispatcher.worker.drain()
        except TimeoutError:
            await self.dispatcher.worker.cancel()

    def _drop_leftovers(self) -> None:
        for policy in self.board.trainable:
            leftover: list[ReadyUnit] = self.buffer.take(policy, self.buffer.ready(policy))
            for drop in self.buffer.drop(leftover, "run_ended"):
                self.store.record_drop(drop.episode_id, drop.attempt, drop.policy, drop.reason)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Within: cyclic garbage is looked for more rarely, and all objects are walked every million of new ones.

    What ends in a run is freed by its reference counts: an episode leaves no circle behind. 10,000 episodes in flight
    are over half a million objects, and to walk them again whenever they have grown by a quarter is a third of what it
    costs to resume them.
    """
    before = gc.get_threshold()
    if 0 < before[0] < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
