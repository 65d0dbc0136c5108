"""A pretrained model learns a tool: SmolLM2-135M-Instruct on examples/08_smollm2.toml.

    python -m benchmarks.smollm2 --model models/SmolLM2-135M-Instruct [--quick]

The directory is written by `examples/smollm2_checkpoint.py`.
`smollm2_start`, `smollm2_end`: held-out reward before and after, means of three seeds; `smollm2_gain`: the least gain
of the three. `minutes`: the longest of these runs, evaluations included.
`async_over_sync_reward`: mean training reward of the last four steps at `max_staleness` 1 over that at 0, the same
three seeds and numbers of steps; `async_over_sync_wall`: the same of the time the steps took.

`--quick` trains one seed, asynchronously.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import agentrl
from agentrl.config.load import load
from benchmarks.report import Report

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "08_smollm2.toml"
SEEDS = (0, 1, 2)
NAMES = (
    "smollm2_start",
    "smollm2_end",
    "smollm2_gain",
    "minutes",
    "async_over_sync_reward",
    "async_over_sync_wall",
)
LAST_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    start: float
    end: float
    training: float
    """Mean training reward of the last `LAST_STEPS` steps."""
    steps_s: float
    whole_s: float


def trained(model: Path, directory: Path, *, seed: int, max_staleness: int) -> Outcome:
    """Train the example with a seed and a staleness."""
    overrides = [
        *(f"--model.path={model.resolve()}", f"--directory={directory}", f"--seed={seed}"),
        *(f"--name=smollm2-{seed}-{max_staleness}", f"--policies.solver.max_staleness={max_staleness}"),
    ]
    started = time.perf_counter()
    run = agentrl.train(load(EXAMPLE, overrides), quiet=True)
    outcome = Outcome(
        start=run.summary["reward_start"],
        end=run.summary["reward_end"],
        training=statistics.fmean(run.summary["rewards"][-LAST_STEPS:]),
        steps_s=run.summary["rl_seconds"],
        whole_s=time.perf_counter() - started,
    )
    print(f"seed {seed}, max_staleness {max_staleness}: {outcome}", file=sys.stderr, flush=True)
    return outcome


def mean(outcomes: Sequence[Outcome], field: str) -> float:
    """The mean of a field over runs."""
    return statistics.fmean(getattr(each, field) for each in outcomes)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the directory of SmolLM2-135M-Instruct")
    parser.add_argument("--quick", action="store_true", help="one seed, asynchronously")
    options = parser.parse_args()
    seeds = SEEDS[:1] if options.quick else SEEDS
    report = Report("smollm2", quick=options.quick, repeats=len(seeds), compared_with="max_staleness 0, by turns")
    report.figures.update(dict.fromkeys(NAMES))
    ahead, synchronous = list[Outcome](), list[Outcome]()
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            ahead.append(trained(options.model, Path(directory), seed=seed, max_staleness=1))
            if not options.quick:
                synchronous.append(trained(options.model, Path(directory), seed=seed, max_staleness=0))
    report.figures["smollm2_start"] = mean(ahead, "start")
    report.figures["smollm2_end"] = mean(ahead, "end")
    report.figures["smollm2_gain"] = min(each.end - each.start for each in ahead)
    report.figures["minutes"] = max(each.whole_s for each in ahead) / 60
    if synchronous:
        report.figures["async_over_sync_reward"] = mean(ahead, "training") / mean(synchronous, "training")
        report.figures["async_over_sync_wall"] = mean(ahead, "steps_s") / mean(synchronous, "steps_s")
    report.print()


if __name__ == "__main__":
    main()
