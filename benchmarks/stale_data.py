"""What makes training on stale tokens cost fewer steps: losses, and a warm-up of the learning rate.

The negative control is a task on which stale data does harm (`tests.simulation.stale`).
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agentrl.config.sections import TrainerConfig
from benchmarks.report import ROOT
from tests.simulation.stale import settle


class Example(NamedTuple):
    """A configuration, with its number of steps, the reward to reach, and the bounds on staleness to compare."""

    file: str
    steps: int
    goal: float
    bounds: Sequence[int]


EXAMPLES = {
    "": Example("examples/01_tool_use.toml", 20, 0.85, (1, 4)),
    "smollm2_": Example("examples/07_smollm2.toml", 12, 0.6, (1,)),
}
"""Figures' prefix: the example."""
VARIANTS: Mapping[str, Sequence[str]] = {
    "default": (),
    "warm_up": ("--trainer.optimizer.warmup_steps=3",),
    "no_correction": ("--trainer.loss.name=reinforce",),
    "decoupled": ("--trainer.loss.name=decoupled_ppo",),
    "truncated_ratio": ("--trainer.loss.name=importance_sampling",),
    "masked_ratio": ("--trainer.loss.name=importance_sampling", "--trainer.loss.outside=mask"),
}
SEEDS, QUICK_STEPS = 5, 3
HARM_RATE, HARM_VERSIONS, HARM_STALENESS = 0.4, 40, 4


def harm(quick: bool) -> dict[str, float | None]:
    """Play the task on which stale data does harm: in lockstep, and with each variant; quick: one seed of three."""
    shares: dict[str, float] = {}
    runs: dict[str, tuple[int, Sequence[str]]] = {"lockstep": (0, ())}
    runs |= {name: (HARM_STALENESS, options) for name, options in VARIANTS.items()}
    for name in ("lockstep", "default", "no_correction") if quick else runs:
        staleness, options = runs[name]
        settled = [
            settle(trainer_section(options), staleness=staleness, rate=HARM_RATE, seed=seed, versions=HARM_VERSIONS)
            for seed in range(1 if quick else SEEDS)
        ]
        shares[name] = statistics.median(each.mean for each in settled)
        means = " ".join(f"{each.mean:.3f}" for each in settled)
        worst, lag = min(each.worst for each in settled), settled[0].mean_lag
        print(f"  harm {name}: {shares[name]:.3f} ({means}), worst {worst:.3f}, lag {lag:.1f}", flush=True)
    stale = {name: share for name, share in shares.items() if name != "lockstep"}
    return {
        "harm_default_over_lockstep": shares["default"] / shares["lockstep"],
        "harm_uncorrected_over_lockstep": shares["no_correction"] / shares["lockstep"],
        "harm_best_over_default": None if quick else max(stale.values()) / shares["default"],
    }


def trainer_section(options: Sequence[str]) -> TrainerConfig:
    """The trainer's section with options of the command line."""
    section: dict[str, dict[str, str]] = {"loss": {}, "optimizer": {}}
    for option in options:
        key, value = option.removeprefix("--trainer.").split("=")
        part, _, name = key.partition(".")
        section[part][name] = value
    return TrainerConfig.model_validate(section)


def figures(quick: bool) -> dict[str, float | None]:
    """Play the harmful task. Then train each example in lockstep and with each variant at each bound; a quick run takes
    three steps of the calculator in lockstep and with the default."""
    found = harm(quick)
    with tempfile.TemporaryDirectory(prefix="agentrl-stale-") as directory:
        for prefix, example in list(EXAMPLES.items())[: 1 if quick else None]:
            versions: dict[str, float] = {}
            for name, options in list(settings(example).items())[: 2 if quick else None]:
                steps, seeds = (QUICK_STEPS, 1) if quick else (example.steps, SEEDS)
                runs = [train(directory, name, example.file, steps, options, seed) for seed in range(seeds)]
                versions[name] = statistics.median(versions_to(example.goal, rewards, steps) for rewards, _ in runs)
                k3 = statistics.median(k3 for _, k3 in runs)
                print(f"  {prefix}{name}: {versions[name]:g} versions to {example.goal}, k3 {k3:.3f}", flush=True)
            if not quick:
                default = versions[f"default_{example.bounds[-1]}"]
                found[f"{prefix}stale_over_lockstep"] = default / versions["lockstep"]
                stale = (count for name, count in versions.items() if name.endswith(f"_{example.bounds[-1]}"))
                found[f"{prefix}best_over_default"] = min(stale) / default
    return found


def settings(example: Example) -> dict[str, Sequence[str]]:
    """The command-line options of each run of an example, by name."""
    runs: dict[str, Sequence[str]] = {"lockstep": ("--policies.solver.max_staleness=0",)}
    for bound in example.bounds:
        bounded = f"--policies.solver.max_staleness={bound}"
        runs |= {f"{name}_{bound}": (bounded, *options) for name, options in VARIANTS.items()}
    return runs


def versions_to(goal: float, rewards: Sequence[tuple[int, float]], steps: int) -> int:
    """The first version whose episodes reach the goal."""
    return next((version for version, reward in rewards if reward >= goal), steps)


def train(
    directory: str, name: str, file: str, steps: int, options: Sequence[str], seed: int
) -> tuple[list[tuple[int, float]], float]:
    """Train; returns the mean reward of the episodes that began with each version, and the largest k3 of a step."""
    name = f"{Path(file).stem}-{name}-{seed}"
    command = [
        *(sys.executable, "-m", "agentrl", "train", file, f"--name={name}", f"--directory={directory}"),
        *(f"--steps={steps}", f"--seed={seed}", "--evaluation.tasks=0", *options),
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
