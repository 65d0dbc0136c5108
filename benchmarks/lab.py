"""Two policies that learn together, measured exactly: Kuhn poker and the signalling game, five seeds an arm.

    python -m benchmarks.lab [--directory DIR] [--seeds 5] [--report] [--quick]
    python -m benchmarks.lab --part defaults     # see lab_defaults.py

`kuhn`: exploitability of the last version in chips a hand, mean over the seeds; `kuhn_worst`: of the worst seed.
`kuhn_no_entropy`: the mean without entropy bonus; `kuhn_start`, `signalling_start`: of the first version.
`signalling`: held-out reward at the end, mean over the seeds, `signalling_worst`: of the worst.
`frozen_speaker`, `frozen_listener`: the mean where only the other policy learns; chance is 0.125.
Runs that are already in the directory count; `--report` starts none. A line per arm has its mean and standard error.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import tomllib
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import agentrl
from agentrl.environments.kuhn_poker import exploitability, read_strategy
from agentrl.environments.kuhn_poker.env import QUESTIONS
from benchmarks.report import ROOT, Report, completed

KUHN, SIGNALLING = "17_kuhn_poker.toml", "18_signalling.toml"
FROZEN = {"kind": "frozen"}
BIG_STEPS = {f"policies.{seat}.step_size": 256 for seat in ("first", "second")} | {"engine.slots": 256}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "kuhn": (KUHN, BIG_STEPS),
    "kuhn_no_entropy": (KUHN, BIG_STEPS | {"trainer.entropy_bonus": 0.0}),
    "signalling": (SIGNALLING, {}),
    "frozen_speaker": (SIGNALLING, {"policies.speaker": FROZEN}),
    "frozen_listener": (SIGNALLING, {"policies.listener": FROZEN}),
}
"""Example of each arm, and what replaces its settings."""


def play(example: str, settings: Mapping[str, Any], run: Path) -> None:
    """Train a run that is not there yet."""
    config = tomllib.loads((ROOT / "examples" / example).read_text())
    for path, value in (settings | {"directory": str(run.parent), "name": run.name}).items():
        *sections, key = path.split(".")
        reduce(dict.__getitem__, sections, config)[key] = value
    if not run.exists():
        completed(agentrl.train(agentrl.RunConfig(**config)))


def measure(example: str, run: Path) -> list[float]:
    """Return a run's figure before training and at its end."""
    with agentrl.open_run(run) as opened:
        if example == SIGNALLING:
            rewards = [each.metrics["reward"] for each in sorted(opened.evaluations(), key=lambda each: each.step)]
            return [rewards[0], rewards[-1]]
        last = max(value.step for value in opened.metrics("reward/mean")) - 1
        late: dict[str, float] = {}
        for step in range(max(last - 5, 0), last + 1):  # a version's games may miss an information set
            late |= read_strategy(opened, step)
        return [exploitability(dict.fromkeys(QUESTIONS, 0.5) | bets) for bets in (read_strategy(opened, 0), late)]


def main() -> None:
    """Run what the directory lacks, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="runs; without it, a temporary directory")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--report", action="store_true", help="start no run")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--part", choices=("games", "defaults"), default="games")
    parser.add_argument("--tasks", nargs="+", default=(), metavar="NAME", help="tasks of `defaults`")
    parser.add_argument("--set", nargs="+", default=(), metavar="KEY=VALUE", help="settings of the runs of `defaults`")
    options = parser.parse_args()
    seeds = options.seeds = 1 if options.quick else options.seeds
    report = Report("lab", quick=options.quick, repeats=seeds, compared_with="without entropy bonus; one policy frozen")
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.directory or Path(temporary)).resolve()
        if options.part == "defaults":
            from benchmarks import lab_defaults  # which imports this module

            return lab_defaults.report(options, directory)
        for arm, (example, settings) in ARMS.items():
            runs = [directory / f"{arm}_{seed}" for seed in range(seeds)]
            for seed, run in enumerate(runs if not options.report else ()):
                play(example, settings | {"seed": seed} | ({"steps": 3} if options.quick else {}), run)
            values = [measure(example, run) for run in runs if run.exists()]
            if not values:
                continue
            starts, ends = zip(*values, strict=True)
            error = f" ± {stdev(ends) / math.sqrt(len(ends)):.3f}" if len(ends) > 1 else ""
            print(
                f"{arm}: {fmean(starts):.3f} → {fmean(ends):.3f}{error}, n = {len(ends)}",
                *map("{:.3f}".format, ends),
            )
            report.figures[arm] = fmean(ends)
            if arm in ("kuhn", "signalling"):
                report.figures |= {f"{arm}_worst": (max if arm == "kuhn" else min)(ends), f"{arm}_start": fmean(starts)}
    report.print()


if __name__ == "__main__":
    main()
