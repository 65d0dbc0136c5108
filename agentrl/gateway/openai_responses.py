"""OpenAI's Responses: `POST /v1/responses`, stateless: every request holds its whole conversation.

The items of one reply (reasoning, text, calls) are one message of the model. A tool of type `custom` is offered to the
model as a function with one argument, `input`; a tool NAME of a `namespace` SPACE as the function `SPACE.NAME`. An item
`compaction_trigger` asks the model for a summary, which the client gets as an item `compaction`, in clear text, and
sends back in place of the summarized items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

from agentrl.core.records import Message, Role, ToolCall, ToolSpec
from agentrl.core.reply_formats import arguments_alone, parse_json_value
from agentrl.gateway.calls import (
    ChatReply,
    ChatRequest,
    ReplyEnd,
    RequestRefusedError,
    bounded_repr,
    openai_logprobs,
    order_tool_results,
    read_integer,
    require_object_list,
    require_text,
)
from agentrl.gateway.chat_completions import content_text, openai_refusal, parse_tool_arguments, tool_arguments_text
from agentrl.gateway.options import (
    SAMPLING_FIELDS,
    ignored_fields,
    names_allowed_tools,
    read_reply_form,
    read_sampling,
    read_tool_choice,
    unsupported_fields,
)

_UNSUPPORTED = ("logit_bias", "functions", "function_call", "modalities", "audio")

_KNOWN = SAMPLING_FIELDS | {
    *("model", "input", "instructions", "tools", "max_output_tokens", "stream", "stream_options", "text"),
    *("tool_choice", "include", "top_logprobs"),
    *("previous_response_id", "conversation", "background", "prompt"),
    *_UNSUPPORTED,
}
"""Fields that are read or refused."""
_LOGPROBS = "message.output_text.logprobs"
_STATE = ("previous_response_id", "conversation", "background", "prompt")
_ROLES: Mapping[str, Role] = {"user": "user", "system": "system", "developer": "system"}
_COMPACT = (
    "Summarize this conversation so another agent can continue it: the request, what was done, what was learned, what "
    "remains. Reply with the summary alone."
)
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class OpenAIResponsesProtocol:
    name = "responses"
    keepalive = b": waiting\n\n"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        for name in _STATE:
            if body.get(name):
                raise RequestRefusedError(
                    f"{name} is not supported, because nothing is stored between requests; send the whole conversation "
                    "in `input`",
                    "invalid",
                    name,
                )
        text_options = body["text"] if isinstance(body.get("text"), dict) else {}
        tools = require_object_list(body.get("tools") or [], "tools")
        tools_by_namespace = list(_flatten_tools(tools))
        offered = [_tool(tool, space) for space, tool in tools_by_namespace]
        included = body["include"] if isinstance(body.get("include"), list) else []
        unread = {
            "text.verbosity": text_options.get("verbosity"),
            "top_logprobs": body.get("top_logprobs"),
            "include": any(item != _LOGPROBS for item in included),
            "tools.strict": any(tool.get("strict") for _, tool in tools_by_namespace),
            "tool_choice.allowed_tools": names_allowed_tools(body.get("tool_choice")),
        }
        return ChatRequest(
            model=require_text(body.get("model"), "model"),
            messages=order_tool_results(_messages(body), "input"),
            tools=offered,
            max_tokens=read_integer(body, "max_output_tokens"),
            stream=body.get("stream") is True,
            sampling=read_sampling(body),
            tool_choice=read_tool_choice(body.get("tool_choice"), offered),
            reply_form=read_reply_form(text_options.get("format"), "text.format"),
            logprobs=_LOGPROBS in included,
            demands=unsupported_fields(body, _UNSUPPORTED),
            ignored=ignored_fields(body, _KNOWN, unread),
            options={
                "tools": tools,
                "instructions": body.get("instructions"),
                "compacts": _compacts(body.get("input")),
                "offered": {_tool_name(space, tool): (space, tool.get("type")) for space, tool in tools_by_namespace},
            },
        )

    def whole(self, request: ChatRequest, replies: Sequence[ChatReply]) -> dict[str, Any]:
        reply = replies[0]
        is_cut = _is_cut(reply.finish_reason)
        return {
            **_head(request, reply),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(_items(request, reply)),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": reply.cached_tokens},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def events(self, request: ChatRequest, replies: Sequence[ChatReply]) -> Sequence[tuple[str | None, Any]]:
        reply = replies[0]
        empty = {**_head(request, reply), "status": "in_progress", "incomplete_details": None, "output": []}
        stream: list[dict[str, Any]] = [
            {"type": "response.created", "response": empty},
            {"type": "response.in_progress", "response": empty},
        ]
        for n, item in enumerate(_items(request, reply)):
            stream += _item_events(item, n)
        response = self.whole(request, replies)
        stream.append({"type": f"response.{response['status']}", "response": response})
        return [(event["type"], {**event, "sequence_number": n}) for n, event in enumerate(stream)]

    def refusal(self, error: RequestRefusedError) -> dict[str, Any]:
        return openai_refusal(error)


def _messages(body: Mapping[str, Any]) -> list[Message]:
    """Read the messages from the items of a request.

    Raises:
        RequestRefusedError: there are none, or they contain more than text.
    """
    input_value = body.get("input")
    items = (
        [{"role": "user", "content": input_value}]
        if isinstance(input_value, str)
        else require_object_list(input_value, "input")
    )
    messages: list[Message] = []
    builder = _MessageBuilder()
    if body.get("instructions"):
        messages.append(Message(role="system", content=require_text(body["instructions"], "instructions")))
    for n, item in enumerate(items):
        location = f"input[{n}]"
        if builder.read(item, location):
            continue
        messages += builder.end()
        if item.get("type") == "compaction_trigger" and n == len(items) - 1:
            messages.append(Message(role="user", content=_COMPACT))
        else:
            messages.append(_input_message(item, location, builder.names))
    messages += builder.end()
    if not messages:
        raise RequestRefusedError("input: there must be at least one message")
    return messages


def _input_message(item: Mapping[str, Any], location: str, names: Mapping[str, str]) -> Message:
    """Read an item outside the model's messages; `names` has the names of called tools, keyed by call."""
    match item.get("type", "message"):
        case "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise RequestRefusedError(f"{location}.role is {bounded_repr(item.get('role'))}", "invalid", location)
            if item.get("content") is None:
                raise RequestRefusedError(f"{location}.content is null; it must be text", "invalid", location)
            return Message(role=role, content=content_text(item["content"], location))
        case "function_call_output" | "custom_tool_call_output":
            call_id = require_text(item.get("call_id"), f"{location}.call_id")
            content = content_text(item.get("output"), f"{location}.output")
            return Message(role="tool", content=content, tool_call_id=call_id, name=names.get(call_id))
        case "compaction" | "compaction_summary":
            return Message(
                role="user", content=require_text(item.get("encrypted_content"), f"{location}.encrypted_content")
            )
        case other:
            raise RequestRefusedError(
                f"{location} is of type {bounded_repr(other)}, which is not supported", "invalid", location
            )


