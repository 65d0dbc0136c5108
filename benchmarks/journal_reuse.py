"""Episodes trained more than once, where tools are slow and the trainer is idle: in virtual time, and in real runs.

Nothing of this is a setting of agentrl: the trainers here add older episodes to a step by themselves. A real run has
the settings of agentrl's embedded engine in `benchmarks.peers`, part `tools`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import agentrl
from agentrl.config.load import load
from agentrl.core.records import TrainBatch
from agentrl.environments.calculator import Calculator
from agentrl.learn import trainer
from benchmarks.peers.contenders import CONTENDERS, SCRIPTS
from benchmarks.peers.contestants.progress import MEDIAN_S, P90_S
from benchmarks.peers.trainings import TOOLS
from benchmarks.report import ROOT
from tests.simulation.reuse import STEP_SIZE, Curve, Plan, curve

LOW_RATE, HIGH_RATE, HIGHEST_RATE = 0.2, 0.8, 1.6
"""Learning rates of the simulated runs. With the lowest, they take about as many steps as the calculator; with the
highest, whole steps that train each episode once are about as fast as any other run."""
SEEDS = 5
SIZES = ((2, "twice", "half"), (4, "four times", "quarter"))
"""How often an episode is trained, in words too, and the size of the steps."""
REAL_S, LATE_S, UNFINISHED_S = 45.0, 20.0, 8.0
"""Seconds that a real run trains; before its end, episodes begin that count as late, and some that do not end."""
GOALS = (0.85, 0.9)
"""Mean rewards of the episodes that a real run begins."""


# --- virtual time -----------------------------------------------------------------------------------------------------


def plans(rate: float, limit_s: float) -> Mapping[str, Plan]:
    """The compared runs, by name."""
    plan = Plan(rate=rate, limit_s=limit_s)
    half, quarter = replace(plan, fresh=STEP_SIZE // 2), replace(plan, fresh=STEP_SIZE // 4)
    return {
        "once": plan,
        "once, half steps": half,
        "twice, half steps": replace(half, uses=2),
        "once, half steps, exact weights": replace(half, exact=True),
        "twice, half steps, exact weights": replace(half, uses=2, exact=True),
        "once, quarter steps": quarter,
        "four times, quarter steps": replace(quarter, uses=4),
        "four times, quarter steps, quarter rate": replace(quarter, uses=4, rate=rate / 4),
        "twice, whole steps": replace(plan, uses=2),
        "twice in a row": replace(plan, uses=2, in_a_row=True),
        "four times in a row": replace(plan, uses=4, in_a_row=True),
    }


def seconds_to_goal(name: str, plan: Plan, seeds: int) -> float:
    """Median seconds of a run until its goal."""
    curves = [curve(plan, seed) for seed in range(seeds)]
    seconds = statistics.median(each.to_goal_s for each in curves)
    means = Curve(seconds, *(statistics.fmean(values) for values in list(zip(*curves, strict=True))[1:]))
    print(
        f"  rate {plan.rate}, {name}: {seconds:.1f} s ({min(curves).to_goal_s:.1f} to {max(curves).to_goal_s:.1f}), "
        f"reward {means.final:.3f} in the end, trained {means.uses:.2f} times, trainer busy {means.trainer_busy:.2f}",
        flush=True,
    )
    return seconds


def simulated(quick: bool) -> dict[str, float | None]:
    """Compare in virtual time."""
    figures: dict[str, float | None] = {}
    for suffix, rate, limit_s in (("", LOW_RATE, 36.0), ("_high_rate", HIGH_RATE, 18.0))[quick:]:
        seeds = 1 if quick else SEEDS
        seconds = {name: seconds_to_goal(name, plan, seeds) for name, plan in plans(rate, limit_s).items()}
        for count, uses, size in SIZES:
            again = seconds[f"{uses}, {size} steps"]
            figures[f"reuse_{count}_over_once{suffix}"] = again / seconds["once"]
            figures[f"reuse_{count}_over_small_steps{suffix}"] = again / seconds[f"once, {size} steps"]
        figures[f"whole_steps_reuse_over_once{suffix}"] = seconds["twice, whole steps"] / seconds["once"]
        slow = seconds["four times, quarter steps, quarter rate"]
        figures[f"reuse_4_over_once_same_rate{suffix}"] = slow / seconds["once"]
    busy = Plan(rate=LOW_RATE, tool_s=0.0, episode_s=0.02, staleness=0)
    seeds = 1 if quick else SEEDS
    once = seconds_to_goal("lockstep with a busy trainer, once", busy, seeds)
    again = seconds_to_goal("the same, twice, half steps", replace(busy, fresh=STEP_SIZE // 2, uses=2), seeds)
    figures["busy_trainer_reuse_over_once"] = again / once
    fastest = plans(HIGHEST_RATE, 14.0)
    names = ("once", "once, quarter steps", "four times, quarter steps")
    once, small, again = (seconds_to_goal(name, fastest[name], seeds) for name in names)
    return {
        **figures,
        "reuse_4_over_once_highest_rate": again / once,
        "reuse_4_over_small_steps_highest_rate": again / small,
    }


# --- real runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A real run."""

    name: str
    fresh: int = STEP_SIZE
    uses: int = 1

    @property
    def max_staleness(self) -> int:
        return Plan(rate=0.0, fresh=self.fresh).max_staleness


