"""`ctx.branch` with the embedded engine, the real trainer and worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.cli.main import main
from agentrl.core.errors import ConfigError
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from tests.journal_oracle import judge
from tests.support import user_functions
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


@pytest.mark.parametrize("workers", [1, 2])
def test_trees_are_sampled_and_trained_once(tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    run = agentrl.train(config(tmp_path, "run", workers=workers), environment=BranchingCalculator, quiet=True).path
    assert judge(run, ended=True) == []
    reader = RunReader(run)
    assert main(["episode", "why", str(run), "e0~0.r#3.b2"]) == 0
    assert "as branch 2 of e0, in group g0; branches are always admitted" in capsys.readouterr().out
    first_turns = reused = 0
    for line in reader.episodes("purpose = 'train' and turns > 0", limit=1000):
        view = reader.episode(line.episode)
        own = [body for _, body in view.entries[1 + view.inherited :]]
        if view.inherited:
            turn = next(body for body in own if isinstance(body, TurnEntry))
            first_turns += 1
            reused += turn.cached_tokens >= turn.parent_context - 1
    assert first_turns > 10
    assert reused >= 0.9 * first_turns


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("credit.advantage = 'group_std'", {"credit": {"group_size": 4, "advantage": "group_std"}}),
        (
            'over="tree"',
            {"credit": {"group_size": 4, "advantage": f"{Path(user_functions.__file__).resolve()}:centred"}},
        ),
        ("credit.release = 'late'", {"credit": {"group_size": 4, "release": "late"}}),
        ("trainer.loss.normalizer = 'sequences'", {"trainer": {"loss": {"normalizer": "sequences"}}}),
        ("full weights at max_staleness above 0", {"policies": {"solver": {"step_size": 32}}}),
    ],
)
def test_settings_that_would_be_biased_are_refused(tmp_path: Path, setting: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="declares branches = 3, which cannot be combined with") as refused:
        agentrl.train(config(tmp_path, "run", **changes), environment=BranchingCalculator, quiet=True)
    assert setting in str(refused.value)
