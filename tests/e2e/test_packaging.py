"""The wheel holds what a user needs: the demo runs from it, away from the source tree.

Installing it into an empty environment takes two minutes: `make wheel-demo`; the lower bounds: `make oldest`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place)]
    subprocess.run([*command, str(repository)], check=True, capture_output=True, cwd=place)
    [built] = place.glob("episodic_rl-*.whl")
    return built


def test_the_wheel_holds_models_examples_and_types_and_no_tests_of_ours(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "agentrl/py.typed",
        "agentrl/examples/01_tool_use.toml",
        "agentrl/environments/calculator/model/model.safetensors",
        "agentrl/environments/calculator/model/tokenizer.json",
        "agentrl/environments/calculator/model/chat_template.jinja",
        "agentrl/environments/calculator/README.md",
        "agentrl/inspection/viewer/viewer.html",
        "agentrl/inspection/viewer/viewer.css",
        "agentrl/inspection/viewer/main.js",
    } <= set(names)
    assert not [name for name in names if Path(name).name.startswith("test_")]
    tops = {name.split("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"agentrl"}


@pytest.mark.exhaustive
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    small = ["--steps=2", "--policies.solver.step_size=16", "--evaluation.tasks=8"]
    arguments = [sys.executable, "-P", "-m", "agentrl.cli", "demo", *small, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=empty, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["summary"]["steps"] == 2
    config = json.loads((empty / "runs" / "demo" / "config.json").read_text())
    assert config["model"]["path"] == str(site / "agentrl" / "environments" / "calculator" / "model")
