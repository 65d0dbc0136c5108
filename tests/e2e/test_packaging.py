"""The wheel holds what a user needs: the first steps work from it, away from the source tree.

With the packages of the index alone: `make wheel-demo`; the lower bounds: `make oldest`.
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


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment that has the wheel and what the core needs, and nothing else."""
    return _installed(wheel, tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def whole(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment that has the wheel and all packages of this one."""
    directory = tmp_path_factory.mktemp("whole")
    agentrl = _installed(wheel, directory, "--no-deps")
    [packages] = directory.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")  # behind the wheel on the path
    return agentrl


def _installed(wheel: Path, directory: Path, *options: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    command = [str(directory / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    installed = subprocess.run([*command, *options, str(wheel)], capture_output=True, text=True, check=False)
    if installed.returncode and "onnection" in installed.stderr:
        pytest.skip(f"the package index cannot be reached: {installed.stderr[-300:]}")
    assert installed.returncode == 0, installed.stderr
    return directory / "bin/agentrl"


def step(agentrl: Path, directory: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command outside a checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(agentrl), *arguments],
        cwd=directory,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    return done.returncode, output


def new_environment(agentrl: Path, directory: Path) -> None:
    assert step(agentrl, directory, "env", "new", "word_sums")[0] == 0


def files(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "commands",
    [
        pytest.param([["env", "list"]], id="env list"),
        pytest.param([["env", "check", "word_sums/env.py"]], id="env check"),
        pytest.param([["train", "word_sums/train.toml", "--dry-run"]], id="dry run"),
    ],
)
def test_the_core_suffices_for_a_step(core: Path, tmp_path: Path, commands: list[list[str]]) -> None:
    new_environment(core, tmp_path)
    for command in commands:
        code, output = step(core, tmp_path, *command)
        assert code == 0, output


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "extras"),
    [
        (["demo"], "train,calculator"),
        (["train", "word_sums/train.toml"], "train"),
        (["evaluate", "word_sums/train.toml"], "train"),
    ],
    ids=["demo", "train", "evaluate"],
)
def test_a_step_that_needs_more_names_one_command_and_creates_nothing(
    core: Path, wheel: Path, tmp_path: Path, command: list[str], extras: str
) -> None:
    new_environment(core, tmp_path)
    before = files(tmp_path)
    for _ in range(2):  # the first leaves nothing that blocks the second
        code, output = step(core, tmp_path, *command)
        assert code == 2, output
        assert "torch, transformers, peft, safetensors, tokenizers, jinja2" in output
        assert output.count("pip install") == 1
        assert f"{wheel}[{extras}]" in output
    assert files(tmp_path) == before


@pytest.mark.exhaustive
def test_a_new_environment_trains_from_the_wheel(whole: Path, tmp_path: Path) -> None:
    new_environment(whole, tmp_path)
    small = ["--steps=1", "--policies.solver.step_size=8", "--evaluation.tasks=4"]
    code, output = step(whole, tmp_path, "train", "word_sums/train.toml", *small)
    assert code == 0, output
    assert (tmp_path / "runs/word_sums/summary.json").exists()


@pytest.mark.exhaustive
def test_the_demo_runs_from_the_wheel(whole: Path, tmp_path: Path) -> None:
    code, output = step(whole, tmp_path, "demo", "--steps=2", "--policies.solver.step_size=16", "--evaluation.tasks=8")
    assert code == 0, output
    summary = json.loads((tmp_path / "runs/demo/summary.json").read_text())
    assert summary["steps"] == 2
    model = json.loads((tmp_path / "runs/demo/config.json").read_text())["model"]["path"]
    assert Path(model).is_relative_to(whole.parents[1])
