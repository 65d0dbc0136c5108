"""`PlainFormat`: a chat format of bytes, for tests, simulations and the environment checker.

Needs no files and no libraries: an id below 256 is a UTF-8 byte, the ids above are control tokens. Tool calls are
written in the Hermes form. Cheap enough to vanish beside the loop it tests. Content never becomes a control token.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from agentrl.core.records import FinishReason, Message, ToolCall, ToolSpec
from agentrl.rollout.tool_call_format import CLOSE, OPEN, parse_hermes

if TYPE_CHECKING:
    from collections.abc import Sequence

START_TOKEN, STOP_TOKEN = 256, 257
VOCABULARY_SIZE = 258

_LITERALS = {START_TOKEN: "<|start|>", STOP_TOKEN: "<|stop|>"}
_IDS = {literal: token for token, literal in _LITERALS.items()}
_PIECES = [*(bytes([byte]) for byte in range(256)), *(literal.encode() for _, literal in sorted(_LITERALS.items()))]
"""By token; a policy decodes its whole context at every turn."""
_CONTROL = re.compile("(" + "|".join(map(re.escape, _IDS)) + ")")
_PROMPT = [START_TOKEN, *b"assistant\n"]


class PlainFormat:
    """`<|start|>role\\ncontent<|stop|>` per message, in bytes.

    Example:
        >>> chat = PlainFormat()
        >>> chat.parse(chat.encode("hello") + [STOP_TOKEN]).content
        'hello'
    """

    stop_token_ids: tuple[int, ...] = (STOP_TOKEN,)
    fingerprint = b"bytes"

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Token ids of a new conversation; tools become a first message that lists name and argument names."""
        ids: list[int] = []
        if tools:
            listed = "\n".join(f"{tool.name}({', '.join(tool.parameters.get('properties', ()))})" for tool in tools)
            ids += [START_TOKEN, *f"tools\n{listed}".encode("utf-8", "replace"), STOP_TOKEN]
        for message in messages:
            ids += _message(message)
        return ids + _PROMPT

    def extend(self, messages: Sequence[Message], *, after: FinishReason) -> list[int]:
        """Token ids that follow a sampled turn; its stop token is added unless it was sampled."""
        ids = [] if after == "stop" else [STOP_TOKEN]
        for message in messages:
            ids += _message(message)
        return ids + _PROMPT

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The assistant message a completion says; control tokens are left out."""
        text = _bytes(token_ids).decode("utf-8", "replace")
        content, calls = parse_hermes(text)
        return Message(role="assistant", content=content, tool_calls=calls)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, control tokens as `<|start|>` and `<|stop|>`."""
        return b"".join([_PIECES[token] for token in token_ids]).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """Token ids of text, the control tokens' literals recognised."""
        ids: list[int] = []
        for part in _CONTROL.split(text):
            control = _IDS.get(part)
            ids += part.encode("utf-8", "replace") if control is None else (control,)
        return ids

    def drift(self, token_ids: Sequence[int]) -> str | None:
        """`undecodable` where the bytes are not UTF-8, else None: bytes are never merged."""
        try:
            _bytes(token_ids).decode()
        except UnicodeDecodeError:
            return "undecodable"
        return None


def _bytes(token_ids: Sequence[int]) -> bytes:
    return bytes([token for token in token_ids if token < START_TOKEN])


def _message(message: Message) -> list[int]:
    """A message an assistant wrote is its content and its calls, as they would have been sampled."""
    text = message.content + "".join(_call(call) for call in message.tool_calls)
    return [START_TOKEN, *f"{message.role}\n{text}".encode("utf-8", "replace"), STOP_TOKEN]


def _call(call: ToolCall) -> str:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))
    return f'{OPEN}{{"name":{json.dumps(call.name)},"arguments":{arguments}}}{CLOSE}'
