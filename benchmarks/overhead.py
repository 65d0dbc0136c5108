"""What agentrl costs when engine, tools and trainer cost nothing.

    python -m benchmarks.overhead [--quick] [--against COMMIT]

`episodes_per_cpu_s`: four turns with one tool call each, a scripted engine that answers at once, incremental rendering
with the shipped model's chat template, the SQLite journal on disk, a recording trainer; CPU seconds of this process,
all its threads.
`kb_per_episode_10k`: growth of the resident set per episode with 10,000 episodes really in flight, held by
the engine in their second turn; no file descriptor is opened per episode.
`calls_per_episode`: function calls that cProfile counts in the loop's thread, exact on a busy machine too.
`episodes_ratio`, `calls_ratio`, with `--against`: of this tree over another commit, each measured in processes that
take turns; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import agentrl
from agentrl.app.assemble import RunParts, assemble_orchestrator
from agentrl.app.plan import resolve
from agentrl.config.run import RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.past_run import PastRun
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from benchmarks.report import ROOT, Report
from benchmarks.suite import checkout
from tests.support.recording_trainer import RecordingTrainer

MODEL = Path(__file__).resolve().parents[1] / "environments" / "calculator" / "model"
TURNS = 4
DESCRIPTORS = 8
"""How many file descriptors a run may open, however many its episodes."""


class Arithmetic(agentrl.ToolEnvironment):
    """A tool that costs nothing."""

    @agentrl.tool
    def calculate(self, a: int, op: str, b: int) -> int:
        """One operation on two integers."""
        return a + b

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        """How many calls it made."""
        return float(sum(len(turn.tool_calls) for turn in episode.turns))


TASKS = [agentrl.Task(id=f"t{n}", data={"question": f"What is {n} + {n + 1} + 7 + 9?"}) for n in range(256)]


class Silent:
    """An observer of nothing."""

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Ignored."""

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Ignored."""


def run_config(steps: int, in_flight: int, *, staleness: int = 1) -> RunConfig:
    """As many steps of 64 units as asked for."""
    return RunConfig.model_validate(
        {
            "steps": steps,
            "environment": {"id": "overhead"},
            "model": {"path": str(MODEL)},
            "policies": {"policy": {"step_size": 64, "max_staleness": staleness}},
            "credit": {"group_size": 8},
            "sampling": {"max_turns": TURNS},
            "checkpoint": {"every": 0, "versions": 0},
            "evaluation": {"tasks": 0},
            "max_in_flight": in_flight,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """A run whose policy calls the tool in every turn, ready to start."""

    orchestrator: Orchestrator
    engine: ScriptedEngine
    trainer: RecordingTrainer
    journal: SqliteJournal
    asked: list[int]
    """One entry, the number of engine calls so far."""


async def wire(directory: Path, config: RunConfig, *, hold: bool = False) -> Wired:
    """The real parts of a run, but for engine and trainer."""
    chat_format = TemplateChatFormat.load(MODEL)
    text = '<tool_call>{"name":"calculate","arguments":{"a":12,"op":"+","b":7}}</tool_call>'
    call = [*chat_format.encode(text), chat_format.stop_token_ids[0]]
    asked = [0]

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        asked[0] += 1
        return call

    engine = ScriptedEngine(script, versions={"policy": PolicyVersion("policy", 0, 0)}, hold=hold)
    trainer = RecordingTrainer(["policy"])
    journal = SqliteJournal(directory)
    served = ServedVersions(engine)
    await served.make_current(await trainer.publish("policy", PolicyVersion("policy", 0, 0)))
    parts = RunParts(
        served=served,
        trainer=trainer,
        chat_format=chat_format,
        store=journal,
        observer=Silent(),
        clock=SystemClock(),
        tasks=TASKS,
        past=PastRun(journal, {}, group_size=config.credit.group_size),
    )
    orchestrator = assemble_orchestrator(resolve(config, Arithmetic), parts)
    return Wired(orchestrator=orchestrator, engine=engine, trainer=trainer, journal=journal, asked=asked)


async def train_once(directory: Path, steps: int) -> float:
    """CPU seconds per episode of a whole run."""
    wired = await wire(directory, run_config(steps, in_flight=256))
    gc.collect()
    before = time.process_time()
    await wired.orchestrator.run()
    await wired.journal.close()
    spent = time.process_time() - before
    units = [unit for batch in wired.trainer.batches for unit in batch.units]
    assert len(units) == steps * 64, len(units)
    assert all(credit.reward == TURNS for unit in units for credit in unit.credits), "a tool call in every turn"
    return spent / len(units)


async def hold(directory: Path, episodes: int) -> tuple[float, int]:
    """Kilobytes per episode, and file descriptors in all, that `episodes` held in their second turn add."""
    config = run_config(episodes // 64 + 1, in_flight=episodes, staleness=episodes // 64)
    wired = await wire(directory, config, hold=True)
    gc.collect()
    before, descriptors = resident_kb(), open_descriptors()
    running = asyncio.get_running_loop().create_task(wired.orchestrator.run())
    while wired.asked[0] < episodes:
        await asyncio.sleep(0.05)
    wired.engine.release_held()
    wired.engine.hold_calls()
    while wired.asked[0] < 2 * episodes:
        await asyncio.sleep(0.05)
    await wired.journal.flush()
    gc.collect()
    grown, opened = resident_kb() - before, open_descriptors() - descriptors
    assert opened <= DESCRIPTORS, opened
    wired.orchestrator.stop()
    running.cancel()
    await asyncio.wait({running})
    await wired.journal.close()
    return grown / episodes, opened


def resident_kb(process: int | Literal["self"] = "self") -> float:
    """Resident set of a process, in kB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1000


