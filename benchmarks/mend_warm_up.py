"""Whether a warm-up of the learning rate helps runs whose first steps train on stale tokens."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import ROOT

EXAMPLES = {"": ("examples/01_tool_use.toml", 20, 0.85), "smollm2_": ("examples/07_smollm2.toml", 12, 0.6)}
"""Figures' prefix: the configuration, its steps, and the goal."""
SETTINGS = {"no_warm_up": (1, 0), "warm_up": (1, 3), "lockstep": (0, 0)}
"""`max_staleness` and `warmup_steps`."""
SEEDS, QUICK_STEPS = 5, 3


def figures(quick: bool) -> dict[str, float | None]:
    """Train each example with each setting; a quick run takes three steps of the calculator with one seed."""
    found: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-warm-up-") as directory:
        for prefix, (file, steps, goal) in list(EXAMPLES.items())[: 1 if quick else None]:
            for name, (staleness, warm_up) in SETTINGS.items():
                runs = [
                    train(directory, file, QUICK_STEPS if quick else steps, staleness, warm_up, seed)
                    for seed in range(1 if quick else SEEDS)
                ]
                reached = [next((version for version, reward in run[0] if reward >= goal), steps) for run in runs]
                if not quick:
                    found[f"{prefix}{name}_versions"] = statistics.median(reached)
                found[f"{prefix}{name}_k3"] = statistics.median(run[1] for run in runs)
    return found


def train(
    directory: str, file: str, steps: int, staleness: int, warm_up: int, seed: int
) -> tuple[list[tuple[int, float]], float]:
    """Train; returns the mean reward of the episodes that began with each version, and the largest k3 of a step."""
    name = f"{Path(file).stem}-{staleness}-{warm_up}-{seed}"
    command = [
        *(sys.executable, "-m", "agentrl", "train", file, f"--name={name}", f"--directory={directory}"),
        *(f"--steps={steps}", f"--seed={seed}", "--evaluation.tasks=0"),
        *(f"--policies.solver.max_staleness={staleness}", f"--trainer.optimizer.warmup_steps={warm_up}"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    run = Path(directory, name)
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    k3 = max(line["k3"] for line in lines if "k3" in line)
    with contextlib.closing(sqlite3.connect(run / "journal" / "control.db")) as connection:
        query = "SELECT oldest_step, avg(reward) FROM episodes WHERE reward IS NOT NULL GROUP BY oldest_step"
        rewards = connection.execute(query).fetchall()
    print(f"  {name}: k3 {k3:.4f}, rewards {' '.join(f'{reward:.2f}' for _, reward in rewards)}", flush=True)
    return rewards, k3
