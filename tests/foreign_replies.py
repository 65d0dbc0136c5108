"""Replies that hold a call in a form that a run does not read, and answers that look similar and hold none.

`QWEN` is what Qwen2.5-Coder-0.5B-Instruct (`make qwen`) replied to README's Calculator, at temperature 1: its template
asks for `<tool_call>`, and no reply has it. The other replies are written by hand, in the manner of other models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agentrl.core.records import ToolSpec

_INTEGER, _TEXT = {"type": "integer"}, {"type": "string"}


def _tool(name: str, **properties: Any) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return ToolSpec(name=name, description=f"{name}.", parameters=schema)


TOOLS = (
    _tool("calculate", a=_INTEGER, op=_TEXT, b=_INTEGER),
    _tool("search", query=_TEXT),
    _tool("list_files"),
)

_PRETTY = (
    '```json\n{{\n  "name": "calculate",\n  "arguments": {{\n    "a": {0},\n    "op": "+",\n    "b": {0}\n  }}\n}}\n```'
)
_LINE = '{{"name": "calculate", "arguments": {{"a": {0}, "op": "+", "b": {0}}}}}'
_FENCED_LINE = f"```json\n{_LINE}\n```"
_BARE_PRETTY = '{{\n  "name": "calculate",\n  "arguments": {{\n    "a": {0},\n    "op": "+",\n    "b": {0}\n  }}\n}}'

QWEN = (
    ("Mark the final answer within the response.", ""),
    (_LINE.format(4), "json"),
    (_PRETTY.format(4), "json"),
    (_PRETTY.format(1), "json"),
    ('{"name": "calculate", "arguments": {"a": 1, "op": "plus", "b": 1}}', "json"),
    (_FENCED_LINE.format(6), "json"),
    (_PRETTY.format(6), "json"),
    (_PRETTY.format(8), "json"),
    (_LINE.format(8), "json"),
    (f"({_LINE.format(5)})", ""),
    (_PRETTY.format(5), "json"),
    ("The final answer to the arithmetic problem 9 + 9 is 18.", ""),
    (f"To solve the arithmetic problem, the final answer is:\n\n{_LINE.format(9)}", "json"),
    ('```json\n{\n  "name": "calculate",\n  "arguments": {"a": 14, "op": "+", "b": 14}\n}\n```', "json"),
    ("1", ""),
    (_BARE_PRETTY.format(3), "json"),
    (_FENCED_LINE.format(3), "json"),
    (_LINE.format(15), "json"),
    (f"Here's the final answer in JSON format:\n\n{_LINE.format(15)}", "json"),
    (_LINE.format(17), "json"),
    (_FENCED_LINE.format(17), "json"),
    (_PRETTY.format(7), "json"),
    (
        '```json\n{\n    "name": "calculate",\n    "arguments": {\n        "a": 7,\n        "op": "+",\n'
        '        "b": 7\n    }\n}\n```',
        "json",
    ),
    (_FENCED_LINE.format(11), "json"),
)
"""The 24 replies of a training step, and the form of the call that each holds; empty: none."""

Writer = Callable[[str, dict[str, Any]], str]


def _values(arguments: dict[str, Any], pattern: str) -> str:
    written = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items())
    return "".join(pattern.format(key, value) for key, value in written)


_PARAMETER = "<parameter={}>\n{}\n</parameter>\n"
_KEY_AND_VALUE = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
_NAMED_PARAMETER = '<parameter name="{}">{}</parameter>\n'


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


WRITERS: dict[str, tuple[str, Writer]] = {
    "fenced JSON": ("json", lambda name, arguments: f"```json\n{_object(name, arguments)}\n```"),
    "bare JSON": ("json", lambda name, arguments: f"\n{_object(name, arguments)}"),
    "fenced Python": ("python", lambda name, arguments: f"```python\n{_python(name, arguments)}\n```"),
    "Qwen3-Coder": (
        "qwen3_coder",
        lambda name, arguments: f"<function={name}>\n{_values(arguments, _PARAMETER)}</function>",
    ),
    "GLM": (
        "glm45",
        lambda name, arguments: f"<tool_call>{name}\n{_values(arguments, _KEY_AND_VALUE)}</tool_call>",
    ),
    "Mistral": ("mistral", lambda name, arguments: f"[TOOL_CALLS]{name}{json.dumps(arguments)}"),
    "DeepSeek": (
        "deepseek_v31",
        lambda name, arguments: (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        ),
    ),
    "MiniMax": (
        "minimax_m2",
        lambda name, arguments: (
            f'<minimax:tool_call>\n<invoke name="{name}">\n{_values(arguments, _NAMED_PARAMETER)}</invoke>\n'
            "</minimax:tool_call>"
        ),
    ),
    "Hunyuan": ("jamba", lambda name, arguments: f"<tool_calls>[{_object(name, arguments)}]</tool_calls>"),
    "Kimi": (
        "kimi_k2",
        lambda name, arguments: (
            f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        ),
    ),
}
"""How ten models write a call, with the reply format that reads it."""

_REPLIES: tuple[tuple[str, tuple[tuple[str, dict[str, Any]], ...]], ...] = (
    ("", (("calculate", {"a": 3712, "op": "*", "b": 418}),)),
    ("I will use the calculator.\n", (("calculate", {"a": -1, "op": "-", "b": 0}),)),
    ("", (("search", {"query": 'the "largest" {prime} < 100, [in] C:\\math'}),)),
    ("First the files.\n", (("list_files", {}),)),
    ("", (("search", {"query": "Größe von Österreich"}), ("calculate", {"a": 1, "op": "+", "b": 2}))),
    ("", (("search", {"query": "calculate(a=1)"}),)),
)

FOREIGN = [
    (form, before + "\n".join(write(name, arguments) for name, arguments in calls), reply_format, calls)
    for form, (reply_format, write) in WRITERS.items()
    for before, calls in _REPLIES
]
"""Sixty replies in ten forms: the form, the text, the reply format that reads it, and its calls."""

PLAIN = (
    *(text for text, form in QWEN if not form),
    # Prose that names the tools.
    "I would calculate 3 + 4 in my head: 7.",
    "I used calculate(3, '+', 4) before, and the result was 7.",
    "The function `calculate` takes a, op and b.",
    "calculate",
    "calculate: 7",
    "calculate(3, 4)",
    "calculate(a, op, b) adds two numbers.",
    "search",
    "search for it",
    "You can call list_files() to see them, but there is no need.",
    "list_files is not needed here.",
    "Let me calculate.\n3 + 4 = 7\n",
    "To calculate it, use {a} + {b}.",
    "<calculate>7</calculate>",
    "<function=calculate> is how some models write a call.",
    "[TOOL_CALLS] is a mark of Mistral's models; calculate is a tool.",
    "The mark <tool_call> begins a call of calculate, and </tool_call> ends it.",
    "[calculate] 7",
    "Action: none of calculate, search, list_files",
    "calculate = 7",
    # JSON answers, of tasks that ask for JSON.
    "{}",
    "[]",
    "7",
    '"calculate"',
    '{"answer": 7}',
    '{"name": "calculate"}',
    '{"name": "calculate", "result": 7}',
    '{"name": "Ada", "arguments": {"for": 1, "against": 2}}',
    '{"name": "Ada", "arguments": "calculate"}',
    '{"tool": "calculate", "answer": 7}',
    '{"calculate": {"a": 3, "op": "+", "b": 4}, "answer": 7}',
    '{"arguments": {"a": 3, "op": "+", "b": 4}}',
    '[{"name": "calculate", "description": "Arithmetic."}, {"name": "search", "description": "Finds."}]',
    '{"name": ["calculate", "search"], "arguments": {}}',
    '{"query": "calculate", "name": "search"}',
    '{"tools": [{"name": "calculate", "arguments": {"a": 3, "op": "+", "b": 4}}], "answer": 7}',
    '{"name": "calculate", "arguments": {}}',
    '{"name": "calculate", "arguments": [3, "+", 4]}',
    '{"name": "calculate", "arguments": {"a": 3,',
    '{"answer": "call {\\"name\\": \\"calculate\\", \\"arguments\\": {\\"a\\": 3}}"}',
    # Code fences.
    "```\n7\n```",
    '```json\n{"answer": 7, "tool": "calculate"}\n```',
    '```json\n[{"name": "search", "score": 0.5}]\n```',
    '```json\n{"name": "calculate", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}\n```',
    "```python\ndef calculate(a, op, b):\n    return a + b\n```",
    "```python\nprint(calculate(a=3, op='+', b=4))\n```",
    "```python\nresult = calculate(a=3, op='+', b=4)\n```",
    "```python\ncalculate(3, '+', 4)\n```",
    "```python\nimport search\n\nsearch(query=sys.argv[1])\n```",
    "```bash\nsearch --query=calculate\n```",
    "```xml\n<search query='calculate'/>\n```",
    '```python\nassert calculate(a=3, op="+", b=4) == 7\n```',
    "```text\nlist_files\n```",
    'The reply `{"name": "calculate", "arguments": {"a": 3, "op": "+", "b": 4}}` would call it, but I know it: 7.',
    'A call is written {"name": "calculate", "arguments": {"a": 3, "op": "+", "b": 4}} there.',
    "",
)
"""Sixty answers without a call that a run should have read."""
