"""`ctx.branch` with the embedded engine, the real trainer and worker processes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.cli.main import main
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from tests.contract.test_engine_vllm_process import needs_vllm
from tests.journal_oracle import judge
from tests.support.branching_calculator import BranchingCalculator

pytestmark = [pytest.mark.e2e]

BASE: dict[str, Any] = {
    "steps": 1,
    "environment": {"id": "calculator"},
    "model": {"path": "agentrl.environments:calculator/model"},
    "policies": {"solver": {"learning_rate": 3e-4, "step_size": 32, "lora": {"rank": 4}}},
    "credit": {"group_size": 4},
    "sampling": {"max_tokens": 32, "max_turns": 6},
    "engine": {"slots": 96, "max_context": 192},
    "trainer": {"loss": {"normalizer": 64}, "micro_batch_tokens": 8192},
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 0},
}


def config(directory: Path, name: str, **changes: Any) -> agentrl.RunConfig:
    return agentrl.RunConfig.model_validate({**BASE, "name": name, "directory": str(directory), **changes})


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_trees_are_sampled_and_trained_once(tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    run = agentrl.train(config(tmp_path, "run", workers=workers), environment=BranchingCalculator, quiet=True).path
    assert judge(run, ended=True) == []
    assert main(["episode", "why", str(run), "e0~0.r#3.b2"]) == 0
    assert "as branch 2 of e0, in group g0; branches are always admitted" in capsys.readouterr().out
    assert main(["run", "ledger", str(run)]) == 0
    turns = first_turns(run)
    assert len(turns) > 10
    assert sum(turn.cached_tokens >= turn.parent_context - 1 for turn in turns) >= 0.9 * len(turns)


def first_turns(run: Path) -> list[TurnEntry]:
    """The first turn that each branch sampled."""
    found = []
    with contextlib.closing(RunReader(run)) as reader:
        for line in reader.episodes("purpose = 'train' and turns > 0", limit=1000):
            view = reader.episode(line.episode)
            own = [body for _, body in view.entries[1 + view.inherited :] if isinstance(body, TurnEntry)]
            found += own[:1] if view.inherited else []
    return found


VLLM_BLOCK = 32
"""Tokens of a block in vLLM's prefix cache on CPUs; it shares whole blocks alone."""


@pytest.mark.exhaustive
@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_branches_find_their_prefix_in_vllm_s_cache(tmp_path: Path) -> None:
    engine = {"vllm": {}, "slots": 16, "max_context": 192}
    run = agentrl.train(config(tmp_path, "run", engine=engine), environment=BranchingCalculator, quiet=True).path
    assert judge(run, ended=True) == []
    turns = [turn for turn in first_turns(run) if turn.parent_context >= VLLM_BLOCK]
    assert turns
    assert min(turn.cached_tokens for turn in turns) >= VLLM_BLOCK


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_branches_run_in_ray_actors(tmp_path: Path) -> None:
    settings = config(tmp_path, "run", workers=2, cluster={"address": "local"})
    run = agentrl.train(settings, environment=BranchingCalculator, quiet=True).path
    assert judge(run, ended=True) == []
    turns = first_turns(run)
    assert len(turns) > 10
    assert sum(turn.cached_tokens >= turn.parent_context - 1 for turn in turns) >= 0.9 * len(turns)
