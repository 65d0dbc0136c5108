"""`train`: from a configuration to trained policies."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.app.engines import (
    check_endpoints,
    check_ray_installed,
    check_vllm_usable,
    make_engine,
)
from agentrl.app.hub import check_local_models, is_hub_name, with_downloaded_models
from agentrl.app.memory_estimate import check_gpu_memory, memory_line
from agentrl.app.model_files import check_models_unchanged, keep_models, model_paths, record_models
from agentrl.app.plan import RunPlan, resolve, with_chosen_settings
from agentrl.app.policies import (
    BaseModelRecord,
    base_model_chat_formats,
    base_models,
    check_tokenizers,
    hidden_tools,
)
from agentrl.app.received import remember_run, selected_by_tasks
from agentrl.app.recovery import UserCodeDigests
from agentrl.app.resume import ReopenedRun, check_free, remove_failed_start, reopen_run
from agentrl.app.run_parts import (
    RunFactories,
    check_packages_of_run,
    check_programs,
    check_prompts,
    check_split_of_best,
    environment_of,
    first_prompts,
    importable_environment_code,
    let_waiting_threads_sleep,
    load_config,
    task_source,
    unproved_sandbox_promises,
)
from agentrl.app.run_parts import held_out_task_splits as held_out_source
from agentrl.app.run_tasks import RunTasks
from agentrl.app.stops import cancel_run_on_signal
from agentrl.app.supervisor import RunSetup, run_guarding_event_loop, supervise
from agentrl.app.user_functions import load_user_functions
from agentrl.cluster.session import gpu_reservation
from agentrl.config.devices import device_plan
from agentrl.config.load import (
    WITHOUT_COMMAND_LINE,
    SettingDifference,
    SettingSources,
    check_settings_unchanged,
)
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.config.policies import BotPolicy
from agentrl.config.run import RunConfig
from agentrl.config.sections import EnvironmentConfig, ModelConfig
from agentrl.core.custom_functions import capture_function_code
from agentrl.core.errors import InputError
from agentrl.core.files import temporary_directory
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.ports import ChatFormat, Observer
from agentrl.core.records import Task
from agentrl.core.text import plural
from agentrl.environment.environment import Environment, TaskSource
from agentrl.journal.run_process import record_process_state
from agentrl.observe.blocked_loop import calls_left_running
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.sinks import check_sinks_installed, open_sinks
from agentrl.orchestrator.loop import Orchestrator

if TYPE_CHECKING:
    from agentrl.core.clock import Clock
    from agentrl.journal.store import SqliteJournal
    from agentrl.observe.run_observer import RunObserver
    from agentrl.observe.run_state import PolicyMetricHistory, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that has finished or was stopped."""

    path: Path
    metrics: list[dict[str, float]] = field(repr=False)
    """Metrics of each optimizer step, in order; repeated steps after a loss appear again."""
    policies: dict[str, Path] = field(repr=False)
    """Directory of each trainable policy's last version, for `from_pretrained`."""
    best: dict[str, Path] = field(repr=False)
    """Directory of each trainable policy's version at which `best.metric` was best; empty if it was never measured."""
    summary: dict[str, Any] = field(repr=False)
    """The content of `summary.json`."""
    interrupted: bool
    """Whether the run was stopped, by Ctrl-C or a signal."""


