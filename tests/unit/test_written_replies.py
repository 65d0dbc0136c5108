"""Replies that were not sampled: their tokens are those of transformers' rendering of the same conversation."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from agentrl.core.errors import ModelError
from agentrl.core.records import Message, ToolSpec
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from tests.support.template_talks import CHATML, PLANTED, model
from tests.unit.test_chat_format import LLAMA, LLAMA_SPECIAL, OPENED, QWEN, THINKS, user
from tests.unit.test_prompt_ends import NEMOTRON, R1

if TYPE_CHECKING:
    from pathlib import Path

GEMMA3 = """{{- bos_token -}}{%- for m in messages -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim -}}
{{- '<end_of_turn>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""
GLM = """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|user|>\\n' + m.content -}}
{%- elif m.role == 'tool' -%}
{{- ('<|observation|>' if messages[loop.index0 - 1].role != 'tool' else '') + '\\n<tool_response>\\n' -}}
{{- m.content + '\\n</tool_response>' -}}
{%- else -%}{{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' -}}
{%- if m.content -%}{{- '\\n' + m.content -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}{{- '\\n<tool_call>' + call.function.name + '\\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value | tojson if value is not string else value) -}}
{{- '</arg_value>\\n' -}}{%- endfor -%}{{- '</tool_call>' -}}{%- endfor -%}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
HARMONY = """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start|>functions.add to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' -}}
{%- elif m.tool_calls -%}
{%- if m.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}{%- endif -%}
{%- set f = m.tool_calls[0].function -%}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' -}}
{{- f.arguments | tojson + '<|call|>' -}}
{%- else -%}
{%- if m.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') -}}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""
QWEN3 = """{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif m.role == 'user' -%}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>assistant\\n<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- ('\\n' if m.content else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\\n</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
HERMES = '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
KEEPS = "{%- set keeps = true -%}"
ADD = ToolSpec(name="add", description="Adds.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


class Family(NamedTuple):
    """A template, how its model writes thinking and a call, and the special tokens that the template does not show."""

    template: str
    thought: str = ""
    call: str = ""
    marks: tuple[str, ...] = ()
    key: str = "reasoning_content"


FAMILIES = {
    "qwen2.5": Family(QWEN, call=HERMES),
    "qwen3": Family(QWEN3, THOUGHT, HERMES),
    "chatml": Family(CHATML, call=HERMES),
    "llama3": Family(LLAMA, call='{"name": "add", "parameters": {"a": 1, "b": 2}}', marks=LLAMA_SPECIAL),
    "gemma3": Family(GEMMA3),
    "glm": Family(
        GLM,
        "<think>Hm.</think>\n",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key><arg_value>2</arg_value>\n"
        "</tool_call>",
        ("<|observation|>", "<|endoftext|>"),
    ),
    "gpt-oss": Family(
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>",
        '<|channel|>commentary to=functions.add<|message|>{"a": 1, "b": 2}<|call|>',
        ("<|return|>", "<|call|>"),
        "thinking",
    ),
    "thinks": Family("{%- set opening = '' -%}" + KEEPS + THINKS, THOUGHT),
    "opened": Family(OPENED + KEEPS + THINKS, THOUGHT),
}


def conversations(family: Family) -> dict[str, list[dict[str, Any]]]:
    """Return conversations as transformers takes them; `text` of a reply is what the model would write."""
    asked, more = ({"role": "user", "content": text} for text in ("1 + 2?", "And 2 + 2?"))
    function = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    reply = {"role": "assistant", "content": "It is 3.", "text": "It is 3."}
    call = {"role": "assistant", "content": "", "tool_calls": [function], "text": family.call}
    result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"}
    thought = {**reply, family.key: "Hm.", "text": family.thought + "It is 3."}
    kinds = {"text": [asked, reply, more, reply], "one": [asked, reply]}
    if family.call:
        kinds["call"] = [asked, call, result, reply]
    if family.thought:
        kinds["thinking"] = [asked, thought, more, {**thought, "content": "4.", "text": family.thought + "4."}]
    if family.call and family.thought and family.key != "thinking":
        kinds["all"] = [asked, {**call, family.key: "Hm.", "text": family.thought + family.call}, result, thought]
    return kinds


def row(chat: TemplateChatFormat, conversation: list[dict[str, Any]]) -> list[int]:
    """Return the row of a conversation whose replies are written, as an agent's `act(reply=…)` makes it."""
    ids: list[int] = []
    new: list[Message] = []
    tools = offered(conversation)
    for message in conversation:
        if message["role"] == "assistant":
            ids += chat.extend(new, after="stop", tools=tools) if ids else chat.start(new, tools)
            ids += chat.write_reply(message["text"], ids, tools)
            new = []
        else:
            new.append(Message(**message))
    return ids


def offered(conversation: list[dict[str, Any]]) -> list[ToolSpec]:
    return [ADD] if any(message["role"] == "tool" for message in conversation) else []


def rendered(directory: Path, conversation: list[dict[str, Any]]) -> str:
    """Return transformers' rendering, with the date that agentrl's prompts have."""
    messages = [{key: value for key, value in message.items() if key != "text"} for message in conversation]
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in offered(conversation)
    ]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False))
    return re.sub(r"\d\d [A-Z][a-z]{2} \d{4}", "01 Jan 2026", text)


