"""A chat endpoint of somebody else, on loopback: real HTTP, scripted answers, errors as OpenAI words them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Message = Mapping[str, Any]
Answer = Callable[[Mapping[str, Any]], web.Response]
"""From the body of a request to its answer."""


@dataclass(eq=False)
class ChatEndpoint:
    """The endpoint while it listens."""

    answer: Answer
    models: Sequence[str] = ("large",)
    key: str = ""
    """The only key that is admitted; empty: any request is."""
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests, in order."""

    async def _chat(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if self.key and given != f"Bearer {self.key}":
            return error(401, f"Incorrect API key provided: {given}", "invalid_api_key")
        body = await request.json()
        self.asked.append(body)
        if body["model"] not in self.models:
            return error(404, f"The model `{body['model']}` does not exist", "model_not_found")
        return self.answer(body)

    async def _listed(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _serve(self, ready: threading.Event, until: asyncio.Event) -> None:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_get("/v1/models", self._listed)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await until.wait()
        await runner.cleanup()


@contextmanager
def serving(endpoint: ChatEndpoint) -> Iterator[ChatEndpoint]:
    """Serve it from a thread."""
    loop, ready, until = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(endpoint._serve(ready, until)), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(until.set)
        thread.join()
        loop.close()


def said(content: str = "", *calls: tuple[str, Mapping[str, Any]], reason: str = "stop") -> web.Response:
    """An answer with a text and tool calls, and its usage."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(dict(given))}}
            for n, (name, given) in enumerate(calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else reason}
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
    return web.json_response({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage})


def error(status: int, message: str, code: str) -> web.Response:
    """A refusal in OpenAI's form."""
    said = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return web.json_response(said, status=status)
