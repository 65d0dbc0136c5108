"""Deterministic mode: are the weights after many kills those of the undisturbed run, bit for bit?

Trains the calculator with an adapter at staleness 1, once undisturbed and once killed with SIGKILL again and again, at
random moments of start, sampling, training and checkpoints; compares the digests of the last published weights.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 32
KILLS = 25
LIFE_LIMIT_S = 300.0

SETTINGS = (
    "--deterministic=true",
    "--trainer.kind=in_process",
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


def figures(quick: bool) -> dict[str, float | None]:
    """1.0 where the weights are bit-identical after all kills, 0.0 where not."""
    if quick:
        return {"bit_identical_after_kills": None}
    with tempfile.TemporaryDirectory() as directory:
        undisturbed = digest(train(Path(directory), "undisturbed", steps=STEPS, kills=0))
        killed = digest(train(Path(directory), "killed", steps=STEPS, kills=KILLS))
    print(f"deterministic: undisturbed {undisturbed[:16]}, after {KILLS} kills {killed[:16]}", flush=True)
    return {"bit_identical_after_kills": float(undisturbed == killed)}


def train(directory: Path, name: str, *, steps: int, kills: int) -> Path:
    """Train to the end through `kills` kills; the run directory."""
    run, draw = directory / name, random.Random(0)
    for life in range(kills + 1):
        process = _start(directory, name, steps=steps, resume=(run / "config.json").exists())
        if life == kills:
            code = process.wait(timeout=LIFE_LIMIT_S)
            if code:
                raise SystemExit(f"the last life of {name} ended with exit code {code}:\n{_log(directory, name)}")
            return run
        _wait_for_work(process, run, most_entries=draw.choice((0, 1, 20, 60, 120)))
        time.sleep(draw.uniform(0.0, 0.3))
        if process.poll() is not None and process.returncode:
            raise SystemExit(
                f"life {life} of {name} ended with exit code {process.returncode}:\n{_log(directory, name)}"
            )
        if process.poll() is not None:
            raise SystemExit(f"{name} was over after {life} of {kills} kills; give it more steps")
        process.send_signal(signal.SIGKILL)
        process.wait()
        print(f"deterministic: kill {life + 1} of {kills} at step {_count(run, 'control.db', 'steps')}", flush=True)
    raise AssertionError


def _start(directory: Path, name: str, *, steps: int, resume: bool) -> subprocess.Popen[bytes]:
    arguments = [
        f"--directory={directory}",
        f"--name={name}",
        f"--steps={steps}",
        *SETTINGS,
        *(["--resume"] if resume else []),
    ]
    command = [sys.executable, "-m", "agentrl.cli", "train", str(ROOT / "examples/01_tool_use.toml"), *arguments]
    with (directory / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


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


def digest(run: Path) -> str:
    """Of the last published weights."""
    weights = run / "policies" / "solver" / "adapter_model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def _log(directory: Path, name: str) -> str:
    return (directory / f"{name}.log").read_text(errors="replace")[-4000:]
