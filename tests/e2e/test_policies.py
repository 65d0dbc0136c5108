"""Policies of several kinds on one real base model: two adapters learn, one is frozen, past versions play."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import agentrl
from agentrl.app.policies import check_adapter_base, weights_from_directory
from agentrl.cli.main import main
from agentrl.core.errors import ConfigError, InputError
from agentrl.core.records import PolicyVersion
from agentrl.engines.process import ChildProgram
from tests.e2e.matches import Match, WatchedMatch, answering, check_critic, check_played, config_of, played, write_judge
from tests.processes import descendants

pytestmark = [pytest.mark.e2e]


@pytest.fixture
def base(repository: Path) -> Path:
    return repository / "environments" / "calculator" / "model"


@pytest.fixture
def judge(base: Path, tmp_path: Path) -> Path:
    return write_judge(base, tmp_path / "judge")


class Kills:
    """Ends an engine's process for good when the first step was taken; another must take its place."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        if not self.killed:
            module = ChildProgram("", {}).module.encode()
            self.killed = [number for number in descendants(os.getpid()) if module in command(number)][:1]
            os.kill(self.killed[0], signal.SIGKILL)

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """There is none."""


def command(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.mark.parametrize("replicas", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_each_seat_is_played_by_the_weights_it_says(
    base: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], replicas: int
) -> None:
    """In this process, and in replicas of which one dies: its successor has to serve all that are played."""
    before = {file.name: file.read_bytes() for file in judge.iterdir()}
    beside = {"replicas": replicas} if replicas else {}
    observers = [Kills()] if replicas else []
    with answering("7") as url:
        more: dict[str, Any] = {
            "policies": {"critic": {"kind": "remote", "url": url, "model": "any"}},
            "engine": {"max_context": 64, "slots": 8, **beside},
        }
        for steps in (4, 6):
            config = config_of(base, judge, tmp_path / "runs", steps=steps, **more)
            run = agentrl.train(config, environment=WatchedMatch, quiet=True, resume=steps == 6, observers=observers)
    assert all(len(each.killed) == 1 for each in observers)
    assert set(run.policies) == {"player", "other"}
    summary = json.loads((run.path / "summary.json").read_text())
    assert {name: part["steps"] for name, part in summary["policies"].items()} == {"player": 6, "other": 6}
    assert summary["rewards"] is None, "a figure of one policy is not that of the run"
    assert {file.name: file.read_bytes() for file in judge.iterdir()} == before
    turns = played(run.path)
    check_critic(turns, "7")
    opponents = check_played(turns, run.path, judge)
    capsys.readouterr()
    assert main(["run", "winrates", str(run.path), "--json"]) == 0
    matrix = json.loads(capsys.readouterr().out)
    assert {line["version"] for line in matrix} == {f"player@{lineage}.{step}" for lineage, step in opponents}
    assert sum(line["episodes"] for line in matrix) == sum(turn.policy == "past" for turn, _ in turns)
    assert any(0.0 <= metrics.get("win_rate/past", -1.0) <= 1.0 for metrics in run.metrics)
    assert main(["run", "winrates", str(run.path)]) == 0
    assert "player@0.0" in capsys.readouterr().out


def test_an_adapter_of_another_base_is_refused_by_name(base: Path, judge: Path, tmp_path: Path) -> None:
    file = judge / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "/models/other-base"}))
    with pytest.raises(InputError, match=r"policies\.judge\.path"):
        agentrl.train(config_of(base, judge, tmp_path / "runs"), environment=Match, quiet=True)
    moved = tmp_path / "moved"
    moved.mkdir()
    for part in base.iterdir():
        if part.is_file():
            (moved / part.name).write_bytes(part.read_bytes())
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    check_adapter_base(weights_from_directory("judge", judge), moved)
    (moved / "model.safetensors").write_bytes(b"\0" * (base / "model.safetensors").stat().st_size)
    with pytest.raises(InputError, match="base model"):
        check_adapter_base(weights_from_directory("judge", judge), moved)


@pytest.mark.exhaustive
def test_a_run_outlives_the_version_it_starts_from_and_notices_another_base(
    base: Path, judge: Path, tmp_path: Path
) -> None:
    own_base, runs = Path(shutil.copytree(base, tmp_path / "base")), tmp_path / "runs"
    one = config_of(own_base, judge, runs, name="one", steps=2, checkpoint={"every": 1, "versions": 1})
    agentrl.train(one, environment=Match, quiet=True)
    two = config_of(own_base, runs / "one" / "policies" / "other", runs, name="two", steps=1)
    agentrl.train(two, environment=Match, quiet=True)
    agentrl.train(one.model_copy(update={"steps": 4}), environment=Match, quiet=True, resume=True)
    assert not (runs / "one" / "versions" / "other" / "0.2").exists()
    shutil.rmtree(runs / "one")
    agentrl.train(two.model_copy(update={"steps": 2}), environment=Match, quiet=True, resume=True)
    weights = load_file(own_base / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, own_base / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.path: .*model\.safetensors"):
        agentrl.train(two.model_copy(update={"steps": 3}), environment=Match, quiet=True, resume=True)


@pytest.mark.parametrize("half", ["lora_A", pytest.param("lora_B", marks=pytest.mark.exhaustive)])
def test_an_adapter_with_huge_weights_is_refused_by_the_name_of_its_policy(
    base: Path, judge: Path, tmp_path: Path, half: str
) -> None:
    file = judge / "adapter_model.safetensors"
    tensors = {name: each * (1e30 if half in name else 1e10) for name, each in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"judge.*NaN"):
        agentrl.train(config_of(base, judge, tmp_path / "runs"), environment=Match, quiet=True)
