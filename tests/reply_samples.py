"""Replies of model families: two calls of `weather`, as each format writes them, with text and thinking around."""

from __future__ import annotations

from agentrl.core.records import ToolSpec

WEATHER = ToolSpec(
    name="weather",
    description="The weather.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hours": {"type": "array", "items": {"type": "integer"}},
            "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
)
FIRST = {"city": 'Par "is', "days": 3, "hours": [1, 2]}
SECOND = {"city": "Oslo", "zip": "0150"}
_ONE = '{"city": "Par \\"is", "days": 3, "hours": [1, 2]}'
_TWO = '{"city": "Oslo", "zip": "0150"}'


def _functions(name: str) -> str:
    return (
        f'<{name}>\n<function=weather>\n<parameter=city>\nPar "is\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        f"<parameter=hours>\n[1, 2]\n</parameter>\n</function>\n</{name}>\n<{name}>\n<function=weather>\n"
        f"<parameter=city>\nOslo\n</parameter>\n<parameter=zip>\n0150\n</parameter>\n</function>\n</{name}>"
    )


def _invokes(prefix: str, text: str = "", other: str = "") -> str:
    def value(key: str, value: str, attribute: str) -> str:
        return f'<{prefix}parameter name="{key}"{attribute}>{value}</{prefix}parameter>\n'

    first = value("city", 'Par "is', text) + value("days", "3", other) + value("hours", "[1, 2]", other)
    second = value("city", "Oslo", text) + value("zip", "0150", text)
    return "".join(f'<{prefix}invoke name="weather">\n{values}</{prefix}invoke>\n' for values in (first, second))


_JSON_LIST = f'[{{"name": "weather", "arguments": {_ONE}}}, {{"name": "weather", "arguments": {_TWO}}}]'
_PYTHON = ("weather(city='Par \"is', days=3, hours=[1, 2])", 'weather(city="Oslo", zip="0150")')
_DSML = ("｜DSML｜", ' string="true"', ' string="false"')

CALLS = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {_ONE}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "weather", "arguments": {_TWO}}}\n</tool_call>'
    ),
    "qwen3_coder": _functions("tool_call"),
    "glm45": (
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Par "is</arg_value>\n<arg_key>days</arg_key>\n'
        "<arg_value>3</arg_value>\n<arg_key>hours</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n"
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>zip</arg_key>\n"
        "<arg_value>0150</arg_value>\n</tool_call>"
    ),
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{given}\n```<｜tool▁call▁end｜>"
        for given in (_ONE, _TWO)
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + "".join(f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{given}<｜tool▁call▁end｜>" for given in (_ONE, _TWO))
    + "<｜tool▁calls▁end｜>",
    "deepseek_v32": f"<｜DSML｜function_calls>\n{_invokes(*_DSML)}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{_invokes(*_DSML)}</｜DSML｜tool_calls>",
    "mistral": f"[TOOL_CALLS]weather{_ONE}[TOOL_CALLS]weather{_TWO}",
    "openai": (
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_ONE}<|call|><|start|>assistant"
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_TWO}<|call|>"
    ),
    "kimi_k2": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.weather:{n}<|tool_call_argument_begin|>{given}<|tool_call_end|>"
        for n, given in enumerate((_ONE, _TWO))
    )
    + "<|tool_calls_section_end|>",
    "minimax_m2": f"<minimax:tool_call>\n{_invokes('')}</minimax:tool_call>",
    "granite": f"<|tool_call|>{_JSON_LIST}",
    "phi4_mini_json": f"<|tool_call|>{_JSON_LIST}<|/tool_call|>",
    "cohere_command3": (
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {_ONE}}},\n'
        f'    {{"tool_call_id": "1", "tool_name": "weather", "parameters": {_TWO}}}\n]<|END_ACTION|>'
    ),
    "olmo3": f"<function_calls>\n{_PYTHON[0]}\n{_PYTHON[1]}\n</function_calls>",
    "lfm2": f"<|tool_call_start|>[{', '.join(_PYTHON)}]<|tool_call_end|>",
    "gemma4": (
        '<|tool_call>call:weather{city:<|"|>Par "is<|"|>,days:3,hours:[1,2]}<tool_call|>'
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,zip:<|"|>0150<|"|>}<tool_call|>'
    ),
    "functiongemma": (
        '<start_function_call>call:weather{city:<escape>Par "is<escape>,days:3,hours:[1,2]}<end_function_call>'
        "<start_function_call>call:weather{city:<escape>Oslo<escape>,zip:<escape>0150<escape>}<end_function_call>"
    ),
    "seed_oss": _functions("seed:tool_call"),
    "internlm": "".join(
        f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {given}}}<|action_end|>\n'
        for given in (_ONE, _TWO)
    ),
    "jamba": f"<tool_calls>{_JSON_LIST}</tool_calls>",
    "apertus": f'<|tools_prefix|>[{{"weather": {_ONE}}}, {{"weather": {_TWO}}}]<|tools_suffix|>',
    "longcat": "".join(
        f'<longcat_tool_call>{{"name": "weather", "arguments": {given}}}</longcat_tool_call>\n'
        for given in (_ONE, _TWO)
    ),
    "muse_glimmer": f"<atem:function_calls>\n{_invokes('atem:')}</atem:function_calls>",
    "llama3_json": "; ".join(f'{{"name": "weather", "parameters": {given}}}' for given in (_ONE, _TWO)),
    "llama4_pythonic": f"[{', '.join(_PYTHON)}]",
    "json": "\n".join(f'```json\n{{"name": "weather", "arguments": {arguments}}}\n```' for arguments in (_ONE, _TWO)),
    "python": "\n".join(f"```python\n{call}\n```" for call in _PYTHON),
}
"""By format: the calls `FIRST` and `SECOND`."""
WHOLE = {"llama3_json", "llama4_pythonic"}
"""Formats that write calls as the whole message."""
