"""How owners share an engine and a trainer: what one of them has queued does not delay another, and nothing is idle."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.tinker.shares import REQUEST_TOKENS, EnginePlaces, TrainingTurns


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


class Engine:
    """Calls that hold places until they are ended or interrupted; an interrupted one continues in another place."""

    def __init__(self, count: int) -> None:
        self.places = EnginePlaces(count, self.interrupt)
        self.running: list[str] = []
        self.interrupted: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def interrupt(self, call_id: str) -> None:
        self.interrupted.append(call_id)
        self._ends[call_id].set()

    async def start(self, owner: str, *calls: str) -> None:
        for call in calls:
            self.tasks[call] = asyncio.create_task(self._call(owner, call))
        await settle()

    async def _call(self, owner: str, call: str) -> None:
        is_resumed = False
        while True:
            async with self.places.take(owner, call, is_resumed=is_resumed) as place:
                end = self._ends[call] = asyncio.Event()
                if not place.is_interrupted:
                    self.running.append(call)
                    try:
                        await end.wait()
                    finally:
                        self.running.remove(call)
            if not place.is_interrupted:
                return
            is_resumed = True

    async def end(self, *calls: str) -> None:
        for call in calls:
            self._ends[call].set()
        await settle()


def test_an_owner_gets_an_equal_share_of_the_places_at_once() -> None:
    async def work() -> None:
        engine = Engine(4)
        await engine.start("A", *(f"a{number}" for number in range(300)))
        assert engine.running == ["a0", "a1", "a2", "a3"]  # one owner uses all
        await engine.start("B", "b0")
        assert engine.running == ["a0", "a1", "a2", "b0"]
        assert engine.interrupted == ["a3"]
        await engine.start("B", "b1", "b2")
        assert engine.running == ["a0", "a1", "b0", "b1"]
        await engine.end("a0")
        assert engine.running == ["a1", "b0", "b1", "a2"]  # in its own turn again, before the newer ones
        await engine.end("b0", "b1")
        assert engine.running == ["a1", "a2", "b2", "a3"]
        await engine.start("C", "c0")
        assert engine.running == ["a1", "a2", "b2", "c0"]
        assert engine.interrupted == ["a3", "a2", "a3"]

    asyncio.run(work())


def test_a_cancelled_call_gives_its_place_back() -> None:
    async def work() -> None:
        engine = Engine(1)
        await engine.start("A", "a0", "a1", "a2")
        for call in ("a1", "a0"):
            engine.tasks[call].cancel()
        await settle()
        assert engine.running == ["a2"]
        # The place is given and its call cancelled at the same moment.
        await engine.start("A", "a3", "a4")
        engine._ends["a2"].set()
        await asyncio.sleep(0)
        engine.tasks["a3"].cancel()
        await settle()
        assert engine.running == ["a4"]
        with contextlib.suppress(asyncio.CancelledError):
            await engine.tasks["a3"]

    asyncio.run(work())


def test_a_call_that_cannot_be_interrupted_keeps_its_place() -> None:
    async def work() -> None:
        engine = Engine(2)
        async with engine.places.take("A"), engine.places.take("A"):
            await engine.start("B", "b0")
            assert engine.running == engine.interrupted == []
        await settle()
        assert engine.running == ["b0"]

    asyncio.run(work())


class Models:
    """Models with a number of requests each, and the order in which they have their turns."""

    def __init__(self) -> None:
        self.turns = TrainingTurns(lambda model: model.trained_tokens)
        self.waiting: dict[str, int] = {}
        self.order = ""

    def add(self, owner: str, count: int, requests: int) -> None:
        for number in range(count):
            name = f"{owner}{number}"
            self.waiting[name] = requests
            model: Any = SimpleNamespace(id=name, owner=owner, number=number, trained_tokens=0.0, is_ready=True)
            self.turns.add(model)

    def train(self, count: int, tokens: dict[str, float]) -> str:
        """The owners of the next turns."""
        order = ""
        for _ in range(count):
            model: Any = self.turns.next()
            order += model.owner
            self.waiting[model.id] -= 1
            model.is_ready = self.waiting[model.id] > 0
            model.trained_tokens += tokens[model.owner]
            self.turns.end(model, tokens[model.owner])
        return order


@pytest.mark.parametrize("models", [1, 24, 400])
def test_an_owner_waits_for_one_request_of_another_however_many_models_that_has(models: int) -> None:
    found = Models()
    found.add("A", models, 20)
    assert found.train(5, {"A": 20}) == "AAAAA"
    found.add("B", 1, 3)
    assert found.train(6, {"A": 20, "B": 20}) == "BABABA"
    assert found.train(2, {"A": 20}) == "AA"
    found.add("B", 1, 1)  # its idle time gives it no credit
    assert found.train(2, {"A": 20, "B": 20}) == "BA"


def test_owners_take_turns_by_their_tokens() -> None:
    found = Models()
    found.add("A", 2, 100)
    found.add("B", 1, 100)
    assert found.train(8, {"A": 3 * REQUEST_TOKENS, "B": REQUEST_TOKENS}) == "ABBBABBB"
    assert found.turns.next() is not None


def test_no_model_has_a_turn_without_a_request() -> None:
    found = Models()
    assert found.turns.next() is None
    found.add("A", 1, 1)
    found.train(1, {"A": 1})
    assert found.turns.next() is None
