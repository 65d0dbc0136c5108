"""Every rank and every engine has its GPUs, on one machine and on a cluster; too few are refused by name."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.app.engines import check_vllm_usable, engine_program
from agentrl.app.plan import with_chosen_engine
from agentrl.cli.doctor import placement_checks
from agentrl.cli.main import main
from agentrl.config.devices import CONTEXT, DevicePlan, device_plan, plan_devices
from agentrl.config.load import load
from agentrl.config.run import MIN_GPU_PARAMETERS, RunConfig
from agentrl.core.errors import ConfigError, InputError
from agentrl.core.machine import Gpu, Memory, gpus, install_command, machine_memory
from agentrl.engines.weights.reading import device_memory
from agentrl.learn.memory_prediction import shard_count
from agentrl.learn.ranks import rank_device

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
    return plan_devices(configuration(ranks, replicas, size).device_demand, machine(count, nodes))


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
        assert plan.share_of_rank(rank) + sum(others) == pytest.approx(1 - CONTEXT * (1 + len(others)) / CARD.total)
    assert len(plan.lines()) == count


def test_the_lines_say_who_is_where_and_has_how_much() -> None:
    plan = planned(1, 2, 1, 2, 0)
    assert plan.lines() == [
        "GPU 0: trainer rank 0 (51% of its memory) and engine 0 (45%)",
        "GPU 1: engine 1 (90% of its memory)",
    ]
    assert [gpu.id for gpu in plan.gpus_of_engine(1)] == ["1"]
    (gpu,) = {plan.gpu_of_rank(0)}
    assert gpu is not None
    assert gpu.id == "0"


@pytest.mark.parametrize(
    ("ranks", "replicas", "size", "count", "nodes", "words"),
    [
        (2, 1, 1, 1, 0, r"trainer\.ranks = 2 .*1 GPU"),
        (1, 2, 4, 4, 0, r"engine\.replicas = 2 .*4 GPUs"),
        (1, 1, 1, 1, 1, "cluster.address"),
        (2, 1, 8, 8, 2, "one node"),
    ],
)
def test_too_few_gpus_are_refused_by_name(
    ranks: int, replicas: int, size: int, count: int, nodes: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(ranks, replicas, size, count, nodes)


def test_a_share_that_leaves_the_trainer_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.memory_share"):
        plan_devices(configuration(memory_share=0.93).device_demand, machine(1))
    assert plan_devices(configuration(memory_share=0.6).device_demand, machine(1)).shares == (0.6,)


def test_memory_that_another_process_holds_is_named_before_vllm_starts() -> None:
    busy = [gpu._replace(memory=Memory(4 << 30, 24 << 30)) if gpu.id == "1" else gpu for gpu in machine(2)]
    assert plan_devices(configuration(1, 1).device_demand, machine(2)).memory_conflicts() == []
    (told,) = plan_devices(configuration(1, 1).device_demand, busy).memory_conflicts()
    assert re.search(r"GPU 1: .* takes 90% of its memory, 21\.6 GiB, and 4\.0 are free", told)
    assert plan_devices(configuration(1, 1, memory_share=0.1).device_demand, busy).memory_conflicts() == []


def test_without_gpus_nothing_is_assigned() -> None:
    plan = plan_devices(configuration(4, 4).device_demand, [])
    assert (plan.ranks, plan.engines, plan.lines(), plan.gpu_of_rank(3), plan.gpus_of_engine(3)) == (
        (),
        (),
        [],
        None,
        (),
    )


def of_two_bases(replicas: int = 1, size: int = 1, **engine: Any) -> RunConfig:
    config = configuration(2, replicas, size, **engine).model_dump(exclude_none=True)
    return RunConfig.model_validate(config | {"policies": {"policy": {"lora": {}}, "frozen": FROZEN}})


FROZEN = {"kind": "frozen", "model": "models/other"}


def test_each_base_model_has_engines_and_gpus_of_its_own() -> None:
    plan = plan_devices(of_two_bases(2, 2).device_demand, machine(10))
    assert plan.engines == ((2, 3), (4, 5), (6, 7), (8, 9))
    assert plan.ranks == (0, 1)
    assert plan.lines()[2] == f"GPU 2: engine 0 of {Path.cwd().name}/unused (90% of its memory)"
    assert [plan.name_of_engine(number).split("/")[-1] for number in range(4)] == [*["unused"] * 2, *["other"] * 2]
    shared = plan_devices(of_two_bases().device_demand, machine(2))
    assert (shared.ranks, shared.engines, shared.shares) == ((0, 1), ((0,), (1,)), (0.45, 0.45))
    assert plan_devices(of_two_bases(2).device_demand, machine(3)).engines == ((1,), (2,)) * 2, (
        "three GPUs hold no four engines"
    )
    with pytest.raises(ConfigError, match=r"engine\.replicas"):
        plan_devices(of_two_bases(4).device_demand, machine(3))


def test_embedded_engines_of_several_bases_share_gpus() -> None:
    """They reserve nothing, so one GPU serves all of them."""
    plan = plan_devices(of_two_bases(vllm=None).device_demand, machine(2))
    assert (plan.engines, plan.shares) == (((1,), (1,)), (0.225, 0.225))
    assert plan.share_of_rank(1) == pytest.approx(1 - 0.45 - 3 * CONTEXT / CARD.total)
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


TWO = "echo '0, GPU-aa, NVIDIA L4, 580.65.06, 23034, 22000'; echo '1, GPU-bb, NVIDIA L4, 580.65.06, 23034, 100'"


def test_the_gpus_are_those_the_driver_reports_and_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver(monkeypatch, tmp_path, TWO)
    first, second = gpus()
    assert (first.id, first.name, first.memory) == ("0", "NVIDIA L4", Memory(22000 << 20, 23034 << 20))
    for visible, expected in (("1", [second]), ("GPU-bb,0", [second, first]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert list(gpus()) == expected
    assert device_plan(configuration().device_demand).gpus == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(InputError, match="names 7"):
        gpus()


def test_a_driver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(monkeypatch, tmp_path, "echo 'NVML: driver/library version mismatch'; exit 18")
    with pytest.raises(InputError, match="version"):
        gpus()


def test_a_card_without_memory_of_its_own_has_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(monkeypatch, tmp_path, "echo '0, GPU-aa, NVIDIA GB10, 580.95.05, [N/A], [N/A]'")
    (gpu,) = gpus()
    assert gpu.name == "NVIDIA GB10"
    assert gpu.memory.total == machine_memory().total


def test_a_slice_has_the_memory_of_its_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = (
        "if [ $1 = -L ]; then echo 'GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aa)'; "
        "echo '  MIG 2g.20gb     Device  0: (UUID: MIG-bb)'; "
        "else echo '0, GPU-aa, NVIDIA A100-SXM4-80GB, 580.65.06, 81920, 81000'; fi"
    )
    driver(monkeypatch, tmp_path, script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bb")
    (gpu,) = gpus()
    assert (gpu.id, gpu.name, gpu.memory) == ("MIG-bb", "MIG 2g.20gb", Memory(20 * 10**9, 20 * 10**9))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cc")
    with pytest.raises(InputError, match="MIG-cc"):
        gpus()


def test_a_driver_older_than_the_cuda_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(monkeypatch, tmp_path, "echo '0, GPU-aa, NVIDIA L4, 535.183.01, 23034, 22000'")
    (tmp_path / "torch").mkdir()
    for cuda, refused in (("12.8", False), ("13.0", True)):
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: str | None = '{cuda}'\n")
        if refused:
            with pytest.raises(InputError, match=r"535\.183\.01 .*580"):
                gpus()
        else:
            assert len(gpus()) == 1


def test_the_memory_of_a_rank_is_asked_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path
) -> None:
    """To ask CUDA would open a context, which this torch for CPUs refuses, and one for GPUs would keep."""
    driver(monkeypatch, tmp_path, TWO)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert device_memory() == (Memory(22000 << 20, 23034 << 20), True)
    config = configuration(ranks=2)
    model = config.model.model_copy(update={"path": str(repository / "environments/frozen_lake/model")})
    assert shard_count(config.model_copy(update={"model": model}).trainer_plan, 2) == 1, (
        "a small model is held whole by each rank"
    )
    assert not torch.cuda.is_initialized()


def test_cuda_numbers_gpus_as_their_driver_does() -> None:
    code = "import os, agentrl.cli.main; print(os.environ['CUDA_DEVICE_ORDER'])"
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "PCI_BUS_ID"


def test_different_gpu_models_are_named() -> None:
    cards = [*machine(1), Gpu("1", "large card", Memory(80 << 30, 80 << 30))]
    assert plan_devices(configuration().device_demand, cards).mixed_gpus() == []
    (told,) = plan_devices(configuration(size=2).device_demand, cards).mixed_gpus()
    assert told.startswith("engine 0 computes on different GPU models")
    (told,) = plan_devices(configuration(ranks=2).device_demand, cards).mixed_gpus()
    assert told.startswith("the trainer computes on different GPU models")


def test_without_a_compiler_vllm_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(monkeypatch, tmp_path, TWO)
    check_vllm_usable(configuration().engine, [], on_cluster=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="compiler"):
        check_vllm_usable(configuration().engine, [], on_cluster=False)


ONE = "echo '0, GPU-aa, NVIDIA L4, 580.65.06, 23034, 22000'"


def stored_model(path: Path, parameters: int) -> str:
    """Write what tells a model's size and dtype: the header of its weights, and its configuration."""
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}})
    path.mkdir()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    (path / "config.json").write_text('{"model_type": "qwen3", "dtype": "bfloat16"}')
    return str(path)


