"""Tool results over the gateway: each stands with its call, in every protocol; what cannot be joined is refused."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.environment.tools import read_messages
from agentrl.gateway.anthropic_messages import AnthropicMessagesProtocol
from agentrl.gateway.calls import RequestRefusedError
from agentrl.gateway.chat_completions import ChatCompletionsProtocol
from agentrl.gateway.openai_responses import OpenAIResponsesProtocol
from agentrl.testing.check import check_environment
from tests.unit.episodes import play
from tests.unit.test_gateway import Loop, Stable, ask, turns, user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import aiohttp

    from agentrl.core.records import Message

Step = str | tuple[str, ...] | dict[str, str]
"""A user's text; the ids of a reply's calls; or results, keyed by id."""
CASES: dict[str, tuple[list[Step], list[str] | None]] = {
    "in order": (["?", ("a", "b"), {"a": "1", "b": "2"}], ["1", "2"]),
    "in the order of completion": (["?", ("a", "b", "c"), {"c": "3", "a": "1", "b": "2"}], ["1", "2", "3"]),
    "in several messages": (["?", ("a", "b"), {"b": "2"}, {"a": "1"}], ["1", "2"]),
    "an id of an earlier turn": (["?", ("a", "b"), {"b": "2", "a": "1"}, ("b", "a"), {"a": "4", "b": "3"}], [*"1234"]),
    "an empty result": (["?", ("a", "b"), {"b": "2", "a": ""}], ["", "2"]),
    "a user's message after all results": (["?", ("a", "b"), {"b": "2", "a": "1"}, "go on"], ["1", "2"]),
    "a history without its beginning": ([("a", "b"), {"b": "2", "a": "1"}], ["1", "2"]),
    "a history without a turn": (["?", ("a",), {"a": "1"}, "?", ("c", "d"), {"d": "4", "c": "3"}], ["1", "3", "4"]),
    "an unknown id": (["?", ("a",), {"z": "1"}], None),
    "an id of an earlier turn alone": (["?", ("a",), {"a": "1"}, ("b",), {"a": "1"}], None),
    "one missing": (["?", ("a", "b"), {"b": "2"}], None),
    "one missing, then a user's message": (["?", ("a", "b"), {"b": "2"}, "go on"], None),
    "all missing, then a user's message": (["?", ("a",), "go on"], None),
    "one missing, then another reply": (["?", ("a", "b"), {"a": "1"}, ("c",), {"c": "3"}], None),
    "one too late": (["?", ("a", "b"), {"b": "2"}, "wait", {"a": "1"}], None),
    "two results": (["?", ("a",), {"a": "1"}, {"a": "2"}], None),
    "two results and one missing": (["?", ("a", "b"), {"a": "1"}, {"a": "2"}], None),
    "equal ids in one reply": (["?", ("a", "a"), {"a": "1"}, {"a": "2"}], None),
    "a result without its call": ([{"a": "1"}, "?"], None),
    "a result after a summary": (["so far", {"a": "1"}], None),
}


def chat_body(steps: Sequence[Step]) -> dict[str, Any]:
    messages: list[Any] = []
    for step in steps:
        if isinstance(step, str):
            messages.append({"role": "user", "content": step})
        elif isinstance(step, tuple):
            calls = [{"id": call, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call in step]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            messages += [{"role": "tool", "tool_call_id": call, "content": text} for call, text in step.items()]
    return {"model": "main", "messages": messages}


def responses_body(steps: Sequence[Step]) -> dict[str, Any]:
    items: list[Any] = []
    for step in steps:
        if isinstance(step, str):
            items.append({"role": "user", "content": step})
        elif isinstance(step, tuple):
            items += [{"type": "function_call", "call_id": call, "name": "f", "arguments": "{}"} for call in step]
        else:
            items += [{"type": "function_call_output", "call_id": call, "output": text} for call, text in step.items()]
    return {"model": "main", "input": items}


def messages_body(steps: Sequence[Step]) -> dict[str, Any]:
    messages: list[Any] = []
    for step in steps:
        if isinstance(step, str):
            messages.append({"role": "user", "content": step})
        elif isinstance(step, tuple):
            uses = [{"type": "tool_use", "id": call, "name": "f", "input": {}} for call in step]
            messages.append({"role": "assistant", "content": uses})
        else:
            results = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in step.items()]
            messages.append({"role": "user", "content": results})
    return {"model": "main", "max_tokens": 9, "messages": messages}


def chat_read(steps: Sequence[Step]) -> Sequence[Message]:
    return ChatCompletionsProtocol().read(chat_body(steps)).messages


def responses_read(steps: Sequence[Step]) -> Sequence[Message]:
    return OpenAIResponsesProtocol().read(responses_body(steps)).messages


def messages_read(steps: Sequence[Step]) -> Sequence[Message]:
    return AnthropicMessagesProtocol().read(messages_body(steps)).messages


@pytest.mark.parametrize("read", [chat_read, responses_read, messages_read])
@pytest.mark.parametrize("case", CASES)
def test_results_stand_in_the_order_of_their_calls(
    read: Callable[[Sequence[Step]], Sequence[Message]], case: str
) -> None:
    steps, texts = CASES[case]
    if texts is None:
        with pytest.raises(RequestRefusedError) as refusal:
            read(steps)
        assert (refusal.value.status, refusal.value.parameter) == (
            400,
            "input" if read is responses_read else "messages",
        )
        return
    messages = read(steps)
    assert [message.content for message in messages if message.role == "tool"] == texts
    called: list[str] = []
    for message in messages:  # each result directly follows its call, with its name
        if message.role == "tool":
            assert (message.tool_call_id, message.name) == (called.pop(0), "f")
        else:
            assert not called
            called = [call.id for call in message.tool_calls]


@pytest.mark.parametrize(
    ("calls", "results", "texts"),
    [
        ([("", "f")], [(None, None, "1")], ["1"]),
        ([("a", "f")], [(None, None, "1")], ["1"]),
        ([("a", "f")], [("", "f", "1")], ["1"]),
        ([("a", "f"), ("b", "g")], [(None, "g", "2"), (None, "f", "1")], ["1", "2"]),
        ([("", "f"), ("", "g")], [(None, "g", "2"), (None, "f", "1")], ["1", "2"]),
        ([("a", "f")], [(None, "g", "1")], None),
        ([("a", "f"), ("b", "f")], [(None, None, "1"), (None, None, "2")], None),
        ([("", "f"), ("", "f")], [(None, "f", "1"), (None, "f", "2")], None),
        ([("", "f"), ("", "g")], [(None, None, "1"), (None, None, "2")], None),
        ([("", "f")], [("x", "f", "1")], None),
    ],
)
def test_results_without_ids_are_joined_only_if_one_call_fits(
    calls: list[tuple[str, str]], results: list[tuple[str | None, str | None, str]], texts: list[str] | None
) -> None:
    messages = [
        {"role": "assistant", "tool_calls": [{"id": id_, "function": {"name": name}} for id_, name in calls]},
        *({"role": "tool", "tool_call_id": id_, "name": name, "content": text} for id_, name, text in results),
    ]
    if texts is None:
        with pytest.raises(RequestRefusedError, match="result"):
            ChatCompletionsProtocol().read({"model": "m", "messages": messages})
    else:
        read = ChatCompletionsProtocol().read({"model": "m", "messages": messages}).messages
        assert [message.content for message in read[1:]] == texts


class Unordered(Loop):
    """Calls two tools, and sends their results in both orders."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        _, reply = await ask(client, endpoint, [user("?")], tools=tools)
        said = reply["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]}
            for call in said["tool_calls"]
        ]
        for order in (results, results[::-1]):
            await ask(client, endpoint, [user("?"), said, *order], tools=tools)


