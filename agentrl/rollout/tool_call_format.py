"""Tool-call formats: the text of a completion → content and `ToolCall`s.

There are two formats (`hermes`, `llama`), with limits on the length, number and depth of calls. Tokens and tools are
unknown here: names and arguments are checked by the environment.

Invariants: parsing never raises, whatever the text; text that looks like a call but is not well-formed JSON becomes a
`ToolCall` whose `arguments` are the raw text, so that the environment can answer it; ids count from `call-0`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from agentrl.core.records import ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable

ToolCallFormat = Literal["hermes", "llama"]
Parsed = tuple[str, tuple[ToolCall, ...]]
"""Content without the calls, and the calls."""

MAX_CALL_CHARACTERS = 65_536
"""A longer call is malformed without being parsed."""
MAX_CALLS = 64
"""Further calls of the same turn are left in the content."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

MAX_CALL_DEPTH = 64
"""A call with values nested deeper is malformed."""

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,128})"')


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise ValueError(f"{text} is out of range")
    return value


def _int64(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:  # the journal's encoding, as most tools, has no larger ones
        raise ValueError(f"{text} is out of range")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is given twice")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
_LARGE = re.compile(r"[0-9][eE]|[0-9]{19}")
"""In text without it, no number is beyond int64 or float64."""
_LARGE_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, parse_int=_int64, object_pairs_hook=_unique
)


def _is_deep(value: Any, levels: int = MAX_CALL_DEPTH) -> bool:
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(
        _is_deep(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def json_value(text: str) -> Any:
    """The JSON value in `text`; None if there is none, or none that can be represented.

    Refused are NaN, numbers beyond float64 and int64, lone surrogates, objects with a key twice (nobody can know which
    of the two values is meant), and text that is too long or too deep.
    """
    if len(text) > MAX_CALL_CHARACTERS:
        return None
    try:
        value = (_LARGE_DECODER if _LARGE.search(text) else _DECODER).decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return None if text.count("{") + text.count("[") > MAX_CALL_DEPTH and _is_deep(value) else value


def _call(number: int, raw: str, value: Any, argument_keys: tuple[str, ...]) -> ToolCall:
    """The call `raw` says, `value` being its JSON value; malformed where a part is missing."""
    if isinstance(value, dict) and isinstance(name := value.get("name"), str):
        for key in argument_keys:
            arguments = value.get(key)
            if isinstance(arguments, dict):
                return ToolCall(id=f"call-{number}", name=name, arguments=arguments)
        if not any(key in value for key in argument_keys):
            return ToolCall(id=f"call-{number}", name=name, arguments={})
    match = _NAME.search(raw, 0, MAX_CALL_CHARACTERS)
    return ToolCall(id=f"call-{number}", name=match[1] if match else "", arguments=raw)


def parse_hermes(text: str) -> Parsed:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number, with text around (Hermes, Qwen).

    Example:
        >>> parse_hermes('<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>')[1][0].arguments
        {'a': 1}
    """
    at = text.find(OPEN)
    if at < 0:
        return text, ()
    content = [text[:at]]
    calls: list[ToolCall] = []
    while at >= 0 and len(calls) < MAX_CALLS:
        start = at + len(OPEN)
        end = text.find(CLOSE, start)
        after = len(text) if end < 0 else end + len(CLOSE)
        raw = text[start : end if end >= 0 else len(text)].strip()
        calls.append(_call(len(calls), raw, json_value(raw), ("arguments", "parameters")))
        at = text.find(OPEN, after)
        content.append(text[after : at if at >= 0 else len(text)])
    if at >= 0:
        content.append(text[at:])
    return "".join(content).strip(), tuple(calls)


def parse_llama(text: str) -> Parsed:
    """`{"name": …, "parameters": {…}}` as the whole message, after `<|python_tag|>` or alone, several split by `;`.

    Example:
        >>> parse_llama('{"name": "add", "parameters": {"a": 1}}')[1][0].name
        'add'
    """
    stripped = text.strip()
    tagged = stripped.startswith(PYTHON_TAG)
    raw = stripped[len(PYTHON_TAG) :].strip() if tagged else stripped
    if not tagged and not raw.startswith("{"):
        return text, ()
    value = json_value(raw)
    parts = [(raw, value)] if value is not None else _split(raw)
    if (
        not tagged
        and not any(isinstance(v, dict) and "name" in v for _, v in parts)
        and not _NAME.match(raw[1:].lstrip())
    ):
        return text, ()
    calls = (_call(n, part, v, ("parameters", "arguments")) for n, (part, v) in enumerate(parts))
    return "", tuple(calls)


def _split(raw: str) -> list[tuple[str, Any]]:
    """Calls separated by `;`; one malformed part if they do not parse."""
    parts = raw.split(";", MAX_CALLS) if len(raw) <= MAX_CALL_CHARACTERS else [raw]
    values = [json_value(part.strip()) for part in parts]
    if len(parts) == 1 or len(parts) > MAX_CALLS or any(value is None for value in values):
        return [(raw, None)]
    return list(zip((part.strip() for part in parts), values, strict=True))


PARSERS: dict[ToolCallFormat, Callable[[str], Parsed]] = {"hermes": parse_hermes, "llama": parse_llama}
