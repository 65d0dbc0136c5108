"""Parsing of tool calls: well-formed, malformed and hostile text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.records import ToolSpec
from agentrl.core.reply_formats import (
    ALL_MARKUP,
    MAX_CALL_CHARACTERS,
    MAX_CALLS,
    REPLY_FORMATS,
    THINKING,
    describe_malformed_call,
    is_thinking_open,
    parse_hermes,
    parse_llama,
    split_thinking,
)
from tests.reply_samples import CALLS, FIRST, SECOND, WEATHER, WHOLE
from tests.support.cpu_time import least_cpu_s

CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'


def test_calls_are_taken_out_of_the_content_in_order() -> None:
    content, calls = parse_hermes(f"One. {CALL} Two. {CALL.replace('add', 'sub')}")
    assert content == "One.  Two."
    assert [(call.id, call.name) for call in calls] == [("call-0", "add"), ("call-1", "sub")]


def test_a_call_without_its_end_still_counts_if_it_parses() -> None:
    assert parse_hermes(CALL.removesuffix("</tool_call>"))[1][0].arguments == {"a": 1}


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "not json",
        '{"name":"add","arguments":{"a":1}',
        '{"name":"add","arguments":{"a":NaN}}',
        '{"name":"add","arguments":{"a":Infinity}}',
        '{"name":"add","arguments":{"a":1e999}}',
        '{"name":"add","arguments":{"a":-1.5E+400}}',
        '{"name":"add","arguments":{"a":' + "9" * 309 + ".5}}",
        '{"name":"add","arguments":{"a":"\\ud800"}}',
        '{"name":"add","arguments":[1]}',
        '{"name":7,"arguments":{}}',
        '{"name":"add","arguments":{"a":1,"a":2}}',
        '{"name":"add","arguments":{"a":{"b":1,"b":1}}}',
        '{"name":"add","arguments":{"a":1},"arguments":{"a":2}}',
        "[" * 50_000,
        '{"name":"add","arguments":{"a":' + "9" * 5000 + "}}",
        '{"name":"add","arguments":{"a":100000000000000000000000}}',
        f'{{"name":"add","arguments":{{"a":{2**63}}}}}',
        f'{{"name":"add","arguments":{{"a":{-(2**63) - 1}}}}}',
        '{"name":"add","arguments":{"a":' + "[" * 500 + "]" * 500 + "}}",
        '{"name":"add","arguments":{"a":"' + "x" * MAX_CALL_CHARACTERS + '"}}',
    ],
)
def test_a_malformed_call_keeps_its_raw_text(raw: str) -> None:
    content, calls = parse_hermes(f"<tool_call>{raw}</tool_call>")
    assert content == ""
    assert [(call.arguments, call.name) for call in calls] == [(raw, "add" if '"name":"add"' in raw else "")]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3_coder", "<function=add><parameter=a>1</parameter><parameter=AGAIN>2</parameter></function>"),
        ("glm45", "add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>AGAIN</arg_key><arg_value>2</arg_value>"),
    ],
)
def test_an_argument_given_twice_between_tags_is_malformed_too(name: str, written: str) -> None:
    for again, arguments in (("b", {"a": 1, "b": 2}), ("a", written.replace("AGAIN", "a"))):
        call = f"<tool_call>{written.replace('AGAIN', again)}</tool_call>"
        (found,) = REPLY_FORMATS[name].read(call, THINKING[0]).tool_calls
        assert (found.name, found.arguments) == ("add", arguments)


def test_large_integers_stay_exact() -> None:
    raw = f'{{"name":"add","arguments":{{"a":{2**63 - 1},"b":{-(2**63)}}}}}'
    assert parse_hermes(f"<tool_call>{raw}</tool_call>")[1][0].arguments == {"a": 2**63 - 1, "b": -(2**63)}


def test_a_call_without_arguments_has_none() -> None:
    assert parse_hermes('<tool_call>{"name":"look"}</tool_call>')[1][0].arguments == {}


WRITTEN_CALLS = {
    "hermes": '<tool_call>{{"name": "look", "arguments": {}}}</tool_call>',
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "mistral": "[TOOL_CALLS]look[ARGS]{}",
    "openai": "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>",
    "kimi_k2": "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "granite": '<|tool_call|>[{{"name": "look", "arguments": {}}}]',
    "phi4_mini_json": '<|tool_call|>[{{"name": "look", "arguments": {}}}]<|/tool_call|>',
    "cohere_command3": '<|START_ACTION|>[{{"tool_name": "look", "parameters": {}}}]<|END_ACTION|>',
    "internlm": '<|action_start|><|plugin|>{{"name": "look", "parameters": {}}}<|action_end|>',
    "jamba": '<tool_calls>[{{"name": "look", "arguments": {}}}]</tool_calls>',
    "apertus": '<|tools_prefix|>[{{"look": {}}}]<|tools_suffix|>',
    "longcat": '<longcat_tool_call>{{"name": "look", "arguments": {}}}</longcat_tool_call>',
    "llama3_json": '{{"name": "look", "parameters": {}}}',
}
"""A call in each format that writes arguments as JSON."""


@pytest.mark.parametrize("name", WRITTEN_CALLS)
def test_arguments_that_are_encoded_twice_null_or_empty_are_read(name: str) -> None:
    arguments = {"path": 'a "b"', "n": [1, None]}
    once = json.dumps(arguments)
    for written, expected in (
        (once, arguments),
        (json.dumps(once), arguments),
        (json.dumps(json.dumps(once)), arguments),
        ("null", {}),
        ('""', {}),
        ('"null"', {}),
        ('"{}"', {}),
    ):
        (call,) = REPLY_FORMATS[name].read(WRITTEN_CALLS[name].format(written), None).tool_calls
        assert (call.name, call.arguments) == ("look", expected), written


@pytest.mark.parametrize("name", REPLY_FORMATS)
def test_names_with_dots_and_dashes_are_carried(name: str) -> None:
    """As tools of MCP servers have them."""
    calls = REPLY_FORMATS[name].read(CALLS[name].replace("weather", "files.get-all_2"), None, [WEATHER]).tool_calls
    assert [call.name for call in calls] == ["files.get-all_2"] * 2
    assert not any(isinstance(call.arguments, str) for call in calls)


MALFORMED = {
    "a string": ('"not an object"', "arguments are a string, not a JSON object; write the object itself"),
    "null": ("null", "arguments are null, not a JSON object; write {} if there are none"),
    "a list": ("[1, 2]", "arguments are a list, not a JSON object; name each value by its parameter"),
    "a number": ("7", "arguments are a number, not a JSON object"),
    "a boolean": ("true", "arguments are a boolean, not a JSON object"),
    "NaN": ('{"a": NaN}', "arguments are not valid: NaN is not JSON; write a finite number, or null"),
    "infinity": ('{"a": -Infinity}', "arguments are not valid: -Infinity is not JSON; write a finite number, or null"),
    "too large": ('{"a": 1e999}', "arguments are not valid: the number 1e999 is infinite; write a smaller one"),
    "64 bits": (
        '{"a": 12345678901234567890}',
        "arguments are not valid: the integer 12345678901234567890 is beyond 64 bits; write a smaller one",
    ),
    "depth": (
        '{"a": ' + "[" * 70 + "]" * 70 + "}",
        "arguments are not valid: its values are nested deeper than 64 levels; write flatter ones",
    ),
    "duplicate": ('{"a": 1, "a": 2}', "arguments are not valid: the key 'a' is given twice; give each key once"),
    "half a character": ('{"a": "\\ud83d"}', "arguments are not valid: an escape like \\ud83d is half a character"),
    "length": ('{"a": "' + "x" * MAX_CALL_CHARACTERS + '"}', "arguments are not valid: the call has more than 65,536"),
    "broken": ('{"a": 1', "the call cannot be read"),
}


@pytest.mark.parametrize("name", ["hermes", "openai"])
@pytest.mark.parametrize("cause", MALFORMED)
def test_each_cause_of_a_malformed_call_has_its_sentence(name: str, cause: str) -> None:
    written, sentence = MALFORMED[cause]
    if cause == "null":
        assert describe_malformed_call(written).startswith(sentence)
        return
    (call,) = REPLY_FORMATS[name].read(WRITTEN_CALLS[name].format(written), None).tool_calls
    assert isinstance(call.arguments, str)
    assert describe_malformed_call(call.arguments).startswith(sentence)
    assert len({sentence for _, sentence in MALFORMED.values()}) == len(MALFORMED)


def test_tagged_and_python_calls_say_what_is_wrong_too() -> None:
    twice = "<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>"
    assert "the key 'a' is given twice" in describe_malformed_call(twice)
    assert "write each argument once, as name=value" in describe_malformed_call("[add(1)]")
    assert "has no name" in describe_malformed_call('{"arguments": {}}')
    assert "beyond 64 bits" in describe_malformed_call('{"name": "add", "arguments": "{\\"a\\": 1%s}"}' % ("0" * 20))


@pytest.mark.timeout(60)
def test_long_malformed_calls_are_described_at_once() -> None:
    """A policy that repeats itself must not block the event loop: cubic time would be hours."""
    assert "cannot be read" in describe_malformed_call("1." * 30_000 + "x")
    keys = ",".join(f'"{number}":1' for number in range(7000))
    assert "'6999' is given twice" in describe_malformed_call(f'{{{keys},"6999":2}}')


def test_a_value_of_a_referenced_type_is_read_as_that_type() -> None:
    parameters = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}, "mixed": {"enum": ["a", 1]}, "level": {"$ref": "#/$defs/No"}},
        "$defs": {"Unit": {"type": "string", "enum": ["1", "2"]}},
    }
    tool = ToolSpec(name="look", description="", parameters=parameters)
    text = "<tool_call>look" + "".join(
        f"<arg_key>{key}</arg_key><arg_value>1</arg_value>" for key in ("unit", "mixed", "level")
    )
    (call,) = REPLY_FORMATS["glm45"].read(f"{text}</tool_call>", None, [tool]).tool_calls
    assert call.arguments == {"unit": "1", "mixed": 1, "level": 1}


def test_the_number_of_calls_is_bounded() -> None:
    content, calls = parse_hermes(CALL * (MAX_CALLS + 2))
    assert len(calls) == MAX_CALLS
    assert content == CALL * 2


def test_llama_takes_the_whole_message_or_nothing() -> None:
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert parse_llama(call)[1][0].arguments == {"a": 1}
    assert parse_llama(f"<|python_tag|>{call}; {call}")[1][1].id == "call-1"
    assert parse_llama(f"I call {call}") == (f"I call {call}", ())
    assert parse_llama('{"answer": 5}') == ('{"answer": 5}', ())
    assert parse_llama('{"name": "add", "parameters": ')[1][0].arguments == '{"name": "add", "parameters":'
    assert parse_llama("<|python_tag|>print(1)")[1][0].name == ""


def test_llama_reads_an_answer_with_a_name_as_an_answer() -> None:
    answer = '{"name": "Ada", "age": 36}'
    assert parse_llama(answer, [WEATHER]) == (answer, ())
    (call,) = parse_llama('{"name": "weather"}', [WEATHER])[1]
    assert (call.name, call.arguments) == ("weather", {})


@pytest.mark.parametrize("between", ["; ", "\n", ";"])
def test_llama_reads_calls_that_follow_each_other(between: str) -> None:
    calls = [f'{{"name": "weather", "parameters": {{"city": "{city}"}}}}' for city in ("a; b", "c")]
    assert [call.arguments for call in parse_llama(between.join(calls))[1]] == [{"city": "a; b"}, {"city": "c"}]


@pytest.mark.parametrize("name", REPLY_FORMATS)
def test_each_format_reads_what_its_models_write(name: str) -> None:
    each = REPLY_FORMATS[name]
    before = "" if name in WHOLE else "One moment."
    said = f"<|channel|>final<|message|>{before}<|end|><|start|>assistant" if name == "openai" else before
    thinking, content, calls = each.read(said + CALLS[name], THINKING[0], [WEATHER])
    assert (thinking, content) == ("", before)
    first, second = ("functions.weather:0", "functions.weather:1") if name == "kimi_k2" else ("call-0", "call-1")
    assert [(call.id, call.name, call.arguments) for call in calls] == [
        (first, "weather", FIRST),
        (second, "weather", SECOND),
    ]


def test_a_call_keeps_the_id_that_its_model_wrote() -> None:
    text = '[TOOL_CALLS]weather[CALL_ID]Ab3dE6gH9[ARGS]{"days": 3}'
    (call,) = REPLY_FORMATS["mistral"].read(text, None, [WEATHER]).tool_calls
    assert (call.id, call.name, call.arguments) == ("Ab3dE6gH9", "weather", {"days": 3})


@pytest.mark.parametrize("name", REPLY_FORMATS)
def test_a_call_that_breaks_off_is_malformed_and_keeps_its_text(name: str) -> None:
    text = CALLS[name]
    at = text.index("days")
    calls = REPLY_FORMATS[name].read(text[: at + 2], None, [WEATHER]).tool_calls
    assert len(calls) == 1
    assert isinstance(calls[0].arguments, str)
    assert calls[0].arguments in text
    assert calls[0].name in ("weather", "")


@pytest.mark.parametrize("name", REPLY_FORMATS)
def test_a_call_has_all_its_arguments_wherever_the_reply_is_cut(name: str) -> None:
    text = CALLS[name]
    for length in range(len(text)):
        calls = REPLY_FORMATS[name].read(text[:length], None, [WEATHER]).tool_calls
        read = [call.arguments for call in calls if not isinstance(call.arguments, str)]
        assert all(arguments in (FIRST, SECOND) for arguments in read), text[:length]


@pytest.mark.parametrize(
    ("name", "written", "arguments"),
    [
        ("qwen3_coder", "<tool_call><function=x><parameter=a>b</parameter></tool_call>", {"a": "b"}),
        ("minimax_m2", '<minimax:tool_call><invoke name="x"></minimax:tool_call>', {}),
        ("kimi_k2", "<|tool_call_begin|>functions.x:0<|tool_call_argument_begin|><|tool_call_end|>", {}),
        ("deepseek_v31", "<｜tool▁call▁begin｜>x<｜tool▁sep｜><｜tool▁call▁end｜>", {}),
        ("openai", "<|channel|>commentary to=functions.x<|message|><|call|>", {}),
        ("glm45", "<tool_call>x</tool_call>", {}),
    ],
)
def test_a_call_with_its_end_is_not_cut(name: str, written: str, arguments: Mapping[str, Any]) -> None:
    (call,) = REPLY_FORMATS[name].read(written, None, [WEATHER]).tool_calls
    assert (call.name, call.arguments) == ("x", arguments)


def test_a_call_of_qwen3_coder_may_lack_its_first_mark() -> None:
    text = CALLS["qwen3_coder"].removeprefix("<tool_call>")
    for both in (text, text.partition("<tool_call>")[0]):
        reply = REPLY_FORMATS["qwen3_coder"].read(f"I look.\n\n{both}", None, [WEATHER])
        assert reply.content == "I look."
        assert [call.arguments for call in reply.tool_calls] == ([FIRST, SECOND] if both is text else [FIRST])
    said = "Use <function=foo> in XML."
    assert REPLY_FORMATS["qwen3_coder"].read(said, None, [WEATHER]) == ("", said, ())


@pytest.mark.parametrize("name", REPLY_FORMATS)
def test_plain_text_is_content_and_the_empty_reply_is_empty(name: str) -> None:
    for text in ("", "The answer is {5}, [or 6].", "a < b; f(x)"):
        assert REPLY_FORMATS[name].read(text, THINKING[0]) == ("", text, ())


@pytest.mark.parametrize("marks", THINKING)
def test_thinking_is_told_from_the_reply(marks: tuple[str, str]) -> None:
    begin, end = marks
    assert split_thinking(f"{begin}\nEasy.\n{end}\n\n5", marks) == ("Easy.", "5")
    assert split_thinking(f"Easy.\n{end}\n\n5", marks, is_open=True) == ("Easy.", "5"), "the prompt began it"
    assert split_thinking(f"{begin}\nEasy", marks) == ("Easy", ""), "it was not ended"
    assert split_thinking("Easy", marks, is_open=True) == ("Easy", "")
    assert split_thinking("5", marks) == ("", "5")


@pytest.mark.parametrize("name", sorted(REPLY_FORMATS.keys() - {"openai"}))
def test_marks_within_an_answer_belong_to_it(name: str) -> None:
    for begin, end in THINKING:
        marks = (begin, end)
        for text in (f"Before{begin}example{end}After", f"Close it with {end} and go on: 7", f"It begins with {begin}"):
            assert REPLY_FORMATS[name].read(text, marks) == ("", text, ())
            assert REPLY_FORMATS[name].read(f"{begin}Hm.{end}{text}", marks) == ("Hm.", text, ())
            assert REPLY_FORMATS[name].read(f"Hm.{end}{text}", marks, is_open=True) == ("Hm.", text, ())


@pytest.mark.parametrize("marks", THINKING)
def test_thinking_is_open_until_its_end(marks: tuple[str, str]) -> None:
    begin, end = marks
    assert is_thinking_open(f"{begin}\nEas", marks)
    assert is_thinking_open("Eas", marks, is_open=True)
    assert not is_thinking_open(f"{begin}Easy.{end}5", marks)
    assert not is_thinking_open(f"Easy.{end}5", marks, is_open=True)
    assert not is_thinking_open("5", marks)
    assert not is_thinking_open(f"5 {begin}", marks)


UNTYPED = {
    "glm45": "<tool_call>f{}</tool_call>|<arg_key>{}</arg_key><arg_value>{}</arg_value>",
    "qwen3_coder": "<tool_call><function=f>{}</function></tool_call>|<parameter={}>\n{}\n</parameter>",
    "seed_oss": "<seed:tool_call><function=f>{}</function></seed:tool_call>|<parameter={}>{}</parameter>",
    "minimax_m2": '<minimax:tool_call><invoke name="f">{}</invoke></minimax:tool_call>|'
    '<parameter name="{}">{}</parameter>',
}
"""Formats whose values have no types: a call, and one of its arguments."""
OTHERS = ("deepseek_v32", "deepseek_v4", "functiongemma", "gemma4", "lfm2", "llama4_pythonic", "muse_glimmer", "olmo3")
"""Formats of models whose values have the format's own types, or Python's."""


def test_each_format_has_a_call_in_the_list_of_its_kind() -> None:
    assert REPLY_FORMATS.keys() == {*WRITTEN_CALLS, *UNTYPED, *OTHERS, "json", "python"}


@pytest.mark.parametrize("name", UNTYPED)
def test_values_are_read_as_python_writes_them(name: str) -> None:
    cases: list[tuple[dict[str, Any], str, Any]] = [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "true", True),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "array"}, "[1, 'a', True]", [1, "a", True]),
        ({"type": "object"}, "{'a': None, 'b': (1.5, -2)}", {"a": None, "b": [1.5, -2]}),
        ({"type": "string"}, "True", "True"),
        ({"type": "string"}, "None", "None"),
        ({"type": "string"}, "[1, 'a']", "[1, 'a']"),
        ({"type": "string"}, "12", "12"),
        ({"enum": ["True", "False"]}, "True", "True"),
        ({}, "True", "True"),
        ({"type": "integer"}, "12", 12),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "array"}, "[f(1)]", "[f(1)]"),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "object"}, "{'a': 1, 'a': 2}", "{'a': 1, 'a': 2}"),
        ({"type": "array"}, "[" * 70 + "'a'" + "]" * 70, "[" * 70 + "'a'" + "]" * 70),
    ]
    call, argument = UNTYPED[name].split("|")
    for schema, written, value in cases:
        tool = ToolSpec(name="f", description="", parameters={"type": "object", "properties": {"x": schema}})
        (parsed,) = REPLY_FORMATS[name].read(call.format(argument.format("x", written)), None, [tool]).tool_calls
        assert parsed.arguments == {"x": value}, written
        assert isinstance(parsed.arguments, Mapping)
        assert type(parsed.arguments["x"]) is type(value), written


def test_values_without_types_are_read_as_the_tool_s_schema_says() -> None:
    text = "<tool_call>f" + "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in {"text": "5", "number": "5", "any": "5", "maybe": "null", "flag": "true", "bad": "x"}.items()
    )
    text += "</tool_call>"
    schema = {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flag": {"type": ["boolean", "string"]},
        "bad": {"type": "integer"},
    }
    tool = ToolSpec(name="f", description="", parameters={"type": "object", "properties": schema})
    arguments = REPLY_FORMATS["glm45"].read(text, None, [tool]).tool_calls[0].arguments
    assert arguments == {"text": "5", "number": 5, "any": 5, "maybe": None, "flag": True, "bad": "x"}


@pytest.mark.parametrize("name", REPLY_FORMATS)
@settings(max_examples=20, deadline=None)
@given(drawn=st.data())
def test_no_text_makes_a_parser_raise_or_invent(name: str, drawn: st.DataObject) -> None:
    pieces = [
        *REPLY_FORMATS[name].markup,
        *THINKING[0],
        CALLS[name],
        "<parameter=",
        "<arg_key>",
        ">",
        "{",
        "}",
        "[",
        "]",
    ]
    text = "".join(
        drawn.draw(st.lists(st.sampled_from([*pieces, '"', ":", "\n", "weather(", "a=1", "é", " "]), max_size=12))
    )
    reply = REPLY_FORMATS[name].read(text, THINKING[0], [WEATHER])
    for call in reply.tool_calls:
        assert call.name in text
        if isinstance(call.arguments, str):
            assert call.arguments in text
    for said in (reply.thinking, reply.content):
        left = iter(text)
        assert all(character in left for character in said if not character.isspace()), "pieces of the text, in order"


@pytest.mark.parametrize("name", REPLY_FORMATS)
def test_the_time_is_linear_in_the_length(name: str) -> None:
    markup = REPLY_FORMATS[name].markup
    pieces = (*markup, "<function=a>", "<parameter=a>", '<invoke name="a">', "<arg_key>a", "f(a=[")
    texts = [piece * (100_000 // len(piece)) for piece in pieces]

    def read() -> None:
        for text in texts:
            REPLY_FORMATS[name].read(text, THINKING[0], [WEATHER])
            REPLY_FORMATS[name].read(markup[0] + text, THINKING[0], [WEATHER])

    assert least_cpu_s(read, enough=1.5) < 1.5, "quadratic, it takes minutes"


SEPARATORS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\xa0", "\u2028", "\u2029")


@pytest.mark.parametrize("name", REPLY_FORMATS)
def test_separators_in_an_argument_arrive_as_written(name: str) -> None:
    for separator in SEPARATORS:
        value = f"{separator}Os{separator}lo{separator}"
        calls = REPLY_FORMATS[name].read(CALLS[name].replace("Oslo", value), None, [WEATHER]).tool_calls
        read = [call.arguments for call in calls if not isinstance(call.arguments, str)]
        assert all(arguments in (FIRST, {**SECOND, "city": value}) for arguments in read), read
        # Control characters are not JSON, and line breaks end a string of Python: such a call is malformed.
        if separator > " " or (name in ("olmo3", "lfm2", "llama4_pythonic") and separator not in ("\n", "\r", "\r\n")):
            assert {**SECOND, "city": value} in read, ascii(separator)


@pytest.mark.parametrize("separator", SEPARATORS[3:], ids=ascii)
def test_separators_around_thinking_and_content_are_part_of_them(separator: str) -> None:
    said = REPLY_FORMATS["hermes"].read(
        f"<think>\n{separator}a\n</think>\n\n{separator}b{separator}{CALL}", THINKING[0]
    )
    assert said[:2] == (f"{separator}a", f"{separator}b{separator}")


@pytest.mark.parametrize(
    ("written", "calls"),
    [
        ('f(a="""x\n\ny""")', [{"a": "x\n\ny"}]),
        ('f(a="""x\r\ny\\\\\r""")', [{"a": "x\r\ny\\\r"}]),
        ('f(a=\'("\')\r\n  f(a="]")', [{"a": '("'}, {"a": "]"}]),
        ('f(\n  a="x",\n  b=[1,\n2])\nf(a="")', [{"a": "x", "b": [1, 2]}, {"a": ""}]),
        ('f(a="x\ny")', None),
        ("f(a='x\ny')\nf(a=\"z\")", None),
        ('f(a="""x', None),
    ],
    ids=ascii,
)
def test_python_calls_are_split_only_between_them(written: str, calls: list[Any] | None) -> None:
    read = REPLY_FORMATS["olmo3"].read(f"<function_calls>\n{written}\n</function_calls>", None).tool_calls
    assert [call.arguments for call in read] == (calls or [written])


