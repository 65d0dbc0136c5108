"""Runs stopped inside their evaluations, evaluations that fail, and pinned versions that no engine serves.

    python -m benchmarks.oracle --part evaluations [--quick]

* Real runs (`agentrl train`, tiny models with adapters, one and two worker processes) get SIGINT or SIGTERM at random
  moments of their evaluations. Each stop must end with exit code 130 and a checkpoint of the newest step; the run is
  resumed until the next stop, and at last to its end. The second reader judges the directory after every process.
* In some runs the judge of held-out tasks is down, so that no episode of an evaluation is committed.
* In others the engine's process is killed after the files of an opponent's version were removed, so that its successor
  cannot load it again.

Figures:
    stops                      stops inside an evaluation
    stops_without_checkpoint   of those, stops with another exit code, without the checkpoint, or not resumed to the end
    runs_ended_by_evaluations  runs that a failed evaluation ended
    runs_ended_by_pins         runs that a lost version ended
    episodes_of_lost_versions  episodes that were dropped because of it: 0 means that nothing was tried
    stop_violations            violations that the second reader found in any of these runs
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import processes_of
from tests import journal_oracle

ROOT = Path(__file__).parents[1]
STOPS, STOPS_OF_A_RUN = 50, 10
LOST = 3
"""Runs that lose a version, and runs whose evaluations fail."""
LIMIT_S = 600.0
"""A process that takes longer hangs."""

CONFIGURATION = """
name = "run"
steps = {steps}
workers = {workers}
max_in_flight = 64
[environment]
id = "{environment}"
[model]
path = "agentrl.environments:calculator/model"
[credit]
group_size = 2
[sampling]
max_tokens = 6
[checkpoint]
every = 1000
versions = 0
[evaluation]
tasks = 12
attempts = 2
every = {every}
"""
DUEL = """
[trainer]
micro_batch_tokens = 24
recompute = true
[policies.asker]
step_size = 32
lora = {rank = 2}
[policies.solver]
step_size = 32
lora = {rank = 2}
"""
"""Steps of small pieces: one is in progress at most moments."""
PAST = """
[engine]
replicas = 1
[policies.solver]
step_size = 4
lora = {rank = 2}
[policies.past]
kind = "past"
of = "solver"
every = 1
size = 3
[seats]
solver = "solver"
rival = "past"
"""


@dataclass(slots=True)
class Tally:
    """What was done, and what came of it."""

    stops: int = 0
    bad_stops: list[str] = field(default_factory=list)
    ended_by_evaluations: list[str] = field(default_factory=list)
    ended_by_pins: list[str] = field(default_factory=list)
    lost_episodes: int = 0
    violations: list[str] = field(default_factory=list)


class Trained:
    """A run directory, and the processes that train it one after another."""

    def __init__(self, directory: Path, configuration: str, tally: Tally) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.tally = tally
        self.judge_down = directory / "judge_is_down"
        (directory / "run.toml").write_text(configuration)

    @property
    def run(self) -> Path:
        return self.directory / "runs/run"

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "agentrl.cli", "train", "run.toml"]
        resume = ["--resume"] if (self.run / "config.json").exists() else []
        environment = {**os.environ, "AGENTRL_JUDGE_DOWN": str(self.judge_down), "OMP_NUM_THREADS": "1"}
        with (self.directory / "said.txt").open("ab") as said:
            return subprocess.Popen([*command, *resume], cwd=self.directory, stdout=said, stderr=said, env=environment)

    def wait(self, process: subprocess.Popen[bytes], until: Callable[[], bool] = lambda: False) -> int | None:
        """Wait until the process ends or a condition holds; returns the exit code, None where it runs on."""
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and not until():
            if time.monotonic() > deadline:
                process.kill()
                return process.wait()
            time.sleep(0.05)
        return process.poll()

    def to_the_end(self) -> bool:
        """Resume until the end; returns whether it was reached."""
        code = self.wait(self.start())
        self.judge(ended=code == 0)
        return code == 0

    def judge(self, *, ended: bool = False) -> None:
        found = journal_oracle.judge(self.run, ended=ended)
        self.tally.violations += [f"{self.directory.name}: {violation}" for violation in found]

    def ask(self, query: str) -> list[tuple[int, ...]]:
        """Read the control log; nothing where there is none yet."""
        path = self.run / "journal/control.db"
        if not path.exists():
            return []
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as connection:
                return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # its tables are being made
            return []

    def is_evaluating(self) -> bool:
        """Whether episodes of an evaluation are in flight; those of earlier processes were dropped at the start."""
        return bool(
            self.ask(
                "SELECT 1 FROM admissions a WHERE purpose = 'evaluate' AND NOT EXISTS (SELECT 1 FROM episodes e WHERE"
                " e.episode = a.episode AND e.attempt = a.attempt) LIMIT 1"
            )
        )

    def has_checkpoint(self) -> bool:
        """Whether the newest step of each policy is in a complete checkpoint."""
        steps = dict(
            self.ask(  # type: ignore[arg-type]
                "SELECT policy, max(step) FROM steps WHERE lineage = (SELECT max(lineage) FROM steps) GROUP BY policy"
            )
        )
        manifests = (self.run / "checkpoints").glob("step_*/manifest.json")
        sealed = [json.loads(path.read_text())["versions"] for path in manifests]
        return any(all(versions[policy][1] == step for policy, step in steps.items()) for versions in sealed)

    def last_words(self) -> str:
        return " | ".join((self.directory / "said.txt").read_text(errors="replace").splitlines()[-3:])


def measure(quick: bool, root: Path, seed: int) -> dict[str, float | None]:
    """Play all of it, and count."""
    tally = Tally()
    number, wanted = 0, 1 if quick else STOPS
    while tally.stops < wanted:
        before, rng = tally.stops, random.Random(f"{seed} {number}")
        _stopped_run(
            root / f"stops-{number}", tally, min(wanted - tally.stops, STOPS_OF_A_RUN), rng, workers=1 + number % 2
        )
        if tally.stops == before and tally.bad_stops:
            raise SystemExit(f"no stop reached its evaluation: {tally.bad_stops[-1]}")
        number += 1
        print(f"{tally.stops} stops, {len(tally.bad_stops)} of them bad", flush=True)
    for each in range(1 if quick else LOST):
        _failing_evaluations(root / f"failing-{each}", tally)
    for each in range(0 if quick else LOST):
        _lost_versions(root / f"lost-{each}", tally)
    for fault in (*tally.bad_stops, *tally.ended_by_evaluations, *tally.ended_by_pins, *tally.violations):
        print(fault, flush=True)
    return {
        "stops": float(tally.stops),
        "stops_without_checkpoint": float(len(tally.bad_stops)),
        "runs_ended_by_evaluations": float(len(tally.ended_by_evaluations)),
        "runs_ended_by_pins": None if quick else float(len(tally.ended_by_pins)),
        "episodes_of_lost_versions": None if quick else float(tally.lost_episodes),
        "stop_violations": float(len(tally.violations)),
    }


def _configuration(environment: str, policies: str, *, steps: int, workers: int = 1, every: int = 1) -> str:
    module = ROOT / "tests" / "support" / "evaluated_duel.py"
    filled = CONFIGURATION.format(steps=steps, workers=workers, every=every, environment=f"{module}:{environment}")
    return filled + policies


def _stopped_run(directory: Path, tally: Tally, stops: int, rng: random.Random, *, workers: int) -> None:
    """Stop a run inside its evaluations, and resume it each time; a run that ends early makes room for another."""
    run = Trained(directory, _configuration("Duel", DUEL, steps=400, workers=workers), tally)
    before = tally.stops
    while tally.stops - before < stops:
        process = run.start()
        steps = run.ask("SELECT count(*) FROM steps") or [(0,)]
        taken = steps[0][0]

        def is_inside(taken: int = taken) -> bool:
            now = run.ask("SELECT count(*) FROM steps")
            return bool(now) and now[0][0] > taken and run.is_evaluating()

        try:
            code = run.wait(process, is_inside)
            time.sleep(2.0 * rng.random())
            if code is None and run.is_evaluating():
                process.send_signal(rng.choice([signal.SIGINT, signal.SIGTERM]))
                tally.stops += 1
                code = run.wait(process)
                if code != 130 or not run.has_checkpoint():
                    tally.bad_stops.append(f"{directory.name}: exit code {code}: {run.last_words()}")
            elif code is None:
                process.send_signal(signal.SIGTERM)
                code = run.wait(process)
        finally:
            process.kill()
        run.judge()
        if code != 130:
            break
    _shorten(run)
    if not run.to_the_end():
        tally.bad_stops.append(f"{directory.name}: not resumed to its end: {run.last_words()}")


def _shorten(run: Trained) -> None:
    """Let a run end two steps after its newest one."""
    newest = max((step for (step,) in run.ask("SELECT max(step) FROM steps GROUP BY policy")), default=0)
    toml = run.directory / "run.toml"
    toml.write_text(toml.read_text().replace("steps = 400", f"steps = {newest + 2}"))


def _failing_evaluations(directory: Path, tally: Tally) -> None:
    """Take the judge of held-out tasks down for a whole run, all its evaluations included."""
    run = Trained(directory, _configuration("Duel", DUEL, steps=4), tally)
    run.judge_down.touch()
    if not run.to_the_end():
        tally.ended_by_evaluations.append(f"{directory.name}: {run.last_words()}")


def _lost_versions(directory: Path, tally: Tally) -> None:
    """Remove the files of opponents' versions and kill the engine, again and again while the run takes steps."""
    run = Trained(directory, _configuration("Past", PAST, steps=40, every=4), tally)
    process = run.start()
    lost = 0
    try:
        while True:
            newest = _newest(run)
            code = run.wait(process, lambda newest=newest: _newest(run) >= newest + 6)  # type: ignore[misc]
            if code is not None:
                break
            for step in (_newest(run) - 2, _newest(run) - 3):
                for files in (run.run / "versions/solver").glob(f"*.{step}"):
                    shutil.rmtree(files)
                    lost += 1
            for engine in processes_of(process.pid).get("engine", []):
                os.kill(engine, signal.SIGKILL)
    finally:
        process.kill()
    if code != 0:
        tally.ended_by_pins.append(f"{directory.name}: exit code {code}: {run.last_words()}")
    ((dropped,),) = run.ask("SELECT count(*) FROM episodes WHERE drop_reason = 'version_gone'")
    tally.lost_episodes += dropped
    print(f"{directory.name}: {lost} versions removed, {dropped} episodes dropped", flush=True)


def _newest(run: Trained) -> int:
    (step,) = (run.ask("SELECT max(step) FROM steps") or [(0,)])[0]
    return step or 0
