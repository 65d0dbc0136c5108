"""A whole run with a scripted policy and a trainer that only records, as a process that may be killed.

    python -m benchmarks.oracle_lives ENVIRONMENT DIRECTORY STEPS [--resume]

The run is what `agentrl.train` makes of its configuration: journal, ledger, checkpoints and resumes are the real ones.
`ENVIRONMENT` is `module:Class`. The policy holds all seats and says words of random length that depend on the request
alone, unless the environment has a `script`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.config.plans import EnginePlan
from agentrl.config.run import RunConfig
from agentrl.core.errors import AgentRLError
from agentrl.core.ports import Engine, GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import resolve
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.support.recording_trainer import RecordingTrainer

ROOT = Path(__file__).resolve().parents[1]
POLICY = "policy"
IN_FLIGHT = 32

Agents = dict[tuple[str, int], tuple[int, float | None]]
"""Sampled tokens and reward by seat and index."""


def says_words(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """Between 1 and 40 letters."""
    return [*b"x" * (1 + request.seed % 40), STOP_TOKEN]


def train(environment: str, directory: Path, steps: int, *, resume: bool) -> int:
    """One process of a run; its exit code."""
    found = resolve(environment)
    config = RunConfig.model_validate(
        {
            "name": "run",
            "directory": str(directory),
            "steps": steps,
            "environment": {"id": environment},
            "model": {"path": "agentrl.environments:calculator/model"},
            "policies": {POLICY: {"step_size": 8, "max_staleness": 8}},
            "seats": dict.fromkeys(found.seats, POLICY),
            "credit": {"group_size": 1, "advantage": "none"},
            "sampling": {"max_tokens": 64},
            "evaluation": {"tasks": 0},
            "checkpoint": {"every": 10},
            "max_in_flight": IN_FLIGHT,
        }
    )
    script = getattr(found, "script", says_words)

    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], tell: Any, log: Any) -> Engine:
        return ScriptedEngine(script, versions=versions, seconds_per_token=1e-3, max_context=4096)

    factories = RunFactories(
        engine=engine,
        trainer=lambda config, directory: RecordingTrainer([POLICY], versions=directory / "versions"),
        chat_format=lambda model: PlainChatFormat(),
    )
    try:
        asyncio.run(run_training(config, found, factories=factories, resume=resume))
    except AgentRLError as error:
        sys.stderr.write(f"agentrl: {error}\n")
        return error.exit_code
    return 0


@contextlib.contextmanager
def life(
    environment: str, directory: Path, *, steps: int = 1_000_000, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run in `directory`, resumed if there is one; killed at the end of the block unless it ended."""
    resume = ["--resume"] if (directory / "run" / "journal" / "control.db").exists() else []
    command = [sys.executable, "-m", "benchmarks.oracle_lives", environment, str(directory), str(steps), *resume]
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **variables})
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def query(database: Path, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Rows of a database of the run."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(statement, values).fetchall()


def committed(run: Path) -> Iterator[tuple[str, Agents, Agents]]:
    """Each committed episode with its agents: as its entries say, and as its trajectories say."""
    told: dict[tuple[str, int], Agents] = {}
    for episode, attempt, seat, agent, tokens, reward in query(
        run / "journal" / "control.db",
        "SELECT episode, attempt, t.seat, t.agent, t.tokens, t.reward FROM trajectories t"
        " JOIN episodes e USING (episode, attempt) WHERE e.drop_reason IS NULL",
    ):
        told.setdefault((episode, attempt), {})[seat, agent] = tokens, reward
    tokens: dict[tuple[str, int], dict[tuple[str, int], int]] = defaultdict(lambda: defaultdict(int))
    rewards: dict[tuple[str, int], dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    rows = query(run / "journal" / "turns-0.db", "SELECT episode, attempt, body FROM entries")
    for episode, attempt, packed in rows:
        body = msgspec.msgpack.decode(packed)
        if body[0] == "turn":
            tokens[episode, attempt][body[1], body[2]] += len(body[7][0]) // 4
        elif body[0] == "reward":
            rewards[episode, attempt][body[1], body[2]].append(body[3] * body[6])
    for key, agents in told.items():
        given = rewards[key]
        recorded: Agents = {
            agent: (count, math.fsum(given[agent]) if agent in given else None) for agent, count in tokens[key].items()
        }
        yield key[0], recorded, agents


if __name__ == "__main__":
    sys.exit(train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), resume="--resume" in sys.argv))
