"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`.

A message of blocks becomes several messages: one of role `tool` per tool result, and one of role `user` for the texts.
Thinking that a client sends back is left out: the sampled tokens contain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

from agentrl.core.records import Message, ToolCall, ToolSpec
from agentrl.gateway.calls import (
    ChatReply,
    ChatRequest,
    RefusalKind,
    ReplyEnd,
    RequestRefusedError,
    bounded_repr,
    order_tool_results,
    read_integer,
    require_object_list,
    require_text,
    stop_texts,
)
from agentrl.gateway.chat_completions import tool_arguments_text
from agentrl.gateway.options import ignored_fields, read_reply_form, read_sampling, read_tool_choice, unsupported_fields

_UNSUPPORTED = ("mcp_servers", "container")
_NUMBERS = ("temperature", "top_p", "top_k")
_KNOWN = {
    *_UNSUPPORTED,
    *("model", "messages", "system", "tools", "max_tokens", "stop_sequences", "stream"),
    *_NUMBERS,
    *("tool_choice", "output_config", "output_format"),
}
"""Fields that are read or refused."""
_ERRORS: Mapping[RefusalKind, str] = {
    "key": "authentication_error",
    "forbidden": "permission_error",
    "foreign_conversation": "permission_error",
    "limit": "permission_error",
    "model": "not_found_error",
    "large": "request_too_large",
    "unavailable": "overloaded_error",
}
THREAD = "thread"
"""Field that asks the server to hold the conversation, so that later requests have only its new messages."""
MALFORMED = "malformed_arguments"
"""Only key of a call's input whose arguments are not a JSON object; its value is their text."""


class AnthropicMessagesProtocol:
    name = "messages"
    keepalive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        if body.get(THREAD):
            raise RequestRefusedError(
                "thread is not supported, because nothing is stored between requests; send the whole conversation in "
                "`messages`",
                "invalid",
                THREAD,
            )
        output = body["output_config"] if isinstance(body.get("output_config"), dict) else {}
        choice = body.get("tool_choice")
        tools = [_tool(tool) for tool in require_object_list(body.get("tools") or [], "tools")]
        unread = {
            "output_config.effort": output.get("effort"),
            "output_config.task_budget": output.get("task_budget"),
            "disable_parallel_tool_use": isinstance(choice, dict) and choice.get("disable_parallel_tool_use"),
            "tools.strict": any(tool.get("strict") for tool in body.get("tools") or []),
        }
        return ChatRequest(
            model=require_text(body.get("model"), "model"),
            messages=order_tool_results(_messages(body), "messages"),
            tools=tools,
            max_tokens=read_integer(body, "max_tokens"),
            stop=stop_texts(body.get("stop_sequences"), "stop_sequences"),
            stream=body.get("stream") is True,
            sampling=read_sampling(body, _NUMBERS),
            tool_choice=read_tool_choice(choice, tools),
            reply_form=read_reply_form(output.get("format") or body.get("output_format"), "output_config.format"),
            demands=unsupported_fields(body, _UNSUPPORTED, _NUMBERS),
            ignored=ignored_fields(body, _KNOWN, unread),
        )

    def whole(self, request: ChatRequest, replies: Sequence[ChatReply]) -> dict[str, Any]:
        reply = replies[0]
        return {
            **_head(request, reply),
            "content": list(_blocks(reply)),
            "stop_reason": _stop_reason(reply.finish_reason),
            "stop_sequence": reply.stop_text if reply.finish_reason == "stop_text" else None,
            "usage": _usage(reply, reply.completion_tokens),
        }

    def events(self, request: ChatRequest, replies: Sequence[ChatReply]) -> Sequence[tuple[str | None, Any]]:
        reply = replies[0]
        stream: list[dict[str, Any]] = []
        start = {**_head(request, reply), "content": [], "stop_reason": None, "stop_sequence": None}
        stream.append({"type": "message_start", "message": {**start, "usage": _usage(reply, 0)}})
        for n, block in enumerate(_blocks(reply)):
            match block["type"]:
                case "thinking":
                    empty = {**block, "thinking": ""}
                    delta = {"type": "thinking_delta", "thinking": block["thinking"]}
                case "text":
                    empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
                case _:
                    call = ToolCall(id="", name="", arguments=block["input"])
                    empty = {**block, "input": {}}
                    delta = {"type": "input_json_delta", "partial_json": tool_arguments_text(call)}
            stream.append({"type": "content_block_start", "index": n, "content_block": empty})
            stream.append({"type": "content_block_delta", "index": n, "delta": delta})
            stream.append({"type": "content_block_stop", "index": n})
        response = self.whole(request, replies)
        delta = {"stop_reason": response["stop_reason"], "stop_sequence": response["stop_sequence"]}
        stream.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": reply.completion_tokens}})
        stream.append({"type": "message_stop"})
        return [(event["type"], event) for event in stream]

    def refusal(self, error: RequestRefusedError) -> dict[str, Any]:
        kind = _ERRORS.get(error.kind, "invalid_request_error")
        described: dict[str, Any] = {"type": kind, "message": str(error)}
        if error.parameter == THREAD:  # clients that know this code send whole conversations from then on
            described["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": described}


