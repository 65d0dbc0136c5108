"""A run with a reward model in a process of its own, which is killed while two workers use it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentrl.app.run_parts import RunFactories, environment_of
from agentrl.app.training import run_training
from agentrl.config.load import load
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.router import EngineRouter
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import NondeterministicValueEntry, ScoreEntry
from agentrl.orchestrator.loop import Orchestrator
from tests.journal_oracle import judge
from tests.support.reward_models import recomputed_scores, save_reward_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOML = """
name = "run"
steps = 6
workers = 2
[environment]
id = "calculator"
[model]
path = "agentrl.environments:calculator/model"
[policies.solver]
step_size = 16
[credit]
group_size = 4
turn_credit = "to_go"
[sampling]
max_tokens = 32
[engine]
max_context = 512
[trainer]
micro_batch_tokens = 4096
[evaluation]
tasks = 0
[scorers.prm]
reward_model = "prm"
steps = "="
unscorable = 0.0
"""


class Killer:
    """Kills the reward model's process after each step."""

    def __init__(self) -> None:
        self.engine: ProcessEngine | None = None

    def found(self, orchestrator: Orchestrator) -> None:
        router = orchestrator.versions.engine
        assert isinstance(router, EngineRouter)
        engine = router.reward_models["reward model prm"]
        assert isinstance(engine, ProcessEngine)
        self.engine = engine

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        assert self.engine is not None
        child = self.engine.supervisor._child
        if child is not None:
            os.kill(child.process_id, signal.SIGKILL)

    def on_evaluation(self, versions: Mapping[str, object], metrics: Mapping[str, Mapping[str, float]]) -> None: ...


@pytest.mark.exhaustive
def test_every_turn_is_scored_once_and_right_although_the_model_is_killed(tmp_path: Path) -> None:
    save_reward_model(tmp_path / "prm")
    (tmp_path / "run.toml").write_text(TOML, encoding="utf-8")
    config = load(tmp_path / "run.toml", [f"directory={tmp_path}"])
    assert config.scorers["prm"].reward_model == str(tmp_path / "prm")
    assert config.scorers["prm"].credit == "difference"
    killer = Killer()
    factories = RunFactories(assembled=killer.found)
    asyncio.run(run_training(config, environment_of(config), quiet=True, factories=factories, observers=[killer]))
    assert killer.engine is not None
    assert killer.engine.supervisor.losses >= 2
    assert judge(tmp_path / "run", ended=True) == []
    reader, scores = RunReader(tmp_path / "run"), 0
    for line in reader.episodes("stop_reason = completed", limit=10_000):
        entries = dict(reader.episode(line.episode).entries)
        expected = recomputed_scores(entries, tmp_path / "prm", config.scorers["prm"])
        recorded = {name: body for name, body in entries.items() if "?" in name}
        assert recorded.keys() == expected.keys()
        before = 0.0
        for name, (value, _) in expected.items():
            body = recorded[name]
            if value is None:
                assert body == NondeterministicValueEntry("score", None)
                continue
            assert isinstance(body, ScoreEntry)
            assert body.score == pytest.approx(value, abs=1e-4)
            assert body.value == pytest.approx(value - before, abs=2e-4)
            before = value
            scores += 1
    reader.close()
    assert scores > 50
