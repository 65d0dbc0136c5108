"""A run whose versions are stored as changes: what serves, stays, is mirrored and resumed are the trained weights."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import agentrl
from agentrl.app.run_parts import RunFactories, environment_of
from agentrl.app.training import Run, run_training
from agentrl.cli.main import main
from agentrl.config.run import RunConfig
from agentrl.core.records import PolicyVersion
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.weights.reading import read_weights
from agentrl.inspection.reader import RunReader
from agentrl.orchestrator.loop import Orchestrator

pytestmark = [pytest.mark.learning, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]


def config_of(directory: Path, *, steps: int) -> RunConfig:
    return RunConfig(
        name="run",
        directory=str(directory),
        steps=steps,
        environment={"id": "calculator"},
        model={"path": "agentrl.environments:calculator/model", "dtype": "bfloat16"},
        policies={"solver": {"learning_rate": 3e-5, "step_size": 16}},
        credit={"group_size": 4},
        sampling={"max_tokens": 32, "max_turns": 6},
        engine={"slots": 16, "max_context": 192, "replicas": 1, "publish": "delta"},
        evaluation={"tasks": 0},
        checkpoint={"every": 0, "versions": 2},
    )


class Killer:
    """Kills the engine's process after every second step."""

    def found(self, orchestrator: Orchestrator) -> None:
        engine = orchestrator.versions.engine
        assert isinstance(engine, ProcessEngine)
        self.engine = engine

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        child = self.engine.supervisor._child
        if step % 2 and child is not None:
            os.kill(child.process_id, signal.SIGKILL)

    def on_evaluation(self, versions: Mapping[str, object], metrics: Mapping[str, Mapping[str, float]]) -> None: ...


def trained(run: Run) -> Mapping[str, torch.Tensor]:
    (checkpoint,) = sorted((run.path / "checkpoints").glob("step_*"))[-1:]
    return load_file(checkpoint / "solver" / "weights.safetensors")


def check(run: Run) -> None:
    """Compare the newest version, stored whole at the end of a run, with the weights of its checkpoint."""
    published = load_file(run.policies["solver"] / "model.safetensors")
    for name, master in trained(run).items():
        assert torch.equal(published[name].view(torch.int16), master.bfloat16().view(torch.int16)), name


def test_an_engine_that_is_killed_and_a_resumed_mirror_have_the_trained_weights(tmp_path: Path) -> None:
    killer = Killer()
    config = config_of(tmp_path, steps=4)
    factories = RunFactories(assembled=killer.found)
    run = asyncio.run(run_training(config, environment_of(config), quiet=True, factories=factories, observers=[killer]))
    assert killer.engine.supervisor.losses == 2
    check(run)
    changed = [step["changed_numbers"] for step in run.metrics]
    assert len(changed) == 4
    assert 0 < max(changed) < 0.5
    versions = run.path / "versions" / "solver"
    kept = sorted(path.name for path in versions.glob("0.*"))
    assert kept == ["0.0", "0.1", "0.2", "0.3", "0.4"], "the newest two, and what they are read from"
    assert [name for name in kept if (versions / name / "model.safetensors").is_file()] == ["0.0", "0.4"]
    (tmp_path / "there").mkdir()
    assert main(["run", "mirror", str(run.path), f"--to={tmp_path}/there/run", "--once"]) == 0
    resumed = agentrl.train(config_of(tmp_path / "there", steps=6), resume=True, quiet=True)
    check(resumed)
    versions = resumed.path / "versions" / "solver"
    reader = RunReader(resumed.path)
    try:
        for version in (PolicyVersion("solver", 1, 4), PolicyVersion("solver", 1, 5), PolicyVersion("solver", 1, 6)):
            weights = reader.log.published(version)
            assert weights is not None
            read_weights(weights, max_numbers=1 << 24)  # checks the digest that the journal has
    finally:
        reader.close()
    held_out = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"tasks": 4})})
    assert not (versions / "1.5" / "model.safetensors").exists()
    assert "evaluation/reward" in agentrl.evaluate(held_out, versions / "1.5")
