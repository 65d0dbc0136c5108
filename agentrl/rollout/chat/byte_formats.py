"""Chat formats that need no tokenizer: a token is a UTF-8 byte.

`PlainChatFormat` is for tests, simulations and the environment checker: ids 256 and above are control tokens, tool
calls are written in the Hermes form, and content never becomes a control token. It needs no files and no libraries, and
costs little compared with the loop it tests.

`JsonChatFormat` is for policies behind a chat endpoint, which take messages and return a message; their tokens are not
visible. The context is the conversation itself, a JSON line per message in OpenAI's form (the first may hold the
tools), and the engine (`engines/remote_policy.py`) reads it back, so journal, replay and forks work as for any other
policy. A line with `refused` is not a message: the endpoint declined to answer. If it names a limit, such as the length
of the context, the line has `limit`. A line's `usage` is the endpoint's own count of tokens, which is never sent back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.core.records import FinishReason, Message, SampledTurn, ToolCall, ToolSpec, reported_token_usage
from agentrl.core.reply_formats import (
    CLOSE,
    OPEN,
    REPLY_FORMATS,
    arguments_object,
    find_foreign_call,
    parse_hermes,
    parse_json_value,
)
from agentrl.environment.context import LimitReachedError

if TYPE_CHECKING:
    from collections.abc import Sequence

START_TOKEN, STOP_TOKEN = 256, 257

_LITERALS = {START_TOKEN: "<|start|>", STOP_TOKEN: "<|stop|>"}
_IDS = {literal: token for token, literal in _LITERALS.items()}
_PIECES = [*(bytes([byte]) for byte in range(256)), *(literal.encode() for _, literal in sorted(_LITERALS.items()))]
"""Bytes of each token, tabulated because a policy decodes its whole context at every turn."""
_CONTROL = re.compile("(" + "|".join(map(re.escape, _IDS)) + ")")
_PROMPT = [START_TOKEN, *b"assistant\n"]


class PlainChatFormat:
    """A chat format with `<|start|>role\\ncontent<|stop|>` per message, in bytes.

    Example:
        >>> chat = PlainChatFormat()
        >>> chat.parse(chat.encode("hello") + [STOP_TOKEN]).content
        'hello'
    """

    stop_token_ids: tuple[int, ...] = (STOP_TOKEN,)
    fingerprint = b"bytes"
    rewrites: tuple[str, ...] = ()
    forks = reads_earlier = False
    shows_tools = True
    call_frame: tuple[str, ...] | None = REPLY_FORMATS["hermes"].call_frame

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the token ids of a new conversation; tools become a first message that lists name and argument
        names.
        """
        ids: list[int] = []
        if tools:
            tool_lines = "\n".join(f"{tool.name}({', '.join(tool.parameters.get('properties', ()))})" for tool in tools)
            ids += [START_TOKEN, *f"tools\n{tool_lines}".encode("utf-8", "replace"), STOP_TOKEN]
        for message in messages:
            ids += _message_ids(message)
        return ids + _PROMPT

    def extend(
        self,
        messages: Sequence[Message],
        *,
        after: FinishReason,
        turn: Sequence[int] = (),
        context: Sequence[int] = (),
        earlier: Sequence[Message] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """Return the token ids that follow a sampled turn; its stop token is added unless it was sampled."""
        ids = [] if after == "stop" else [STOP_TOKEN]
        for message in messages:
            ids += _message_ids(message)
        return ids + _PROMPT

    def write_reply(self, text: str, context: Sequence[int], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return [*self.encode(text.removesuffix(_LITERALS[STOP_TOKEN])), STOP_TOKEN]

    def rewritten(
        self, turns: Sequence[SampledTurn], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        return None

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        context: Sequence[int] = (),
        reads_calls: bool = True,
    ) -> Message:
        """Return the assistant message of a completion; control tokens are left out."""
        text = _bytes(token_ids).decode("utf-8", "replace")
        content, calls = parse_hermes(text) if reads_calls else (text, ())
        return Message(role="assistant", content=content, tool_calls=calls)

    def foreign_call(
        self, token_ids: Sequence[int], tools: Sequence[ToolSpec], *, context: Sequence[int] = ()
    ) -> ToolCall | None:
        return find_foreign_call(_bytes(token_ids).decode("utf-8", "replace"), tools, "hermes")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, control tokens as `<|start|>` and `<|stop|>`."""
        return b"".join([_PIECES[token] for token in token_ids]).decode("utf-8", "replace")

    def encode(self, text: str, context: Sequence[int] = ()) -> list[int]:
        """Return the token ids of text; literals of control tokens are recognized."""
        ids: list[int] = []
        for part in _CONTROL.split(text):
            control = _IDS.get(part)
            ids += part.encode("utf-8", "replace") if control is None else (control,)
        return ids

    def drift(self, token_ids: Sequence[int], context: Sequence[int] = ()) -> str | None:
        """Return `undecodable` if the bytes are not UTF-8, else None: bytes are never merged."""
        try:
            _bytes(token_ids).decode()
        except UnicodeDecodeError:
            return "undecodable"
        return None


def _bytes(token_ids: Sequence[int]) -> bytes:
    return bytes([token for token in token_ids if token < START_TOKEN])


def _message_ids(message: Message) -> list[int]:
    """Return the tokens of one message; an assistant's are its content and its calls, as they would have been
    sampled.
    """
    text = message.content + "".join(_call_text(call) for call in message.tool_calls)
    return [START_TOKEN, *f"{message.role}\n{text}".encode("utf-8", "replace"), STOP_TOKEN]


def _call_text(call: ToolCall) -> str:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))
    return f'{OPEN}{{"name":{json.dumps(call.name)},"arguments":{arguments}}}{CLOSE}'


class JsonChatFormat:
    """A chat format with one line of JSON per message.

    Example:
        >>> chat = JsonChatFormat()
        >>> chat.decode(chat.extend([Message(role="user", content="2 + 3?")], after="stop"))
        '{"role": "user", "content": "2 + 3?"}\\n'
    """

    stop_token_ids: tuple[int, ...] = ()
    fingerprint = b"json lines"
    rewrites: tuple[str, ...] = ()
    forks = reads_earlier = False
    shows_tools = True
    call_frame: tuple[str, ...] | None = None

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        tool_objects = [{"type": "function", "function": _tool_object(tool)} for tool in tools]
        return (self.encode(_line({"tools": tool_objects})) if tool_objects else []) + self.extend(
            messages, after="stop"
        )

    def extend(
        self,
        messages: Sequence[Message],
        *,
        after: FinishReason,
        turn: Sequence[int] = (),
        context: Sequence[int] = (),
        earlier: Sequence[Message] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        return self.encode("".join(_line(_message_value(message)) for message in messages))

    def write_reply(self, text: str, context: Sequence[int], tools: Sequence[ToolSpec] = ()) -> list[int]:
        value = parse_json_value(text)
        return self.encode(_line(value if isinstance(value, dict) else {"role": "assistant", "content": text}))

    def rewritten(
        self, turns: Sequence[SampledTurn], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        return None

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        context: Sequence[int] = (),
        reads_calls: bool = True,
    ) -> Message:
        text = self.decode(token_ids)
        try:
            line = json.loads(text)
            content, calls, refusal = line.get("content"), line.get("tool_calls"), line.get("refused")
        except (ValueError, AttributeError, RecursionError):
            return Message(role="assistant", content=text)
        if refusal is not None:
            full = line.get("limit") == "context_length"
            raise LimitReachedError(str(refusal), stop_reason="context_length" if full else "refused")
        return Message(
            role="assistant",
            content=content if isinstance(content, str) else "",
            tool_calls=tuple(_tool_call(call) for call in calls if _is_call(call)) if isinstance(calls, list) else (),
        )

    def foreign_call(self, token_ids: Sequence[int], tools: Sequence[ToolSpec], *, context: Sequence[int] = ()) -> None:
        """Return None: the endpoint reads its model's calls."""

    def usage(self, token_ids: Sequence[int]) -> dict[str, int]:
        """Return the endpoint's token counts of a turn; empty if it gave none."""
        try:
            line = json.loads(self.decode(token_ids))
        except (ValueError, RecursionError):
            return {}
        return reported_token_usage(line) if isinstance(line, dict) else {}

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if 0 <= token < 256).decode("utf-8", "replace")

    def encode(self, text: str, context: Sequence[int] = ()) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def drift(self, token_ids: Sequence[int], context: Sequence[int] = ()) -> str | None:
        return None


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _tool_object(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}


def _message_value(message: Message) -> dict[str, Any]:
    line: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        line["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _written(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        line["tool_call_id"] = message.tool_call_id
    return line


def _written(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    """Convert a call of the endpoint; arguments that are not a JSON object stay text."""
    arguments_text = call["function"].get("arguments")
    text = arguments_text if isinstance(arguments_text, str) else json.dumps(arguments_text)
    parsed_arguments = arguments_object(arguments_text)
    name = call["function"]["name"]
    return ToolCall(id=str(call.get("id")), name=name, arguments=text if parsed_arguments is None else parsed_arguments)
