"""`max_lag` holds: no trained token is older, whoever is slow, and no run stands still because of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

import agentrl
from agentrl.core.ids import random_stream
from agentrl.core.records import PolicyVersion
from agentrl.observe.alarms import find_alarms
from agentrl.observe.run_state import RunDisplaySettings, RunState
from agentrl.orchestrator.scheduler import BoundedStaleness
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.sim import MANY_SEEDS
from tests.sim.small_run import SmallRun, config_for

pytestmark = pytest.mark.sim

POINTS = 400 if MANY_SEEDS else 12
"""Of the grid."""


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


class Propose(agentrl.Environment):
    """Refuses one proposal in four, and has three solvers otherwise."""

    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Solve": 3}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        proposer = ctx.agent("proposer")
        await proposer.act(agentrl.user("propose"))
        await think(ctx)
        if not proposer.gate(ctx.rng.random() < 0.75, penalty=-1.0):
            return
        solved = await ctx.gather(*ctx.spawn(Solve, {"problem": 1}, n=3))
        proposer.reward(agentrl.learnability(solved))


def drawn(seed: int) -> tuple[type[agentrl.Environment], dict[str, Any], dict[str, int]]:
    """A point of the grid of environments, releases, bounds, step sizes and phases; and the limits."""
    draw = random_stream("max_lag", seed)
    environment = (Solve, Propose)[draw.randrange(2)]
    release = ("group", "late", "episode")[draw.randrange(3)]
    group_size = draw.randrange(2, 5)
    names = {"solver": 3, "proposer": 1} if environment is Propose else {"solver": 1}
    policies: dict[str, dict[str, Any]] = {}
    limits, steps = {}, {}
    for name, units in names.items():
        staleness = draw.randrange(1 if release == "late" else 0, 3)
        step_size = units * group_size * draw.randrange(1, 4)
        if staleness:
            step_size += draw.randrange(3)  # groups need not fill it
        limits[name] = staleness + draw.randrange(3)
        policies[name] = {"step_size": step_size, "max_staleness": staleness}
        steps[name] = draw.randrange(3, 9)
    freeze = [("solver", 1), ("proposer", 2)] if environment is Propose and draw.randrange(3) == 0 else []
    credit = {"group_size": group_size, "release": release}
    return (
        environment,
        {"policies": policies, "steps": steps, "credit": credit, "freeze": freeze, "max_in_flight": 64},
        limits,
    )


def oldest(run: SmallRun) -> dict[str, float]:
    """The largest lag of each policy's tokens."""
    found: dict[str, float] = {}
    for name, _, values in run.seen.steps:
        found[name] = max(found.get(name, 0.0), values.get("staleness/max", 0.0))
    return found


async def played(environment: type[agentrl.Environment], changes: dict[str, Any], limits: dict[str, int]) -> SmallRun:
    policies = {
        name: policy | ({"max_lag": limits[name]} if limits else {}) for name, policy in changes["policies"].items()
    }
    run = SmallRun(config=config_for(**{**changes, "policies": policies}), environment=environment)
    await run.run()
    return run


def test_no_trained_token_is_older_under_any_release_bound_fan_out_or_phase() -> None:
    beyond = 0
    for seed in range(POINTS):
        environment, changes, limits = drawn(seed)
        with_limit = simulate(lambda: played(environment, changes, limits), seed=seed)  # noqa: B023 - it runs now
        steps = Counter(batch.policy for batch in with_limit.trainer.batches)
        assert steps == changes["steps"], changes
        found = oldest(with_limit)
        assert all(found[name] <= limits[name] for name in found), (seed, found, limits, changes)
        assert {values.get("staleness/exceeded", 0.0) for _, _, values in with_limit.seen.steps} == {0.0}
        reasons = set(with_limit.orchestrator.buffer.ledger.dropped)
        assert reasons <= {"run_ended", "frozen"}, "never by dropping"
        without = oldest(simulate(lambda: played(environment, changes, {}), seed=seed))  # noqa: B023
        beyond += any(without[name] > limits[name] for name in without)
    assert beyond > POINTS / 5, "without the limit many of these runs exceed it"


def test_the_window_is_as_wide_as_it_may_be() -> None:
    """One unit fewer would cost what is still allowed, one more would be one too many."""
    bound = BoundedStaleness(max_staleness=1, step_size=4, max_lag=2)
    assert bound.window(outstanding=4, overtaken=8) == 0, "the oldest was overtaken twice, and is in the third step"
    assert bound.window(outstanding=3, overtaken=8) == 1
    assert BoundedStaleness(max_staleness=1, step_size=4).window(outstanding=99, overtaken=99) == float("inf")


