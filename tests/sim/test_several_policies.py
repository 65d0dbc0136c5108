"""Several trainable policies in one loop: own clocks, child episodes, no ratio that deadlocks."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.core.errors import CheckFailedError, ConfigError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.port import MetricRow
from agentrl.orchestrator.evaluation import Evaluator
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, SmallRun, config_for

pytestmark = pytest.mark.sim


class Duel(agentrl.Environment):
    """Two seats, both rewarded."""

    seats = ("asker", "guesser")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        asker, guesser = ctx.agent("asker"), ctx.agent("guesser")
        asked = await asker.act(agentrl.user("ask"))
        await ctx.sleep(ctx.rng.random())
        told = await guesser.act(agentrl.user(asked.text))
        asker.reward(float(asked.text > told.text))
        guesser.reward(float(asked.text <= told.text))


class Muted(Duel):
    """One seat is never rewarded."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("asker").act(agentrl.user("ask"))
        await ctx.agent("guesser").act(agentrl.user("guess"))
        ctx.agent("guesser").reward(ctx.rng.random())


class Solve(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("solver").act(agentrl.user("solve"))
        await ctx.sleep(ctx.rng.random() * 3)
        ctx.agent("solver").reward(float(turn.text.strip(".") < "5"))


class Propose(agentrl.Environment):
    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Solve": 4}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("proposer").act(agentrl.user("propose"))
        await ctx.sleep(ctx.rng.random())
        solved = await ctx.gather(*ctx.spawn(Solve, {"problem": 1}, n=4))
        rewards = [result.reward for result in solved if result.reward is not None]
        ctx.agent("proposer").reward(sum(rewards) / len(rewards))


def policies(**sizes: int) -> dict[str, Any]:
    return {name: {"step_size": size, "max_staleness": 1} for name, size in sizes.items()}


def steps_of(run: SmallRun) -> Counter[str]:
    return Counter(batch.policy for batch in run.trainer.batches)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 16), (16, 8), (4, 12)])
def test_each_policy_steps_by_its_own_step_size(simulated_loop: SeededSimulation, sizes: tuple[int, int]) -> None:
    async def main() -> None:
        config = config_for(policies=policies(asker=sizes[0], guesser=sizes[1]))
        run = SmallRun(config=config, environment=Duel)
        await run.run()
        assert steps_of(run) == {"asker": 4, "guesser": 4}
        full = [len(batch.units) == config.policies[batch.policy].step_size for batch in run.trainer.batches]
        assert all(full), "a step was taken before it was full"
        for policy in config.policies:
            trained = [u.episode_id for b in run.trainer.batches if b.policy == policy for u in b.units]
            assert len(trained) == len(set(trained))

    simulated_loop.run(main)


@pytest.mark.parametrize("sizes", [(4, 16), (8, 32), (4, 32), (8, 16)])
def test_no_fan_out_deadlocks(simulated_loop: SeededSimulation, sizes: tuple[int, int]) -> None:
    async def main() -> None:
        config = config_for(policies=policies(proposer=sizes[0], solver=sizes[1]), credit={"group_size": 2}, steps=3)
        run = SmallRun(config=config, environment=Propose)
        await run.run()
        assert steps_of(run) == {"proposer": 3, "solver": 3}

    simulated_loop.run(main)