@outside_event_loop
def train(  # noqa: PLR0913 - a run's inputs, keyword-only except the first
    config: RunConfig | str | Path,
    *,
    environment: type | Mapping[type, float] | None = None,
    tasks: TaskSource | None = None,
    held_out: Sequence[Task] | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    scorers: Sequence[Callable[..., Any]] = (),
    resume: bool | ReopenedRun = False,
    sources: SettingSources | None = None,
    quiet: bool = False,
    observers: Sequence[Observer] = (),
) -> Run:
    """Train a run from its first episode to its last checkpoint.

    Args:
        config: a configuration, or the path of a TOML file.
        environment: a class, or a table of classes with their rates, that replaces `config.environment.id`.
        tasks: training tasks that replace the environment's own.
        held_out: evaluation tasks that replace the environment's `held_out` split.
        loss: a function marked with `agentrl.loss` that replaces `config.trainer.loss.name`.
        advantage: a function marked with `agentrl.advantage` that replaces `config.credit.advantage`.
        scorers: functions marked with `agentrl.scorer`; each adds `[scorers.NAME]` under its own name, or replaces the
            function there.
        resume: continue from the newest checkpoint of the run directory; or the run, if it is reopened already.
        sources: where the settings come from; None: all from `config`.
        quiet: show no progress on the terminal.
        observers: called at every step and evaluation, in the event loop; they must return at once.

    Raises:
        InputError: the configuration, model, environment or run directory is invalid.
        AgentRLError: the run failed; its newest checkpoint stays valid.
    """
    if sources is None:
        sources = SettingSources(str(config)) if isinstance(config, str | Path) else WITHOUT_COMMAND_LINE
    config = load_config(config).with_functions(
        loss=None if loss is None else capture_function_code(loss, "loss", key="loss").reference,
        advantage=None
        if advantage is None
        else capture_function_code(advantage, "advantage", key="advantage").reference,
        scorers={
            function.__name__: capture_function_code(function, "scorer", key="scorers").reference
            for function in scorers
        },
    )
    let_waiting_threads_sleep(config)
    check_packages_of_run(config, environment)
    environment_class = environment_of(config, environment)
    check_programs(config, environment_class)
    resolve(config, environment_class)  # refuse impossible settings before anything is loaded
    if config.engine.kind == "vllm":
        check_vllm_usable(config.engine, config.filtered, on_cluster=config.on_cluster)
    run = run_training(
        *(config, environment_class),
        tasks=tasks,
        held_out=held_out,
        observers=observers,
        resume=resume,
        sources=sources,
        quiet=quiet,
    )
    return run_guarding_event_loop(run, Path(config.directory, config.name).absolute())