def test_where_old_tokens_are_masked_nothing_waits_for_a_straggler() -> None:
    """Of the same run, the window of `wait` holds groups back; with `mask` there is none."""

    async def seconds(over_lag: str) -> tuple[float, set[str], float]:
        policies = {"solver": {"step_size": 8, "max_staleness": 1, "max_lag": 1, "over_lag": over_lag}}
        run = SmallRun(config=config_for(policies=policies, steps=8, max_in_flight=64), environment=Solve)
        await run.run()
        held = {kind for kind, spent in run.orchestrator.activity_totals().items() if kind == "max_lag" and spent > 0}
        exceeded = sum(values.get("staleness/exceeded", 0.0) for _, _, values in run.seen.steps)
        return run.seen.steps[-1][2]["run/seconds"], held, exceeded

    waiting, masking = (simulate(lambda: seconds(how), seed=1) for how in ("wait", "mask"))  # noqa: B023
    assert (waiting[1:], masking[1:]) == (({"max_lag"}, 0.0), (set(), 0.0))
    assert masking[0] < 0.8 * waiting[0]


def test_a_straggler_holds_admission_back_and_says_so(simulated_loop: SeededSimulation) -> None:
    class Straggler(Solve):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            turn = await ctx.agent("solver").act(agentrl.user("solve"))
            await ctx.sleep(100.0 if ctx.task.id == "digit-0" else 0.5)
            ctx.agent("solver").reward(float(turn.text.strip(".") < "5"))

    reasons: Counter[str] = Counter()

    async def main() -> None:
        policies = {"solver": {"step_size": 8, "max_staleness": 1, "max_lag": 2}}
        run = SmallRun(config=config_for(policies=policies, steps=12, credit={"group_size": 4}), environment=Straggler)

        def look(orchestrator: Any) -> None:
            hold = orchestrator.why_not()
            reasons["" if hold is None else hold.kind] += 1
            asyncio.get_running_loop().call_later(5.0, look, orchestrator)

        run.during = look
        await run.run()
        assert oldest(run) == {"solver": 2.0}

    simulated_loop.run(main)
    assert reasons["max_lag"] > reasons["max_staleness"]


class Undeclared(Propose):
    """Has its solvers without a word, so that admission knows nothing of the first ones."""

    seats = ("solver",)
    fan_out: ClassVar[dict[str, int]] = {}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("solver").act(agentrl.user("propose"))
        await think(ctx)
        solved = await ctx.gather(*ctx.spawn(Solve, {"problem": 1}, n=40))
        ctx.agent("solver").reward(agentrl.learnability(solved))


def test_what_admission_could_not_know_of_is_counted_and_raises_the_alarm() -> None:
    async def main() -> SmallRun:
        policies = {"solver": {"step_size": 8, "max_staleness": 1, "max_lag": 1}}
        run = SmallRun(config=config_for(policies=policies, steps=12, credit={"group_size": 2}), environment=Undeclared)
        await run.run()
        return run

    run = simulate(main, seed=0)
    state = RunState(plan=RunDisplaySettings(max_staleness={"solver": 1}))
    raised = set()
    for name, step, values in run.seen.steps:
        state.record(name, step, values)
        raised |= {alarm.name for alarm in find_alarms(state)}
    assert sum(values.get("staleness/exceeded", 0.0) for _, _, values in run.seen.steps) > 0
    assert "max_lag" in raised


def test_after_a_rollback_it_holds_for_what_begins_in_this_life(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        policies = {"solver": {"step_size": 8, "max_staleness": 1, "max_lag": 1}}
        config = config_for(policies=policies, steps=12)
        first = SmallRun(config=config, environment=Solve)
        journal = await first.cut_after(25.0)
        at = {"solver": PolicyVersion("solver", 0, max(len(first.trainer.batches) - 3, 0))}
        second = SmallRun(config=config, environment=Solve, journal=journal, resumed_at=at)
        await second.run()
        assert len(second.trainer.batches) == 12 - at["solver"].step
        assert {values["staleness/exceeded"] for _, _, values in second.seen.steps} == {0.0}
        assert oldest(second)["solver"] >= 1
        assert not any("staleness/before_resume" in values for _, _, values in first.seen.steps)
        assert second.seen.steps[0][2]["staleness/before_resume"] > 0
        assert "staleness/before_resume" not in second.seen.steps[-1][2]

    simulated_loop.run(main)


def test_a_limit_below_the_mean_s_bound_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"policies\.guesser\.max_lag = 1 is below max_staleness = 2"):
        config_for(policies={"guesser": {"max_staleness": 2, "max_lag": 1}})
    with pytest.raises(ValidationError, match=r"set policies\.guesser\.max_lag"):
        config_for(policies={"guesser": {"over_lag": "mask"}})
