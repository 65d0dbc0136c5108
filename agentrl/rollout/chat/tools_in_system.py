"""Tools for models whose chat template ignores them: schemas and call format in the system message, in Hermes syntax.

Used with `model.tools_in = "system"`. The template then sees plain messages only: the system message lists the tools,
an assistant's calls are part of its text, and a tool's answer is a user message.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.core.records import Message
from agentrl.core.reply_formats import CLOSE, OPEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.core.records import ToolCall, ToolSpec

INSTRUCTIONS = f"""\
You can call tools. Their signatures, as JSON schemas:
<tools>
{{tools}}
</tools>
To call a tool, reply with its name and arguments as a JSON object between tags, one pair of tags per call:
{OPEN}
{{"name": "NAME", "arguments": {{"ARGUMENT": VALUE}}}}
{CLOSE}"""
"""What a system message says about tools, whose lines replace `{tools}`."""


def opening(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """Return the messages of a new conversation with the tools in its system message, which is added if missing.

    Example:
        >>> from agentrl.core.records import ToolSpec
        >>> tool = ToolSpec(name="add", description="Add.", parameters={"type": "object"})
        >>> [message.role for message in opening([Message(role="user", content="2 + 3?")], [tool])]
        ['system', 'user']
    """
    plain = as_text(messages)
    if not tools:
        return plain
    tool_lines = "\n".join(_to_json(_tool_object(tool)) for tool in tools)
    text = INSTRUCTIONS.replace("{tools}", tool_lines)
    if plain and plain[0].role == "system":
        return [replace(plain[0], content=f"{plain[0].content}\n\n{text}"), *plain[1:]]
    return [Message(role="system", content=text), *plain]


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls into the text of their messages, and tools' answers as user messages; neighboring answers share one.

    Example:
        >>> as_text([Message(role="tool", content="5", tool_call_id="call0")])[0].role
        'user'
    """
    plain: list[Message] = []
    answers: list[str] = []

    def flush() -> None:
        if answers:
            plain.append(Message(role="user", content="\n".join(answers)))
            answers.clear()

    for message in messages:
        if message.role == "tool":
            answers.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        flush()
        if message.tool_calls:
            calls = "\n".join(map(_call_text, message.tool_calls))
            message = replace(message, content="\n".join(filter(None, (message.content, calls))), tool_calls=())
        plain.append(message)
    flush()
    return plain


def _tool_object(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _call_text(call: ToolCall) -> str:
    arguments = call.arguments if isinstance(call.arguments, str) else _to_json(call.arguments)
    return f'{OPEN}\n{{"name": {_to_json(call.name)}, "arguments": {arguments}}}\n{CLOSE}'


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=dict)
