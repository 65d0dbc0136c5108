"""Requests of OpenAI's Chat Completions, as its reference and the clients of agent libraries write them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from agentrl.gateway import chat_completions
from agentrl.gateway.calls import ChatProtocol
from agentrl.gateway.chat_completions import ChatCompletionsProtocol
from tests.translations.rows import Row

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
USER = {"role": "user", "content": "Go."}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


def request_parts(protocol: ChatProtocol, body: Any) -> tuple[Any, Any]:
    """Return what the model reads of a request: messages and tools; and what decides about its reply."""
    request = protocol.read({"model": "m", **body})
    sees = [
        [message.role, message.content, *([call.name, call.arguments] for call in message.tool_calls)]
        + ([f"answer of {message.name}"] if message.name else [])
        for message in request.messages
    ]
    tools = [[tool.name, tool.description, tool.parameters] for tool in request.tools]
    limits = {"max_tokens": request.max_tokens, "stop": list(request.stop), "n": request.n if request.n > 1 else None}
    decides = dict(request.demands) | dict(request.sampling) | {name: value for name, value in limits.items() if value}
    if request.tool_choice.mode != "auto":
        decides["tool_choice"] = request.tool_choice.tool or request.tool_choice.mode
    if request.reply_form.kind != "text":
        decides["response_format"] = [part for part in request.reply_form if part]
    return sees + tools, decides


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    """A message with one call."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def answer(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": content}


def row(name: str, messages: Any, sees: Any = None, grader: Any = None, refused: str = "", **body: Any) -> Row:
    return Row(name=name, input={"messages": messages, **body}, sees=sees, grader=grader or {}, refused=refused)


ROWS = [
    row("text", [{"role": "user", "content": "Hi."}], [["user", "Hi."]]),
    row(
        "system and developer",
        [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "In French."}, USER],
        [["system", "Be brief."], ["system", "In French."], ["user", "Go."]],
    ),
    row(
        "parts",
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
        [["user", "one\ntwo"]],
    ),
    row("image", [{"role": "user", "content": [IMAGE]}], refused="messages[0].content has a part of type 'image_url'"),
    row(
        "audio part",
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        refused="messages[0].content has a part of type 'input_audio'",
    ),
    row(
        "file part",
        [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}],
        refused="messages[0].content has a part of type 'file'",
    ),
    row("spoken reply", [{"role": "assistant", "audio": {"id": "a"}}, USER], refused="messages[0] has audio"),
    row("name", [{"role": "user", "name": "critic", "content": "No."}], [["user", "critic: No."]]),
    row("name of the role", [{"role": "user", "name": "user", "content": "No."}], [["user", "No."]]),
    row(
        "names in the model's role",
        [
            {"role": "assistant", "name": "coder", "content": "a"},
            {"role": "assistant", "name": "critic", "content": "b"},
            USER,
        ],
        [["assistant", "a"], ["assistant", "b"], ["user", "Go."]],
        {"name": ["coder", "critic"]},
    ),
    row(
        "call and answer",
        [USER, called('{"at": 1}'), answer("a wall")],
        [["user", "Go."], ["assistant", "", ["look", {"at": 1}]], ["tool", "a wall", "answer of look"]],
    ),
    row(
        "call without arguments",
        [USER, called(""), answer("a wall")],
        [["user", "Go."], ["assistant", "", ["look", {}]], ["tool", "a wall", "answer of look"]],
    ),
    row(
        "call with broken arguments",
        [USER, called('{"at": '), answer("error: not JSON")],
        [["user", "Go."], ["assistant", "", ["look", '{"at": ']], ["tool", "error: not JSON", "answer of look"]],
    ),
    row(
        "text beside a call",
        [USER, called("{}", content="Let me see."), answer("a wall")],
        [["user", "Go."], ["assistant", "Let me see.", ["look", {}]], ["tool", "a wall", "answer of look"]],
    ),
    row(
        "answer in parts",
        [USER, called("{}"), answer([{"type": "text", "text": "a"}, {"type": "text", "text": "wall"}])],
        [["user", "Go."], ["assistant", "", ["look", {}]], ["tool", "a\nwall", "answer of look"]],
    ),
    row("answer with an image", [USER, called("{}"), answer([IMAGE])], refused="has a part of type 'image_url'"),
    row(
        "function call of old",
        [
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"at": 1}'}},
            {"role": "function", "name": "look", "content": "a wall"},
        ],
        [["user", "Go."], ["assistant", "", ["look", {"at": 1}]], ["tool", "a wall", "answer of look"]],
    ),
    row("functions of old", [USER], [["user", "Go."]], {"functions": [{"name": "f"}]}, functions=[{"name": "f"}]),
    row(
        "refusal",
        [{"role": "assistant", "refusal": "I will not."}, USER],
        [["assistant", "I will not."], ["user", "Go."]],
    ),
    row(
        "calls of a user",
        [{"role": "user", "content": "a", "tool_calls": called("{}")["tool_calls"]}],
        refused="messages[0] has calls",
    ),
    row(
        "custom call",
        [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]}, USER],
        refused="a call without a function",
    ),
    row("unknown role", [{"role": "narrator", "content": "a"}], refused="messages[0].role is 'narrator'"),
    row("reply at the end", [USER, {"role": "assistant", "content": "Sure"}], [["user", "Go."], ["assistant", "Sure"]]),
    row("no messages", [], refused="messages: there must be at least one"),
    row("tools", [USER], [["user", "Go."], ["look", "Look.", {"type": "object"}]], tools=[LOOK]),
    row("tool of another type", [USER], tools=[{"type": "web_search"}], refused="a tool of type 'web_search'"),
    row(
        "limits",
        [USER],
        [["user", "Go."]],
        {"max_tokens": 9, "stop": ["a", "b"], "n": 2, "temperature": 0.5, "frequency_penalty": 1.0},
        max_completion_tokens=9,
        stop=["a", "b"],
        n=2,
        temperature=0.5,
        frequency_penalty=1,
    ),
    row(
        "a tool to be called",
        [USER],
        [["user", "Go."], ["look", "Look.", {"type": "object"}]],
        {"tool_choice": "look"},
        tools=[LOOK],
        tool_choice={"type": "function", "function": {"name": "look"}},
    ),
    row(
        "enforced form",
        [USER],
        [["user", "Go."]],
        {"response_format": ["json_object"]},
        response_format={"type": "json_object"},
    ),
    row("null for text", [{"role": "user", "content": None}], refused="messages[0].content is null; it must be text"),
    row("no system text", [{"role": "system"}, USER], refused="messages[0].content is null; it must be text"),
    row("zero for text", [{"role": "user", "content": 0}], refused="messages[0].content must be a list of objects"),
    row("an empty object", [{"role": "user", "content": {}}], refused="messages[0].content must be a list of objects"),
    row("empty text", [{"role": "user", "content": ""}], [["user", ""]]),
    row(
        "empty answer",
        [USER, called("{}"), answer(None)],
        [["user", "Go."], ["assistant", "", ["look", {}]], ["tool", "", "answer of look"]],
    ),
    row("a number for text", [{"role": "user", "content": 7}], refused="messages[0].content must be a list of objects"),
]


def translate(body: Any) -> tuple[Any, Any]:
    return request_parts(ChatCompletionsProtocol(), body)


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """The text of a message is read from its first part only."""
    with mock.patch.object(
        chat_completions, "content_text", lambda value, location: value if isinstance(value, str) else ""
    ):
        yield
