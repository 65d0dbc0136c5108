"""Policies behind an endpoint that speaks OpenAI's chat completions.

Owns: the HTTP calls, and the parts of an answer that are kept. A call's context is the conversation as JSON lines
(`rollout/chat/byte_formats.py`), one token per byte; so is the answer, with logprob 0.

Invariants: the key is sent to its endpoint only, never along redirects, and is removed from every answer,
so it appears neither in a journal nor in a message of agentrl. A request that times out, or meets an overload or a
failure, is an `EngineLostError`, which the caller retries. An answer that is invalid, or a refusal regardless of
content, ends the episode with an error. A refusal because of the content is recorded like a turn and truncates the
episode: otherwise a policy could void the games it loses.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from agentrl.core.answers import UNCOMPRESSED, read_answer
from agentrl.core.errors import EngineLostError, EpisodeError
from agentrl.core.records import reported_token_usage
from agentrl.core.tokens import Completion
from agentrl.engines.external import external_completion, read_api_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import aiohttp

    from agentrl.config.policies import RemotePolicy
    from agentrl.core.ports import GenerateRequest
    from agentrl.core.records import StopReason

MAX_ANSWER_BYTES = 4 << 20
BUSY = frozenset({408, 409, 425, 429})
"""Status codes that mean a later retry. So does every status from 500."""
ABOUT_THE_REQUEST = frozenset({400, 403, 413, 414, 422, 451})
"""Status codes that refuse a request's content (too long, filtered), as long as other requests are answered."""
_CONTEXT = re.compile(r"context_length_exceeded|(maximum )?context (length|window)|prompt is too long", re.IGNORECASE)
"""Pattern of the error with which endpoints refuse a conversation longer than the model's context."""
COMPLETE = ("stop", "tool_calls", "function_call", "eos_token", "end_turn", "stop_sequence")
"""Finish reasons of complete answers. Endpoints name a limit in several ways, such as `length` and `max_tokens`, and an
answer without a reason may have been cut."""
REFUSED_IN_A_ROW = 8
"""Number of consecutive refusals after which the endpoint is considered to refuse everything."""
REFUSAL_SHOWN = 300
BYTES_PER_TOKEN = 64
"""Maximum length of an answer in bytes per requested token, in addition to `MORE_BYTES`; a longer one is invalid."""
MORE_BYTES = 1 << 16


