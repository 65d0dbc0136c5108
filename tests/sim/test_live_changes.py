"""Settings that change while the loop runs take effect at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.app.assemble import change_orchestrator
from agentrl.app.plan import resolve
from agentrl.config.load import changed_config, live_settings
from agentrl.core.ports import Trainer
from agentrl.orchestrator.checkpoints import CheckpointWriter
from agentrl.orchestrator.loop import DRAIN_S, Orchestrator
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, Seen, SmallRun, config_for
from tests.sim.test_bottleneck import LimitedEngine, SlowTools
from tests.sim.test_several_policies import Duel, policies, steps_of

pytestmark = pytest.mark.sim


@dataclass(kw_only=True)
class ChangedRun(SmallRun):
    """A run with changes at steps of its policies."""

    changes: Mapping[tuple[str, int], Mapping[str, Any]]
    """Settings that change right after a step, keyed by policy and step."""

    def __post_init__(self) -> None:
        self.seen = ChangingObserver(self)


class ChangingObserver(Seen):
    def __init__(self, run: ChangedRun) -> None:
        super().__init__()
        self._run = run

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        super().on_step(policy, step, dict(metrics))
        # after the loop has passed the step's own conditions
        asyncio.get_running_loop().call_later(0.01, self._change, self._run.changes.get((policy, step), {}))

    def _change(self, changes: Mapping[str, Any]) -> None:
        run = self._run
        for key, value in changes.items():
            run.config, differences = changed_config(run.config, tuple(key.split(".")), value)
            assert [difference.rule.is_live for difference in differences] == [True]
            change_orchestrator(run.orchestrator, resolve(run.config, run.environment))


def of_loop(orchestrator: Orchestrator) -> str:
    """What the loop goes by."""
    scheduler = orchestrator.scheduler
    numbers = {name: value for name, value in vars(scheduler).items() if isinstance(value, int)}
    return repr((orchestrator.plan, numbers, scheduler.phases.steps))


@pytest.mark.parametrize("setting", live_settings())
def test_each_setting_reaches_the_loop(simulated_loop: SeededSimulation, setting: str) -> None:
    seen = []

    async def main() -> None:
        run = ChangedRun(config=config_for(steps=2), changes={("guesser", 1): {setting: 17}})
        run.during = lambda orchestrator: seen.append(of_loop(orchestrator))
        async with asyncio.timeout(10_000):
            await run.run()
        seen.append(of_loop(run.orchestrator))

    simulated_loop.run(main)
    assert seen[0] != seen[1]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("steps", "last"), [(7, 7), (3, 3), (1, 2)])
def test_the_last_step_moves(simulated_loop: SeededSimulation, steps: int, last: int, *, deterministic: bool) -> None:
    async def main() -> None:
        config = config_for(steps=4, max_staleness=0, deterministic=deterministic)
        run = ChangedRun(config=config, changes={("guesser", 2): {"steps": steps}})
        async with asyncio.timeout(10_000):
            await run.run()
        assert [step for _, step, _ in run.seen.steps] == list(range(1, last + 1))

    simulated_loop.run(main)


def test_a_policy_that_had_taken_its_last_step_takes_more(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        config = config_for(steps={"asker": 2, "guesser": 6}, policies=policies(asker=8, guesser=8))
        changes = {("guesser", 4): {"steps.asker": 5}, ("asker", 4): {"steps.guesser": 5}}
        run = ChangedRun(config=config, environment=Duel, changes=changes)
        async with asyncio.timeout(10_000):
            await run.run()
        assert steps_of(run)["asker"] == 5
        assert steps_of(run)["guesser"] in (5, 6)

    simulated_loop.run(main)


def test_the_number_of_episodes_is_adjusted_from_now_on_and_set_again(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        changes = {
            ("guesser", 1): {"max_in_flight": "auto"},
            ("guesser", 5): {"steps": 8},
            ("guesser", 6): {"max_in_flight": 12},
        }
        run = ChangedRun(
            config=config_for(max_in_flight=8, max_staleness=8, steps=10),
            environment=SlowTools,
            engine_class=LimitedEngine,
            engine_options={"places": 4, "seconds_per_call": 1.0},
            changes=changes,
        )
        async with asyncio.timeout(10_000):
            await run.run()
        limits = [metrics.get("episodes/limit") for _, _, metrics in run.seen.steps]
        assert len(limits) == 8
        assert limits[0] is None
        assert limits[1] == 4
        assert min(limits[4], limits[5]) > 8, "another change leaves the limit where it is"
        assert limits[6:] == [None, None]

    simulated_loop.run(main)


def test_checkpoints_and_evaluations_take_another_interval(
    simulated_loop: SeededSimulation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def write(self: CheckpointWriter, trainer: Trainer, versions: Mapping[str, Any], *others: object) -> None:
        del trainer, others
        written.append(versions["guesser"].step)

    written: list[int] = []

    async def main() -> None:
        written.clear()
        config = config_for(
            steps=9, max_staleness=0, checkpoint={"every": 0}, evaluation={"every": 0, "tasks": len(TASKS)}
        )
        changes = {
            ("guesser", 2): {"checkpoint.every": 2, "evaluation.every": 3},
            ("guesser", 6): {"checkpoint.every": 0, "evaluation.every": 4},
        }
        run = ChangedRun(config=config, held_out=list(TASKS), changes=changes)
        monkeypatch.setattr(CheckpointWriter, "write", write)
        run.during = lambda orchestrator: setattr(orchestrator, "checkpoints", CheckpointWriter(tmp_path))
        async with asyncio.timeout(10_000):
            await run.run()
        assert written == [4, 6, 9], "the last is the one at the end"
        assert run.seen.evaluated == [0, 3, 6, 8, 9]

    simulated_loop.run(main)


def test_a_paused_run_stops_without_waiting_for_its_episodes(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run, loop = SmallRun(), asyncio.get_running_loop()
        stopped_at = 0.0

        def stop() -> None:
            nonlocal stopped_at
            stopped_at = loop.time()
            run.orchestrator.stop()

        def during(orchestrator: Orchestrator) -> None:
            loop.call_later(1.0, orchestrator.pause, "me")
            loop.call_later(20.0, stop)

        run.during = during
        await run.run()
        assert loop.time() - stopped_at < DRAIN_S / 2

    simulated_loop.run(main)


def test_the_phase_tells_of_a_pause_and_a_drain(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run, loop, phases = SmallRun(), asyncio.get_running_loop(), list[str]()

        def during(orchestrator: Orchestrator) -> None:
            def look(act: Callable[[], object]) -> None:
                act()
                phases.append(orchestrator.status().phase)

            acts = (partial(orchestrator.pause, "me"), orchestrator.unpause, partial(orchestrator.drain, "me"))
            for seconds, act in enumerate(acts, 1):
                loop.call_later(seconds / 10, look, act)

        run.during = during
        await run.run()
        assert phases == ["paused", "training", "draining"]

    simulated_loop.run(main)