@pytest.mark.parametrize("name", REPLY_FORMATS)
def test_without_calls_the_text_of_a_call_is_content(name: str) -> None:
    opening = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if name == "openai" else "<think>Hm.</think>"
    thinking, content, calls = REPLY_FORMATS[name].read(opening + CALLS[name], THINKING[0], reads_calls=False)
    assert (thinking, calls) == ("Hm.", ())
    assert "Par " in content
    assert "Oslo" in content
    plain = "The answer is 5."
    assert REPLY_FORMATS[name].read(plain, THINKING[0], reads_calls=False) == ("", plain, ())


@pytest.mark.parametrize("name", ['["weather"]', '{"first": "Ann"}', "7", "null"])
def test_llama_reads_a_name_that_is_no_text_as_an_answer(name: str) -> None:
    answer = f'{{"name": {name}}}'
    assert parse_llama(answer, [WEATHER]) == (answer, ())


TAGS = ("<parameter=x>", "</parameter>", "<function=x>", "</function>", "<arg_key>", "</arg_key>", "</arg_value>")
MARKS = sorted({*ALL_MARKUP, *TAGS, "<arg_value>", *(mark for pair in THINKING for mark in pair)})
UNESCAPED = {
    "qwen3_coder": "</parameter>",
    "seed_oss": "</parameter>",
    "glm45": "</arg_value>",
    "minimax_m2": "</parameter>",
    "deepseek_v32": "</｜DSML｜parameter>",
    "deepseek_v4": "</｜DSML｜parameter>",
    "muse_glimmer": "</atem:parameter>",
    "gemma4": '<|"|>',
    "functiongemma": "<escape>",
}
"""Formats whose values have no escapes, and the mark that ends a value."""


