"""The whole loop under seeded schedules: start-up, updates in flight, the staleness bound, failures, stopping."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest

import agentrl
from agentrl.core.errors import AgentRLError, CheckFailedError, NonFiniteError, StorageError
from agentrl.core.records import StepReport, Task
from agentrl.journal.entries import TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.scheduler import FAILED_IN_A_ROW
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, Guess, SmallRun, config_for
from tests.sim.test_resume import second_life
from tests.support.recording_trainer import RecordingTrainer

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_every_admitted_episode_is_trained_once_or_dropped(
    simulated_loop: SeededSimulation, max_staleness: int
) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(max_staleness=max_staleness))
        await run.run()
        ledger = run.orchestrator.buffer.ledger
        trained = [unit.episode_id for batch in run.trainer.batches for unit in batch.units]
        assert len(trained) == len(set(trained)) == 4 * 8 == ledger.trained
        assert [batch.step_id for batch in run.trainer.batches] == [1, 2, 3, 4]
        assert ledger.in_flight == ledger.ready == 0

    simulated_loop.run(main)


def test_staleness_zero_samples_everything_from_the_current_weights(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(max_staleness=0))
        await run.run()
        assert all(metrics["staleness/max"] == 0.0 for _, _, metrics in run.seen.steps)

    simulated_loop.run(main)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_mean_lag_stays_within_the_bound(simulated_loop: SeededSimulation, max_staleness: int) -> None:
    async def main() -> float:
        run = SmallRun(config=config_for(max_staleness=max_staleness, steps=8))
        await run.run()
        lags = [metrics["staleness/mean"] for _, _, metrics in run.seen.steps]
        assert sum(lags) / len(lags) <= max_staleness
        return max(lags)

    assert max(simulated_loop.run(main)) > 0, "no schedule overlapped sampling with training"


class Lucky(Guess):
    """Records whether the first guess was right, and rarely breaks the format."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await super().run(ctx)
        ctx.metric("lucky", 0.0)
        if ctx.rng.random() < 0.1:
            ctx.metric("turns/illegal", 1)


def test_tokens_per_second_do_not_jump_with_the_episodes_that_happen_to_end(simulated_loop: SeededSimulation) -> None:
    async def main() -> float:
        run = SmallRun(config=config_for(steps=16, step_size=4, max_staleness=3))
        await run.run()
        metrics = [values for _, _, values in run.seen.steps][5:]
        rates = [values["tokens/sampled_per_s"] for values in metrics]
        assert max(rates) < 3 * min(rates)
        ends = [values["episodes/per_s"] for values in metrics]
        return max(ends) / max(min(ends), 0.01)

    assert max(simulated_loop.run(main)) > 3, "no schedule had steps with few and with many ends"


class Scored(Guess):
    """Records its reward as a metric of its own, and another only where it happens."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("guesser").act(agentrl.user("Guess a digit."))
        solved = float(turn.text.strip(".") in "01234")
        if not solved:
            await ctx.sleep(2.0)
            await ctx.agent("guesser").act(agentrl.user("no"))
        ctx.metric("solved", solved)
        if solved:
            ctx.metric("happened", 1)
        ctx.agent("guesser").reward(solved)


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_metrics_of_episodes_cover_the_episodes_of_the_steps_reward(
    simulated_loop: SeededSimulation, max_staleness: int
) -> None:
    async def main() -> None:
        config = config_for(steps=8, step_size=8, max_staleness=max_staleness)
        first = SmallRun(config=config, environment=Scored)
        first.during = lambda orchestrator: asyncio.get_running_loop().call_later(8.0, orchestrator.stop)
        await first.run()
        assert len(first.seen.steps) < 8
        second = second_life(first, first.journal.after_crash(), len(first.seen.steps))
        await second.run()
        for run in (first, second):
            for _, _, metrics in run.seen.steps:
                assert metrics["solved"] == pytest.approx(metrics["reward/mean"])
                assert metrics.get("happened", 0.0) == pytest.approx(metrics["reward/mean"])
                assert metrics["episodes/turns"] == pytest.approx(2.0 - metrics["reward/mean"])
                assert metrics["format/episodes"] == metrics["step/units"] == 8.0

    simulated_loop.run(main)


def test_a_metric_whose_mean_is_0_is_reported(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = SmallRun(config=config_for(steps=8), environment=Lucky)
        await run.run()
        steps = [metrics for _, _, metrics in run.seen.steps if "format/episodes" in metrics]
        assert {metrics.get("lucky") for metrics in steps} == {0.0}
        assert {metrics.get("episodes/timed_out") for metrics in steps} <= {0.0, None}, "absent if none ended"
        illegal = [metrics["turns/illegal"] for metrics in steps if "turns/illegal" in metrics]
        first = next((place for place, metrics in enumerate(steps) if "turns/illegal" in metrics), len(steps))
        assert len(illegal) == len(steps) - first, "a count that the run knows is 0 where no episode has it"
        return illegal.count(0.0)

    assert any(simulated_loop.run(main))


def test_updates_land_inside_turns_and_spans_say_where(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = SmallRun(config=config_for(steps=6), engine_options={"seconds_per_token": 0.4})
        await run.run()
        split = 0
        for batch in run.trainer.batches:
            for unit in batch.units:
                for entry in run.journal.turn_log("0").read(unit.episode_id, unit.attempt):
                    body = entry.decode()
                    if isinstance(body, TurnEntry):
                        assert body.tokens.spans[-1].stop == len(body.tokens)
                        split += len(body.tokens.spans) > 1
        return split

    assert sum(simulated_loop.run(main)) > 0


class Faulty(Guess):
    """Raises in some episodes, on every attempt."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.rng.random() < 0.3:
            raise OSError("the game server is gone")
        await super().run(ctx)