def _messages(body: Mapping[str, Any]) -> list[Message]:
    """Read the messages of a request, the system message first.

    Raises:
        RequestRefusedError: there are none, or they contain more than text.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}
    if body.get("system"):
        messages.append(Message(role="system", content=_text(body["system"], "system")))
    for n, item in enumerate(require_object_list(body.get("messages"), "messages")):
        location, content = f"messages[{n}].content", item.get("content")
        blocks = (
            [{"type": "text", "text": content}] if isinstance(content, str) else require_object_list(content, location)
        )
        match item.get("role"):
            case "assistant":
                messages.append(_assistant_message(blocks, location))
                names.update((call.id, call.name) for call in messages[-1].tool_calls)
            case "user":
                messages += _user_messages(blocks, location, names)
            case "system":
                messages.append(Message(role="system", content=_text(blocks, location)))
            case other:
                raise RequestRefusedError(f"messages[{n}].role is {bounded_repr(other)}", "invalid", location)
    if not messages or messages[-1].role == "assistant":
        raise RequestRefusedError(
            "messages: the last one must have role user, since a reply of the assistant cannot be continued"
        )
    return messages


def _assistant_message(blocks: Sequence[Mapping[str, Any]], location: str) -> Message:
    """Build the model's message from its content blocks."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(require_text(block.get("text"), location))
            case "tool_use":
                tool_input = block.get("input")
                if not isinstance(tool_input, dict):
                    raise RequestRefusedError(
                        f"{location}: input is {bounded_repr(tool_input)}, which is not an object", "invalid", location
                    )
                arguments = (
                    require_text(tool_input[MALFORMED], location) if set(tool_input) == {MALFORMED} else tool_input
                )
                name = require_text(block.get("name"), location)
                calls.append(ToolCall(id=require_text(block.get("id"), location), name=name, arguments=arguments))
            case "thinking" | "redacted_thinking":
                pass
            case other:
                raise RequestRefusedError(f"{location} has a block of type {bounded_repr(other)}", "invalid", location)
    return Message(role="assistant", content="\n".join(texts), tool_calls=tuple(calls))


def _user_messages(blocks: Sequence[Mapping[str, Any]], location: str, names: Mapping[str, str]) -> Iterator[Message]:
    """Read the messages in a message of the user."""
    texts: list[str] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            call_id = require_text(block.get("tool_use_id"), location)
            content = _text(block.get("content") or "", location)
            if block.get("is_error") and "error" not in content[:100].lower():
                content = f"error: {content}"
            yield Message(role="tool", content=content, tool_call_id=call_id, name=names.get(call_id))
        else:
            texts.append(_text([block], location))
    if texts:
        yield Message(role="user", content="\n".join(texts))


def _text(value: Any, location: str) -> str:
    """Return a text, or the joined texts of blocks.

    Raises:
        RequestRefusedError: a block is something else.
    """
    if isinstance(value, str):
        return value
    parts = []
    for block in require_object_list(value, location):
        if block.get("type") != "text":
            kind = bounded_repr(block.get("type"))
            raise RequestRefusedError(
                f"{location} has a block of type {kind}; this model reads text only", "invalid", location
            )
        parts.append(require_text(block.get("text"), location))
    return "\n".join(parts)


def _tool(tool: Mapping[str, Any]) -> ToolSpec:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestRefusedError(
            f"a tool of type {bounded_repr(tool.get('type'))} is not supported; give a tool with an input_schema",
            "invalid",
            "tools",
        )
    description = require_text(tool.get("description") or "", "tools.description")
    return ToolSpec(name=require_text(tool.get("name"), "tools.name"), description=description, parameters=schema)


def _head(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    return {"id": f"msg_{reply.reply_id}", "type": "message", "role": "assistant", "model": request.model}


def _blocks(reply: ChatReply) -> Iterator[dict[str, Any]]:
    if reply.thinking:
        yield {"type": "thinking", "thinking": reply.thinking, "signature": reply.reply_id}
    if reply.message.content:
        yield {"type": "text", "text": reply.message.content}
    for call in reply.message.tool_calls:
        tool_input = {MALFORMED: tool_arguments_text(call)} if isinstance(call.arguments, str) else dict(call.arguments)
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input}


def _usage(reply: ChatReply, num_sampled: int) -> dict[str, int]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_sampled,
    }


def _stop_reason(end: ReplyEnd) -> str:
    match end:
        case "stop":
            return "end_turn"
        case "length":
            return "max_tokens"
        case "tool_calls":
            return "tool_use"
        case "stop_text":
            return "stop_sequence"
        case _:
            assert_never(end)
