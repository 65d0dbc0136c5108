"""The simulated loop itself: what is determined by a seed, and what it finds."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agentrl.core.clock import LoopClock
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import DeadlockError, SimulationError, StepLimitError, simulate

pytestmark = pytest.mark.sim


async def busy_market() -> tuple[tuple[int, int, float], ...]:
    """Producers and consumers over a small queue, with sleeps, a timeout and a cancellation: many interleavings."""
    queue: asyncio.Queue[tuple[int, int]] = asyncio.Queue(2)
    sold: list[tuple[int, int, float]] = []
    loop = asyncio.get_running_loop()

    async def produce(number: int) -> None:
        for item in range(3):
            await queue.put((number, item))
            await asyncio.sleep(0.25 * number)

    async def consume() -> None:
        while True:
            number, item = await queue.get()
            sold.append((number, item, loop.time()))
            queue.task_done()

    async with asyncio.TaskGroup() as group:
        consumers = [group.create_task(consume()) for _ in range(2)]
        producers = [group.create_task(produce(number)) for number in range(4)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.Event().wait()
        await asyncio.wait(producers)
        await queue.join()
        for consumer in consumers:
            consumer.cancel()
    return tuple(sold)


def test_a_seed_determines_the_run_and_seeds_differ() -> None:
    runs = [simulate(busy_market, seed=seed) for seed in range(100)]

    assert runs == [simulate(busy_market, seed=seed) for seed in range(100)]
    assert len(set(runs)) > 50
    assert all(len(run) == 12 for run in runs)


class PausableEngine:
    """A planted race: `update` checks that nothing generates, waits, then acts on the stale answer."""

    def __init__(self) -> None:
        self.generating = 0
        self.torn = False

    async def generate(self) -> None:
        self.generating += 1
        await asyncio.sleep(0)
        self.generating -= 1

    async def update(self) -> None:
        while self.generating:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.torn = self.torn or self.generating > 0


async def race() -> bool:
    engine = PausableEngine()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.update())
        for _ in range(2):
            group.create_task(engine.generate())
    return engine.torn


def test_a_check_then_act_race_is_found_by_some_seeds_and_always_by_the_same() -> None:
    torn = [seed for seed in range(200) if simulate(race, seed=seed)]

    assert 0 < len(torn) < 200
    assert torn == [seed for seed in range(200) if simulate(race, seed=seed)]


def test_the_schedule_of_a_seed_is_the_same_in_every_process_and_python_version() -> None:
    assert [seed for seed in range(40) if simulate(race, seed=seed)] == [0, 3, 6, 12, 16, 21, 23, 33]


async def crossed_locks() -> None:
    left, right = asyncio.Lock(), asyncio.Lock()

    async def take_both(first: asyncio.Lock, second: asyncio.Lock) -> None:
        async with first:
            await asyncio.sleep(1)
            async with second:
                pass

    async with asyncio.TaskGroup() as group:
        group.create_task(take_both(left, right), name="lefty")
        group.create_task(take_both(right, left), name="righty")


def test_a_deadlock_names_who_waits_and_where() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(crossed_locks, seed=0)

    lines = str(caught.value).splitlines()
    assert lines[0] == "no task can run and no timer is set at t=1; waiting:"
    assert any("lefty" in line and "take_both (sim/test_sim_loop.py:" in line for line in lines)
    assert any("righty" in line and "in asyncio Lock.acquire" in line for line in lines)
    notes = "\n".join(caught.value.__notes__)
    assert "AGENTRL_SIM_SEED=0" in notes
    assert "t=1 righty at " in notes


def test_time_is_virtual_and_timeouts_fire_in_it() -> None:
    async def main() -> list[float]:
        clock = LoopClock()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(86_400):
                await clock.sleep(1e9)
        reached = [clock.monotonic()]
        assert await asyncio.wait_for(asyncio.sleep(5, "slept"), timeout=60) == "slept"
        return [*reached, clock.monotonic()]

    assert simulate(main, seed=3) == [86_400.0, 86_405.0]


def test_cancellation_reaches_every_child_before_the_group_ends() -> None:
    async def main() -> list[str]:
        ended: list[str] = []

        async def child(name: str) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(1)
                ended.append(name)

        async def parent() -> None:
            async with asyncio.TaskGroup() as group:
                for name in "abc":
                    group.create_task(child(name))

        async with asyncio.TaskGroup() as group:
            task = group.create_task(parent())
            await asyncio.sleep(10)
            task.cancel()
        assert task.cancelled()
        assert asyncio.get_running_loop().time() == 11.0
        return ended

    orders = [simulate(main, seed=seed) for seed in range(50)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_plain_callbacks_keep_their_order_and_are_not_overtaken_by_later_steps() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        seen: list[int] = []

        async def step() -> None:
            seen.append(3)

        loop.call_soon(seen.append, 0)
        loop.call_soon(seen.append, 1)
        loop.call_soon(seen.append, 2)
        async with asyncio.TaskGroup() as group:
            group.create_task(step())
        return seen

    assert all(simulate(main, seed=seed) == [0, 1, 2, 3] for seed in range(30))


def test_code_that_spins_ends_at_the_step_budget() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(StepLimitError, match="1000 steps taken by t=0"):
        simulate(main, seed=0, max_steps=1000)


def test_a_blocking_call_is_made_at_once_in_the_loops_thread() -> None:
    async def main() -> float:
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        with pytest.raises(ValueError, match="no number"):
            await asyncio.to_thread(int, "no number")
        return asyncio.get_running_loop().time()

    assert simulate(main, seed=0) == 0.0


def test_sockets_and_processes_are_refused_by_name() -> None:
    async def over_socket() -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    async def in_process() -> None:
        await asyncio.create_subprocess_exec("true")

    for main, name in (
        (over_socket, "create_connection"),
        (in_process, "subprocess_exec"),
    ):
        with pytest.raises(SimulationError, match=f"{name} under the simulated loop: .*fake"):
            simulate(main, seed=0)


def test_a_failing_callback_fails_the_simulation() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, int, "no number")
        await asyncio.sleep(2)

    with pytest.raises(ValueError, match="no number"):
        simulate(main, seed=0)


def test_the_failure_of_a_task_nobody_awaits_is_not_lost() -> None:
    async def fail() -> None:
        raise LookupError("forgotten")

    async def main() -> None:
        asyncio.get_running_loop().create_task(fail())
        await asyncio.sleep(1)
        await asyncio.sleep(1)

    with pytest.raises(LookupError, match="forgotten"):
        simulate(main, seed=0)


def test_the_fixture_runs_every_seed(simulated_loop: SeededSimulation) -> None:
    async def main() -> float:
        await asyncio.sleep(1)
        return asyncio.get_running_loop().time()

    results = simulated_loop.run(main, seeds=5)

    assert results == [1.0] * len(simulated_loop.seeds(5))


def test_the_environment_picks_the_seed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(
        """
        import asyncio

        def test_prints_its_seeds(simulated_loop):
            async def main():
                return asyncio.get_running_loop().seed
            print("seeds", simulated_loop.run(main, seeds=2))
        """
    )
    monkeypatch.setenv("AGENTRL_SIM_SEED", "138")
    pytester.runpytest_inprocess("-s").stdout.fnmatch_lines(["*seeds [[]138[]]*"])
    monkeypatch.delenv("AGENTRL_SIM_SEED")
    monkeypatch.setenv("AGENTRL_SIM_SEEDS", "3")
    monkeypatch.setenv("AGENTRL_SIM_FIRST", "70")
    pytester.runpytest_inprocess("-s").stdout.fnmatch_lines(["*seeds [[]70, 71, 72[]]*"])
    monkeypatch.setenv("AGENTRL_SIM_SEEDS", "many")
    assert pytester.runpytest_inprocess().ret != 0