def open_descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def count_calls(directory: Path) -> float:
    """Function calls per episode of a short run."""
    profile, steps = cProfile.Profile(), 8
    profile.runcall(asyncio.run, train_once(directory, steps))
    return float(vars(pstats.Stats(profile))["total_calls"]) / (64 * steps)


_MEASURE = """
import asyncio, cProfile, json, pstats, sys, tempfile
from pathlib import Path
from benchmarks.overhead import train_once
with tempfile.TemporaryDirectory() as scratch:
    asyncio.run(train_once(Path(scratch) / "warm", 4))
    seconds = asyncio.run(train_once(Path(scratch) / "timed", int(sys.argv[1])))
    profile = cProfile.Profile()
    profile.runcall(asyncio.run, train_once(Path(scratch) / "counted", 8))
print(json.dumps([1 / seconds, vars(pstats.Stats(profile))["total_calls"] / 512]))
"""
"""What both commits run, so it takes nothing from this module but what earlier ones have."""


def compare(commit: str, *, pairs: int, steps: int) -> dict[str, float]:
    """Compare episodes per CPU second and calls per episode with another commit's, in pairs of processes."""
    measured: dict[Path, list[tuple[float, float]]] = {}
    with checkout(commit) as other:
        for _ in range(pairs):
            for tree in (other, ROOT):
                sources = [tree, *sorted(tree.glob("packages/*/src"))]
                environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}
                command = [sys.executable, "-c", _MEASURE, str(steps)]
                done = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                measured.setdefault(tree, []).append(tuple(json.loads(done.stdout.splitlines()[-1])))
        pairs_of_figures = list(zip(measured[other], measured[ROOT], strict=True))
    for (rate, calls), (own_rate, own_calls) in pairs_of_figures:
        print(f"  {commit}: {rate:.0f} episodes per CPU s, {calls:.0f} calls; here {own_rate:.0f}, {own_calls:.0f}")
    return {
        "episodes_ratio": statistics.median(own[0] / old[0] for old, own in pairs_of_figures),
        "calls_ratio": statistics.median(own[1] / old[1] for old, own in pairs_of_figures),
    }


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer episodes")
    parser.add_argument("--against", metavar="COMMIT", help="compare with another commit, in pairs")
    arguments = parser.parse_args()
    quick = arguments.quick
    repeats, steps = (3, 16) if quick else (7, 64)
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(train_once(Path(scratch) / "warm", 4))
        costs = [asyncio.run(train_once(Path(scratch) / f"run{repeat}", steps)) for repeat in range(repeats)]
        held = 10_000
        kilobytes, descriptors = asyncio.run(hold(Path(scratch) / "held", held))
        calls = count_calls(Path(scratch) / "counted")
    print(f"CPU µs per episode: {[round(cost * 1e6) for cost in costs]}; {descriptors} file descriptors more at {held}")
    report = Report("overhead", quick=quick, repeats=repeats, compared_with="nothing: absolute cost")
    report.figures["episodes_per_cpu_s"] = 1 / statistics.median(costs)
    report.figures["kb_per_episode_10k"] = kilobytes
    report.figures["calls_per_episode"] = calls
    if arguments.against:
        report.figures |= compare(arguments.against, pairs=repeats, steps=steps)
        report.compared_with = arguments.against
    report.print()


if __name__ == "__main__":
    main()
