"""Tools behind MCP servers: real servers over standard streams and HTTP, good ones and hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from aiohttp import web

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError
from agentrl.core.records import ToolSpec
from agentrl.environment.tools import ServerTool
from agentrl.journal.entries import EffectEntry, ToolEntry
from agentrl.testing.check import check_environment
from agentrl.testing.execution import TIMEOUT_S
from agentrl_mcp import MCPServer
from agentrl_mcp import servers as mcp_module
from agentrl_mcp.servers import MCPConnection, _checked_here
from tests.support.cpu_time import least_cpu_s
from tests.unit.episodes import Played, play

GOOD = """
import os, subprocess, sys, time
from typing import Literal
from mcp.server import MCPServer

server = MCPServer("shop")
open(os.environ["PIDS"], "a").write(f"{os.getpid()}\\n")

@server.tool()
def price(fruit: Literal["pear", "plum"], pieces: int = 1) -> str:
    '''The price of pieces of a fruit.'''
    return str({"pear": 3, "plum": 2}[fruit] * pieces)

@server.tool()
def fail() -> str:
    raise ValueError("no more pears")

@server.tool()
def die() -> str:
    print("out of plums", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def hang() -> str:
    time.sleep(1000)

@server.tool()
def flood() -> str:
    return "x" * 500_000

@server.tool()
def leave() -> str:
    child = subprocess.Popen(["sleep", "1000"])
    open(os.environ["PIDS"], "a").write(f"{child.pid}\\n")
    return "left"

@server.tool()
def secrets() -> str:
    return os.environ.get("A_SECRET", "none")

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""
RAW = """
import json, sys, time
TOOLS = {tools}
for line in sys.stdin:
    asked = json.loads(line)
    method, said = asked.get("method"), None
    if method == "initialize":
        said = {{"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {{"tools": {{}}}},
                 "serverInfo": {{"name": "raw", "version": "1"}}}}
    elif method == "tools/list":
        said = {{"tools": TOOLS}}
        {listing}
    elif method == "tools/call":
        {calling}
        said = {{"content": [{{"type": "text", "text": "ok"}}]}}
    if "id" in asked:
        answer = {{"jsonrpc": "2.0", "id": asked["id"]}}
        answer |= {{"result": said}} if said is not None else {{"error": {{"code": -32601, "message": "no"}}}}
        print(json.dumps(answer), flush=True)
"""
OBJECT = {"type": "object", "properties": {}}


def environment_of(*servers: MCPServer) -> type[agentrl.ToolEnvironment]:
    class Shop(agentrl.ToolEnvironment):
        mcp_servers = servers

        @agentrl.tool
        def own(self) -> str:
            """A tool of the class."""
            return "mine"

        def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
            return 1.0

        @classmethod
        def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
            return [agentrl.Task(id="1", data={"question": "What?"})]

    return Shop


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def observed(played: Played) -> list[tuple[str, str]]:
    return [(entry.outcome, entry.observation) for entry in played.entries if isinstance(entry, ToolEntry)]


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A file in which servers write their ids; all have ended after the test."""
    file = tmp_path / "pids"
    yield file
    for line in file.read_text().split() if file.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(int(line))
            try:
                assert select.select([process], [], [], 10)[0], (
                    f"{line} is still running"
                )  # a killed one takes a moment
            finally:
                os.close(process)


def script(directory: Path, text: str) -> list[str]:
    path = directory / "server.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


def raw(directory: Path, tools: Any, *, listing: str = "pass", calling: str = "pass") -> MCPServer:
    return MCPServer(command=script(directory, RAW.format(tools=repr(tools), listing=listing, calling=calling)))


@pytest.fixture
def shop(tmp_path: Path, pids: Path) -> MCPServer:
    variables = {"PIDS": str(pids), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return MCPServer(command=script(tmp_path, GOOD), variables=variables, timeout_s=20)


@contextmanager
def over_http(directory: Path, pids: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*script(directory, GOOD), str(port)]
    with subprocess.Popen(command, env={**os.environ, "PIDS": str(pids)}, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                with socket.socket() as trial:
                    if trial.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_tools_are_listed_typed_called_and_journaled(
    shop: MCPServer, tmp_path: Path, pids: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "of this process")
    calls = [
        call("price", fruit="pear", pieces=4),
        call("price", fruit="fig"),
        call("price", fruit="pear", peaces=1) + call("own"),
        call("fail"),
        call("flood"),
        call("secrets") if transport == "stdio" else call("own"),
        call("nothing"),
        "done",
    ]
    if transport == "stdio":
        played = play(environment_of(shop), calls, max_context=400_000)
    else:
        with over_http(tmp_path, pids) as url:
            played = play(environment_of(MCPServer(url=url, timeout_s=20)), calls, max_context=400_000)
    assert played.header.stop_reason == "completed", played.said
    assert "price(fruit, pieces)" in bytes(t for t in played.seen[0] if t < 256).decode()
    (listed,) = [entry for entry in played.entries if isinstance(entry, EffectEntry)]
    assert {tool["name"] for tool in listed.value} >= {"price", "fail", "hang"}
    first, wrong, _, own, failed, flooded, last, unknown = observed(played)
    assert first == ("ok", "12")
    assert wrong[0] == "bad_arguments"
    assert wrong[1].startswith("error: fruit: 'fig' is not one of")
    assert own == ("ok", "mine")
    assert failed[0] == "error"
    assert "Error executing tool fail" in failed[1]
    assert flooded[0] == "ok"
    assert len(flooded[1]) < mcp_module.MAX_RESULT_CHARACTERS + 100
    assert last == ("ok", "none" if transport == "stdio" else "mine"), "keys of this process are not the server's"
    assert unknown[0] == "unknown_tool"
    assert "price" in unknown[1]


def test_a_server_that_dies_or_hangs_is_an_error_that_the_policy_sees(shop: MCPServer, pids: Path) -> None:
    died = play(environment_of(shop), [call("die"), call("price", fruit="pear"), "done"])
    assert died.header.stop_reason == "completed", died.said
    assert [outcome for outcome, _ in observed(died)] == ["error", "error"]
    assert all("out of plums" in text for _, text in observed(died))
    slow = MCPServer(command=shop.command, variables=shop.variables, timeout_s=1.0)
    hung = play(environment_of(slow), [call("hang"), "done"])
    assert [outcome for outcome, _ in observed(hung)] == ["timeout"]


def test_its_children_end_with_the_episode(shop: MCPServer, pids: Path) -> None:
    assert observed(play(environment_of(shop), [call("leave"), "done"])) == [("ok", "left")]
    assert len(pids.read_text().split()) == 2  # and the fixture finds both ended


def nested(levels: int) -> str:
    """Code that lists a tool with a nested schema, which no literal could have."""
    return f"""
        schema = {{"type": "object"}}
        for _ in range({levels}):
            schema = {{"type": "object", "properties": {{"a": schema}}}}
        TOOLS.append({{"name": "a", "description": "", "inputSchema": schema}})"""


TOOL = {"name": "a", "description": "", "inputSchema": OBJECT}
LIES: dict[str, tuple[Any, str, str]] = {
    "twice": ([TOOL, TOOL], "pass", "it lists tool 'a' twice"),
    "clash": ([TOOL | {"name": "own"}], "pass", "'own'"),
    "name": ([TOOL | {"name": "a b"}], "pass", "a tool's name is 'a b'"),
    "schema": ([TOOL | {"inputSchema": {"type": "object", "properties": 7}}], "pass", "ValidationError"),
    "type": (
        [TOOL | {"inputSchema": {"type": "object", "properties": {"a": {"type": "odd"}}}}],
        "pass",
        "has no valid JSON schema: ",
    ),
    "array": ([TOOL | {"inputSchema": {"type": "array"}}], "pass", "ValidationError"),
    "long": ([TOOL | {"description": "x" * 100_000}], "pass", "described in more than 65,536 characters"),
    "many": ([TOOL | {"name": f"a{n}"} for n in range(300)], "pass", "lists more than 256 tools"),
    "deep": ([], nested(150), "the server wrote a message whose data is nested too deeply, as in a schema"),
    "no tools": (7, "pass", "MCP server"),
    "flood": ([], "print('x' * 5_000_000, flush=True)", "a line of more than 4,194,304 bytes"),
    "death": ([], "sys.exit('no licence')", "the server has ended: no licence"),
    "hang": ([], "time.sleep(1000)", "it has not listed its tools within 3 s"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_cannot_be_used_ends_the_episode_by_name(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, listing, told = LIES[lie]
    if lie == "hang":
        monkeypatch.setattr(mcp_module, "START_S", 3.0)
    played = play(environment_of(raw(tmp_path, tools, listing=listing)), ["done"])
    assert played.header.drop_reason == "environment_error"
    assert told in played.said
    assert "server.py" in played.said


ODD: dict[str, list[dict[str, Any]]] = {
    "name": [TOOL | {"name": "b c"}],
    "many": [TOOL | {"name": f"a{n}"} for n in range(300)],
    "twice": [TOOL | {"name": "b"}] * 2,
    "schema": [TOOL | {"name": "b", "inputSchema": {"type": "object", "properties": {"a": {"type": "odd"}}}}],
    "long": [TOOL | {"name": "b", "description": "x" * 100_000}],
    "clash": [TOOL | {"name": "own"}],
}


@pytest.mark.parametrize("oddity", ODD)
def test_only_selected_tools_are_checked(tmp_path: Path, oddity: str) -> None:
    server = raw(tmp_path, [*ODD[oddity], TOOL])
    selected = play(environment_of(MCPServer(command=server.command, tools=["a"])), [call("a"), "done"])
    assert observed(selected) == [("ok", "ok")], selected.said


def test_names_as_the_protocol_allows_them_are_journaled_as_the_server_writes_them(tmp_path: Path) -> None:
    names = ["files.list", "a-b.c_d", "x" * 128]
    played = play(environment_of(raw(tmp_path, [TOOL | {"name": name} for name in names])), [*map(call, names), "done"])
    assert [entry.name for entry in played.entries if isinstance(entry, ToolEntry)] == names, played.said
    assert observed(played) == [("ok", "ok")] * 3


DRAFTS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "tuple of draft-07": ({"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], ["a", "a"]),
    "bound of draft-04": ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, 0.5, 0),
    "open bound of draft-04": ({"type": "number", "maximum": 9, "exclusiveMaximum": False}, 9, 10),
    "tuple of 2020-12": ({"type": "array", "prefixItems": [{"type": "integer"}]}, [1], ["a"]),
}


@pytest.mark.parametrize("declares", [True, False])
@pytest.mark.parametrize("draft", DRAFTS)
def test_schemas_of_older_drafts_are_judged_as_such(draft: str, declares: bool) -> None:
    schema, right, wrong = DRAFTS[draft]
    uri = {"2020-12": "https://json-schema.org/draft/2020-12/schema"}.get(
        draft.split()[-1], f"http://json-schema.org/{draft.split()[-1]}/schema#"
    )
    parameters = OBJECT | {"properties": {"at": schema}} | ({"$schema": uri} if declares else {})
    (tool,) = mcp_module._check_tools([{"name": "a", "description": "", "parameters": parameters}], ())
    server = MCPServer(command=["a"])
    bound = ServerTool(spec=ToolSpec(**tool), server=server, connection=server.connect())
    assert bound.validate({"at": right}) == {"at": right}
    with pytest.raises(ValueError, match=r"^at"):
        bound.validate({"at": wrong})


def test_a_schema_that_is_nested_too_deeply_to_be_judged_is_refused_by_name() -> None:
    schema = dict(OBJECT)
    for _ in range(3000):
        schema = OBJECT | {"properties": {"a": schema}}
    with pytest.raises(mcp_module._ListError, match="schema of tool 'a' is nested too deeply; leave it out"):
        mcp_module._check_tools([{"name": "a", "description": "", "parameters": schema}], ())


def test_a_schema_that_its_declared_draft_refuses_is_refused() -> None:
    parameters = OBJECT | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"a": {"type": "array", "items": [{"type": "integer"}]}},
    }
    with pytest.raises(mcp_module._ListError, match="tool 'a' has no valid JSON schema"):
        mcp_module._check_tools([{"name": "a", "description": "", "parameters": parameters}], ())


def test_the_policy_sees_the_text_of_resources_and_the_places_of_links(tmp_path: Path) -> None:
    content = [
        {"type": "text", "text": "read a.txt"},
        {"type": "resource", "resource": {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "the content"}},
        {"type": "resource", "resource": {"uri": "file:///b.bin", "mimeType": "image/png", "blob": "AAAA"}},
        {"type": "resource_link", "uri": "file:///c.txt", "name": "c.txt", "description": "a third file"},
        {"type": "image", "data": "AAAA", "mimeType": "image/png"},
    ]
    answer = {"content": content, "structuredContent": {"path": "a.txt"}}
    calling = f"print(json.dumps({{'jsonrpc': '2.0', 'id': asked.pop('id'), 'result': {answer!r}}}), flush=True)"
    ((_, text),) = observed(play(environment_of(raw(tmp_path, [TOOL], calling=calling)), [call("a"), "done"]))
    assert text.splitlines() == [
        "read a.txt",
        "[resource file:///a.txt]",
        "the content",
        "[resource file:///b.bin, image/png, left out]",
        "[resource link file:///c.txt, c.txt: a third file]",
        "[image, left out]",
        '{"path": "a.txt"}',
    ]


def test_a_long_structured_result_is_compared_in_bounded_time() -> None:
    result = types.SimpleNamespace(content=[], structured_content={"a": list(range(500_000))})
    result.content.append(types.SimpleNamespace(type="text", text=json.dumps(result.structured_content)))
    texts = []
    spent = least_cpu_s(lambda: texts.append(mcp_module._text_of(result)), enough=1.0)
    assert texts[0].startswith('{"a": [0, 1, 2')
    assert spent < 1.0  # 0.1 s here, 2 s to 4 s if all is compared


def test_a_structured_result_is_written_once_for_all_texts() -> None:
    class Counted(dict[str, int]):
        written = 0

        def __str__(self) -> str:
            self.written += 1
            return super().__repr__()

    structured = Counted(a=1)
    assert not mcp_module._is_repeated(structured, ["1"] * 1000)
    assert mcp_module._is_repeated(structured, ["1", '{"a": 1}'])
    assert structured.written == 2


def test_the_checker_waits_longer_than_a_server_may_take_to_start() -> None:
    assert mcp_module.START_S < TIMEOUT_S


def test_a_server_that_floods_during_a_call_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_module, "MAX_WRITTEN_BYTES", 1 << 20)
    noise = "\n        ".join(["while True:", "    print('log ' * 1000)"])
    server = raw(tmp_path, [TOOL], calling=noise)
    assert [text for _, text in observed(play(environment_of(server), [call("a"), "done"]))] == [
        "error: MCPToolError: the server wrote more than 1,048,576 bytes"
    ]


def test_what_is_no_server_is_refused() -> None:
    for given in ({}, {"command": ["a"], "url": "http://a"}, {"command": "a b"}, {"command": ["a"], "timeout_s": 0}):
        with pytest.raises(EnvironmentDefinitionError):
            MCPServer(**given)  # type: ignore[arg-type]
    played = play(environment_of(MCPServer(command=["/nowhere/server"])), ["done"])
    assert "/nowhere/server" in played.said
    played = play(environment_of(MCPServer(url="http://127.0.0.1:9/mcp")), ["done"])
    assert played.header.drop_reason == "environment_error"


def test_the_state_of_a_server_that_is_lost_begins_the_episode_again() -> None:
    connection = MCPConnection(MCPServer(command=["a"], stateful=True))
    connection.has_recalled = True
    with pytest.raises(EpisodeError, match="stateful") as lost:
        asyncio.run(connection.call("a", {}))
    assert lost.value.begin_again


@pytest.mark.parametrize(("program", "told"), [("pass", "ended"), ("import time; time.sleep(1000)", "within 1 s")])
def test_a_server_that_cannot_start_for_a_call_drops_the_episode(
    program: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a resume, the list of tools is recalled, and the first call starts the server."""
    monkeypatch.setattr(mcp_module, "START_S", 1.0 if "sleep" in program else 20.0)

    async def call() -> None:
        connection = MCPConnection(MCPServer(command=[sys.executable, "-c", program]))
        try:
            await connection.call("a", {})
        finally:
            await connection.close()

    with pytest.raises(EpisodeError, match=told) as error:
        asyncio.run(call())
    assert error.value.reason == "environment_error"


HOSTILE: dict[str, dict[str, Any]] = {
    "pattern": {"properties": {"a": {"type": "array", "items": {"pattern": "(a+)+$"}}}},
    "pattern that takes minutes to compile": {"properties": {"b": {"pattern": "(?i)" + "[\u0100-\uffff]" * 4_000}}},
    "references that double": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)} | {"d60": {}},
    },
    "unique items": {"properties": {"a": {"uniqueItems": True}}},
    "many members": {"properties": {"a": {"anyOf": [{"items": {"type": "null"}}] * 2_000}}},
}
PIECES = {"a": [piece for n in range(4_000) for piece in (n, str(n), "a" * 40 + "!")]}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_schema_makes_its_check_take_for_ever(kind: str) -> None:
    schema = OBJECT | HOSTILE[kind]
    connection = MCPConnection(MCPServer(command=["a"]))

    def check() -> None:
        (tool,) = mcp_module._check_tools([{"name": "a", "description": "", "parameters": schema}], ())
        assert connection.validate(ToolSpec(**tool), PIECES) == PIECES

    assert least_cpu_s(check, enough=20) < 20  # 1 s to 2 s here, minutes without the bound


