"""The gate of a worker: who waits, and in which order they go on."""

from __future__ import annotations

import asyncio

from agentrl.rollout.episode import Parking


class Attempt:
    """Knows its deadline and what it was told."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.told: list[str] = []

    def deadline(self) -> float:
        return self._deadline

    def suspend(self) -> None:
        self.told.append("suspend")

    def resume(self) -> None:
        self.told.append("resume")


def begun(parking: Parking, **deadlines: float) -> dict[str, Attempt]:
    attempts = {name: Attempt(deadline) for name, deadline in deadlines.items()}
    for name, attempt in attempts.items():
        parking.admit(name)
        parking.begin(name, attempt)
    return attempts


def test_episodes_go_on_in_deadline_order_and_their_calls_by_id() -> None:
    async def main() -> list[str]:
        parking, passed = Parking(), list[str]()
        begun(parking, e0=7, e1=3, e2=3, e3=float("inf"))

        async def call(episode_id: str, call_id: str) -> None:
            await parking.wait_while_parked(episode_id, call_id)
            passed.append(f"{episode_id} {call_id}")

        for episode_id in ("e0", "e3", "e2", "e1"):
            parking.park(episode_id)
        async with asyncio.TaskGroup() as group:
            for name in ("e3 r#0", "e2 r/1.1#0", "e2 r/1.0#0", "e0 r#0", "e1 r#4"):
                group.create_task(call(*name.split()))
            await asyncio.sleep(0)
            assert passed == []
            assert parking.parked == ("e1", "e2", "e0", "e3")
            assert parking.unpark() == ("e1",)
            assert parking.unpark(2) == ("e2", "e0")
            await asyncio.sleep(0)
            assert passed == ["e1 r#4", "e2 r/1.0#0", "e2 r/1.1#0", "e0 r#0"]
            assert parking.unpark(9) == ("e3",)
        return passed

    assert len(asyncio.run(main())) == 5


def test_only_what_is_in_flight_is_parked_and_only_once() -> None:
    parking = Parking()
    attempts = begun(parking, e0=1)
    assert not parking.park("e1")
    assert parking.park("e0")
    assert parking.park("e0")
    assert attempts["e0"].told == ["suspend"]
    assert parking.unpark(2) == ("e0",)
    assert attempts["e0"].told == ["suspend", "resume"]
    parking.park("e0")
    parking.forget("e0")
    assert parking.parked == ()
    assert not parking.park("e0")


def test_a_parked_episode_stays_parked_through_a_retry() -> None:
    parking = Parking()
    parking.admit("e0")
    assert parking.park("e0"), "before its program began"
    first, second = Attempt(1), Attempt(2)
    parking.begin("e0", first)
    parking.begin("e0", second)
    assert (first.told, second.told) == (["suspend"], ["suspend"])
    assert "e0" in parking.waiting


def test_a_call_that_is_parked_again_before_it_went_on_waits_again() -> None:
    async def main() -> None:
        parking = Parking()
        begun(parking, e0=1)
        parking.park("e0")
        call = asyncio.ensure_future(parking.wait_while_parked("e0", "r#0"))
        await asyncio.sleep(0)
        parking.unpark()
        parking.park("e0")
        for _ in range(3):
            await asyncio.sleep(0)
        assert not call.done()
        parking.unpark()
        await call

    asyncio.run(main())
