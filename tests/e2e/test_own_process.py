"""The default of `engine.replicas`: a process for the engine, where there are two cores and it can start."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.config import run
from agentrl.config.load import load
from agentrl.core import clock
from agentrl.engines.process import LocalPlacement
from tests.e2e.test_policies import command
from tests.processes import descendants

pytestmark = pytest.mark.e2e
ENGINE = b"agentrl.engines.remote.engine_server"


class EnginesSeen:
    """An observer that counts the processes of engines at each step, without those of other tests."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._others = set(descendants(os.getpid()))

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        children = set(descendants(os.getpid())) - self._others
        self.counts.append(sum(ENGINE in command(child) for child in children))

    def on_evaluation(self, versions: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """There is none."""


@pytest.fixture(autouse=True)
def _enough_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CORES_FOR_TWO", 1)


def trained(repository: Path, directory: Path, steps: int, *, resume: bool = False) -> EnginesSeen:
    overrides = [f"--directory={directory}", f"--steps={steps}", "--evaluation.tasks=0", "--engine.slots=16"]
    config = load(repository / "examples/01_tool_use.toml", [*overrides, "--policies.solver.step_size=16"])
    seen = EnginesSeen()
    result = agentrl.train(config, quiet=False, resume=resume, observers=[seen])
    assert result.metrics
    return seen


def test_a_run_is_resumed_where_its_engine_has_no_core_of_its_own(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trained(repository, tmp_path, 2).counts == [1, 1]
    monkeypatch.setattr(run, "CORES_FOR_TWO", 1 << 20)
    assert trained(repository, tmp_path, 4, resume=True).counts == [0, 0]


def test_an_engine_whose_process_cannot_start_runs_in_that_of_the_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def start(placement: LocalPlacement, program: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(LocalPlacement, "start", start)
    monkeypatch.setattr(clock, "FIRST_WAIT_S", 0.0)
    assert trained(repository, tmp_path, 2).counts == [0, 0]
    said = capsys.readouterr().err
    assert "Cannot allocate memory" in said
    assert "The engine runs in the run's process instead" in said