CONTESTANTS = (
    Contestant(name="once"),
    Contestant(name="twice, half steps", fresh=STEP_SIZE // 2, uses=2),
    Contestant(name="once, half steps", fresh=STEP_SIZE // 2),
    Contestant(name="four times, quarter steps", fresh=STEP_SIZE // 4, uses=4),
    Contestant(name="once, quarter steps", fresh=STEP_SIZE // 4),
)


class SlowCalculator(Calculator):
    """The calculator with the waits and the rule for bad calls of `benchmarks.peers`."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self._draws = ctx.rng
        await super().run(ctx)

    async def between_turns(self, ctx: agentrl.EpisodeContext) -> None:
        if any(isinstance(call.arguments, str) for call in ctx.agent("agent").turns[-1].tool_calls):
            raise agentrl.LimitReachedError("the tool call is not JSON", stop_reason="max_turns")

    @agentrl.tool
    async def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:  # type: ignore[override]
        """One operation on two integers."""
        sigma = math.log(P90_S / MEDIAN_S) / 1.2815515655446004
        await asyncio.sleep(MEDIAN_S * math.exp(sigma * self._draws.gauss()))
        return super().calculate(a, op, b)


class ReusingTrainer(trainer.InProcessTrainer):
    """Trains the units of the steps before, too."""

    older: deque[TrainBatch]

    async def forward_backward(self, batch: TrainBatch) -> None:
        batches = [batch, *self.older]
        units = tuple(unit for each in batches for unit in each.units)
        normalizer = sum(each.normalizer for each in batches)  # the number of tokens
        await super().forward_backward(replace(batch, units=units, normalizer=normalizer))
        self.older.appendleft(batch)


def rewards(run: Path) -> list[tuple[float, float]]:
    """When the episodes of a run began, in seconds since the first, and their rewards."""
    query = "SELECT committed_at - seconds, reward FROM episodes WHERE reward IS NOT NULL ORDER BY 1"
    with contextlib.closing(sqlite3.connect(run / "journal" / "control.db")) as connection:
        rows = connection.execute(query).fetchall()
    return [(began - rows[0][0], reward) for began, reward in rows if began - rows[0][0] < REAL_S - UNFINISHED_S]


def reached_at(goal: float, rows: Sequence[tuple[float, float]]) -> float:
    """When the mean reward of the episodes that begin reaches a goal: in the least-squares fit that never falls."""
    blocks = list[tuple[float, float, int]]()  # when each begins, sum and number of its rewards
    for block in ((began, reward, 1) for began, reward in rows):
        while blocks and blocks[-1][1] * block[2] >= block[1] * blocks[-1][2]:
            began, total, count = blocks.pop()
            block = (began, total + block[1], count + block[2])
        blocks.append(block)
    return next((began for began, total, count in blocks if total >= goal * count), math.inf)


def train(contestant: Contestant, seed: int, directory: Path) -> dict[str, float]:
    """Train in this process."""
    if contestant.uses > 1:
        ReusingTrainer.older = deque(maxlen=contestant.uses - 1)
        trainer.InProcessTrainer = ReusingTrainer  # type: ignore[misc]
    _, in_flight, slots = TOOLS.schedules["default"]
    settings = {
        "name": "run",
        "directory": directory,
        "seed": seed,
        "steps": 10_000,
        "best.metric": "run/seconds",
        "best.window": 1,
        "best.stop_at": REAL_S,
        "model.path": TOOLS.model,
        "policies.solver.step_size": contestant.fresh,
        "policies.solver.learning_rate": TOOLS.learning_rates["full"],
        "policies.solver.max_staleness": contestant.max_staleness,
        "max_in_flight": round(in_flight * TOOLS.step_size),
        "engine.slots": round(slots * TOOLS.step_size),
        "checkpoint.every": 0,
    }
    overrides = [f"--{name}={value}" for name, value in settings.items()]
    config = load(SCRIPTS / CONTENDERS["agentrl_embedded"].config, overrides)
    run = agentrl.train(config, environment=SlowCalculator, quiet=True)
    rows = rewards(run.path)
    late = [reward for began, reward in rows if began > REAL_S - LATE_S]
    goals = {f"to_{goal:g}": reached_at(goal, rows) for goal in GOALS}
    return {**goals, "late": statistics.fmean(late), "trainer_busy": run.summary["trainer_busy_share"]}


def real(quick: bool) -> dict[str, float | None]:
    """Compare in real time; contestants take turns, each in its own process."""
    if quick:
        return {}
    found: dict[str, list[dict[str, float]]] = {contestant.name: [] for contestant in CONTESTANTS}
    for seed in range(SEEDS):
        for contestant in CONTESTANTS:
            with tempfile.TemporaryDirectory(prefix="agentrl-reuse-") as directory:
                request = json.dumps([asdict(contestant), seed, directory])
                command = [sys.executable, "-m", "benchmarks.journal_reuse", request]
                printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
            measured = json.loads(printed.splitlines()[-1])
            found[contestant.name].append(measured)
            values = ", ".join(f"{name} {value:.4g}" for name, value in measured.items())
            print(f"  {contestant.name}, seed {seed}: {values}", flush=True)
    figures: dict[str, float | None] = {}
    for goal in GOALS:
        seconds = {name: statistics.median(each[f"to_{goal:g}"] for each in runs) for name, runs in found.items()}
        for count, uses, size in SIZES:
            again, suffix = seconds[f"{uses}, {size} steps"], f"_to_{goal:g}"
            figures[f"real_reuse_{count}_over_once{suffix}"] = again / seconds["once"]
            figures[f"real_reuse_{count}_over_small_steps{suffix}"] = again / seconds[f"once, {size} steps"]
    return figures


def figures(quick: bool) -> Mapping[str, float | None]:
    """Both; a quick run has one seed of the faster simulated runs."""
    return {**simulated(quick), **real(quick)}


FIGURES: Sequence[str] = (
    *(
        f"reuse_{uses}_over_{other}{rate}"
        for rate in ("", "_high_rate")
        for uses in (2, 4)
        for other in ("once", "small_steps")
    ),
    *("whole_steps_reuse_over_once", "whole_steps_reuse_over_once_high_rate"),
    *("reuse_4_over_once_highest_rate", "reuse_4_over_small_steps_highest_rate"),
    *("reuse_4_over_once_same_rate", "reuse_4_over_once_same_rate_high_rate", "busy_trainer_reuse_over_once"),
    *(
        f"real_reuse_{uses}_over_{other}_to_{goal:g}"
        for goal in GOALS
        for uses in (2, 4)
        for other in ("once", "small_steps")
    ),
)

if __name__ == "__main__":
    values, at_seed, path = json.loads(sys.argv[1])
    print(json.dumps(train(Contestant(**values), at_seed, Path(path))))
