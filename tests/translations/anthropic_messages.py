"""Requests of Anthropic's Messages API, as its reference and its clients write them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from agentrl.gateway import anthropic_messages
from agentrl.gateway.anthropic_messages import AnthropicMessagesProtocol
from tests.translations.chat_completions import request_parts
from tests.translations.rows import Row

USER = {"role": "user", "content": "Go."}
CALL = {"type": "tool_use", "id": "c", "name": "look", "input": {"at": 1}}
SEEN = ["user", "Go."]
CALLED = ["assistant", "", ["look", {"at": 1}]]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c", "content": content, **more}


def row(name: str, messages: Any, sees: Any = None, grader: Any = None, refused: str = "", **body: Any) -> Row:
    return Row(name=name, input={"messages": messages, **body}, sees=sees, grader=grader or {}, refused=refused)


def answered(*blocks: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": list(blocks)}]


ROWS = [
    row("text", [USER], [SEEN]),
    row("system", [USER], [["system", "Be brief."], SEEN], system="Be brief."),
    row("system in blocks", [USER], [["system", "Be\nbrief."], SEEN], system=[text("Be"), text("brief.")]),
    row("system inside", [USER, {"role": "system", "content": "Now."}], [SEEN, ["system", "Now."]]),
    row("blocks", [{"role": "user", "content": [text("one"), text("two")]}], [["user", "one\ntwo"]]),
    row(
        "cached block",
        [{"role": "user", "content": [{**text("one"), "cache_control": {"type": "ephemeral"}}]}],
        [["user", "one"]],
    ),
    row("image", [{"role": "user", "content": [{"type": "image", "source": {}}]}], refused="a block of type 'image'"),
    row(
        "document",
        [{"role": "user", "content": [{"type": "document", "source": {}}]}],
        refused="messages[0].content has a block of type 'document'",
    ),
    row("call and result", answered(result("a wall")), [SEEN, CALLED, ["tool", "a wall", "answer of look"]]),
    row(
        "result in blocks",
        answered(result([text("a"), text("wall")])),
        [SEEN, CALLED, ["tool", "a\nwall", "answer of look"]],
    ),
    row("empty result", answered(result(None)), [SEEN, CALLED, ["tool", "", "answer of look"]]),
    row(
        "failed result",
        answered(result("no lamp", is_error=True)),
        [SEEN, CALLED, ["tool", "error: no lamp", "answer of look"]],
    ),
    row(
        "result that says that it failed",
        answered(result("<tool_use_error>no lamp</tool_use_error>", is_error=True)),
        [SEEN, CALLED, ["tool", "<tool_use_error>no lamp</tool_use_error>", "answer of look"]],
    ),
    row("image in a result", answered(result([{"type": "image", "source": {}}])), refused="a block of type 'image'"),
    row(
        "text beside a result",
        answered(result("a wall"), text("Hurry.")),
        [SEEN, CALLED, ["tool", "a wall", "answer of look"], ["user", "Hurry."]],
    ),
    row(
        "text beside a call",
        [
            USER,
            {"role": "assistant", "content": [text("Let me see."), CALL]},
            {"role": "user", "content": [result("a")]},
        ],
        [SEEN, ["assistant", "Let me see.", ["look", {"at": 1}]], ["tool", "a", "answer of look"]],
    ),
    row(
        "arguments that are no object",
        [USER, {"role": "assistant", "content": [{**CALL, "input": "a"}]}, USER],
        refused="messages[1].content: input is 'a', which is not an object",
    ),
    row(
        "server tool",
        [USER, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]}, USER],
        refused="messages[1].content has a block of type 'server_tool_use'",
    ),
    row(
        "prefill", [USER, {"role": "assistant", "content": "{"}], refused="a reply of the assistant cannot be continued"
    ),
    row("unknown role", [{"role": "narrator", "content": "a"}], refused="messages[0].role is 'narrator'"),
    row(
        "tools",
        [USER],
        [SEEN, ["look", "Look.", {"type": "object"}]],
        tools=[{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}],
    ),
    row(
        "tool of the server",
        [USER],
        tools=[{"type": "bash_20250124", "name": "bash"}],
        refused="a tool of type 'bash_20250124'",
    ),
    row("thread", [USER], thread={"type": "create"}, refused="thread is not supported"),
    row(
        "limits",
        [USER],
        [SEEN],
        {"max_tokens": 9, "stop": ["a"], "temperature": 0.5, "top_k": 4},
        max_tokens=9,
        stop_sequences=["a"],
        temperature=0.5,
        top_k=4,
    ),
    row(
        "enforced form",
        [USER],
        [SEEN],
        {"response_format": ["json_schema", '{"type": "object"}']},
        output_format={"type": "json_schema", "schema": {"type": "object"}},
    ),
]


def translate(body: Any) -> tuple[Any, Any]:
    return request_parts(AnthropicMessagesProtocol(), body)


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Texts beside the results of tools are left out."""
    read = anthropic_messages._user_messages
    with mock.patch.object(
        anthropic_messages,
        "_user_messages",
        lambda *place: [each for each in read(*place) if each.role == "tool"] or read(*place),
    ):
        yield
