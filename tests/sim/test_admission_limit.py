"""`max_in_flight = "auto"` in whole runs: as fast as the best number, also when contexts grow, with its decisions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.holds import InFlightLimit
from agentrl.journal.port import Admission
from agentrl.orchestrator.loop import Orchestrator
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_bottleneck import LimitedEngine, SlowTools
from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, simulate_run

pytestmark = pytest.mark.sim


def simulated(
    max_in_flight: Any, *, kv_tokens: int, turns: int = 4, jump: tuple[int, float] | None = None, reserves: bool = True
) -> Any:
    """The result of a run of conversations with slow tools, and the limits after each change."""
    plan = SimulationPlan.model_validate(
        {
            "max_in_flight": max_in_flight,
            "jump": jump,
            "environments": {
                "Solve": {
                    "seats": {
                        "solver": {
                            "tokens": {"p50": 100 * turns, "p90": 200 * turns, "cap": 400 * turns},
                            "turns": {"p50": turns, "p90": turns, "cap": turns},
                        }
                    },
                    "prompt": 200,
                    "tool_seconds": {"p50": 10, "p90": 20, "cap": 100},
                    "tool_tokens": 100,
                }
            },
            "policies": {"policy": {"step_size": 16, "max_staleness": 8}},
            "credit": {"group_size": 4},
            "engine": {"slots": 4, "rates": {1: 40.0}, "kv_tokens": kv_tokens, "prefill_rate": 500.0},
            "trainer": {"step_seconds": 1.0},
        }
    )
    limits: list[int] = []

    def watch(orchestrator: Orchestrator) -> None:
        orchestrator.limit_workers = limits.append

    result = simulate_run(Scenario(plan=plan, steps=24, skipped=12, alter=watch, reserves=reserves))
    return result, limits


def test_it_admits_as_many_as_keep_the_engine_busy() -> None:
    """Turns of 2.5 s, tools of 10: four places need about twenty episodes."""
    result, limits = simulated("auto", kv_tokens=1_000_000)
    assert max(limits) > 3 * 4
    assert result.tokens_per_s > 0.9 * simulated(32, kv_tokens=1_000_000)[0].tokens_per_s


@pytest.mark.exhaustive
def test_contexts_that_grow_tenfold_do_not_evict_each_other() -> None:
    grown = partial(simulated, kv_tokens=60_000, turns=10, jump=(48, 10.0))
    (result, _), (fixed, _), (thrashing, _) = grown("auto"), grown(32), grown(32, reserves=False)
    assert result.preemptions == 0
    assert result.tokens_per_s > fixed.tokens_per_s
    assert result.tokens_per_s > 1.25 * thrashing.tokens_per_s


def test_each_decision_is_in_the_journal_and_the_limit_is_a_metric(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(
            config=config_for(max_in_flight="auto", max_staleness=8, steps=6),
            environment=SlowTools,
            engine_class=LimitedEngine,
            engine_options={"places": 4, "seconds_per_call": 1.0},
        )
        await run.run()
        waits = [wait for admission in run.journal.of_kind(Admission) for wait in admission.spec.waited]
        holds = [wait.hold for wait in waits if wait.hold.kind == "max_in_flight"]
        assert InFlightLimit("first", {"places": 4}) in [hold.limit for hold in holds]
        assert "raised" in [hold.limit.kind for hold in holds]
        limits = [metrics["episodes/limit"] for _, _, metrics in run.seen.steps]
        assert limits[-1] > 4

    simulated_loop.run(main)


def test_a_run_without_an_engine_of_its_own_is_refused(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(max_in_flight="auto"))  # its engine does not say what it samples at once
        with pytest.raises(ConfigError, match='max_in_flight = "auto" needs an engine'):
            await run.run()

    simulated_loop.run(main)
