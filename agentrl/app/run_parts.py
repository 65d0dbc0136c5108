"""Makes the parts of a run from its configuration: trainer, workers, tasks. `engines.py` makes the engines."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentrl.app.engines import (
    check_ray_installed,
    engines_by_base,
    make_engine,
)
from agentrl.app.scoring import find_scorer_codes
from agentrl.cluster.journal_stream import JournalReceiver
from agentrl.cluster.worker_pool import PoolSettings, WorkerPool
from agentrl.cluster.worker_wire import WorkerSetup
from agentrl.config.devices import device_plan
from agentrl.config.plans import DeviceDemand, EnginePlan, RolloutPlan, TrainerPlan, plan_data
from agentrl.config.run import RunConfig
from agentrl.config.sections import EnvironmentConfig, EvaluationConfig, ModelConfig, SandboxConfig
from agentrl.core.clock import Clock, SystemClock
from agentrl.core.errors import ConfigError, EnvironmentDefinitionError, InputError, describe_user_code_error
from agentrl.core.machine import (
    TRAINING_PACKAGES,
    Gpu,
    check_packages_installed,
    describe_missing_package,
    needs_reasoning_gym,
)
from agentrl.core.ports import ChatFormat, Engine, Trainer
from agentrl.core.records import PolicyVersion, Task
from agentrl.core.text import plural
from agentrl.engines.process import SILENCE_S, LocalPlacement, ProcessPlacement
from agentrl.engines.remote.client import AddressableEngine
from agentrl.environment.environment import Environment, Split, TaskSource, checked_source
from agentrl.environment.harness import HarnessEnvironment, missing_program
from agentrl.environment.loaded_code import check_loaded_code
from agentrl.environment.mixture import (
    MemberTasks,
    MixedTasks,
    Mixture,
    all_environment_classes,
    check_split,
    root_environments,
    trained_root_environments,
    with_evaluated_environments,
    with_task_id_prefix,
)
from agentrl.environment.registry import module_of, name_of, resolve
from agentrl.environment.tools import ToolEnvironment, prompt_messages
from agentrl.orchestrator.admission_limit import first_limit
from agentrl.orchestrator.evaluation import HeldOutSplit
from agentrl.rollout.chat.byte_formats import JsonChatFormat
from agentrl.sandbox.sandbox import Sandbox, check_sandboxes

if TYPE_CHECKING:
    from agentrl.cluster.session import RaySession
    from agentrl.config.devices import Node
    from agentrl.orchestrator.loop import Orchestrator

PROMPT_TASKS = 8
"""Number of tasks whose prompts are read for an estimate."""


def load_config(config: RunConfig | str | Path) -> RunConfig:
    """Return a configuration, or read it from a TOML file."""
    if isinstance(config, RunConfig):
        return config
    from agentrl.config.load import load

    return load(Path(config), [])


def _worker_placement(demand: DeviceDemand, log: Path, worker: int) -> ProcessPlacement:
    """Return the placement of a worker's process, which needs no GPU."""
    if not demand.cluster.address:
        return LocalPlacement(log)
    from agentrl.cluster.engine_actors import RayPlacement

    check_ray_installed()

    def choose(session: RaySession) -> tuple[Node | None, Sequence[Gpu]]:
        plan = session.plan(demand)
        return plan.workers[worker] if plan.workers else None, ()

    return RayPlacement(choose, address=demand.cluster.ray_address)


