"""The examples of external agents: 09, a loop over the openai client, and 10, mini-swe-agent."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from tests.markdown_pages import ROOT

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.timeout(1800)


def run_example(name: str, directory: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name)]
    ran = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_loop_over_the_openai_client_learns(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    before, after = re.findall(r"\d\.\d\d", run_example("08_openai_client.py", tmp_path).splitlines()[-1])
    assert float(after) >= 0.9 > float(before)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("mini") is None, reason="needs the command `mini`: pipx install mini-swe-agent")
def test_mini_swe_agent_is_trained_on_repairs(tmp_path: Path) -> None:
    said = run_example("09_harness.py", tmp_path)
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in steps] == [f"step {n}: 24 episodes" for n in range(1, 9)]
    rewards = [float(line.rpartition(" ")[2]) for line in steps]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.2, rewards


@pytest.fixture(scope="module")
def repairs() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "09_harness.py"))


def test_a_repair_is_rewarded_by_its_test_alone(repairs: dict[str, Any], tmp_path: Path) -> None:
    environment = repairs["Repair"]
    for task in environment.tasks("train"):
        for operator in "+-*":
            (tmp_path / "f.py").write_text(f"def f(a, b):\n    return a {operator} b\n")
            shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
            episode = agentrl.HarnessEpisode(turns={}, result="", error=None, directory=tmp_path, truncated=False)
            right = operator == repairs["OPERATORS"][task.id.partition("-")[0]]
            assert environment().reward(task, episode) == float(right)


def test_what_the_model_is_shown_is_what_mini_asks_for(repairs: dict[str, Any], tmp_path: Path) -> None:
    """The calls of a demonstration are calls of mini's tool, and its model is one that agentrl loads."""
    repairs["build_model"](tmp_path, steps=2)
    chat = TemplateChatFormat.load(tmp_path)
    shown = next(repairs["repairs"](0)).messages
    for message in shown:
        if message.role == "assistant":
            (call,) = chat.parse([*chat.encode(message.content), chat.stop_token_ids[0]]).tool_calls
            assert (call.name, list(call.arguments)) == ("bash", ["command"])
    assert repairs["config"](tmp_path).environment.id.endswith("09_harness.py:Repair")


def test_a_missing_mini_is_named(repairs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="mini-swe-agent"):
        repairs["main"]()
