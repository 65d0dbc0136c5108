"""Tasks of servers: OpenEnv over a WebSocket, resources servers of NeMo-Gym over HTTP. Their packages are not needed.

A server's state cannot be restored, so an interrupted episode restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from agentrl import InfrastructureError, Task, TaskSource
from agentrl.formats import (
    UNCOMPRESSED,
    ChatRequest,
    EnvironmentDefinitionError,
    GameSeedTasks,
    RequestRefusedError,
    Split,
    bounded_repr,
    describe_malformed_call,
    expand_path,
    outside_event_loop,
    parse_json,
    read_answer,
    read_responses_request,
    split_tasks,
    stated_reward,
)
from agentrl_formats.session import Call, Session, SessionEnvironment, Start, Step, message_data, tool_message

SECONDS = 60.0
"""Time limit of a request."""
LONGEST_WAIT_S, POLL_S = 600.0, 1.0
"""Longest wait for a place of an OpenEnv server, and the time between two attempts."""
LARGEST_ANSWER = 16 << 20
"""Longest answer of a server, in bytes."""


class _Connection(Session):
    """A session with a server.

    Raises:
        InfrastructureError: the server cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._client: aiohttp.ClientSession | None = None

    def client(self) -> aiohttp.ClientSession:
        """Return the client, which keeps the server's cookies."""
        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=SECONDS)
            self._client = aiohttp.ClientSession(
                cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=timeout, auto_decompress=False, headers=UNCOMPRESSED
            )
        return self._client

    async def post(self, path: str, body: Any, *, returned: int = 0) -> tuple[int, str]:
        """Post JSON; returns the status and the text of the answer.

        Args:
            path: path of the server.
            body: data to post.
            returned: status above 499 that is returned, too.

        Raises:
            InfrastructureError: the server is unreachable, or answers with another such status.
            ValueError: the answer is too long, or compressed.
        """
        where = f"{self._url}{path}"
        try:
            async with self.client().post(where, json=body) as answer:
                content = await read_answer(answer, LARGEST_ANSWER)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InfrastructureError(f"{where}: {error or type(error).__name__}") from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        text = "" if content is None else content.decode("utf-8", "replace")
        if answer.status >= 500 and answer.status != returned:
            raise InfrastructureError(f"{where}: status {answer.status}: {text[:200]}")
        if content is None:
            raise ValueError(f"{where}: its answer has more than {LARGEST_ANSWER:,} bytes")
        return answer.status, text

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class NemoGym(SessionEnvironment):
    """Tasks of a resources server of NeMo-Gym: tools to call, and a reward for the whole conversation."""

    level = "pinned"
    selects = ("url", "file")

    def session(self, task: Task) -> Session:
        return _NemoSession(task.data["url"], _rows(task.data["file"])[task.data["row"]])

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0, url: str = "", file: str = "", held_out: float = 0.2) -> TaskSource:
        """Return the rows of a JSON Lines file.

        Args:
            split: the split.
            seed: not used.
            url: address of the resources server.
            file: the file, relative to the working directory.
            held_out: the share of rows that is held out.

        Raises:
            EnvironmentDefinitionError: the file cannot be read, or a row asks for what is not supported.
        """
        path = str(Path(expand_path(file)).resolve())
        data = {"url": url, "file": path}
        tasks = [Task(id=f"row-{number}", data={**data, "row": number}) for number in range(len(_rows(path)))]
        _check_url(url)
        return split_tasks(tasks, split, held_out)


def _check_url(url: str) -> None:
    """Check a server's address.

    Raises:
        EnvironmentDefinitionError: it is none.
    """
    if not url.startswith(("http://", "https://")):
        raise EnvironmentDefinitionError(f"url = {url!r}: give the server's address, such as http://127.0.0.1:8000")


