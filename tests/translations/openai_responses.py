"""Requests of OpenAI's Responses API, as its reference and its clients write them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from agentrl.gateway import openai_responses
from agentrl.gateway.openai_responses import OpenAIResponsesProtocol
from tests.translations.chat_completions import request_parts
from tests.translations.rows import Row

USER = {"role": "user", "content": "Go."}
SEEN = ["user", "Go."]
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": 1}'}
CALLED = ["assistant", "", ["look", {"at": 1}]]


def output(content: Any, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": "c", "output": content}


def row(name: str, items: Any, sees: Any = None, grader: Any = None, refused: str = "", **body: Any) -> Row:
    return Row(name=name, input={"input": items, **body}, sees=sees, grader=grader or {}, refused=refused)


def said(*texts: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "content": parts}


ROWS = [
    row("text", "Go.", [SEEN]),
    row("null for text", [{"role": "user", "content": None}], refused="input[0].content is null; it must be text"),
    row("empty output", [USER, CALL, output(None)], [SEEN, CALLED, ["tool", "", "answer of look"]]),
    row("instructions", "Go.", [["system", "Be brief."], SEEN], instructions="Be brief."),
    row("message", [{"type": "message", **USER}], [SEEN]),
    row("developer", [{"role": "developer", "content": "Be brief."}, USER], [["system", "Be brief."], SEEN]),
    row(
        "parts",
        [{"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]}],
        [["user", "one\ntwo"]],
    ),
    row(
        "image",
        [{"role": "user", "content": [{"type": "input_image"}]}],
        refused="input[0] has a part of type 'input_image'",
    ),
    row(
        "file",
        [{"role": "user", "content": [{"type": "input_file"}]}],
        refused="input[0] has a part of type 'input_file'",
    ),
    row("reply", [USER, said("a", "b"), USER], [SEEN, ["assistant", "a\nb"], SEEN]),
    row("call and output", [USER, CALL, output("a wall")], [SEEN, CALLED, ["tool", "a wall", "answer of look"]]),
    row(
        "call without arguments",
        [USER, {**CALL, "arguments": ""}, output("a wall")],
        [SEEN, ["assistant", "", ["look", {}]], ["tool", "a wall", "answer of look"]],
    ),
    row(
        "text beside a call",
        [USER, said("Let me see."), CALL, output("a wall")],
        [SEEN, ["assistant", "Let me see.", ["look", {"at": 1}]], ["tool", "a wall", "answer of look"]],
    ),
    row(
        "reasoning beside a call",
        [USER, {"type": "reasoning", "id": "r", "summary": []}, CALL, output("a wall")],
        [SEEN, CALLED, ["tool", "a wall", "answer of look"]],
    ),
    row(
        "output in parts",
        [USER, CALL, output([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "wall"}])],
        [SEEN, CALLED, ["tool", "a\nwall", "answer of look"]],
    ),
    row(
        "image as output",
        [USER, CALL, output([{"type": "input_image"}])],
        refused="input[2].output has a part of type 'input_image'",
    ),
    row(
        "custom call",
        [
            USER,
            {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": "ls"},
            output("a", "custom_tool_call_output"),
        ],
        [SEEN, ["assistant", "", ["run", {"input": "ls"}]], ["tool", "a", "answer of run"]],
    ),
    row(
        "call of a namespace",
        [USER, {**CALL, "namespace": "room"}, output("a")],
        [SEEN, ["assistant", "", ["room.look", {"at": 1}]], ["tool", "a", "answer of room.look"]],
    ),
    row("summary", [{"type": "compaction", "encrypted_content": "So far."}, USER], [["user", "So far."], SEEN]),
    row("reference", [{"type": "item_reference", "id": "x"}], refused="input[0] is of type 'item_reference'"),
    row(
        "search", [USER, {"type": "web_search_call", "id": "w"}, USER], refused="input[1] is of type 'web_search_call'"
    ),
    row("stored", "Go.", previous_response_id="r", refused="previous_response_id is not supported"),
    row("stored prompt", "Go.", prompt={"id": "p"}, refused="prompt is not supported"),
    row("reply at the end", [USER, said("Sure")], [SEEN, ["assistant", "Sure"]]),
    row(
        "tools",
        "Go.",
        [SEEN, ["look", "Look.", {"type": "object"}], ["room.go", "Go.", {"type": "object"}]],
        tools=[
            {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}},
            {
                "type": "namespace",
                "name": "room",
                "tools": [{"type": "function", "name": "go", "description": "Go.", "parameters": {"type": "object"}}],
            },
        ],
    ),
    row("tool of the server", "Go.", tools=[{"type": "web_search"}], refused="a tool of type 'web_search'"),
    row("limits", "Go.", [SEEN], {"max_tokens": 9, "temperature": 0.5}, max_output_tokens=9, temperature=0.5),
    row(
        "enforced form",
        "Go.",
        [SEEN],
        {"response_format": ["json_schema", '{"type": "object"}']},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    ),
]


def translate(body: Any) -> tuple[Any, Any]:
    return request_parts(OpenAIResponsesProtocol(), body)


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Instructions are left out."""
    read = openai_responses._messages
    with mock.patch.object(openai_responses, "_messages", lambda body: read({**body, "instructions": None})):
        yield
