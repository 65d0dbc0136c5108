"""Who learns when, and in which seat: whatever ratios and phases are, every policy takes its steps."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

import agentrl
from agentrl.core.ids import random_stream
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.journal.port import UnitDropped
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import VirtualTimeEventLoop
from tests.sim import MANY_SEEDS
from tests.sim.small_run import TASKS, SmallRun, config_for, guess
from tests.sim.test_several_policies import Solve
from tests.support.crash_scenario import CrashScenario
from tests.support.crashes import crash_everywhere

pytestmark = pytest.mark.sim

SHARE = 3 if MANY_SEEDS else 30
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
    return order_of_those(run, *run.config.policies)


def order_of_those(run: SmallRun, *policies: str) -> list[tuple[str, int]]:
    """The same, of some of them."""
    steps = [batch.policy for batch in run.trainer.batches if batch.policy in policies]
    return [(name, len(list(row))) for name, row in itertools.groupby(steps)]


def alternating(*freeze: tuple[str, int]) -> dict[str, Any]:
    """Policies of one step size."""
    return {
        "policies": {name: {"step_size": 8} for name in ("x", "o")},
        "freeze": freeze,
    }


def drawn(seed: int) -> tuple[type[agentrl.Environment], dict[str, Any]]:
    """A point of the grid of fan-outs, step sizes, bounds and schedules; bounds are what one group needs, or more."""
    draw = random_stream("schedule", seed)
    environment = (Propose, ProposeThree, ProposeEight)[draw.randrange(3)]
    group_size, solvers = draw.randrange(2, 5), environment.fan_out["Solve"]
    turns = ((0, 0), (1, 1), (1, 3), (2, 1))[draw.randrange(4)]
    policies, steps = {}, {}
    for name, units in (("proposer", 1), ("solver", solvers)):
        staleness = draw.randrange(3)
        least = -(-units * group_size // (1 + staleness))
        step_size = draw.randrange(least, 3 * least + 4)
        if not staleness:  # only what whole groups fill is taken
            step_size -= step_size % least
        policies[name] = {"step_size": step_size, "max_staleness": staleness}
        steps[name] = draw.randrange(1, 5)
    freeze = [("solver", turns[0]), ("proposer", turns[1])] if turns[0] else []
    credit = {"group_size": group_size}
    return environment, {
        "policies": policies,
        "steps": steps,
        "credit": credit,
        "freeze": freeze,
        "max_in_flight": 4 * group_size,
    }


def test_no_ratio_bound_or_schedule_deadlocks(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeEventLoop)
        environment, changes = drawn(loop.seed)  # `make sim` draws more
        run = SmallRun(config=config_for(**changes), environment=environment)
        await run.run()
        assert steps_of(run) == changes["steps"], changes
        trained = Counter((b.policy, unit.episode_id) for b in run.trainer.batches for unit in b.units)
        assert max(trained.values()) == 1
        for name, policy in changes["policies"].items():
            assert run.mean_lag(name) <= policy["max_staleness"], changes

    simulated_loop.run(main)


def test_policies_learn_one_after_another(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(**alternating(("o", 3), ("x", 1)), steps={"x": 6, "o": 2}), environment=Duel)
        await run.run()
        assert order_of(run) == [("x", 3), ("o", 1), ("x", 3), ("o", 1)]
        dropped = run.orchestrator.buffer.ledger.units_dropped
        assert dropped["x"] > 0
        assert dropped["o"] > 0

    simulated_loop.run(main)


def test_what_a_policy_leaves_when_it_has_taken_its_steps_is_not_called_frozen(
    simulated_loop: SeededSimulation,
) -> None:
    async def main() -> None:
        policies = {name: {"step_size": 8} for name in ("x", "o")}
        run = SmallRun(config=config_for(policies=policies, steps={"x": 1, "o": 4}), environment=Duel)
        await run.run()
        drops = run.journal.of_kind(UnitDropped)
        assert {drop.reason for drop in drops if drop.policy == "x"} == {"run_ended"}
        phased = SmallRun(
            config=config_for(**alternating(("o", 3), ("x", 1)), steps={"x": 6, "o": 2}), environment=Duel
        )
        await phased.run()
        assert "frozen" in {drop.reason for drop in phased.journal.of_kind(UnitDropped)}

    simulated_loop.run(main)


class Trio(agentrl.Environment):
    """Three seats, all rewarded."""

    seats = ("a", "b", "c")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            turn = await ctx.agent(seat).act(agentrl.user("play"))
            ctx.agent(seat).reward(float(turn.text > "5"))


def test_some_learn_at_once_while_others_are_frozen(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        policies = {name: {"step_size": 4} for name in Trio.seats}
        freeze = [("a", 2), (("b", "c"), 1)]
        run = SmallRun(config=config_for(policies=policies, freeze=freeze, steps=4), environment=Trio)
        await run.run()
        taken = [batch.policy for batch in run.trainer.batches]
        assert [sorted(taken[at : at + 4]) for at in (0, 5)] == [["b", "b", "c", "c"]] * 2
        assert [taken[at] for at in (4, 9, 10, 11)] == ["a"] * 4

    simulated_loop.run(main)


def test_who_is_not_named_always_learns(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        policies = {name: {"step_size": 4} for name in Trio.seats}
        run = SmallRun(config=config_for(policies=policies, freeze=[("a", 1), ("b", 1)], steps=6), environment=Trio)
        await run.run()
        assert steps_of(run) == dict.fromkeys(Trio.seats, 6)
        alternate = [name for name, _ in order_of_those(run, "a", "b")]
        assert alternate == ["b", "a"] * 6

    simulated_loop.run(main)


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ([("x", 1), ("z", 1)], r"freeze\[1\]: 'z' .* there are: x, o"),
        ([("x", 2)], r"freeze\[0\]: `freeze` names no other"),
        ([(("x", "o"), 2), ("x", 1)], r"freeze\[0\]: `freeze` names no other"),
        ([("x", 0), ("o", 1)], "greater than 0"),
    ],
)
def test_a_freeze_that_makes_no_sense_is_refused(freeze: list[Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_for(**alternating(*freeze))


def test_one_that_is_over_is_passed_over(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(**alternating(("o", 1), ("x", 1)), steps={"x": 5, "o": 2}), environment=Duel)
        await run.run()
        assert order_of(run) == [("x", 1), ("o", 1), ("x", 1), ("o", 1), ("x", 3)]

    simulated_loop.run(main)


def test_a_resumed_run_goes_on_in_its_phase(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(**alternating(("o", 2), ("x", 2)), steps=4)
        first = SmallRun(config=config, environment=Duel)
        first.during = lambda orchestrator: asyncio.get_running_loop().call_later(9.0, orchestrator.stop)
        await first.run()
        await first.journal.turn_log("0").flush()
        journal, steps = first.journal.after_crash(), steps_of(first)
        at = {name: PolicyVersion(name, 0, steps.get(name, 0)) for name in config.policies}
        second = SmallRun(config=config, environment=Duel, journal=journal, resumed_at=at)
        await second.run()
        batches = first.trainer.batches + second.trainer.batches
        assert [batch.policy for batch in batches] == ["x", "x", "o", "o"] * 2
        assert max(Counter((b.policy, unit.episode_id) for b in batches for unit in b.units).values()) == 1

    simulated_loop.run(main)


def test_a_run_in_phases_that_dies_at_any_operation_loses_nothing() -> None:
    policies = {"x": {"step_size": 4}, "o": {"step_size": 4}}
    changes = {"policies": policies, "freeze": [("o", 1), ("x", 2)]}
    report = crash_everywhere(CrashScenario(Duel, changes=changes), share=SHARE)
    assert report.crashes > 40
    # Which units a phase drops depends on when they end; that every unit is trained once or dropped does not.
    assert not [v for v in report.violations if not v.what.startswith("trained: not")], report


def test_a_policy_samples_as_its_own_section_says(simulated_loop: SeededSimulation) -> None:
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


def test_an_evaluation_samples_as_its_section_says(simulated_loop: SeededSimulation) -> None:
    """The opponent keeps its own sampling, and so does training."""
    asked: set[tuple[str, str, float]] = set()

    def listen(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        asked.add((request.request_id[0], policy, request.sampling.temperature))
        return guess(request, policy, version)

    async def main() -> None:
        policies = {"x": {"step_size": 8}, "o": {"kind": "frozen", "sampling": {"temperature": 0.5}}}
        evaluation = {"tasks": 2, "sampling": {"temperature": 0}}
        config = config_for(policies=policies, steps=1, evaluation=evaluation)
        run = SmallRun(config=config, environment=Duel, script=listen, held_out=TASKS[:2])
        await run.run()
        trained, evaluated = {("e", "x", 1.0), ("e", "o", 0.5)}, {("v", "x", 0.0), ("v", "o", 0.5)}
        assert asked == trained | evaluated

    simulated_loop.run(main)


def test_sides_change_from_group_to_group(simulated_loop: SeededSimulation) -> None:
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


def test_a_phase_keeps_the_bound_of_the_policy_it_freezes(simulated_loop: SeededSimulation) -> None:
    """While `o` learns, more episodes are in flight than `x`, which learns next, may have."""

    async def main() -> None:
        policies = {"x": {"step_size": 4, "max_staleness": 0}, "o": {"step_size": 16, "max_staleness": 1}}
        run = SmallRun(
            config=config_for(policies=policies, freeze=[("x", 2), ("o", 6)], steps={"x": 12, "o": 4}), environment=Duel
        )
        await run.run()
        assert steps_of(run) == {"x": 12, "o": 4}
        assert {metrics["staleness/max"] for policy, _, metrics in run.seen.steps if policy == "x"} == {0.0}

    simulated_loop.run(main)