def test_a_pattern_for_results_is_not_applied(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[0-9]$"}}}
    tool = TOOL | {"outputSchema": schema}
    calling = "print(json.dumps({{'jsonrpc': '2.0', 'id': asked.pop('id'), 'result': {{'content': [], "
    calling += "'structuredContent': {{'a': 'not a digit'}}}}}}), flush=True)"
    server = raw(tmp_path, [tool], calling=calling.format())
    assert observed(play(environment_of(server), [call("a"), "done"])) == [("ok", '{"a": "not a digit"}')]


def test_what_is_checked_here_refuses_nothing_that_the_schema_admits() -> None:
    text = {"type": "string", "pattern": "(a+)+$"}
    schema = {
        "properties": {"pattern": text, "one": {"oneOf": [{"$ref": "#/$defs/a"}, text]}, "no": {"not": text}},
        "patternProperties": {"x": {}},
        "additionalProperties": False,
        "$defs": {"a": {}},
    }
    assert _checked_here(schema) == {"properties": {"pattern": {"type": "string"}, "one": {}, "no": {}}}


def test_the_checker_accepts_it(tmp_path: Path) -> None:
    report = check_environment(environment_of(raw(tmp_path, [TOOL])))
    assert report.passed, report


def _result_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a server with one tool to any request."""
    if asked["method"] == "initialize":
        return {
            "protocolVersion": asked["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "mute", "version": "1"},
        }
    return {"tools": [{"name": "own", "inputSchema": {"type": "object"}}]}


@asynccontextmanager
async def listening(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[MCPConnection]:
    """A connection to a server over HTTP that answers by hand."""
    application = web.Application()
    application.router.add_route("*", "/mcp", answer)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    connection = MCPConnection(MCPServer(url=f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"))
    try:
        yield connection
    finally:
        await asyncio.wait_for(connection.close(), 60)
        await runner.cleanup()


def test_a_server_that_never_answers_the_end_of_its_session_does_not_hold_the_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_module, "CLOSE_S", 0.1)

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "DELETE":
            await asyncio.sleep(3600)
        if request.method != "POST":
            return web.Response(status=405)
        asked = await request.json()
        if "id" not in asked:
            return web.Response(status=202)
        reply = {"jsonrpc": "2.0", "id": asked["id"], "result": _result_of(asked)}
        return web.json_response(reply, headers={"mcp-session-id": "s"})

    async def closed() -> list[str]:
        async with listening(answer) as connection:
            return [tool["name"] for tool in await connection.listed()]

    assert asyncio.run(closed()) == ["own"]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("json", "4,194,304 bytes"),
        ("error", "4,194,304 bytes"),
        ("stream", "20,000,000 bytes"),
        ("packed", "packs"),
    ],
)
def test_an_answer_over_http_without_end_is_cut_off(kind: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_module, "MAX_WRITTEN_BYTES", 20_000_000)
    written = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal written
        asked = await request.json() if request.method == "POST" else {}
        if asked.get("method") != "tools/list":
            reply = {"jsonrpc": "2.0", "id": asked.get("id"), "result": _result_of(asked) if "id" in asked else None}
            return web.json_response(reply) if "id" in asked else web.Response(status=202)
        types = {"stream": "text/event-stream"}
        response = web.StreamResponse(status=400 if kind == "error" else 200)
        response.content_type = types.get(kind, "application/json")
        if kind == "packed":
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        while written < 1 << 30:
            await response.write(b": no event\n\n" * 10_000 if kind == "stream" else b" " * 100_000)
            written += 100_000
        return response

    async def listed() -> None:
        async with listening(answer) as connection:
            await connection.listed()

    with pytest.raises(EpisodeError, match=told):
        asyncio.run(listed())
    assert written < 100_000_000


def test_schemas_are_checked_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, threads = mcp_module._check_tools, []

    def checked(*arguments: Any) -> list[dict[str, Any]]:
        threads.append(threading.get_ident())
        return check(*arguments)

    async def listed() -> None:
        connection = MCPConnection(raw(tmp_path, [TOOL]))
        try:
            assert len(await connection.listed()) == 1
        finally:
            await connection.close()

    monkeypatch.setattr(mcp_module, "_check_tools", checked)
    asyncio.run(listed())
    assert threads
    assert threading.get_ident() not in threads


def test_a_server_that_is_closed_in_a_hurry_is_waited_for(shop: MCPServer, caplog: pytest.LogCaptureFixture) -> None:
    async def hurried() -> None:
        connection = MCPConnection(shop)
        await connection.listed()
        holding = connection._hold_task
        assert holding is not None
        while not holding.done():
            holding.cancel()
            await asyncio.sleep(0)

    asyncio.run(hurried())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_the_exit_of_a_closed_server_is_left_to_the_child_watcher(shop: MCPServer) -> None:
    polls: list[str] = []

    def on_call(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and called is os.waitpid and frame.f_code.co_filename == subprocess.__file__:
            polls.append(frame.f_code.co_qualname)

    async def closed() -> None:
        connection = MCPConnection(shop)
        await connection.listed()
        sys.setprofile(on_call)
        try:
            await connection.close()
        finally:
            sys.setprofile(None)

    asyncio.run(closed())
    assert polls == []


def test_closing_after_a_server_has_died_leaves_no_task(shop: MCPServer) -> None:
    async def closed() -> set[asyncio.Task[object]]:
        connection = MCPConnection(shop)
        await connection.listed()
        with pytest.raises(mcp_module.MCPToolError):
            await connection.call("die", {})
        await connection.close()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(closed()) == set()