def with_city(name: str, text: str) -> str:
    """Return two calls in a format, the first with `text` as its city."""
    written = CALLS[name]
    for escaped, value in (('Par \\"is', json.dumps(text)[1:-1]), ("'Par \"is'", repr(text)), ('Par "is', text)):
        if escaped in written:
            return written.replace(escaped, value)
    raise AssertionError(name)


@pytest.mark.parametrize("name", REPLY_FORMATS)
def test_a_mark_in_an_argument_is_text(name: str) -> None:
    """Marks of all formats, alone, in a sentence and around the calls of another tool."""
    calls = {form: written.replace("weather", "delete") for form, written in CALLS.items()}
    texts = [*MARKS, *(f"Write {mark} to begin." for mark in MARKS), *calls.values()]
    for text in texts:
        read = REPLY_FORMATS[name].read(with_city(name, text), None, [WEATHER]).tool_calls
        assert {call.name for call in read} <= {"weather"}, text
        arguments = [call.arguments for call in read if not isinstance(call.arguments, str)]
        expected = [{**FIRST, "city": text}, SECOND]
        if UNESCAPED.get(name, "```" if name in ("json", "python") else "no such mark") in text:
            assert all(each in expected for each in arguments), text
        else:
            assert arguments == expected, text


@pytest.mark.parametrize("name", REPLY_FORMATS)
@settings(max_examples=20, deadline=None)
@given(drawn=st.data())
def test_no_text_in_an_argument_runs_a_call(name: str, drawn: st.DataObject) -> None:
    """A value without escapes may hold the mark that ends it, after which anything is possible."""
    end = UNESCAPED.get(name, "no such mark")
    own = CALLS[name] if end.startswith("</") else ""
    others = [written for written in CALLS.values() if end not in written or written == own]
    calls = [written.replace("weather", "delete") for written in others]
    marks = [mark for mark in MARKS if end not in mark]
    pieces = st.sampled_from([*marks, *calls, "a", '"', "'", "\\", "{", "}", "\n"])
    text = "".join(drawn.draw(st.lists(pieces, max_size=6)))
    read = REPLY_FORMATS[name].read(with_city(name, text), None, [WEATHER]).tool_calls
    assert "delete" not in {call.name for call in read if not isinstance(call.arguments, str)}
