"""Places in the engine's memory: who has one, who waits, who loses it, and when."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agentrl.core.errors import EngineError
from agentrl.core.ports import GenerateRequest, SamplingParams, generate_when_room
from agentrl.core.records import PolicyVersion
from agentrl.engines.kv_budget import KVBudget, Reservation
from agentrl.engines.scripted import ScriptedEngine
from agentrl.testing.virtual_time import simulate

if TYPE_CHECKING:
    from agentrl.core.records import Int32Array


def ran(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return simulate(main, seed=0)


def budget(kv_tokens: int = 1000, prefill_rate: float = 100.0) -> KVBudget:
    """Of 900 tokens, after what is left for running calls; places are kept for 10 s."""
    return KVBudget(kv_tokens, prefill_rate)


def request(name: str, tokens: int) -> GenerateRequest:
    context = np.zeros(tokens, np.int32)
    return GenerateRequest(request_id=name, token_ids=context, sampling=SamplingParams(max_tokens=90), seed=0)


def asked(place: Reservation, tokens: int, priority: int = 0) -> asyncio.Task[float]:
    """A call that waits until it may begin; when it did."""

    async def begin() -> float:
        while not place.reserve(tokens):
            place.queue(priority)
            await place.wait()
        return asyncio.get_running_loop().time()

    return asyncio.get_running_loop().create_task(begin())


def test_without_a_bound_everybody_passes() -> None:
    async def main() -> None:
        places = [KVBudget(None).reservation() for _ in range(3)]
        assert all(place.reserve(1 << 40) for place in places)
        for place in places:
            place.idle(1 << 41)
            place.release()

    ran(main)


def test_who_does_not_fit_waits_until_somebody_leaves() -> None:
    async def main() -> float:
        shared = budget()
        first, second = shared.reservation(), shared.reservation()
        assert first.reserve(500)
        assert not second.reserve(500)
        waiting = asked(second, 500)
        await asyncio.sleep(3)
        assert not waiting.done()
        first.release()
        return await waiting

    assert ran(main) == 3


def test_a_rest_keeps_the_place_for_as_long_as_the_engine_computes_all_it_holds() -> None:
    async def main() -> float:
        shared = budget()
        first, second = shared.reservation(), shared.reservation()
        first.reserve(500)
        await asyncio.sleep(1)
        first.idle(600)
        waiting = asked(second, 500)
        began = await waiting
        assert not first.reserve(600), "it has lost its place"
        return began

    assert ran(main) == 1 + 10


def test_who_has_a_place_goes_on_before_all_that_wait() -> None:
    async def main() -> None:
        shared = budget()
        first, second = shared.reservation(), shared.reservation()
        first.reserve(500)
        waiting = asked(second, 500, priority=-1)
        await asyncio.sleep(0)
        first.idle(600)
        assert first.reserve(700)
        await asyncio.sleep(100)
        assert not waiting.done()
        first.release()
        await waiting

    ran(main)


def test_those_that_wait_pass_by_priority_then_arrival_and_none_overtakes_one_that_does_not_fit() -> None:
    async def main() -> list[str]:
        shared, passed = budget(), list[str]()
        first, small = shared.reservation(), shared.reservation()
        first.reserve(500)
        small.reserve(100)
        for name, tokens, priority in (("a", 600, 0), ("c", 100, 2), ("d", 100, 2), ("b", 100, 1)):
            asked(shared.reservation(), tokens, priority).add_done_callback(lambda _, name=name: passed.append(name))
            await asyncio.sleep(1)
        assert passed == [], "b, c and d would fit, and come after a"
        first.release()
        await asyncio.sleep(1)
        assert passed == ["a", "b", "c"]
        small.release()
        await asyncio.sleep(1)
        return passed

    assert ran(main) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("kv_tokens", [1000, 1, 0, -32])
def test_one_larger_than_the_memory_passes_alone(kv_tokens: int) -> None:
    """Less than a block may be left of a worker's share."""

    async def main() -> None:
        shared = budget(kv_tokens)
        first, large = shared.reservation(), shared.reservation()
        first.reserve(10)
        waiting = asked(large, 5000)
        await asyncio.sleep(1)
        assert not waiting.done()
        first.release()
        await waiting

    ran(main)


def test_what_grows_beyond_the_memory_takes_the_places_that_rested_longest() -> None:
    async def main() -> None:
        shared = budget()
        places = [shared.reservation() for _ in range(3)]
        for place in places:
            place.reserve(300)
        places[0].idle(300)
        places[1].idle(300)
        places[2].idle(400)
        assert not places[0].reserve(600), "its place went to the third's growth"
        assert places[1].reserve(300)
        assert places[2].reserve(400)

    ran(main)


