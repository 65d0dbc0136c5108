"""The demonstrations of `agentrl.environments.tiny_model`, and what it says of demonstrations without reward."""

from __future__ import annotations

import random

import pytest

import agentrl
from agentrl.core.errors import CheckFailedError, EffectError
from agentrl.core.records import Message, Task
from agentrl.environments.tiny_model.model import Demonstration
from agentrl.environments.tiny_model.warm_up import _failed_demonstration, _shown


class Forgetful(agentrl.Environment):
    """Begins again after the first turn. Its effect fails."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        await agent.act(agentrl.user("one?"))
        agent.restart(agentrl.system("fresh"))
        await agent.act(agentrl.user("two?"))
        await agent.act(agentrl.user("three?"))
        with pytest.raises(EffectError, match="ZeroDivisionError"):
            await ctx.effect("divide", lambda: 1 // 0)
        agent.reward(1.0)

    @classmethod
    def demonstrate(cls, task: Task, random: random.Random) -> list[str]:  # type: ignore[override]
        return ["1", "2", "3"]


def shown(*messages: tuple[str, str]) -> Demonstration:
    return Demonstration(tuple(Message(role=role, content=content) for role, content in messages))  # type: ignore[arg-type]


def test_the_first_demonstration_that_fails_is_shown() -> None:
    good = shown(("user", "2 + 2?"), ("assistant", "4"))
    failing = shown(("user", "3 + 3?"), ("assistant", "add(3)"), ("tool", "error: b is\nmissing"), ("assistant", "?"))
    assert _failed_demonstration([good, failing, good]) == (
        "  user: 3 + 3?\n  assistant: add(3)\n  tool: error: b is missing\n  assistant: ?"
    )
    assert _failed_demonstration([good, good]) == "  user: 2 + 2?\n  assistant: 4", "else the first"
    assert len(_failed_demonstration([shown(("user", "x" * 9000))])) < 400


def test_a_restart_begins_another_demonstration_as_it_begins_another_row() -> None:
    demonstrations, reward = _shown(Forgetful, Task(id="t", data={}), 0, 0.0)
    written = [[message.content for message in each.messages] for each in demonstrations]
    assert written == [["one?", "1"], ["fresh", "two?", "2", "three?", "3"]]
    assert reward == 1.0


class Failing(Forgetful):
    """Does not expect that what it asks outside fails."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("agent").act(agentrl.user("one?"))
        await ctx.effect("divide", lambda: 1 // 0)


def test_a_demonstration_whose_effect_fails_is_named_with_the_line() -> None:
    with pytest.raises(
        CheckFailedError, match=r"the demonstration of task 't' raised ZeroDivisionError.*test_tiny_mod"
    ):
        _shown(Failing, Task(id="t", data={}), 0, 0.0)