def make_workers(
    plan: RolloutPlan,
    demand: DeviceDemand,
    environment: type[Environment],
    engine: Engine,
    journal: Path,
    tell: Callable[[str], None],
    log: Path,
    clock: Clock,
) -> WorkerPool | None:
    """Make the worker processes of a run with more than one worker; they are placed like engines.

    Args:
        plan: the workers' part of the run.
        demand: processes of the run.
        environment: class of root episodes.
        engine: the run's engine, which the processes call directly.
        journal: the directory of the run's journal.
        tell: receives lines for the user.
        log: file for the error streams of the processes.
        clock: times the waits before a restart.

    Raises:
        ConfigError: other processes cannot reach the engine.
    """
    if plan.workers == 1:
        return None
    address = demand.cluster.ray_address
    engines = engines_by_base(engine)
    shared_engines = [member for member in engines if isinstance(member, AddressableEngine) and member.addresses]
    if not shared_engines or len(shared_engines) < len(engines):
        raise ConfigError(
            f"workers = {plan.workers}: the engine accepts no calls from other processes (it is in this one, or the "
            "path of TMPDIR is too long for a socket); set workers = 1"
        )
    work = WorkerSetup(
        number=0,
        plan=_with_absolute_paths(plan),
        journal=str(journal.absolute()),
        environments=environment_code_references(environment),
        sources=_sources_of(environment) if address else {},
        paths=tuple(map(os.path.abspath, sys.path)),
        capabilities=engine.capabilities,
        scorers=find_scorer_codes(plan.scorers),
    )
    settings = PoolSettings(
        workers=plan.workers,
        work=work,
        max_in_flight=first_limit(plan.max_in_flight, engine.capabilities.places, plan.credit.group_size),
        silence_s=SILENCE_S,
    )
    receiver = None
    if address:
        from agentrl.cluster.session import RaySession

        session = RaySession(address)
        session.start()
        receiver = JournalReceiver(journal, session.nodes()[0].address, log=log, clock=clock, tell=tell)
    placements = [_worker_placement(demand, log, worker) for worker in range(plan.workers)]
    return WorkerPool(
        settings, engines=shared_engines, placements=placements, receiver=receiver, clock=clock, tell=tell
    )


def importable_environment_code(environment: type[Environment]) -> dict[str, str]:
    """Return `environment_code_references`, nothing if no other process can import the environment (a notebook's).

    Raises:
        EnvironmentDefinitionError: a file was edited after this process imported it.
    """
    for environment_class in all_environment_classes(environment):
        check_loaded_code(environment_class)
    with contextlib.suppress(EnvironmentDefinitionError):
        return environment_code_references(environment)
    return {}


def environment_code_references(environment: type[Environment]) -> dict[str, str]:
    """Return references to the code of an environment and its declared children, keyed by their names in the journal.

    Raises:
        EnvironmentDefinitionError: a class was defined in a shell or a notebook.
    """
    return {
        name_of(environment_class): f"{module_of(environment_class)}:{environment_class.__qualname__}"
        for environment_class in all_environment_classes(environment)
    }


def _sources_of(environment: type[Environment]) -> dict[str, str]:
    """Return the contents of the files that define an environment and its children, keyed by path, without installed
    modules.

    Raises:
        InputError: a file can no longer be read.
    """
    files = {reference.rpartition(":")[0] for reference in environment_code_references(environment).values()}
    try:
        return {file: Path(file).read_text(encoding="utf-8") for file in files if file.endswith(".py")}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the environment's code cannot be read: {error}") from error


def _with_absolute_paths(plan: RolloutPlan) -> dict[str, Any]:
    """Convert a worker's plan to data for a process with another working directory."""
    model = plan.model.model_copy(update={"path": plan.model.path and os.path.abspath(plan.model.path)})
    return plan_data(replace(plan, model=model))


def make_trainer(plan: TrainerPlan, directory: Path) -> Trainer:
    """Make the trainer of a run."""
    if plan.in_process:
        from agentrl.learn.ranks import limit_gpu_memory, rank_device
        from agentrl.learn.trainer import InProcessTrainer

        devices = device_plan(plan.demand)
        if devices.ranks and not plan.demand.engine_in_process:
            device = rank_device(devices.ranks[0], stays_on_cpu=plan.demand.stays_on_cpu)
            limit_gpu_memory(device, devices.share_of_rank(0))
        return InProcessTrainer(plan, directory)
    from agentrl.cluster.trainer_pool import RayTrainerPool

    return RayTrainerPool(plan, directory)


