"""The mistakes everybody makes once: each is answered by one message that names the mend; `pytest -s` shows them.

Of the ten planted mistakes, "port in use" has no counterpart: nothing of agentrl listens on a port that is given to it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import main
from tests.support.warm import command

pytestmark = [pytest.mark.e2e]

SMALL = ["--steps=1", "--policies.solver.step_size=8", "--evaluation.tasks=1"]

WRONG_SEAT = """
import agentrl

class WrongSeat(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx):
        await ctx.agent("slover").act(agentrl.user("1 + 2 ="))

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id="t", data={})]
"""
NO_TYPES = """
import agentrl

class NoTypes(agentrl.ToolEnvironment):
    @agentrl.tool
    def add(self, a, b: int) -> int:
        return a + b

    def reward(self, task, episode):
        return 1.0

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id="t", data={"question": "1 + 2 ="})]
"""
BROKEN_TOOL = NO_TYPES.replace("a, b: int", "a: int, b: int").replace("a + b", "self.task.data['sum'] - b")
BROKEN_PROGRAM = """
import asyncio
import urllib.request

import agentrl

class Broken(agentrl.HarnessEnvironment):
    failed_reward = 0.0

    async def play(self, task, endpoint):
        body = b'{"model": "agent", "messages": [{"role": "user", "content": "1 + 2 ="}]}'
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        request = urllib.request.Request(f"{endpoint.url}/chat/completions", body, headers)
        await asyncio.to_thread(urllib.request.urlopen, request)
        raise TypeError("no number")

    def reward(self, task, episode):
        return 1.0

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id="t", data={})]
"""
RUN = """
import asyncio
import random
import time

import agentrl

class Planted(agentrl.Environment):
    async def run(self, ctx):
        agent = ctx.agent("agent")
        await agent.act(agentrl.user("1 + 2 ="))
        {line}

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id="t", data={})]

    async def later(self, agent):
        agent.reward(1.0)
"""
OUTSIDE = RUN.replace("{line}", "self.task = asyncio.create_task(self.later(agent))")
BLOCKING = RUN.replace("{line}", "time.sleep(1.5); agent.reward(1.0)")
UNSEEDED = RUN.replace("{line}", "agent.reward(random.Random().random())")


def say(directory: Path, *arguments: str, code: int, limit: int = 0) -> str:
    """What a command that must fail says; printed, to be judged by reading."""
    done = command(directory, *arguments, file_size=limit)
    said = done.stdout + done.stderr
    sys.stdout.write(f"\n$ agentrl {' '.join(arguments)}\n{said}\n")
    assert done.returncode == code, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (WRONG_SEAT, ["has no seat 'slover'", "its seats: 'solver'"]),
        (NO_TYPES, ["NoTypes.add", "parameter 'a' has no type", "`a: int`"]),
        (OUTSIDE, ["task Planted.later at", "env.py:18 in later", "outside run()", "ctx.gather"]),
        (BLOCKING, ["blocked", "env.py:11 in run: `time.sleep(1.5)", "ctx.sleep", "external=True"]),
        (UNSEEDED, ["run again", "ctx.rng", "line 11: `agent.reward(random.Random().random())`"]),
        (BROKEN_TOOL, ["tool add raised KeyError: 'sum' at", "env.py:6 in add", "return the reason as text"]),
        (BROKEN_PROGRAM, ["the program failed in all of", "TypeError: no number at", "env.py:14 in play", "Fix it"]),
    ],
    ids=[
        *("wrong seat", "tool without types", "reward outside the run", "blocking call", "unseeded random"),
        *("broken tool", "broken program"),
    ],
)
def test_the_checker_names_a_mistake_in_an_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    words: list[str],
) -> None:
    (tmp_path / "env.py").write_text(source.lstrip("\n"))
    monkeypatch.chdir(tmp_path)
    assert main(["env", "check", "env.py"]) == 1
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    for word in words:
        assert word in said


@pytest.mark.exhaustive
def test_a_blocked_loop_is_named_while_training(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(BLOCKING.lstrip("\n"))
    few = ["--policies.solver.step_size=2", "--credit.group_size=2"]  # each episode blocks for 1.5 s
    arguments = ["demo", "--environment.id=env.py:Planted", *SMALL, *few]
    said = say(tmp_path, *arguments, code=0)
    assert "WARNING the event loop" in said
    places = [line.partition(" by ")[2] for line in said.splitlines() if "has been blocked" in line]
    assert len(set(places)) == len(places), "once for each place: a busy disk may block it elsewhere, too"
    assert sum("env.py:11 in run" in place for place in places) == 1


def test_a_model_without_a_chat_template(repository: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(repository / "environments/calculator/model", model)
    (model / "chat_template.jinja").unlink()
    said = say(tmp_path, "demo", "--model.path=model", *SMALL, code=2)
    assert "chat template" in said
    assert "into chat_template.jinja" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[enviroment]\nid = "calculator"\n', "unknown key enviroment; did you mean environment?"),
        ("[policies.solver]\nstep_sise = 8\n", "did you mean policies.solver.step_size?"),
        ("[sampling]\ngroup_size = 4\n", "did you mean credit.group_size?"),
        ('[seats]\nslover = "policy"\n', "seats.slover: Calculator has no such seat; its seats: agent"),
    ],
    ids=["wrong section", "wrong key", "key of another section", "wrong seat"],
)
def test_a_mistake_in_the_toml_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    whole = text + '[model]\npath = "agentrl.environments:calculator/model"\n'
    if "calculator" not in text:
        whole += '[environment]\nid = "calculator"\n'
    (tmp_path / "run.toml").write_text(whole)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


OLD_PYTHON = """#!/bin/sh
[ "$1" = --version ] && echo "Python {version}" && exit 0
[ "$1" = -c ] && exec {python} -c "import sys; sys.version_info = ({parts}, 'final', 0); exec(sys.argv[1])" "$2"
exit 1
"""
"""An interpreter that runs code as an old version does, and makes no virtual environment."""


@pytest.mark.parametrize("version", ["3.9.2", "3.11.3"])
def test_an_old_python_is_told_so(version: str, repository: Path, tmp_path: Path) -> None:
    parts = version.replace(".", ", ")
    code = f"import sys; sys.version_info = ({parts}, 'final', 0); import agentrl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=repository)
    assert done.stderr.splitlines()[-1].startswith("ImportError: agentrl needs Python 3.11.4")
    assert "python3.11 -m venv .venv" in done.stderr

    old = tmp_path / "python3"
    old.write_text(OLD_PYTHON.format(version=version, parts=parts, python=sys.executable))
    old.chmod(0o755)
    for tool in ("sh", "make", "rm"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    shutil.copy(repository / "Makefile", tmp_path)
    for needed in ("pyproject.toml", "constraints.txt"):
        (tmp_path / needed).touch()
    made = subprocess.run(
        ["make", "setup"], cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    sys.stdout.write(made.stderr)
    assert made.returncode == 2
    assert f"found: Python {version}" in made.stderr
    assert "make setup PYTHON=/path/to/python3.11" in made.stderr


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path) -> None:
    said = say(tmp_path, "demo", *SMALL, code=74, limit=200_000)
    assert "could not be written" in said
    assert "ulimit -f" in said


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    said = say(tmp_path, "demo", *SMALL, code=74)
    assert "runs/demo" in said
    assert "--directory=DIR" in said
