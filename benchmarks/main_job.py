"""The main job: what is learned, what asynchrony wins, and what the architecture costs.

    python -m benchmarks.main_job [--quick]

`reward_start`, `reward_end`, `rl_seconds`: held-out reward on 512 tasks before and after `examples/01_tool_use.toml`,
and the seconds in between; the worst of three seeds.
`async_over_sync_wall`, `steps_ratio`: max_staleness 1 over 0 with tool latencies drawn log-normal (median 50 ms,
P90/P50 = 5), the same draws per episode and call: wall seconds per optimizer step, and steps to 0.9, in interleaved
pairs.
`cpu_over_naive_loop`, `wall_to_90_over_naive_loop`: against `benchmarks/naive_loop.py` without latency, interleaved:
CPU seconds per step of all processes, Ray's included, and wall seconds from the first episode to 0.9.

"To 0.9" is the first step whose 5-step mean of training reward is at least 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import agentrl
from agentrl.core.records import PolicyVersion
from agentrl.environments.calculator import Calculator
from benchmarks.processes import ProcessTree
from benchmarks.report import Report, completed

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "01_tool_use.toml"
MEDIAN_S, SIGMA = 0.05, math.log(5) / 1.2815515655446004
"""Log-normal latency: P90/P50 = exp(1.28 sigma) = 5."""


class SlowCalculator(Calculator):
    """The calculator behind a slow network; its latencies depend on the episode and the call alone."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Remember where chance comes from."""
        self._draw = ctx.rng
        await super().run(ctx)

    @agentrl.tool
    async def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:  # type: ignore[override]
        """One operation on two integers."""
        await asyncio.sleep(self._draw.lognormvariate(math.log(MEDIAN_S), SIGMA))
        return super().calculate(a, op, b)


@dataclass
class Trace:
    """What a contestant did, step by step."""

    wall: list[float] = field(default_factory=list)
    """Seconds since training began, at the end of each step."""
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of all processes, at the same moments."""
    rewards: list[float] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def steps_to(self, goal: float) -> int | None:
        """The first step (from 1) whose 5-step mean reward reaches the goal."""
        for step in range(5, len(self.rewards) + 1):
            if sum(self.rewards[step - 5 : step]) / 5 >= goal:
                return step
        return None

    def wall_per_step(self) -> float:
        """Seconds per step after the first three, which fill the pipeline."""
        return (self.wall[-1] - self.wall[2]) / (len(self.wall) - 3)

    def cpu_per_step(self) -> float:
        """CPU seconds per step after the first three."""
        return (self.cpu[-1] - self.cpu[2]) / (len(self.cpu) - 3)


class Recorder:
    """An observer that writes down when each step ended and what it had cost."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._tree = ProcessTree()

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Note the step."""
        self.trace.wall.append(metrics["run/seconds"])
        self.trace.cpu.append(self._tree.cpu_seconds())
        self.trace.rewards.append(metrics["reward/mean"])

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing to note."""


def ours(directory: str, *, seed: int, steps: int, staleness: int, slow: bool, held_out: int) -> Trace:
    """The main job, in this process."""
    from agentrl.config.load import load

    overrides = [
        f"--name=run-{seed}-{staleness}",
        f"--directory={directory}",
        f"--seed={seed}",
        f"--steps={steps}",
        f"--policies.solver.max_staleness={staleness}",
        f"--evaluation.tasks={held_out}",
        "--checkpoint.every=0",
    ]
    recorder = Recorder()
    environment = SlowCalculator if slow else None
    run = completed(agentrl.train(load(EXAMPLE, overrides), environment=environment, quiet=True, observers=[recorder]))
    recorder.trace.summary = {k: v for k, v in run.summary.items() if k not in ("rewards", "evaluations")}
    return recorder.trace


def naive(*, seed: int, steps: int) -> Trace:
    """The baseline, in this process."""
    import torch

    from agentrl.config.load import load
    from benchmarks.naive_loop import run

    torch.set_num_threads(1)
    config = load(EXAMPLE, [])
    policy = config.policies["solver"]
    history = run(
        config.model.path,
        seed=seed,
        steps=steps,
        group_size=config.credit.group_size,
        groups=policy.step_size // config.credit.group_size,
        learning_rate=policy.learning_rate,
        tokens_per_unit=config.trainer.loss.tokens_per_unit,
    )
    spent = 0.0
    trace = Trace()
    for step in history:
        spent += step.cpu_seconds
        trace.wall.append(step.wall)
        trace.cpu.append(spent)
        trace.rewards.append(step.mean_reward)
    return trace


