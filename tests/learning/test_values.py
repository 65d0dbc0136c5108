"""A value head in place of a group: the calculator is learned from one episode per task; its steps are computed again,
and a resume may change the advantage."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from agentrl.app.replays import StepRecomputeResult, recompute_step_loss, replay_step
from agentrl.config.load import load
from agentrl.config.run import RunConfig
from agentrl.inspection.reader import RunReader
from agentrl.inspection.steps import step_list
from tests.sao import preset

pytestmark = [pytest.mark.learning, pytest.mark.slow, pytest.mark.timeout(300)]

GAE = '--credit.advantage={ name = "gae" }'


def config_of(repository: Path, place: Path, *changes: str) -> RunConfig:
    settings = ["--credit.group_size=1", "--policies.solver.max_staleness=0", "--checkpoint.every=2", *changes]
    return load(repository / "examples/01_tool_use.toml", [f"--directory={place}", *settings])


@pytest.mark.exhaustive
def test_the_reward_rises_without_groups(repository: Path, tmp_path: Path) -> None:
    run = agentrl.train(config_of(repository, tmp_path, GAE, "--steps=7", "--evaluation.tasks=96"), quiet=True)
    assert run.summary["reward_end"] > run.summary["reward_start"] + 0.1
    assert all(step["value/loss"] > 0 for step in run.metrics)
    assert all(step["advantage/zero_share"] == 0 for step in run.metrics[1:]), "rewards of 0 teach, too"


@pytest.mark.exhaustive
def test_the_values_of_the_sao_preset_explain_the_returns_of_long_episodes(repository: Path, tmp_path: Path) -> None:
    lake = ["--environment.id=frozen_lake", "--model.path=agentrl.environments:frozen_lake/model"]
    changes = [*lake, "--steps=18", "--evaluation.tasks=0", "--checkpoint.every=0"]
    run = agentrl.train(preset(repository, tmp_path, *changes), quiet=True)
    assert run.metrics[-1]["value/explained_variance"] > 0.1
    assert run.metrics[-1]["value/explained_variance"] > run.metrics[3]["value/explained_variance"]


def computed(run: Path) -> dict[int, StepRecomputeResult]:
    reader = RunReader(run)
    try:
        lines = step_list(reader)
        assert all(replay_step(reader, line).identical for line in lines)
        return {line.step: recompute_step_loss(reader, line) for line in lines}
    finally:
        reader.close()


@pytest.mark.exhaustive
def test_steps_are_computed_again_and_the_advantage_may_change(repository: Path, tmp_path: Path) -> None:
    small = ("--policies.solver.step_size=4", "--evaluation.tasks=0", "--checkpoint.versions=0")
    lives = [(3, GAE), (4, "--credit.advantage=none"), (6, GAE)]
    for number, (steps, advantage) in enumerate(lives):
        config = config_of(repository, tmp_path, advantage, f"--steps={steps}", *small)
        run = agentrl.train(config, resume=number > 0, quiet=True)
    found = computed(run.path)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    for step, each in found.items():
        assert (each.loss_again, each.grad_norm_again) == (each.loss, each.grad_norm), (step, each.text)
    assert any("1 step from there" in each.text for each in found.values()), "no published version has the head"
    assert all(each.grad_norm for each in found.values())
