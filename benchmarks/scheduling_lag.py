"""What `max_lag` leaves out: jobs of the survey, P90 at five medians, with a limit of 1 step.

`late_mask_1` has the steps per hour with a limit of 1 and `release = "late"` over those without a limit, and
`mask_1_share` the share of the tokens left out. `masked_fastest`, `masked_slowest`, `masked_failed`, `masked_won`: that
share of the calculator's fastest and slowest quarter of the episodes, and of those with reward 0 and 1, with a tool
that waits 0.5 s (median) and 2.5 s (P90), a limit of 4 steps and `release = "group"`, in real time.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from statistics import fmean

import agentrl
from agentrl.config.load import load
from agentrl.environment.registry import resolve
from agentrl.inspection.reader import RunReader
from agentrl.inspection.steps import step_list, step_view
from benchmarks.scheduling_simulated import FILLING, SHORT, plan, run
from tests.simulation.run import Scenario, SimulationResult

STALENESS, SLOTS = 1, 64
SEEDS = 3
CALCULATOR = Path(__file__).resolve().parents[1] / "examples" / "01_tool_use.toml"


def lagging(limit: int | None, seed: int, steps: int) -> SimulationResult:
    """A run of the survey's jobs with a limit."""
    made = plan("late", staleness=STALENESS, slots=SLOTS, seed=seed, max_lag=limit)
    filling = min(FILLING, steps // 2)
    scenario = Scenario(plan=made, steps=filling + steps, skipped=filling)
    return run(f"{'no limit' if limit is None else f'max_lag {limit}'} seed {seed}", scenario)


def figures(quick: bool) -> dict[str, float | None]:
    """Steps per hour with a limit over those without, and the share of the tokens left out."""
    seeds, steps = (1, 8) if quick else (SEEDS, SHORT)
    free, masked = ([lagging(limit, seed, steps) for seed in range(seeds)] for limit in (None, STALENESS))
    rates = [fmean(measured.steps_per_hour["solver"] for measured in runs) for runs in (masked, free)]
    found = {"late_mask_1": rates[0] / rates[1], "mask_1_share": fmean(measured.older for measured in masked)}
    return {**found} if quick else {**found, **masked_by_length_and_reward()}


class SlowCalculator(resolve("calculator")):  # type: ignore[misc] - a class that is found by name
    """The calculator, whose tool waits."""

    async def between_turns(self, ctx: agentrl.EpisodeContext) -> None:
        await super().between_turns(ctx)
        await ctx.sleep(ctx.rng.lognormvariate(math.log(0.5), math.log(5) / 1.2816))


def masked_by_length_and_reward() -> dict[str, float]:
    """Train in real time, and return the share of the tokens left out of groups of episodes."""
    settings = {"policies.solver.max_staleness": 4, "policies.solver.max_lag": 4, "max_in_flight": 128, "steps": 40}
    with tempfile.TemporaryDirectory() as directory:
        settings |= {"environment.id": f"{__file__}:SlowCalculator", "directory": directory, "evaluation.tasks": 0}
        config = load(CALCULATOR, [f"{key}={value}" for key, value in settings.items()])
        run = agentrl.train(config, quiet=True).path
        trained = Counter[str]()
        with closing(RunReader(run)) as reader:
            for line in step_list(reader):
                for row in step_view(reader, line.step).fed:
                    trained[row.episode] += row.tokens or 0
            rows = reader.log.rows("SELECT episode, tokens, reward FROM episodes ORDER BY seconds")
    ended = [row for row in rows if row[0] in trained]
    quarter = len(ended) // 4
    groups = {
        "fastest": ended[:quarter],
        "slowest": ended[-quarter:],
        "failed": [row for row in ended if not row[2]],
        "won": [row for row in ended if row[2]],
    }
    return {
        f"masked_{name}": 1 - sum(trained[row[0]] for row in group) / sum(row[1] for row in group)
        for name, group in groups.items()
    }
