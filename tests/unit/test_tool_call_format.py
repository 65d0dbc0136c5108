"""Parsing of tool calls: well-formed, malformed and hostile text."""

from __future__ import annotations

import pytest

from agentrl.rollout.tool_call_format import MAX_CALL_CHARACTERS, MAX_CALLS, parse_hermes, parse_llama

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
        '{"name":"add","arguments":null}',
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


def test_large_integers_stay_exact() -> None:
    raw = f'{{"name":"add","arguments":{{"a":{2**63 - 1},"b":{-(2**63)}}}}}'
    assert parse_hermes(f"<tool_call>{raw}</tool_call>")[1][0].arguments == {"a": 2**63 - 1, "b": -(2**63)}


def test_a_call_without_arguments_has_none() -> None:
    assert parse_hermes('<tool_call>{"name":"look"}</tool_call>')[1][0].arguments == {}


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
