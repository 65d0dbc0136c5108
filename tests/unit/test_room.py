"""Places in the engine's memory: who has one, who waits, who loses it, and when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from agentrl.rollout.room import UNBOUNDED, Place, Room
from agentrl.testing import simulate


def ran(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return simulate(main, seed=0)


def room(kv_tokens: int = 1000, prefill_rate: float = 100.0) -> Room:
    """Of 900 tokens, after what is left for running calls; places are kept for 10 s."""
    return Room(kv_tokens, prefill_rate)


def asked(place: Place, tokens: int, priority: int = 0) -> asyncio.Task[float]:
    """A call that waits until it may begin; when it did."""

    async def begin() -> float:
        while not place.take(tokens):
            await place.wait(tokens, priority)
        return asyncio.get_running_loop().time()

    return asyncio.get_running_loop().create_task(begin())


def test_without_a_bound_everybody_passes() -> None:
    async def main() -> None:
        places = [UNBOUNDED.place("kind") for _ in range(3)]
        assert all(place.take(1 << 40) for place in places)
        for place in places:
            place.rest(1 << 41)
            place.leave()

    ran(main)


def test_who_does_not_fit_waits_until_somebody_leaves() -> None:
    async def main() -> float:
        shared = room()
        first, second = shared.place("kind"), shared.place("kind")
        assert first.take(500)
        assert not second.take(500)
        waiting = asked(second, 500)
        await asyncio.sleep(3)
        assert not waiting.done()
        first.leave()
        return await waiting

    assert ran(main) == 3


def test_a_rest_keeps_the_place_for_as_long_as_the_engine_computes_all_it_holds() -> None:
    async def main() -> float:
        shared = room()
        first, second = shared.place("kind"), shared.place("kind")
        first.take(500)
        await asyncio.sleep(1)
        first.rest(600)
        waiting = asked(second, 500)
        began = await waiting
        assert not first.take(600), "it has lost its place"
        return began

    assert ran(main) == 1 + 10


def test_who_has_a_place_goes_on_before_all_that_wait() -> None:
    async def main() -> None:
        shared = room()
        first, second = shared.place("kind"), shared.place("kind")
        first.take(500)
        waiting = asked(second, 500, priority=-1)
        await asyncio.sleep(0)
        first.rest(600)
        assert first.take(700)
        await asyncio.sleep(100)
        assert not waiting.done()
        first.leave()
        await waiting

    ran(main)


def test_those_that_wait_pass_by_priority_then_arrival_and_none_overtakes_one_that_does_not_fit() -> None:
    async def main() -> list[str]:
        shared, passed = room(), list[str]()
        first, small = shared.place("kind"), shared.place("kind")
        first.take(500)
        small.take(100)
        for name, tokens, priority in (("a", 600, 0), ("c", 100, 2), ("d", 100, 2), ("b", 100, 1)):
            asked(shared.place("kind"), tokens, priority).add_done_callback(lambda _, name=name: passed.append(name))
            await asyncio.sleep(1)
        assert passed == [], "b, c and d would fit, and come after a"
        first.leave()
        await asyncio.sleep(1)
        assert passed == ["a", "b", "c"]
        small.leave()
        await asyncio.sleep(1)
        return passed

    assert ran(main) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("kv_tokens", [1000, 1, 0, -32])
def test_one_larger_than_the_memory_passes_alone(kv_tokens: int) -> None:
    """Less than a block may be left of a worker's share."""

    async def main() -> None:
        shared = room(kv_tokens)
        first, large = shared.place("kind"), shared.place("kind")
        first.take(10)
        waiting = asked(large, 5000)
        await asyncio.sleep(1)
        assert not waiting.done()
        first.leave()
        await waiting

    ran(main)


def test_what_grows_beyond_the_memory_takes_the_places_that_rested_longest() -> None:
    async def main() -> None:
        shared = room()
        places = [shared.place("kind") for _ in range(3)]
        for place in places:
            place.take(300)
        places[0].rest(300)
        places[1].rest(300)
        places[2].rest(400)
        assert not places[0].take(600), "its place went to the third's growth"
        assert places[1].take(300)
        assert places[2].take(400)

    ran(main)


