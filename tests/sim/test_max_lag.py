"""`max_lag` holds: no trained token is older, whoever is slow, and no run stands still because of it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import agentrl
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import SmallRun, config_for

pytestmark = pytest.mark.sim


async def think(ctx: agentrl.EpisodeContext) -> None:
    """Log-normal with a median of 1 s and P90 of 5 s; 40 s at most."""
    await ctx.sleep(min(ctx.rng.lognormvariate(0.0, 1.256), 40.0))


class Solve(agentrl.Environment):
    """Says something, then thinks: its first token is its oldest."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("solver").act(agentrl.user("solve"))
        await think(ctx)
        ctx.agent("solver").reward(float(turn.text.strip(".") < "5"))


def test_nothing_waits_for_a_straggler() -> None:
    """A run with a bound starts the same episodes at the same times as one without."""

    async def step_times(**bound: int) -> list[float]:
        policies = {"solver": {"step_size": 8, "max_staleness": 1, **bound}}
        run = SmallRun(config=config_for(policies=policies, steps=8, max_in_flight=64), environment=Solve)
        await run.run()
        return [values["run/seconds"] for _, _, values in run.seen.steps]

    bounded, free = (simulate(lambda: step_times(**bound), seed=1) for bound in ({"max_lag": 1}, {}))  # noqa: B023
    assert bounded == free


def test_a_limit_below_the_mean_s_bound_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"policies\.guesser\.max_lag = 1 is below max_staleness = 2"):
        config_for(policies={"guesser": {"max_staleness": 2, "max_lag": 1}})
