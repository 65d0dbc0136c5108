"""`trainer.compile`: the step of compiled layers is the same, and kernels serve all layers and lengths."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentrl.core.errors import ConfigError
from agentrl.learn import layers, models
from tests.learn_cases import run_config, write_model


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
@pytest.mark.parametrize("options", [[], ["lora", "recompute"], ["lora", "experts"]])
def test_steps_are_the_same_and_no_length_is_compiled_anew(repository: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "tests.support.compiled_steps", *options]
    ran = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    plain, plain_next, first, second = json.loads(ran.stdout.splitlines()[-1])
    assert first["figures"] == pytest.approx(plain["figures"], rel=1e-5)
    assert second["figures"] == pytest.approx(plain_next["figures"], rel=1e-5)
    assert plain_next["graphs"] == 0
    assert 0 < first["graphs"] == second["graphs"] <= 20  # 17 with adapters on experts


def test_what_cannot_be_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.sharding = 'none'"):
        layers.check_compilable(sharded=True)
    monkeypatch.setattr(layers, "finds_compiler", lambda: False)
    with pytest.raises(ConfigError, match=r"apt install g\+\+"):
        models.load_models(run_config(write_model(tmp_path / "model"), compile=True).trainer_plan, torch.device("cpu"))
