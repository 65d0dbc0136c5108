"""Environments that misbehave: each in a short training run of its own, beside episodes that must be trained.

An act of `HARMLESS` costs its own episode at most: the run ends as if the other episodes had been alone. One of `FATAL`
ends the process that runs it, which with `workers = 1` is the run's own; the run is then resumed, with the message that
names the episode, until it goes past it. Afterwards every other episode was trained and the ledger holds.

Figures:
    hostile_environments  acts that were played and judged
    runs_ended            runs that a harmless act ended, or that resuming did not bring past a fatal one
    named                 share of the fatal ones named, with their episode, by the first message that could
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import agentrl
from agentrl.app import run_parts
from agentrl.app.run_parts import RunFactories, make_chat_format
from agentrl.app.supervisor import run_guarding_event_loop
from agentrl.app.training import run_training
from agentrl.config.plans import EnginePlan
from agentrl.config.run import RunConfig
from agentrl.core.errors import AgentRLError
from agentrl.core.ports import Engine, GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.scripted import ScriptedEngine
from agentrl.inspection.reader import RunReader
from tests.support.hostile_acts import FATAL, HARMLESS, MEMORY_BYTES
from tests.support.recording_trainer import RecordingTrainer

QUICK = ("exits", "interrupts", "recurses_in_an_effect", "kills_its_process", "stops_the_loop")
STEPS, STEP_SIZE, TASKS = 3, 8, 20
HOSTILE_TASK = "task-3"
LIVES = 4
"""Processes of a run: two that die, one that goes past the act, one to spare."""
SILENCE_S = 8.0
"""How long a run may stand still, before it is killed like one that hangs."""
LIMIT_S = 240.0
"""How long a process may take, the time aside in which it or a process it started waited for a processor: whether it
hangs must not depend on what else the machine does."""
LONGEST_S = 3600.0
"""How long it may take whatever else the machine does."""
CULPRIT = "agentrl: an environment broke the process of the run (ValueError: no at " + str(
    Path(__file__).with_name("hostile_acts.py")
)
"""How a run ends that called what an environment had put in the place of a function."""


class Hostile(agentrl.Environment):
    """Acts once as a policy, then as the act of its task wants it to, where that is the hostile one."""

    seats = ("player",)

    @classmethod
    def tasks(cls, split: agentrl.Split, seed: int = 0, act: str = "", place: str = "") -> Sequence[Task]:
        """The same tasks for each split."""
        return [Task(id=f"task-{number}", data={"act": act, "place": place}) for number in range(TASKS)]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """One turn, and the act."""
        player = ctx.agent("player")
        turn = await player.act(agentrl.user("Say something."))
        if ctx.task.id == HOSTILE_TASK:
            Path(ctx.task.data["place"], "acted").touch()  # noqa: ASYNC240 - at once
            await {**HARMLESS, **FATAL}[ctx.task.data["act"]](ctx)
        player.reward(float(len(turn.text) % 3))


def babbling_engine(versions: Mapping[str, PolicyVersion]) -> ScriptedEngine:
    """Says tokens that depend on the request alone."""

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        return np.random.default_rng(request.seed).integers(3, 97, 16).tolist()  # type: ignore[no-any-return]

    return ScriptedEngine(script, versions=versions, seconds_per_token=5e-4, max_context=4096)


async def _engine(plan: EnginePlan, versions: Any, tell: Any, log: Any) -> Engine:
    if not plan.demand.workers:
        return babbling_engine(versions)
    return await ProcessEngine(ChildProgram("tests.support.hostile_environments:babbling_engine", {}), versions).ready()


def play(act: str, directory: str, *, resume: bool) -> int:
    """One process of a run, to its end; its exit code."""
    config = RunConfig.model_validate(
        {
            "name": "run",
            "directory": directory,
            "steps": STEPS,
            "environment": {
                "id": "tests.support.hostile_environments:Hostile",
                "options": {"act": act, "place": directory},
            },
            "model": {"path": "agentrl.environments:calculator/model"},
            "policies": {"player": {"step_size": STEP_SIZE, "max_staleness": 1}},
            "credit": {"group_size": 1, "advantage": "none"},
            "sampling": {"max_tokens": 4},
            "evaluation": {"tasks": 0},
            "checkpoint": {"every": 1},
            "episode_timeout_s": 5.0,
            "max_in_flight": 12,
        }
    )
    factories = RunFactories(
        engine=_engine,
        trainer=lambda config, directory: RecordingTrainer(["player"], versions=directory / "versions"),
        chat_format=make_chat_format,
    )
    if act.startswith("exhausts_memory"):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 3 * MEMORY_BYTES, resource.RLIM_INFINITY))
    from tests.support.hostile_environments import Hostile as Importable  # not `__main__`'s

    run_parts.SILENCE_S = SILENCE_S  # a process that hangs is found sooner

    try:
        run_guarding_event_loop(
            run_training(config, Importable, factories=factories, resume=resume), Path(directory, "run")
        )
    except AgentRLError as error:
        sys.stderr.write(f"agentrl: {error}\n")
        return error.exit_code
    return 0


class Outcome:
    """What became of the run of one act."""

    def __init__(self, act: str) -> None:
        self.act = act
        self.problems: list[str] = []
        self.output = ""
        self.codes: list[int] = []
        self.is_named = False


def judge(act: str, directory: Path) -> Outcome:
    """Run an act to the end of its run, and look at what is left."""
    outcome = Outcome(act)
    while not outcome.codes or (outcome.codes[-1] != 0 and len(outcome.codes) < LIVES and act in FATAL):
        code, output = _live(act, directory, resume=bool(outcome.codes))
        outcome.codes.append(code)
        outcome.output += output
        if act in FATAL and code == 0 and not _is_over(directory):  # it ended the process as if all were well
            outcome.codes[-1] = -1
    if outcome.codes[-1] != 0:
        outcome.problems.append(f"the run ended ({outcome.codes})")
    if not (directory / "acted").exists():
        outcome.problems.append("it was never played")
    if act in FATAL and len(outcome.codes) == 1:
        outcome.problems.append("it is not fatal")
    _look(directory / "run", outcome)
    return outcome


def _is_over(directory: Path) -> bool:
    return (directory / "run" / "summary.json").exists()


def _live(act: str, directory: Path, *, resume: bool) -> tuple[int, str]:
    """Exit code and output of a process; one that stands still is killed."""
    log = directory / "log"
    command = [sys.executable, "-m", "tests.support.hostile_environments", "--play", act, str(directory)]
    with log.open("w+b") as stream:
        process = subprocess.Popen(
            command + ["--resume"] * resume,
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        began = time.monotonic()
        while process.poll() is None:
            time.sleep(0.05)
            acted = directory / "acted"
            since = acted.stat().st_mtime if acted.exists() else time.time()
            hangs = act.startswith("hangs") and not resume and time.time() - since > SILENCE_S
            took = time.monotonic() - began
            is_stuck = act.startswith("hangs") and resume and not _workers(log)
            limit_s = 4 * SILENCE_S if is_stuck else LIMIT_S
            if hangs or took > LONGEST_S or (took > limit_s and took - _waited_s(process.pid) > limit_s):
                process.kill()
        return process.wait(), log.read_text(errors="replace")


def _waited_s(session: int) -> float:
    """Seconds that the processes of a session have waited for a processor, all their threads together."""
    waited_ns = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            if os.getsid(int(process.name)) == session:
                for thread in process.glob("task/*/schedstat"):
                    waited_ns += int(thread.read_text().split()[1])  # time run, time waited, times run
    return waited_ns / 1e9


def _workers(log: Path) -> bool:
    return "worker processes" in log.read_text(errors="replace")


def _look(run: Path, outcome: Outcome) -> None:
    """The other episodes were trained, the ledger holds, and the fatal one is named."""
    try:
        reader = RunReader(run)
    except AgentRLError as error:
        outcome.problems.append(str(error))
        return
    with contextlib.closing(reader):
        if not reader.ledger().holds:
            outcome.problems.append("the ledger does not hold")
        rows = reader.log.rows(
            "SELECT e.episode, e.task, e.drop_reason, e.detail FROM episodes e WHERE e.purpose = 'train'"
        )
    lost = [row for row in rows if row[2] is not None and row[2] != "run_ended"]
    if others := [row for row in lost if row[1] != HOSTILE_TASK]:
        outcome.problems.append(f"others were dropped: {others[:3]}")
    if sum(row[2] is None for row in rows) < STEPS * STEP_SIZE:
        outcome.problems.append("not enough episodes were trained")
    if outcome.act in FATAL:
        dropped = [row[0] for row in rows if row[1] == HOSTILE_TASK and row[2] == "worker_lost"]
        by_name = any(f"{name} (task '{HOSTILE_TASK}') is dropped as worker_lost" in outcome.output for name in dropped)
        told = [line for line in outcome.output.splitlines() if " ran: " in line or "It was running " in line]
        running = any(f"{row[0]} (task '{HOSTILE_TASK}')" in line for row in rows for line in told)
        outcome.is_named = by_name or running or CULPRIT in outcome.output
        if not outcome.is_named:
            outcome.problems.append("it was not named")


def measure(quick: bool) -> dict[str, float | None]:
    """The figures; with `quick`, of a few acts only."""
    return figures(judged(QUICK if quick else [*HARMLESS, *FATAL]))


def judged(acts: Sequence[str]) -> list[Outcome]:
    """Play acts one after another, and tell of each."""
    outcomes = []
    for act in acts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="agentrl-hostile-") as directory:
            outcome = judge(act, Path(directory))
        outcomes.append(outcome)
        told = "; ".join(outcome.problems) or "ok"
        print(f"{act}: {told} ({outcome.codes}, {time.monotonic() - began:.0f} s)", flush=True)
        if outcome.problems:
            print("    " + outcome.output[-3000:].replace("\n", "\n    "), flush=True)
    return outcomes


def figures(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Of outcomes."""
    fatal = [outcome for outcome in outcomes if outcome.act in FATAL]
    return {
        "hostile_environments": float(len(outcomes)),
        "runs_ended": float(sum(bool(outcome.problems) for outcome in outcomes)),
        "named": sum(outcome.is_named for outcome in fatal) / len(fatal) if fatal else None,
    }


def main() -> int:
    """Be the process of an act's run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--play", nargs=2, metavar=("ACT", "DIRECTORY"), required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    return play(*options.play, resume=options.resume)


if __name__ == "__main__":
    sys.exit(main())
