"""Reply formats: parse the text of a reply into thinking, content and `ToolCall`s, as a model family writes them.

`REPLY_FORMATS` has one row per syntax of calls, under the names of vLLM's parsers: the marks around a block of calls,
and the `Grammar` within. There are five kinds of grammar: a JSON object, a JSON list, a name and JSON, tagged pairs,
Python calls. Models also write calls without the marks of their template; `json` and `python` read those, alone or in
code fences. `THINKING` has the pairs of marks around thinking. This module sees text, not tokens; the environment
checks names and arguments. It does not use vLLM's parsers because a replay parses recorded tokens again: the result
must not depend on whether vLLM is installed, or on its version. `tests/contract/test_reply_formats_vllm.py` compares
the two.

A run reads one format. `find_foreign_call` recognizes calls in the others, to name them, never to run them.

Invariants: parsing never raises; text that looks like a call but is not well-formed becomes a
`ToolCall` whose `arguments` are the raw text, so that the environment can answer it; ids count from `call-0`; names,
content and thinking are pieces of the text; the time is linear in its length.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from agentrl.core.records import ToolCall, ToolSpec

ParsedReply = tuple[str, tuple[ToolCall, ...]]
"""Content without the calls, and the calls."""
NamedCall = tuple[str, "Mapping[str, Any] | None"] | tuple[str, "Mapping[str, Any] | None", str]
"""Name and arguments of a call, None for malformed arguments; then its id, if the model wrote one."""
Reader = Callable[[str, Sequence[ToolSpec]], Sequence[NamedCall]]
"""Parses the text of a block into one call or more; the tools give the types of values that are written without."""

UNWRITTEN_ID = "call-"
"""Beginning of the id of a call without one of the model's; the number in the reply follows."""
MAX_CALL_CHARACTERS = 65_536
"""Maximum length of a call in characters; a longer call counts as malformed and is not parsed."""
MAX_CALLS = 64
"""Maximum number of calls in a turn; further calls stay in the content."""
MAX_NAME_CHARACTERS = 128

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
SPACE = " \t\r\n"
"""White space of JSON, which models and templates put around the parts of a reply. `str.strip` would also remove U+001C
to U+001F, U+0085, U+00A0, U+2028 and U+2029, which belong to the text."""
THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Marks around thinking: most models, Mistral, Seed-OSS, Cohere, Gemma 4."""

MAX_CALL_DEPTH = 64
"""Maximum nesting of a call's values; a deeper call is malformed."""

_ARGUMENTS = ("arguments", "parameters")
_CALL_NAMES = {"name", "tool_name"}
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,128})"')


class _JSONProblem(ValueError):
    """Why a text is not used as JSON, and the remedy."""


def _refuse_constant(text: str) -> NoReturn:
    raise _JSONProblem(f"{text} is not JSON; write a finite number, or null")


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise _JSONProblem(f"the number {text[:40]} is infinite; write a smaller one")
    return value


def _int64(text: str) -> int:
    value = int(text) if len(text) <= 20 else 2**64
    if not -(2**63) <= value < 2**63:  # the journal's encoding is limited to 64-bit integers
        raise _JSONProblem(f"the integer {text[:40]} is beyond 64 bits; write a smaller one")
    return value


def _repeated(keys: Sequence[str]) -> str:
    return next((key for key, count in Counter(keys).items() if count > 1), "")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = _repeated([key for key, _ in pairs])
        raise _JSONProblem(f"the key {twice[:80]!r} is given twice; give each key once")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
_LARGE = re.compile(r"[0-9][eE]|[0-9]{19}")
"""Necessary sign of a number beyond int64 or float64 in JSON text."""
_LARGE_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, parse_int=_int64, object_pairs_hook=_unique
)


