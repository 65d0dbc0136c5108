"""Rows of NeMo-Gym 0.4, as its resources servers' examples write them, and what the server's `verify` gets."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from aiohttp import web

from agentrl_formats import servers
from agentrl_formats.servers import NemoGym
from tests.support.served import served
from tests.translations.rows import Row, seen
from tests.unit.episodes import play

PYTHON = "nemo/bin/python"
VALIDATE = """
import json, sys
from nemo_gym.base_resources_server import BaseVerifyRequest
body = BaseVerifyRequest.model_validate(json.load(sys.stdin))
print(json.dumps([item.type for item in body.response.output]))
"""


def application(posted: list[list[Any]]) -> web.Application:
    """A resources server that notes what it is sent."""

    async def post(request: web.Request) -> web.Response:
        body = await request.json()
        posted.append([request.path, body])
        is_verified = request.path == "/verify"
        return web.json_response({**body, "reward": 1.0} if is_verified else {"weather": "cold"})

    made = web.Application()
    made.router.add_post("/{path:.*}", post)
    return made


def translate(input: dict[str, Any]) -> tuple[Any, Any]:
    """Play the row; the grader's part is the output that `verify` gets, and the row's own fields."""
    posted: list[list[Any]] = []
    row = {"responses_create_params": input["parameters"], "expected": 5, "meta": {"level": ["a", None]}}
    with tempfile.TemporaryDirectory() as directory, served(lambda: application(posted)) as url:
        file = Path(directory) / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        [task] = NemoGym.tasks("train", url=url, file=str(file), held_out=0.0)  # type: ignore[misc]
        if "offered" in input:
            return [
                [tool.name, tool.description, tool.parameters] for tool in servers._NemoSession(url, row)._request.tools
            ], None
        played = play(NemoGym, input.get("replies", ["done"]), data=dict(task.data))
    sees = seen(played)
    paths = [path for path, _ in posted]
    verified = posted[-1][1]
    assert (paths[0], paths[-1], posted[0][1]) == ("/seed_session", "/verify", row)
    assert {name: verified[name] for name in row} == row
    if "valid" in input:
        python = Path(os.environ["AGENTRL_FORMATS"]) / PYTHON
        command = [str(python), "-c", VALIDATE]
        done = subprocess.run(command, input=json.dumps(verified), capture_output=True, text=True, check=True)
        return sees, json.loads(done.stdout.splitlines()[-1])
    return sees, [compact(item) for item in verified["response"]["output"]]


def compact(item: dict[str, Any]) -> list[str]:
    """Return the parts of an output item that a grader reads."""
    match item["type"]:
        case "message":
            return [item["type"], *(part["text"] for part in item["content"])]
        case "function_call":
            return [item["type"], item["name"], item["arguments"]]
        case kind:
            return [kind, item["output"]]


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose the instructions."""
    read = servers._read_parameters

    def without(parameters: dict[str, Any]) -> Any:
        return read({name: value for name, value in parameters.items() if name != "instructions"})

    with mock.patch.object(servers, "_read_parameters", without):
        yield


USER = {"role": "user", "content": "Weather?"}
SAY = ["user", "Weather?"]
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Look it up.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
HISTORY = [
    USER,
    {
        "type": "message",
        "id": "m1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Bern"}'},
    {"type": "function_call_output", "call_id": "c1", "output": '{"weather": "warm"}'},
    {"role": "assistant", "content": "Warm."},
    {"role": "user", "content": "And Rome?"},
]
DONE = [["message", "done"]]
CALLED = [["function_call", "get_weather", '{"city": "Rome"}'], ["function_call_output", '{"weather": "cold"}']]


def row(name: str, sees: Any, grader: Any = DONE, replies: Any = ("done",), **parameters: Any) -> Row:
    return Row(name=name, input={"parameters": parameters, "replies": list(replies)}, sees=sees, grader=grader)


def refused(name: str, words: str, **parameters: Any) -> Row:
    return Row(name=name, input={"parameters": {"input": [USER], **parameters}}, refused=f"line 1: {words}")


