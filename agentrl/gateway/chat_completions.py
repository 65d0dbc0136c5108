"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, assert_never, get_args

from agentrl.core.records import Message, Role, ToolCall, ToolSpec
from agentrl.core.reply_formats import arguments_alone
from agentrl.gateway.bodies import parse_json
from agentrl.gateway.calls import (
    ChatReply,
    ChatRequest,
    RequestRefusedError,
    bounded_repr,
    openai_logprobs,
    order_tool_results,
    read_integer,
    require_object_list,
    require_text,
    stop_texts,
)
from agentrl.gateway.options import (
    SAMPLING_FIELDS,
    ignored_fields,
    names_allowed_tools,
    read_reply_form,
    read_sampling,
    read_tool_choice,
    unsupported_fields,
)

MOST_REPLIES = 64
"""Largest accepted `n`."""
_ROLES: dict[str, Role] = {**{role: role for role in get_args(Role)}, "developer": "system", "function": "tool"}
_UNSUPPORTED = ("logit_bias", "functions", "function_call", "modalities", "audio", "web_search_options")
_KNOWN = SAMPLING_FIELDS | {
    *_UNSUPPORTED,
    *("model", "messages", "tools", "max_completion_tokens", "max_tokens", "stop", "n", "stream", "stream_options"),
    *("tool_choice", "response_format", "logprobs", "top_logprobs"),
}
"""Fields that are read or refused."""
_ERRORS = {"key": "invalid_api_key", "model": "model_not_found", "context": "context_length_exceeded"}


