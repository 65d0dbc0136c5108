"""Wiring: given parts become an `Orchestrator`, for a real run, a test under the simulated loop, a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.config.run import RunConfig
from agentrl.core.clock import Clock
from agentrl.core.errors import ConfigError
from agentrl.core.ports import ChatFormat, Engine, Observer, SamplingParams, Trainer
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, Task, WeightsRef
from agentrl.credit.advantages import ADVANTAGES
from agentrl.environment.base import Environment, Limits, TaskSource
from agentrl.environment.registry import name_of
from agentrl.journal.port import JournalStore, RunLog
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.curriculum import Curriculum
from agentrl.orchestrator.dispatch import Dispatcher
from agentrl.orchestrator.loop import Orchestrator, Plan
from agentrl.orchestrator.manifest import CheckpointWriter
from agentrl.orchestrator.scheduler import Demand, Scheduler
from agentrl.orchestrator.signal import Signal
from agentrl.orchestrator.staleness import BoundedStaleness
from agentrl.orchestrator.versions import PolicyBoard
from agentrl.rollout.runner import EpisodeRunner, RolloutSettings
from agentrl.rollout.worker import AsyncioWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What an earlier life of the run left, folded from its journal."""

    ended: Sequence[tuple[EpisodeSpec, EpisodeHeader]] = ()
    """Committed episodes of groups of which something is still to be trained."""
    consumed: frozenset[tuple[str, str]] = frozenset()
    """(policy, episode id) of the units among them that are resolved."""
    unfinished: Sequence[EpisodeSpec] = ()
    admitted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What `assemble` wires together."""

    engine: Engine
    trainer: Trainer
    chat_format: ChatFormat
    store: JournalStore
    observer: Observer
    clock: Clock
    tasks: TaskSource
    held_out: Sequence[Task] = ()
    checkpoints: CheckpointWriter | None = None
    versions: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """Starting version of each policy; (0, 0) where absent."""
    weights: Mapping[str, WeightsRef] = field(default_factory=dict)
    """Published weights of the trainable ones."""
    parents: Mapping[tuple[str, int], PolicyVersion] = field(default_factory=dict)
    """What each (policy, lineage) but the first started from."""
    past: Past = Past()


def past_of(log: RunLog, consumed_through: Mapping[str, PolicyVersion]) -> Past:
    """What a resumed run takes over.

    Args:
        log: the run's control log.
        consumed_through: the manifest's version of each trainable policy; empty where there is no manifest.
    """
    unfinished = log.unfinished()
    open_groups = {spec.group_id for spec, _ in log.ready_units(consumed_through)}
    open_groups |= {spec.group_id for spec in unfinished}
    resolved = log.resolved_units(consumed_through)
    return Past(
        ended=tuple(log.members(open_groups)),
        consumed=frozenset((policy, episode_id) for episode_id, _, policy in resolved),
        unfinished=unfinished,
        admitted=log.admitted(),
    )


def assemble(config: RunConfig, environment: type[Environment], parts: Parts) -> Orchestrator:
    """Wire a loop from parts. Must be called in the event loop that will run it.

    Raises:
        ConfigError: sections that do not fit each other.
    """
    trainable = {name: policy for name, policy in config.policies.items() if policy.trainable}
    signal = Signal()
    buffer = EpisodeBuffer(trainable, ADVANTAGES[config.credit.advantage], consumed_before=parts.past.consumed)
    versions = {name: parts.versions.get(name, PolicyVersion(name, 0, 0)) for name in config.policies}
    board = PolicyBoard(versions, trainable, parts.parents)
    dispatcher = make_dispatcher(config, environment, buffer, parts.store, signal, first_number=parts.past.admitted)
    bounds = {
        name: BoundedStaleness(max_staleness=policy.max_staleness, step_size=policy.step_size)
        for name, policy in trainable.items()
    }
    plan = Plan(
        steps=config.steps,
        step_size={name: policy.step_size for name, policy in trainable.items()},
        normaliser={
            name: float(policy.step_size * config.trainer.tokens_per_unit) for name, policy in trainable.items()
        },
        demand=demand_of(config, environment),
        held_out=parts.held_out,
        evaluate_every=config.evaluation.every,
        checkpoint_every=config.checkpoint.every,
    )
    orchestrator = Orchestrator(
        plan=plan,
        curriculum=Curriculum(parts.tasks, seed=config.seed),
        dispatcher=dispatcher,
        scheduler=Scheduler(
            buffer=buffer, board=board, staleness=bounds, steps=config.steps, max_in_flight=config.max_in_flight
        ),
        buffer=buffer,
        board=board,
        trainer=parts.trainer,
        engine=parts.engine,
        store=parts.store,
        checkpoints=parts.checkpoints,
        signal=signal,
        clock=parts.clock,
        observer=parts.observer,
        weights=dict(parts.weights),
    )
    attach_worker(
        config, environment, dispatcher, parts.engine, parts.chat_format, parts.store, parts.clock, orchestrator.fail
    )
    dispatcher.restore(parts.past.ended, parts.past.unfinished)
    return orchestrator


def make_dispatcher(
    config: RunConfig,
    environment: type[Environment],
    buffer: EpisodeBuffer,
    store: JournalStore,
    signal: Signal,
    *,
    first_number: int,
) -> Dispatcher:
    """The host of a run's episodes; it still needs its worker."""
    return Dispatcher(
        environment=name_of(environment),
        seats=environment.seats,
        policy_of=_policy_of(config),
        run_seed=config.seed,
        group_size=config.credit.group_size,
        buffer=buffer,
        store=store,
        signal=signal,
        next_number=first_number,
    )


def attach_worker(
    config: RunConfig,
    environment: type[Environment],
    dispatcher: Dispatcher,
    engine: Engine,
    chat_format: ChatFormat,
    store: JournalStore,
    clock: Clock,
    on_failure: Callable[[BaseException], None],
) -> None:
    """A worker needs its host first, so the host gets its worker last."""
    sampling = config.sampling
    settings = RolloutSettings(
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stop_token_ids=chat_format.stop_token_ids,
        ),
        limits=Limits(
            max_turns=sampling.max_turns, max_tokens=sampling.max_tokens, max_context=engine.capabilities.max_context
        ),
        tool_timeout_s=config.environment.tool_timeout_s,
    )
    runner = EpisodeRunner(
        engine=engine,
        chat_format=chat_format,
        store=store,
        log=store.turn_log("0"),
        host=dispatcher,
        clock=clock,
        settings=settings,
    )
    dispatcher.worker = AsyncioWorker(
        runner,
        environments={name_of(environment): environment},
        data_attempts=config.data_attempts,
        episode_timeout_s=config.episode_timeout_s,
        on_failure=on_failure,
    )
    dispatcher.on_collapse = on_failure


def _policy_of(config: RunConfig) -> Callable[[str], str]:
    def policy_of(seat: str) -> str:
        try:
            return config.policy_of(seat)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    return policy_of


def demand_of(config: RunConfig, environment: type[Environment]) -> Demand:
    """What a root group brings; refused where the bounds could never let one in."""
    size = config.credit.group_size
    held = {_policy_of(config)(seat) for seat in environment.seats}
    units = {name: size for name in sorted(held) if config.policies[name].trainable}
    if not units:
        raise ConfigError(f"no seat of {environment.__name__} is held by a trainable policy: there is nothing to learn")
    for name in units:
        policy = config.policies[name]
        if size > (1 + policy.max_staleness) * policy.step_size:
            raise ConfigError(
                f"credit.group_size = {size} is larger than policies.{name} may have in flight: "
                f"(1 + max_staleness) × step_size = {(1 + policy.max_staleness) * policy.step_size}"
            )
    if size > config.max_in_flight:
        raise ConfigError(f"credit.group_size = {size} is larger than max_in_flight = {config.max_in_flight}")
    return Demand(episodes=size, units=units)