async def run_training(  # noqa: PLR0913, PLR0915 - as `train`, and in the order of a start
    config: RunConfig,
    environment: type[Environment],
    *,
    tasks: TaskSource | None = None,
    held_out: Sequence[Task] | None = None,
    observers: Sequence[Observer] = (),
    resume: bool | ReopenedRun = False,
    sources: SettingSources = WITHOUT_COMMAND_LINE,
    quiet: bool = False,
    factories: RunFactories | None = None,
) -> Run:
    """Run `train` in a running event loop, with factories of the caller's choice.

    What can be refused without a model is refused before the run directory exists; everything slow comes after, with
    its phase on the screen and in the directory.
    """
    factories = factories or RunFactories()
    clock = factories.clock
    start_s = clock.monotonic()
    check_sinks_installed(config.sinks)
    temporary_directory()  # many libraries need one
    path = Path(config.directory) / config.name
    if resume:
        reopened = (
            resume if isinstance(resume, ReopenedRun) else await asyncio.to_thread(reopen_run, config, path, sources)
        )
        config, configured, conclusion, _ = reopened
        if conclusion:
            return _ended_run(path, "" if quiet else conclusion)
    else:
        configured = sources.configured(config)
        check_free(path)
    functions = load_user_functions(
        config.trainer, config.credit, config.scorers, config.trained
    )  # imports torch only to check the options of a built-in loss
    source = await asyncio.to_thread(_training_tasks, config.environment, config.seed, environment, tasks)
    given = {"train": tasks, "held_out": held_out}
    held_out_splits, available = await asyncio.to_thread(
        held_out_source, config.evaluation, config.environment, config.seed, environment, given
    )
    check_split_of_best(config.best.metric, held_out_splits)
    warnings = await unproved_sandbox_promises(config.sandbox, environment)
    code = importable_environment_code(environment)
    selected = await asyncio.to_thread(
        selected_by_tasks, environment, [source, *(split.tasks for split in held_out_splits)]
    )
    run_tasks = await asyncio.to_thread(RunTasks.read, source, held_out_splits)
    if factories.engine is make_engine:
        await asyncio.to_thread(_check_policies, config)
    if not resume:
        await asyncio.to_thread(remove_failed_start, path)
        config = await asyncio.to_thread(keep_models, config, path)
        RunDirectory.create(path, config.model_dump_json(indent=1))
    directory = RunDirectory(path)
    info = {"name": config.name, "config": config.model_dump(mode="json"), "code": code}
    run_context = _open_run(
        *(directory, observers, clock),
        info=info,
        stop_seconds=config.stop_seconds,
        quiet=quiet,
        resume=bool(resume),
    )
    async with run_context as (store, observer), gpu_reservation():
        _warn(
            observer,
            warnings,
            run_tasks.warnings(),
            [] if resume else resolve(config, environment).warnings(whole_groups=functions.compares_in_step),
        )
        config, chat_format, changes = await _resolve(config, factories, directory, store, observer)
        # A resume first refuses settings that may not change, and names the old value.
        plan = resolve(config, environment)
        _warn(
            observer,
            remember_run(path, config, code, selected, resumed=bool(resume)),
            plan.warnings(whole_groups=functions.compares_in_step) if resume else [],
        )
        _warn(observer, filter(None, [hidden_tools(plan.rollout, environment, chat_format)]))
        if factories.engine is make_engine:
            prompts = await asyncio.to_thread(first_prompts, environment, source, chat_format)
            _warn(observer, check_prompts(prompts, config.engine.max_context))
            await _check_machine(plan.engine, plan.trainer, prompts, code, observer)
        num_evaluated = sum(len(split.tasks) for split in held_out_splits)
        schedule = schedule_lines(plan, changes, store.newest_steps())
        for line in (*_plan_lines(plan, chat_format, num_evaluated, available), *schedule):
            observer.say(line)
        setup = RunSetup(
            plan=plan,
            tasks=source,
            held_out=held_out_splits,
            run_tasks=run_tasks,
            selected=selected,
            chat_format=chat_format,
            factories=factories,
            directory=directory,
            store=store,
            observer=observer,
            code=UserCodeDigests.of(config.of_kind(BotPolicy), environment, functions),
            estimator=functions.estimator,
            compares_in_step=functions.compares_in_step,
            changed=changes,
            configured=configured,
        )
        orchestrator = await supervise(setup)
        seconds = clock.monotonic() - start_s
        summary = _summary(config.name, observer.state, orchestrator, num_evaluated, seconds) | {
            "run_seconds": store.seconds()
        }
        return await _report_conclusion(directory, store, observer, orchestrator, summary)


def _warn(observer: RunObserver, *warnings: Iterable[str]) -> None:
    for line in itertools.chain(*warnings):
        observer.warn(line)


def _ended_run(path: Path, conclusion: str) -> Run:
    """Return a run that has taken all its steps, from its directory, and print a line."""
    if conclusion:
        sys.stderr.write(f"{conclusion}\n")
    directory = RunDirectory(path)
    return Run(
        path=path,
        metrics=[],
        policies=directory.linked("policies"),
        best=directory.linked("best"),
        summary=directory.read_summary(),
        interrupted=False,
    )


def _check_policies(config: RunConfig) -> None:
    """Refuse models and endpoints that are not there."""
    check_local_models(config)
    check_endpoints(config.policies)


class _ResolvedRun(NamedTuple):
    config: RunConfig
    chat_format: ChatFormat
    changes: list[SettingDifference]
    """Settings that differ from the previous process's."""