def test_running_conversations_may_outgrow_the_memory_and_no_other_is_admitted_meanwhile() -> None:
    async def main() -> None:
        shared = budget()
        running = [shared.reservation() for _ in range(4)]
        assert all(place.reserve(220) for place in running)
        assert all(place.reserve(400) for place in running), "a running conversation is never cut"
        assert shared.reserved == 1600
        last = shared.reservation()
        assert not last.reserve(10)
        waiting = asked(last, 10)
        for place in running[:2]:
            await asyncio.sleep(1)
            assert not waiting.done()
            place.release()
        assert await waiting == 2

    ran(main)


def test_a_call_that_is_refused_twice_has_one_place_in_the_queue() -> None:
    async def main() -> None:
        shared = budget()
        first, refused = shared.reservation(), shared.reservation()
        assert first.reserve(800)
        earlier: list[asyncio.Task[None]] = []
        for tokens in (500, 300):
            assert not refused.reserve(tokens)
            refused.queue(0)
            earlier.append(asyncio.create_task(refused.wait()))
            await asyncio.sleep(1)
        await earlier[0]
        assert not earlier[1].done()
        refused.release()
        await earlier[1]
        first.release()
        assert shared.reserved == 0

    ran(main)


def test_a_call_that_is_aborted_keeps_its_place_no_longer_than_one_that_ended() -> None:
    """The abort may come at the turn's last token, and a long tool follow."""

    async def main() -> float:
        engine = ScriptedEngine([[1] * 90], versions={"policy": PolicyVersion("policy", 0, 0)}, seconds_per_token=1.0)
        engine.capabilities = replace(engine.capabilities, kv_tokens=1000, prefill_rate=100.0)
        call = asyncio.create_task(engine.open("a", "policy").generate(request("a", 700)))
        await asyncio.sleep(5)
        engine.abort("a")
        assert (await call).finish_reason == "abort"
        await generate_when_room(engine.open("b", "policy"), request("b", 700))
        return asyncio.get_running_loop().time()

    assert ran(main) == 5 + 10 + 90


def test_a_kind_that_rests_too_long_keeps_nothing_and_others_do() -> None:
    """To keep costs 2 for each rest of more than 10 s, to forget 1."""

    async def main() -> tuple[float, float]:
        shared = budget()
        for kind, seconds in (("slow", 20.0), ("quick", 5.0)):
            place = shared.reservation()
            place.reserve(100, kind=kind)
            place.idle(100)
            await asyncio.sleep(seconds)
            place.reserve(100, kind=kind)
            place.release()
        began = []
        for kind in ("slow", "quick"):
            place, other = shared.reservation(), shared.reservation()
            now = asyncio.get_running_loop().time()
            place.reserve(800, kind=kind)
            place.idle(800)
            began.append(await asked(other, 800) - now)
            other.release()
            place.release()
        return began[0], began[1]

    assert ran(main) == (0.0, 10.0)


