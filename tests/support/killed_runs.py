"""A run killed with SIGKILL again and again, at random moments of start, sampling, training and checkpoints."""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIFE_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run by the command line, its own processes and all."""

    config: Path
    settings: tuple[str, ...]
    """Overrides of the file."""
    directory: Path
    """Where its runs lie."""
    most_entries: tuple[int, ...]
    """Journal entries that a life writes before it is killed, one of these."""

    def train(self, name: str, *, steps: int, kills: int) -> Path:
        """Train to the end through so many kills; the run directory."""
        run, draw = self.directory / name, random.Random(0)
        for life in range(kills + 1):
            with self._life(name, steps=steps, resume=(run / "config.json").exists()) as process:
                if life == kills:
                    process.wait(timeout=LIFE_LIMIT_S)
                else:
                    _wait_for_work(process, run, most_entries=draw.choice(self.most_entries))
                    time.sleep(draw.uniform(0.0, 0.3))
                    process.poll()
            if process.returncode > 0 or (life == kills and process.returncode):
                raise SystemExit(f"life {life} of {name} ended with {process.returncode}:\n{self._log(name)}")
            if life < kills and process.returncode == 0:
                raise SystemExit(f"{name} was over after {life} of {kills} kills; give it more steps")
            if life < kills:
                steps_taken = _count(run, "control.db", "steps")
                print(f"{name}: kill {life + 1} of {kills} after {steps_taken} steps of its policies", flush=True)
        return run

    @contextmanager
    def _life(self, name: str, *, steps: int, resume: bool) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the run, killed at the end of the block unless it has ended."""
        own = [f"--directory={self.directory}", f"--name={name}", f"--steps={steps}", *(["--resume"] if resume else [])]
        command = [sys.executable, "-m", "agentrl.cli", "train", str(self.config), *self.settings, *own]
        with (self.directory / f"{name}.log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def _log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")[-4000:]


PROPOSE_AND_SOLVE = """\
deterministic = true
environment.id = "agentrl.environments.propose_and_solve:ProposeAndSolve"
model.path = "agentrl.environments:propose_and_solve/model"
credit.group_size = 4
sampling = { max_tokens = 32, max_turns = 9 }
engine = { slots = 16, max_context = 256, refresh = "episode" }
trainer = { loss.normalizer = 32, entropy_bonus = 0.07 }
evaluation.tasks = 0
checkpoint = { every = 1, versions = 0 }

[policies]
proposer = { lora.rank = 4, learning_rate = 2e-3, step_size = 4, max_staleness = 1 }
solver = { lora.rank = 4, learning_rate = 5e-4, step_size = 32, max_staleness = 1 }
"""
"""A deterministic run of two policies."""
CALCULATOR = (
    "--deterministic=true",
    "--evaluation.tasks=0",
    "--checkpoint.every=1",
    "--checkpoint.versions=0",
    "--policies.solver.step_size=16",
    "--policies.solver.lora.rank=4",
    "--policies.solver.learning_rate=2e-3",
    "--credit.group_size=4",
    "--engine.slots=16",
    "--engine.refresh=episode",
)
"""What makes `examples/01_tool_use.toml` a deterministic run of small steps."""


def two_policies_job(directory: Path) -> Job:
    """Return a run of two policies, in one process."""
    config = directory / "propose_and_solve.toml"
    config.write_text(PROPOSE_AND_SOLVE)
    return Job(config=config, settings=(), directory=directory, most_entries=(0, 1, 40, 150, 300))


def calculator_job(directory: Path) -> Job:
    """Return a run of one policy."""
    config = ROOT / "examples/01_tool_use.toml"
    return Job(config=config, settings=CALCULATOR, directory=directory, most_entries=(0, 1, 20, 60, 120))


def digests(run: Path) -> dict[str, str]:
    """Of the last published weights of each policy that learns."""
    files = sorted((run / "policies").glob("*/*model.safetensors"))
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _wait_for_work(process: subprocess.Popen[bytes], run: Path, *, most_entries: int) -> None:
    """Until this life has written `most_entries` journal entries more than it found, or has ended."""
    before = _count(run, "turns-0.db", "entries")
    deadline = time.monotonic() + LIFE_LIMIT_S
    while process.poll() is None and _count(run, "turns-0.db", "entries") - before < most_entries:
        if time.monotonic() > deadline:
            raise SystemExit(f"a life wrote nothing for {LIFE_LIMIT_S:g} s")
        time.sleep(0.02)


def _count(run: Path, database: str, table: str) -> int:
    try:
        connection = sqlite3.connect(f"file:{run / 'journal' / database}?mode=ro", uri=True)
    except sqlite3.Error:
        return 0
    try:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    except sqlite3.Error:
        return 0
    finally:
        connection.close()