async def _resolve(
    config: RunConfig,
    factories: RunFactories,
    directory: RunDirectory,
    store: SqliteJournal,
    observer: RunObserver,
) -> _ResolvedRun:
    """Import what learning needs, choose the settings that depend on the models, and refuse what does not fit them or,
    on resume, the run.

    Raises:
        InputError: a model or a changed setting cannot be used.
    """
    info = store.info()
    is_resolved = "bases" in info
    # A process that ended while it started has chosen nothing: what it recorded are the defaults of open settings.
    before = info.get("config") if is_resolved else {}
    if factories.engine is make_engine:
        before = before if isinstance(before, dict) else {}
        if names := [path for path in model_paths(config).values() if is_hub_name(path)]:
            observer.phase(f"finding {', '.join(names)} on the Hugging Face hub, or in its cache")
            config = await asyncio.to_thread(with_downloaded_models, config, before)
        if config.bases:
            observer.phase("loading torch and transformers")
            await asyncio.to_thread(_import_learning_stack)
            observer.phase("reading the model's shapes, and predicting memory")
        config, chosen = await asyncio.to_thread(with_chosen_settings, config, before)
        for line in filter(None, chosen):
            observer.say(line)
    chat_format, bases = await asyncio.to_thread(_read_formats, config.model, config.engine_plan, factories)
    changes: list[SettingDifference] = []
    if is_resolved:
        changes = check_settings_unchanged(store.config(), config)
        await asyncio.to_thread(check_models_unchanged, model_paths(config), info.get("models"))
    else:
        models = await asyncio.to_thread(record_models, model_paths(config))
        directory.write_config(config.model_dump_json(indent=1))
        resolved = {"config": config.model_dump(mode="json"), "bases": bases, "models": models}
        await store.describe(**msgspec.to_builtins(resolved))
    observer.add_sinks(open_sinks(config.sinks, directory.path, config.model_dump(mode="json")))
    changes = [change for change in changes if change.path not in (("name",), ("directory",))]
    return _ResolvedRun(config, chat_format, changes)


def _read_formats(
    model: ModelConfig, engine: EnginePlan, factories: RunFactories
) -> tuple[ChatFormat, list[BaseModelRecord]]:
    chat_format = factories.chat_format(model)
    base_model_chat_formats(model, engine.bases)
    check_tokenizers(engine)
    return chat_format, base_models(engine.bases)


def _import_learning_stack() -> None:
    """Import the slowest libraries, to show their import as a separate phase."""
    import agentrl.learn.models  # noqa: F401


def _plan_lines(plan: RunPlan, chat_format: ChatFormat, num_evaluated: int, num_held_out: int) -> Iterator[str]:
    """Yield lines about choices that the user may not know of."""
    config = plan.settings
    if plan.trained:
        rates = ", ".join(f"{name} {policy.learning_rate:g}" for name, policy in plan.trained.items())
        yield f"learning rate: {rates}"
    if chat_format.rewrites:
        treatment = "each rewrite starts a new token row" if chat_format.forks else "the sampled text is kept"
        yield f"the chat template rewrites earlier turns ({', '.join(chat_format.rewrites)}): {treatment}"
    if config.evaluation.splits and not num_held_out:
        yield "nothing is evaluated: there are no held-out tasks"
    elif config.evaluation.splits and num_evaluated < num_held_out:
        yield f"evaluating on {num_evaluated:,} of {num_held_out:,} held-out tasks, drawn with seed {config.seed}"
    elif (requested := sum(count for _, _, count in config.evaluation.splits)) > num_evaluated:
        yield f"evaluating on all {plural(num_held_out, 'held-out task')}, fewer than evaluation.tasks = {requested:,}"


