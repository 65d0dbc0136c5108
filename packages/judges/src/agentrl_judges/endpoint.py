"""An endpoint that speaks OpenAI's chat completions.

Invariants: the key is sent to its endpoint only, never along redirects and never unencrypted to another machine, and is
removed from replies and errors. An answer that may have been cut is an error.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

MAX_ANSWER_BYTES = 1 << 17
COMPLETE = ("stop", "eos_token", "end_turn", "stop_sequence")
"""Finish reasons of complete answers. Endpoints name a limit in several ways, and an answer without a reason may have
been cut."""
ABOUT_THE_CONTENT = frozenset({400, 403, 413, 414, 422, 451})
"""Status codes that refuse a request's content (too long, filtered), as long as other requests are answered."""
REFUSED_IN_A_ROW = 8
"""Number of consecutive refusals after which the endpoint is considered to refuse everything."""
_CONTEXT = re.compile(r"context_length_exceeded|(maximum )?context (length|window)|prompt is too long", re.IGNORECASE)


class JudgeError(Exception):
    """A judge gave no score."""


class RefusedError(JudgeError):
    """The endpoint refuses the content."""


@dataclass
class Endpoint:
    """An endpoint and a model behind it."""

    url: str
    """Base URL, such as `https://api.example.com/v1`."""
    model: str
    """The endpoint's name for the model."""
    api_key_env: str = ""
    """Environment variable that holds the API key; empty: no key is sent."""
    options: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": 1024, "temperature": 1.0})
    """Further fields of each request."""
    _refusals_left: int = 0
    """Number of refusals that still count as caused by the content; 0: no recent answer."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is not the URL of an endpoint, such as https://api.example.com/v1")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError("the URL contains a key or password: remove it, and use api_key_env")
        if self.api_key_env and parts.scheme == "http" and not _is_loopback(parts.hostname):
            raise ValueError(f"{self.url}: the key would be sent unencrypted; use https, or a tunnel to this machine")
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(f"{self.api_key_env}: the environment variable with the endpoint's key is not set")

    async def ask(self, prompt: str) -> str:
        """Return the complete reply to a prompt.

        Raises:
            RefusedError: the endpoint refuses the content.
            JudgeError: there is no complete reply.
        """
        key = os.environ[self.api_key_env] if self.api_key_env else ""
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], **self.options}
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with (
                aiohttp.ClientSession(auto_decompress=False) as session,
                session.post(
                    f"{self.url.rstrip('/')}/chat/completions", json=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                status, content = response.status, bytearray()
                async for chunk in response.content.iter_chunked(1 << 16):
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise JudgeError(f"{self.url}: its answer has more than {MAX_ANSWER_BYTES} bytes")
        except aiohttp.ClientError as error:  # its text may quote the request, which contains the key
            raise JudgeError(f"{self.url}: {type(error).__name__}") from None
        if status != 200:
            text = without_key(content.decode("utf-8", "replace"), key)
            is_content = status in ABOUT_THE_CONTENT and (self._refusals_left or _CONTEXT.search(text))
            self._refusals_left -= bool(is_content and self._refusals_left)
            raise (RefusedError if is_content else JudgeError)(f"{self.url}: status {status}: {text[:300]}")
        try:
            choice = json.loads(content)["choices"][0]
            reply, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise JudgeError(f"{self.url}: its answer is not a chat completion ({type(error).__name__})") from None
        self._refusals_left = REFUSED_IN_A_ROW
        if reason == "content_filter":
            raise RefusedError(f"{self.url}: its answer was filtered")
        if not isinstance(reply, str) or reason not in COMPLETE:
            raise JudgeError(f"{self.url}: the reply was cut before its end, or is not text; raise max_tokens")
        return without_key(reply, key)


def without_key(text: str, key: str) -> str:
    """Remove a key from a text, also in addresses, in base64 and in JSON. A key below 8 characters is a word and not a
    secret."""
    if len(key) < 8:
        return text
    forms = (key, quote(key, safe=""), base64.b64encode(key.encode()).decode().rstrip("="))
    escaped = (
        "".join(rf"(?:\\{{0,4}}{re.escape(letter)}|\\{{1,4}}u(?i:{ord(letter):04x}))" for letter in form)
        for form in forms
    )
    return re.sub("|".join(escaped), "…", text)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
