"""Every rank and every engine has its GPUs, on one machine and on a cluster; too few are refused by name."""

from __future__ import annotations

import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.app.engines import device_plan
from agentrl.config.devices import CONTEXTS, DevicePlan, plan_devices
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, InputError
from agentrl.core.machine import Gpu, Memory, gpus

CARD = Memory(24 << 30, 24 << 30)
COMBINATIONS = [
    # ranks, replicas, tensor parallel size, GPUs, nodes
    (1, 1, 1, 1, 0),
    (1, 2, 1, 2, 0),
    (1, 1, 1, 2, 0),
    (4, 1, 4, 8, 0),
    (4, 1, 4, 4, 0),
    (2, 3, 2, 8, 0),
    (3, 4, 1, 4, 0),
    (1, 1, 8, 8, 0),
    (4, 2, 2, 8, 2),
    (2, 6, 1, 8, 2),
    (8, 1, 8, 16, 2),
    (3, 2, 4, 12, 3),
]
"""Twelve combinations; nodes: 0 is one machine, more a Ray cluster with as many GPUs on each."""


def configuration(ranks: int = 1, replicas: int = 1, size: int = 1, **engine: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "environment": {"id": "unused"},
            "model": {"path": "unused"},
            "engine": {"replicas": replicas, "vllm": {"tensor_parallel_size": size}, **engine},
            "policies": {"policy": {"lora": {}}},
            "trainer": {"ranks": ranks},
        }
    )


def machine(count: int, nodes: int = 0) -> list[Gpu]:
    each = count // (nodes or 1)
    return [Gpu(str(at % each), "card", CARD, f"node{at // each}" if nodes else "") for at in range(count)]


def planned(ranks: int, replicas: int, size: int, count: int, nodes: int) -> DevicePlan:
    return plan_devices(configuration(ranks, replicas, size), machine(count, nodes))


@pytest.mark.parametrize(("ranks", "replicas", "size", "count", "nodes"), COMBINATIONS)
def test_no_process_lacks_a_gpu_and_no_gpu_has_two_of_a_kind(
    ranks: int, replicas: int, size: int, count: int, nodes: int
) -> None:
    plan = planned(ranks, replicas, size, count, nodes)
    assert len(plan.ranks) == ranks
    assert [len(held) for held in plan.engines] == [size] * replicas
    held = Counter(plan.ranks) + Counter(at for engine in plan.engines for at in engine)
    assert max(Counter(plan.ranks).values()) == 1
    assert max(Counter(at for engine in plan.engines for at in engine).values()) == 1
    shared = sum(number > 1 for number in held.values())
    assert shared == max(0, ranks + replicas * size - count), "a GPU is shared only where there are too few"
    assert all(len({plan.gpus[at].node for at in engine}) == 1 for engine in plan.engines)
    for rank in range(ranks):
        others = [share for engine, share in zip(plan.engines, plan.shares, strict=True) if plan.ranks[rank] in engine]
        assert plan.share_of_rank(rank) + sum(others) == pytest.approx(1 - CONTEXTS)
    assert len(plan.lines()) == count


def test_the_lines_say_who_is_where_and_has_how_much() -> None:
    plan = planned(1, 2, 1, 2, 0)
    assert plan.lines() == [
        "GPU 0: trainer rank 0 (50% of its memory) and engine 0 (45%)",
        "GPU 1: engine 1 (90% of its memory)",
    ]
    assert [gpu.id for gpu in plan.gpus_of_engine(1)] == ["1"]
    (gpu,) = {plan.gpu_of_rank(0)}
    assert gpu is not None
    assert gpu.id == "0"


