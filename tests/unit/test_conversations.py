"""The gateway refuses requests that continue a conversation of another running episode."""

from __future__ import annotations

import dataclasses

import pytest

import agentrl
from agentrl.core.records import Message, ToolCall
from agentrl.gateway.calls import RequestRefusedError
from agentrl.gateway.conversations import Conversations

OPENING = [agentrl.system("Answer."), agentrl.user("How tall is Everest?")]
REPLY = Message(
    role="assistant", content="8849 m", tool_calls=(ToolCall(id="a", name="f", arguments={"x": 1, "y": 2}),)
)
NEXT = agentrl.user("Sure?")
ECHOED = dataclasses.replace(REPLY, thinking="", tool_calls=(ToolCall(id="a", name="f", arguments={"y": 2, "x": 1}),))


def answered(*episodes: str) -> Conversations:
    conversations = Conversations()
    for episode in episodes:
        conversations.check(episode, OPENING)
        conversations.record(episode, OPENING, [dataclasses.replace(REPLY, thinking="Hm.")])
    return conversations


def test_a_conversation_is_refused_under_the_key_of_another_episode() -> None:
    conversations = answered("a")
    conversations.check("a", [*OPENING, ECHOED, NEXT])
    with pytest.raises(RequestRefusedError, match="another running episode") as refused:
        conversations.check("b", [*OPENING, ECHOED, NEXT])
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(OPENING, id="the same task"),
        pytest.param([*OPENING, agentrl.assistant("9 km"), NEXT], id="another reply"),
        pytest.param([agentrl.user("Hi."), REPLY, NEXT], id="another opening"),
        pytest.param([*OPENING, agentrl.user("Hm."), REPLY], id="other messages between"),
    ],
)
def test_other_requests_are_answered(messages: list[Message]) -> None:
    answered("a").check("b", messages)


@pytest.mark.parametrize("reply", [pytest.param("8849 m", id="short"), pytest.param("", id="empty")])
def test_an_example_in_a_prompt_may_be_the_task_and_reply_of_another_episode(reply: str) -> None:
    conversations = Conversations()
    conversations.record("zero-shot", OPENING, [agentrl.assistant(reply)])
    conversations.check("one-shot", [*OPENING, agentrl.assistant(reply), agentrl.user("How tall is Denali?")])


def test_a_long_text_identifies_a_conversation() -> None:
    conversations = Conversations()
    text = agentrl.assistant("Everest is 8849 m tall, as measured in 2020.")
    conversations.record("a", OPENING, [text])
    with pytest.raises(RequestRefusedError):
        conversations.check("b", [*OPENING, text, NEXT])


def test_an_episode_that_asked_the_same_may_edit_its_reply_into_that_of_another() -> None:
    conversations = answered("a")
    conversations.record("b", OPENING, [agentrl.assistant("8849 m!")])
    conversations.check("b", [*OPENING, REPLY, NEXT])


def test_an_episode_that_has_ended_is_forgotten() -> None:
    conversations = answered("a", "b")
    conversations.forget("a")
    with pytest.raises(RequestRefusedError):
        conversations.check("c", [*OPENING, REPLY])
    conversations.forget("b")
    conversations.check("c", [*OPENING, REPLY])
    assert not any(vars(conversations).values())