def _compacts(items: Any) -> bool:
    """Whether a request is for a summary."""
    return isinstance(items, list) and bool(items) and items[-1].get("type") == "compaction_trigger"


class _MessageBuilder:
    """Collects the items of each message of the model."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Names of the called tools, keyed by call."""
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def read(self, item: Mapping[str, Any], location: str) -> bool:
        """Read an item; returns whether it is part of a message of the model."""
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                self._texts.append(content_text(item.get("content"), location))
            case "function_call" | "custom_tool_call" as kind:
                call = _call(item, kind, location)
                self.names[call.id] = call.name
                self._calls.append(call)
            case "reasoning":
                pass  # reasoning is contained in the sampled tokens
            case _:
                return False
        return True

    def end(self) -> Iterator[Message]:
        """Yield the message of the items since the last call, if there are any."""
        if self._texts or self._calls:
            content = "\n".join(filter(None, self._texts))
            yield Message(role="assistant", content=content, tool_calls=tuple(self._calls))
            self._texts, self._calls = [], []


def _call(item: Mapping[str, Any], kind: str, location: str) -> ToolCall:
    call_id, name = (
        require_text(item.get("call_id"), f"{location}.call_id"),
        require_text(item.get("name"), f"{location}.name"),
    )
    if item.get("namespace"):
        name = f"{require_text(item['namespace'], f'{location}.namespace')}.{name}"
    if kind == "custom_tool_call":
        return ToolCall(
            id=call_id, name=name, arguments={"input": require_text(item.get("input"), f"{location}.input")}
        )
    return ToolCall(id=call_id, name=name, arguments=parse_tool_arguments(item.get("arguments", "")))


