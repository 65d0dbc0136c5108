"""Wires parts into an `Orchestrator`, for a real run, a test under the simulated loop, or a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.app.plan import RunPlan
from agentrl.app.policies import (
    check_engine_capabilities,
    lease_limits,
    pinned_policy_step_lags,
    rollout_settings,
)
from agentrl.app.scoring import make_scorers
from agentrl.cluster.worker_pool import WorkerPool
from agentrl.config.plans import RolloutPlan
from agentrl.config.policies import OpponentPoolPolicy, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import BestConfig, CreditConfig, EvaluationConfig, JournalConfig
from agentrl.core import ids
from agentrl.core.clock import Clock
from agentrl.core.files import LOCAL, Disk
from agentrl.core.ports import ChatFormat, Engine, EpisodeHost, Observer, Trainer
from agentrl.core.records import EpisodeHeader, EpisodeSpec, Lines, PolicyVersion, Task
from agentrl.credit.baselines import MeanAtStep, RoleMeans, SeatRole
from agentrl.credit.estimators import AdvantageEstimator, reward_estimator
from agentrl.credit.release import FirstFinishersRelease, GroupReleasePolicy, GroupReleaseRule, WholeGroupRelease
from agentrl.credit.step_credit import OptimizerStepCreditAssigner
from agentrl.environment.environment import Environment, TaskSource
from agentrl.environment.mixture import root_environments
from agentrl.environment.registry import name_of
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import JournalStore
from agentrl.journal.run_log import RunJournal, RunLog, RunStart
from agentrl.observe.bottleneck import ActivityClock
from agentrl.observe.metrics import TIMED_STEP
from agentrl.observe.run_directory import run_argument
from agentrl.orchestrator.admission_limit import AdmissionController
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.checkpoints import CheckpointWriter, JournalRetention, VersionRetention
from agentrl.orchestrator.child_episodes import ChildEpisodes
from agentrl.orchestrator.child_reservations import ChildUnitReservations
from agentrl.orchestrator.dispatch import ChangeCondition, Dispatcher
from agentrl.orchestrator.episode_specs import EpisodeNumbers, EpisodeSpecs
from agentrl.orchestrator.evaluation import Evaluator, HeldOutSplit, held_out_digest
from agentrl.orchestrator.group_scores import GroupScoring
from agentrl.orchestrator.host import DispatchingHost
from agentrl.orchestrator.in_flight import EpisodesInFlight
from agentrl.orchestrator.loop import Orchestrator, RunStop, TrainingLoopSettings
from agentrl.orchestrator.opponents import OpponentPool, OpponentPools
from agentrl.orchestrator.scheduler import (
    BoundedStaleness,
    FreezePhase,
    FreezeSchedule,
    Scheduler,
    SynchronousBatchScheduler,
)
from agentrl.orchestrator.staleness import StalenessController
from agentrl.orchestrator.tasks import MEMORY_SIZE, Curriculum, GroupResult, ProposalNoveltyTracker
from agentrl.orchestrator.tree_leases import TreeLeases
from agentrl.orchestrator.versions import (
    NOT_MEASURED,
    BestCheckpointTracker,
    BestRunningMean,
    PolicyBoard,
    ServedVersions,
)
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.worker import AsyncioWorker
from agentrl.sandbox.sandbox import choose_driver

TURN_LOG = "0"
"""Name of the turn log of a worker in this process."""


REWARD_SETTINGS = (
    *("environment.options", "model", "sampling.", "evaluation.sampling", "seats", "scorers", "sandbox"),
    *("engine.max_context", "episode_timeout_s", "credit.reward_weights"),
)
"""Prefixes of settings on which rewards depend; policies have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts that `assemble_orchestrator` wires together."""

    served: ServedVersions
    """Versions served when the run begins: the published weights of all policies that learn."""
    trainer: Trainer
    chat_format: ChatFormat
    store: RunJournal
    observer: Observer
    clock: Clock
    tasks: TaskSource
    past: PastRun
    """What the run did before, as `store` records it."""
    is_current_task: Callable[[Task], bool] = lambda task: True
    """Whether a recorded task still has the same data."""
    refusal: Callable[[EpisodeSpec], str] = lambda spec: ""
    """Returns why an episode whose task only the journal names cannot be played; empty if it can."""
    held_out: Sequence[HeldOutSplit] = ()
    checkpoints: CheckpointWriter | None = None
    versions: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """Starting version of each policy; (0, 0) where absent."""
    opponents: Mapping[str, Sequence[PolicyVersion]] = field(default_factory=dict)
    """Pinned versions for each past policy, oldest first; see `recovery.start_opponent_pools`."""
    estimator: AdvantageEstimator | None = None
    """Advantage estimator, if it takes a `Group`; see `load_user_functions`."""
    compares_in_step: bool = False
    """As in `UserFunctions`."""
    role_means: Mapping[SeatRole, Sequence[MeanAtStep]] = field(default_factory=dict)
    """Mean reward of each role, from the checkpoint."""
    running_best: BestRunningMean = NOT_MEASURED
    """Best running mean, from the checkpoint."""
    disk: Disk = LOCAL
    """The disk of published versions."""
    workers: WorkerPool | None = None
    """Worker processes that play the episodes; None: this process plays them."""
    tell: Callable[[str], None] = lambda line: None
    """Receives a warning for the user."""
    say: Callable[[str], None] = lambda line: None
    """Receives information for the user."""


def assemble_orchestrator(plan: RunPlan, parts: RunParts) -> Orchestrator:
    """Build a run's loop in its event loop, and submit the episodes that a previous process left (`restore`).

    Raises:
        ConfigError: sections contradict each other.
    """
    config, trained = plan.settings, plan.trained
    check_engine_capabilities(plan.engine, parts.served.engine.capabilities)
    max_in_flight, admission = _admission(plan, parts.served.engine)
    condition, activity, size = ChangeCondition(), ActivityClock(parts.clock), config.credit.group_size
    stop = RunStop(condition)
    buffer = _buffer(trained, config, parts)
    versions = {name: parts.versions.get(name, PolicyVersion(name, 0, 0)) for name in config.policies}
    board = PolicyBoard(versions, trained, parts.store.lines())
    scoring = _group_scoring(plan.rollout, parts, condition, activity, stop)
    in_flight = EpisodesInFlight(activity, scoring)
    numbers = EpisodeNumbers(group_size=size)
    reservations = ChildUnitReservations(buffer.trainable, plan.rollout.seats.policy_of)
    opponents = _opponents(config.of_kind(OpponentPoolPolicy), config.seed, parts, buffer, in_flight, board.lines)
    scheduler = _scheduler(
        *(plan, buffer, reservations, opponents, board),
        numbers=numbers,
        in_flight=in_flight,
        max_in_flight=max_in_flight,
    )
    dispatcher = Dispatcher(
        specs=EpisodeSpecs(
            environment=plan.environment,
            policy_of=plan.rollout.seats.policy_of,
            run_seed=config.seed,
            numbers=numbers,
            admission=scheduler,
        ),
        in_flight=in_flight,
        children=ChildEpisodes(in_flight),
        reservations=reservations,
        memory=ProposalNoveltyTracker(MEMORY_SIZE, group_size=size, visible_range=scheduler.seen()),
        admission=scheduler,
        buffer=buffer,
        store=parts.store,
        changed=condition,
        fail=stop.fail,
        tell=parts.tell,
        run_name=run_argument(Path(config.directory) / config.name),
        group_scoring=scoring,
        lines=board.lines,
        leases=TreeLeases(
            served=parts.served, published=parts.store.published, limits=lease_limits(trained), changed=condition
        ),
    )
    curriculum = Curriculum(
        parts.tasks,
        seed=config.seed,
        selection=config.environment.selection,
        visible=scheduler.visible_groups,
        is_current=parts.is_current_task,
    )
    staleness = _staleness(plan, parts.store, board)
    buffer.on_group = partial(_record_group, curriculum, size)
    rewards_since = _rewards_since(parts.store.starts())
    best = _best_checkpoint_tracker(config.best, config.evaluation, parts.held_out, trained, parts.running_best)
    if parts.running_best.versions and not best.measured.versions and best.metric:
        chosen = ", ".join(map(str, parts.running_best.versions.values()))
        parts.say(
            f"the best version is chosen again: {chosen} was chosen by another metric, or on other held-out tasks"
        )
    orchestrator = Orchestrator(
        plan=_loop_settings(plan),
        curriculum=curriculum,
        dispatcher=dispatcher,
        scheduler=scheduler,
        buffer=buffer,
        board=board,
        trainer=parts.trainer,
        versions=parts.served,
        store=parts.store,
        checkpoints=parts.checkpoints,
        changed=condition,
        stopping=stop,
        clock=parts.clock,
        observer=parts.observer,
        evaluator=Evaluator(
            held_out=parts.held_out,
            attempts=config.evaluation.attempts,
            dispatcher=dispatcher,
            versions=parts.served,
            store=parts.store,
            observer=parts.observer,
            changed=condition,
            best=best,
            clock=parts.clock,
            tell=parts.tell,
            lineage=max((version.lineage for version in versions.values()), default=0),
            rewards_since=rewards_since,
        ),
        retention=VersionRetention(
            keep=config.checkpoint.versions,
            # the lags of `best` are at least as large
            lags={**pinned_policy_step_lags(trained, deterministic=config.deterministic), **best.lags},
            disk=parts.disk,
        ),
        journal_retention=_journal_retention(config.journal, parts),
        opponents=opponents,
        best=best,
        roles=RoleMeans(parts.role_means) if config.credit.advantage.name == "role_mean" else None,
        step_advantages=_step_advantages(config.credit, parts.estimator),
        tell=parts.tell,
        say=parts.say,
        code_changes=sum(bool(start.code_changed) for start in parts.store.starts()),
        admission=admission,
        staleness=staleness,
        limit_workers=parts.workers.limit if parts.workers is not None else lambda count: None,
    )
    host = DispatchingHost(dispatcher)
    if parts.workers is not None:
        parts.workers.attach(host, parts.store, stop.fail)
        dispatcher.run(parts.workers)
    else:
        dispatcher.run(
            make_local_worker(
                *(plan.rollout, plan.environment, host, parts.served.engine, parts.chat_format),
                *(parts.store, parts.clock, stop.fail),
            )
        )
    dispatcher.begin_group, dispatcher.begin_version = curriculum.receive, board.start_at
    dispatcher.repinned = opponents.repinned
    dispatcher.resume(
        *(parts.past, curriculum.task),
        recorded=parts.store.recorded,
        refusal=parts.refusal,
        versions=versions.values(),
    )
    return orchestrator


def _journal_retention(journal: JournalConfig, parts: RunParts) -> JournalRetention:
    return JournalRetention(
        parts.store,
        parts.checkpoints,
        keep=journal.keep,
        disk=parts.disk,
    )


def _record_group(
    curriculum: Curriculum,
    group_size: int,
    spec: EpisodeSpec,
    headers: Sequence[EpisodeHeader],
) -> None:
    if spec.parent_id is None and spec.fork is None and headers:
        group = ids.root_episode_number(spec.episode_id) // group_size
        curriculum.record_group(GroupResult.of(group, spec.task, headers))


def change_orchestrator(orchestrator: Orchestrator, plan: RunPlan) -> None:
    """Give a running loop the settings of a plan that may change while it runs."""
    limit, admission = _admission(plan, orchestrator.versions.engine)
    if admission is not None and orchestrator.admission is not None:  # keep what it has learned
        limit, admission = orchestrator.admission.limit, orchestrator.admission
    orchestrator.change(
        _loop_settings(plan),
        max_in_flight=limit,
        admission=admission,
        steps=plan.trainer.steps,
    )


def _admission(plan: RunPlan, engine: Engine) -> tuple[int, AdmissionController | None]:
    """Return the number of episodes that may run at once, and the part that adjusts it; None if the configuration sets
    it.

    Raises:
        ConfigError: the number cannot be adjusted to the engine.
    """
    if plan.settings.max_in_flight != "auto":
        return plan.settings.max_in_flight, None
    admission = AdmissionController(engine.capabilities.places, max(demand.episodes for demand in plan.demands))
    return admission.limit, admission


def _staleness(plan: RunPlan, journal: RunLog, board: PolicyBoard) -> dict[str, StalenessController]:
    """Return the parts that choose the bounds on staleness which the configuration does not set."""
    controllers = {}
    for name, policy in plan.trained.items():
        if policy.max_staleness == "auto":
            controller = controllers[name] = StalenessController(plan.staleness[name])
            for bound in plan.staleness[name]:
                seconds = journal.recorded_metric(name, f"{TIMED_STEP}{bound}", board.step(name))
                if seconds is not None:
                    controller.record_time(bound, seconds)
    return controllers


def _loop_settings(plan: RunPlan) -> TrainingLoopSettings:
    return TrainingLoopSettings(
        step_size={name: policy.step_size for name, policy in plan.trained.items()},
        tokens_per_unit=plan.trainer.trainer.loss.tokens_per_unit,
        evaluate_every=plan.settings.evaluation.every,
        checkpoint_every=plan.settings.checkpoint.every,
        stop_seconds=plan.settings.stop_seconds,
    )


def _group_scoring(
    plan: RolloutPlan,
    parts: RunParts,
    condition: ChangeCondition,
    activity: ActivityClock,
    stop: RunStop,
) -> GroupScoring | None:
    """Make the part that scores groups; None if no scorer does, and no group that is not resolved was scored."""
    scorers = {name: scorer for name, scorer in plan.scorers.items() if scorer.per == "group"}
    if not scorers and not parts.past.num_scores:
        return None
    engine, chat_format = parts.served.engine, parts.chat_format
    settings = rollout_settings(plan, chat_format, engine.capabilities.max_context)

    def chat_format_of(policy: str) -> ChatFormat:
        policy_format = settings.policies.get(policy)
        return chat_format if policy_format is None else policy_format.chat_format

    return GroupScoring(
        scorers=make_scorers(scorers),
        scored=settings.scored,
        chat_format_of=chat_format_of,
        store=parts.store,
        weights=plan.credit.reward_weights,
        run_seed=plan.seed,
        clock=parts.clock,
        fail=stop.fail,
        on_release=condition.notify,
        activity=activity,
    )


def _opponents(
    policies: Mapping[str, OpponentPoolPolicy],
    seed: int,
    parts: RunParts,
    buffer: EpisodeBuffer,
    in_flight: EpisodesInFlight,
    lines: Lines,
) -> OpponentPools:
    pools = {
        name: OpponentPool(
            name=name,
            of=pool.of,
            every=pool.every,
            size=pool.size,
            choose=pool.choose,
            served=list(parts.opponents[name]),
        )
        for name, pool in policies.items()
    }
    return OpponentPools(
        pools=pools,
        versions=parts.served,
        run_seed=seed,
        pinned=in_flight.pinned,
        counts=buffer.counts,
        lines=lines,
    )


def _buffer(trained: Mapping[str, PolicyConfig], config: RunConfig, parts: RunParts) -> EpisodeBuffer:
    return EpisodeBuffer(
        trained,
        _release(trained, config, parts),
        drops_no_signal=config.credit.dynamic_sampling,
        whole_groups=parts.compares_in_step,
    )


def _release(trained: Mapping[str, PolicyConfig], config: RunConfig, parts: RunParts) -> GroupReleasePolicy:
    credit = config.credit
    if credit.release == "group":
        estimator = parts.estimator
        if estimator is None or estimator.mark.over == "step":
            name = "none" if estimator is not None else credit.advantage.name
            function = reward_estimator(name, loss=config.trainer.loss.name)
            return WholeGroupRelease(trained, function, to_go=credit.turn_credit == "to_go")
        return WholeGroupRelease(
            trained,
            estimator,
            to_go=credit.turn_credit == "to_go",
            # A deterministic run must not depend on the order in which episodes end, which determines this history.
            uses_history=not config.deterministic,
            weights=credit.reward_weights,
        )
    return FirstFinishersRelease(
        trained,
        GroupReleaseRule() if credit.release == "late" else GroupReleaseRule(share=0.0),
        freeze=parts.store.record,
        compares=credit.advantage.name == "leave_one_out",
        to_go=credit.turn_credit == "to_go",
    )


def _step_advantages(credit: CreditConfig, estimator: AdvantageEstimator | None) -> OptimizerStepCreditAssigner | None:
    if estimator is None or estimator.mark.over != "step":
        return None
    return OptimizerStepCreditAssigner(estimator, group_size=credit.group_size, weights=credit.reward_weights)


def _best_checkpoint_tracker(
    best: BestConfig,
    evaluation: EvaluationConfig,
    held_out: Sequence[HeldOutSplit],
    trained: Mapping[str, PolicyConfig],
    running_mean: BestRunningMean,
) -> BestCheckpointTracker:
    policy, metric = best.measured(trained)
    is_of_steps = bool(metric) and not metric.startswith("evaluation/")
    return BestCheckpointTracker(
        metric=metric,
        policy=policy,
        over="" if is_of_steps or not metric else _held_out_of(evaluation, held_out),
        smallest=best.metric.startswith("-"),
        window=best.window,
        stop_at=best.stop_at,
        # a policy may have stepped once more on the episodes that the metric's policy trains on next
        lags={name: policy.largest_staleness + 1 for name, policy in trained.items()} if is_of_steps else {},
        measured=running_mean,
    )


def _rewards_since(starts: Iterable[RunStart]) -> int:
    """Return the lineage of the newest start with other code or settings on which rewards depend than the start before
    it: held-out rewards before and after it are not comparable."""
    changed_starts = (
        start.lineage
        for start in starts
        if start.reward_code_changed
        or any(":" not in place for place in start.code_changed)  # recorded before `reward_code_changed` was
        or any(_sets_rewards(change.path) for change in start.changed)
    )
    return max(changed_starts, default=0)


def _sets_rewards(path: tuple[str, ...]) -> bool:
    if path[:1] == ("policies",):
        return bool({"model", "sampling", "kind", "url", "path"}.intersection(path[2:]))
    return ".".join(path).startswith(REWARD_SETTINGS)


def _held_out_of(evaluation: EvaluationConfig, held_out: Sequence[HeldOutSplit]) -> str:
    """Describe the tasks of an evaluation, with a number that identifies them."""
    splits = ", ".join(f"{'@'.join(filter(None, (name, split)))} {count}" for name, split, count in evaluation.splits)
    return f"{splits} x {evaluation.attempts}, {held_out_digest(held_out):x}"


def _scheduler(
    plan: RunPlan,
    buffer: EpisodeBuffer,
    reservations: ChildUnitReservations,
    opponents: OpponentPools,
    board: PolicyBoard,
    *,
    numbers: EpisodeNumbers,
    in_flight: EpisodesInFlight,
    max_in_flight: int,
) -> Scheduler:
    config = plan.settings
    bounds = {
        name: BoundedStaleness(
            max_staleness=policy.largest_staleness,
            step_size=policy.step_size,
        )
        for name, policy in plan.trained.items()
    }
    phases = FreezeSchedule(
        board=board,
        steps=plan.trainer.steps,
        cycle=[
            FreezePhase(frozenset([policies] if isinstance(policies, str) else policies), steps)
            for policies, steps in config.freeze
        ],
    )
    parts: dict[str, Any] = {
        "demands": plan.demands,
        "numbers": numbers,
        "in_flight": in_flight,
        "buffer": buffer,
        "reservations": reservations,
        "opponents": opponents,
        "board": board,
        "staleness": bounds,
        "phases": phases,
        "max_in_flight": max_in_flight,
    }
    if not config.deterministic:
        return Scheduler(**parts)
    return SynchronousBatchScheduler(pinned=pinned_policy_step_lags(plan.trained, deterministic=True), **parts)


def make_local_worker(
    plan: RolloutPlan,
    environment: type[Environment],
    host: EpisodeHost,
    engine: Engine,
    chat_format: ChatFormat,
    store: JournalStore,
    clock: Clock,
    on_failure: Callable[[BaseException], None],
) -> AsyncioWorker:
    """Make a worker in this process, for the episodes of a host."""
    choose_driver(plan.sandbox.driver)
    settings = rollout_settings(plan, chat_format, engine.capabilities.max_context)
    runner = EpisodeRunner(
        engine=engine,
        chat_format=chat_format,
        store=store,
        log=store.turn_log(TURN_LOG),
        host=host,
        clock=clock,
        settings=replace(settings, scorers=make_scorers(plan.scorers)),
    )
    return AsyncioWorker(
        runner,
        environments={name_of(root): root for root in root_environments(environment)},
        on_failure=on_failure,
        admitted=store.flush,
    )
