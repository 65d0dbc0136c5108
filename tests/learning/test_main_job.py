"""The main job learns: in process, on the shipped model, in a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from agentrl.config.load import load

pytestmark = [pytest.mark.learning, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_reward_rises(repository: Path, tmp_path: Path, max_staleness: int) -> None:
    config = load(
        repository / "examples/01_tool_use.toml",
        [
            f"--directory={tmp_path}",
            "--steps=14",
            f"--policies.solver.max_staleness={max_staleness}",
            "--evaluation.tasks=192",
        ],
    )
    run = agentrl.train(config, quiet=True)
    assert run.summary["reward_end"] > run.summary["reward_start"] + 0.08
    if max_staleness == 0:
        assert all(step["staleness/max"] == 0 for step in run.metrics)
        assert max(step["k3"] for step in run.metrics) < 1e-6, "engine and trainer disagree about the same weights"


@pytest.mark.exhaustive
def test_lora_learns_and_its_adapter_loads(repository: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = load(
        repository / "examples/01_tool_use.toml",
        [
            f"--directory={tmp_path}",
            "--steps=14",
            "--policies.solver.lora.rank=16",
            "--policies.solver.learning_rate=2e-3",
            "--evaluation.tasks=192",
        ],
    )
    run = agentrl.train(config, quiet=True)
    assert run.summary["reward_end"] > run.summary["reward_start"] + 0.05
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    adapted = PeftModel.from_pretrained(base, str(run.policies["solver"].resolve()))
    assert any("lora" in name for name, _ in adapted.named_parameters())
    scored = agentrl.evaluate(config, run.policies["solver"])
    assert scored["evaluation/reward"] == pytest.approx(run.summary["reward_end"], abs=0.12)
