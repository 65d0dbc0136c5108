"""The chat template that is published with a policy: it shows a conversation as training did, wherever it is served."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from agentrl.rollout.chat.chat_template import (
    DEFAULT,
    FOR_TOOLS,
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    ChatTemplate,
    read_templates,
)
from agentrl.rollout.chat.tools_in_system import INSTRUCTIONS

if TYPE_CHECKING:
    from pathlib import Path

_TOOLS_IN_SYSTEM = """\
{%- set shown = namespace(tools='', messages=[], answers=[], message={}, parts=[]) -%}
{%- for tool in tools or [] -%}
  {%- set f = tool.function if tool.function is defined else tool -%}
  {%- set line = {'name': f.name, 'description': f.description, 'parameters': f.parameters} | tojson -%}
  {%- set shown.tools = shown.tools ~ ('' if loop.first else '\\n') ~ line -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- set answer = '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -%}
    {%- set shown.answers = shown.answers + [answer] -%}
  {%- endif -%}
  {%- if shown.answers and (message.role != 'tool' or loop.last) -%}
    {%- set shown.messages = shown.messages + [{'role': 'user', 'content': shown.answers | join('\\n')}] -%}
    {%- set shown.answers = [] -%}
  {%- endif -%}
  {%- if message.role != 'tool' -%}
    {%- set shown.message = {} -%}
    {%- for key, value in message.items() if key != 'tool_calls' -%}
      {%- set shown.message = dict(shown.message, **{key: value}) -%}
    {%- endfor -%}
    {%- set shown.parts = [message.content] if message.content else [] -%}
    {%- for call in message.tool_calls or [] -%}
      {%- set f = call.function if call.function is defined else call -%}
      {%- set arguments = f.arguments if f.arguments is string else f.arguments | tojson -%}
      {%- set written = '{"name": ' ~ f.name | tojson ~ ', "arguments": ' ~ arguments ~ '}' -%}
      {%- set shown.parts = shown.parts + ['<tool_call>\\n' ~ written ~ '\\n</tool_call>'] -%}
    {%- endfor -%}
    {%- if message.tool_calls -%}
      {%- set shown.message = dict(shown.message, content=shown.parts | join('\\n')) -%}
    {%- endif -%}
    {%- set shown.messages = shown.messages + [shown.message] -%}
  {%- endif -%}
{%- endfor -%}
{%- if shown.tools -%}
  {%- set text = BEFORE ~ shown.tools ~ BEHIND -%}
  {%- if shown.messages and shown.messages[0].role == 'system' -%}
    {%- set first = dict(shown.messages[0], content=shown.messages[0].content ~ '\\n\\n' ~ text) -%}
    {%- set shown.messages = [first] + shown.messages[1:] -%}
  {%- else -%}
    {%- set shown.messages = [{'role': 'system', 'content': text}] + shown.messages -%}
  {%- endif -%}
{%- endif -%}
{%- set messages = shown.messages -%}
{%- set tools = none -%}
"""
"""What `tools_in_system` does to a conversation, in Jinja."""
_PARTS_AS_TEXT = """\
{%- set shown = namespace(messages=[], text='') -%}
{%- for message in messages -%}
  {%- set shown.text = message.content if message.content is string else '' -%}
  {%- for part in message.content or [] if message.content is not string -%}
    {%- if part.type != 'text' -%}{{- raise_exception('this policy was trained on text alone') -}}{%- endif -%}
    {%- set shown.text = shown.text ~ part.text -%}
  {%- endfor -%}
  {%- set shown.messages = shown.messages + [dict(message, content=shown.text)] -%}
{%- endfor -%}
{%- set messages = shown.messages -%}
"""
_TEXT_AS_PARTS = """\
{%- set shown = namespace(messages=[]) -%}
{%- for message in messages -%}
  {%- set content = [{'type': 'text', 'text': message.content}] -%}
  {%- set shown.messages = shown.messages + [dict(message, content=content)] -%}
{%- endfor -%}
{%- set messages = shown.messages -%}
"""


def published_templates(
    directory: Path, variables: Mapping[str, Any], tools_in: Literal["template", "system"]
) -> dict[str, str]:
    """Return the chat templates of a policy trained from a model directory by file, for programs that know nothing of
    the run's settings; they may still set the variables otherwise."""
    templates = read_templates(directory)
    files = {TEMPLATE_FILE: DEFAULT, TOOL_TEMPLATE_FILE: FOR_TOOLS}
    if tools_in == "system":  # training rendered all conversations with this one
        return {TEMPLATE_FILE: _published(directory, variables, tools_in)}
    return {
        file: _published(directory, variables, tools_in, with_tools=name == FOR_TOOLS)
        for file, name in files.items()
        if name in templates
    }


def _published(
    directory: Path, variables: Mapping[str, Any], tools_in: Literal["template", "system"], *, with_tools: bool = False
) -> str:
    opening = "".join(
        f"{{%- set {name} = {name} | default({_jinja(value)}) -%}}\n" for name, value in sorted(variables.items())
    )
    template = ChatTemplate(directory, with_tools=with_tools)
    if tools_in == "system":
        before, _, behind = INSTRUCTIONS.partition("{tools}")
        rewriting = _TOOLS_IN_SYSTEM.replace("BEFORE", _jinja(before)).replace("BEHIND", _jinja(behind))
        opening += f"{_PARTS_AS_TEXT}{rewriting}{_TEXT_AS_PARTS}" if template.takes_parts else rewriting
    return opening + template.source


def _jinja(value: Any) -> str:
    """Write a JSON value as a literal of Jinja."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_jinja(key)}: {_jinja(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_jinja, value))}]"
    return json.dumps(value, ensure_ascii=False)
