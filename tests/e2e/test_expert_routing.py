"""A mixture of experts in a run that is killed, and that has lost part of what its workers recorded."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.inspection.reader import RunReader
from agentrl.inspection.tokens import episode_tokens
from agentrl.journal.entries import TurnEntry
from tests.journal_oracle import judge
from tests.learning.test_other_models import random_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ENVIRONMENT = """
import agentrl


class Short(agentrl.ToolEnvironment):
    @agentrl.tool
    def calculate(self, a: int, op: str, b: int) -> int:
        "One operation."
        return a + b

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"t{n}", data={"question": f"What is {n} + {n}?"}) for n in range(64)]

    def reward(self, task, episode):
        return float(len(episode.turns[-1].text) % 2)
"""
STEPS = 6


def start(repository: Path, place: Path, *more: str) -> subprocess.Popen[str]:
    """The run, with its episodes in two processes and the engine in a third."""
    command = [
        *(sys.executable, "-m", "agentrl.cli", "train", str(repository / "examples/01_tool_use.toml")),
        *(f"--directory={place}", "--name=run", f"--model.path={place / 'moe'}"),
        *(f"--environment.id={place / 'short.py'}:Short", "--workers=2", f"--steps={STEPS}"),
        *(
            "--policies.solver.step_size=16",
            "--policies.solver.max_staleness=4",
            "--policies.solver.learning_rate=3e-3",
        ),
        *("--sampling.max_tokens=12", "--evaluation.tasks=0", "--checkpoint.every=1", "--engine.vllm=false"),
        *("--engine.capture_routing=true", *more),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def waiting(run: Path) -> list[tuple[str, int]]:
    """Committed episodes that no step has taken."""
    statement = (
        "SELECT episode, attempt FROM episodes e WHERE drop_reason IS NULL AND NOT EXISTS"
        " (SELECT 1 FROM step_units s WHERE s.episode = e.episode AND s.attempt = e.attempt)"
    )
    if not (run / "journal/control.db").exists():
        return []
    with closing(sqlite3.connect(f"file:{run}/journal/control.db?mode=ro", uri=True, timeout=20)) as connection:
        return connection.execute(statement).fetchall()


def test_lost_routing_costs_replay_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(ENVIRONMENT)
    random_model("qwen3_moe", repository / "environments/calculator/model", tmp_path / "moe")
    run = tmp_path / "run"
    with start(repository, tmp_path) as first:
        deadline = time.monotonic() + 300
        while len(metrics(run)) < 2 or len(waiting(run)) < 8:
            if first.poll() is not None or time.monotonic() > deadline:
                first.kill()
                pytest.fail(first.communicate()[0])
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
    ready = waiting(run)
    assert ready
    reader, lost = RunReader(run), {}
    for episode, attempt in ready[::2]:
        turns = [entry for _, entry in reader.episode(episode, attempt).entries if isinstance(entry, TurnEntry)]
        assert all("experts" not in turn.tokens.columns and turn.routing is not None for turn in turns)
        lost[episode] = turns[0].routing
        (run / "journal/routing" / turns[0].routing.folder / turns[0].routing.digest.hex()).unlink()
    shown = episode_tokens(reader, ready[0][0])
    assert any("expert routing is lost" in problem for problem in shown.problems)
    if len(ready) > 1:
        kept = episode_tokens(reader, ready[1][0])
        assert not kept.problems
        assert any(token.routing for row in kept.rows for token in row.tokens)
    reader.close()

    second = start(repository, tmp_path, "--resume")
    told, _ = second.communicate(timeout=600)
    assert second.returncode == 0, told
    assert told.count("UserWarning: episode") == 1, told
    assert told.count("ALARM lost_routing") == 1, told
    steps = metrics(run)
    with closing(sqlite3.connect(run / "journal/control.db")) as connection:
        trained = {episode for (episode,) in connection.execute("SELECT episode FROM step_units WHERE lineage = 1")}
    assert sum(step["lost_routing"] for step in steps) == len(lost.keys() & trained) > 0
    for step in steps:
        if step["lost_routing"]:
            assert step["unrouted_share"] > 0
        elif "mismatch/k3" in step:
            assert step["mismatch/k3"] < 1e-5
    assert any("mismatch/k3" in step for step in steps)
    assert judge(run) == []
