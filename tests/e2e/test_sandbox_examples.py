"""The examples of sandboxes: 13, a reward for code, and 14, a suite of Harbor tasks."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.config.load import load
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.testing import play
from tests.markdown_pages import ROOT

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def code_reward() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "12_code_reward.py"))


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    ("expression", "reward"),
    [
        ("(x + 3) * 12", 1.0),
        ("12 * x + 36", 1.0),
        ("x + 3 * 12", 0.0),
        ("x +", 0.0),
        ("print(36) or 1", 0.0),
        ("__import__('os')._exit(0)", 0.0),
    ],
)
def test_a_function_is_rewarded_by_its_results(code_reward: dict[str, Any], expression: str, reward: float) -> None:
    task = agentrl.Task(id="one", data={"question": "", "steps": [["add", 3], ["multiply by", 12]]})
    assert play(code_reward["Functions"], task, [f"def f(x):\n    return {expression}"]).reward == reward


def test_every_task_needs_parentheses_and_is_in_one_split(code_reward: dict[str, Any]) -> None:
    trained, held_out = (code_reward["Functions"].tasks(split) for split in ("train", "held_out"))
    assert not {task.data["question"] for task in trained} & {task.data["question"] for task in held_out}
    for task in trained[:200]:
        verbs = [verb for verb, _ in task.data["steps"]]
        assert "multiply by" in verbs[next(at for at, verb in enumerate(verbs) if verb != "multiply by") :]


def test_the_warmed_up_model_can_be_loaded(code_reward: dict[str, Any], tmp_path: Path) -> None:
    code_reward["build_model"](tmp_path, steps=2)
    assert TemplateChatFormat.load(tmp_path).encode("def f(x):\n")
    assert code_reward["config"](tmp_path).environment.id.endswith("12_code_reward.py:Functions")


@pytest.mark.needs("bubblewrap")
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_model_learns_where_parentheses_belong(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "12_code_reward.py")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    before, after = ran.stdout.splitlines()[-2].split(": ")[1].split(", ")
    assert float(after.removesuffix(" after")) > float(before.removesuffix(" before")) + 0.4


@pytest.fixture(scope="module")
def harbor() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "13_harbor.py"))


def harbor_tasks(harbor: dict[str, Any], directory: Path) -> dict[str, agentrl.Task]:
    harbor["write_suite"](directory)
    options = {"directory": str(directory), "roots": {"ubuntu:24.04": "/"}}
    return {task.id: task for split in ("train", "held_out") for task in harbor["Shown"].tasks(split, **options)}


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    ("task", "command", "reward"),
    [
        ("make-apple", "mkdir apple", 1.0),
        ("make-apple", "touch apple", 0.0),
        ("delete-river", "rm river.txt", 1.0),
        ("delete-river", "rm *", 0.0),
        ("delete-river", "ls", 0.0),
    ],
)
def test_a_harbor_task_is_rewarded_by_its_tests(
    harbor: dict[str, Any], tmp_path: Path, task: str, command: str, reward: float
) -> None:
    tasks = harbor_tasks(harbor, tmp_path)
    assert len(tasks) == 32
    call = {"name": "bash", "arguments": {"command": command}}
    result = play(harbor["Shown"], tasks[task], [call, "Done."])
    assert result.reward == reward


@pytest.mark.learning
@pytest.mark.slow
@pytest.mark.exhaustive
def test_smollm2_learns_to_use_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / "models/SmolLM2-135M-Instruct").is_dir():
        pytest.skip("the model is not there: make smollm2")
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, str(EXAMPLES / "13_harbor.py"), "harbor_tasks"], check=True)
    run = agentrl.train(load(EXAMPLES / "13_harbor.toml", [f"--directory={tmp_path / 'runs'}"]), quiet=True)
    assert run.summary["reward_end"] > run.summary["reward_start"] + 0.2
