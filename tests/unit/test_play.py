"""`agentrl.testing.play` refuses scripts that it cannot play as they are written, and finds a missing `await`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import CheckFailedError, EnvironmentDefinitionError, InputError
from agentrl.testing import play
from agentrl.testing.check import replay_from_every_entry

TASK = agentrl.Task(id="t", data={"question": "?"})


class Pair(agentrl.Environment):
    seats = ("first", "second")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            turn = await ctx.agent(seat).act(agentrl.user(seat))
            ctx.agent(seat).reward(float(turn.text == "x"))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [TASK]


class Catching(Pair):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        try:
            await super().run(ctx)
        except Exception:  # noqa: BLE001 - as users write it
            ctx.agent("first").reward(0.5)


class UnknownSeat(Pair):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("frist").act(agentrl.user("?"))


class ForgottenEffect(Pair):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        ctx.effect("write", lambda: None)  # type: ignore[unused-coroutine]
        await super().run(ctx)


class ForgottenAct(Pair):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn: Any = ctx.agent("first").act(agentrl.user("?"))
        ctx.agent("first").reward(float(turn.text == "x"))


class Adder(agentrl.ToolEnvironment):
    @agentrl.tool
    def add(self, a: int) -> int:
        """Add one."""
        return a + 1

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 1.0


def call(a: int) -> dict[str, object]:
    return {"name": "add", "arguments": {"a": a}}


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ({"first": ["x"], "second": ["x"]}, "all seats take their replies from one list"),
        ("xx", "replies is 'xx': write a list"),
        (None, "replies is None: write a list"),
        (["x", 5], "replies[1] is 5"),
        (["x", None], "replies[1] is None"),
        (["x", "\ud800"], "replies[1] is '\\ud800' ('utf-8' codec can't encode"),
        ([{"name": "add", "arguments": {"a": "\ud800"}}], "surrogates not allowed"),
        ([("first", "x")], "replies[0] is ('first', 'x')"),
        ([{"tool": "add", "arguments": {}}], "unknown field `tool`"),
        ([{"type": "function", "function": {"name": "add", "arguments": "{}"}}], "{'name': …, 'arguments': {…}}"),
        ([{"name": "add", "arguments": '{"a": 1}'}], "Expected `object`, got `str`"),
        ([{"name": "add", "arguments": {"a": object()}}], "a malformed call is text"),
    ],
)
def test_replies_of_another_form_are_refused(replies: Any, words: str) -> None:
    with pytest.raises(InputError) as refused:
        play(Pair, TASK, replies)
    assert words in str(refused.value)
    assert "write" in str(refused.value)


def test_a_task_or_environment_of_another_form_is_refused() -> None:
    task: Any = {"question": "?"}
    with pytest.raises(InputError, match=r"the task is \{'question': '\?'\}; write agentrl\.Task"):
        play(Pair, task, ["x"])
    environment: Any = Adder()
    with pytest.raises(EnvironmentDefinitionError, match="write the class, such as Adder, or its name"):
        play(environment, TASK, ["x"])


@pytest.mark.parametrize("environment", [Pair, Catching])
def test_a_script_that_is_too_short_is_an_error_even_if_the_environment_catches_it(environment: type[Pair]) -> None:
    with pytest.raises(CheckFailedError, match=r"asked for reply 2, but play has only 1 reply$"):
        play(environment, TASK, ["x"])


def test_a_script_that_is_too_long_warns() -> None:
    with pytest.warns(UserWarning, match=r"ended after 2 turns, and 1 of 3 replies were never asked for.*'z'"):
        assert play(Pair, TASK, ["x", "y", "z"]).reward == 1.0
    assert play(Pair, TASK, ["x", "y"]).reward == 1.0


def test_a_seat_that_does_not_exist_is_named() -> None:
    with pytest.raises(CheckFailedError, match="no seat 'frist'; its seats: 'first', 'second'"):
        play(UnknownSeat, TASK, ["x"])


@pytest.mark.parametrize(("environment", "name"), [(ForgottenEffect, "effect"), (ForgottenAct, "act")])
def test_a_missing_await_is_an_error_of_its_own_test_alone(environment: type[Pair], name: str) -> None:
    with pytest.raises(CheckFailedError, match=rf"\.{name}' was never awaited"):
        play(environment, TASK, ["x", "x"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert play(Pair, TASK, ["x", "x"]).reward == 2.0
    report = replay_from_every_entry(environment)
    assert any(f".{name}' was never awaited" in finding for finding in report.findings), report.findings


def test_one_reply_may_hold_several_calls() -> None:
    played = play(Adder, TASK, [[call(1), call(2)], call(3), "done"])
    assert played.observations == ("?", "2\n3", "4")
