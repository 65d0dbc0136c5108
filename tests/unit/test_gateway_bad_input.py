"""Values of requests that cannot be meant are refused by the name of their field, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import agentrl
from tests.unit.episodes import play
from tests.unit.test_gateway import Loop, user

if TYPE_CHECKING:
    import aiohttp

MIB = "x" * (1 << 20)
SCHEMA = {"type": "object", "properties": {MIB: {"type": "string"}}}
LONG_SCHEMA = "has a schema of 1048634 characters; at most 65536 are read"
LONG_ID = "has a tool call id of 1048576 characters; at most 1024 are read"
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
RESPONSE_ITEM = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": MIB}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/chat/completions", {"temperature": float("nan")}, "temperature: NaN is not a finite number"),
    ("/responses", {"top_p": float("inf")}, "top_p: Infinity is not a finite number"),
    ("/messages", {"metadata": {"a": [float("nan")]}}, "metadata: NaN is not a finite number"),
    (
        "/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        f"response_format {LONG_SCHEMA}",
    ),
    ("/responses", {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, f"text.format {LONG_SCHEMA}"),
    (
        "/messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        f"output_config.format {LONG_SCHEMA}",
    ),
    (
        "/chat/completions",
        {
            "messages": [
                user("a"),
                {"role": "assistant", "content": None, "tool_calls": [{"id": MIB, **CALL}]},
                {"role": "tool", "tool_call_id": MIB, "content": "1"},
            ]
        },
        f"messages {LONG_ID}",
    ),
    (
        "/responses",
        {"input": [user("a"), RESPONSE_ITEM, {"type": "function_call_output", "call_id": MIB, "output": "1"}]},
        f"messages {LONG_ID}",
    ),
    (
        "/messages",
        {
            "messages": [
                user("a"),
                {"role": "assistant", "content": [{"type": "tool_use", "id": MIB, "name": "add", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": MIB, "content": "1"}]},
            ]
        },
        f"messages {LONG_ID}",
    ),
    ("/chat/completions", {"model": MIB}, "model has a name of 1048576 characters; at most 1024 are read"),
    (
        "/chat/completions",
        {"tools": [{"type": "function", "function": {"name": MIB}}]},
        "tools has a name of 1048576 characters; at most 1024 are read",
    ),
]


class Sends(Loop):
    """Sends bad requests one after the other, while another agent of the episode asks as it should."""

    seats = ("main", "other")
    refused: ClassVar[list[tuple[int, str]]] = []
    answered: ClassVar[list[int]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        async def send_bad() -> None:
            for path, fields, _ in BAD:
                prompt = {"input": "a"} if path == "/responses" else {"messages": [user("a")], "max_tokens": 5}
                body = json.dumps({"model": "main", **prompt, **fields}).encode()
                async with client.post(endpoint.url + path, data=io.BytesIO(body)) as response:
                    self.refused.append((response.status, await response.text()))

        async def ask() -> None:
            while len(self.answered) < 4:
                body = {"model": "other", "messages": [user(f"{len(self.answered)}")]}
                async with client.post(f"{endpoint.url}/chat/completions", json=body) as response:
                    self.answered.append(response.status)

        await asyncio.gather(send_bad(), ask())


@pytest.fixture(scope="module")
def refused() -> list[tuple[int, str]]:
    """The answers to `BAD`."""
    played = play(Sends, ["x"] * 4)
    assert (played.header.reward, played.header.drop_reason) == (1.0, None), played.told
    assert Sends.answered == [200] * 4
    return Sends.refused


@pytest.mark.parametrize("number", range(len(BAD)), ids=[f"{path[1:]}-{next(iter(fields))}" for path, fields, _ in BAD])
def test_a_bad_value_is_refused_by_name_and_others_are_answered(refused: list[tuple[int, str]], number: int) -> None:
    status, text = refused[number]
    assert status == 400
    assert BAD[number][2] in text
    assert len(text) < 1000
