"""Training, evaluation, forks and replays in a process whose event loop is running, as in a notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.inspection.reader import RunReader
from tests.e2e.test_stops import CONFIGURATION
from tests.support import warm

pytestmark = [pytest.mark.e2e]

ENVIRONMENT = """
import os, signal
import agentrl

def grade(text):
    try:
        signal.signal(signal.SIGALRM, lambda *frame: None)
        signal.alarm(60)
        signal.alarm(0)
        return 1.0 + len(text)
    except Exception:
        return 0.0

class Sum(agentrl.Environment):
    seats = ("solver",)
    presses_at = None
    played = 0

    async def run(self, ctx):
        turn = await ctx.agent("solver").act(agentrl.user("1 + 1"))
        ctx.agent("solver").reward(grade(turn.text))
        Sum.played += 1
        if Sum.played == Sum.presses_at:
            os.kill(os.getpid(), signal.SIGINT)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"t{n}", data={}) for n in range(4)]
"""
NOTEBOOK = """
import asyncio, json
import agentrl
from agentrl.app.replays import replay
from agentrl.app.run_parts import load_config

async def main():
    Sum.presses_at = 12
    config = load_config("run.toml").model_copy(update={"name": "stopped"})
    stopped = agentrl.train(config, environment=Sum)
    Sum.presses_at = None
    run = agentrl.train(config.model_copy(update={"name": "whole", "steps": 2}), environment=Sum, quiet=True)
    score = agentrl.evaluate(config, policy=run.policies, environment=Sum, tasks=Sum.tasks("train"))
    (forked,) = agentrl.fork(run.path, "e0", at=0, environment=Sum)
    (same,) = replay(run.path, [("e0", None)], environment=Sum)
    print(json.dumps({
        "interrupted": [stopped.interrupted, run.interrupted],
        "steps": len(run.metrics),
        "evaluated": len(score.episodes),
        "graded": all(episode.reward > 0 for episode in score.episodes),
        "forked": forked.episode_id,
        "replayed": same.outcome,
        "loop": await asyncio.sleep(0, "still runs"),
    }))

asyncio.run(main())
"""


def test_a_notebook_trains_stops_evaluates_forks_and_replays(tmp_path: Path) -> None:
    """Its environment is defined in a cell, in no file."""
    (tmp_path / "run.toml").write_text(CONFIGURATION.replace("environment.py:Sum", "of the notebook"))
    ended = warm.cell(tmp_path, ENVIRONMENT + NOTEBOOK)
    assert ended.returncode == 0, ended.stderr
    assert "stopping: finishing the step and writing a checkpoint" in ended.stderr
    assert json.loads(ended.stdout) == {
        "interrupted": [True, False],
        "steps": 2,
        "evaluated": 4,
        "graded": True,
        "forked": "f0",
        "replayed": "identical",
        "loop": "still runs",
    }
    reader = RunReader(tmp_path / "runs/stopped")
    assert reader.standing() == "stopped"
    reader.close()
