"""Scheduling against the tail in real time: a tiny model that learns, and tools that take as long as the tail says.

    nice -n -10 python -m benchmarks.scheduling_real [--quick] [--part NAME]

The job is `examples/01_tool_use.toml` in smaller and more steps (of 32 episodes, at a third of the learning rate), with
the trainer in the same process. Every call of the calculator sleeps for a time drawn from a log-normal distribution,
P90 five times the median, cut off at 40 medians, the log-latencies of siblings' calls correlated by one half; most of
an episode is waiting. Draws depend on task, episode and call alone: all contestants meet the same. Each runs in a
process of its own, and contestants take turns, seed by seed.

`real_over_barrier`, `real_over_fifo`: steps per minute of `release = "late"` at staleness 1 over those of a barrier
(`max_staleness = 0`) and of `fifo`, the field's rule: at staleness 1, a group of eight is trained when its last member
has ended. Medians over three seeds, each run for 90 seconds, the first 30 of which, in which the pipeline fills, do not
count.
`time_to_reward_over_best_fifo`: seconds of `fifo` until weights were published that get 0.9 of 512 held-out tasks, over
those of `late`: the geometric mean over ten seeds, with its 95 % interval (`…_low`, `…_high`) from drawing the seeds
again. Each has the staleness that was fastest in a pilot on another seed: of 1 to 4, for `fifo` up to 8. The reward of
the steps themselves would not do: they are fed what ends first, which is what has the fewest sums to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import agentrl
from agentrl.core.ids import random_stream
from agentrl.core.records import PolicyVersion
from agentrl.environments.calculator import Calculator
from benchmarks.processes import ProcessTree
from benchmarks.report import Report
from tests.simulation.plan import QuantileDistribution

Then = Literal["nothing", "examine"]
ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "01_tool_use.toml"
MEDIAN_S = 0.5
LATENCY = QuantileDistribution(p50=MEDIAN_S, p90=5 * MEDIAN_S, cap=40 * MEDIAN_S)
OF_SIBLINGS = 0.5
"""Share of the variance of a log-latency that siblings have in common."""
GOAL, HELD_OUT = 0.9, 512
"""Mean reward of so many held-out tasks."""
STEPS = 60
"""Of a run that is to get there."""
STALENESS = {"late": (1, 2, 3, 4), "group": (1, 2, 3, 4, 6, 8)}
"""What is tried, by release."""
FILLING_S, MEASURED_S = 30.0, 90.0
"""When steps begin to count, and when the run ends, where steps per minute are measured."""
STEP_SIZE = 32
OVERRIDES = (
    "--name=run",
    f"--policies.solver.step_size={STEP_SIZE}",
    "--policies.solver.learning_rate=1e-4",
    "--engine.slots=192",  # whatever the staleness, slots hold nobody up
    "--evaluation.tasks=0",
    "--checkpoint.every=0",
    "--checkpoint.versions=0",  # all of them stay, to be examined
)


class SlowCalculator(Calculator):
    """The calculator behind a service with a tail."""

    slept: ClassVar[float] = 0.0
    lived: ClassVar[float] = 0.0
    """Seconds of all episodes that ended."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Remember where chance comes from, and how long it took."""
        self._own, self._of_siblings, self._slept = ctx.rng, random_stream("latency", ctx.task.id), 0.0
        began = time.monotonic()
        await super().run(ctx)
        SlowCalculator.lived += time.monotonic() - began
        SlowCalculator.slept += self._slept

    @agentrl.tool
    async def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:  # type: ignore[override]
        """One operation on two integers."""
        z = math.sqrt(OF_SIBLINGS) * self._of_siblings.gauss() + math.sqrt(1 - OF_SIBLINGS) * self._own.gauss()
        began = time.monotonic()
        await asyncio.sleep(LATENCY.value(z))
        self._slept += time.monotonic() - began
        return super().calculate(a, op, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """How a run schedules."""

    release: str
    staleness: int

    @property
    def name(self) -> str:
        """For people."""
        kind = "barrier" if not self.staleness else "fifo" if self.release == "group" else self.release
        return f"{kind} S={self.staleness}"


BARRIER = Contestant(release="group", staleness=0)
FIFO = Contestant(release="group", staleness=1)
LATE = Contestant(release="late", staleness=1)


@dataclass
class Trace:
    """What a run did, step by step."""

    seconds: list[float] = field(default_factory=list)
    """Since training began, at the end of each step."""
    lags: list[float] = field(default_factory=list)
    to_goal: float | None = None
    """Seconds until the weights were good enough; None: they never were, or nobody asked."""
    waiting: float = 0.0
    """Share of the episodes' time in which they waited for a tool."""
    engine_busy: float = 0.0
    trainer_busy: float = 0.0
    cpu: float = 0.0
    """CPU seconds, start included."""

    def per_minute(self, filling_s: float) -> float:
        """Steps per minute after the first step that ended when the pipeline was full."""
        counted = [seconds for seconds in self.seconds if seconds >= filling_s]
        return 60 * (len(counted) - 1) / (counted[-1] - counted[0])


class Recorder:
    """An observer that writes steps down."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Note the step."""
        self._trace.seconds.append(metrics["run/seconds"])
        self._trace.lags.append(metrics["staleness/mean"])

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """There are none."""


def train(contestant: Contestant, directory: str, *, seed: int, stop: Sequence[str], then: Then) -> Trace:
    """One run, in this process, and what is then asked of it."""
    from agentrl.config.load import load

    overrides = [
        *OVERRIDES,
        f"--directory={directory}",
        f"--seed={seed}",
        f"--policies.solver.max_staleness={contestant.staleness}",
        f"--credit.release={contestant.release}",
        *stop,
    ]
    trace, tree = Trace(), ProcessTree()
    run = agentrl.train(load(EXAMPLE, overrides), environment=SlowCalculator, quiet=True, observers=[Recorder(trace)])
    trace.waiting = SlowCalculator.slept / SlowCalculator.lived
    trace.engine_busy, trace.trainer_busy = run.summary["engine_busy_share"], run.summary["trainer_busy_share"]
    trace.cpu = tree.cpu_seconds()
    if then == "examine":
        trace.to_goal = seconds_to_goal(run.path / "versions" / "solver", trace)
    return trace


def seconds_to_goal(versions: Path, trace: Trace) -> float | None:
    """When weights were published that reach the goal: found by bisection, as rewards rise."""
    from agentrl.config.load import load

    config = load(EXAMPLE, [*OVERRIDES, f"--evaluation.tasks={HELD_OUT}"])

    def is_there(step: int) -> bool:
        return agentrl.evaluate(config, versions / f"0.{step}")["evaluation/reward"] >= GOAL

    low, high = 0, len(trace.seconds)
    if not is_there(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_there(middle) else (middle, high)
    return trace.seconds[high - 1]


def until(metric: str, value: float) -> list[str]:
    """When a run ends. (Its last planned steps would be fed what is left, the longest.)"""
    return ["--steps=10000", f"--best.metric={metric}", "--best.window=1", f"--best.stop_at={value}"]


def run_apart(contestant: Contestant, *, seed: int, stop: Sequence[str], then: Then = "nothing") -> Trace:
    """One run, in a process of its own; prints a line."""
    with tempfile.TemporaryDirectory(prefix="agentrl-scheduling-real-") as scratch:
        request = {
            "release": contestant.release,
            "staleness": contestant.staleness,
            "directory": scratch,
            "seed": seed,
            "stop": stop,
            "then": then,
        }
        command = [sys.executable, "-m", "benchmarks.scheduling_real", "--contestant", json.dumps(request)]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        sys.stdout.writelines(line + "\n" for line in finished.stderr.splitlines() if line.startswith("    measured"))
        if finished.returncode:
            raise SystemExit(f"{contestant.name} failed:\n{finished.stderr[-4000:]}")
        trace = Trace(**json.loads(finished.stdout.strip().splitlines()[-1]))
    print(
        f"  {contestant.name}, seed {seed}: {len(trace.seconds)} steps in {trace.seconds[-1]:.1f} s"
        + (f", reward {GOAL} " + (f"after {trace.to_goal:.1f} s" if trace.to_goal else "not reached"))
        * (then == "examine")
        + f", lag {statistics.fmean(trace.lags):.2f}; waiting {trace.waiting:.2f} of the episodes' time, engine busy "
        f"{trace.engine_busy:.2f}, trainer {trace.trainer_busy:.2f}, {trace.cpu:.0f} CPU s",
        flush=True,
    )
    return trace


def run_contestant(request: dict[str, Any]) -> None:
    """The other end of `run_apart`."""
    contestant = Contestant(release=request.pop("release"), staleness=request.pop("staleness"))
    trace = train(contestant, request.pop("directory"), **request)
    print(json.dumps({name: getattr(trace, name) for name in Trace.__dataclass_fields__}))


# --- the parts ------------------------------------------------------------------------------------------------------


def steps_per_minute(quick: bool) -> dict[str, float | None]:
    """Of the three."""
    contestants = [LATE, BARRIER] if quick else [LATE, FIFO, BARRIER]
    filling, seconds = (2.0, 8.0) if quick else (FILLING_S, MEASURED_S)
    found: dict[Contestant, list[float]] = {contestant: [] for contestant in contestants}
    for seed in range(1 if quick else 3):
        for contestant in rotated(contestants, seed):
            found[contestant].append(
                run_apart(contestant, seed=seed, stop=until("run/seconds", seconds)).per_minute(filling)
            )
    for contestant, rates in found.items():
        print(f"  {contestant.name}: {', '.join(f'{rate:.1f}' for rate in rates)} steps per minute", flush=True)
    if quick:
        return {}
    medians = {contestant: statistics.median(rates) for contestant, rates in found.items()}
    return {
        "real_over_barrier": medians[LATE] / medians[BARRIER],
        "real_over_fifo": medians[LATE] / medians[FIFO],
    }


def time_to_reward(quick: bool) -> dict[str, float | None]:
    """Each at the staleness that suits it."""
    if quick:
        return {}
    fifo, late = fastest("group"), fastest("late")
    logs = []
    for seed in range(10):
        seconds = {contestant: seconds_spent(contestant, seed) for contestant in rotated([late, fifo], seed)}
        logs.append(math.log(seconds[fifo] / seconds[late]))
    low, high = interval_of_mean(logs)
    print(f"  {fifo.name} over {late.name}: {', '.join(f'{math.exp(value):.2f}' for value in logs)}")
    return {
        "time_to_reward_over_best_fifo": math.exp(statistics.fmean(logs)),
        "time_to_reward_over_best_fifo_low": math.exp(low),
        "time_to_reward_over_best_fifo_high": math.exp(high),
    }


def fastest(release: str) -> Contestant:
    """At which staleness the reward is reached soonest."""
    contestants = [Contestant(release=release, staleness=staleness) for staleness in STALENESS[release]]
    seconds = {contestant: seconds_spent(contestant, 100) for contestant in contestants}
    best = min(contestants, key=lambda contestant: seconds[contestant])
    print(f"  fastest: {best.name}", flush=True)
    return best


def seconds_spent(contestant: Contestant, seed: int) -> float:
    """Until the goal; where it was not reached, all of the run's time, which is too good for it."""
    episodes = STEPS * STEP_SIZE
    trace = run_apart(contestant, seed=seed, stop=until("episodes/trained", episodes), then="examine")
    return trace.seconds[-1] if trace.to_goal is None else trace.to_goal


def rotated(contestants: list[Contestant], by: int) -> list[Contestant]:
    """Another one is first each time."""
    at = by % len(contestants)
    return contestants[at:] + contestants[:at]


def interval_of_mean(values: Sequence[float]) -> tuple[float, float]:
    """Its 95 % interval, from drawing the values again."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(10_000))
    return means[249], means[9749]


PARTS = {"steps": steps_per_minute, "reward": time_to_reward}
FIGURES = (
    "real_over_barrier",
    "real_over_fifo",
    "time_to_reward_over_best_fifo",
    "time_to_reward_over_best_fifo_low",
    "time_to_reward_over_best_fifo_high",
)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of each: that it runs, no figures")
    parser.add_argument("--part", choices=list(PARTS), help="this part only")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant is not None:
        run_contestant(json.loads(options.contestant))
        return
    report = Report(
        "scheduling_real",
        quick=options.quick,
        repeats=1 if options.quick else 10,
        compared_with="max_staleness 0; whole groups in order of completion, at staleness 1 and at their best",
    )
    report.figures = dict.fromkeys(FIGURES)
    for name, part in PARTS.items():
        if options.part in (None, name):
            print(f"{name} …", flush=True)
            report.figures |= part(options.quick)
    report.print()


if __name__ == "__main__":
    main()