def contestant(kind: str, **settings: Any) -> Trace:
    """Run one contestant in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="agentrl-main-job-") as scratch:
        request = json.dumps({"kind": kind, "directory": scratch, **settings})
        command = [sys.executable, "-m", "benchmarks.main_job", "--contestant", request]
        started = time.monotonic()
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if finished.returncode:
            raise SystemExit(f"{kind} failed:\n{finished.stderr[-4000:]}")
        trace = Trace(**json.loads(finished.stdout.strip().splitlines()[-1]))
    note = {k: round(v, 3) for k, v in trace.summary.items() if isinstance(v, float)}
    print(
        f"{kind} {settings}: {time.monotonic() - started:.0f} s, {trace.wall_per_step():.3f} s and "
        f"{trace.cpu_per_step():.3f} CPU s per step, 0.9 at step {trace.steps_to(0.9)} {note}",
        flush=True,
    )
    return trace


def run_contestant(request: dict[str, Any]) -> None:
    """The other end of `contestant`."""
    kind, directory = request.pop("kind"), request.pop("directory")
    trace = ours(directory, **request) if kind == "ours" else naive(**request)
    print(json.dumps({"wall": trace.wall, "cpu": trace.cpu, "rewards": trace.rewards, "summary": trace.summary}))


def median_ratio(above: Sequence[float | None], below: Sequence[float | None]) -> float | None:
    """Median over pairs of their ratio; None where one side never got there."""
    ratios = [a / b for a, b in zip(above, below, strict=True) if a is not None and b is not None]
    if not ratios or len(ratios) < len(above):
        print(f"only {len(ratios)} of {len(above)} pairs have both sides")
    if not ratios:
        return None
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 2 else ratios
    print(f"ratios {[round(ratio, 3) for ratio in ratios]}, quartiles {[round(q, 3) for q in quartiles]}")
    return statistics.median(ratios)


def wall_to(trace: Trace, goal: float) -> float | None:
    """Seconds to the goal."""
    step = trace.steps_to(goal)
    return None if step is None else trace.wall[step - 1]


def demo_steps() -> int:
    """The steps of `make demo`."""
    from agentrl.config.load import load

    return load(EXAMPLE, []).steps


def learning(report: Report, steps: int, seeds: Sequence[int]) -> None:
    """Held-out reward before and after."""
    runs = [contestant("ours", seed=s, steps=steps, staleness=1, slow=False, held_out=512) for s in seeds]
    report.figures["reward_start"] = max(run.summary["reward_start"] for run in runs)
    report.figures["reward_end"] = min(run.summary["reward_end"] for run in runs)
    report.figures["rl_seconds"] = max(run.summary["rl_seconds"] for run in runs)


def asynchrony(report: Report, steps: int, pairs: int) -> None:
    """Staleness 1 against 0 with slow tools."""
    sync, overlapped = [], []
    for pair in range(pairs):
        for staleness, traces in ((1, overlapped), (0, sync)):
            traces.append(contestant("ours", seed=pair, steps=steps, staleness=staleness, slow=True, held_out=0))
    wall = median_ratio([t.wall_per_step() for t in overlapped], [t.wall_per_step() for t in sync])
    report.figures["async_over_sync_wall"] = wall
    reached = [[t.steps_to(0.9) for t in traces] for traces in (overlapped, sync)]
    if all(step is not None for steps_of in reached for step in steps_of):
        report.figures["steps_ratio"] = statistics.median(reached[0]) / statistics.median(reached[1])
    for name, traces in (("staleness 1", overlapped), ("staleness 0", sync)):
        shares = [(t.summary["engine_busy_share"], t.summary["trainer_busy_share"]) for t in traces]
        engine, trainer = (statistics.median(share) for share in zip(*shares, strict=True))
        print(f"{name}: engine busy {engine:.2f}, trainer busy {trainer:.2f} (medians)")


def against_naive(report: Report, steps: int, pairs: int) -> None:
    """The same job in sixty lines."""
    mine, theirs = [], []
    for pair in range(pairs):
        mine.append(contestant("ours", seed=pair, steps=steps, staleness=1, slow=False, held_out=0))
        theirs.append(contestant("naive", seed=pair, steps=steps))
    report.figures["cpu_over_naive_loop"] = median_ratio(
        [t.cpu_per_step() for t in mine], [t.cpu_per_step() for t in theirs]
    )
    report.figures["wall_to_90_over_naive_loop"] = median_ratio(
        [wall_to(t, 0.9) for t in mine], [wall_to(t, 0.9) for t in theirs]
    )


NAMES = (
    "reward_start",
    "reward_end",
    "async_over_sync_wall",
    "steps_ratio",
    "rl_seconds",
    "cpu_over_naive_loop",
    "wall_to_90_over_naive_loop",
)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair each, few steps: costs only, no learning")
    parser.add_argument("--part", choices=["learning", "asynchrony", "naive"], help="measure this part alone")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant is not None:
        run_contestant(json.loads(options.contestant))
        return
    pairs = 1 if options.quick else 7
    report = Report(
        "main_job", quick=options.quick, repeats=pairs, compared_with="benchmarks/naive_loop.py; staleness 0"
    )
    report.figures.update(dict.fromkeys(NAMES))
    if options.part in (None, "learning") and not options.quick:
        learning(report, demo_steps(), (0, 1, 2))
    if options.part in (None, "asynchrony") and not options.quick:
        asynchrony(report, 40, 5)
    if options.part in (None, "naive"):
        against_naive(report, 8 if options.quick else 40, pairs)
    report.print()


if __name__ == "__main__":
    main()