@dataclass(slots=True, eq=False, kw_only=True)
class RemotePolicyClient:
    """The endpoint of one remote policy; see `external.ExternalPolicy`."""

    policy: str
    config: RemotePolicy
    tell: Callable[[str], None] = lambda line: None
    """Receives a line for the user at the first of several calls in a row without an answer."""
    _is_lost: bool = False
    _key: str = ""
    _key_pattern: re.Pattern[str] | None = None
    """Matches the key and its encodings; None without a secret key."""
    _client: aiohttp.ClientSession | None = None
    _refusals_left: int = 0
    """Number of refusals that still count as caused by the content; 0: the endpoint has not answered recently, or
    never."""
    _limit_name: str = "max_tokens"
    """The endpoint's name for the limit on a turn's tokens."""
    _left_out: set[str] = field(default_factory=set)
    """Parameters without effect that the endpoint refuses."""
    _places: asyncio.Semaphore = field(init=False)
    _tasks: dict[str, asyncio.Task[Completion]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._key = read_api_key(self.policy, self.config)
        # a shorter key, such as `none`, is a word and not a secret
        if len(self._key) >= 8:
            self._key_pattern = _pattern_of(self._key)
        self._places = asyncio.Semaphore(self.config.max_concurrent)

    async def generate(self, request: GenerateRequest, where: str) -> Completion:
        """Send one request; an abort ends it without a token."""
        task = asyncio.get_running_loop().create_task(self._ask(request, where), name=request.request_id)
        self._tasks[request.request_id] = task
        try:
            await asyncio.wait({task})
            return external_completion(self.policy, b"", "abort") if task.cancelled() else task.result()
        finally:
            task.cancel()
            del self._tasks[request.request_id]

    def abort(self, request_id: str) -> None:
        """End a call in flight."""
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._client is not None:
            await self._client.close()

    async def models(self) -> list[str]:
        """Return the names of the models at the endpoint; empty if it lists none.

        Raises:
            EngineLostError: the endpoint cannot be reached.
        """
        status, content = await self._send("GET", "/models", f"policy {self.policy!r} at {self.config.url}")
        try:
            entries = json.loads(content or b"")["data"] if status == 200 else []
            return [self._without_key(entry["id"]) for entry in entries if isinstance(entry["id"], str)]
        except (ValueError, KeyError, TypeError, RecursionError):
            return []

    async def _ask(self, request: GenerateRequest, where: str) -> Completion:
        call_name = f"{where}, policy {self.policy!r} at {self.config.url}"
        async with self._places:
            body = self._body(request)
            status, content = await self._send("POST", "/chat/completions", call_name, body)
            while status == 400 and content is not None and self._adapt(content, body):
                body = self._body(request)
                status, content = await self._send("POST", "/chat/completions", call_name, body)
        if status != 200 or content is None:
            return self._not_answered(status, content, call_name)
        try:
            message, reason = _answer(content)
            line = _line(self._strip_key(message))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            problem = self._without_key(repr(error))[:REFUSAL_SHOWN]
            raise EpisodeError(
                f"{call_name}: its answer is not a chat completion ({problem})", reason="remote_answer"
            ) from None
        max_bytes = BYTES_PER_TOKEN * request.sampling.max_tokens + MORE_BYTES
        if len(line) > max_bytes:
            problem = (
                f"its answer has {len(line)} bytes, too many for the {request.sampling.max_tokens} requested tokens"
            )
            raise EpisodeError(f"{call_name}: {problem}", reason="remote_answer")
        self._refusals_left = REFUSED_IN_A_ROW
        if reason == "content_filter":
            return _refusal(self.policy, f"{call_name}: its answer was filtered")
        return external_completion(self.policy, line, "stop" if reason in COMPLETE else "length")

    def _not_answered(self, status: int, content: bytes | None, where: str) -> Completion:
        """Return the turn recorded for a refusal because of the content.

        Raises:
            EngineLostError: the endpoint may answer later.
            EpisodeError: the endpoint refuses regardless of content.
        """
        answer = f"more than {MAX_ANSWER_BYTES} bytes" if content is None else content.decode("utf-8", "replace")
        problem = f"{where}: status {status}: {self._without_key(answer)[:REFUSAL_SHOWN]}"
        if status in BUSY or status >= 500:
            raise EngineLostError(problem)
        if status in ABOUT_THE_REQUEST and _CONTEXT.search(answer):
            return _refusal(self.policy, problem, "context_length")
        if self._refusals_left and status in ABOUT_THE_REQUEST:
            self._refusals_left -= 1
            return _refusal(self.policy, problem)
        if status == 401:
            key = f"the key in {self.config.api_key_env}" if self._key else "no key was sent: name its variable"
            problem = f"{problem} ({key})"
        raise EpisodeError(problem, reason="remote_refused")

    def _adapt(self, content: bytes, body: Mapping[str, Any]) -> bool:
        """Adapt later requests to a refusal that names a parameter; returns whether the request that was refused would
        differ now. Several may be refused for the same parameter at once."""
        if "max_tokens" in body and b"max_completion_tokens" in content:
            self._limit_name = "max_completion_tokens"
            return True
        for name in ("temperature", "top_p"):
            if body.get(name) == 1.0 and name.encode() in content:
                self._left_out.add(name)
                return True
        return False

    async def _send(
        self, method: str, path: str, where: str, body: dict[str, Any] | None = None
    ) -> tuple[int, bytes | None]:
        """Return status and body of an answer; the body is None if it is too long."""
        import aiohttp  # takes .2 s, and few runs have such a policy

        if self._client is None:
            self._client = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.config.timeout_s),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
                headers=UNCOMPRESSED,
            )
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with self._client.request(
                method, f"{self.config.url}{path}", json=body, headers=headers, allow_redirects=False
            ) as response:
                answer = response.status, await read_answer(response, MAX_ANSWER_BYTES)
                self._is_lost = False
                return answer
        except TimeoutError:
            raise self._lost(where, f"no answer within {self.config.timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            # The error's text may quote the request, which contains the key.
            reason = os.strerror(error.os_error.errno or 0) if isinstance(error, aiohttp.ClientConnectorError) else ""
            raise self._lost(where, reason or type(error).__name__) from None
        except ValueError as error:
            problem = self._without_key(str(error))[:REFUSAL_SHOWN]
            raise EpisodeError(f"{where}: {problem}", reason="remote_answer") from None

    def _lost(self, where: str, reason: str) -> EngineLostError:
        """Make the error of a call without an answer, and tell the user of the first in a row."""
        if not self._is_lost:
            self._is_lost = True
            self.tell(
                f"policy {self.policy!r} at {self.config.url} does not answer ({reason}); its calls are retried, and "
                "what needs them waits. Is the server running?"
            )
        return EngineLostError(f"{where}: {reason}")

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        text = bytes(request.token_ids.tolist()).decode()
        # `splitlines` would also split at separators inside messages.
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [
                {key: value for key, value in line.items() if key != "usage"} for line in lines if "tools" not in line
            ],
            self._limit_name: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        penalties = {name: getattr(sampling, name) for name in ("presence_penalty", "frequency_penalty")}
        body |= {name: value for name, value in penalties.items() if value}
        for name in self._left_out:
            if body[name] == 1.0:  # which is without effect
                del body[name]
        if lines and "tools" in lines[0]:
            body["tools"] = lines[0]["tools"]
        return body

    def _without_key(self, text: str) -> str:
        return self._key_pattern.sub("…", text) if self._key_pattern else text

    def _strip_key(self, value: Any) -> Any:
        """Remove every occurrence of the key from JSON data."""
        if isinstance(value, str):
            return self._without_key(value)
        if isinstance(value, list):
            return [self._strip_key(item) for item in value]
        if isinstance(value, dict):
            return {self._without_key(key): self._strip_key(item) for key, item in value.items()}
        return value


def _answer(content: bytes) -> tuple[dict[str, Any], Any]:
    """Return an answer's message with the fields that are kept, and its finish reason."""
    answer = json.loads(content)
    choice = answer["choices"][0]
    message = choice["message"]
    reply: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("tool_calls"):
        reply["tool_calls"] = message["tool_calls"]
    if not isinstance(reply["content"], str):
        raise ValueError("its content is not text")
    if counts := reported_token_usage(answer):
        reply["usage"] = counts
    return reply, choice.get("finish_reason")


def _pattern_of(key: str) -> re.Pattern[str]:
    """Return a pattern of a key, also in addresses, in base64 and in JSON, whose arguments of calls are JSON again."""
    forms = (key, quote(key, safe=""), base64.b64encode(key.encode()).decode().rstrip("="))
    escaped = (
        "".join(rf"(?:\\{{0,4}}{re.escape(letter)}|\\{{1,4}}u(?i:{ord(letter):04x}))" for letter in form)
        for form in forms
    )
    return re.compile("|".join(escaped))


def _line(message: dict[str, Any]) -> bytes:
    return (json.dumps(message, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _refusal(policy: str, why: str, limit: StopReason = "refused") -> Completion:
    """Make the completion recorded for a turn that the endpoint refused; see `JsonChatFormat.parse`."""
    line = {"role": "assistant", "content": "", "refused": why} | ({} if limit == "refused" else {"limit": limit})
    return external_completion(policy, _line(line), "stop")
