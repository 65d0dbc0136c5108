"""Who learns when, and in which seat: whatever ratios and phases are, every policy takes its steps."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.app.assemble import past_of
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.core.rng import stream
from agentrl.testing import CrashScenario, crash_everywhere
from agentrl.testing.plugin import SimulatedLoop
from agentrl.testing.sim import SimLoop
from tests.sim.small_run import SmallRun, config_for, guess
from tests.sim.test_several_policies import Solve

pytestmark = pytest.mark.sim

SHARE = 3 if "AGENTRL_SIM_SEEDS" in os.environ else 30
"""Of the crash points."""


class Propose(agentrl.Environment):
    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Solve": 1}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("proposer").act(agentrl.user("propose"))
        solved = await ctx.gather(*ctx.spawn(Solve, {"problem": 1}, n=self.fan_out["Solve"]))
        rewards = [result.reward for result in solved if result.reward is not None]
        if rewards:
            ctx.agent("proposer").reward(sum(rewards) / len(rewards))


class ProposeThree(Propose):
    fan_out: ClassVar[dict[str, int]] = {"Solve": 3}


class ProposeEight(Propose):
    fan_out: ClassVar[dict[str, int]] = {"Solve": 8}


class Duel(agentrl.Environment):
    """Two sides; the better digit wins."""

    seats = ("x", "o")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        x, o = ctx.agent("x"), ctx.agent("o")
        first = (await x.act(agentrl.user("play"))).text.strip(".")
        await ctx.sleep(ctx.rng.random())
        second = (await o.act(agentrl.user("play"))).text.strip(".")
        x.reward(float(first > second) - float(first < second))
        o.reward(float(second > first) - float(second < first))


def steps_of(run: SmallRun) -> dict[str, int]:
    return dict(Counter(batch.policy for batch in run.trainer.batches))


def order_of(run: SmallRun) -> list[tuple[str, int]]:
    """(policy, steps in a row)."""
    return [(name, len(list(row))) for name, row in itertools.groupby(batch.policy for batch in run.trainer.batches)]


def alternating(**phases: int) -> dict[str, Any]:
    return {name: {"step_size": 8, "phase_steps": steps} for name, steps in phases.items()}


def drawn(seed: int) -> tuple[type[agentrl.Environment], dict[str, Any]]:
    """A point of the grid of fan-outs, step sizes, bounds and schedules; bounds are what one group needs, or more."""
    draw = stream("schedule", seed)
    environment = (Propose, ProposeThree, ProposeEight)[draw.randrange(3)]
    group_size, solvers = draw.randrange(2, 5), environment.fan_out["Solve"]
    phases = ((0, 0), (1, 1), (1, 3), (2, 1))[draw.randrange(4)]
    policies = {}
    for name, units, phase in (("proposer", 1, phases[0]), ("solver", solvers, phases[1])):
        staleness = draw.randrange(3)
        least = -(-units * group_size // (1 + staleness))
        policies[name] = {
            "step_size": draw.randrange(least, 3 * least + 4),
            "max_staleness": staleness,
            "phase_steps": phase,
            "steps": draw.randrange(1, 5),
        }
    return environment, {"policies": policies, "credit": {"group_size": group_size}, "max_in_flight": 4 * group_size}


def test_no_ratio_bound_or_schedule_deadlocks(simulated_loop: SimulatedLoop) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        environment, changes = drawn(loop.seed)  # `make sim` draws more
        run = SmallRun(config=config_for(**changes), environment=environment)
        await run.run()
        assert steps_of(run) == {name: policy["steps"] for name, policy in changes["policies"].items()}, changes
        trained = Counter((b.policy, unit.episode_id) for b in run.trainer.batches for unit in b.units)
        assert max(trained.values()) == 1
        for name, policy in changes["policies"].items():
            assert run.mean_lag(name) <= policy["max_staleness"], changes

    simulated_loop.run(main)


def test_policies_learn_one_after_another(simulated_loop: SimulatedLoop) -> None:
    async def main() -> None:
        policies = alternating(x=3, o=1)
        policies["o"]["steps"] = 2
        run = SmallRun(config=config_for(policies=policies, steps=6), environment=Duel)
        await run.run()
        assert order_of(run) == [("x", 3), ("o", 1), ("x", 3), ("o", 1)]
        dropped = run.orchestrator.buffer.ledger.units_dropped
        assert dropped["x"] > 0
        assert dropped["o"] > 0

    simulated_loop.run(main)


def test_one_that_is_over_is_passed_over(simulated_loop: SimulatedLoop) -> None:
    async def main() -> None:
        policies = alternating(x=1, o=1)
        policies["o"]["steps"] = 2
        run = SmallRun(config=config_for(policies=policies, steps=5), environment=Duel)
        await run.run()
        assert order_of(run) == [("x", 1), ("o", 1), ("x", 1), ("o", 1), ("x", 3)]

    simulated_loop.run(main)


def test_a_resumed_run_goes_on_in_its_phase(simulated_loop: SimulatedLoop) -> None:
    async def main() -> None:
        config = config_for(policies=alternating(x=2, o=2), steps=4)
        first = SmallRun(config=config, environment=Duel)
        first.during = lambda orchestrator: asyncio.get_running_loop().call_later(9.0, orchestrator.stop)
        await first.run()
        await first.journal.turn_log("0").flush()
        journal, steps = first.journal.after_crash(), steps_of(first)
        at = {name: PolicyVersion(name, 0, steps.get(name, 0)) for name in config.policies}
        past = past_of(journal, at, group_size=config.credit.group_size)
        second = SmallRun(config=config, environment=Duel, journal=journal, past=past, resumed_at=at)
        await second.run()
        batches = first.trainer.batches + second.trainer.batches
        assert [batch.policy for batch in batches] == ["x", "x", "o", "o"] * 2
        assert max(Counter((b.policy, unit.episode_id) for b in batches for unit in b.units).values()) == 1

    simulated_loop.run(main)


def test_a_run_in_phases_that_dies_at_any_operation_loses_nothing() -> None:
    policies = {"x": {"step_size": 4, "phase_steps": 1}, "o": {"step_size": 4, "phase_steps": 2}}
    report = crash_everywhere(CrashScenario(Duel, changes={"policies": policies}), share=SHARE)
    assert report.crashes > 40
    # Which units a phase drops depends on when they end; that every unit is trained once or dropped does not.
    assert not [v for v in report.violations if not v.what.startswith("trained: not")], report


def test_a_policy_samples_as_its_own_section_says(simulated_loop: SimulatedLoop) -> None:
    asked: set[tuple[str, float, int]] = set()

    def listen(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        asked.add((policy, request.sampling.temperature, request.sampling.max_tokens))
        return guess(request, policy, version)

    async def main() -> None:
        policies = {"x": {"step_size": 8}, "o": {"kind": "frozen", "sampling": {"temperature": 0.5, "max_tokens": 9}}}
        run = SmallRun(config=config_for(policies=policies, steps=1), environment=Duel, script=listen)
        await run.run()
        assert asked == {("x", 1.0, 64), ("o", 0.5, 9)}

    simulated_loop.run(main)


def test_sides_change_from_group_to_group(simulated_loop: SimulatedLoop) -> None:
    async def main() -> None:
        policies = {"player": {"step_size": 12}, "other": {"kind": "frozen"}}
        seats = {"x": ["player", "other", "player"], "o": ["other", "player", "player"]}
        run = SmallRun(config=config_for(policies=policies, seats=seats, steps=5), environment=Duel)
        await run.run()
        by_group: dict[int, set[tuple[str, ...]]] = {}
        for batch in run.trainer.batches:
            for unit in batch.units:
                seats_of = tuple(sorted(credit.seat for credit in unit.credits))
                by_group.setdefault(int(unit.episode_id[1:]) // 4 % 3, set()).add(seats_of)
        assert by_group == {0: {("x",)}, 1: {("o",)}, 2: {("o", "x")}}

    simulated_loop.run(main)