def open_engine(path: str, *, dtype: str = "auto", **sections: Any) -> RunConfig:
    """A run whose engine is open."""
    model = {"path": path, "dtype": dtype}
    config = {"environment": {"id": "unused"}, "model": model, "policies": {"policy": {"lora": {}, "max_staleness": 1}}}
    return RunConfig.model_validate(config | sections)


def install_vllm(path: Path, version: str = "0.32.0") -> None:
    (path / "vllm.dist-info").mkdir(exist_ok=True)
    (path / "vllm.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def test_a_run_on_a_gpu_takes_vllm_if_it_can_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = open_engine(stored_model(tmp_path / "model", MIN_GPU_PARAMETERS))
    monkeypatch.setattr("agentrl.app.plan.installed_version", lambda name: None)
    assert with_chosen_engine(config, {}) == (config, ""), "no GPU"
    driver(monkeypatch, tmp_path, ONE)
    unchanged, line = with_chosen_engine(config, {})
    assert unchanged == config
    assert f"vLLM is not installed: {install_command('vllm')}" in line
    monkeypatch.undo()
    driver(monkeypatch, tmp_path, ONE)
    install_vllm(tmp_path)
    chosen, line = with_chosen_engine(config, {})
    assert (chosen.engine.kind, chosen.engine.vllm) == ("vllm", {})
    assert line.startswith("engine: vLLM 0.32.0, ")
    assert "engine.vllm = false" in line
    assert with_chosen_engine(chosen, {}) == (chosen, ""), "the engine is set"
    embedded = open_engine(config.model.path, engine={"vllm": False})
    assert with_chosen_engine(embedded, {}) == (embedded, "")


@pytest.mark.parametrize(
    ("cards", "version", "sections", "reason"),
    [
        (ONE, "0.31.2", {}, "older than 0.32"),
        (ONE, "0.32.0", {"deterministic": True}, "deterministic = true"),
        (ONE, "0.32.0", {"dtype": "float32"}, 'model.dtype = "bfloat16"'),
        (TWO, "0.32.0", {}, "0.1 are free"),
        (ONE, "0.32.0", {"engine": {"replicas": 3}}, "do not fit on 1 GPU"),
    ],
)
def test_where_vllm_cannot_serve_the_run_the_line_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cards: str, version: str, sections: Any, reason: str
) -> None:
    driver(monkeypatch, tmp_path, cards)
    install_vllm(tmp_path, version)
    config = open_engine(stored_model(tmp_path / "model", MIN_GPU_PARAMETERS), **sections)
    unchanged, line = with_chosen_engine(config, {})
    assert unchanged == config
    assert line.startswith("engine: embedded. ")
    assert reason in line


