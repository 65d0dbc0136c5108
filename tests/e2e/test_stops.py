"""Signals late in the life of a run: while it closes, and while its process exits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.inspection.reader import RunReader

pytestmark = [pytest.mark.e2e]

ENVIRONMENT = """
import atexit, os, signal
import agentrl

class Sum(agentrl.Environment):
    seats = ("solver",)
    asked = False

    async def run(self, ctx):
        turn = await ctx.agent("solver").act(agentrl.user("1 + 1"))
        ctx.agent("solver").reward(float(len(turn.text)))
        if not Sum.asked:
            Sum.asked = True
            os.kill(os.getpid(), signal.{number})
            atexit.register(os.kill, os.getpid(), signal.{number})

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"t{{n}}", data={{}}) for n in range(4)]
"""
CONFIGURATION = """
name = "stopped"
steps = 50
max_in_flight = 8
[environment]
id = "environment.py:Sum"
[model]
path = "agentrl.environments:calculator/model"
[policies.solver]
step_size = 4
[credit]
group_size = 2
[sampling]
max_tokens = 4
[evaluation]
tasks = 0
"""


@pytest.mark.parametrize("number", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.exhaustive)])
def test_a_signal_while_a_stopped_process_exits_leaves_its_exit_code(tmp_path: Path, number: str) -> None:
    (tmp_path / "environment.py").write_text(ENVIRONMENT.format(number=number))
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    command = [sys.executable, "-m", "agentrl.cli", "train", "run.toml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 130, ended.stderr
    assert "stopped; to continue" in ended.stderr
    reader = RunReader(tmp_path / "runs/stopped")
    assert reader.standing() == "stopped"
    reader.close()