@functools.cache
def _rows(path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    number = 0
    try:
        with Path(path).open(encoding="utf-8") as file:  # `str.splitlines` also splits within the texts of some rows
            for line in file:
                number += 1
                rows.append(json.loads(line))
                _read_parameters(rows[-1]["responses_create_params"])
    except OSError as error:
        raise EnvironmentDefinitionError(f"{path}: {error.strerror}") from error
    except RequestRefusedError as error:
        raise EnvironmentDefinitionError(f"{path}, line {number}: responses_create_params.{error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentDefinitionError(
            f"{path}, line {number or 1}: a row is a JSON object with responses_create_params.input ({error!r})"
        ) from error
    return rows


_READ = {"input", "instructions", "tools", "previous_response_id", "prompt", "background"}
"""Parameters that `read_responses_request` reads or refuses."""
_OF_THE_RUN = {"temperature", "top_p", "top_logprobs", "max_output_tokens", "parallel_tool_calls", "reasoning", "model"}
"""Parameters of sampling, which the run decides."""
_WITHOUT_EFFECT = {"metadata", "user", "store", "include", "service_tier", "truncation", "stream"}


def _read_parameters(parameters: Mapping[str, Any]) -> ChatRequest:
    """Read the messages and tools of a row, as the gateway reads a request.

    Raises:
        RequestRefusedError: they ask for what is not supported.
        ValueError: a tool's name is not usable.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    tools = [{"type": "function", **tool} for tool in given.pop("tools", [])]
    harmless = {"tool_choice": "auto", "text": {"format": {"type": "text"}}}
    for name, value in given.items():
        is_known = name in _READ | _OF_THE_RUN | _WITHOUT_EFFECT
        if not is_known and value != {} and value != harmless.get(name):
            raise RequestRefusedError(f"{name} = {bounded_repr(value)} is not supported; remove it")
    request = read_responses_request(
        {**{name: given[name] for name in _READ & given.keys()}, "tools": tools, "model": "policy"}
    )
    if isinstance(given.get("input"), list) and any(item.get("type") == "reasoning" for item in given["input"]):
        raise RequestRefusedError("input has an item of type 'reasoning', which is not supported; remove it")
    for tool in tools:
        if tool["type"] != "function":
            raise RequestRefusedError(f"tools: a tool of type {bounded_repr(tool['type'])} is not supported")
        _check_tool(tool["name"])
    return request


def _check_tool(name: str) -> None:
    """Check that a tool's name is a path of its own.

    Raises:
        ValueError: posting a call of it would reach another path of the server.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name) or name in ("seed_session", "verify", ".", ".."):
        raise ValueError(f"{name[:40]!r} cannot name a tool")


class _NemoSession(_Connection):
    """A row, with the output of its conversation as the server's `verify` reads it."""

    def __init__(self, url: str, row: Mapping[str, Any]) -> None:
        super().__init__(url)
        self._row = row
        self._request = _read_parameters(row["responses_create_params"])
        self._tools = row["responses_create_params"].get("tools") or []
        self._output: list[dict[str, Any]] = []

    async def start(self) -> Start:
        await self._post_or_fail("/seed_session", self._row)
        return {
            "messages": [message_data(message) for message in self._request.messages],
            "tools": [asdict(tool) for tool in self._request.tools],
        }

    async def answer(self, text: str, calls: Sequence[Call]) -> Step:
        if text or not calls:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            self._output.append(
                {
                    "type": "message",
                    "id": f"m{len(self._output)}",
                    "role": "assistant",
                    "status": "completed",
                    "content": content,
                }
            )
        if not calls:
            return {"messages": [], "reward": await self.cut(), "done": True}
        messages = [tool_message(call, await self._call(call)) for call in calls]
        return {"messages": messages, "reward": 0.0, "done": False}

    async def _call(self, call: Call) -> str:
        """Post a call of a declared tool: the server's other paths are `verify`, `seed_session` and its own."""
        arguments = call["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        common = {"call_id": call["id"], "id": call["id"], "status": "completed"}
        self._output.append({"type": "function_call", "name": call["name"], "arguments": written, **common})
        if call["name"] not in {tool["name"] for tool in self._tools}:
            result = json.dumps({"error": f"there is no tool {call['name']!r}"})
        elif not isinstance(arguments, dict):
            result = json.dumps({"error": f"Invalid tool call: {describe_malformed_call(written)}"})
        else:
            # Its middleware answers a tool's exception with status 500 and the exception, which the model sees.
            _, result = await self.post(f"/{call['name']}", arguments, returned=500)
        self._output.append({"type": "function_call_output", "call_id": call["id"], "output": result})
        return result

    async def cut(self) -> float:
        response = {
            "id": "r",
            "created_at": 0,
            "model": "agentrl",
            "object": "response",
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._tools,
        }
        verdict = json.loads(await self._post_or_fail("/verify", {**self._row, "response": response}))
        if not isinstance(verdict, dict):
            raise ValueError(f"{self._url}/verify: its answer is not a JSON object")
        return stated_reward(verdict.get("reward"), f"{self._url}/verify")

    async def _post_or_fail(self, path: str, body: Any) -> str:
        status, text = await self.post(path, body)
        if status >= 400:
            raise ValueError(f"{self._url}{path}: status {status}: {text[:500]}")
        return text


class OpenEnv(SessionEnvironment):
    """An environment behind a server of OpenEnv. Override `action` and `render` for its kinds of actions and
    observations."""

    seats = ("player",)
    level = "pinned"
    selects = ("url",)

    def action(self, text: str) -> Mapping[str, Any]:
        """Return the action that a turn's text names: the fields of the server's action. Default: the text is a JSON
        object; if it is not, the policy sees an error and may try again. Any other error ends the episode."""
        try:
            found = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise _NoActionError(f"the action is not JSON: {error}; write one JSON object and nothing else") from None
        if not isinstance(found, dict):
            raise _NoActionError("the action is JSON, but not an object; write one JSON object and nothing else")
        return found

    def render(self, observation: Mapping[str, Any]) -> str:
        """Return the text of an observation. Default: its JSON."""
        return json.dumps(observation)

    def session(self, task: Task) -> Session:
        return _OpenEnvSession(task.data["url"], task.data["seed"], self)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0, url: str = "") -> TaskSource:
        """Return seeds of the environment. 512 are held out.

        Args:
            split: the split.
            seed: seed of the training tasks.
            url: address of the server.
        """
        _check_url(url)
        _warn_of_one_place(url)
        return _ServedSeeds(split, seed, url)


