"""Tools behind servers of the Model Context Protocol, as tools of a `ToolEnvironment`.

Each episode starts its servers, or connects to them, when it needs them, and ends them at its end. The list of tools is
journaled, and so is each call, so that a replay needs no server.

Content of servers is hostile: names, schemas and results are checked and bounded. A server that cannot be used ends the
attempt with an error that names it; an error, a time-out or the end of a server during a call is an observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl import ToolSpec
from agentrl.formats import (
    EnvironmentDefinitionError,
    EpisodeError,
    Guarantee,
    ResourceLevel,
    describe_malformed_call,
    die_with_parent_hook,
    format_foreign_error,
    shorten_middle,
)

if TYPE_CHECKING:
    from mcp import ClientSession

START_S = 25.0
"""Seconds that a server has to list its tools.

It is less than the checker's limit before an episode's first turn, so that a finding names the server.
"""
CLOSE_S = 5.0
"""Seconds that a server has to answer the end of its session."""
MAX_TOOLS = 256
MAX_SCHEMA_CHARACTERS = 65_536
MAX_RESULT_CHARACTERS = 100_000
"""Longest observation; the rest of a result is cut off."""
MAX_LINE_BYTES = 4 << 20
"""Longest message of a server."""
MAX_WRITTEN_BYTES = 64 << 20
"""Limit on the bytes that one server may write in one episode."""
SHOWN_ERRORS = 1000
"""Bytes of a server's error stream that are shown when it ends."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER", "SHELL", "TERM")
"""Environment variables of this process that a server inherits, besides its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPServer:
    """A server of tools: a command that communicates over its standard streams, or the URL of an HTTP endpoint.

    Example:
        class Files(agentrl.ToolEnvironment):
            mcp_servers = [agentrl_mcp.MCPServer(command=["python", "-m", "file_server"], timeout_s=10)]
    """

    command: Sequence[str] = ()
    """Program and arguments."""
    url: str = ""
    """URL of a server that speaks streamable HTTP, instead of a command."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the program. It inherits only PATH, HOME and the like from this process: no keys."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """HTTP headers, such as `Authorization`; never journaled."""
    tools: Sequence[str] = ()
    """Names of the tools to offer; empty: all."""
    timeout_s: float | None = None
    """Time limit of a call in seconds; a longer call becomes a timeout observation. Default: 30."""
    guarantee: Guarantee = "once"
    """Whether a call may be repeated if the process died during it; see `ctx.effect`."""
    stateful: bool = False
    """Whether calls depend on earlier calls of the episode. A resumed episode then restarts when it needs the server,
    whose state died with its process."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url) or isinstance(self.command, str):
            raise EnvironmentDefinitionError(
                "MCPServer needs a command, as a list, or a url: MCPServer(command=['python', '-m', 'server'])"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise EnvironmentDefinitionError(f"MCPServer(timeout_s={self.timeout_s!r}) needs a number above 0")

    @property
    def name(self) -> str:
        """Command or URL, for messages."""
        return self.url or " ".join(self.command)[:300]

    @property
    def level(self) -> ResourceLevel:
        """How the server is recalled; see `ctx.resource`."""
        return "pinned" if self.stateful else "replay"

    def connect(self) -> MCPConnection:
        """Return the connection of one episode; it opens at the first use."""
        return MCPConnection(self)


class MCPToolError(Exception):
    """The server reports that a call failed, or cannot answer it."""


class _ListError(Exception):
    """A list of tools that cannot be used."""


class MCPConnection:
    """The connection of one episode to one server; it opens at the first use."""

    def __init__(self, server: MCPServer) -> None:
        self.server = server
        self.has_recalled = False
        """Whether a call was recalled instead of made: the state of a stateful server is then lost."""
        self._session: asyncio.Future[ClientSession] | None = None
        self._hold_task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._end_reason = ""
        """Reason why the server is ignored; empty while it is in use."""
        self._written = 0
        """Bytes that it wrote."""

    async def listed(self) -> list[dict[str, Any]]:
        """Return names, descriptions and schemas of the server's tools.

        Raises:
            EpisodeError: the server cannot be used.
        """
        from mcp import types

        tools: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(START_S):
                session, cursor = await self._open(), None
                while True:
                    page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
                    tools += [
                        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                        for tool in page.tools
                    ]
                    cursor = page.next_cursor
                    if cursor is None or (len(tools) > MAX_TOOLS and not self.server.tools):
                        break
            return await asyncio.to_thread(_check_tools, tools, self.server.tools)
        except TimeoutError:
            raise self._unusable(f"it has not listed its tools within {START_S:g} s") from None
        except _ListError as error:
            raise self._unusable(str(error)) from None
        except Exception as error:  # noqa: BLE001 - of the server, or of the library that speaks with it
            raise self._unusable(self._end_reason or format_foreign_error(_cause(error))[:1000]) from None

    def validate(self, tool: ToolSpec, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Return a call's arguments by name.

        Raises:
            ValueError: they do not fit the schema; the text is an observation for the policy.
        """
        import jsonschema  # type: ignore[import-untyped]
        from referencing import Registry

        if isinstance(arguments, str):
            raise ValueError(describe_malformed_call(arguments))
        try:
            schema = _checked_here(dict(tool.parameters))
            # Validation up to this size takes at most 0.2 s. Only the server validates larger arguments.
            if _size(schema) * _size(dict(arguments)) <= 20_000:
                jsonschema.Draft202012Validator(schema, registry=Registry()).validate(dict(arguments))
        except jsonschema.ValidationError as error:
            where = shorten_middle(".".join(map(str, error.absolute_path))) or "arguments"
            raise ValueError(f"{where}: {error.message[:300]}") from None
        except Exception as error:  # noqa: BLE001 - of a schema that is nested too deeply, or that lies otherwise
            raise ValueError(f"the tool's schema cannot be applied: {format_foreign_error(error)[:300]}") from None
        return dict(arguments)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool.

        Raises:
            MCPToolError: the server reports that the call failed, or cannot answer it.
            EpisodeError: the server's state after earlier calls is lost, or it cannot start, as after a resume.
        """
        from mcp import types

        if self.server.stateful and self.has_recalled and self._session is None:
            raise EpisodeError(
                f"MCP server {self.server.name!r} is stateful and died with its process: the episode starts over",
                reason="resource_lost",
                begin_again=True,
            )
        try:
            async with asyncio.timeout(START_S):
                session = await self._open()
        except TimeoutError:
            raise self._unusable(f"it has not started within {START_S:g} s") from None
        except Exception as error:  # noqa: BLE001 - of the server, or of the library that speaks with it
            raise self._unusable(self._end_reason or format_foreign_error(_cause(error))[:1000]) from None
        try:
            params = types.CallToolRequestParams(name=name, arguments=dict(arguments))
            # Not `call_tool`, which validates results against the server's schema, and a hostile schema could take
            # forever.
            result = await session.send_request(types.CallToolRequest(params=params), types.CallToolResult)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - of the server, or of the library that speaks with it
            data = getattr(getattr(_cause(error), "error", None), "data", None)
            details = "" if data is None else f": {json.dumps(data)}"
            raise MCPToolError(self._end_reason or f"{format_foreign_error(_cause(error))}{details}"[:1000]) from None
        result_text = _text_of(result)
        if getattr(result, "is_error", False):
            raise MCPToolError(result_text)
        return result_text

    async def close(self) -> None:
        """End the connection, and the program with all processes of its group."""
        self._closing.set()
        if self._hold_task is not None:
            self._hold_task.cancel()
            _, late = await asyncio.wait({self._hold_task}, timeout=CLOSE_S)
            if late:  # an HTTP server may not answer the end of its session
                self._hold_task.cancel()
                await asyncio.wait(late)

    async def _open(self) -> ClientSession:
        if self._session is None:
            loop = asyncio.get_running_loop()
            self._session = loop.create_future()
            self._hold_task = loop.create_task(self._hold(self._session))
        return await asyncio.shield(self._session)

    async def _hold(self, session_future: asyncio.Future[ClientSession]) -> None:
        """Keep the connection open: the library wants it closed by the task that opened it."""
        import httpx2
        from mcp import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        try:
            async with AsyncExitStack() as stack:
                if self.server.url:
                    # Follows no redirects, because its headers may contain keys.
                    client = await stack.enter_async_context(
                        httpx2.AsyncClient(
                            headers={**self.server.headers, "Accept-Encoding": "identity"},
                            timeout=httpx2.Timeout(START_S, read=None),
                            event_hooks={"response": [self._limit]},
                        )
                    )
                    streams = await stack.enter_async_context(
                        streamable_http_client(self.server.url, http_client=client, max_sse_event_size=MAX_LINE_BYTES)
                    )
                else:
                    streams = await stack.enter_async_context(self._process())
                session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
                await session.initialize()
                session_future.set_result(session)
                await self._closing.wait()
        except BaseException as error:  # noqa: BLE001 - who waits gets it
            if not session_future.done():
                session_future.set_exception(
                    _cause(error) if isinstance(error, Exception) else ConnectionError("it was closed")
                )
                session_future.exception()

    async def _limit(self, response: Any) -> None:
        """Bound the size of an HTTP answer, since the library holds a whole one in memory."""
        import httpx2

        connection, is_stream = self, "text/event-stream" in response.headers.get("Content-Type", "")

        class Limited(httpx2.AsyncByteStream):
            """The answer's bytes, up to the limits."""

            def __init__(self, stream: Any) -> None:
                self._stream = stream

            async def __aiter__(self) -> AsyncIterator[bytes]:
                length = 0
                async for part in self._stream:
                    length += len(part)
                    # The library limits the size of each event in a stream.
                    if not is_stream and length > MAX_LINE_BYTES:
                        connection._end_reason = f"the server wrote an answer of more than {MAX_LINE_BYTES:,} bytes"
                    connection._count(len(part))
                    if connection._end_reason:
                        raise httpx2.StreamError(connection._end_reason)
                    yield part

            async def aclose(self) -> None:
                await self._stream.aclose()

        if response.headers.get("Content-Encoding", "identity") != "identity":
            self._end_reason = "the server packs its answers, unasked"
            await response.aclose()
            raise httpx2.StreamError(self._end_reason)
        response.stream = Limited(response.stream)

    def _count(self, length: int) -> None:
        """Note bytes that the server wrote."""
        self._written += length
        if self._written > MAX_WRITTEN_BYTES:
            self._end_reason = f"the server wrote more than {MAX_WRITTEN_BYTES:,} bytes"

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[tuple[Any, Any]]:
        """Run the program; yields the streams for the library to read from and write to."""
        import anyio

        process = await asyncio.create_subprocess_exec(
            *self.server.command,
            env={
                **{name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ},
                **self.server.variables,
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
            preexec_fn=die_with_parent_hook(),
        )
        to_session, from_server = anyio.create_memory_object_stream[Any](0)
        to_server, from_session = anyio.create_memory_object_stream[Any](0)
        loop, errors = asyncio.get_running_loop(), bytearray()
        reading_errors = loop.create_task(_read_errors(process, errors))
        tasks = {
            reading_errors,
            loop.create_task(self._read(process, to_session, errors, reading_errors)),
            loop.create_task(_write(process, from_session)),
        }
        try:
            yield from_server, to_server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for task in tasks:
                task.cancel()
            for stream in (to_session, from_server, to_server, from_session):
                stream.close()
            # A process that left the group may hold the pipes. Closing the transport would close them too, but it also
            # polls the program, which can take its exit status away from asyncio's child watcher.
            for descriptor in (0, 1, 2):
                process._transport.get_pipe_transport(descriptor).close()  # type: ignore[attr-defined]
            while not all(task.done() for task in tasks) or process.returncode is None:
                with contextlib.suppress(asyncio.CancelledError):  # otherwise it would end after the event loop
                    await asyncio.wait(tasks)
                    await process.wait()
            process._transport.close()  # type: ignore[attr-defined]

    async def _read(
        self,
        process: asyncio.subprocess.Process,
        to_session: Any,
        errors: bytearray,
        reading_errors: asyncio.Task[None],
    ) -> None:
        """Pass a program's messages to the session, until the program ends or writes too much."""
        from mcp import types
        from mcp.shared.message import SessionMessage

        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._count(len(line))
                if self._end_reason:
                    return
                try:
                    message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except (ValueError, RecursionError) as error:
                    # Lines that are not messages belong to the server's log.
                    if b'"jsonrpc"' in line and "recursion limit" in str(error):
                        self._end_reason = "the server wrote a message whose data is nested too deeply, as in a schema"
                        return
                    continue
                await to_session.send(SessionMessage(message))
            # A process that the program left behind may hold its error stream open.
            await asyncio.wait({reading_errors}, timeout=1.0)
            error_output = errors.decode("utf-8", "replace").strip()
            self._end_reason = f"the server has ended{f': {error_output}' if error_output else ''}"
        except ValueError:  # raised by `readline` for a line that is too long
            self._end_reason = f"the server wrote a line of more than {MAX_LINE_BYTES:,} bytes"
        finally:
            to_session.close()

    def _unusable(self, why: str) -> EpisodeError:
        return EpisodeError(f"MCP server {self.server.name!r}: {why}", reason="environment_error")


async def _write(process: asyncio.subprocess.Process, from_session: Any) -> None:
    assert process.stdin is not None
    async for message in from_session:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()


async def _read_errors(process: asyncio.subprocess.Process, errors: bytearray) -> None:
    assert process.stderr is not None
    while part := await process.stderr.read(SHOWN_ERRORS):
        errors += part
        del errors[:-SHOWN_ERRORS]


_LEAVE_OUT = "leave it out with MCPServer(tools=[…])"


def _check_tools(descriptions: Sequence[dict[str, Any]], names_to_select: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tools of a server's list to offer; only these are checked.

    Raises:
        _ListError: one cannot be used, or is missing.
    """
    names = [tool["name"] for tool in descriptions]
    for name in names_to_select:
        if name not in names:
            raise _ListError(f"it has no tool {name!r}; it has {', '.join(names)[:2000]}")
    descriptions = [tool for tool in descriptions if not names_to_select or tool["name"] in names_to_select]
    if len(descriptions) > MAX_TOOLS:
        raise _ListError(f"it lists more than {MAX_TOOLS} tools; select some with MCPServer(tools=[…])")
    for tool in descriptions:
        name = tool["name"]
        if not _NAME.fullmatch(name):
            raise _ListError(
                f"a tool's name is {name[:80]!r}; it must have 1 to 128 letters, digits, '_', '-' or '.'; {_LEAVE_OUT}"
            )
        if names.count(name) > 1:
            raise _ListError(f"it lists tool {name!r} twice; {_LEAVE_OUT}")
        try:
            if len(json.dumps(tool)) > MAX_SCHEMA_CHARACTERS:
                raise _ListError(
                    f"tool {name!r} is described in more than {MAX_SCHEMA_CHARACTERS:,} characters; {_LEAVE_OUT}"
                )
            _check_schema(name, tool["parameters"])
        except RecursionError:
            raise _ListError(f"the schema of tool {name!r} is nested too deeply; {_LEAVE_OUT}") from None
        if tool["parameters"].get("type") != "object":
            raise _ListError(f"the schema of tool {name!r} must be of type object; {_LEAVE_OUT}")
    return descriptions


def _check_schema(name: str, schema: Mapping[str, Any]) -> None:
    """Judge a schema by the draft that it declares, else by any that servers write.

    Raises:
        _ListError: it is no schema.
    """
    import jsonschema

    drafts = [jsonschema.Draft202012Validator, jsonschema.Draft7Validator, jsonschema.Draft4Validator]
    if isinstance(schema.get("$schema"), str):
        declared = jsonschema.validators.validator_for(schema, default=None)
        drafts = drafts if declared is None else [declared]
    problems: list[str] = []
    for draft in drafts:
        try:
            # Formats are not checked, because they include regular expressions, and a hostile one takes minutes to
            # compile.
            draft.check_schema(schema, format_checker=None)
        except jsonschema.SchemaError as error:
            problems.append(error.message[:300])
        else:
            return
    raise _ListError(f"tool {name!r} has no valid JSON schema: {problems[0]}; {_LEAVE_OUT}")


_PLAIN = (
    *("type", "required", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems"),
)
_OF_SCHEMAS = ("items", "prefixItems", "anyOf", "allOf", "additionalProperties")


def _checked_here(schema: Any) -> Any:
    """Return the part of a schema that is validated in this process: keywords that take bounded time and hold whatever
    their context, as draft 2020-12 writes them.

    The server validates the rest: patterns, references and unique items of a hostile schema could take unbounded time.
    """
    if isinstance(schema, list):
        return [_checked_here(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    part = {key: schema[key] for key in _PLAIN if key in schema}
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(part.get(key), bool) and part.pop(key) and bound in part:  # draft-04
            part[key] = part.pop(bound)
    if isinstance(part.get("required"), bool):  # draft-03
        del part["required"]
    part |= {key: _checked_here(schema[key]) for key in _OF_SCHEMAS if key in schema}
    if isinstance(part.get("items"), list):  # until draft 2019-09
        part["prefixItems"] = part.pop("items")
    if "properties" in schema:
        part["properties"] = {name: _checked_here(value) for name, value in schema["properties"].items()}
    if "patternProperties" in schema:
        part.pop("additionalProperties", None)  # "additional" properties match no pattern
    return part


def _size(value: Any) -> int:
    """Number of values in JSON data, objects and lists included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_size, inner))


