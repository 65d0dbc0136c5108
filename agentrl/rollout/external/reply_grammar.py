"""The grammar that an engine enforces for a request's `response_format` and `tool_choice`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import GrammarRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.core.records import ToolSpec
    from agentrl.gateway.calls import ChatRequest

MAX_WHITESPACE = 32
"""Maximum white space between two symbols of JSON: enough to indent, but a reply of white space ends."""


def reply_grammar(request: ChatRequest, call_frame: tuple[str, ...] | None) -> str:
    """Return the structural tag of xgrammar that a reply must fit, as JSON; "" if it may be any text.

    Args:
        request: a request of any protocol.
        call_frame: see `ChatFormat.call_frame`.

    Example:
        >>> from agentrl.gateway.calls import ChatRequest, ReplyForm
        >>> request = ChatRequest(model="main", messages=[], reply_form=ReplyForm("json_object"))
        >>> json.loads(reply_grammar(request, ()))["format"]["json_schema"]
        {'type': 'object'}
    """
    choice, form = request.tool_choice, request.reply_form
    if call_frame is None:
        return ""
    tools = [] if choice.mode == "none" else [tool for tool in request.tools if choice.tool in ("", tool.name)]
    calls = _calls(tools, call_frame) if tools and call_frame else None
    if choice.mode == "required":
        return "" if calls is None else _tag(calls)
    if form.kind == "text" or (tools and calls is None):
        return ""
    answer = _json({"type": "object"} if form.kind == "json_object" else json.loads(form.schema))
    return _tag(answer if calls is None else {"type": "or", "elements": [answer, calls]})


def _tag(grammar: dict[str, Any]) -> str:
    try:
        return json.dumps({"type": "structural_tag", "format": grammar})
    except RecursionError:
        raise GrammarRefusedError("the grammar of the reply is nested too deeply") from None


def _json(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def _calls(tools: Sequence[ToolSpec], frame: tuple[str, ...]) -> dict[str, Any]:
    """Return the grammar of one call or more of any of the tools."""
    begin, middle, end = frame
    tags = [
        {"type": "tag", "begin": f"{begin}{json.dumps(tool.name)}{middle}", "content": _json(parameters), "end": end}
        for tool in tools
        for parameters in [dict(tool.parameters) or {"type": "object"}]
    ]
    return {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