@pytest.mark.parametrize(
    ("ranks", "replicas", "size", "count", "nodes", "words"),
    [
        (2, 1, 1, 1, 0, r"trainer\.ranks = 2 .* do not fit on 1 GPU,"),
        (1, 2, 4, 4, 0, r"engine\.replicas = 2 of 4 GPUs each do not fit on 4 GPUs"),
        (1, 1, 1, 1, 1, "cluster.address"),
        (2, 1, 8, 8, 2, "on one node"),
    ],
)
def test_too_few_gpus_are_refused_by_name(
    ranks: int, replicas: int, size: int, count: int, nodes: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(ranks, replicas, size, count, nodes)


def test_a_share_that_leaves_the_trainer_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.memory_share = 0\.93 leaves 2% of GPU 0 to trainer rank 0"):
        plan_devices(configuration(memory_share=0.93), machine(1))
    assert plan_devices(configuration(memory_share=0.6), machine(1)).shares == (0.6,)


def test_memory_that_another_process_holds_is_named_before_vllm_starts() -> None:
    busy = [gpu._replace(memory=Memory(4 << 30, 24 << 30)) if gpu.id == "1" else gpu for gpu in machine(2)]
    assert plan_devices(configuration(1, 1), machine(2)).taken() == []
    (told,) = plan_devices(configuration(1, 1), busy).taken()
    assert re.search(r"GPU 1: .* takes 90% of its memory, 21\.6 GiB, and 4\.0 are free", told)
    assert plan_devices(configuration(1, 1, memory_share=0.1), busy).taken() == []


def test_without_gpus_nothing_is_assigned() -> None:
    plan = plan_devices(configuration(4, 4), [])
    assert (plan.ranks, plan.engines, plan.lines(), plan.gpu_of_rank(3), plan.gpus_of_engine(3)) == (
        (),
        (),
        [],
        None,
        (),
    )


@pytest.mark.parametrize(
    ("ranks", "replicas", "size", "count", "expected"),
    [
        (1, 1, 1, 1, ["ipc"]),
        (1, 1, 1, 2, ["nccl"]),
        (4, 2, 2, 8, ["nccl", "nccl"]),
        (2, 2, 1, 2, ["ipc", "nccl"]),
        (1, 1, 2, 2, ["file"]),  # it has rank 0's GPU, and another, to which that shares nothing
        (2, 1, 2, 3, ["nccl"]),  # it shares a GPU with rank 1 alone
    ],
)
def test_weights_go_by_where_trainer_and_engine_stand(
    ranks: int, replicas: int, size: int, count: int, expected: list[str]
) -> None:
    plan = planned(ranks, replicas, size, count, 0)
    assert [plan.transfer_to(number) for number in range(replicas)] == expected


def test_weights_go_by_file_on_cpus_and_to_engines_without_a_trainer_beside() -> None:
    assert plan_devices(configuration(), []).transfer_to(0) == "file"
    assert plan_devices(configuration(), machine(1), ranks=False).transfer_to(0) == "file"


def of_two_bases(replicas: int = 1, size: int = 1, **engine: Any) -> RunConfig:
    config = configuration(2, replicas, size, **engine).model_dump(exclude_none=True)
    return RunConfig.model_validate(config | {"policies": {"policy": {"lora": {}}, "frozen": FROZEN}})


FROZEN = {"kind": "frozen", "model": "models/other"}


def test_each_base_model_has_engines_and_gpus_of_its_own() -> None:
    plan = plan_devices(of_two_bases(2, 2), machine(10))
    assert plan.engines == ((2, 3), (4, 5), (6, 7), (8, 9))
    assert plan.ranks == (0, 1)
    assert plan.lines()[2] == f"GPU 2: engine 0 of {Path.cwd().name}/unused (90% of its memory)"
    assert [plan.name_of_engine(number).split("/")[-1] for number in range(4)] == [*["unused"] * 2, *["other"] * 2]
    shared = plan_devices(of_two_bases(), machine(2))
    assert (shared.ranks, shared.engines, shared.shares) == ((0, 1), ((0,), (1,)), (0.45, 0.45))
    with pytest.raises(ConfigError, match=r"engine\.replicas = 2 of 1 GPU each for each of 2 base models do not fit"):
        plan_devices(of_two_bases(2), machine(3))


def test_embedded_engines_of_several_bases_share_gpus() -> None:
    """They reserve nothing, so one GPU serves all of them."""
    plan = plan_devices(of_two_bases(vllm=None), machine(2))
    assert (plan.engines, plan.shares) == (((1,), (1,)), (0.225, 0.225))
    assert plan.share_of_rank(1) == pytest.approx(0.5)
    first, second = plan.lines()
    assert first == "GPU 0: trainer rank 0"
    assert second.startswith("GPU 1: trainer rank 1 (50% of its memory) and engine 0 of ")


def driver(monkeypatch: pytest.MonkeyPatch, path: Path, script: str) -> None:
    """A driver's tool that prints what a script echoes, and a torch for GPUs."""
    tool = path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    torch = path / "torch-2.13.0.dist-info"  # found before the real one
    torch.mkdir(exist_ok=True)
    (torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    monkeypatch.setenv("PATH", str(path), prepend=":")
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


TWO = "echo '0, GPU-aa, NVIDIA L4, 23034, 22000'; echo '1, GPU-bb, NVIDIA L4, 23034, 100'"


def test_the_gpus_are_those_the_driver_reports_and_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver(monkeypatch, tmp_path, TWO)
    first, second = gpus()
    assert (first.id, first.name, first.memory) == ("0", "NVIDIA L4", Memory(22000 << 20, 23034 << 20))
    for visible, expected in (("1", [second]), ("GPU-bb,0", [second, first]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert list(gpus()) == expected
    assert device_plan(configuration()).gpus == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES names 7"):
        gpus()


def test_a_driver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(monkeypatch, tmp_path, "echo 'NVML: driver/library version mismatch'; exit 18")
    with pytest.raises(InputError, match="version mismatch"):
        gpus()
