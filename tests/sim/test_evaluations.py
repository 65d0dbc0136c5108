"""Evaluations beside training: versions stay served while their episodes run, and no failed evaluation ends a run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import agentrl
from agentrl.config.run import RunConfig
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.port import EpisodeEnd
from agentrl.orchestrator.loop import Orchestrator
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, Guess, SmallRun, config_for

pytestmark = pytest.mark.sim
HELD_OUT = [replace(task, id=f"held-out-{task.id}") for task in TASKS]


class Relay(agentrl.Environment):
    """Three seats act one after another, each in a new conversation; children follow."""

    seats = ("asker", "guesser", "judge")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            await ctx.agent(seat).act(agentrl.user("Go on."))
            await ctx.sleep(ctx.rng.random())
            ctx.agent(seat).reward(float(ctx.rng.random()))
        if ctx.task.id.startswith("held-out"):
            await ctx.gather(*ctx.spawn(Guess, dict(ctx.task.data), n=2))


class Orphans(Guess):
    """A held-out task's parent ends while its children still wait for their first turn."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await super().run(ctx)
        if ctx.task.id.startswith("held-out"):
            ctx.spawn(Late, dict(ctx.task.data), n=2)


class Late(Guess):
    """Guess after several steps of the policy."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.sleep(5.0)
        await super().run(ctx)


def relay_config(**changes: Any) -> RunConfig:
    policies = {name: {"step_size": 4, "max_staleness": 1} for name in ("asker", "guesser", "judge")}
    return config_for(policies=policies, evaluation={"tasks": 10, "every": 1}, steps=12, **changes)


class Evaluating(SmallRun):
    """A run that is stopped so many seconds after an evaluation beside training has begun."""

    async def stop_inside(self, seconds: float) -> bool:
        """Return whether the evaluation was still running."""
        stopping: list[asyncio.Task[bool]] = []

        async def stop(orchestrator: Orchestrator) -> bool:
            def is_evaluating() -> bool:
                evaluated, total = orchestrator.dispatcher.evaluated.progress()
                return orchestrator.status().phase == "training" and evaluated < total

            await orchestrator.changed.wait_for(is_evaluating)
            await asyncio.sleep(seconds)
            is_inside = is_evaluating()
            orchestrator.stop()
            return is_inside

        self.during = lambda orchestrator: stopping.append(asyncio.get_running_loop().create_task(stop(orchestrator)))
        assert (await self.run()).interrupted
        return await stopping[0]


def test_a_stop_inside_an_evaluation_ends_the_run_as_any_stop_does(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        runs = [Evaluating(config=relay_config(), environment=Relay, held_out=HELD_OUT) for _ in range(3)]
        return sum([await run.stop_inside(0.5 * number) for number, run in enumerate(runs)])

    assert min(simulated_loop.run(main)) > 1, "few stops fell into an evaluation"


def test_versions_stay_served_until_children_without_parents_have_ended(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(evaluation={"tasks": 4, "every": 2}, steps=8, step_size=4)
        run = SmallRun(config=config, environment=Orphans, held_out=HELD_OUT)
        await run.run()
        assert len(run.seen.evaluations) > 2
        for each in run.seen.evaluations:
            assert each["guesser"]["evaluation/dropped"] == 0.0
        ends = [each.header for each in run.journal.records if isinstance(each, EpisodeEnd)]
        assert sum(header.purpose == "evaluate" for header in ends) == 3 * len(HELD_OUT) * len(run.seen.evaluations)

    simulated_loop.run(main)


class WithoutPins(ScriptedEngine):
    """Serves current versions only, like a process that restarted without the files of older ones."""

    def has_pin(self, version: PolicyVersion) -> bool:
        return False


def test_an_evaluation_whose_version_no_engine_serves_loses_its_episodes_and_not_the_run(
    simulated_loop: SeededSimulation,
) -> None:
    async def main() -> int:
        run = SmallRun(config=relay_config(), environment=Relay, engine_class=WithoutPins, held_out=HELD_OUT)
        await run.run()
        assert len(run.trainer.batches) == 12 * 3
        ends = [each.header for each in run.journal.records if isinstance(each, EpisodeEnd)]
        dropped = [header for header in ends if header.purpose == "evaluate" and not header.committed]
        assert {header.drop_reason for header in dropped} <= {"version_gone"}
        return len(dropped)

    assert min(simulated_loop.run(main, seeds=3)) > 0


class Unreachable(Guess):
    """Held-out tasks need a judge that is down from the third second to the ninth."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.task.id.startswith("held-out") and 3.0 < asyncio.get_running_loop().time() < 9.0:
            raise OSError("the judge is down")
        await super().run(ctx)


def test_an_evaluation_of_which_every_episode_fails_is_a_warning(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(
            evaluation={"tasks": 4, "every": 1},
            steps=8,
            best={"metric": "evaluation/reward", "window": 1, "stop_at": 2.0},
        )
        told: list[str] = []
        run = SmallRun(config=config, environment=Unreachable, held_out=HELD_OUT)

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.evaluator.tell = told.append

        run.during = listen
        assert not (await run.run()).interrupted
        assert len(run.trainer.batches) == 8
        assert 1 < len(run.seen.evaluations) < 8
        assert told
        assert all("environment_error; `agentrl episode show run v" in line for line in told)
        assert run.orchestrator.best.measured.versions, "the evaluations with a result count"

    simulated_loop.run(main)
