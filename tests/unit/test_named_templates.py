"""Model directories with several chat templates: the same one is taken as by transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from agentrl.app.model_files import record_models
from agentrl.core.errors import ModelError
from agentrl.core.records import Message, ToolCall
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from tests.unit.test_chat_format import ADD, QWEN, QWEN_MARKUP, QWEN_SPECIAL, write_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WITHOUT = QWEN.replace("tool_response>\\n' + m", "tool_response>\\n= ' + m").replace(
    "{%- if tools %}", "Hi.{%- if x %}"
)
BROKEN = "{{ raise_exception('no') }}"
ASKED = [Message(role="user", content="1 + 2?")]
CALLED = Message(role="assistant", content="", tool_calls=(ToolCall(id="a", name="add", arguments={"a": 1, "b": 2}),))
ANSWERED = [Message(role="tool", content="3", tool_call_id="a", name="add")]
OFFERED = {"name": ADD.name, "description": ADD.description, "parameters": ADD.parameters}


def write(directory: Path, templates: Mapping[str, str], layout: str) -> Path:
    write_model(directory, "", QWEN_SPECIAL, QWEN_MARKUP)
    if layout == "list":
        named = [{"name": name, "template": source} for name, source in templates.items()]
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        return directory
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": BROKEN}))  # files replace it
    (directory / "additional_chat_templates").mkdir()
    for name, source in templates.items():
        file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
        (directory / f"{file}.jinja").write_text(source)
    return directory


def theirs(directory: Path, messages: Sequence[Message], *, with_tools: bool) -> str:
    values: list[dict[str, Any]] = []
    for message in messages:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
        calls = {"tool_calls": [{"type": "function", "function": function} for function in functions]}
        values.append({"role": message.role, "content": message.content, **(calls if functions else {})})
    offered = [{"type": "function", "function": OFFERED}] if with_tools else None
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return str(tokenizer.apply_chat_template(values, tools=offered, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("layout", ["list", "files"])
@pytest.mark.parametrize("with_tools", [False, True], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    "templates",
    [
        {"default": WITHOUT, "tool_use": QWEN},
        {"default": QWEN, "tool_use": WITHOUT, "rag": BROKEN},
        {"default": QWEN, "rag": BROKEN},
        {"tool_use": QWEN},
        {"default": BROKEN, "tool_use": QWEN},
        {"rag": QWEN},
        {"rag": QWEN, "plain": QWEN},
    ],
    ids=lambda templates: "+".join(templates),
)
def test_the_same_template_is_taken_as_by_transformers(
    templates: Mapping[str, str], with_tools: bool, layout: str, tmp_path: Path
) -> None:
    directory = write(tmp_path, templates, layout)
    tools = [ADD] if with_tools else []
    if not with_tools and templates.get("default", BROKEN) == BROKEN:
        with pytest.raises(Exception, match="no"):
            theirs(directory, ASKED, with_tools=False)
        with pytest.raises(ModelError, match="no"):
            TemplateChatFormat.load(directory).start(ASKED, tools)
        return
    if {"default", "tool_use"}.isdisjoint(templates):
        with pytest.raises(ModelError, match=r"'rag'.*'default'"):
            TemplateChatFormat.load(directory)
        return
    chat = TemplateChatFormat.load(directory)
    ids = chat.start(ASKED, tools)
    assert chat.decode(ids) == theirs(directory, ASKED, with_tools=with_tools).replace("\\u003c", "<")
    if with_tools:
        reply = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
        ids += chat.encode(reply)
        message = chat.parse(chat.encode(reply), tools)
        assert [call.arguments for call in message.tool_calls] == [{"a": 1, "b": 2}]
    else:
        ids += chat.encode("3<|im_end|>")
    more = ANSWERED if with_tools else ASKED
    said = CALLED if with_tools else Message(role="assistant", content="3")
    ids += chat.extend(more, after="stop", turn=(), tools=tools)
    assert chat.decode(ids) == theirs(directory, [*ASKED, said, *more], with_tools=with_tools)


def test_a_broken_template_for_tools_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot render"):
        TemplateChatFormat.load(write(tmp_path, {"default": QWEN, "tool_use": BROKEN}, "files"))


def test_tools_in_the_system_message_use_the_template_without_tools(tmp_path: Path) -> None:
    directory = write(tmp_path, {"default": WITHOUT, "tool_use": BROKEN}, "files")
    chat = TemplateChatFormat.load(directory, tools_in="system")
    assert chat.decode(chat.start(ASKED, [ADD])).lstrip().startswith("Hi.")


def test_a_variable_that_one_of_two_templates_reads_is_taken(tmp_path: Path) -> None:
    directory = write(tmp_path, {"default": WITHOUT.replace("Hi.", "{{ hi }}"), "tool_use": QWEN}, "list")
    chat = TemplateChatFormat.load(directory, template_variables={"hi": "Ho."})
    assert chat.decode(chat.start(ASKED, [])).lstrip().startswith("Ho.")
    with pytest.raises(ModelError, match=r"template_variables\.he"):
        TemplateChatFormat.load(directory, template_variables={"he": "Ho."})


def test_the_fingerprint_and_the_record_of_a_model_cover_both_templates(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"default": WITHOUT, "tool_use": QWEN}, "files")
    other = write(tmp_path / "other", {"default": WITHOUT + " ", "tool_use": QWEN}, "files")
    third = write(tmp_path / "third", {"default": WITHOUT, "tool_use": QWEN + " "}, "files")
    assert len({TemplateChatFormat.load(directory).fingerprint for directory in (one, other, third)}) == 3
    (record,) = record_models({("model", "path"): str(one)})
    assert {"chat_template.jinja", "tool_use.jinja"} <= {*record.files}


@pytest.mark.parametrize("templates", [{"default": QWEN}, {"default": QWEN, "tool_use": QWEN + " "}], ids="+".join)
def test_arguments_are_written_as_the_template_takes_them(templates: Mapping[str, str], tmp_path: Path) -> None:
    """Also with a format that the settings name, and in calls of a conversation that offers no tools any more."""
    as_text = {name: source.replace("arguments | tojson", "arguments") for name, source in templates.items()}
    chat = TemplateChatFormat.load(write(tmp_path, as_text, "files"), reply_format="hermes")
    for tools in ([], [ADD]):
        assert '"arguments": {"a": 1, "b": 2}' in chat.decode(chat.start([*ASKED, CALLED, *ANSWERED], tools))
