"""A tiny model learns the tools of a user's environment from demonstrations, and then by reward."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from agentrl.config.load import load
from agentrl.environments.tiny_model.__main__ import main
from tests.markdown_pages import ROOT, python_of

pytestmark = [pytest.mark.learning, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(1200)]


def test_the_curve_of_an_own_environment_moves_on_the_first_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shop of docs/tutorials/own_model.md: rewards that are 0 with random weights rise by warm-up, then by
    learning."""
    (block,) = [text for text in python_of(ROOT / "docs/tutorials/own_model.md") if text.startswith("# shop.py")]
    (tmp_path / "shop.py").write_text(block)
    out = tmp_path / "models" / "shop"
    assert main([f"{tmp_path}/shop.py:Shop", "--out", str(out), "--until=0.6"]) == 0
    assert "demonstrations: 0.531" in capsys.readouterr().out, "half of them end too early"
    config = load(out / "train.toml", [f"directory={tmp_path}/runs", "steps=12", "evaluation.tasks=96"])
    run = agentrl.train(config, quiet=True)
    start, end = run.summary["reward_start"], run.summary["reward_end"]
    assert start > 0.2, "the warm-up did not find the tools"
    assert end > start + 0.15