@pytest.mark.parametrize("ends_first", ["", "<|pad|>"], ids=["", "another end token first"])
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, family in FAMILIES.items() for kind in conversations(family)]
)
def test_a_row_of_written_replies_is_transformers_rendering(
    name: str, kind: str, ends_first: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    directory = model(tmp_path, name.replace("gpt-oss", "gpt"), family.template, (*family.marks, "<|pad|>"))
    if ends_first:
        [end] = TemplateChatFormat.load(directory).encode(ends_first)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    chat = TemplateChatFormat.load(directory)
    conversation = conversations(family)[kind]
    ids = row(chat, conversation)
    assert ids[-1] in chat.stop_token_ids
    ours, expected = chat.decode(ids), rendered(directory, conversation)
    if name == "gpt-oss":  # a turn ends in <|return|>, which the template writes at the end of a conversation only
        ours = ours.replace("<|return|><|start|>", "<|end|><|start|>")
    last = chat.decode(ids[-1:])
    assert ours.removesuffix(last) == expected.rstrip("\n").removesuffix(last), "GLM leaves the end to the next message"


@pytest.mark.parametrize(
    ("template", "prompt", "text", "expected"),
    [
        (R1, "2+3?", "<think>\nHm.\n</think>\n\n5", "Hm.\n</think>\n\n5<|end|>"),
        (R1, "2+3?", "Hm.</think>5", "Hm.\n</think>\n\n5<|end|>"),
        (R1, "2+3?", "5", "\n</think>\n\n5<|end|>"),
        (NEMOTRON, "2+3? /no_think", "5", "5<|im_end|>"),
        (NEMOTRON, "2+3?", "<think>Hm.</think>5", "Hm.\n</think>\n\n5<|im_end|>"),
        (CHATML, "2+3?", "", "<|im_end|>"),
        (CHATML, "2+3?", "5<|im_end|>", "5<|im_end|>"),
        (CHATML, "2+3?", "<tool_call>{</tool_call>", "<tool_call>{</tool_call><|im_end|>"),
    ],
)
def test_a_reply_continues_its_prompt(template: str, prompt: str, text: str, expected: str, tmp_path: Path) -> None:
    chat = TemplateChatFormat.load(model(tmp_path, "m", template, ("<|end|>", "<|im_end|>")))
    assert chat.decode(chat.write_reply(text, chat.start([user(prompt)], ()))) == expected


@pytest.mark.parametrize(
    ("template", "prompt", "text"),
    [(NEMOTRON, "2+3? /no_think", "<think>Hm.</think>5"), (PLANTED["prompt"], "2+3?", "5")],
)
def test_a_reply_that_its_prompt_rules_out_is_refused(template: str, prompt: str, text: str, tmp_path: Path) -> None:
    chat = TemplateChatFormat.load(model(tmp_path, "m", template))
    with pytest.raises(ModelError, match="otherwise than its prompt begins it"):
        chat.write_reply(text, chat.start([user(prompt)], ()))


def test_a_call_that_the_template_does_not_write_is_text(tmp_path: Path) -> None:
    """A policy may learn a form of calls that its template does not know."""
    chat = TemplateChatFormat.load(model(tmp_path, "gemma", GEMMA3))
    ids = chat.write_reply(HERMES, chat.start([user("1 + 2?")], ()), [ADD])
    assert chat.decode(ids) == f"{HERMES}<end_of_turn>"
    assert [call.name for call in chat.parse(ids, [ADD]).tool_calls] == ["add"]


def test_control_tokens_in_the_values_of_a_call_stay_text(tmp_path: Path) -> None:
    chat = TemplateChatFormat.load(model(tmp_path, "m", QWEN3))
    said = json.dumps({"name": "add", "arguments": {"a": "say <|im\u005fend|>", "b": 2}})
    ids = chat.write_reply(f"<tool_call>{said}</tool_call>", chat.start([user("1 + 2?")], ()))
    assert ids.count(chat.stop_token_ids[0]) == 1