def test_a_frozen_proposer_with_a_learning_solver(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        bound = policies(proposer=4, solver=16)
        bound["proposer"] = {"kind": "frozen"}
        run = SmallRun(config=config_for(policies=bound, credit={"group_size": 2}), environment=Propose)
        await run.run()
        assert steps_of(run) == {"solver": 4}

    simulated_loop.run(main)


class SlowToLoad(ScriptedEngine):
    """Takes its time to load versions, one after another, and remembers which it was to sample from."""

    given: ClassVar[list[PolicyVersion]] = []
    turn: ClassVar[asyncio.Lock]

    async def load(self, weights: WeightsRef) -> None:
        async with self.turn:
            await asyncio.sleep(2.0 * (weights.version.policy == "asker"))

    def _make_current(self, version: PolicyVersion) -> None:
        self.given.append(version)
        super()._make_current(version)


def test_an_evaluation_that_begins_while_a_policy_steps_does_not_take_the_policy_back(
    simulated_loop: SeededSimulation,
) -> None:
    async def main() -> None:
        SlowToLoad.turn = asyncio.Lock()
        SlowToLoad.given.clear()
        bound = policies(asker=8, guesser=4)
        config = config_for(policies=bound, steps=6, evaluation={"tasks": 1, "every": 1})
        await SmallRun(config=config, environment=Duel, engine_class=SlowToLoad, held_out=TASKS[:1]).run()
        for policy in bound:
            given = [version for version in SlowToLoad.given if version.policy == policy]
            assert given == sorted(given)

    simulated_loop.run(main)


def test_a_policy_that_can_get_no_units_ends_the_run(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(policies=policies(asker=8, guesser=8)), environment=Muted)
        with pytest.raises(CheckFailedError, match="asker"):
            await run.run()

    simulated_loop.run(main)


class Unrewarded(Duel):
    """The guesser acts and gets no reward."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("asker").act(agentrl.user("Ask."))
        await ctx.agent("guesser").act(agentrl.user("Guess."))
        ctx.agent("asker").reward(1.0)


def test_a_trained_seat_without_a_reward_ends_the_run_by_name(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(policies=policies(asker=8, guesser=8)), environment=Unrewarded)
        with pytest.raises(CheckFailedError, match=r"gave guesser nothing .* seat 'guesser' was given no reward. Call"):
            await run.run()

    simulated_loop.run(main)


def test_policies_are_evaluated_at_the_same_steps(simulated_loop: SeededSimulation) -> None:
    async def main() -> dict[str, list[int]]:
        config = config_for(policies=policies(asker=8, guesser=8), evaluation={"tasks": 2, "every": 2}, steps=8, seed=3)
        run = SmallRun(config=config, environment=Duel, held_out=TASKS[:2])
        await run.run()
        rows = [row for row in run.journal.records if isinstance(row, MetricRow) and "evaluation/turns" in row.values]
        steps = {name: [row.step for row in rows if row.policy == name] for name in ("asker", "guesser")}
        return steps

    for steps in simulated_loop.run(main):
        assert steps["asker"] == steps["guesser"]
        assert len(steps["asker"]) > 2


@pytest.mark.parametrize("at", [{"asker": 2, "guesser": 1}, {"asker": 1, "guesser": 2}, {"asker": 3, "guesser": 2}])
def test_policies_that_resume_between_their_evaluations_are_evaluated_at_the_same_steps(
    simulated_loop: SeededSimulation, at: dict[str, int]
) -> None:
    async def main() -> list[dict[str, int]]:
        config = config_for(policies=policies(asker=8, guesser=8), evaluation={"tasks": 2, "every": 2}, steps=8, seed=3)
        resumed_at = {name: PolicyVersion(name, 0, step) for name, step in at.items()}
        run = SmallRun(config=config, environment=Duel, held_out=TASKS[:2], resumed_at=resumed_at)
        await run.run()
        return run.seen.evaluated_steps

    for evaluated in simulated_loop.run(main):
        assert evaluated[-1] == {"asker": 8, "guesser": 8}
        assert all(steps["asker"] == steps["guesser"] for steps in evaluated), evaluated
        first = min(evaluated[0].values())
        assert first == (2 if min(at.values()) == 1 else 4)


class Arrivals(Evaluator):
    """Its evaluations are kept, and take as long as it is told."""

    evaluated: ClassVar[list[dict[str, int]]] = []
    seconds = 0.0

    async def now(self, versions: Mapping[str, PolicyVersion], *others: Any, **options: Any) -> None:
        self.evaluated.append({name: version.step for name, version in versions.items()})
        await asyncio.sleep(self.seconds)


@pytest.mark.parametrize(
    ("seconds", "arrivals", "evaluated"),
    [
        pytest.param(0.0, "a2 b2 b4 a4", [(2, 2), (4, 4)], id="in-either-order"),
        pytest.param(1.5, "a2 b2 a4 b4 a6 b6", [(2, 2), (6, 6)], id="one-is-skipped-and-its-partner-not"),
        pytest.param(0.0, "a2 b1 a4 b2 b3 b4 a6 b6", [(4, 1), (6, 6)], id="one-comes-again-before-the-other"),
        pytest.param(0.0, "b2 a4 b4 a6 b6", [(4, 4), (6, 6)], id="one-was-evaluated-before-the-resume"),
    ],
)
def test_a_policy_waits_only_for_others_that_still_come_to_its_step(
    simulated_loop: SeededSimulation, seconds: float, arrivals: str, evaluated: list[tuple[int, int]]
) -> None:
    """An arrival is a policy and its step, one a second; even steps are due."""

    async def main() -> None:
        Arrivals.evaluated, Arrivals.seconds = [], seconds
        served = ServedVersions(ScriptedEngine([[1]], versions={name: PolicyVersion(name, 0, 0) for name in "ab"}))
        parts: Any = dict.fromkeys(("dispatcher", "store", "observer", "changed", "best", "clock", "tell"))
        evaluator = Arrivals(held_out=(), versions=served, **parts)
        async with asyncio.TaskGroup() as tasks:
            for arrival in ["a0", "b0", *arrivals.split()]:
                policy, step = arrival[0], int(arrival[1:])
                version = PolicyVersion(policy, 0, step)
                await served.make_current(WeightsRef(version=version, path=arrival, kind="adapter", sha256=""))
                if step and step % 2 == 0:
                    tasks.create_task(evaluator.in_background(policy, "ab", {"a", "b"}, lambda: False))
                await asyncio.sleep(1.0)
        assert [(each["a"], each["b"]) for each in Arrivals.evaluated] == evaluated
        assert not served.pinned()

    simulated_loop.run(main)


def test_a_policy_nobody_holds_is_refused(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(policies=policies(asker=8, guesser=8, spare=8))
        with pytest.raises(ConfigError, match=r"policies\.spare holds no seat"):
            await SmallRun(config=config, environment=Duel).run()

    simulated_loop.run(main)


def test_children_of_a_resumed_parent_are_not_run_twice(simulated_loop: SeededSimulation) -> None:
    moments = itertools.count(1.5, 0.35)

    async def main() -> int:
        moment = next(moments)
        config = config_for(policies=policies(proposer=4, solver=16), credit={"group_size": 2}, steps=4)
        first = SmallRun(config=config, environment=Propose)
        journal = await first.cut_after(moment)
        done = steps_of(first)
        at = {name: PolicyVersion(name, 0, done[name]) for name in config.policies}
        second = SmallRun(config=config, environment=Propose, journal=journal, resumed_at=at)
        ended_children = [*filter(None, (journal.ended_children(spec.episode_id) for spec in journal.unfinished()))]
        await second.run()
        trained: Counter[tuple[str, str]] = Counter()
        for batch in first.trainer.batches + second.trainer.batches:
            trained.update((unit.policy, unit.episode_id) for unit in batch.units)
        assert max(trained.values()) == 1
        assert steps_of(first) + steps_of(second) == {"proposer": 4, "solver": 4}
        return sum(spec.parent_id is None and bool(ended_children) for spec in second.past.unfinished)

    assert sum(simulated_loop.run(main)) > 0, "no parent was stopped with children that had ended"


def test_each_policy_is_evaluated_by_its_own_rewards_in_each_of_its_seats(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(policies=policies(asker=4, guesser=4), steps=2, evaluation={"tasks": 7})
        run = SmallRun(config=config, environment=Duel, held_out=TASKS[:7])
        await run.run()
        for measured in run.seen.evaluations:
            asker, guesser = (measured[name]["evaluation/reward"] for name in ("asker", "guesser"))
            assert asker + guesser == pytest.approx(1.0), "they share one point"
            assert asker != guesser
            assert {metrics["evaluation/episodes"] for metrics in measured.values()} == {7.0}
        rows = [row for row in run.journal.records if isinstance(row, MetricRow) and "evaluation/turns" in row.values]
        recorded = {(row.policy, row.step): row.values for row in rows}
        assert recorded["asker", 0] == run.seen.evaluations[0]["asker"]
        assert recorded["guesser", 0] == run.seen.evaluations[0]["guesser"]

        alone = config_for(policies=policies(player=8), steps=1, evaluation={"tasks": 7})
        played = SmallRun(config=alone, environment=Duel, held_out=TASKS[:7])
        await played.run()
        own = played.seen.evaluations[0]["player"]
        assert own["evaluation/reward"] == 1.0, "it plays both sides"
        assert own["evaluation/reward/asker"] == run.seen.evaluations[0]["asker"]["evaluation/reward"]
        assert own["evaluation/reward/guesser"] == run.seen.evaluations[0]["guesser"]["evaluation/reward"]

    simulated_loop.run(main)


def test_who_plays_in_children_only_is_evaluated_too(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        bound = policies(proposer=4, solver=16)
        config = config_for(policies=bound, credit={"group_size": 2}, steps=1, evaluation={"tasks": 3})
        run = SmallRun(config=config, environment=Propose, held_out=TASKS[:3])
        await run.run()
        before = run.seen.evaluations[0]
        assert before["solver"]["evaluation/reward"] == pytest.approx(before["proposer"]["evaluation/reward"])
        assert 0.0 < before["solver"]["evaluation/reward"] < 1.0
        assert before["solver"]["evaluation/episodes"] == 3.0, "tasks, not attempts at them"

    simulated_loop.run(main)


def test_evaluations_give_each_task_to_the_same_line_up(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        seats = {"asker": ["a", "b"], "guesser": ["b", "a"]}
        config = config_for(policies=policies(a=8, b=8), seats=seats, evaluation={"tasks": 5, "every": 2})
        run = SmallRun(config=config, environment=Duel, held_out=TASKS[:5])
        await run.run()
        assert len(run.seen.evaluations) > 2
        scores = run.seen.scores()
        assert scores[1:] == scores[:1] * (len(scores) - 1)
        assert set(run.seen.evaluations[0]["a"]) >= {"evaluation/reward/asker", "evaluation/reward/guesser"}

    simulated_loop.run(main)


class Sloppy(agentrl.Environment):
    """The asker breaks the format, the guesser calls tools; how long it took is nobody's."""

    seats = ("asker", "guesser")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        asker, guesser = ctx.agent("asker"), ctx.agent("guesser")
        for _ in range(2):
            await asker.act(agentrl.user("ask"))
            ctx.metric("turns/illegal", 1)
        await guesser.act(agentrl.user("guess"))
        looked = (ctx.call_tool("look", {}, str, external=False, timeout_s=None) for _ in range(3))
        await ctx.gather(*looked)
        ctx.metric("game/length", 3)
        asker.reward(0.25)
        guesser.reward(ctx.rng.random())


def test_what_one_policy_does_is_not_counted_for_another(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        said = {"asker": [*b"...?", STOP_TOKEN], "guesser": [*b"5", STOP_TOKEN]}
        config = config_for(policies=policies(asker=8, guesser=8), steps=3)
        run = SmallRun(config=config, environment=Sloppy, script=lambda request, policy, version: said[policy])
        await run.run()
        measured = [(policy, metrics) for policy, _, metrics in run.seen.steps if "format/episodes" in metrics]
        assert {policy for policy, _ in measured} == {"asker", "guesser"}
        for policy, metrics in measured:
            asks = policy == "asker"
            assert metrics["format/broken_turns"] == metrics["format/broken_share"] == float(asks)
            assert metrics["episodes/turns"] == (2.0 if asks else 1.0)
            assert metrics["episodes/tokens"] == (10.0 if asks else 2.0)
            assert metrics.get("turns/illegal") == (2.0 if asks else None)
            assert metrics.get("tool/ok") == (None if asks else 3.0)
            assert metrics.get("game/length") == (3.0 if asks else None), "it is the episode's, and reported once"
            assert ("format/reward_broken" in metrics, "format/reward_kept" in metrics) == (asks, not asks)
        assert (
            next(metrics["format/reward_broken"] for policy, _, metrics in run.seen.steps if policy == "asker") == 0.25
        )

    simulated_loop.run(main)


class Counting(Propose):
    """Counts what it proposed."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await super().run(ctx)
        ctx.metric("terms", 5)


def test_what_children_count_is_their_own_policys(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        bound = policies(proposer=4, solver=16)
        run = SmallRun(config=config_for(policies=bound, credit={"group_size": 2}, steps=2), environment=Counting)
        await run.run()
        measured = [(policy, metrics) for policy, _, metrics in run.seen.steps if "format/episodes" in metrics]
        assert {policy for policy, _ in measured} == {"proposer", "solver"}
        for policy, metrics in measured:
            assert metrics.get("terms") == (5.0 if policy == "proposer" else None)

    simulated_loop.run(main)
