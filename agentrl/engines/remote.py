"""Policies behind an endpoint that speaks OpenAI's chat completions.

Owns: the HTTP calls, and what of an answer is kept. The context of a call is the conversation as JSON lines
(`rollout/json_format.py`), a byte a token; so is what comes back, with logprob 0.
Invariants: the key is sent to its endpoint, also after redirects to none, and appears in no message of ours; what is
not there in time, is overloaded or broken is `EngineLostError`, tried again by whoever asked; what is no answer, or is
refused whatever is said, ends the episode by name; what is refused because of what was said is recorded like a turn
and truncates the episode, or a policy could void what it loses.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from agentrl.core.errors import ConfigError, EngineLostError, EpisodeError
from agentrl.core.records import Completion
from agentrl.engines.outside import completion

if TYPE_CHECKING:
    from agentrl.config.policies import RemotePolicy
    from agentrl.core.ports import GenerateRequest

MAX_ANSWER_BYTES = 4 << 20
BUSY = frozenset({408, 409, 425, 429})
"""Refusals that say: later. So does every status from 500."""
ABOUT_THE_REQUEST = frozenset({400, 403, 413, 414, 422, 451})
"""Refusals of what was said (too long, filtered), where other requests are answered; of any, where none is."""
REFUSED_IN_A_ROW = 8
"""So many of those, and it is not what was said: the endpoint refuses all."""
REFUSAL_SHOWN = 300


@dataclass(slots=True, eq=False, kw_only=True)
class Endpoint:
    """See `outside.Outside`: where one remote policy lives."""

    policy: str
    config: RemotePolicy
    _key: str = ""
    _client: aiohttp.ClientSession | None = None
    _refusals_left: int = 0
    """How many more are taken for refusals of what was said; 0: it has not answered lately, or never."""
    _places: asyncio.Semaphore = field(init=False)
    _asking: dict[str, asyncio.Task[Completion]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = self.config.api_key_env
        self._key = os.environ.get(name, "") if name else ""
        if name and not self._key:
            raise ConfigError(f"policies.{self.policy}.api_key_env: the environment has no variable {name}; set it")
        self._places = asyncio.Semaphore(self.config.max_concurrent)

    async def generate(self, request: GenerateRequest, where: str) -> Completion:
        """Ask once; an abort ends it without a token."""
        asking = asyncio.get_running_loop().create_task(self._ask(request, where), name=request.request_id)
        self._asking[request.request_id] = asking
        try:
            await asyncio.wait({asking})
            return completion(self.policy, b"", "abort") if asking.cancelled() else asking.result()
        finally:
            asking.cancel()
            del self._asking[request.request_id]

    def abort(self, request_id: str) -> None:
        """End a call in flight."""
        if request_id in self._asking:
            self._asking[request_id].cancel()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._client is not None:
            await self._client.close()

    async def _ask(self, request: GenerateRequest, where: str) -> Completion:
        here = f"{where}, policy {self.policy!r} at {self.config.url}"
        async with self._places:
            status, content = await self._post(request, here)
        if status in BUSY or status >= 500:
            raise EngineLostError(f"{here}: status {status}")
        if status != 200 or content is None:
            said = f"more than {MAX_ANSWER_BYTES} bytes" if content is None else content.decode("utf-8", "replace")
            told = f"{here}: status {status}: {self._without_key(said)[:REFUSAL_SHOWN]}"
            if self._refusals_left and status in ABOUT_THE_REQUEST:
                self._refusals_left -= 1
                return _refused(self.policy, told)
            raise EpisodeError(told, reason="remote_refused")
        try:
            message, reason = _answer(content)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise EpisodeError(
                f"{here}: its answer is no chat completion ({error!r})", reason="remote_answer"
            ) from None
        self._refusals_left = REFUSED_IN_A_ROW
        if reason == "content_filter":
            return _refused(self.policy, f"{here}: its answer was filtered")
        return completion(self.policy, _line(message), "length" if reason == "length" else "stop")

    async def _post(self, request: GenerateRequest, here: str) -> tuple[int, bytes | None]:
        """Status and body; no body where it is longer than anybody needs."""
        if self._client is None:
            # A small compressed answer may be a large one: none is asked for, and none is read.
            self._client = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.config.timeout_s),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with self._client.post(
                f"{self.config.url}/chat/completions", json=self._body(request), headers=headers, allow_redirects=False
            ) as response:
                packed = response.headers.get("Content-Encoding", "identity")
                if packed.lower() != "identity":
                    raise EpisodeError(
                        f"{here}: it compresses its answers, unasked ({self._without_key(packed)[:REFUSAL_SHOWN]!r})",
                        reason="remote_answer",
                    )
                return response.status, await _limited(response)
        except TimeoutError:
            raise EngineLostError(f"{here}: no answer within {self.config.timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineLostError(f"{here}: {type(error).__name__}") from None  # its text may quote what was sent

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        said = bytes(request.token_ids.tolist()).decode()
        lines = [json.loads(line) for line in said.split("\n")[:-1]]  # `splitlines` would cut inside of messages too
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [line for line in lines if "tools" not in line],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if lines and "tools" in lines[0]:
            body["tools"] = lines[0]["tools"]
        return body

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "…") if self._key else text


async def _limited(response: aiohttp.ClientResponse) -> bytes | None:
    """The body; None where it is longer than anybody needs."""
    content = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            return None
    return bytes(content)


def _answer(content: bytes) -> tuple[dict[str, Any], Any]:
    """The message of an answer, what is ours to keep of it, and why it ended."""
    choice = json.loads(content)["choices"][0]
    message = choice["message"]
    said: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("tool_calls"):
        said["tool_calls"] = message["tool_calls"]
    if not isinstance(said["content"], str):
        raise ValueError("its content is no text")
    return said, choice.get("finish_reason")


def _line(message: dict[str, Any]) -> bytes:
    return (json.dumps(message, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _refused(policy: str, why: str) -> Completion:
    """What stands in the journal for a turn that there is none of; see `JsonFormat.parse`."""
    return completion(policy, _line({"role": "assistant", "content": "", "refused": why}), "stop")
