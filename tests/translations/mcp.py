"""Servers of the Model Context Protocol (2025-11-25): their tools and results, and the arguments that reach them."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import agentrl
from agentrl.journal.entries import EffectEntry, ToolEntry
from agentrl_mcp import MCPServer
from agentrl_mcp import servers as mcp
from tests.translations.rows import Row, seen
from tests.unit.episodes import play

SERVER = """
import json, sys
given = json.load(open(sys.argv[1]))
for line in sys.stdin:
    asked = json.loads(line)
    parameters = asked.get("params") or {}
    if asked.get("method") == "initialize":
        answer = {"result": {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}},
                             "serverInfo": {"name": "raw", "version": "1"}}}
    elif asked.get("method") == "tools/list":
        number = int(parameters.get("cursor", 0))
        more = {"nextCursor": str(number + 1)} if number + 1 < len(given["pages"]) else {}
        answer = {"result": {"tools": given["pages"][number], **more}}
    elif asked.get("method") == "tools/call":
        with open(sys.argv[2], "a") as file:
            file.write(json.dumps([parameters["name"], parameters["arguments"]]) + "\\n")
        answer = given["answer"]
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


def translate(given: dict[str, Any]) -> tuple[Any, Any]:
    """Play a call of the tool; the grader's part is the call that reaches the server.

    With `offered`, the policy's part is the list of tools."""
    answer = given.get("answer", {"content": [{"type": "text", "text": "ok"}]})
    answer = answer if "error" in answer else {"result": answer}
    with tempfile.TemporaryDirectory() as directory:
        program, file, calls = (Path(directory) / name for name in ("server.py", "given.json", "calls.jsonl"))
        program.write_text(SERVER)
        file.write_text(json.dumps({"pages": given["pages"], "answer": answer}))
        server = MCPServer(
            command=[sys.executable, str(program), str(file), str(calls)], tools=given.get("tools", ()), timeout_s=20
        )

        class Desk(agentrl.ToolEnvironment):
            """A desk."""

            mcp_servers = (server,)

            def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
                return 1.0

            @classmethod
            def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
                return [agentrl.Task(id="1", data={"question": "What?"})]

        call = {"name": given.get("call", "look"), "arguments": given.get("arguments", {})}
        replies = [f"<tool_call>{json.dumps(call)}</tool_call>", "done"]
        played = play(Desk, replies, max_context=1 << 16)
        seen(played)
        called = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    if "offered" in given:
        (listed,) = [entry.value for entry in played.entries if isinstance(entry, EffectEntry)]
        return [[tool["name"], tool["description"], tool["parameters"]] for tool in listed], None
    return [entry.observation for entry in played.entries if isinstance(entry, ToolEntry)], called


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose what is neither text nor a resource."""
    convert = mcp._text_of_part
    with mock.patch.object(mcp, "_text_of_part", lambda part: convert(part) if hasattr(part, "text") else ""):
        yield


OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
LOOK = {"name": "look", "description": "Look.", "inputSchema": OBJECT}


def result(name: str, sees: str, *content: Any, **more: Any) -> Row:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    given = {"pages": [[LOOK]], "answer": {"content": parts, **more}}
    return Row(name=name, input=given, sees=[sees], grader=[["look", {}]])


def error(name: str, sees: str, message: str, **more: Any) -> Row:
    given = {"pages": [[LOOK]], "answer": {"error": {"code": -32602, "message": message, **more}}}
    return Row(name=name, input=given, sees=[f"error: MCPToolError: {sees}"], grader=[["look", {}]])


def arguments(row: str, schema: Any, /, *, sees: Any = "ok", **values: Any) -> Row:
    look = {**LOOK, "inputSchema": {**OBJECT, "properties": schema}}
    given = {"pages": [[look]], "arguments": values}
    return Row(name=row, input=given, sees=[sees], grader=[["look", values]] if sees == "ok" else [])


def offered(name: str, sees: Any, *pages: Any, **given: Any) -> Row:
    return Row(name=name, input={"pages": [*pages], "offered": True, **given}, sees=sees)


def refused(name: str, words: str, *tools: Any, **given: Any) -> Row:
    return Row(name=name, input={"pages": [[*tools]], **given}, refused=words)


def resource(**contents: Any) -> dict[str, Any]:
    return {"type": "resource", "resource": {"uri": "file:///a", **contents}}


LINK = {"type": "resource_link", "uri": "file:///c.txt", "name": "c.txt"}
DETAILED = {
    "type": "object",
    "properties": {
        "at": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "description": "Points."},
        "kind": {"enum": ["a", None, 3], "default": None},
    },
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
BEYOND = f"error: arguments are not valid: the integer {2**64} is beyond 64 bits; write a smaller one"
ROWS = [
    result("text", "ok", "ok"),
    result("two texts", "one\ntwo", "one", "two"),
    result("no text", "", ""),
    result("text of all scripts", "得 😀 é\n\ttab", "得 😀 é\n\ttab"),
    result("text that looks like JSON", '{"a": [1, null]}', '{"a": [1, null]}'),
    result("text that looks like a call", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    result("nothing", ""),
    result("an image", "[image, left out]", {"type": "image", "data": "AAAA", "mimeType": "image/png"}),
    result("sound", "a\n[audio, left out]", "a", {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}),
    result(
        "a resource's text", "[resource file:///a]\nthe content", resource(mimeType="text/plain", text="the content")
    ),
    result("a resource without a kind", "[resource file:///a]\nthe content", resource(text="the content")),
    result("a resource without text", "[resource file:///a]\n", resource(text="")),
    result(
        "a resource's bytes", "[resource file:///a, image/png, left out]", resource(mimeType="image/png", blob="AAAA")
    ),
    result("bytes without a kind", "[resource file:///a, bytes, left out]", resource(blob="AAAA")),
    result("a link", "[resource link file:///c.txt, c.txt]", LINK),
    result(
        "a link with a description",
        "[resource link file:///c.txt, c.txt: the third]",
        {**LINK, "description": "the third"},
    ),
    result("structured", '{"path": "a.txt"}', structuredContent={"path": "a.txt"}),
    result("structured, and as text", '{"n": 5}', '{"n": 5}', structuredContent={"n": 5}),
    result("a structured number, and as text", "5", "5", structuredContent={"result": 5}),
    result("a structured list, a text each", "a\nb", "a", "b", structuredContent={"result": ["a", "b"]}),
    result("structured truth, as Python writes it", "True", "True", structuredContent={"result": True}),
    result(
        "structured, and summarized as text",
        'found 2 rows in 1 s\n{"rows": [{"a": 1, "b": 2}, {"a": 2, "b": 1}]}',
        "found 2 rows in 1 s",
        structuredContent={"rows": [{"a": 1, "b": 2}, {"a": 2, "b": 1}]},
    ),
    result(
        "a structured number, and its digits in a text",
        'changed by 5\n{"delta": -5}',
        "changed by 5",
        structuredContent={"delta": -5},
    ),
    result(
        "a structured list, and its members in one text",
        'a b\n{"result": ["a", "b"]}',
        "a b",
        structuredContent={"result": ["a", "b"]},
    ),
    result(
        "structured truth, and a number as text", '{"n": 1}\n{"n": true}', '{"n": 1}', structuredContent={"n": True}
    ),
    result(
        "structured, and as indented text in another order",
        '{\n  "b": 2,\n  "a": [1.5]\n}',
        '{\n  "b": 2,\n  "a": [1.5]\n}',
        structuredContent={"a": [1.5], "b": 2},
    ),
    result("a structured list of one, a text each", "a", "a", structuredContent={"result": ["a"]}),
    result(
        "structured beside an image",
        '[image, left out]\n{"width": 640}',
        {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        structuredContent={"width": 640},
    ),
    result(
        "a part for the user",
        "shown",
        {"type": "text", "text": "shown", "annotations": {"audience": ["user"], "priority": 0.1}},
    ),
    result("an error of the tool", "error: MCPToolError: no such file", "no such file", isError=True),
    result(
        "an error with a resource",
        "error: MCPToolError: failed\n[resource file:///a]\nthe log",
        "failed",
        resource(text="the log"),
        isError=True,
    ),
    result("an error without text", 'error: MCPToolError: {"code": 3}', structuredContent={"code": 3}, isError=True),
    error("an error of the protocol", "MCPError: Invalid params", "Invalid params"),
    error(
        "an error with data", 'MCPError: Invalid params: {"field": "path"}', "Invalid params", data={"field": "path"}
    ),
    error(
        "an error with text as data",
        'MCPError: Invalid params: "path is missing"',
        "Invalid params",
        data="path is missing",
    ),
    arguments("no arguments", {}),
    arguments("text of all scripts as argument", {"q": {"type": "string"}}, q='得 😀 " \\ \n é'),
    arguments("null", {"q": {"type": ["string", "null"]}}, q=None),
    arguments("a large number", {"n": {"type": "integer"}}, n=2**63 - 1),
    arguments("a number beyond 64 bits", {"n": {"type": "integer"}}, sees=BEYOND, n=2**64),
    arguments("numbers", {"n": {"type": "array"}}, n=[0, -0.5, 1.0, 1e-300, 2**53 + 1]),
    arguments("nested", {"o": {"type": "object"}}, o={"a": [{"b": None}, []], "": {"c": True}}),
    arguments("an argument that the schema does not name", {}, extra="kept"),
    arguments(
        "names of our own methods",
        {"self": {"type": "string"}, "name": {"type": "string"}},
        self="a",
        name="b",
        arguments=1,
    ),
    arguments(
        "a text for a list", {"l": {"type": "array"}}, sees="error: l: '[\"a\"]' is not of type 'array'", l='["a"]'
    ),
    offered("a tool", [["look", "Look.", OBJECT]], [LOOK]),
    offered("a tool without description", [["look", "", OBJECT]], [{"name": "look", "inputSchema": OBJECT}]),
    offered("a detailed schema", [["look", "Look.", DETAILED]], [{**LOOK, "inputSchema": DETAILED}]),
    offered(
        "a schema of draft-07",
        [["look", "Look.", {**OBJECT, "$schema": "http://json-schema.org/draft-07/schema#"}]],
        [{**LOOK, "inputSchema": {**OBJECT, "$schema": "http://json-schema.org/draft-07/schema#"}}],
    ),
    offered(
        "pages",
        [["look", "Look.", OBJECT], ["b", "", OBJECT], ["c", "", OBJECT]],
        [LOOK],
        [{"name": "b", "inputSchema": OBJECT}],
        [{"name": "c", "inputSchema": OBJECT}],
    ),
    offered(
        "selected tools", [["look", "Look.", OBJECT]], [LOOK, {"name": "b c", "inputSchema": OBJECT}], tools=["look"]
    ),
    offered(
        "a selected tool on the second page",
        [["look", "Look.", OBJECT]],
        [{"name": "b", "inputSchema": OBJECT}],
        [LOOK],
        tools=["look"],
    ),
    offered(
        "what clients show to users",
        [["look", "Look.", OBJECT]],
        [{**LOOK, "title": "Look", "annotations": {"readOnlyHint": True}, "_meta": {"a": 1}, "outputSchema": OBJECT}],
    ),
    refused("a name with a space", "a tool's name is 'look up'", {**LOOK, "name": "look up"}),
    refused("two tools of a name", "it lists tool 'look' twice", LOOK, LOOK),
    refused(
        "a schema that is none",
        "tool 'look' has no valid JSON schema",
        {**LOOK, "inputSchema": {**OBJECT, "properties": {"a": {"type": "odd"}}}},
    ),
    refused("a missing tool", "it has no tool 'find'; it has look", LOOK, tools=["find"]),
]