def test_the_journal_and_the_policy_get_results_in_the_order_of_the_calls() -> None:
    calls = "".join(
        f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'city': city}})}</tool_call>" for city in ("Oslo", "Rome")
    )
    played = play(Unordered, [calls, "one", "two"])
    _, first, second = turns(played)
    assert [json.loads(message["content"])["city"] for message in first.messages] == ["Oslo", "Rome"]
    assert first.messages == second.messages
    assert first.context_ids == second.context_ids[-len(first.context_ids) :]


ORDERS = itertools.cycle([1, -1, -1])


class Racing(Stable):
    """Sends results in an order that differs from run to run."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        asked, said, *results = chat_body(["?", ("a", "b"), {"a": "1", "b": "2"}])["messages"]
        await ask(client, endpoint, [asked, said, *results[:: next(ORDERS)]])


def test_a_program_replays_in_whatever_order_its_tools_end() -> None:
    report = check_environment(Racing)
    assert (report.findings, report.figures["resume_class"]) == ([], "replay")


def test_rows_of_a_data_set_are_ordered_by_their_ids() -> None:
    messages = chat_body(["?", ("a", "b"), {"b": "2", "a": "1"}])["messages"]
    assert [message.content for message in read_messages(messages, "row")[2:]] == ["1", "2"]
    with pytest.raises(EnvironmentDefinitionError, match=r"row: .*'b'"):
        read_messages(messages[:2] + messages[3:], "row")
    written = [
        {"role": "assistant", "content": "f()"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    assert [message.content for message in read_messages(written, "row")] == ["f()", "1", "2"]