def test_who_leaves_while_it_waits_asks_again_and_who_is_cancelled_is_forgotten() -> None:
    async def main() -> None:
        shared = budget()
        first, parked, cancelled, last = (shared.reservation() for _ in range(4))
        first.reserve(800)
        assert not parked.reserve(500)
        assert not cancelled.reserve(900)
        for place in (parked, cancelled):
            place.queue(0)
        returned, gone = asyncio.ensure_future(parked.wait()), asyncio.ensure_future(cancelled.wait())
        waiting = asked(last, 500, priority=1)
        await asyncio.sleep(0)
        parked.release()
        await returned
        assert not parked.reserve(500), "it was woken without a place"
        gone.cancel()
        await asyncio.sleep(0)
        first.release()
        await waiting

    ran(main)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_for_ever_and_the_memory_holds_what_runs(seed: int) -> None:
    """Conversations of random sizes, rests and ends, some cancelled while they wait."""
    held: dict[int, int] = {}

    async def converse(number: int, shared: KVBudget, rng: random.Random) -> None:
        place, kind, tokens = shared.reservation(), rng.randrange(2), rng.randint(10, 500)
        try:
            for _ in range(rng.randint(1, 6)):
                while not place.reserve(tokens, kind=kind):
                    place.queue(rng.randint(0, 3))
                    await place.wait()
                held[number] = tokens
                assert len(held) == 1 or sum(held.values()) <= 900, "what runs does not fit"
                await asyncio.sleep(rng.expovariate(1.0))
                del held[number]
                place.idle(tokens)
                await asyncio.sleep(rng.expovariate(0.1))
        finally:
            held.pop(number, None)
            place.release()

    async def main() -> None:
        shared, rng = budget(), random.Random(seed)
        tasks = [
            asyncio.ensure_future(converse(number, shared, random.Random(seed * 1000 + number))) for number in range(60)
        ]
        for task in rng.sample(tasks, 10):
            asyncio.get_running_loop().call_later(rng.uniform(0, 100), task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        last = shared.reservation()
        assert last.reserve(900), "nothing is held any more"

    simulate(main, seed=seed)


def test_who_is_cancelled_as_it_is_let_in_leaves_nothing_behind() -> None:
    async def main() -> None:
        shared = budget()
        first, cancelled, last = (shared.reservation() for _ in range(3))
        first.reserve(800)
        waiting = asked(cancelled, 800)
        await asyncio.sleep(0)
        first.release()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert shared.reserved == 0
        assert last.reserve(800)

    ran(main)


TASK = np.arange(600, dtype=np.int32)


def sharing(kv_tokens: int = 1000) -> KVBudget:
    return KVBudget(kv_tokens, 100.0, shares_prefixes=True)


def context_of(task: int, own: int) -> Int32Array:
    """600 tokens that a group has in common, 256 of them with everybody, and 20 more."""
    return np.concatenate([TASK[:256], TASK[256:] + 1000 * task, np.full(20, own, np.int32)])


def test_a_group_is_charged_for_its_task_once_and_until_the_last_has_left() -> None:
    async def main() -> None:
        shared = sharing()
        places = [shared.reservation() for _ in range(8)]
        assert [place.reserve(620, TASK) for place in places] == [True] * 8
        assert shared.reserved == 600 + 8 * 20
        for number, place in enumerate(places):
            assert shared.reserved == 600 + (8 - number) * 20
            place.release()
        assert shared.reserved == 0

    ran(main)


def test_without_prefixes_that_are_held_once_everybody_is_charged_for_all() -> None:
    async def main() -> None:
        shared = budget()
        assert [shared.reservation().reserve(620, TASK) for _ in range(2)] == [True, False]

    ran(main)


def test_tasks_that_begin_alike_share_a_part_and_other_weights_nothing() -> None:
    async def main() -> None:
        shared = sharing(10_000)
        shared.reservation("a").reserve(620, context_of(0, 0))
        assert shared.reserved == 620
        shared.reservation("a").reserve(620, context_of(1, 0))
        assert shared.reserved == 620 + 620 - 256
        shared.reservation("b").reserve(620, context_of(1, 0))
        assert shared.reserved == 620 + 620 - 256 + 620

    ran(main)


def test_a_conversation_that_begins_anew_is_charged_for_what_it_is() -> None:
    async def main() -> None:
        shared = sharing()
        first, second = shared.reservation(), shared.reservation()
        for place in (first, second):
            assert place.reserve(600, TASK)
            place.idle(650)
        assert shared.reserved == 700
        second.release()
        assert not second.reserve(500, TASK + 1)

    ran(main)


@pytest.mark.parametrize("tokens", [100, 600, 700])
def test_a_new_row_is_charged_for_what_it_is_whatever_its_length(tokens: int) -> None:
    async def main() -> None:
        shared = sharing(2000)
        first, second = shared.reservation(), shared.reservation()
        for place in (first, second):
            assert place.reserve(600, TASK)
            place.idle(650)
        new = np.concatenate([TASK[:64], 1000 + np.arange(tokens - 64, dtype=np.int32)])
        assert first.reserve(tokens, new, row=1)
        assert shared.reserved == 650 + tokens - 64, "their first part is the same"

    ran(main)


def test_all_that_rest_make_room_for_one_that_has_a_task_in_common_with_them() -> None:
    async def main() -> None:
        shared = sharing()
        places = [shared.reservation() for _ in range(4)]
        for place in places:
            place.reserve(640, TASK)
            place.idle(640)
        await asyncio.sleep(11)
        last = shared.reservation()
        assert last.reserve(880, TASK)
        assert shared.reserved == 880
        assert not any(place.is_held for place in places)

    ran(main)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_taken_is_what_is_held_each_part_once(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        shared = sharing(rng.randint(600, 5000))
        places = [shared.reservation(number % 2) for number in range(12)]
        running: set[Reservation] = set()
        for _ in range(400):
            place = rng.choice(places)
            if place in running:
                running.discard(place)
                place.idle(place.tokens + rng.randint(-100, 200))
            elif rng.random() < 0.2:
                place.release()
            elif place.reserve(rng.randint(620, 900), context_of(rng.randrange(3), rng.randrange(2))):
                running.add(place)
            await asyncio.sleep(rng.choice([0.0, 0.1, 20.0]))
            held = [place for place in places if place.is_held]
            assert running <= set(held)
            parts = {key: count for place in held for key, count in place.parts}
            own = sum(place.tokens - sum(count for _, count in place.parts) for place in held)
            assert shared.reserved == own + sum(parts.values())
        for place in places:
            place.release()
        assert shared.reserved == 0
        assert shared.reservation().reserve(10_000), "nothing is firm"

    ran(main)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_an_engine_that_computes_nothing_is_refused(rate: float) -> None:
    with pytest.raises(EngineError, match="prefill_rate"):
        replace(ScriptedEngine([[1]], versions={}).capabilities, prefill_rate=rate)


def test_a_place_is_kept_for_a_minute_at_most() -> None:
    async def main() -> float:
        shared = KVBudget(1000, 1e-9)
        first = shared.reservation()
        first.reserve(900)
        first.idle(900)
        return await asked(shared.reservation(), 500)

    assert ran(main) == 60
