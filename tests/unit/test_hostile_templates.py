"""Chat templates and their files, written to hang, to exhaust memory or to raise: all refused by name."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.filters import FILTERS

from agentrl.core.errors import ModelError
from agentrl.rollout.chat_format import TemplateChatFormat
from agentrl.rollout.chat_template import MAX_STEPS, MIN_BUILT_BYTES, AddedToken, ChatTemplate, ControlTokens
from tests.unit.test_chat_format import QWEN, QWEN_MARKUP, QWEN_SPECIAL, write_model

NESTED = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (NESTED, "loop rounds"),
        (f"{{% set r = range(9999)|list %}}{NESTED.replace('range(99999)', 'r')}", "loop rounds"),
        (
            "{% macro two(n) %}{% if n %}{{ two(n - 1) }}{{ two(n - 1) }}{% endif %}{% endmacro %}{{ two(99) }}",
            "loop rounds and calls",
        ),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "cannot render"),
        ("{{ 9 ** (9 ** 9) }}", "too large"),
        ("{{ 'x' * 10 ** 12 }}", "too large"),
        ("{{ '%1000000d' % 1 }}", "formatted with %"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "cannot render"),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "does not compile"),
        ("{% for m in messages %}" * 30 + "{% endfor %}" * 30, "does not compile"),
    ],
)
def test_a_hostile_template_is_refused(tmp_path: Path, template: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        TemplateChatFormat.load(write_model(tmp_path, template, QWEN_SPECIAL))


DOUBLED = "{% set ns = namespace(x='x' * 999999) %}{% for i in range(999) %}{% set ns.x = EXPRESSION %}{% endfor %}"
KEPT = "{% set ns = namespace(x='x' * 999999, kept=[]) %}{% for i in range(99999) %}EXPRESSION{% endfor %}"
LONG = "{% set x = 'x' * 999999 %}"
BOMBS = {
    "concatenation": DOUBLED.replace("EXPRESSION", "ns.x ~ ns.x"),
    "addition": DOUBLED.replace("EXPRESSION", "ns.x + ns.x"),
    "a list added to itself": DOUBLED.replace("'x' * 999999", "['x']").replace("EXPRESSION", "ns.x + ns.x"),
    "a filter that replaces": DOUBLED.replace("EXPRESSION", "ns.x|replace('x', 'xx')"),
    "a method that replaces": DOUBLED.replace("EXPRESSION", "ns.x.replace('', ns.x)"),
    "a filter that joins": DOUBLED.replace("EXPRESSION", "[ns.x, ns.x]|join(ns.x)"),
    "a method that joins": DOUBLED.replace("EXPRESSION", "ns.x.join(ns.x)"),
    "a list as text": DOUBLED.replace("EXPRESSION", "[ns.x, ns.x]|string"),
    "a namespace as text": DOUBLED.replace("EXPRESSION", "namespace(a=ns.x, b=ns.x)|string"),
    "items of a dictionary as text": DOUBLED.replace("EXPRESSION", "dict(a=ns.x, b=ns.x).items()|string"),
    "JSON": DOUBLED.replace("EXPRESSION", "[ns.x, ns.x]|tojson"),
    "JSON with an indent": "{{ [1]|tojson(indent=10 ** 9) }}",
    "JSON with long separators": LONG + "{{ range(9999)|list|tojson(separators=(x, x)) }}",
    "replace, by name": LONG + "{{ x|replace(new=x, old='x') }}",
    "replace by a list of texts": LONG + "{{ 'x'|replace('x', [x] * 9999) }}",
    "join, by name": LONG + "{{ x|join(attribute=none, d=x) }}",
    "join by a list of texts": LONG + "{{ 'xx'|join([x] * 9999) }}",
    "join of a dictionary's keys": LONG + "{{ {}.fromkeys(range(9999)).keys()|join(x) }}",
    "indent of a list of texts": LONG + "{{ ([x] * 9999)|indent }}",
    "a number's bytes": "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "bytes": "{{ (5).to_bytes(1, 'big').center(10 ** 9) }}",
    "characters": "{% set x = '\u4e00' * 999999 %}{% set y = x ~ x ~ x %}{{ y|list }}{{ y|sort }}",
    "center": "{{ 'x'|center(10 ** 12) }}",
    "center, a method": "{{ 'x'.center(10 ** 12) }}",
    "ljust": "{{ 'x'.ljust(10 ** 12) }}",
    "zfill": "{{ 'x'.zfill(10 ** 12) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "format": "{{ '{:1000000000000}'.format(1) }}",
    "format, a filter": "{{ '%1000000000000d'|format(1) }}",
    "format_map": "{{ '{x:1000000000000}'.format_map({'x': 1}) }}",
    "indent": "{{ 'x\nx'|indent(10 ** 12) }}",
    "indent with a text": LONG + "{{ ('x\n' * 99999)|indent(x) }}",
    "wordwrap": LONG + "{{ x|wordwrap(1, true, x) }}",
    "a batch filled up": "{{ [1]|batch(10 ** 12, 'x')|list }}",
    "a slice filled up": "{{ [1]|slice(10 ** 12)|list }}",
    "digits": "{{ 1.5|round(10 ** 9, 'ceil') }}",
    "sum of lists": "{{ ([['x'] * 999999] * 999)|sum(start=[]) }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "text written over and over": LONG + "{% for i in range(99999) %}{{ x }}{% endfor %}",
    "the template's own text": "{% for i in range(99999) %}" + "x" * 99_999 + "{% endfor %}",
    "text of a macro": LONG
    + "{% macro m() %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}{{ m()|length }}",
    "text of a block": LONG + "{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    "slices that are kept": KEPT.replace("EXPRESSION", "{% set ns.kept = [ns.kept, ns.x[1:]] %}"),
    "literals that are kept": KEPT.replace("EXPRESSION", "{% set ns.kept = [ns.kept, [" + "1," * 9_999 + "]] %}"),
    "dictionaries that are kept": KEPT.replace(
        "EXPRESSION", "{% set ns.kept = [ns.kept, {" + ", ".join(f"{n}: 1" for n in range(499)) + "}] %}"
    ),
    "parts that are kept": KEPT.replace("EXPRESSION", "{% set ns.kept = [ns.kept, ns.x.split('x')] %}"),
    "characters that are kept": KEPT.replace("EXPRESSION", "{% set ns.kept = [ns.kept, ns.x|list] %}"),
    "mapped texts that are kept": KEPT.replace("EXPRESSION", "{% set ns.kept = [ns.kept, [ns.x]|map('upper')|list] %}"),
    "a long template": "x" * 9_999_999,
    "tuples that are kept": KEPT.replace("EXPRESSION", "{% set ns.kept = (ns.kept, " + "i, " * 9_999 + ") %}"),
    "arguments that are kept": "{% macro m() %}{% set ns.kept = [ns.kept, varargs] %}{% endmacro %}"
    + KEPT.replace("EXPRESSION", "{{ m(*range(99999)) }}"),
    "bytes of a number": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "separators": "{{ ([''] * 99999)|tojson(separators=('x' * 999999, ':')) }}",
    "an indent for each level": "{% set ns = namespace(a=[''] * 99999) %}{% for i in range(800) %}"
    "{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a|tojson(indent=15)|length }}",
    "empty texts in lists": "{{ ([[''] * 99999] * 99999)|string|length }}",
    "characters shown by their codes": "{% set x = '\U000e0001' * 999999 %}"
    "{{ ([x ~ x ~ x ~ x] ~ '\U0001f600')|length }}",
    "a test that makes text": "{% set ns = namespace(a=['x']) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a is lower }}",
    "a long date": "{{ strftime_now('x' * 999999 ~ '%9999999Y') }}",
}
TREES = (
    "{% set ns = namespace(a=[1], b=[1], t=(1,)) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
HASHED = "{% set ns = namespace(t=(1,)) %}{% for i in range(40) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
ROUNDS = "{% set x = EXPRESSION %}{% for i in range(99999) %}BODY{% endfor %}"
SLOW = {
    "comparison": TREES + "{{ ns.a == ns.b }}",
    "order": TREES + "{{ ns.a < ns.b }}",
    "search": TREES + "{{ ns.a in [ns.b] }}",
    "a test": TREES + "{{ [ns.a]|select('eq', ns.b)|list }}",
    "sorting": TREES + "{{ [ns.a, ns.b]|sort }}",
    "the larger": TREES + "{{ [ns.a, ns.b]|max }}",
    "a method": TREES + "{{ [ns.a].count(ns.b) }}",
    "what changed in a loop": TREES + "{% for each in [ns.a, ns.b] %}{{ loop.changed(each) }}{% endfor %}",
    "a key": HASHED + "{{ {ns.t: 1} }}",
    "a key of arguments": "{% macro m() %}{% set ns.t = varargs %}{% endmacro %}"
    + HASHED.replace("{% set ns.t = (ns.t, ns.t) %}", "{{ m(ns.t, ns.t) }}")
    + "{{ {}[ns.t] }}",
    "many searches": ROUNDS.replace("EXPRESSION", "'ab' * 499999").replace(
        "BODY", "{% if 'ac' in x %}{% endif %}" * 99
    ),
    "many counts": ROUNDS.replace("EXPRESSION", "[1] * 299999").replace("BODY", "{% set y = x.count(2) %}"),
    "a long body": ROUNDS.replace("EXPRESSION", "1").replace("BODY", "{% if x is defined %}{% endif %}" * 2999),
    "a long macro": "{% macro m() %}" + "{% if x is defined %}{% endif %}" * 2999 + "{% endmacro %}"
    "{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "division": "{% set x = " + "9" * 4000 + " %}{% for i in range(99999) %}{% set y = x // 3 %}{% endfor %}",
}
TAKE_SECONDS = {
    *("literals that are kept", "tuples that are kept", "arguments that are kept", "a test that makes text"),
    *("order", "search", "a test", "a method", "what changed in a loop", "a key of arguments", "a long macro"),
}
"""Reach the same budgets as the others, later."""


def cases(templates: Mapping[str, str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.exhaustive) if name in TAKE_SECONDS else name for name in templates]


@pytest.mark.parametrize("name", cases(SLOW))
def test_a_template_that_computes_too_long_is_refused(tmp_path: Path, name: str) -> None:
    directory = write_model(tmp_path, SLOW[name], QWEN_SPECIAL)
    with pytest.raises(ModelError, match=r"builds more|compares and searches|loop rounds|too large|bits"):
        ChatTemplate(directory).render([], [], prompt=True)


def test_long_white_space_before_a_control_token_is_split_in_one_pass() -> None:
    tokens = [AddedToken(1, "<m>", True, True, False), AddedToken(2, "<r>", True, False, True)]
    control = ControlTokens([*tokens, AddedToken(3, "<n>", True, False, False)])
    assert control.split("a   <m> b<r>   c <n>  <m><m>") == ["a", 1, " b", 2, "c ", 3, 1, 1]
    space = " " * 1_000_000  # read anew from each of its characters it would take days
    assert control.split(f"x{space}y") == [f"x{space}y"]


@pytest.mark.parametrize("name", cases(BOMBS))
def test_a_template_that_builds_too_much_is_refused_before_it_has(tmp_path: Path, name: str) -> None:
    directory = write_model(tmp_path, BOMBS[name], QWEN_SPECIAL)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            ChatTemplate(directory).render([], [], prompt=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * MIN_BUILT_BYTES


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    """An expression of a template: everything jinja2 has, filters and methods that are left out here as well."""
    if not depth:
        return draw(st.sampled_from(["'x'", "ns.x", "['x', 1]", "{'a': 'x'}", "10 ** 9", "messages", "1.5", "ns"]))
    inner = expressions(depth - 1)
    argument = draw(st.sampled_from([inner.map(str), st.sampled_from(["10 ** 7", "ns.x", "''", "'x'"])]))
    arguments = ", ".join(draw(st.lists(argument, max_size=3)))
    kind = draw(st.sampled_from(["filter", "method", "operator", "list", "slice", "map"]))
    value = draw(inner)
    if kind == "filter":
        return f"({value})|{draw(st.sampled_from(sorted(FILTERS)))}({arguments})"
    if kind == "method":
        return f"({value}).{draw(st.sampled_from(METHODS))}({arguments})"
    if kind == "operator":
        return f"({value}) {draw(st.sampled_from(['+', '*', '~', '%', '**', '-']))} ({draw(inner)})"
    if kind == "map":
        return f"([{value}] * 999)|map('{draw(st.sampled_from(sorted(FILTERS)))}', {arguments or 1})|list"
    return f"[{value}, {draw(inner)}]" if kind == "list" else f"({value})[1:]"


METHODS = [name for name in (*dir(str), *dir(list), *dir(dict), *dir(int)) if not name.startswith("_")]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(expressions(), min_size=1, max_size=3))
def test_no_expression_builds_more_than_its_budget(tmp_path_factory: pytest.TempPathFactory, drawn: list[str]) -> None:
    body = "".join(f"{{% set ns.x = {one} %}}" for one in drawn)
    source = f"{{% set ns = namespace(x='x' * 999) %}}{{% for i in range(99) %}}{body}{{% endfor %}}{{{{ ns.x }}}}"
    directory = write_model(tmp_path_factory.mktemp("model"), source, QWEN_SPECIAL)
    tracemalloc.start()
    try:
        with contextlib.suppress(ModelError):
            ChatTemplate(directory).render([{"role": "user", "content": "x"}], [], prompt=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * MIN_BUILT_BYTES


def test_an_assertion_of_a_filter_is_the_template_s_error(tmp_path: Path) -> None:
    template = ChatTemplate(write_model(tmp_path, "{{ 'abcdefgh'|truncate(1) }}", QWEN_SPECIAL))
    with pytest.raises(ModelError, match="cannot render a conversation"):
        template.render([{"role": "user", "content": "x"}], [], prompt=True)


def test_loops_know_their_length_and_each_rendering_has_all_its_steps(tmp_path: Path) -> None:
    source = (
        "{% for i in range(n_token|int) %}{% if loop.last %}{{ loop.index }} of {{ loop.length }}{% endif %}"
        "{% endfor %}"
    )
    template = ChatTemplate(write_model(tmp_path, source, QWEN_SPECIAL, n_token=str(MAX_STEPS - 1)))
    expected = f"{MAX_STEPS - 1} of {MAX_STEPS - 1}"
    assert [template.render([], [], prompt=True) for _ in range(2)] == [expected, expected]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"chat_template": "\xff"}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": [], "template": "x"}]}'),
        ("config.json", b'{"eos_token_id": "abc"}'),
        ("config.json", b'{"eos_token_id": [1, {}]}'),
        ("config.json", b'{"eos_token_id": 99999999999}'),
        ("config.json", b'{"a":' * 100_000),
        ("generation_config.json", b'{"eos_token_id": true}'),
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    write_model(tmp_path, QWEN, QWEN_SPECIAL, QWEN_MARKUP)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError):
        TemplateChatFormat.load(tmp_path)


def test_a_lone_surrogate_of_a_template_is_replaced(tmp_path: Path) -> None:
    source = json.loads("\"{{ '\\\\ud800' }}\"")
    assert ChatTemplate(write_model(tmp_path, source, QWEN_SPECIAL)).render([], [], prompt=True) == "?"
