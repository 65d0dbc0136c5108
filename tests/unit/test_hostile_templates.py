"""Chat templates and their files, written to hang, to exhaust memory or to raise: all refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.core.errors import ModelError
from agentrl.rollout.chat_format import TemplateFormat
from agentrl.rollout.chat_template import MAX_STEPS, ChatTemplate
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
        ("{{ '%1000000d' % 1 }}", "characters of a few words"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "cannot render"),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "does not compile"),
        ("{% for m in messages %}" * 30 + "{% endfor %}" * 30, "does not compile"),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}"
            "{% if messages|length == 3 and messages[0].content == '.' %}{{ m.content }}{% endif %}"
            "<|im_end|>{% endfor %}",
            "leaves out",
        ),
    ],
)
def test_a_hostile_template_is_refused(tmp_path: Path, template: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        TemplateFormat.load(write_model(tmp_path, template, QWEN_SPECIAL))


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
        TemplateFormat.load(tmp_path)


def test_a_lone_surrogate_of_a_template_is_replaced(tmp_path: Path) -> None:
    source = json.loads("\"{{ '\\\\ud800' }}\"")
    assert ChatTemplate(write_model(tmp_path, source, QWEN_SPECIAL)).render([], [], prompt=True) == "?"
