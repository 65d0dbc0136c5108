"""Settings that a run derives from its policies, its model and the machine, where they are left out."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agentrl.app import memory_estimate as planned
from agentrl.app import memory_estimate as run_memory
from agentrl.app.memory_estimate import (
    CPU_MICRO_BATCH,
    CPU_ROWS,
    MIN_CONTEXT,
    USED_SHARE,
    estimate_memory,
    with_chosen_token_limits,
)
from agentrl.cli.main import main
from agentrl.config import run
from agentrl.config.load import load
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.core.machine import Gpu, Memory

POSITIONS = 1024
"""Positions of the model in environments/calculator/model."""


def configured(repository: Path, **sections: Any) -> RunConfig:
    model = {"path": str(repository / "environments/calculator/model")}
    return RunConfig(**{"environment": {"id": "calculator"}, "model": model, **sections})


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(run_memory, "machine_memory", lambda: Memory(free=size, total=size))
    monkeypatch.setattr(planned, "_programs", lambda parts: [])


def test_the_trainer_takes_ray_where_there_are_several_ranks(repository: Path) -> None:
    assert configured(repository).trainer_plan.in_process
    assert not configured(repository, trainer={"ranks": 2}).trainer_plan.in_process
    local = configured(repository, cluster={"address": "local"})
    assert (local.trainer_plan.in_process, local.engine_in_process) == (False, False)
    assert (local.on_cluster, local.cluster.ray_address) == (False, "")
    assert configured(repository, cluster={"address": "auto"}).on_cluster


@pytest.mark.parametrize(
    ("cores", "sections", "in_process"),
    [
        (2, {}, False),
        (1, {}, True),
        (8, {"engine": {"replicas": 0}}, True),
        (8, {"policies": {"solver": {"max_staleness": 0}}}, True),
        (8, {"policies": {"solver": {"lora": {"rank": 4}}}}, True),
        (8, {"policies": {"solver": {"lora": {"rank": 4, "merge": True}}}}, False),
        (8, {"policies": {"solver": {"kind": "frozen"}}}, True),
        (1, {"engine": {"replicas": 1}}, False),
        (1, {"workers": 2}, False),
    ],
)
def test_the_engine_has_its_own_process_where_it_can_compute_beside_the_trainer(
    repository: Path, monkeypatch: pytest.MonkeyPatch, cores: int, sections: dict[str, Any], in_process: bool
) -> None:
    monkeypatch.setattr(run, "CORES_FOR_TWO", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert configured(repository, **sections).engine_in_process == in_process


def test_a_gpu_is_shared_in_one_process(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CORES_FOR_TWO", 1)
    monkeypatch.setattr("agentrl.core.machine.gpus", lambda: (Gpu("0", "card", Memory(1 << 34, 1 << 34)),))
    assert not configured(repository).engine_in_process, "so small a model stays on the CPU"
    monkeypatch.setattr(run, "MIN_GPU_PARAMETERS", 0)
    assert configured(repository).engine_in_process


def test_the_number_of_engines_is_that_of_the_replicas(repository: Path) -> None:
    assert configured(repository).engine.count == 1
    assert [configured(repository, engine={"replicas": number}).engine.count for number in (0, 1, 2)] == [1, 1, 2]


def test_engine_and_trainer_have_all_cores_where_they_compute_by_turns(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert configured(repository).threads == 8
    assert configured(repository, policies={"solver": {"max_staleness": 1}}).threads == 4
    assert configured(repository, policies={"solver": {"max_staleness": 0}}).threads == 8
    assert configured(repository, policies={"solver": {"max_staleness": 1}}, trainer={"ranks": 3}).threads == 2
    assert configured(repository, deterministic=True, policies={"solver": {"max_staleness": 0}}).threads == 1


def test_the_losses_of_a_step_are_divided_by_its_sampled_tokens(sample_run: Path) -> None:
    query = """SELECT normaliser, sum(tokens) FROM steps JOIN
        (SELECT DISTINCT policy AS p, lineage AS l, step AS s, episode, attempt, seat, agent FROM step_units)
        ON p = steps.policy AND l = steps.lineage AND s = steps.step
        JOIN (SELECT episode AS e, attempt AS n, seat AS w, agent AS i, tokens AS sampled FROM trajectories)
        ON e = episode AND n = attempt AND w = seat AND i = agent GROUP BY policy, lineage, step"""
    with sqlite3.connect(sample_run / "journal" / "control.db") as journal:
        found = journal.execute(query.replace("sum(tokens)", "sum(sampled)")).fetchall()
    assert found
    assert all(normaliser == sampled for normaliser, sampled in found)


def test_a_context_is_as_long_as_the_model_has_positions(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1 << 36)
    config = with_chosen_token_limits(configured(repository), {})
    assert (config.engine.max_context, config.trainer.micro_batch_tokens) == (POSITIONS, CPU_ROWS * POSITIONS)
    free(monkeypatch, 1 << 32)
    assert with_chosen_token_limits(configured(repository), {}) == config, "enough is enough"
    short = with_chosen_token_limits(configured(repository, engine={"max_context": 256}), {})
    assert short.trainer.micro_batch_tokens == CPU_MICRO_BATCH


def test_memory_bounds_contexts_and_micro_batches(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = configured(repository, engine={"max_context": MIN_CONTEXT}, trainer={"micro_batch_tokens": MIN_CONTEXT})
    free(monkeypatch, 1)
    size = int(1.3 * estimate_memory(least.engine_plan, least.trainer_plan).total / USED_SHARE)
    free(monkeypatch, size)
    config = with_chosen_token_limits(configured(repository), {})
    assert MIN_CONTEXT <= config.engine.max_context < POSITIONS
    assert estimate_memory(config.engine_plan, config.trainer_plan).total <= size
    free(monkeypatch, 1 << 36)
    kept = with_chosen_token_limits(configured(repository), config.model_dump(mode="json"))
    assert (kept.engine, kept.trainer) == (config.engine, config.trainer), "a resumed run keeps what was found"
    explicit = with_chosen_token_limits(
        configured(repository, engine={"max_context": 100}), config.model_dump(mode="json")
    )
    assert explicit.engine.max_context == 100


def test_a_memory_that_nothing_fits_into_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    free(monkeypatch, 1 << 20)
    with pytest.raises(ConfigError, match=r"engine\.slots"):
        with_chosen_token_limits(configured(repository), {})
    file = tmp_path / "train.toml"
    file.write_text(f'[environment]\nid = "calculator"\n[model]\npath = "{repository}/environments/calculator/model"\n')
    assert main(["doctor", str(file), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)["sections"]["memory"]
    assert any("not enough memory" in check["result"] for check in report)
    assert main(["train", str(file), f"--directory={tmp_path}"]) == 2
    assert "not enough memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_files_without_these_settings_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text('[environment]\nid = "calculator"\n[model]\npath = "."\n')
    config = load(tmp_path / "train.toml")
    assert (config.engine.max_context, config.trainer.micro_batch_tokens) == (0, 0)
