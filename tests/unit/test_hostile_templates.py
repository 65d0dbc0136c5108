"""Chat templates and their files: code that reaches outside, raises or never ends its text is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.core.errors import ModelError
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.rollout.chat.chat_template import AddedToken, ChatTemplate, ControlTokens
from tests.unit.test_chat_format import QWEN, QWEN_MARKUP, QWEN_SPECIAL, write_model


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "cannot render"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "cannot render"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "characters"),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "does not compile"),
        ("{% for m in messages %}" * 30 + "{% endfor %}" * 30, "does not compile"),
    ],
)
def test_a_faulty_template_is_refused(tmp_path: Path, template: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        ChatTemplate(write_model(tmp_path, template, QWEN_SPECIAL)).render(
            [{"role": "user", "content": "x"}], [], prompt=True
        )


def test_long_white_space_before_a_control_token_is_split_in_one_pass() -> None:
    tokens = [AddedToken(1, "<m>", True, True, False), AddedToken(2, "<r>", True, False, True)]
    control = ControlTokens([*tokens, AddedToken(3, "<n>", True, False, False)])
    assert control.split("a   <m> b<r>   c <n>  <m><m>") == ["a", 1, " b", 2, "c ", 3, 1, 1]
    space = " " * 1_000_000  # read anew from each of its characters it would take days
    assert control.split(f"x{space}y") == [f"x{space}y"]


def test_an_assertion_of_a_filter_is_the_template_s_error(tmp_path: Path) -> None:
    template = ChatTemplate(write_model(tmp_path, "{{ 'abcdefgh'|truncate(1) }}", QWEN_SPECIAL))
    with pytest.raises(ModelError, match="conversation"):
        template.render([{"role": "user", "content": "x"}], [], prompt=True)


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
