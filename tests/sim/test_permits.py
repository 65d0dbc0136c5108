"""Training and evaluation share `max_in_flight`: neither exceeds it, and neither stops the other."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

import agentrl
from agentrl.core.records import EpisodeSpec
from agentrl.journal.port import EpisodeEnd
from agentrl.orchestrator.loop import Orchestrator
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, Ask, Guess, SmallRun, config_for

pytestmark = pytest.mark.sim
HELD_OUT = [replace(task, id=f"held-out-{number}-{task.id}") for number in range(2) for task in TASKS]


class WatchedRun(SmallRun):
    """A run that notes the most episodes in flight at once, and the times of its steps and evaluations."""

    most = most_beside = 0
    """Largest number of episodes in flight, and of held-out ones beside training."""
    in_turn = out_of_turn = 0
    """Number of held-out episodes that started while a group waited for permits and more, or no more, training episodes
    ran."""

    def watch(self, orchestrator: Orchestrator) -> None:
        in_flight = orchestrator.dispatcher.in_flight
        add = in_flight.add

        def added(spec: EpisodeSpec) -> None:
            hold = orchestrator.scheduler.why_not()
            is_waiting = orchestrator.scheduler.is_training and hold is not None and hold.kind == "max_in_flight"
            if spec.purpose == "evaluate" and is_waiting:
                is_in_turn = in_flight.held_out() < in_flight.count("train")
                self.in_turn, self.out_of_turn = self.in_turn + is_in_turn, self.out_of_turn + (not is_in_turn)
            add(spec)
            self.most = max(self.most, len(in_flight))
            is_over = orchestrator.scheduler.phases.is_over("guesser")
            if orchestrator.status().phase == "training" and not is_over:
                self.most_beside = max(self.most_beside, in_flight.held_out())

        in_flight.add = added  # type: ignore[method-assign]

    async def run(self) -> Any:
        self.during = self.during or self.watch
        async with asyncio.timeout(100_000):
            return await super().run()

    def held_out_ends(self) -> int:
        ends = [row.header for row in self.journal.records if isinstance(row, EpisodeEnd)]
        return sum(header.purpose == "evaluate" and header.committed for header in ends)


def evaluating(max_in_flight: int, *, every: int = 2, **changes: Any) -> Any:
    return config_for(
        max_in_flight=max_in_flight, evaluation={"tasks": len(HELD_OUT), "every": every}, **{"steps": 6, **changes}
    )


@pytest.mark.parametrize(("max_in_flight", "share", "max_staleness"), [(16, 8, 3), (5, 1, 0), (4, 2, 3)])
def test_both_share_the_permits(
    simulated_loop: SeededSimulation, max_in_flight: int, share: int, max_staleness: int
) -> None:
    async def main() -> None:
        run = WatchedRun(config=evaluating(max_in_flight, max_staleness=max_staleness), held_out=HELD_OUT)
        await run.run()
        assert run.most <= max_in_flight
        assert 0 < run.most_beside <= share
        assert [len(batch.units) for batch in run.trainer.batches] == [8] * 6, "no step is taken with too few units"
        assert len(run.seen.evaluations) > 2
        assert run.held_out_ends() == len(HELD_OUT) * len(run.seen.evaluations)

    simulated_loop.run(main)


def test_both_take_turns_where_a_group_needs_all_permits(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = WatchedRun(config=evaluating(4, max_staleness=3, steps=12), held_out=HELD_OUT)
        await run.run()
        assert len(run.seen.evaluations) > 2
        assert run.in_turn
        assert not run.out_of_turn

    simulated_loop.run(main)


def test_groups_of_one_leave_permits_to_an_evaluation(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        credit = {"group_size": 1, "advantage": {"name": "none"}}
        run = WatchedRun(
            config=evaluating(2, every=2, steps=12, max_staleness=3, credit=credit, episode_timeout_s=1e6),
            environment=SlowLesson,
            held_out=HELD_OUT,
        )
        await run.run()
        assert run.most <= 2
        assert run.seen.evaluated == [0, 2, 4, 6, 8, 10, 12], "an evaluation is skipped while another runs"

    simulated_loop.run(main)


@pytest.mark.parametrize("seconds", [6.0, 10.0])
def test_resumed_episodes_that_wait_for_steps_leave_permits_to_the_first_evaluation(
    simulated_loop: SeededSimulation, seconds: float
) -> None:
    async def main() -> None:
        config = evaluating(8, max_staleness=0, deterministic=True)
        run = WatchedRun(config=config)
        await run.stop_after(seconds)
        assert run.orchestrator.board.step("guesser") > 0
        journal, first = run.journal.after_crash(), {"guesser": run.orchestrator.board.at("guesser", 0)}
        resumed = WatchedRun(
            config=config,
            held_out=HELD_OUT,
            journal=journal,
            resumed_at=first,
            lineage=2,
        )
        await resumed.run()
        assert resumed.seen.evaluated[0] == 0
        assert len(resumed.trainer.batches) == 6

    simulated_loop.run(main)


def test_children_hold_permits_and_never_wait_for_them(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = evaluating(6, max_staleness=3, policies={"guesser": {"step_size": 24, "max_staleness": 3}})
        run = WatchedRun(config=config, environment=Ask, held_out=HELD_OUT)
        await run.run()
        assert len(run.trainer.batches) == 6
        assert len(run.seen.evaluations) > 2
        assert run.held_out_ends() == 3 * len(HELD_OUT) * len(run.seen.evaluations)

    simulated_loop.run(main)


class SlowExam(Guess):
    """Held-out tasks take very long."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.task.id.startswith("held-out") and ctx.now() > 60.0:
            await ctx.sleep(500.0)
        await super().run(ctx)


class SlowLesson(Guess):
    """Training tasks take very long."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if not ctx.task.id.startswith("held-out"):
            await ctx.sleep(500.0 * ctx.rng.random())
        await super().run(ctx)


def test_slow_evaluations_do_not_stop_training(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        steps: list[float] = []
        run = WatchedRun(
            config=evaluating(5, every=1, steps=20, max_staleness=2, episode_timeout_s=1e6),
            environment=SlowExam,
            held_out=HELD_OUT,
        )
        on_step = run.seen.on_step

        def timed(*step: Any) -> None:
            steps.append(asyncio.get_running_loop().time())
            on_step(*step)

        run.seen.on_step = timed  # type: ignore[method-assign]
        await run.run()
        slow = [before for before, after in itertools.pairwise(steps) if after - before > 100.0]
        assert len(steps) == 20
        assert not slow, "training waited for held-out episodes to end"

    simulated_loop.run(main)


@pytest.mark.parametrize("max_in_flight", [4, 16])
def test_slow_training_does_not_stop_evaluations(simulated_loop: SeededSimulation, max_in_flight: int) -> None:
    async def main() -> None:
        run = WatchedRun(
            config=evaluating(max_in_flight, every=2, steps=12, max_staleness=3, episode_timeout_s=1e6),
            environment=SlowLesson,
            held_out=HELD_OUT,
        )
        await run.run()
        assert len(run.seen.evaluations) >= 5
        assert run.most <= max_in_flight

    simulated_loop.run(main)


def test_training_keeps_its_pace_where_it_needs_half_of_the_permits(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = WatchedRun(config=evaluating(32), held_out=HELD_OUT)
        await run.run()
        assert run.most > 16 + 4
        assert run.orchestrator.activity_totals().get("max_in_flight", 0.0) == 0.0

    simulated_loop.run(main)