def test_failing_environments_cost_their_episode_and_nothing_else(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        told: list[str] = []

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.dispatcher.tell = told.append

        run = SmallRun(environment=Faulty, during=listen)
        await run.run()
        ledger = run.orchestrator.buffer.ledger
        assert len(run.trainer.batches) == 4
        assert set(ledger.dropped) <= {"environment_error", "run_ended"}
        dropped = ledger.dropped["environment_error"]
        assert [line.partition(" ")[0] for line in told] == ["1", "10", "100"][: len(str(dropped)) if dropped else 0]
        command = f"`agentrl episode list {run.config.name} --where 'drop_reason = environment_error'`"
        assert all(command in line for line in told)
        assert all(f"Last failure: OSError: the game server is gone at {__file__}:" in line for line in told)
        return ledger.dropped["environment_error"]

    assert sum(simulated_loop.run(main)) > 0


class Verbose(Guess):
    """Raises in most episodes, with an output of several lines."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.rng.random() < 0.6:
            raise OSError(f"no answer on port {ctx.rng.randrange(1 << 16)}\nits log\nhas more lines")
        await super().run(ctx)


def test_the_output_of_a_failure_is_told_once(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        told: list[str] = []

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.dispatcher.tell = told.append

        await SmallRun(environment=Verbose, during=listen).run()
        assert all("no answer on port" in line for line in told)
        assert ["its log" in line for line in told] == [True, False, False][: len(told)]
        return len(told)

    assert max(simulated_loop.run(main)) > 1


class Hanging(Guess):
    """Never returns in some episodes."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.rng.random() < 0.2:
            await asyncio.get_running_loop().create_future()
        await super().run(ctx)


def test_hanging_environments_time_out(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = SmallRun(environment=Hanging, config=config_for(episode_timeout_s=30.0))
        await run.run()
        assert len(run.trainer.batches) == 4
        return run.orchestrator.buffer.ledger.dropped["episode_timeout"]

    assert sum(simulated_loop.run(main)) > 0


class Broken(agentrl.Environment):
    """Rewards with something that is no number."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("hello"))
        ctx.agent("guesser").reward("one")  # type: ignore[arg-type]


def test_a_run_that_only_fails_says_so_at_once_and_ends_with_the_reason(simulated_loop: SeededSimulation) -> None:
    place = f"{__file__}:{Broken.run.__code__.co_firstlineno + 2} in run, calling reward()"

    async def main() -> None:
        told: list[str] = []

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.dispatcher.tell = told.append

        run = SmallRun(environment=Broken, during=listen)
        with pytest.raises(CheckFailedError, match=r"bad_reward.*'one' \(str\)") as ended:
            await run.run()
        assert told[0].startswith("1 episode dropped as bad_reward: return a finite number from `reward`")
        assert place in told[0]
        assert place in str(ended.value)
        assert len(told) == 2, "the tenth is the next"
        dropped = run.orchestrator.buffer.ledger.dropped["bad_reward"]
        assert FAILED_IN_A_ROW <= dropped <= 2 * FAILED_IN_A_ROW
        assert str(ended.value).count("agentrl episode show") <= 1
        assert not any(" list  " in line for line in told), "a run without a name has no command"

    simulated_loop.run(main)


class PartlyBroken(Guess):
    """Fails at once on broken tasks; its first calls may fail on all."""

    failing_calls: ClassVar[int] = 0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        PartlyBroken.failing_calls -= 1
        if ctx.task.data.get("broken") or PartlyBroken.failing_calls >= 0:
            raise KeyError("answer")
        await super().run(ctx)


@pytest.mark.parametrize(("share", "max_in_flight"), [(10, 256), (5, 128), (4, 32)])
def test_broken_tasks_that_fail_at_once_do_not_end_the_run_of_the_others(
    simulated_loop: SeededSimulation, share: int, max_in_flight: int
) -> None:
    tasks = [
        Task(id=f"t{number}", data={"digit": str(number % 10), "broken": number % share == 0}) for number in range(200)
    ]
    config = config_for(credit={"group_size": 8}, step_size=32, max_staleness=4, max_in_flight=max_in_flight, steps=3)

    async def main() -> None:
        run = SmallRun(environment=PartlyBroken, tasks=tasks, config=config)
        await run.run()
        assert run.orchestrator.buffer.ledger.dropped["environment_error"] >= 8

    simulated_loop.run(main)


def test_a_service_that_starts_late_ends_no_run(
    simulated_loop: SeededSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(PartlyBroken, "failing_calls", 40)
        run = SmallRun(environment=PartlyBroken)
        await run.run()
        assert run.orchestrator.buffer.ledger.dropped["environment_error"] >= 8

    simulated_loop.run(main)


class Slow(Guess):
    """Takes minutes."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.sleep(300.0)
        await super().run(ctx)


def test_stopping_leaves_nothing_half_trained(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        def stop_soon(orchestrator: object) -> None:
            asyncio.get_running_loop().call_later(4.0, run.orchestrator.stop)

        run = SmallRun(config=config_for(steps=100))
        run.during = stop_soon
        outcome = await run.run()
        assert outcome.interrupted
        assert 0 < len(run.trainer.batches) < 100
        consumed = run.orchestrator.buffer.ledger.units_consumed["guesser"]
        assert consumed == sum(len(batch.units) for batch in run.trainer.batches)

    simulated_loop.run(main)


def test_stopping_does_not_wait_for_long_episodes(simulated_loop: SeededSimulation) -> None:
    async def main() -> float:
        def stop_soon(orchestrator: object) -> None:
            asyncio.get_running_loop().call_later(4.0, run.orchestrator.stop)

        run = SmallRun(environment=Slow)
        run.during = stop_soon
        await run.run()
        assert run.orchestrator.buffer.ledger.in_flight > 0, "unfinished episodes stay admitted, to be resumed"
        return asyncio.get_running_loop().time()

    assert all(seconds < 10 for seconds in simulated_loop.run(main))


def test_a_full_disk_ends_the_run(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(journal=MemoryJournal(failing_commits={11}))
        with pytest.raises(StorageError):
            await run.run()

    simulated_loop.run(main)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_nonfinite_step_is_skipped_and_its_units_are_dropped(
    simulated_loop: SeededSimulation, max_staleness: int
) -> None:
    async def main() -> None:
        failures: dict[tuple[str, int], AgentRLError] = {("guesser", 2): NonFiniteError("the loss is nan")}
        config = config_for(max_staleness=max_staleness)
        run = SmallRun(config=config, trainer_options={"step_seconds": 0.5, "failures": failures})
        await run.run()
        ledger = run.orchestrator.buffer.ledger
        assert [batch.step_id for batch in run.trainer.batches] == [1, 2, 3, 4]
        assert ledger.dropped["nonfinite_gradient"] == ledger.units_dropped["guesser"] == 8

    simulated_loop.run(main)


def test_nonfinite_steps_in_a_row_end_the_run_and_each_is_told_with_its_number(
    simulated_loop: SeededSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: object, policy: str, step_id: int) -> StepReport:
        raise NonFiniteError("the loss is nan")

    async def main() -> None:
        told: list[str] = []

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.tell = told.append

        monkeypatch.setattr(RecordingTrainer, "optim_step", fail)
        with pytest.raises(NonFiniteError, match=r"^the loss is nan\. Skipped .* in a row: 3; 3 end the run$"):
            await SmallRun(during=listen).run()
        assert [line.partition("in a row: ")[2] for line in told] == ["1; 3 end the run", "2; 3 end the run"]

    simulated_loop.run(main)


def test_a_failure_between_assembly_and_start_ends_the_run(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(during=lambda orchestrator: orchestrator.stopping.fail(StorageError("the disk is full")))
        with pytest.raises(StorageError, match="the disk is full"):
            await run.run()

    simulated_loop.run(main, seeds=1)


def test_evaluation_is_pinned_and_does_not_hold_up_training(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(steps=4, evaluation={"tasks": 6, "every": 2})
        run = SmallRun(config=config, held_out=TASKS[:6])
        await run.run()
        assert run.seen.evaluated.count(0) == 1
        scores = run.seen.scores()
        assert len(scores) == 3
        assert scores[1:] == scores[:1] * 2, "the script knows no weights, only seeds"
        trained = {unit.episode_id for batch in run.trainer.batches for unit in batch.units}
        assert not [episode_id for episode_id in trained if episode_id.startswith("v")]

    simulated_loop.run(main)


def test_an_evaluation_runs_no_more_episodes_at_once_than_max_in_flight(simulated_loop: SeededSimulation) -> None:
    class Counting(Guess):
        running: ClassVar[Counter[bool]] = Counter()
        most: ClassVar[Counter[bool]] = Counter()

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            is_held_out = ctx.task.id.startswith("held-out")
            self.running[is_held_out] += 1
            self.most[is_held_out] = max(self.most[is_held_out], self.running[is_held_out])
            await super().run(ctx)
            self.running[is_held_out] -= 1

    async def main() -> None:
        Counting.running.clear()
        held_out = [replace(task, id=f"held-out-{task.id}") for task in TASKS]
        config = config_for(steps=2, step_size=4, max_in_flight=4, evaluation={"tasks": len(held_out)})
        run = SmallRun(config=config, environment=Counting, held_out=held_out)
        await run.run()
        assert [each["guesser"]["evaluation/episodes"] for each in run.seen.evaluations] == [len(held_out)] * 2
        assert Counting.most == {True: 4, False: 4}

    simulated_loop.run(main)


@pytest.mark.parametrize(("step_size", "group_size", "max_staleness"), [(8, 4, 0), (10, 3, 1), (3, 4, 1), (5, 4, 1)])
def test_no_ratio_of_step_to_group_deadlocks(
    simulated_loop: SeededSimulation, step_size: int, group_size: int, max_staleness: int
) -> None:
    async def main() -> None:
        config = config_for(step_size=step_size, max_staleness=max_staleness, credit={"group_size": group_size})
        run = SmallRun(config=config)
        await run.run()
        assert len(run.trainer.batches) == 4

    simulated_loop.run(main)


def test_stopping_does_not_wait_for_an_evaluation(simulated_loop: SeededSimulation) -> None:
    async def main() -> float:
        run = SmallRun(environment=Slow, config=config_for(evaluation={"tasks": 4}), held_out=TASKS[:4])
        run.during = lambda orchestrator: asyncio.get_running_loop().call_later(1.0, orchestrator.stop)
        outcome = await run.run()
        assert outcome.interrupted
        return asyncio.get_running_loop().time()

    assert all(seconds < 10 for seconds in simulated_loop.run(main))


@pytest.mark.parametrize(("before", "within"), [((700, 10, 10), (50_000, 10, 10)), ((0, 5, 5), (0, 5, 5))])
def test_a_run_looks_for_cyclic_garbage_more_rarely_and_only_a_run(
    simulated_loop: SeededSimulation, before: tuple[int, int, int], within: tuple[int, int, int]
) -> None:
    class Looking(Guess):
        seen: ClassVar[set[tuple[int, int, int]]] = set()

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            self.seen.add(gc.get_threshold())
            await super().run(ctx)

    async def main() -> None:
        await SmallRun(config=config_for(steps=1), environment=Looking).run()

    outside = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        simulated_loop.run(main)
        assert gc.get_threshold() == before
        assert Looking.seen == {within}
    finally:
        gc.set_threshold(*outside)


def test_a_constant_normalizer_is_the_same_at_each_step(simulated_loop: SeededSimulation) -> None:
    """Steps of whole groups take more units than `step_size`."""

    async def main() -> None:
        changes = {"credit": {"group_size": 8, "advantage": "gdpo"}, "trainer": {"loss": {"normalizer": 64}}}
        run = SmallRun(config=config_for(step_size=12, steps=2, **changes), compares_in_step=True)
        await run.run()
        assert [(len(batch.units), batch.normalizer) for batch in run.trainer.batches] == [(16, 12 * 64)] * 2

    simulated_loop.run(main)