class _ServedSeeds(GameSeedTasks):
    def __init__(self, split: Split, seed: int, url: str) -> None:
        super().__init__(split, seed)
        self._url = url

    def __getitem__(self, index: int, /) -> Task:
        task = super().__getitem__(index)
        return Task(id=task.id, data={**task.data, "url": self._url})


class _NoActionError(ValueError):
    """The text of a turn is not a JSON object."""


class _RefusedError(Exception):
    """The server refuses an action."""


class _FullError(Exception):
    """All places of the server are taken; the text says how many there are."""


class _OpenEnvSession(_Connection):
    """A session of an OpenEnv server: one WebSocket."""

    def __init__(self, url: str, seed: int, environment: OpenEnv) -> None:
        super().__init__(url)
        self._seed, self._environment = seed, environment
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def start(self) -> Start:
        waited_s = 0.0
        while True:
            try:
                result = await self._ask("reset", {"seed": self._seed})
                break
            except _FullError as error:
                warnings.warn(str(error), stacklevel=1)  # shown once
                if waited_s >= LONGEST_WAIT_S:
                    raise InfrastructureError(str(error)) from error
                await self.close()
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S
        if result.get("done"):
            raise ValueError(f"{self._url}: the episode is done after its reset")
        return {"messages": [self._message(result)], "tools": []}

    async def answer(self, text: str, calls: Sequence[Call]) -> Step:
        try:
            result = await self._ask("step", dict(self._environment.action(text)))
        except (_NoActionError, _RefusedError) as error:  # the policy may try again
            return {"messages": [{"role": "user", "content": f"error: {error}"}], "reward": 0.0, "done": False}
        reward, done = result.get("reward"), result.get("done")
        if not isinstance(done, bool):
            raise ValueError(f"{self._url}: `done` is {str(done)[:40]!r}, which is neither true nor false")
        return {
            "messages": [self._message(result)],
            "reward": 0.0 if reward is None else stated_reward(reward, self._url),
            "done": done,
        }

    def _message(self, result: Mapping[str, Any]) -> dict[str, str]:
        return {"role": "user", "content": self._environment.render(result["observation"])}

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the answer.

        Raises:
            _RefusedError: the server refuses it.
            ValueError: the answer is too long, or malformed.
        """
        try:
            if self._socket is None:
                self._socket = await self.client().ws_connect(_socket_address(self._url), max_msg_size=LARGEST_ANSWER)
            with contextlib.suppress(aiohttp.ClientConnectionError):  # it may have refused, and closed
                await self._socket.send_json({"type": kind, "data": data})
            message = await self._socket.receive(timeout=SECONDS)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise InfrastructureError(f"{self._url}: {error or type(error).__name__}") from error
        if message.type is aiohttp.WSMsgType.ERROR and self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            raise ValueError(f"{self._url}: its answer has more than {LARGEST_ANSWER:,} bytes")
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise InfrastructureError(f"{self._url}: it closed the connection, or sent no text ({message.type.name})")
        answer = json.loads(message.data)
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise ValueError(f"{self._url}: its answer is not a JSON object with `data`: {message.data[:200]}")
        if answer.get("type") == "error":
            if found.get("code") == "CAPACITY_REACHED":
                raise _FullError(_full(self._url, found))
            raise _RefusedError(_refusal(found)[:500])
        return found

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
            self._socket = None
        await super().close()


def _refusal(data: Mapping[str, Any]) -> str:
    """Return the server's words for a refused action, with the fields that pydantic names."""
    errors = data.get("errors")
    fields = [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg', '')}"
        for error in (errors if isinstance(errors, list) else [])
        if isinstance(error, dict)
    ]
    return ": ".join(filter(None, (str(data.get("message", "refused")), "; ".join(fields))))


def _full(url: str, data: Mapping[str, Any]) -> str:
    return (
        f"{url} has {data.get('max_sessions', 'few')} place(s), and further episodes wait for one; start the server "
        "with a larger max_concurrent_envs"
    )


@functools.cache  # the sockets take places from episodes
def _warn_of_one_place(url: str) -> None:
    """Warn, once in a process, if a server plays one episode at a time, which is the default."""
    outside_event_loop(asyncio.run)(_connect_twice(url))


async def _connect_twice(url: str) -> None:
    # The episodes say what is wrong, also with a server that never answers.
    with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as client:
            first, second = [await client.ws_connect(_socket_address(url)) for _ in range(2)]
            for socket in (second, first):
                # A server with places is silent.
                with contextlib.suppress(TimeoutError, TypeError, LookupError, AttributeError):
                    found = await socket.receive_json(timeout=0.2)
                    if found["data"].get("code") == "CAPACITY_REACHED":
                        warnings.warn(_full(url, found["data"]), stacklevel=1)
                await socket.close()


def _socket_address(url: str) -> str:
    return url.rstrip("/").replace("http", "ws", 1) + "/ws"
