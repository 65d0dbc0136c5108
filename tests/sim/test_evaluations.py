"""Evaluations beside training: versions stay served while their episodes run, and no failed evaluation ends a run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import agentrl
from agentrl.config.run import RunConfig
from agentrl.core.errors import EVALUATION_CUT
from agentrl.core.records import PolicyVersion, dropped_header
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.run_log import RunLog
from agentrl.orchestrator.loop import Orchestrator
from agentrl.testing.plugin import SeededSimulation
from tests.sim.evaluated_run import Answer, Evaluated, held_out, with_skills
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


class Slow(agentrl.Environment):
    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("x"))
        await ctx.sleep(100.0)
        ctx.agent("guesser").reward(ctx.rng.random())


@pytest.mark.parametrize("stop_seconds", [8.0, 3600.0])
def test_a_stop_does_not_wait_for_held_out_episodes(simulated_loop: SeededSimulation, stop_seconds: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        config = config_for(evaluation={"every": 2, "tasks": 4}, stop_seconds=stop_seconds)
        run = SmallRun(config=config, held_out=TASKS[:4], environment=Slow)
        stopped_at: list[float] = []

        def stop(orchestrator: Orchestrator) -> None:
            assert orchestrator.dispatcher.in_flight.count("evaluate") == 4
            stopped_at.append(loop.time())
            orchestrator.stop()

        run.during = lambda orchestrator: loop.call_later(10.0, stop, orchestrator)
        await run.run()
        assert loop.time() - stopped_at[0] < 0.1

    simulated_loop.run(main)


class Noting(Answer):
    """Notes right replies only, so that the mean of the metric is that of the reward."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("guesser").act(agentrl.user("Well?"))
        await ctx.sleep(ctx.rng.random() + 60.0 * (not ctx.task.id.startswith("held-out")))
        is_right = turn.text.startswith("y")
        ctx.agent("guesser").reward(float(is_right))
        if is_right:
            ctx.metric("right", 1.0)


class Fragile(Noting):
    """Of the held-out episodes, a fifth fail, the same with all versions, and a tenth have
    children for which they do not wait."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        fate = ctx.rng.random() if ctx.task.id.startswith("held-out") else 0.5
        if fate > 0.8:
            raise RuntimeError("broken")
        await super().run(ctx)
        if fate < 0.15:
            ctx.spawn(SlowChild, dict(ctx.task.data), n=1)


class SlowChild(Noting):
    """Ends long after its parent."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.sleep(3.0)
        await super().run(ctx)


def test_a_resumed_evaluation_counts_what_the_killed_one_counted() -> None:
    changes: dict[str, Any] = {
        "steps": 2,
        "deterministic": True,
        "policies": {"guesser": {"step_size": 4, "max_staleness": 0}},
        "checkpoint": {"every": 1, "versions": 1},
        "evaluation": {"tasks": 32, "every": 1, "attempts": 2},
        "best": {"metric": "evaluation/reward", "window": 1},
    }
    scenario = Evaluated(Fragile, changes=changes, script=with_skills(50, 60, 70), held_out=held_out()[:32])
    undisturbed = scenario.new_machine()
    assert scenario.run(undisturbed, seed=0) is None
    expected = all_held_out_metrics(undisturbed.journal)
    assert expected[0]["evaluation/dropped"] > 0
    for step, values in expected.items():
        assert values["evaluation/metric/right"] == pytest.approx(values["evaluation/reward"]), f"step {step}"
    for operation in range(30, undisturbed.disk.operations, 47):
        machine = scenario.new_machine()
        machine.disk.before = lambda number, _, disk=machine.disk, at=operation: number == at and disk.crash()
        scenario.run(machine, seed=operation)
        machine = machine.after_crash("kill")
        assert scenario.run(machine, seed=operation + 1) is None
        assert all_held_out_metrics(machine.journal) == expected, f"operation {operation}"


def all_held_out_metrics(log: RunLog) -> dict[int, dict[str, float]]:
    """The newest metrics of each step's evaluation, without how long it took."""
    metrics: dict[int, dict[str, float]] = {}
    for step, name, value in log.rows("SELECT step, name, value FROM metrics ORDER BY id"):
        if name.startswith("evaluation/") and name not in ("evaluation/seconds", "evaluation/engine_busy_share"):
            metrics.setdefault(step, {})[name] = value
    return metrics


class WithoutHeldOut(Answer):
    """Held-out episodes fail."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.task.id.startswith("held-out"):
            raise RuntimeError("no data")
        await super().run(ctx)


def test_an_evaluation_without_a_result_is_not_repeated_in_the_same_process(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(evaluation={"tasks": 4, "every": 0}, steps=4, step_size=4, max_staleness=0)
        run = SmallRun(config=config, environment=WithoutHeldOut, script=with_skills(5), held_out=held_out()[:4])
        told = list[str]()

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.evaluator.tell = told.append

        run.during = listen
        await run.run()
        results = [line for line in told if "has no result" in line]
        assert len(results) == 2, "before the first step, and after the last"

    simulated_loop.run(main, seeds=1)


class Patient(Answer):
    """Held-out episodes outlast several steps."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("Well?"))
        is_held_out = ctx.task.id.startswith("held-out")
        await ctx.sleep(ctx.rng.random() + (2.0 + 30.0 * ctx.rng.random() if is_held_out else 1.0))
        ctx.agent("guesser").reward(ctx.rng.random())


@pytest.mark.parametrize("is_undone", [False, True])
def test_an_evaluation_that_was_cut_is_continued_or_given_up_by_name(
    simulated_loop: SeededSimulation, is_undone: bool
) -> None:
    """The checkpoint is newer than the evaluated version, or older."""

    async def main() -> None:
        policies = {"guesser": {"step_size": 4, "max_staleness": 1, "lora": {"rank": 2}}}
        config = config_for(policies=policies, evaluation={"tasks": 8, "every": 1}, steps=40)
        first = SmallRun(config=config, environment=Patient, held_out=held_out()[:8])
        journal = await first.cut_after(75.0)
        *_, (_, begun, is_ended) = journal.evaluations()
        assert not is_ended
        of_first = {end.spec.episode_id for end in journal.history("evaluate") if isinstance(end, EpisodeEnd)}
        evaluated = begun.versions["guesser"]
        at = evaluated._replace(step=evaluated.step - 1 if is_undone else first.orchestrator.board.step("guesser"))
        assert is_undone or at.step > evaluated.step
        for spec in journal.unfinished("evaluate"):
            await journal.commit(EpisodeEnd(spec, dropped_header(spec, EVALUATION_CUT)))
        told: list[str] = []
        second = SmallRun(
            config=config,
            environment=Patient,
            held_out=held_out()[:8],
            journal=journal,
            resumed_at={"guesser": at},
            during=lambda run: setattr(run.evaluator, "tell", told.append),
        )
        await second.run()
        is_given_up = any(f"the evaluation of {evaluated} is given up" in line for line in told)
        assert is_given_up == is_undone
        assert (evaluated.step == second.seen.evaluated[0]) != is_undone
        if not is_undone:
            rest = journal.evaluations()[len(first.journal.evaluations())][1]
            assert rest.versions == begun.versions
            ends = [end for end in journal.history("evaluate") if isinstance(end, EpisodeEnd) and end.spec.pins]
            ends = [end for end in ends if end.header.committed]
            played = [end.spec for end in ends if end.spec.pins["guesser"] == evaluated]
            assert sorted(spec.task.id for spec in played) == sorted(task.id for task in held_out()[:8]), "each once"
            assert of_first & {spec.episode_id for spec in played}

    simulated_loop.run(main)
