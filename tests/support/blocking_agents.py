"""A run of 64 synchronous agents at once, eight of which then hang for ever; it is stopped by SIGTERM.

    python -m tests.support.blocking_agents DIRECTORY

is the run itself. The engine is scripted, and the agents call it over HTTP with the standard library, in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.stops import INTERRUPTED
from agentrl.app.supervisor import run_guarding_event_loop
from agentrl.app.training import run_training
from agentrl.config.run import RunConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.support.recording_trainer import RecordingTrainer

AGENTS = 64
HANGING = 8
STEPS_MEANWHILE = 3
"""Steps that the run takes while calls hang, before it is stopped."""
ENDED_S = 120.0
"""Seconds after which the run hangs."""


class Agents(agentrl.HarnessEnvironment):
    """An agent that blocks its thread."""

    seats = ("solver",)

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> str:
        return await asyncio.to_thread(solve, task.data["question"], endpoint.url, endpoint.key)

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float("7" in episode.result)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"t{n}", data={"question": f"{n} + 1?"}) for n in range(1000)]


class _Together:
    """Counts agents at once, lets the first ones wait for each other, and some of them hang."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = self.most = self._hanging = 0
        self._all = threading.Barrier(AGENTS)
        self._have_met = False

    def meet(self) -> None:
        """Wait until all agents have begun; only the first ones do."""
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        if not self._have_met:
            with contextlib.suppress(threading.BrokenBarrierError):  # they do not run at once
                self._all.wait(60)
            self._have_met = True

    def leave(self) -> None:
        """Hang, or end."""
        with self._lock:
            self._inside -= 1
            self._hanging += 1
            is_hanging = self._hanging <= HANGING
        if is_hanging:
            threading.Event().wait()


_TOGETHER = _Together()


def solve(question: str, url: str, key: str) -> str:
    """An agent as people write it, without `async`."""
    body = {"model": "solver", "messages": [{"role": "user", "content": question}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    _TOGETHER.meet()
    with urllib.request.urlopen(request) as response:
        reply = json.load(response)["choices"][0]["message"]["content"]
    _TOGETHER.leave()
    return str(reply)


def live(directory: Path) -> None:
    """The run."""

    async def engine(plan: object, versions: Mapping[str, object], tell: object, log: object) -> ScriptedEngine:
        return ScriptedEngine(lambda request, *_: [*str(request.seed % 10).encode(), STOP_TOKEN], versions=versions)  # type: ignore[arg-type]

    config = RunConfig.model_validate(
        {
            "name": "run",
            "directory": str(directory),
            "steps": 100_000,
            "max_in_flight": AGENTS,
            "environment": {"id": "unused"},
            "model": {"path": "unused"},
            "policies": {"solver": {"step_size": 16, "max_staleness": 8}},
            "credit": {"group_size": 2},
            "checkpoint": {"every": 1000},
            "evaluation": {"tasks": 0},
        }
    )
    factories = RunFactories(
        engine=engine,
        trainer=lambda plan, run: RecordingTrainer(["solver"], versions=run / "versions"),
        chat_format=lambda model: PlainChatFormat(),
    )
    run = run_guarding_event_loop(run_training(config, Agents, factories=factories), directory / "run")
    (directory / "most").write_text(str(_TOGETHER.most))
    sys.exit(INTERRUPTED if run.interrupted else 0)  # as the command line does


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of the run."""

    agents_at_once: int
    threads: float
    """What the run's metric says of them."""
    steps: int
    """Steps taken before it was stopped."""
    stop_seconds: float
    status: int
    output: str


def stop_run(directory: Path) -> Outcome:
    """Start the run, and stop it once it has taken steps while calls hang."""
    command = [sys.executable, "-m", "tests.support.blocking_agents", str(directory)]
    with (directory / "output.txt").open("wb") as output:
        run = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + ENDED_S
        while len(steps := _steps(directory)) < STEPS_MEANWHILE:
            output_text = (directory / "output.txt").read_text(errors="replace")
            assert run.poll() is None, output_text
            assert time.monotonic() < deadline, f"no steps while calls hang: {output_text}"
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        stopped = time.monotonic()
        status = run.wait(ENDED_S)
        stop_seconds = time.monotonic() - stopped
    finally:
        run.kill()
        run.wait()
    return Outcome(
        agents_at_once=int((directory / "most").read_text()),
        threads=steps[-1]["episodes/threads"],
        steps=len(steps),
        stop_seconds=stop_seconds,
        status=status,
        output=(directory / "output.txt").read_text(errors="replace"),
    )


def _steps(directory: Path) -> list[dict[str, float]]:
    path = directory / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if "step/units" in line]


if __name__ == "__main__":
    live(Path(sys.argv[1]))