def _flatten_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tools of a request, each after its namespace, which is usually empty."""
    for tool in tools:
        if tool.get("type") == "namespace":
            space = require_text(tool.get("name"), "tools.name")
            for inner in require_object_list(tool.get("tools"), f"tools.{space}.tools"):
                yield space, inner
        else:
            yield "", tool


def _tool_name(space: str, tool: Mapping[str, Any]) -> str:
    """Return the name under which the model calls a tool."""
    name = require_text(tool.get("name"), "tools.name")
    return f"{space}.{name}" if space else name


def _tool(tool: Mapping[str, Any], space: str) -> ToolSpec:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise RequestRefusedError(
            f"a tool of type {bounded_repr(kind)} is not supported; use type 'function' or 'custom'", "invalid", "tools"
        )
    parameters = _CUSTOM if kind == "custom" else tool.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestRefusedError(
            f"tools: parameters are {bounded_repr(parameters)}, which is not a JSON schema", "invalid", "tools"
        )
    description = require_text(tool.get("description") or "", "tools.description")
    return ToolSpec(name=_tool_name(space, tool), description=description, parameters=parameters)


def _head(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.reply_id}",
        "object": "response",
        "created_at": reply.created,
        "model": request.model,
        "error": None,
        "instructions": request.options["instructions"],
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": request.options["tools"],
        "top_p": None,
        "truncation": "disabled",
    }


def _items(request: ChatRequest, reply: ChatReply) -> Iterator[dict[str, Any]]:
    """Yield the items of a reply's output."""
    if request.options["compacts"]:
        yield {"id": f"cmp_{reply.reply_id}", "type": "compaction", "encrypted_content": reply.message.content}
        return
    if reply.thinking:
        content = [{"type": "reasoning_text", "text": reply.thinking}]
        yield {"id": f"rs_{reply.reply_id}", "type": "reasoning", "summary": [], "content": content}
    if reply.message.content or not reply.message.tool_calls:
        logprobs = openai_logprobs(reply.logprobs or ())
        part = {"type": "output_text", "text": reply.message.content, "annotations": [], "logprobs": logprobs}
        yield {
            "id": f"msg_{reply.reply_id}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
    for call in reply.message.tool_calls:
        space, kind = request.options["offered"].get(call.name, ("", "function"))
        item = {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name, "status": "completed"}
        if space:
            item |= {"name": call.name.removeprefix(f"{space}."), "namespace": space}
        if kind == "custom":
            yield {**item, "type": "custom_tool_call", "input": _custom_input(call.arguments)}
        else:
            yield {**item, "type": "function_call", "arguments": tool_arguments_text(call)}


def _custom_input(arguments: Mapping[str, Any] | str) -> str:
    """Return the input of a call of a custom tool, which is any text; of a malformed call without its wrapper."""
    if not isinstance(arguments, str):
        return str(arguments.get("input", ""))
    written = arguments_alone(arguments)
    value = parse_json_value(written)
    return value if isinstance(value, str) else written


def _item_events(item: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one item of a reply's output."""
    at = {"item_id": item["id"], "output_index": number}
    match item["type"]:
        case "message":
            part = item["content"][0]
            position = {**at, "content_index": 0}
            yield {"type": "response.output_item.added", "output_index": number, "item": {**item, "content": []}}
            yield {"type": "response.content_part.added", **position, "part": {**part, "text": ""}}
            yield {"type": "response.output_text.delta", **position, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **position, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **position, "part": part}
        case "function_call":
            arguments = item["arguments"]
            yield {"type": "response.output_item.added", "output_index": number, "item": {**item, "arguments": ""}}
            yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
            yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": arguments}
        case "custom_tool_call":
            yield {"type": "response.output_item.added", "output_index": number, "item": {**item, "input": ""}}
            yield {"type": "response.custom_tool_call_input.delta", **at, "delta": item["input"]}
            yield {"type": "response.custom_tool_call_input.done", **at, "input": item["input"]}
        case "compaction":
            yield {"type": "response.output_item.added", "output_index": number, "item": item}
        case _:
            yield {"type": "response.output_item.added", "output_index": number, "item": {**item, "content": []}}
    yield {"type": "response.output_item.done", "output_index": number, "item": item}


def _is_cut(end: ReplyEnd) -> bool:
    match end:
        case "length":
            return True
        case "stop" | "tool_calls" | "stop_text":
            return False
        case _:
            assert_never(end)