def schedule_lines(plan: RunPlan, changes: Sequence[SettingDifference], taken: Mapping[str, int]) -> Iterator[str]:
    """Yield the learning rates of the next steps that another number of steps changes."""
    optimizer = plan.settings.trainer.optimizer
    for change in changes:
        section, *names = change.path
        for name in names or plan.trained:
            if section != "steps" or name not in plan.trained:
                continue
            step = taken.get(name, 0) + 1
            before, now = (
                optimizer.rate(plan.trained[name].learning_rate, step, int(steps))
                for steps in (change.before, change.now)
            )
            if before != now:
                yield (
                    f"{change}, where the schedule of the learning rate ends: the learning rate of step {step} of "
                    f"{name} is {now:.3g} instead of {before:.3g}"
                )


def _training_tasks(
    section: EnvironmentConfig, seed: int, environment: type[Environment], tasks: TaskSource | None
) -> TaskSource:
    """Return the training tasks.

    Raises:
        InputError: there are none.
    """
    source = task_source(section, seed, environment, "train", tasks)
    if not len(source):
        raise InputError(f"{environment.__name__}.tasks('train', seed={seed}) is empty")
    return source


async def _check_machine(
    engine: EnginePlan,
    trainer: TrainerPlan,
    prompts: Sequence[Sequence[int]],
    code: Mapping[str, str],
    observer: RunObserver,
) -> None:
    """Show the devices, the nodes of a cluster (which are checked) and the memory that a run will use.

    Raises:
        InputError: `cluster.address` does not answer.
        ConfigError: a node lacks something, there are too few GPUs, or one is too small.
    """
    demand = engine.demand
    if not demand.cluster.ray_address:
        lines = device_plan(demand).lines()
    else:
        from agentrl.cluster.nodes import check_nodes
        from agentrl.cluster.session import RaySession, kept_signal_handlers

        check_ray_installed()
        with kept_signal_handlers():
            lines = await asyncio.to_thread(check_nodes, demand, [base.path for base in engine.bases], code)
            await asyncio.to_thread(RaySession(demand.cluster.ray_address).plan, demand)  # reserves the GPUs
    for line in lines:
        observer.say(line)
    _warn(observer, device_plan(demand).mixed_gpus(), await asyncio.to_thread(check_gpu_memory, engine, trainer))
    observer.say(await asyncio.to_thread(memory_line, engine, trainer, prompts))


async def _report_conclusion(
    directory: RunDirectory,
    store: SqliteJournal,
    observer: RunObserver,
    orchestrator: Orchestrator,
    summary: dict[str, Any],
) -> Run:
    """Write the links and the summary of a finished run."""
    best_weights = {name: store.published(version) for name, version in orchestrator.best.measured.versions.items()}
    current = {name: orchestrator.versions.current[name] for name in orchestrator.board.trainable}
    policies = await asyncio.to_thread(directory.link, "policies", current)
    published = {name: weights for name, weights in best_weights.items() if weights is not None}
    best = await asyncio.to_thread(directory.link, "best", published)
    directory.write_summary(summary)
    record_process_state(directory.path, "stopped" if orchestrator.outcome.interrupted else "finished")
    running_mean = orchestrator.best.measured
    if orchestrator.best.metric and not running_mean.newest and observer.steps:
        metric_names = sorted({name for values in observer.steps for name in values})
        suggestions = difflib.get_close_matches(orchestrator.best.metric, metric_names, 1)
        observer.warn(
            f"best.metric: {orchestrator.best.metric!r} was never measured for {orchestrator.best.policy}"
            + (
                f"; did you mean {suggestions[0]!r}?"
                if suggestions
                else "; docs/reference/metrics.md lists all metrics"
            )
        )
    _warn(observer, filter(None, [calls_left_running()]))
    observer.finish(summary)
    return Run(
        path=directory.user_path,
        metrics=observer.steps,
        policies=policies,
        best=best,
        summary=summary,
        interrupted=orchestrator.outcome.interrupted,
    )