P = "responses_create_params."
ROWS = [
    row("text", [SAY], input="Weather?"),
    row("a message", [SAY], input=[USER]),
    row(
        "typed messages",
        [["system", "Be brief."], SAY],
        input=[{"type": "message", "role": "developer", "content": "Be brief."}, {"type": "message", **USER}],
    ),
    row(
        "parts",
        [["user", "Weather?\nIn Rome?"]],
        input=[
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Weather?"}, {"type": "input_text", "text": "In Rome?"}],
            }
        ],
    ),
    row("instructions", [["system", "Answer in French."], SAY], input=[USER], instructions="Answer in French."),
    row(
        "instructions and a system message",
        [["system", "Answer in French."], ["system", "Be brief."], SAY],
        input=[{"role": "system", "content": "Be brief."}, USER],
        instructions="Answer in French.",
    ),
    row(
        "history with a call",
        [
            SAY,
            ["assistant", "Let me see."],
            ["tool", '{"weather": "warm"}'],
            ["assistant", "Warm."],
            ["user", "And Rome?"],
        ],
        input=HISTORY,
        tools=[TOOL],
    ),
    row(
        "worked example",
        [["user", "1"], ["assistant", "one"], ["user", "2"]],
        input=[
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "2"},
        ],
    ),
    row("a call", [SAY, ["tool", '{"weather": "cold"}']], [*CALLED, *DONE], [CALL, "done"], input=[USER], tools=[TOOL]),
    row(
        "text beside a call",
        [SAY, ["tool", '{"weather": "cold"}']],
        [["message", "I will look."], *CALLED, *DONE],
        [f"I will look.{CALL}", "done"],
        input=[USER],
        tools=[TOOL],
    ),
    row(
        "two calls in a message",
        [SAY, *[["tool", '{"weather": "cold"}']] * 2],
        [*CALLED, *CALLED, *DONE],
        [CALL + CALL, "done"],
        input=[USER],
        tools=[TOOL],
    ),
    row(
        "an unknown tool",
        [SAY, ["tool", '{"error": "there is no tool \'verify\'"}']],
        [
            ["function_call", "verify", "{}"],
            ["function_call_output", '{"error": "there is no tool \'verify\'"}'],
            *DONE,
        ],
        ['<tool_call>{"name": "verify", "arguments": {}}</tool_call>', "done"],
        input=[USER],
        tools=[TOOL],
    ),
    row(
        "null fields, as in recorded rollouts",
        [SAY],
        input=[{"type": "message", **USER}],
        background=None,
        include=None,
        instructions=None,
        max_output_tokens=None,
        max_tool_calls=None,
        metadata=None,
        previous_response_id=None,
        tools=[],
        tool_choice="auto",
        text=None,
        parallel_tool_calls=True,
        user=None,
        stream=None,
    ),
    row(
        "sampling of the row",
        [SAY],
        input=[USER],
        temperature=1.0,
        top_p=0.95,
        max_output_tokens=50,
        parallel_tool_calls=False,
    ),
    Row(
        name="a tool",
        input={"parameters": {"input": [USER], "tools": [TOOL]}, "offered": True},
        sees=[["get_weather", "Look it up.", TOOL["parameters"]]],
    ),
    Row(
        name="a tool without parameters",
        input={
            "parameters": {
                "input": [USER],
                "tools": [{"type": "function", "name": "now", "parameters": None, "description": None}],
            },
            "offered": True,
        },
        sees=[["now", "", {"type": "object", "properties": {}}]],
    ),
    Row(
        name="the package reads what verify gets",
        needs=PYTHON,
        input={
            "parameters": {"input": HISTORY, "tools": [TOOL]},
            "replies": [f"I will look.{CALL}", "done"],
            "valid": True,
        },
        sees=[
            SAY,
            ["assistant", "Let me see."],
            ["tool", '{"weather": "warm"}'],
            ["assistant", "Warm."],
            ["user", "And Rome?"],
            ["tool", '{"weather": "cold"}'],
        ],
        grader=["message", "function_call", "function_call_output", "message"],
    ),
    refused(
        "an image",
        f"{P}input[0] has a part of type 'input_image'",
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "auto"}]}],
    ),
    refused(
        "a file",
        f"{P}input[0] has a part of type 'input_file'",
        input=[{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}],
    ),
    refused(
        "another item",
        f"{P}input[1] is of type 'web_search_call'",
        input=[USER, {"type": "web_search_call", "id": "w"}],
    ),
    refused(
        "reasoning", f"{P}input has an item of type 'reasoning'", input=[{"type": "reasoning", "summary": []}, USER]
    ),
    refused(
        "null for text", f"{P}input[0].content is null; it must be text", input=[{"role": "user", "content": None}]
    ),
    refused("another role", f"{P}input[0].role is 'critic'", input=[{"role": "critic", "content": "no"}]),
    refused("no messages, as for an agent of its own", f"{P}input: there must be at least one message", input=[]),
    refused("a number as input", f"{P}input must be a list of objects", input=5),
    refused("a tool of a server", f"{P}a tool of type 'web_search'", tools=[{"type": "web_search"}]),
    refused("a custom tool", f"{P}tools: a tool of type 'custom'", tools=[{"type": "custom", "name": "c"}]),
    refused("a tool named as a path", "a row is a JSON object", tools=[{**TOOL, "name": "verify"}]),
    refused("a forced tool", f"{P}tool_choice = 'required' is not supported", tool_choice="required"),
    refused("a form of text", f"{P}text = ", text={"format": {"type": "json_object"}}),
    refused("a limit of calls", f"{P}max_tool_calls = 3 is not supported", max_tool_calls=3),
    refused("a stored conversation", f"{P}previous_response_id is not supported", previous_response_id="r"),
    refused("an unknown field", f"{P}stop = ['x'] is not supported", stop=["x"]),
]