def _is_deep(value: Any, levels: int = MAX_CALL_DEPTH) -> bool:
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(
        _is_deep(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def parse_json_value(text: str) -> Any:
    """Parse the JSON value in `text`; return None if there is none, or it cannot be represented.

    Refused are NaN, numbers beyond float64 and int64, lone surrogates, objects with a key twice (it is unknown which
    value is meant), and text that is too long or too deep.
    """
    try:
        return _decoded(text)
    except ValueError:
        return None


def _decoded(text: str) -> Any:
    """Parse the JSON value in `text`.

    Raises:
        ValueError: as `parse_json_value` refuses it.
    """
    if len(text) > MAX_CALL_CHARACTERS:
        raise _JSONProblem(f"the call has more than {MAX_CALL_CHARACTERS:,} characters; write a shorter one")
    too_deep = f"its values are nested deeper than {MAX_CALL_DEPTH} levels; write flatter ones"
    try:
        value = (_LARGE_DECODER if _LARGE.search(text) else _DECODER).decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _JSONProblem(too_deep) from None
    if text.count("{") + text.count("[") > MAX_CALL_DEPTH and _is_deep(value):
        raise _JSONProblem(too_deep)
    return value


_TAGGED_KEY = re.compile(r"<arg_key>(.{1,200}?)</arg_key>|<[^<>]{0,40}parameter(?:=| name=\")([^<>\"]{1,200})")
_JSON_START = re.compile(r'[{\["]|(?<![\w.])(?:null|true|false|-?[0-9.]++)\s*$')
_PYTHON_CALL = re.compile(r"\[?\s*[A-Za-z_][\w.-]*\s*\(")
_REMEDIES = {
    str: ("a string", "write the object itself, without quotes around it"),
    list: ("a list", "name each value by its parameter"),
    type(None): ("null", "write {} if there are none"),
    bool: ("a boolean", "name the value by its parameter"),
}


def describe_malformed_call(raw: str) -> str:
    """Say why a call could not be read, and what to write instead.

    Args:
        raw: `ToolCall.arguments` of the call: the text of the call, or of its arguments.
    """
    if _PYTHON_CALL.match(raw):
        return "the call cannot be read; write each argument once, as name=value with a literal of at most 64 bits"
    start = _JSON_START.search(raw)
    try:
        value = _decoded((raw[start.start() :] if start else raw).strip("` \n"))
    except _JSONProblem as problem:
        return f"arguments are not valid: {problem}"
    except UnicodeEncodeError:
        return "arguments are not valid: an escape like \\ud83d is half a character; write the character itself"
    except ValueError as error:
        keys = [key or name for key, name in _TAGGED_KEY.findall(raw)]
        if twice := _repeated(keys):
            return f"arguments are not valid: the key {twice[:80]!r} is given twice; give each key once"
        is_json = start is not None and not raw[: start.start()].strip() and isinstance(error, json.JSONDecodeError)
        at = f": {error}" if is_json else ""
        return f"the call cannot be read{at}; write a complete call, with its arguments as a JSON object"
    if isinstance(value, list) and any(isinstance(item, dict) and _CALL_NAMES & item.keys() for item in value):
        value = next((item for item in value if _named_call(item, "")[1] is None), value[0])
    if isinstance(value, dict):
        key = next((key for key in _ARGUMENTS if key in value), None)
        if key is None or not any(isinstance(value.get(name), str) for name in _CALL_NAMES):
            return "the call has no name; write the tool's name, and its arguments as a JSON object"
        value = value[key]
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return describe_malformed_call(value)
    kind, remedy = _REMEDIES.get(type(value), ("a number", "name the value by its parameter"))
    return f"arguments are {kind}, not a JSON object; {remedy}"


class ReplyParts(NamedTuple):
    """The parts of a reply."""

    thinking: str
    content: str
    tool_calls: tuple[ToolCall, ...]


def split_thinking(text: str, marks: tuple[str, str], *, is_open: bool = False) -> tuple[str, str]:
    """Split a reply into the thinking at its beginning and the rest; thinking without an end mark leaves no rest.

    Later marks, and an end mark without a beginning, belong to the answer.

    Args:
        text: text of the reply.
        marks: marks around thinking.
        is_open: whether the prompt has begun the thinking.

    Example:
        >>> split_thinking("<think>Easy.</think>5", THINKING[0])
        ('Easy.', '5')
        >>> split_thinking("</think> ends it", THINKING[0])
        ('', '</think> ends it')
    """
    begin, end = marks
    if not is_open and not text.lstrip(SPACE).startswith(begin):
        return "", text
    thinking, _, remainder = text.partition(end)
    return thinking.strip(SPACE).removeprefix(begin).strip(SPACE), remainder.lstrip(SPACE)


def thinking_opening(prompt: str, marks: tuple[str, str]) -> str:
    """Return the mark with which a prompt begins the thinking of its reply, and the white space after it; "" if the
    prompt does not.

    Example:
        >>> thinking_opening("2 + 3?<|assistant|><think>\\n", THINKING[0])
        '<think>\\n'
        >>> thinking_opening("2 + 3?<|assistant|><think></think>", THINKING[0])
        ''
    """
    _, mark, space = prompt.rpartition(marks[0])
    return "" if space.strip(SPACE) or not mark else mark + space


def is_thinking_open(text: str, marks: tuple[str, str], *, is_open: bool = False) -> bool:
    """Whether a reply ends within its thinking. Takes the arguments of `split_thinking`."""
    return marks[1] not in text and (is_open or text.lstrip(SPACE).startswith(marks[0]))


# --- blocks -----------------------------------------------------------------------------------------------------------


def _call(number: int, raw: str, named_call: NamedCall) -> ToolCall:
    name, arguments, *call_ids = named_call
    call_id = next(filter(None, call_ids), f"{UNWRITTEN_ID}{number}")
    return ToolCall(id=call_id, name=name, arguments=raw if arguments is None else arguments)


def _outside(text: str, value: str, marks: Sequence[str], at: int) -> int:
    """Return the place of the first of `marks` from `at` on that is not part of a value; the length of the text if
    there is none.

    Args:
        text: the text.
        value: regular expression of a value.
        marks: the marks.
        at: where to begin, outside a value.
    """
    for match in _marks_and_values(value, *marks).finditer(text, at):
        if match[1]:
            return match.start()
    return len(text)


@lru_cache(maxsize=64)
def _marks_and_values(value: str, *marks: str) -> re.Pattern[str]:
    return re.compile(f"{value}|({'|'.join(map(re.escape, marks))})", re.DOTALL)


_JSON_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'


class Grammar(NamedTuple):
    """How the calls within a block are written."""

    read: Reader
    find: Callable[[str, Sequence[str], int], int] = lambda text, marks, at: _outside(text, _JSON_STRING, marks, at)
    """Finds the first of some marks that is no part of a value, because a mark within a value is text."""
    is_cut: Callable[[str], bool] = lambda raw: False
    """Whether the last call of an unclosed block breaks off, although `read` sees a call with fewer arguments. JSON and
    Python that break off are malformed anyway."""
    marks: tuple[str, ...] = ()
    """Marks within a block."""


def _name_and_json(read: Reader, separator: str, marks: tuple[str, ...]) -> Grammar:
    """A name, a separator, and arguments in JSON, without which a call is not complete."""
    return Grammar(read, is_cut=lambda raw: not raw.partition(separator)[2].strip("` \n"), marks=marks)


def _blocks(text: str, marks: tuple[str, str], grammar: Grammar, tools: Sequence[ToolSpec]) -> ParsedReply:
    """Parse any number of blocks between marks, with text around them. An unclosed block ends with the text, or at the
    next block if the format has no end mark; a call that it cuts off is malformed."""
    begin, end = marks
    at = text.find(begin)
    if at < 0:
        return text, ()
    content = [text[:at]]
    calls: list[ToolCall] = []
    size, before, behind = len(text), len(begin), len(end)
    while at >= 0 and len(calls) < MAX_CALLS:
        start = at + before
        stop = grammar.find(text, (end or begin,), start)
        after = stop + behind
        raw = text[start:stop].strip(SPACE)
        block_calls = grammar.read(raw, tools) if len(raw) <= MAX_CALL_CHARACTERS else [(_name_in(raw), None)]
        if stop == size and grammar.is_cut(raw):
            block_calls = [*block_calls[:-1], (block_calls[-1][0], None)]
        calls += [
            _call(n, raw, named_call) for n, named_call in enumerate(block_calls[: MAX_CALLS - len(calls)], len(calls))
        ]
        at = text.find(begin, after)
        content.append(text[after : at if at >= 0 else size])
    if at >= 0:
        content.append(text[at:])
    return "".join(content).strip(SPACE), tuple(calls)


# --- calls in JSON ----------------------------------------------------------------------------------------------------


def _name_in(raw: str) -> str:
    match = _NAME.search(raw, 0, MAX_CALL_CHARACTERS)
    return match[1] if match else ""


def _named_call(value: Any, raw: str, keys: Sequence[str] = _ARGUMENTS, name_key: str = "name") -> NamedCall:
    """Parse a JSON value, whose text is `raw`, as a call; it is malformed if a part is missing."""
    if isinstance(value, dict) and isinstance(name := value.get(name_key), str):
        candidates = [arguments_object(value[key]) for key in keys if key in value]
        arguments = next((found for found in candidates if found), None if None in candidates else {})
        if arguments is not None:
            return name, arguments
    return _name_in(raw), None


def arguments_object(value: Any) -> dict[str, Any] | None:
    """Return the arguments of a call: an object, also if it was encoded twice, as Granite 4 and Qwen3 do. Null and an
    empty text are no arguments; anything else is None."""
    if isinstance(value, str):
        text = value.strip(SPACE)
        inner = {} if text in ("", "null") else parse_json_value(text)
        return arguments_object(inner) if isinstance(inner, dict | str) else None
    return {} if value is None else value if isinstance(value, dict) else None


_WHOLE_CALL = re.compile(
    r'\s*\{\s*"(?:tool_)?name"\s*:\s*"[^"\\]{1,128}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*\S)\s*\}\s*', re.DOTALL
)


def arguments_alone(raw: str) -> str:
    """Return the text of the arguments of a malformed call, for readers that have its name already.

    Example:
        >>> arguments_alone('{"name": "add", "arguments": [1, 2]}')
        '[1, 2]'
    """
    match = _WHOLE_CALL.fullmatch(raw, 0, MAX_CALL_CHARACTERS)
    return match[1] if match else raw


def _json_object(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    return [_named_call(parse_json_value(raw), raw)]


def _items(value: Any) -> Sequence[Any]:
    """Return the calls of a list, at most `MAX_CALLS`; a value that is not a list is one call."""
    return value[:MAX_CALLS] if isinstance(value, list) and value else [value]


def _json_list(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    value = parse_json_value(raw)
    return [_named_call(item, raw) for item in _items(value)]


def _cohere_list(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    return [_named_call(item, raw, ("parameters",), "tool_name") for item in _items(parse_json_value(raw))]


def _apertus_list(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    """Parse `[{NAME: {…}}, …]`."""
    return [
        (name, arguments)
        if isinstance(item, dict)
        and len(item) == 1
        and (arguments := arguments_object(item[name := next(iter(item))])) is not None
        else ("", None)
        for item in _items(parse_json_value(raw))
    ]


_JSON = Grammar(_json_object)
_JSON_LIST = Grammar(_json_list)


def _internlm(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    return _json_object(raw.removeprefix("<|plugin|>").strip(SPACE), tools)


def _after_name(name: str, raw: str) -> NamedCall:
    """Parse the JSON object that follows a call's name."""
    return name.strip()[:MAX_NAME_CHARACTERS], arguments_object(raw)


_MISTRAL_CALL = re.compile(r'(.*?)(?:\[ARGS\](.*)|([{"].*))?', re.DOTALL)


def _mistral(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    """Parse `[{…}, …]`, or `NAME{…}`, or `NAME[CALL_ID]…[ARGS]{…}`."""
    if raw.startswith("["):
        return _json_list(raw, tools)
    match = _MISTRAL_CALL.fullmatch(raw)
    assert match is not None
    head, body, direct = match.groups()
    name, _, call_id = head.partition("[CALL_ID]")
    return [(*_after_name(name, body or direct or "")[:2], call_id.strip()[:MAX_NAME_CHARACTERS])]


_MISTRAL = Grammar(
    _mistral,
    # No mark separates a name from its arguments, and none ends the last call.
    is_cut=lambda raw: not any(start in raw for start in ("{", '"', "null")),
    marks=("[ARGS]", "[CALL_ID]"),
)


def _deepseek_v3(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    """Parse `function<｜tool▁sep｜>NAME`, followed by JSON in a fence."""
    name, _, body = raw.partition("<｜tool▁sep｜>")[2].partition("\n")
    body = body.strip(SPACE)
    if not body.startswith("```json"):
        return [(name.strip()[:MAX_NAME_CHARACTERS], None)]
    return [_after_name(name, body.removeprefix("```json").removesuffix("```").strip(SPACE))]


def _deepseek_v31(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    """Parse `NAME<｜tool▁sep｜>{…}`."""
    name, _, body = raw.partition("<｜tool▁sep｜>")
    return [_after_name(name, body.strip(SPACE))]


def _kimi(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    """Parse `functions.NAME:0<|tool_call_argument_begin|>{…}`."""
    call_name, _, body = raw.partition("<|tool_call_argument_begin|>")
    name = call_name.strip().removeprefix("functions.").rpartition(":")[0] or call_name
    return [(*_after_name(name, body.strip(SPACE))[:2], call_name.strip()[:MAX_NAME_CHARACTERS])]


def parse_hermes(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
    """Parse `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number, with text around (Hermes, Qwen).

    Example:
        >>> parse_hermes('<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>')[1][0].arguments
        {'a': 1}
    """
    return _blocks(text, (OPEN, CLOSE), _JSON, tools)


def parse_llama(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
    """Parse `{"name": …, "parameters": {…}}` as the whole message, after `<|python_tag|>` or alone; `;` separates
    calls.

    Example:
        >>> parse_llama('{"name": "add", "parameters": {"a": 1}}')[1][0].name
        'add'
    """
    body = text.strip(SPACE)
    has_tag = body.startswith(PYTHON_TAG)
    raw = body[len(PYTHON_TAG) :].strip(SPACE) if has_tag else body
    if not has_tag and not raw.startswith("{"):
        return text, ()
    value = parse_json_value(raw)
    parts = [(raw, value)] if value is not None else _split(raw)
    offered, is_broken = {tool.name for tool in tools}, parts[-1][1] is None
    # An answer may have a name too: a call also has arguments, or is of an offered tool.
    has_call = any(
        isinstance(v, dict) and "name" in v and (not v.keys().isdisjoint(_ARGUMENTS) or str(v["name"]) in offered)
        for _, v in parts
    )
    if not (has_tag or has_call or (is_broken and _NAME.match(raw[1:].lstrip(SPACE)))):
        return text, ()
    return "", tuple(_call(n, part, _named_call(v, part, _ARGUMENTS[::-1])) for n, (part, v) in enumerate(parts))


def _split(raw: str) -> list[tuple[str, Any]]:
    """Split calls that follow each other; if they do not parse, return one malformed call."""
    pieces = _json_pieces(raw) if len(raw) <= MAX_CALL_CHARACTERS else []
    parts = [(piece, parse_json_value(piece)) for piece in pieces]
    return parts if len(parts) > 1 and all(value is not None for _, value in parts) else [(raw, None)]


# --- calls in tags ----------------------------------------------------------------------------------------------------


def _convert_value(raw: str, schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Parse a value written without its type: as JSON if the schema admits the type of that, else as text.

    Templates write the values of earlier calls with Python's `str`, so models write `True`, `None` and `{'a': 1}`.
    These count as their JSON values if the schema admits no text, or admits this type beside it.
    """
    value, kinds, text = parse_json_value(raw), _kinds(schema, definitions), raw.strip(SPACE)
    if value is None and text != "null":
        value, is_python = _python_literal(text)
        if not is_python or not kinds:
            return raw
    elif isinstance(value, str):
        return raw
    return raw if "string" in kinds and _JSON_TYPES[type(value)].isdisjoint(kinds) else value


_JSON_TYPES: Mapping[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    str: {"string"},
    type(None): {"null"},
}


def _python_literal(text: str) -> tuple[Any, bool]:
    """Return the JSON value of a constant, list or dictionary as Python writes it, and whether it is one."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False}.get(text), True
    if text[:1] not in ("[", "{") or len(text) > MAX_CALL_CHARACTERS:
        return None, False
    try:
        value = _python_value(ast.parse(text, mode="eval").body)
        json_value = parse_json_value(json.dumps(value, allow_nan=False, ensure_ascii=False))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None, False
    return json_value, json_value is not None


def _kinds(schema: Any, definitions: Mapping[str, Any], levels: int = 4) -> set[str]:
    """Return the JSON types that a schema admits, as far as it declares them."""
    if not isinstance(schema, Mapping) or not levels:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _kinds(definitions.get(reference.rpartition("/")[2]), definitions, levels - 1)
    kind = schema.get("type")
    kinds = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    if not kinds:
        values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        kinds = {name for value in values for name in _JSON_TYPES.get(type(value), ())}
    return kinds.union(
        *(
            _kinds(alternative, definitions, levels - 1)
            for key in ("anyOf", "oneOf", "allOf")
            for alternative in _list(schema.get(key))
        )
    )


def _list(value: Any) -> Sequence[Any]:
    """Return a list of a schema, which may hold anything in its place."""
    return value if isinstance(value, list) else ()


def _parameters(name: str, tools: Sequence[ToolSpec], *keys: str) -> Mapping[str, Any]:
    """Return the part of a tool's schema under the first of the keys that it has."""
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    part = next((schema[key] for key in keys if key in schema), None)
    return part if isinstance(part, Mapping) else {}


_WORD = re.compile(r"\S")


class _Values(NamedTuple):
    """The tags of a call's values: `begin KEY middle VALUE end`, any number."""

    begin: str
    middle: str
    end: str

    def ends(self, text: str, at: int = 0) -> dict[int, int]:
        """Return the places of the end tags after `at`, by those of their begin tags. Values nest, because the text of
        one may show a call."""
        ends, open_values = dict[int, int](), list[int]()
        for tag in re.compile(f"{re.escape(self.begin)}|{re.escape(self.end)}").finditer(text, at):
            if tag[0] == self.begin:
                open_values.append(tag.start())
            elif open_values:
                ends[open_values.pop()] = tag.start()
        return ends

    def find(self, text: str, marks: Sequence[str], at: int) -> int:
        ends = self.ends(text, at)
        pattern = re.compile("|".join(map(re.escape, (self.begin, *marks))))
        while (match := pattern.search(text, at)) and match[0] == self.begin:
            stop = ends.get(match.start())
            at = match.end() if stop is None else stop + len(self.end)
        return match.start() if match else len(text)

    def read(self, body: str) -> Iterator[tuple[str, str]]:
        """Yield keys and values.

        Raises:
            ValueError: there is other text, or a part is missing.
        """
        at, ends = 0, self.ends(body)
        while word := _WORD.search(body, at):
            at = word.start()
            if not body.startswith(self.begin, at):
                raise ValueError("text between values")
            split = body.index(self.middle, at)
            stop = ends.get(at, -1)
            stop = stop if stop >= split else body.index(self.end, split)  # the value holds begin tags alone
            yield body[at + len(self.begin) : split], body[split + len(self.middle) : stop]
            at = stop + len(self.end)


def _tagged_call(name: str, pairs: Iterator[tuple[str, str]], tools: Sequence[ToolSpec]) -> NamedCall:
    """Parse a call whose values are written between tags."""
    name = name.strip()[:MAX_NAME_CHARACTERS]
    properties, definitions = _parameters(name, tools, "properties"), _parameters(name, tools, "$defs", "definitions")
    arguments: dict[str, Any] = {}
    try:
        for key, value in pairs:
            # DeepSeek's format declares whether the value is a string.
            key, has_type, kind = key.strip().partition('" string="')
            if key in arguments:
                return name, None
            arguments[key] = (
                value
                if kind == "true"
                else _convert_value(value, None if has_type else properties.get(key), definitions)
            )
    except ValueError:
        return name, None
    return name, arguments


def _unwrap(value: str) -> str:
    """Remove the line breaks around a value."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == "\n" else value


def _calls_in_tags(begin: str, middle: str, end: str, values: _Values, change: Callable[[str], str] = str) -> Grammar:
    """Make the grammar of `begin NAME middle VALUES end`, any number. A call is complete with its end tag.

    Args:
        begin: the tag before a name.
        middle: the mark after it.
        end: the tag that ends a call.
        values: the tags of values.
        change: applied to each value.
    """

    def read(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
        calls: list[NamedCall] = []
        at = raw.find(begin)
        while at >= 0 and len(calls) <= MAX_CALLS:
            stop = values.find(raw, [begin, end], at + len(begin))
            name, _, body = raw[at + len(begin) : stop].partition(middle)
            calls.append(_tagged_call(name, ((key, change(value)) for key, value in values.read(body)), tools))
            at = raw.find(begin, stop) if calls[-1][1] is not None else -1
        return calls or [("", None)]

    return Grammar(read, values.find, is_cut=lambda raw: not raw.endswith(end))


_FUNCTIONS = _calls_in_tags("<function=", ">", "</function>", _Values("<parameter=", ">", "</parameter>"), _unwrap)


def _invokes(prefix: str) -> Grammar:
    """Make the grammar of `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>`, any number."""
    values = _Values(f'<{prefix}parameter name="', '">', f"</{prefix}parameter>")
    return _calls_in_tags(f'<{prefix}invoke name="', '">', f"</{prefix}invoke>", values)


def _after_tag(text: str, tag: str) -> str:
    """Return the text after a tag at its beginning; the whole text, with its white space, if there is none."""
    before, _, value = text.partition(tag)
    return value if tag in text and not before.strip(SPACE) else text


_GLM_VALUES = _Values("<arg_key>", "</arg_key>", "</arg_value>")


def _glm(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    """Parse `NAME`, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` per argument."""
    at = raw.find("<arg_key>")
    name, body = (raw, "") if at < 0 else (raw[:at], raw[at:])
    values = ((key, _after_tag(value, "<arg_value>")) for key, value in _GLM_VALUES.read(body))
    return [_tagged_call(name, values, tools) if not name.lstrip().startswith("{") else ("", None)]


_GLM = Grammar(_glm, _GLM_VALUES.find, is_cut=lambda raw: True)


def parse_qwen3_coder(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
    """Parse `<tool_call><function=NAME>…</function></tool_call>`, any number; models leave out a reply's first mark.

    Example:
        >>> parse_qwen3_coder("<function=look><parameter=a>1</parameter></function></tool_call>")[1][0].name
        'look'
    """
    before, mark, after = text.partition("<function=")
    if OPEN not in before and "</function>" in after:
        text = f"{before}{OPEN}{mark}{after}"
    return _blocks(text, (OPEN, CLOSE), _FUNCTIONS, tools)


# --- calls in Python and alike ----------------------------------------------------------------------------------------

_CONSTANTS = {"true": True, "false": False, "null": None}


def _python_value(node: ast.expr) -> Any:
    """Return the JSON value of a literal.

    Raises:
        ValueError: the expression is not a literal.
    """
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _unique(
                [(str(_python_value(key)), _python_value(v)) for key, v in zip(keys, values, strict=True) if key]
            )
    raise ValueError("no literal")


_PYTHON_STRING = (
    r"""(?:\"""(?:[^\\]|\\(?:.|\Z))*?(?:\"""|\Z)|'''(?:[^\\]|\\(?:.|\Z))*?(?:'''|\Z)"""
    r"""|"(?:[^"\\\r\n]|\\(?:.|\Z))*+"?|'(?:[^'\\\r\n]|\\(?:.|\Z))*+'?)"""
)
_PYTHON_PIECE = re.compile(rf"(?P<string>{_PYTHON_STRING})|[(\[{{]|(?P<close>[)\]}}])|(?P<line>[\r\n]+)", re.DOTALL)
"""A string, a bracket or a line break of Python; a string that is not closed ends with its line, or the text."""
_ESCAPE_OR_RETURN = re.compile(r"\\.|\r", re.DOTALL)


def _python_lines(raw: str) -> list[str]:
    """Split Python at the line breaks outside strings and brackets. Returns within strings become `\\r`, because Python
    reads them as line feeds."""
    lines, parts, depth, at = list[str](), list[str](), 0, 0
    for match in _PYTHON_PIECE.finditer(raw):
        parts += [raw[at : match.start()], match[0]]
        at = match.end()
        if match["string"]:
            parts[-1] = _ESCAPE_OR_RETURN.sub(lambda piece: r"\r" if piece[0] == "\r" else piece[0], match[0])
        elif not match["line"]:
            depth += -1 if match["close"] else 1
        elif depth <= 0:
            lines.append("".join(parts))
            parts = []
    return [*lines, "".join(parts) + raw[at:]]


def _pythonic(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    """Parse `[f(a=1), g(b="x")]`, or one call per line."""
    lines = [line for line in _python_lines(raw) if line.strip()]
    expression = "\n".join(lines) if raw.startswith("[") else f"[{','.join(lines)}]"
    try:
        tree = ast.parse(expression, mode="eval").body
        items = tree.elts[:MAX_CALLS] if isinstance(tree, ast.List) else []
        found = [_called(item) or ("", None) for item in items]
        calls: list[NamedCall] = [(name, None if call is None else _python_arguments(call)) for name, call in found]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        calls = []
    return calls or [((re.match(r"\[?\s*([\w.-]{1,128})\s*\(", raw) or ("", ""))[1], None)]


_PYTHON = Grammar(_pythonic, lambda text, marks, at: _outside(text, rf"{_PYTHON_STRING}(?!\Z)", marks, at))


def _called(item: ast.expr) -> tuple[str, ast.Call] | None:
    """Return the name and the call of an expression; `files-list(a=1)`, which Python reads as a difference, is one."""
    match item:
        case ast.Call(func=name):
            return ast.unparse(name), item
        case ast.BinOp(left=left, op=ast.Sub(), right=ast.Call(func=name) as call):
            return f"{ast.unparse(left)}-{ast.unparse(name)}".replace(" ", ""), call
    return None


def _python_arguments(item: ast.Call) -> Mapping[str, Any] | None:
    if item.args or any(keyword.arg is None for keyword in item.keywords):
        return None
    try:
        value = _unique([(str(keyword.arg), _python_value(keyword.value)) for keyword in item.keywords])
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (ValueError, RecursionError):
        return None
    parsed_value = parse_json_value(text)
    return parsed_value if isinstance(parsed_value, dict) else None


def parse_pythonic(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
    """Parse `[f(a=1), g(b="x")]` as the whole message, alone or between `<|python_start|>` and `<|python_end|>` (Llama
    4).

    Example:
        >>> parse_pythonic('[add(a=1, b=2)]')[1][0].arguments
        {'a': 1, 'b': 2}
    """
    raw = text.strip(SPACE)
    has_tag = raw.startswith("<|python_start|>")
    raw = raw.removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip(SPACE)
    if not has_tag and not re.match(r"\[\s*[A-Za-z_][\w.-]*\s*\(", raw):
        return text, ()
    calls = _pythonic(raw, tools) if len(raw) <= MAX_CALL_CHARACTERS else [("", None)]
    return "", tuple(_call(n, raw, named_call) for n, named_call in enumerate(calls[:MAX_CALLS]))


_BARE = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]{0,127})\s*:|\b(None|True|False)\b")


def _bare_keys(quote: str) -> Grammar:
    """Make the grammar of `call:NAME{key:VALUE,…}`, with text values between `quote` marks."""

    def read(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
        name, _, body = raw.removeprefix("call").removeprefix(":").partition("{")
        pieces = f"{{{body}".split(quote)
        for n, piece in enumerate(pieces):
            pieces[n] = json.dumps(piece, ensure_ascii=False) if n % 2 else _BARE.sub(_written_in_json, piece)
        return [_after_name(name, "".join(pieces))]

    value = f"{re.escape(quote)}.*?{re.escape(quote)}"
    return Grammar(read, lambda text, marks, at: _outside(text, value, marks, at), marks=(quote,))


def _written_in_json(match: re.Match[str]) -> str:
    return f'{match[1]}"{match[2]}":' if match[2] else {"None": "null", "True": "true", "False": "false"}[match[3]]


# --- calls without marks ----------------------------------------------------------------------------------------------

_FENCE = re.compile(r"```[\w+-]{0,20}\s(.*?)(?:```|\Z)", re.DOTALL)
_BETWEEN_CALLS = re.compile(r"[\s,;]*")
_JSON_CALL = re.compile(r'[\[\s]*\{\s*"name"\s*:\s*"([^"\\]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:')
_JSON_LINE = re.compile(r'^[ \t]*(?:\[\s*)?\{\s*"(?:name|arguments|parameters)"\s*:', re.MULTILINE)
_WHOLE = re.compile(r"\A")
_JSON_DECODER = json.JSONDecoder()


def _without_marks(read: Reader, start: re.Pattern[str]) -> Callable[..., ParsedReply]:
    """Make the parser of calls that fill code fences, with text before and between, or else the end of the message.
    Text after the last fence makes the message an answer.

    Args:
        read: parses the text of a fence or of the end; without calls, it is content.
        start: first place at which the end of the message may begin.
    """

    def parse(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
        end = start.search(text)
        fences = itertools.islice(_FENCE.finditer(text), MAX_CALLS)
        spans = [(match.start(), match.end(), match[1]) for match in fences]
        for blocks in (spans, [] if end is None else [(end.start(), len(text), text[end.start() :])]):
            content, calls, at = list[str](), list[ToolCall](), 0
            for begin, stop, block in blocks:
                raw = block.strip(SPACE)
                if block_calls := read(raw, tools) if len(raw) <= MAX_CALL_CHARACTERS else ():
                    calls += [_call(n, raw, named_call) for n, named_call in enumerate(block_calls, len(calls))]
                    content.append(text[at:begin])
                    at = stop
            if calls and text[at:].strip(SPACE):
                break
            if calls:
                return "".join(content).strip(SPACE), tuple(calls[:MAX_CALLS])
        return text, ()

    return parse


def _json_calls(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    """Parse JSON objects with a name and arguments, or lists of them; an object without one of the two is an answer."""
    values = [item for piece in _json_pieces(raw) for item in _items(parse_json_value(piece))]
    if values and all(isinstance(v, dict) and "name" in v and not v.keys().isdisjoint(_ARGUMENTS) for v in values):
        return [_named_call(value, raw) for value in values]
    broken = _JSON_CALL.match(raw)
    return [] if broken is None else [(broken[1], None)]


def _json_pieces(raw: str) -> list[str]:
    """Split JSON values that follow each other; empty if there is other text."""
    pieces, at = list[str](), 0
    while at < len(raw) and len(pieces) < MAX_CALLS and raw[at] in "{[":
        try:
            stop = _JSON_DECODER.raw_decode(raw, at)[1]
        except (ValueError, RecursionError):
            return []
        pieces.append(raw[at:stop])
        between = _BETWEEN_CALLS.match(raw, stop)
        at = stop if between is None else between.end()
    return pieces if at == len(raw) else []


def _python_calls(raw: str, tools: Sequence[ToolSpec]) -> Sequence[NamedCall]:
    """Parse calls with named arguments, or malformed ones of the tools; other code is an answer."""
    if not _PYTHON_CALL.match(raw):
        return []
    calls, names = _pythonic(raw, tools), {tool.name for tool in tools}
    return calls if all(call[1] is not None or call[0] in names for call in calls) else []


# --- channels ---------------------------------------------------------------------------------------------------------

_NOTHING = "(?!)"
"""The regular expression of values in which marks count."""
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


HARMONY_THINKING = ("<|channel|>analysis<|message|>", "<|end|>")


def parse_harmony(text: str, *, reads_calls: bool = True) -> ReplyParts:
    """Parse messages in channels (gpt-oss): `analysis` is thinking, a message to `functions.NAME` a call, the rest
    content. Without `reads_calls`, the text of a call is content.

    Example:
        >>> reply = '<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>5'
        >>> parse_harmony(reply)[:2]
        ('Easy.', '5')
    """
    thinking: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    if "<|message|>" not in text:
        return ReplyParts("", "" if text.lstrip(SPACE).startswith("<|channel|>") else text, ())
    at = 0
    while at < len(text):
        head = text[at : _outside(text, _NOTHING, ["<|start|>", "<|message|>"], at)]
        value = _JSON_STRING if "to=functions." in head else _NOTHING
        stop = _outside(text, value, ["<|start|>"], at + len(head))
        end = _outside(text, value, ["<|end|>", "<|call|>", "<|return|>"], at + len(head))
        message, body = text[at:stop], text[at + len(head) : min(stop, end)].removeprefix("<|message|>")
        at = stop + len("<|start|>")
        recipient = head.partition("to=functions.")[2]
        if recipient and reads_calls and len(calls) < MAX_CALLS:
            name = re.split(r"[\s<]", recipient, maxsplit=1)[0]
            raw = body.strip(SPACE)
            named_call = _after_name(name, raw)
            if not raw and "<|call|>" not in message:  # it breaks off before its arguments
                raw, named_call = head.strip(), (named_call[0], None)
            calls.append(_call(len(calls), raw, named_call))
        elif "analysis" in head:
            thinking.append(body)
        else:
            content.append(body)
    return ReplyParts("\n".join(thinking).strip(SPACE), "\n".join(content).strip(SPACE), tuple(calls))


def _harmony(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
    return parse_harmony(text)[1:]


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """A syntax of tool calls."""

    name: str
    """Name of vLLM's parser, if it has one."""
    models: str
    """Model families that use the syntax; empty: no family's template does."""
    parse: Callable[..., ParsedReply]
    """Parses text without thinking, with the offered tools, into content and calls."""
    markup: tuple[str, ...]
    """Marks that the parser must see even if they are special tokens."""
    ends: tuple[str, ...] = ()
    """Tokens that end a reply, if they differ from the token after a message in the template."""
    example: str = ""
    """How a call is written, if the marks do not show it."""
    call_frame: tuple[str, ...] | None = ()
    """Text before a call's name, between its name and its arguments, and after them, both in JSON; (): calls are
    written otherwise; None: content is not written as plain text."""
    needs_marks: bool = True
    """Whether a call of another model is recognized by the marks alone."""

    @property
    def syntax(self) -> str:
        """How a call is written, for people and models.

        Example:
            >>> REPLY_FORMATS["jamba"].syntax
            '<tool_calls>…</tool_calls>'
        """
        return self.example or "…".join(self.markup[:2])

    @property
    def description(self) -> str:
        """Name and syntax, for people."""
        return f"{self.name} ({self.syntax})"

    def read(
        self,
        text: str,
        marks: tuple[str, str] | None,
        tools: Sequence[ToolSpec] = (),
        *,
        is_open: bool = False,
        reads_calls: bool = True,
    ) -> ReplyParts:
        """Split a reply into its parts; see `split_thinking`. Without `reads_calls`, calls are part of the content."""
        if self.parse is _harmony:
            return parse_harmony(text, reads_calls=reads_calls)
        thinking, remainder = split_thinking(text, marks, is_open=is_open) if marks else ("", text)
        content, calls = self.parse(remainder, tools)
        if calls and not reads_calls:
            content, calls = remainder, ()
        return ReplyParts(thinking, content, calls)


def _format(
    name: str,
    models: str,
    marks: tuple[str, str],
    grammar: Grammar,
    left_out: tuple[str, ...] = (),
    *,
    example: str = "",
) -> ReplyFormat:
    """Make a format of blocks between marks, the second of which may be empty; marks in `left_out` are removed from the
    content."""

    def parse(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedReply:
        content, calls = _blocks(text, marks, grammar, tools)
        for mark in left_out:
            if mark in content:
                content = content.replace(mark, "").strip(SPACE)
        return content, calls

    markup = tuple(filter(None, (*marks, *left_out, *grammar.marks)))
    return ReplyFormat(name, models, parse, markup, example=example)


_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"

REPLY_FORMATS: Mapping[str, ReplyFormat] = {
    reply_format.name: reply_format
    for reply_format in (
        ReplyFormat(
            "hermes",
            "Qwen2.5, Qwen3, SmolLM3, Granite 4, Hermes, ERNIE 4.5",
            parse_hermes,
            (OPEN, CLOSE),
            example=f'{OPEN}{{"name": …, "arguments": {{…}}}}{CLOSE}',
            call_frame=(f'{OPEN}\n{{"name": ', ', "arguments": ', f"}}\n{CLOSE}"),
        ),
        ReplyFormat(
            "qwen3_coder",
            "Qwen3-Coder, Qwen3.5 and later, Nemotron 3",
            parse_qwen3_coder,
            (OPEN, CLOSE, "<function="),
            example=f"{OPEN}<function=…><parameter=…>…</parameter></function>{CLOSE}",
        ),
        _format("glm45", "GLM-4.5 and later", (OPEN, CLOSE), _GLM, example=f"{OPEN}…<arg_key>…{CLOSE}"),
        _format(
            "deepseek_v3",
            "DeepSeek-V3, -R1",
            _DEEPSEEK,
            _name_and_json(_deepseek_v3, "```json", (_DEEPSEEK_SEPARATOR,)),
            _DEEPSEEK_SECTION,
        ),
        _format(
            "deepseek_v31",
            "DeepSeek-V3.1",
            _DEEPSEEK,
            _name_and_json(_deepseek_v31, _DEEPSEEK_SEPARATOR, (_DEEPSEEK_SEPARATOR,)),
            _DEEPSEEK_SECTION,
        ),
        _format(
            "deepseek_v32",
            "DeepSeek-V3.2",
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            _invokes("｜DSML｜"),
        ),
        _format("deepseek_v4", "DeepSeek-V4", ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"), _invokes("｜DSML｜")),
        _format("mistral", "Mistral, Magistral", ("[TOOL_CALLS]", ""), _MISTRAL),
        ReplyFormat(
            "openai",
            "gpt-oss",
            _harmony,
            _HARMONY,
            ("<|return|>", "<|call|>"),
            example="<|channel|>commentary to=functions.…<|message|>{…}<|call|>",
            call_frame=None,
        ),
        _format(
            "kimi_k2",
            "Kimi K2",
            ("<|tool_call_begin|>", "<|tool_call_end|>"),
            _name_and_json(_kimi, _KIMI_SEPARATOR, (_KIMI_SEPARATOR,)),
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        _format("minimax_m2", "MiniMax-M2", ("<minimax:tool_call>", "</minimax:tool_call>"), _invokes("")),
        _format("granite", "Granite 3", ("<|tool_call|>", ""), _JSON_LIST),
        _format("phi4_mini_json", "Phi-4-mini", ("<|tool_call|>", "<|/tool_call|>"), _JSON_LIST),
        _format(
            "cohere_command3",
            "Command A, Command R7B",
            ("<|START_ACTION|>", "<|END_ACTION|>"),
            Grammar(_cohere_list),
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        _format("olmo3", "Olmo 3", ("<function_calls>", "</function_calls>"), _PYTHON),
        _format("lfm2", "LFM2", ("<|tool_call_start|>", "<|tool_call_end|>"), _PYTHON),
        _format("gemma4", "Gemma 4", ("<|tool_call>", "<tool_call|>"), _bare_keys('<|"|>')),
        _format(
            "functiongemma",
            "FunctionGemma",
            ("<start_function_call>", "<end_function_call>"),
            _bare_keys("<escape>"),
        ),
        _format("seed_oss", "Seed-OSS", ("<seed:tool_call>", "</seed:tool_call>"), _FUNCTIONS),
        _format(
            "internlm", "InternLM 2.5", ("<|action_start|>", "<|action_end|>"), Grammar(_internlm), ("<|plugin|>",)
        ),
        _format("jamba", "Jamba, Hunyuan A13B", ("<tool_calls>", "</tool_calls>"), _JSON_LIST),
        _format("apertus", "Apertus", ("<|tools_prefix|>", "<|tools_suffix|>"), Grammar(_apertus_list)),
        _format("longcat", "LongCat-Flash", ("<longcat_tool_call>", "</longcat_tool_call>"), _JSON),
        _format("muse_glimmer", "Muse Glimmer", ("<atem:function_calls>", "</atem:function_calls>"), _invokes("atem:")),
        ReplyFormat(
            "llama3_json", "Llama 3.1 to 3.3", parse_llama, (PYTHON_TAG,), example='{"name": …, "parameters": {…}}'
        ),
        ReplyFormat("llama4_pythonic", "Llama 4", parse_pythonic, ("<|python_start|>", "<|python_end|>")),
        ReplyFormat(
            "json",
            "",
            _without_marks(_json_calls, _JSON_LINE),
            ("```",),
            example='{"name": …, "arguments": {…}}, alone, after text or in a code fence',
            call_frame=('{"name": ', ', "arguments": ', "}"),
            needs_marks=False,
        ),
        ReplyFormat(
            "python",
            "",
            _without_marks(_python_calls, _WHOLE),
            ("```",),
            example="name(argument=…), alone or in a code fence",
            needs_marks=False,
        ),
    )
}
"""Formats, keyed by name. Of formats with the same marks, the one that can parse a reply is chosen."""

ALL_MARKUP = frozenset(mark for each in REPLY_FORMATS.values() for mark in each.markup)
"""Marks of all formats, by which a call in a form that a run does not read is recognized."""


def _may_call(tool: ToolSpec, arguments: Mapping[str, Any]) -> bool:
    """Whether arguments may belong to a call; False for the tool's schema, which some answers repeat, and for missing
    required arguments."""
    declared = tool.parameters.get("properties")
    takes_properties = isinstance(declared, Mapping) and "properties" in declared
    is_schema = "properties" in arguments and not takes_properties
    return not is_schema and bool(arguments or not tool.parameters.get("required"))


def find_foreign_call(text: str, tools: Sequence[ToolSpec], read: str) -> ToolCall | None:
    """Return the first complete call of an offered tool that a reply holds in another form than the run reads, as a
    malformed call with the name of its form; None if there is none.

    Args:
        text: the reply without thinking.
        tools: the offered tools.
        read: the reply format of the run.

    Example:
        >>> look = ToolSpec(name="look", description="", parameters={})
        >>> find_foreign_call('{"name": "look", "arguments": {}}', [look], "hermes").form
        'json'
        >>> find_foreign_call("I look(at=you)", [look], "hermes")
    """
    named = {tool.name: tool for tool in tools if tool.name in text}
    if not named or len(text) > MAX_CALL_CHARACTERS:  # the first test suffices for almost all answers
        return None
    for form in REPLY_FORMATS.values():
        if form.name == read or (form.needs_marks and not any(mark in text for mark in form.markup)):
            continue
        for call in form.parse(text, tools)[1]:
            tool = named.get(call.name)
            if tool is None or isinstance(call.arguments, str) or not _may_call(tool, call.arguments):
                continue
            # A small model copies what it is shown, so that the form it wrote is not repeated.
            problem = (
                f"the call was not run, because its form is not read here; write it as {REPLY_FORMATS[read].syntax}"
            )
            return ToolCall(id=f"{UNWRITTEN_ID}0", name=call.name, arguments=text, form=form.name, problem=problem)
    return None
