"""The emulated engine against arithmetic, and whole simulated runs: nothing is wasted, dropped, or left out."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Literal, TypeVar

import numpy as np
import pytest

from agentrl.core.errors import EngineError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion, VersionSpan, WeightsRef
from agentrl.core.tokens import Completion
from agentrl.testing.virtual_time import simulate
from tests.simulation.engine import EmulatedEngine
from tests.simulation.plan import QuantileDistribution, SimulationPlan
from tests.simulation.run import Scenario, SimulationResult, simulate_run
from tests.simulation.simulated_environments import SimulatedTasks, requested_turn_length

pytestmark = pytest.mark.sim

T = TypeVar("T")
VERSIONS = {"solver": PolicyVersion("solver", 0, 0)}


def request(name: str, length: int, context: int = 1, priority: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        token_ids=np.array([0] * (context - 1) + [length], np.int32),
        sampling=SamplingParams(max_tokens=10_000),
        seed=0,
        priority=priority,
    )


def engine(**settings: object) -> EmulatedEngine:
    """An engine whose calls reserve nothing, so that it must deal with what outgrows its memory by itself."""
    values = {"slots": 2, "rate": lambda count: 10.0 / count, "reserves": False, **settings}
    return EmulatedEngine(requested_turn_length, versions=VERSIONS, **values)  # type: ignore[arg-type]


async def timed(call: Coroutine[None, None, T]) -> tuple[T, float]:
    return await call, asyncio.get_running_loop().time()


def test_calls_share_the_engine_and_the_third_waits() -> None:
    async def main() -> list[float]:
        served = engine()
        sessions = [served.open(f"e{n}", "solver") for n in range(3)]
        calls = [sessions[n].generate(request(f"r{n}", length, priority=n)) for n, length in enumerate((10, 20, 5))]
        ended = await asyncio.gather(*map(timed, calls))
        assert [len(completion.token_ids) for completion, _ in ended] == [10, 20, 5]
        assert served.sampled == pytest.approx(35)
        assert served.slot_seconds == pytest.approx(2 * 3.0 + 0.5)
        return [at for _, at in ended]

    # 10 tokens beside 20: at 5/s each until 2 s; then 5 beside the 10 that are left until 3 s; then 5 alone
    assert simulate(main, seed=0) == pytest.approx([2.0, 3.5, 3.0])


def test_lower_priority_is_served_first() -> None:
    async def main() -> list[str]:
        served = engine(slots=1)
        order: list[str] = []

        async def call(name: str, priority: int) -> None:
            await served.open(name, "solver").generate(request(name, 10, priority=priority))
            order.append(name)

        await asyncio.gather(call("third", 9), call("second", 3), call("first", 1))
        return order

    assert simulate(main, seed=0) == ["first", "second", "third"]


def test_tokens_are_of_the_weights_that_were_current() -> None:
    async def main() -> Completion:
        served = engine(slots=1)
        call = asyncio.ensure_future(served.open("e0", "solver").generate(request("r", 20)))
        await asyncio.sleep(0.55)
        newer = PolicyVersion("solver", 0, 1)
        await served.serve([WeightsRef(version=newer, path="", kind="full", sha256="")])
        return await call

    old, new = VERSIONS["solver"], PolicyVersion("solver", 0, 1)
    assert simulate(main, seed=0).spans == (VersionSpan(0, 5, old), VersionSpan(5, 20, new))


def test_what_outgrows_the_memory_waits_and_is_computed_again() -> None:
    async def main() -> tuple[int, list[int], float]:
        served = engine(kv_tokens=300, max_context=300, rate=lambda count: 10.0, prefill_rate=1000.0)
        calls = [served.open(f"e{n}", "solver").generate(request(f"r{n}", 150, context=100)) for n in range(2)]
        ended = await asyncio.gather(*map(timed, calls))
        return served.preemptions, [len(completion.token_ids) for completion, _ in ended], ended[-1][1]

    preemptions, lengths, last = simulate(main, seed=0)
    assert preemptions == 1
    assert lengths == [150, 150]
    # the first runs 15 s; the second was cut when both had about 50, and has 100 more to say after that
    assert last == pytest.approx(15.1 + 10.0 + 0.15, abs=0.3)


def test_what_outgrows_the_memory_alone_goes_on() -> None:
    async def main() -> list[float]:
        served = engine(kv_tokens=120, rate=lambda count: 10.0, prefill_rate=1000.0)
        calls = [served.open(f"e{n}", "solver").generate(request(f"r{n}", 150, context=100)) for n in range(2)]
        return [at for _, at in await asyncio.gather(*map(timed, calls))]

    # one after the other: there is no room for a second beside either
    assert simulate(main, seed=0, max_steps=200) == pytest.approx([15.1, 30.2])


def test_time_goes_on_however_late_it_is() -> None:
    """A token takes less than what the clock can tell from nothing."""

    async def main() -> int:
        await asyncio.sleep(1e12)
        served = engine(rate=lambda count: 1e6)
        return len((await served.open("e", "solver").generate(request("r", 10))).token_ids)

    assert simulate(main, seed=0, max_steps=200) == 10


@pytest.mark.parametrize("kv_tokens", [340, 345, 352, 400, 700])
def test_a_memory_of_about_one_conversation_is_slow_and_no_more(kv_tokens: int) -> None:
    """Turns are counted as a block at least, so the longest conversation has more blocks than it has room for."""
    seat = {"tokens": {"p50": 240, "p90": 240, "cap": 240}, "turns": {"p50": 1, "p90": 12, "cap": 40}}
    settings = {"slots": 8, "rates": {1: 60.0}, "prefill_rate": 5000.0, "kv_tokens": kv_tokens}
    environments = {"Alone": {"seats": {"solver": seat}, "prompt": 100}}
    plan = small("group", environments=environments, engine=settings, policies={"solver": {"step_size": 16}})
    found = measured(plan, steps=4)
    assert found.waste == 0.0
    assert found.no_room > 0.5


# --- contexts: 100 tokens of them are computed a second; each call samples 10, whoever runs beside it ---

COMPUTING = {"slots": 4, "rate": lambda count: 10.0, "prefill_rate": 100.0}


def test_while_contexts_are_computed_nobody_advances() -> None:
    async def main() -> list[float]:
        served = engine(**COMPUTING)

        async def later(name: str, length: int, context: int, seconds: float) -> float:
            await asyncio.sleep(seconds)
            return (await timed(served.open(name, "solver").generate(request(name, length, context))))[1]

        ends = await asyncio.gather(later("a", 10, 1, 0.0), later("b", 8, 100, 0.5), later("c", 20, 50, 0.9))
        assert served.sampled == pytest.approx(38)
        assert served.busy_seconds() == pytest.approx(4.0)
        assert served.slot_seconds == pytest.approx(2.51 + 2.3 + 3.1)
        assert served.full_seconds == pytest.approx(1.51 + (0.49 * 1 + 0.51 * 3 + 0.29 * 2 + 1.2 * 1) / 4)
        return ends

    # a says 4.9 until 0.5 s; then contexts are computed until 1.5 s, and c's until 2 s; then all three go on
    assert simulate(main, seed=0) == pytest.approx([2.51, 2.8, 4.0])


def test_contexts_of_a_burst_are_computed_one_after_another() -> None:
    async def main() -> list[float]:
        served = engine(**COMPUTING)
        calls = [served.open(f"e{n}", "solver").generate(request(f"r{n}", 10, context=100 + n)) for n in range(4)]
        return [at for _, at in await asyncio.gather(*map(timed, calls))]

    assert simulate(main, seed=0) == pytest.approx([5.06] * 4)


def test_of_a_context_that_is_kept_only_what_is_new_is_computed() -> None:
    async def main() -> list[float]:
        session = engine(**COMPUTING).open("e", "solver")
        first = (await timed(session.generate(request("first", 10, context=100))))[1]
        return [first, (await timed(session.generate(request("second", 10, context=150))))[1]]

    assert simulate(main, seed=0) == pytest.approx([1 + 1, 2 + 0.4 + 1])


@pytest.mark.parametrize(("at", "last", "again"), [(0.5, 3.0, 3.0), (1.5, 3.5, 2.5), (3.9, 5.9, 0.1)])
def test_the_rest_of_the_context_of_an_aborted_call_is_not_computed(at: float, last: float, again: float) -> None:
    """Three contexts of 1, 3 and 1 s; the second is not wanted any more after some time. What is there of it stays."""

    async def main() -> list[float]:
        served = engine(**COMPUTING)
        sessions = [served.open(f"e{n}", "solver") for n in range(3)]
        calls = [
            asyncio.ensure_future(timed(session.generate(request(f"r{n}", 10, context, priority=n))))
            for n, (session, context) in enumerate(zip(sessions, (100, 300, 100), strict=True))
        ]
        await asyncio.sleep(at)
        served.abort("r1")
        ended = await asyncio.gather(*calls)
        assert [len(completion.token_ids) for completion, _ in ended] == [10, 0, 10]
        once_more = await timed(sessions[1].generate(request("r3", 10, context=300)))
        return [ended[0][1], ended[2][1], once_more[1] - ended[2][1] - 1.0]

    assert simulate(main, seed=0) == pytest.approx([last, last, again])


def test_it_says_what_it_holds_and_how_fast_it_computes() -> None:
    assert engine().capabilities.kv_tokens is None
    told = engine(kv_tokens=300, prefill_rate=100.0).capabilities
    assert (told.kv_tokens, told.prefill_rate) == (300, 100.0)


def test_a_context_that_outgrows_the_memory_alone_is_refused() -> None:
    with pytest.raises(EngineError, match="KV cache"):
        engine(kv_tokens=100, max_context=300)


def small(release: str, **changes: object) -> SimulationPlan:
    tail = {"p50": 32, "p90": 160, "cap": 1280}
    return SimulationPlan.model_validate(
        {
            "environments": {
                "Propose": {"seats": {"proposer": {"tokens": tail}}, "fan_out": {"Solve": 8}},
                "Solve": {"seats": {"solver": {"tokens": tail}}},
            },
            "policies": {"solver": {"step_size": 64}, "proposer": {"kind": "frozen"}},
            "credit": {"group_size": 4, "release": release},
            "engine": {"slots": 16, "rates": {1: 32.0}},
            "trainer": {"step_seconds": 2.0},
            **changes,
        }
    )


def measured(plan: SimulationPlan, steps: int = 10) -> SimulationResult:
    return simulate_run(Scenario(plan=plan, steps=steps, skipped=3))


@pytest.mark.parametrize("release", ["group", "late", "episode"])
def test_a_run_is_the_same_again_and_wastes_nothing(release: str) -> None:
    first, again = measured(small(release)), measured(small(release))
    assert dataclasses.replace(first, cpu_seconds=0.0) == dataclasses.replace(again, cpu_seconds=0.0)
    assert first.waste == 0.0
    assert 0.3 < first.steps_per_bound < 1.2


def test_late_credit_keeps_the_engine_busier_than_whole_groups() -> None:
    """One wave of work in flight: whoever waits for the slowest of eight runs dry."""
    settings = {"engine": {"slots": 64, "rates": {1: 32.0}}, "trainer": {"step_seconds": 0.5}}
    late, group = (measured(small(release, **settings)) for release in ("late", "group"))
    assert late.engine_busy > 1.1 * group.engine_busy


def test_no_schedule_beats_the_bound_of_a_closed_run() -> None:
    closed = simulate_run(Scenario(plan=small("late"), is_closed=True, steps=6, skipped=3))
    assert 1.0 <= closed.makespan_over_bound < 2.0


@pytest.mark.parametrize("law", ["lognormal", "pareto"])
def test_lengths_have_the_tail_that_was_asked_for(law: Literal["lognormal", "pareto"]) -> None:
    tail = QuantileDistribution(p50=32, p90=160, cap=1280, law=law)
    assert [tail.value(z) for z in (0.0, 1.2815515655)] == pytest.approx([32, 160], rel=1e-4)
    assert tail.value(8.0) == pytest.approx(1280, rel=1e-3)


def test_tasks_differ_and_are_the_same_again() -> None:
    tasks, again = SimulatedTasks(0), SimulatedTasks(0)
    assert tasks[3] == again[3]
    assert tasks[3].data != tasks[4].data


def test_what_is_measured_adds_up_with_arithmetic() -> None:
    """Equal jobs of 100 tokens, two slots of 10 tokens a second, no tail: a step of 8 takes the engine 40 s."""
    same = {"p50": 100, "p90": 100, "cap": 100}
    plan = SimulationPlan.model_validate(
        {
            "environments": {"Same": {"seats": {"agent": {"tokens": same}}, "prompt": 20}},
            "policies": {"policy": {"step_size": 8}},
            "credit": {"group_size": 2},
            "engine": {"slots": 2, "rates": {1: 10.0}, "kv_tokens": 1000},
            "trainer": {"step_seconds": 10.0},
        }
    )
    found = measured(plan)
    assert found.engine_busy == pytest.approx(1.0)
    assert found.trainer_busy == pytest.approx(0.25, abs=0.01)
    assert found.steps_per_hour["policy"] == pytest.approx(90, rel=0.01)
    assert found.steps_per_bound == pytest.approx(1.0, rel=0.01)
    assert sum(found.timeline.committed) == pytest.approx(7 * 8, abs=2)


def test_replicas_share_the_work() -> None:
    one = measured(small("late"))
    two = measured(small("late", engine={"slots": 16, "rates": {1: 32.0}, "replicas": 2}))
    assert 1.5 < two.tokens_per_s / one.tokens_per_s < 2.1


def test_turns_tools_and_several_policies_take_their_time() -> None:
    tail = {"p50": 40, "p90": 80, "cap": 200}
    plan = SimulationPlan.model_validate(
        {
            "environments": {
                "Debate": {
                    "seats": {
                        "left": {"tokens": tail, "turns": {"p50": 4, "p90": 4, "cap": 4}},
                        "right": {"tokens": tail},
                    },
                    "tool_seconds": {"p50": 50, "p90": 50, "cap": 50},
                    "tool_tokens": 30,
                }
            },
            "policies": {"left": {"step_size": 16}, "right": {"step_size": 32}},
            "engine": {"slots": 64, "rates": {1: 100.0}},
            "trainer": {"step_seconds": 1.0},
        }
    )
    found = measured(plan)
    assert found.episode_seconds["Debate"][0] > 150, "three tools of 50 s"
    assert found.steps_per_hour["left"] == pytest.approx(2 * found.steps_per_hour["right"], rel=0.3)