def _text_of(result: Any) -> str:
    """Convert a result to the policy's observation."""
    content = getattr(result, "content", ())
    parts = [_text_of_part(part) for part in content]
    structured = getattr(result, "structured_content", None)
    if structured is not None:
        # Servers should repeat structured content as text, but some only summarize it there.
        is_cut = sum(map(len, parts)) > MAX_RESULT_CHARACTERS
        if not is_cut and not _is_repeated(structured, parts):
            parts.append(json.dumps(structured))
    text = "\n".join(parts)
    cut = len(text) - MAX_RESULT_CHARACTERS
    return text if cut <= 0 else f"{text[:MAX_RESULT_CHARACTERS]}… ({cut:,} characters were cut off)"


def _is_repeated(structured: Any, texts: Sequence[str]) -> bool:
    """Whether a text is the structured content, or the texts are the value or the list that the SDK wraps as `result`.

    The SDK writes a text for each member of a list, and texts without quotes.
    """
    if any(map(_text_test(structured), texts)):
        return True
    if not isinstance(structured, dict) or structured.keys() != {"result"}:
        return False
    value = structured["result"]
    lists = ([value], value) if isinstance(value, list) and value else ([value],)
    return any(
        len(values) == len(texts) and all(_text_test(value)(text) for value, text in zip(values, texts, strict=True))
        for values in lists
    )


def _text_test(value: Any) -> Callable[[str], bool]:
    """Return a test whether a text is the JSON of a value, or its text in Python."""
    in_python, in_json = str(value), json.dumps(value, sort_keys=True)

    def is_text_of(text: str) -> bool:
        try:
            return text == in_python or json.dumps(json.loads(text), sort_keys=True) == in_json
        except (ValueError, RecursionError):
            return False

    return is_text_of


def _text_of_part(part: Any) -> str:
    """Convert a part of a result: text, the text of a resource, or the place of what is no text."""
    match getattr(part, "type", "content"):
        case "text":
            return str(part.text)
        case "resource":
            head = f"[resource {part.resource.uri}"
            text = getattr(part.resource, "text", None)
            kind = part.resource.mime_type or "bytes"
            return f"{head}, {kind}, left out]" if text is None else f"{head}]\n{text}"
        case "resource_link":
            description = f": {part.description}" if part.description else ""
            return f"[resource link {part.uri}, {part.name}{description}]"
        case other:
            return f"[{other}, left out]"


def _cause(error: BaseException) -> BaseException:
    """Return the first error of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
