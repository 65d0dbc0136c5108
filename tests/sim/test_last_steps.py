"""The end of a run: the last steps wait for episodes in flight or for none, and what is thrown away is counted."""

from __future__ import annotations

import random
from collections import Counter
from statistics import fmean
from typing import Any

import pytest
from pydantic import ValidationError

import agentrl
from agentrl.orchestrator.last_steps import LastSteps, expected_wait_s
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import Guess, SmallRun, config_for
from tests.simulation.pace import end_of_run

pytestmark = pytest.mark.sim


class SlowTools(agentrl.Environment):
    """One episode in 16 waits for a tool much longer than the others."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("Guess a digit."))
        await ctx.sleep(15.0 if ctx.rng.random() < 1 / 16 else 1.0)
        ctx.agent("guesser").reward(ctx.rng.random())


def played(environment: type[agentrl.Environment] = SlowTools, seed: int = 0, **changes: Any) -> SmallRun:
    """Play a run of 24 steps in virtual time."""

    async def play() -> SmallRun:
        values = {"max_staleness": 4, "steps": 24, "sample_until_end": "auto"} | changes
        run = SmallRun(
            config=config_for(**values),
            environment=environment,
            trainer_options={"step_seconds": 0.7, "publish_seconds": 0.1},
        )
        await run.run()
        run.orchestrator.buffer.ledger.check()
        return run

    return simulate(play, seed=seed)


def seconds(run: SmallRun) -> float:
    """Seconds from the start to the last step."""
    return run.seen.steps[-1][2]["run/seconds"]


def thrown_away(run: SmallRun) -> int:
    """Number of episodes that were dropped at the end."""
    return run.orchestrator.buffer.ledger.dropped["run_ended"]


def test_the_last_steps_wait_for_no_slow_episode_where_that_saves_a_tenth_of_the_run() -> None:
    waiting, sampling, auto = (played(sample_until_end=setting) for setting in (False, True, "auto"))
    assert seconds(sampling) < 0.9 * seconds(waiting)
    assert seconds(auto) < 0.9 * seconds(waiting)
    assert thrown_away(waiting) == 0
    assert 0 < thrown_away(auto) <= thrown_away(sampling)
    for run in (waiting, sampling, auto):
        ledger = run.orchestrator.buffer.ledger
        assert Counter(batch.policy for batch in run.trainer.batches) == {"guesser": 24}
        assert ledger.in_flight == ledger.ready == 0
        assert ledger.trained == 24 * 8


def test_nothing_is_thrown_away_where_the_end_is_short() -> None:
    assert thrown_away(played(Guess)) == 0
    assert thrown_away(played(max_staleness=0)) == 0, "in lockstep, no episode starts before its step"
    long = {setting: played(steps=240, sample_until_end=setting) for setting in (False, "auto")}
    assert seconds(long["auto"]) == seconds(long[False]), "a few seconds of many are not worth an episode"
    assert thrown_away(long["auto"]) == 0


def test_the_expected_wait_is_that_of_episodes_which_follow_each_other() -> None:
    draw = random.Random(0)
    durations = [draw.lognormvariate(0.0, 1.0) for _ in range(64)]

    def left() -> float:
        """Play episodes one after the other to a random time; returns what is left of the last one."""
        seconds = draw.uniform(200.0, 300.0)
        while seconds > 0:
            seconds -= draw.choice(durations)
        return -seconds

    for in_flight in (1, 8):
        waits = [max(left() for _ in range(in_flight)) for _ in range(1500)]
        assert expected_wait_s(durations, in_flight) == pytest.approx(fmean(waits), rel=0.1)


def test_the_expected_wait_is_about_that_of_the_loop() -> None:
    runs = [end_of_run(seed, sample_until_end=False) for seed in range(8)]
    assert fmean(run.expected_wait_s for run in runs) == pytest.approx(fmean(run.wait_s for run in runs), rel=0.15)


def test_without_readings_nothing_is_thrown_away() -> None:
    last_steps = LastSteps("auto")
    assert not last_steps.may_start_more({"x": 1}, {"x": 0}, in_flight=4)
    last_steps.record_episode(60.0)
    last_steps.record_step("x", 1.0)
    assert not last_steps.may_start_more({"x": 1, "y": 1}, {"x": 9, "y": 9}, in_flight=4), "steps of y were not timed"
    assert not last_steps.may_start_more({"x": 3}, {"x": 7}, in_flight=0)
    assert last_steps.may_start_more({"x": 2}, {"x": 8}, in_flight=4)
    assert not last_steps.may_start_more({"x": 2_000}, {"x": 8}, in_flight=4)


def test_a_deterministic_run_refuses_to_throw_episodes_away() -> None:
    with pytest.raises(ValidationError, match="sample_until_end = true"):
        config_for(deterministic=True, sample_until_end=True, max_staleness=0)
    assert thrown_away(played(Guess, deterministic=True, steps=2, max_staleness=0)) == 0