def test_a_resumed_run_keeps_its_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(monkeypatch, tmp_path, ONE)
    install_vllm(tmp_path)
    config = open_engine(stored_model(tmp_path / "model", MIN_GPU_PARAMETERS))
    chosen, _ = with_chosen_engine(config, {})
    assert with_chosen_engine(config, chosen.model_dump(mode="json"))[0] == chosen
    kept, line = with_chosen_engine(config, config.model_dump(mode="json"))
    assert kept == config
    assert "as when the run began" in line


def test_the_chosen_engine_is_shown_by_dry_run_and_doctor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver(monkeypatch, tmp_path, ONE)
    install_vllm(tmp_path)
    model = stored_model(tmp_path / "model", MIN_GPU_PARAMETERS)
    (tmp_path / "model" / "config.json").write_text("{}")
    assert main(["train", "examples/01_tool_use.toml", f"--model.path={model}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "\n[engine.vllm]\n" in printed
    assert "\n# engine: vLLM 0.32.0, " in printed
    config = load("examples/01_tool_use.toml", [f"model.path={model}"])
    shown = [check.result for check in placement_checks(config) if check.name == "engine"]
    assert shown[0].startswith("vllm, in a separate process")
    assert shown[1].startswith("engine: vLLM 0.32.0, ")


def test_small_models_stay_on_the_cpu_unless_a_gpu_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path
) -> None:
    driver(monkeypatch, tmp_path, ONE)
    install_vllm(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    small = open_engine(str(repository / "environments/calculator/model"), dtype="bfloat16")
    large = open_engine(stored_model(tmp_path / "model", MIN_GPU_PARAMETERS))
    config, line = with_chosen_engine(small, {})
    assert config == small
    assert line.startswith("engine and trainer: on the CPU")
    assert device_plan(small.device_demand).lines() == []
    assert len(device_plan(large.device_demand).lines()) == 1
    assert [rank_device(0, stays_on_cpu=each.stays_on_cpu).type for each in (small, large)] == ["cpu", "cuda"]
    programs = [engine_program(each.engine_plan, each.bases[0]) for each in (small, large)]
    assert [program.arguments["device"] for program in programs] == ["cpu", None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert len(device_plan(small.device_demand).gpus) == 1
    assert rank_device(0, stays_on_cpu=small.stays_on_cpu).type == "cuda"
    assert with_chosen_engine(small, {})[0].engine.kind == "vllm"


def of_two_full_policies(count: int, **section: Any) -> RunConfig:
    policies = {f"policy{number}": {"learning_rate": 1e-5} for number in range(count)}
    config = configuration().model_dump(exclude_none=True)
    seats = {f"seat{number}": f"policy{number}" for number in range(count)}
    return RunConfig.model_validate(config | {"policies": policies, "seats": seats, **section})


def test_each_policy_that_trains_all_weights_has_an_engine_of_its_own() -> None:
    config = of_two_full_policies(2)
    assert [list(base.policies) for base in config.bases] == [["policy0"], ["policy1"]]
    plan = plan_devices(config.device_demand, machine(2))
    assert plan.engines == ((0,), (1,))
    assert [plan.name_of_engine(number).split("/")[-1] for number in range(2)] == [
        "unused for policy0",
        "unused for policy1",
    ]
    embedded = of_two_full_policies(2, engine={"replicas": 1})
    assert len(embedded.bases) == 1, "an embedded engine holds several sets of weights"


def test_engines_of_several_policies_share_one_gpu_with_their_trainer() -> None:
    config = of_two_full_policies(2)
    plan = plan_devices(config.device_demand, machine(1))
    assert (plan.ranks, plan.engines, plan.shares) == ((0,), ((0,), (0,)), (0.225, 0.225))
    assert plan.share_of_rank(0) == pytest.approx(1 - 0.45 - 3 * CONTEXT / CARD.total)
    assert plan.lines()[0].count("engine ") == 2
    with pytest.raises(ConfigError, match="CUDA contexts"):
        plan_devices(of_two_full_policies(2, engine={"vllm": {}, "memory_share": 0.5}).device_demand, machine(1))
    half_free = [gpu._replace(memory=Memory(8 << 30, 24 << 30)) for gpu in machine(1)]
    (told,) = plan_devices(config.device_demand, half_free).memory_conflicts()
    assert re.search(r"GPU 0: engine 0 of .* and engine 1 of .* take 45% of its memory, 10\.8 GiB, and 8\.0 are", told)


def test_ordinary_tests_and_what_they_start_see_no_gpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