class ChatCompletionsProtocol:
    name = "chat completions"
    keepalive = b": waiting\n\n"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        options = body.get("stream_options")
        replies = read_integer(body, "n") or 1
        if replies > MOST_REPLIES:
            raise RequestRefusedError(f"n is {replies}; at most {MOST_REPLIES} is supported", "invalid", "n")
        demands = unsupported_fields(body, _UNSUPPORTED)
        tools = [_tool(tool) for tool in require_object_list(body.get("tools") or [], "tools")]
        unread = {
            "top_logprobs": body.get("top_logprobs"),
            "tools.strict": any(tool["function"].get("strict") for tool in body.get("tools") or []),
            "tool_choice.allowed_tools": names_allowed_tools(body.get("tool_choice")),
        }
        if names := assistant_names(body.get("messages")):
            demands["name"] = names
        return ChatRequest(
            model=require_text(body.get("model"), "model"),
            messages=order_tool_results(parse_messages(body.get("messages")), "messages"),
            tools=tools,
            max_tokens=read_integer(body, "max_completion_tokens") or read_integer(body, "max_tokens"),
            stop=stop_texts(body.get("stop"), "stop"),
            n=replies,
            stream=body.get("stream") is True,
            sampling=read_sampling(body),
            tool_choice=read_tool_choice(body.get("tool_choice"), tools),
            reply_form=read_reply_form(body.get("response_format"), "response_format"),
            logprobs=body.get("logprobs") is True,
            demands=demands,
            ignored=ignored_fields(body, _KNOWN, unread),
            options={"include_usage": isinstance(options, dict) and options.get("include_usage") is True},
        )

    def whole(self, request: ChatRequest, replies: Sequence[ChatReply]) -> dict[str, Any]:
        choices = [
            {
                "index": n,
                "message": _message(reply),
                "logprobs": _logprobs(reply),
                "finish_reason": _finish_reason(reply),
            }
            for n, reply in enumerate(replies)
        ]
        return {**_head(request, replies, "chat.completion"), "choices": choices, "usage": _usage(replies)}

    def events(self, request: ChatRequest, replies: Sequence[ChatReply]) -> Sequence[tuple[str | None, Any]]:
        head = _head(request, replies, "chat.completion.chunk")
        if request.options["include_usage"]:
            head["usage"] = None
        chunks: list[tuple[str | None, Any]] = []

        def add(index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> None:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
            chunks.append((None, {**head, "choices": [choice]}))

        for index, reply in enumerate(replies):
            add(index, {"role": "assistant", "content": ""})
            if reply.thinking:
                add(index, {"reasoning_content": reply.thinking})
            if reply.message.content:
                add(index, {"content": reply.message.content})
            for n, call in enumerate(reply.message.tool_calls):
                add(index, {"tool_calls": [{"index": n, **openai_tool_call(call)}]})
            add(index, {}, _finish_reason(reply), _logprobs(reply))
        if request.options["include_usage"]:
            chunks.append((None, {**head, "choices": [], "usage": _usage(replies)}))
        return [*chunks, (None, "[DONE]")]

    def refusal(self, error: RequestRefusedError) -> dict[str, Any]:
        return openai_refusal(error)


def openai_refusal(refusal: RequestRefusedError) -> dict[str, Any]:
    """Write the body of a refusal in OpenAI's form."""
    kind = "authentication_error" if refusal.kind == "key" else "invalid_request_error"
    if refusal.kind == "unavailable":
        kind = "server_error"
    error = {"message": str(refusal), "type": kind, "param": refusal.parameter, "code": _ERRORS.get(refusal.kind)}
    return {"error": error}


def parse_messages(value: Any) -> list[Message]:
    """Read the messages of a request. The name of a user's or system's message is written before its text, since chat
    templates have no place for it.

    Raises:
        RequestRefusedError: there are none, or they contain more than text.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}
    for n, item in enumerate(require_object_list(value, "messages")):
        location = f"messages[{n}]"
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise RequestRefusedError(f"{location}.role is {bounded_repr(item.get('role'))}", "invalid", location)
        calls = tuple(
            _call(call, location)
            for call in require_object_list(item.get("tool_calls") or [], f"{location}.tool_calls")
        )
        if item.get("function_call") is not None:  # the form before `tool_calls`, answered by role `function`
            legacy = {"id": f"function_call_{n}", "function": item["function_call"]}
            calls = (*calls, _call(legacy, location))
        if calls and role != "assistant":
            raise RequestRefusedError(f"{location} has calls, but its role is {role}", "invalid", location)
        if item.get("audio") is not None:
            raise RequestRefusedError(f"{location} has audio; this model reads text only", "invalid", location)
        names.update((call.id, call.name) for call in calls)
        call_id = item.get("tool_call_id")
        if call_id is None and item.get("role") == "function":
            call_id = next((call for call in reversed(names) if names[call] == item.get("name")), None)
        called = None if call_id is None else names.get(str(call_id))
        name = called or require_text(item.get("name") or "", f"{location}.name") or None
        raw_content = item["refusal"] if item.get("content") is None and item.get("refusal") else item.get("content")
        if raw_content is None and role in ("user", "system"):
            raise RequestRefusedError(f"{location}.content is null; it must be text", "invalid", location)
        content = content_text(raw_content, f"{location}.content")
        if name is not None and role in ("user", "system") and name.lower() not in (role, str(item["role"])):
            content = f"{name}: {content}"
        messages.append(
            Message(
                role=role,
                content=content,
                tool_calls=calls,
                tool_call_id=require_text(call_id, f"{location}.tool_call_id") if call_id is not None else None,
                name=name if role == "tool" else None,
            )
        )
    if not messages:
        raise RequestRefusedError("messages: there must be at least one", "invalid", "messages")
    return messages


def assistant_names(value: Any) -> list[str]:
    """Return the names of a request's assistant messages if they are of several speakers: the model would take all of
    them for its own. Empty for one name, which the model's replies may have."""
    items = value if isinstance(value, list) else ()
    names = [item.get("name") for item in items if isinstance(item, dict) and item.get("role") == "assistant"]
    distinct = list(dict.fromkeys(str(name) for name in names if name))
    return distinct if len(distinct) > 1 else []


def content_text(value: Any, location: str) -> str:
    """Return the text of a message's content: text, or a list of parts with text.

    Raises:
        RequestRefusedError: the content has another part, such as an image.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    parts = []
    for part in require_object_list(value, location):
        kind = part.get("type", "text")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise RequestRefusedError(
                f"{location} has a part of type {bounded_repr(kind)}; this model reads text only", "invalid", location
            )
        parts.append(require_text(part.get("text", part.get("refusal")), f"{location}.text"))
    return "\n".join(parts)


def openai_tool_call(call: ToolCall) -> dict[str, Any]:
    """Write a tool call in OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": tool_arguments_text(call)}}


def tool_arguments_text(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text, or as the model wrote them if they did not parse."""
    if isinstance(call.arguments, str):
        return arguments_alone(call.arguments)
    return json.dumps(call.arguments, ensure_ascii=False)


def parse_tool_arguments(written: Any) -> Mapping[str, Any] | str:
    """Read the arguments of a call that a client sends back. Nothing is a call without arguments."""
    if isinstance(written, dict):
        return written
    if written is None or (isinstance(written, str) and not written.strip()):
        return {}
    try:
        value = parse_json(written)
    except (TypeError, ValueError, RecursionError):
        return str(written)
    return value if isinstance(value, dict) else str(written)


def _call(call: Mapping[str, Any], location: str) -> ToolCall:
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestRefusedError(f"{location}.tool_calls has a call without a function", "invalid", location)
    name = require_text(function.get("name"), f"{location}.tool_calls.function.name")
    return ToolCall(
        id=str(call.get("id") or ""), name=name, arguments=parse_tool_arguments(function.get("arguments", ""))
    )


def _tool(tool: Mapping[str, Any]) -> ToolSpec:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise RequestRefusedError(
            f"a tool of type {bounded_repr(tool.get('type'))} is not supported; use type 'function'", "invalid", "tools"
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestRefusedError(
            f"tools: parameters are {bounded_repr(parameters)}, which is not a JSON schema", "invalid", "tools"
        )
    return ToolSpec(
        name=require_text(function.get("name"), "tools.function.name"),
        description=require_text(function.get("description") or "", "tools.function.description"),
        parameters=parameters,
    )


def _head(request: ChatRequest, replies: Sequence[ChatReply], kind: str) -> dict[str, Any]:
    reply = replies[0]
    return {"id": f"chatcmpl-{reply.reply_id}", "object": kind, "created": reply.created, "model": request.model}


def _message(reply: ChatReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.message.content or None, "refusal": None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.message.tool_calls:
        message["tool_calls"] = [openai_tool_call(call) for call in reply.message.tool_calls]
    elif message["content"] is None:
        message["content"] = ""
    return message


def _logprobs(reply: ChatReply) -> dict[str, Any] | None:
    return None if reply.logprobs is None else {"content": openai_logprobs(reply.logprobs), "refusal": None}


def _finish_reason(reply: ChatReply) -> str:
    match reply.finish_reason:
        case "stop" | "length" | "tool_calls":
            return reply.finish_reason
        case "stop_text":
            return "stop"
        case _:
            assert_never(reply.finish_reason)


def _usage(replies: Sequence[ChatReply]) -> dict[str, Any]:
    prompt, num_sampled = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_sampled,
        "total_tokens": prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }
