"""Watching a run: its screen on a terminal, another process's view of it, the report at the end."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import warm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

CHANGES = ["--steps=6", "--evaluation.tasks=16", "--policies.solver.step_size=16", "--max_in_flight=64"]


class Watched(NamedTuple):
    """A run that was looked at while it trained."""

    directory: Path
    screen: str
    """What its terminal was sent."""
    views: list[dict[str, object]]
    """What `agentrl run view --json` said meanwhile."""


def agentrl(directory: Path, *arguments: str) -> str:
    finished = warm.command(directory, *arguments)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def watched(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    directory = tmp_path_factory.mktemp("work")
    example = str(repository / "examples/01_tool_use.toml")
    arguments = ["train", example, "--name=seen", *CHANGES]
    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    training = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", *arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=secondary,
    )
    os.close(secondary)
    run, views, screen = directory / "runs" / "seen", [], b""
    while training.poll() is None:
        while select.select([primary], [], [], 0.5)[0]:
            try:
                screen += os.read(primary, 65536)
            except OSError:  # the other side was closed
                break
        if (run / "journal" / "control.db").exists():
            views.append(json.loads(agentrl(directory, "run", "view", "seen", "--json")))
    assert training.returncode == 0, screen.decode(errors="replace")[-2000:]
    os.close(primary)
    views.append(json.loads(agentrl(directory, "run", "view", "seen", "--json")))
    return Watched(run, screen.decode(errors="replace"), views)


def test_the_terminal_shows_one_screen_and_then_the_result(watched: Watched) -> None:
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", watched.screen)
    for text in ("loading trainer and engine", "step 0/6", "in flight", "held-out reward", "run directory: runs/seen"):
        assert text in plain


def test_another_process_sees_the_run_while_it_is_written(watched: Watched) -> None:
    assert (watched.views[0]["state"], watched.views[-1]["state"]) == ("running", "finished")
    assert not any(view["problem"] for view in watched.views)


def test_the_finished_run_has_its_screen_and_its_metrics(watched: Watched) -> None:
    workplace = watched.directory.parents[1]
    screen = agentrl(workplace, "run", "view", "seen", "--once")
    assert "seen  calculator  finished" in screen
    assert "96 trained" in screen
    assert 'agentrl_reward_mean{run="seen",policy="solver"}' in agentrl(
        workplace, "run", "metrics", "seen", "--prometheus"
    )