@contextlib.asynccontextmanager
async def _open_run(
    directory: RunDirectory,
    observers: Sequence[Observer],
    clock: Clock,
    *,
    info: Mapping[str, Any],
    stop_seconds: float,
    quiet: bool,
    resume: bool,
) -> AsyncIterator[tuple[SqliteJournal, RunObserver]]:
    """Open journal and observer, which outlive restarts, and close them at the end."""
    from agentrl.journal.run_process import check_partitions_unlocked, recording_process_state, retry_until_writer_exits
    from agentrl.journal.store import SqliteJournal
    from agentrl.observe.run_observer import RunObserver
    from agentrl.observe.run_state import display_settings_from_config

    async with contextlib.AsyncExitStack() as stack:
        if not resume:
            stack.push(directory.forget_if_refused)
        store = SqliteJournal(directory.journal, info=info)
        stack.push_async_callback(store.close)
        plan = display_settings_from_config(info["config"])
        stack.enter_context(recording_process_state(directory.path))
        observer = stack.enter_context(RunObserver(directory, plan=plan, observers=observers, quiet=quiet))
        observer.watch()
        stack.enter_context(cancel_run_on_signal(directory.path, stop_seconds, observer.warn))
        await retry_until_writer_exits(lambda: check_partitions_unlocked(directory.journal), observer.warn, clock)
        yield store, observer


def _summary(name: str, state: RunState, orchestrator: Orchestrator, held_out: int, seconds: float) -> dict[str, Any]:
    """Make the summary of the whole run, restarts included: repeated steps count once. `seconds` belong to this
    process."""
    policies = [policy for policy in state.policies.values() if policy.steps or policy.evaluations]
    by_step = sorted((step, number) for number, policy in enumerate(policies) for step in policy.steps)
    steps = [policies[number].steps[step] for step, number in by_step]
    evaluations = [(policy.name, *at) for policy in policies for at in sorted(policy.evaluations.items())]
    by_policy = {policy.name: _summary_of(policy) for policy in policies}
    only = next(iter(by_policy.values())) if len(by_policy) == 1 else dict.fromkeys(_SUMMARY_OF_ONE)
    return {
        "name": name,
        "ended_early": orchestrator.ended_early,
        "best": orchestrator.best.summary(),
        "steps": len(steps),
        **{name: only[name] for name in _SUMMARY_OF_ONE},
        "policies": by_policy,
        "held_out_tasks": held_out,
        "rl_seconds": max((sum(_column(policy.steps.values(), "step/seconds")) for policy in policies), default=0.0),
        "seconds": seconds,
        "engine_busy_share": _over_time(steps, "engine/busy_share"),
        "trainer_busy_share": _over_time(steps, "trainer/busy_share"),
        "evaluations": [{"policy": policy, "step": step, **values} for policy, step, values in evaluations],
    }


_SUMMARY_OF_ONE = ("reward_start", "reward_end", "rewards", "staleness_mean")
"""Figures of a summary that belong to one policy: in `policies`, or at the top if there is only one policy."""


def _summary_of(policy: PolicyMetricHistory) -> dict[str, Any]:
    """Make a policy's part of the summary: held-out reward before and after, training reward and mean lag by step."""
    held_out = [reward for _, reward in policy.held_out()]
    _, rewards = policy.series("reward/mean")
    _, lags = policy.series("staleness/mean")
    return {
        "steps": policy.step,
        "reward_start": held_out[0] if held_out else None,
        "reward_end": held_out[-1] if len(held_out) > 1 else None,
        "rewards": rewards,
        "staleness_mean": sum(lags) / len(lags) if lags else 0.0,
    }


def _column(steps: Iterable[Mapping[str, float]], name: str) -> list[float]:
    """Return a metric of each step that has it: a line of `metrics.jsonl` may be damaged."""
    return [values[name] for values in steps if name in values]


def _over_time(steps: Sequence[Mapping[str, float]], name: str) -> float:
    timed_steps = [values for values in steps if name in values and "step/seconds" in values]
    seconds = sum(values["step/seconds"] for values in timed_steps)
    return sum(values[name] * values["step/seconds"] for values in timed_steps) / seconds if seconds else 0.0