def make_chat_format(model: ModelConfig) -> ChatFormat:
    """Make the chat format of `model.path`, or the one of JSON lines if that is empty."""
    if not model.path:
        return JsonChatFormat()
    from agentrl.rollout.chat.chat_format import TemplateChatFormat

    return TemplateChatFormat.load(
        model.path,
        reply_format=model.reply_format,
        history=model.history,
        tools_in=model.tools_in,
        template_variables=model.template_variables,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFactories:
    """Factories of a run's engine, trainer and chat format, called at each start; by default its configuration's."""

    engine: Callable[[EnginePlan, Mapping[str, PolicyVersion], Callable[[str], None], Path], Awaitable[Engine]] = (
        make_engine
    )
    trainer: Callable[[TrainerPlan, Path], Trainer] = make_trainer
    chat_format: Callable[[ModelConfig], ChatFormat] = make_chat_format
    clock: Clock = field(default_factory=SystemClock)
    assembled: Callable[[Orchestrator], None] = lambda orchestrator: None
    """Callback with the loop of each start before it runs; tests use it to disturb the loop."""


def check_packages_of_run(config: RunConfig, environment: object = None) -> None:
    """Check that the packages of a run's models and of the demo's environment are installed, without importing them.

    Args:
        config: configuration of the run.
        environment: what replaces `config.environment.id`, if anything does.

    Raises:
        InputError: some are not; the message has one command that installs them all.
    """
    if config.bases:
        plays_demo = environment is None and needs_reasoning_gym(config.environment.id)
        check_packages_installed([*TRAINING_PACKAGES, *(["reasoning_gym"] if plays_demo else [])])


def environment_of(config: RunConfig, environment: type | Mapping[Any, float] | None = None) -> type[Environment]:
    """Return the environment of a run: the configured or the given one, plus the environments that are only evaluated.

    Raises:
        EnvironmentDefinitionError: there is no environment of that name, or a mixture is invalid.
    """
    environment_class = resolve(config.environment.id if environment is None else environment)
    return with_evaluated_environments(
        environment_class, (resolve(name) for name, _, _ in config.evaluation.splits if name)
    )


def let_waiting_threads_sleep(config: RunConfig) -> None:
    """Set `OMP_WAIT_POLICY` of a run whose engine has its own process: threads of one process that spin while they wait
    take the cores of the other, and steps are several times as long. Call it before anything imports torch, which reads
    it."""
    if not config.engine_in_process:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def check_programs(config: RunConfig, environment: type[Environment]) -> None:
    """Refuse a run whose external agents cannot start; on a cluster, their programs may be on other machines.

    Raises:
        EnvironmentDefinitionError: a program does not exist; the message says where it was looked for.
    """
    for subclass in () if config.on_cluster else all_environment_classes(environment):
        if issubclass(subclass, HarnessEnvironment) and (problem := missing_program(subclass)):
            raise EnvironmentDefinitionError(problem)


def task_source(
    section: EnvironmentConfig,
    seed: int,
    environment: type[Environment],
    split: Split,
    tasks: TaskSource | None = None,
) -> TaskSource:
    """Return the environment's tasks of a split, with the options of `[environment]`; for a mixture, those of all
    trained members; or `tasks`, if given.

    Raises:
        InputError: the environment has no tasks of its own, or reading them failed.
        ConfigError: its `tasks` does not accept the options.
    """
    if issubclass(environment, Mixture):
        if tasks is not None:
            raise InputError("a mixture takes its tasks from its members: remove tasks= and held_out=")
        trained = trained_root_environments(environment)
        if len(trained) == 1:
            return _source(section.options, seed, environment, trained[0], split)
        sources = {root.__name__: _source(section.options, seed, environment, root, split) for root in trained}
        return MixedTasks([MemberTasks.of(*item) for item in sources.items()], environment.rates)
    return _source(section.options, seed, environment, environment, split, tasks)


def _source(
    options: Mapping[str, Any],
    seed: int,
    root: type[Environment],
    environment: type[Environment],
    split: Split,
    tasks: TaskSource | None = None,
) -> TaskSource:
    """Return the tasks of one environment of a run."""
    if tasks is None:
        tasks = _tasks_of_split(environment, split, seed, _options(options, root, environment))
    _read_tasks(environment, split, tasks, 1)
    return tasks


def first_prompts(environment: type[Environment], source: TaskSource, chat_format: ChatFormat) -> list[list[int]]:
    """Return the tokens of the first tasks' prompts; none if only an episode would show them, or `prompt` needs
    `load`."""
    if not issubclass(environment, ToolEnvironment) or environment.run is not ToolEnvironment.run:
        return []
    prompts: list[list[int]] = []
    with contextlib.suppress(Exception):  # foreign code, whose error the first episode names
        # Without the tools of MCP servers, which would have to be started.
        tools = [bound.spec for bound in environment.tool_table().values()]
        for number in range(min(len(source), PROMPT_TASKS)):
            instance = environment()
            instance.task = source[number]
            messages = prompt_messages(environment, instance.prompt(instance.task))
            prompts.append(chat_format.start(messages, tools))
    return prompts


def check_prompts(prompts: Sequence[Sequence[int]], max_context: int) -> list[str]:
    """Refuse a run in whose contexts none of the first prompts fits; return a warning if some do not.

    Raises:
        ConfigError: the message says how long they are.
    """
    too_long = [len(prompt) for prompt in prompts if len(prompt) >= max_context]
    if not too_long:
        return []
    text = (
        f"{len(too_long)} of the first {plural(len(prompts), 'prompt')} do not fit engine.max_context = {max_context}: "
        f"they have up to {max(too_long)} tokens. Raise it, or shorten the prompts"
    )
    if len(too_long) == len(prompts):
        raise ConfigError(text)
    return [f"{text}; such episodes are dropped as prompt_too_long"]


def _read_tasks(
    environment: type[Environment], split: Split, source: TaskSource, count: int, rng: random.Random | None = None
) -> list[Task]:
    """Return the first tasks of a source, or with `rng` a random sample, in order."""
    try:
        indices = range(len(source))
        chosen = indices[:count] if rng is None else sorted(rng.sample(indices, min(count, len(indices))))
        tasks = [source[index] for index in chosen]
    except Exception as error:
        what = describe_missing_package(error) or describe_user_code_error(error)
        raise InputError(f"{environment.__name__}: the {split} tasks cannot be read: {what}") from error
    for task in tasks:
        if not isinstance(task, Task):
            raise InputError(
                f"{environment.__name__}: a task is {type(task).__name__}; it must be agentrl.Task(id=…, data={{…}})"
            )
    return tasks


def _options(
    options: Mapping[str, Any], root_environment: type[Environment], environment: type[Environment]
) -> Mapping[str, Any]:
    """Return the options of one environment of a run: the table of its name, or all if it alone is trained."""
    environments = trained_root_environments(root_environment)
    if len(environments) == 1:
        return options if environment is environments[0] else {}
    names = [root.__name__ for root in root_environments(root_environment)]
    for key, environment_options in options.items():
        if key not in names or not isinstance(environment_options, Mapping):
            raise ConfigError(
                f"environment.options.{key}: in a mixture, options are a table for each class name ({', '.join(names)})"
            )
    table: Mapping[str, Any] = options.get(environment.__name__, {})
    return table


def _tasks_of_split(environment: type[Environment], split: Split, seed: int, options: Mapping[str, Any]) -> TaskSource:
    check_split(environment, split)
    signature = inspect.signature(environment.tasks)
    try:
        signature.bind(split, seed=seed, **options)
    except TypeError as error:
        option_names = ", ".join(sorted(options)) or "none"
        unknown = sorted(options.keys() - signature.parameters.keys())
        names = [name for name in signature.parameters if name not in ("split", "seed")]
        close = [match for name in unknown for match in difflib.get_close_matches(name, names, n=1)]
        raise ConfigError(
            f"environment.options ({option_names}) do not fit {environment.__name__}.tasks: {error}"
            + (f"; did you mean {close[0]}?" if close else "")
        ) from None
    try:
        return checked_source(environment, split, environment.tasks(split, seed=seed, **options))
    except NotImplementedError as error:
        raise InputError(str(error)) from None
    except EnvironmentDefinitionError:
        raise
    except Exception as error:
        missing = describe_missing_package(error)
        what = f": {missing}" if missing else f" raised {describe_user_code_error(error)}"
        raise InputError(f"{environment.__name__}.tasks({split!r}){what}") from error


def held_out_task_splits(
    evaluation: EvaluationConfig,
    section: EnvironmentConfig,
    seed: int,
    environment: type[Environment],
    given: Mapping[str, TaskSource | None] = MappingProxyType({}),
) -> tuple[list[HeldOutSplit], int]:
    """Return the splits to evaluate with their tasks, and the number of tasks to choose from. `given` has tasks that
    replace those of the run's environment, by split.

    If a split has more than `evaluation.tasks` tasks, that many are drawn with the run's seed: the first ones of an
    ordered list would be a biased sample.

    Raises:
        ConfigError: a split is named twice, or held-out tasks are given for a split that is not evaluated.
    """
    splits, available = evaluation.splits, 0
    if splits and given.get("held_out") and not any(not name and split == "held_out" for name, split, _ in splits):
        raise ConfigError("train(held_out=…): evaluation.tasks has no split held_out; add it, or remove held_out=")
    trained = trained_root_environments(environment)
    held_out: list[HeldOutSplit] = []
    for name, split, count in splits:
        for root in (resolve(name),) if name else trained:
            tasks = None if name else given.get(split)
            source = _source(section.options, seed, environment, root, split, tasks)
            available += len(source)
            rng = random.Random(f"held-out tasks {seed}")
            drawn = _read_tasks(root, split, source, count, rng)
            names = [] if trained == (root,) else [root.__name__]
            prefix = [*names, split] if len(splits) > 1 else names
            split_tasks = [with_task_id_prefix(task, *prefix) for task in drawn]
            split_name = "@".join((*names, split))
            if any(other.name == split_name for other in held_out):
                raise ConfigError(f"evaluation.tasks names the split {split_name} twice; remove one of the two")
            held_out.append(HeldOutSplit(split_name, split_tasks, source))
    return held_out, available


def check_split_of_best(metric: str, splits: Sequence[HeldOutSplit]) -> None:
    """Refuse a `best.metric` of a split that is not measured.

    Raises:
        ConfigError: the message has the splits that are.
    """
    names = [split.name for split in splits] if len(splits) > 1 else []
    _, prefix, measured = metric.partition("evaluation/split_")  # a sign or a policy may stand before it
    if not prefix or set(names).intersection(measured.split("/")[1:2]):
        return
    known = f"the evaluated splits are {', '.join(names)}" if names else "with one split, follow `evaluation/reward`"
    raise ConfigError(f"best.metric = {metric!r}: no evaluation measures it; {known}")


async def unproved_sandbox_promises(sandbox: SandboxConfig, environment: type[Environment]) -> list[str]:
    """Return the promises of sandboxes that this machine does not keep, as warnings; none without a sandbox.

    Raises:
        InputError: there are some, and the run does not accept that.
    """
    classes = [base for subclass in all_environment_classes(environment) for base in subclass.__mro__]
    if not any(isinstance(value, Sandbox) for subclass in classes for value in vars(subclass).values()):
        return []
    failed = [check for check in await check_sandboxes(sandbox.driver) if not check.holds]
    lines = [f"{check.name}: {check.result}{f' ({check.fix})' if check.fix else ''}" for check in failed]
    if lines and sandbox.unproved == "refuse":
        raise InputError(
            f"{environment.__name__} runs commands in a sandbox, which this machine cannot prove: {'; '.join(lines)}. "
            "Mend it (`agentrl doctor --sandbox`), or set sandbox.unproved = 'accept'"
        )
    return [f"this machine's sandboxes are unproved: {line}" for line in lines]
