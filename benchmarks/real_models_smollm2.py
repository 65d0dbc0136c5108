"""A pretrained model learns a tool: SmolLM2-135M-Instruct on examples/08_smollm2.toml. Needs `make smollm2`.

`smollm2_start`, `smollm2_end`: held-out reward before and after, means of three seeds; `smollm2_gain`: the least gain
of the three. `minutes`: the longest of these runs, evaluations included.
`async_over_sync_reward`: mean training reward of the last four steps at `max_staleness` 1 over that at 0, the same
three seeds and numbers of steps; `async_over_sync_wall`: the same of the time the steps took.

A run takes about five minutes, so a quick benchmark trains none.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import agentrl
from agentrl.config.load import load
from benchmarks.report import completed

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "08_smollm2.toml"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SEEDS = (0, 1, 2)
LAST_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Rewards and times of one run."""

    start: float
    end: float
    training: float
    """Mean training reward of the last `LAST_STEPS` steps."""
    steps_s: float
    whole_s: float


def trained(directory: Path, *, seed: int, max_staleness: int) -> Outcome:
    """Train the example with a seed and a staleness."""
    overrides = [
        *(f"--model.path={MODEL}", f"--directory={directory}", f"--seed={seed}"),
        *(f"--name=smollm2-{seed}-{max_staleness}", f"--policies.solver.max_staleness={max_staleness}"),
    ]
    started = time.perf_counter()
    run = completed(agentrl.train(load(EXAMPLE, overrides), quiet=True))
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


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    if quick:
        return {}
    if not MODEL.is_dir():
        print(f"skipped: {MODEL} is not there: make smollm2", flush=True)
        return {}
    ahead, synchronous = list[Outcome](), list[Outcome]()
    with tempfile.TemporaryDirectory() as directory:
        for seed in SEEDS:
            ahead.append(trained(Path(directory), seed=seed, max_staleness=1))
            synchronous.append(trained(Path(directory), seed=seed, max_staleness=0))
    return {
        "smollm2_start": mean(ahead, "start"),
        "smollm2_end": mean(ahead, "end"),
        "smollm2_gain": min(each.end - each.start for each in ahead),
        "minutes": max(each.whole_s for each in ahead) / 60,
        "async_over_sync_reward": mean(ahead, "training") / mean(synchronous, "training"),
        "async_over_sync_wall": mean(ahead, "steps_s") / mean(synchronous, "steps_s"),
    }