def test_a_kind_that_rests_too_long_keeps_nothing_and_others_do() -> None:
    """To keep costs 2 for each rest of more than 10 s, to forget 1."""

    async def main() -> tuple[float, float]:
        shared = room()
        for kind, seconds in (("slow", 20.0), ("quick", 5.0)):
            place = shared.place(kind)
            place.take(100)
            place.rest(100)
            await asyncio.sleep(seconds)
            place.take(100)
            place.leave()
        began = []
        for kind in ("slow", "quick"):
            place, other = shared.place(kind), shared.place("other")
            now = asyncio.get_running_loop().time()
            place.take(800)
            place.rest(800)
            began.append(await asked(other, 800) - now)
            other.leave()
            place.leave()
        return began[0], began[1]

    assert ran(main) == (0.0, 10.0)


def test_who_leaves_while_it_waits_asks_again_and_who_is_cancelled_is_forgotten() -> None:
    async def main() -> None:
        shared = room()
        first, parked, cancelled, last = (shared.place("kind") for _ in range(4))
        first.take(800)
        returned = asyncio.ensure_future(parked.wait(500, 0))
        gone = asyncio.ensure_future(cancelled.wait(900, 0))
        waiting = asked(last, 500, priority=1)
        await asyncio.sleep(0)
        parked.leave()
        await returned
        assert not parked.take(500), "it was woken without a place"
        gone.cancel()
        await asyncio.sleep(0)
        first.leave()
        await waiting

    ran(main)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_for_ever_and_the_memory_holds_what_runs(seed: int) -> None:
    """Conversations of random sizes, rests and ends, some cancelled while they wait."""
    held: dict[int, int] = {}

    async def converse(number: int, shared: Room, rng: random.Random) -> None:
        place, tokens = shared.place(rng.randrange(2)), rng.randint(10, 500)
        try:
            for _ in range(rng.randint(1, 6)):
                while not place.take(tokens):
                    await place.wait(tokens, rng.randint(0, 3))
                held[number] = tokens
                assert len(held) == 1 or sum(held.values()) <= 900, "what runs does not fit"
                await asyncio.sleep(rng.expovariate(1.0))
                del held[number]
                place.rest(tokens)
                await asyncio.sleep(rng.expovariate(0.1))
        finally:
            held.pop(number, None)
            place.leave()

    async def main() -> None:
        shared, rng = room(), random.Random(seed)
        tasks = [
            asyncio.ensure_future(converse(number, shared, random.Random(seed * 1000 + number))) for number in range(60)
        ]
        for task in rng.sample(tasks, 10):
            asyncio.get_running_loop().call_later(rng.uniform(0, 100), task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        last = shared.place("kind")
        assert last.take(900), "nothing is held any more"

    simulate(main, seed=seed)


@pytest.mark.parametrize(("shares", "passed"), [(True, 3), (False, 1)])
def test_what_conversations_begin_with_alike_is_charged_once(shares: bool, passed: int) -> None:
    async def main() -> None:
        shared = Room(1000, 100.0, shares_prefixes=shares)
        contexts = [
            np.array([*range(instructions), *[member] * (500 - instructions)])
            for member, instructions in enumerate((500, 300, 450, 0))
        ]
        places = [shared.place("solver") for _ in contexts]
        for place, context in zip(places, contexts, strict=True):
            place.begin(context)
            place.begin(context[:0])  # later contexts do not count
        assert [place.take(500) for place in places] == [number < passed for number in range(4)]
        other = shared.place("checker")
        other.begin(contexts[0])
        assert not other.take(500), "kinds are not compared"
        for place in places:
            place.leave()
        assert other.take(900)

    ran(main)


def test_a_conversation_that_is_all_alike_has_a_place_that_can_be_lost() -> None:
    async def main() -> None:
        shared = Room(1000, 100.0, shares_prefixes=True)
        first, second = shared.place("kind"), shared.place("kind")
        for place in (first, second):
            place.begin(np.arange(600))
        assert first.take(600)
        assert second.take(600)
        second.rest(250)  # its context was rewritten
        first.rest(850)
        await asyncio.sleep(11)
        last = shared.place("another")
        assert last.take(900)
        assert not second.take(250)

    ran(main)
