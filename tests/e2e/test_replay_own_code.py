"""A newcomer's own environment, trained from a script: replay, rescore and fork run it, and refusals have the command
that works.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm import command as agentrl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = """\
import agentrl


class Sevens(agentrl.ToolEnvironment):
    def reward(self, task, episode):
        return episode.answer.count("7") / max(len(episode.answer), 4)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"{n}", data={"question": f"{n} ="}) for n in range(4)]


if __name__ == "__main__":
    config = agentrl.RunConfig(
        name="sevens",
        steps=1,
        environment={"id": "sevens.py"},
        model={"path": "agentrl.environments:calculator/model"},
        policies={"solver": {"step_size": 8}},
        sampling={"max_tokens": 8, "max_turns": 2},
        evaluation={"tasks": 0},
    )
    agentrl.train(config, environment=Sevens, quiet=True)
"""


def named(finished: subprocess.CompletedProcess[str]) -> list[str]:
    """The arguments of the command that a refusal names."""
    assert finished.returncode == 2, finished.stdout + finished.stderr
    (command,) = re.findall(r"^ *agentrl (.*--environment .*)$", finished.stderr, re.MULTILINE)
    return shlex.split(command)


@pytest.mark.exhaustive
def test_the_command_that_a_refusal_names_works(tmp_path: Path) -> None:
    file = tmp_path / "sevens.py"
    file.write_text(SCRIPT)
    subprocess.run([sys.executable, "sevens.py"], cwd=tmp_path, check=True)
    command = ["episode", "replay", "runs/sevens", "e1"]
    for verb in (["replay"], ["rescore"], ["fork", "--at", "0"]):
        again = agentrl(tmp_path, "episode", verb[0], "runs/sevens", "e1", *verb[1:])
        assert again.returncode == 0, "the user's own training chose the environment: " + again.stderr
    (tmp_path / "runs" / "sevens").rename(tmp_path / "runs" / "received")
    assert agentrl(tmp_path, "episode", "replay", "runs/received", "e1").returncode == 2, "the run carries no trust"
    allowing = ["--model.path=agentrl.environments:calculator/model"]
    received = ["episode", "replay", "runs/received", "e1", *allowing]
    assert agentrl(tmp_path, *named(agentrl(tmp_path, *received)), *allowing).returncode == 0
    assert agentrl(tmp_path, *received).returncode == 0, "the environment is named once per run"
    (tmp_path / "runs" / "received").rename(tmp_path / "runs" / "sevens")
    file.write_text(SCRIPT + "\n# edited\n")
    assert "edited since" in agentrl(tmp_path, *command).stderr
    file.write_text(SCRIPT)
    moved = tmp_path / "elsewhere.py"
    file.rename(moved)
    moved_command = named(agentrl(tmp_path, "episode", "replay", "runs/sevens", "e1"))
    assert moved_command[-1] == "NEW/sevens.py:Sevens"
    assert agentrl(tmp_path, *moved_command[:-1], "elsewhere.py:Sevens").returncode == 0
    moved.write_text(SCRIPT.replace("Sevens", "Numbers"))
    renamed = agentrl(tmp_path, *moved_command[:-1], "elsewhere.py:Sevens")
    assert renamed.returncode == 2
    assert "'Sevens'" in renamed.stderr
    assert agentrl(tmp_path, *moved_command[:-1], "elsewhere.py:Numbers").returncode == 0
