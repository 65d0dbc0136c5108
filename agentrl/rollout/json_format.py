"""`JsonFormat`: a chat format of JSON lines in UTF-8, a byte a token, for policies behind a chat endpoint.

Such a policy takes messages and gives a message; what it tokenised is not ours to know. So the context is the
conversation itself, a line a message in OpenAI's form (the first may hold the tools), and the engine
(`engines/remote.py`) reads it back. Journal, replay and forks need to know nothing of that. A line with `refused` is no
message: the endpoint would not answer what was said, which is a limit like the length of a context. A line's `usage` is
the endpoint's own count of tokens, which is sent to nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.core.records import Message, ToolCall, usage_of
from agentrl.environment.base import LimitReachedError
from agentrl.rollout.tool_call_format import json_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.core.records import FinishReason, ToolSpec


class JsonFormat:
    """A line of JSON per message.

    Example:
        >>> chat = JsonFormat()
        >>> chat.decode(chat.extend([Message(role="user", content="2 + 3?")], after="stop"))
        '{"role": "user", "content": "2 + 3?"}\\n'
    """

    stop_token_ids: tuple[int, ...] = ()
    fingerprint = b"json lines"

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """See `core.ports.ChatFormat.start`."""
        described = [{"type": "function", "function": _described(tool)} for tool in tools]
        return (self.encode(_line({"tools": described})) if described else []) + self.extend(messages, after="stop")

    def extend(self, messages: Sequence[Message], *, after: FinishReason) -> list[int]:
        """See `core.ports.ChatFormat.extend`; what was said ends with its line, however it ended."""
        return self.encode("".join(_line(_said(message)) for message in messages))

    def parse(self, token_ids: Sequence[int]) -> Message:
        """See `core.ports.ChatFormat.parse`.

        Raises:
            LimitReachedError: the endpoint refused.
        """
        text = self.decode(token_ids)
        try:
            said = json.loads(text)
            content, calls, refused = said.get("content"), said.get("tool_calls"), said.get("refused")
        except (ValueError, AttributeError, RecursionError):
            return Message(role="assistant", content=text)
        if refused is not None:
            raise LimitReachedError(str(refused), stop_reason="refused")
        return Message(
            role="assistant",
            content=content if isinstance(content, str) else "",
            tool_calls=tuple(_call(call) for call in calls if _is_call(call)) if isinstance(calls, list) else (),
        )

    def usage(self, token_ids: Sequence[int]) -> dict[str, int]:
        """The endpoint's own counts of tokens for a turn; empty where it gave none, or a program said it."""
        try:
            said = json.loads(self.decode(token_ids))
        except (ValueError, RecursionError):
            return {}
        return usage_of(said) if isinstance(said, dict) else {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `core.ports.ChatFormat.decode`."""
        return bytes(token for token in token_ids if 0 <= token < 256).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """See `core.ports.ChatFormat.encode`."""
        return list(text.encode("utf-8", "replace"))

    def drift(self, token_ids: Sequence[int]) -> str | None:
        """See `core.ports.ChatFormat.drift`: bytes are never merged."""
        return None


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _described(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}


def _said(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _written(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        said["tool_call_id"] = message.tool_call_id
    return said


def _written(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _call(call: Mapping[str, Any]) -> ToolCall:
    """A call as the endpoint wrote it; arguments that are no JSON object stay text."""
    written = call["function"].get("arguments")
    text = written if isinstance(written, str) else json.dumps(written)
    parsed = json_value(text)
    name = call["function"]["name"]
    return ToolCall(id=str(call.get("id")), name=name, arguments=parsed if isinstance(parsed, dict) else text)
