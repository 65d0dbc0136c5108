"""`TemplateChatFormat` and `PlainChatFormat` on arbitrary content and samples, with the shipped model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.ports import ChatFormat
from agentrl.core.records import Message, Role
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.rollout.chat.chat_format import TemplateChatFormat

MODEL = Path(__file__).parents[2] / "environments/calculator/model"
FORMATS: dict[str, ChatFormat] = {"template": TemplateChatFormat.load(MODEL), "plain": PlainChatFormat()}
CONTROLS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|start|>",
    "<|stop|>",
    "\ue000",
    "\ue001",
]

hostile = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(CONTROLS)), max_size=6).map("".join)
roles: st.SearchStrategy[Role] = st.sampled_from(["user", "tool"])
name = pytest.mark.parametrize("name", sorted(FORMATS))

pytestmark = pytest.mark.property


@name
@given(content=hostile, role=roles)
def test_content_is_framed_the_same_whatever_it_says(name: str, content: str, role: Role) -> None:
    chat = FORMATS[name]
    framed = chat.extend([Message(role=role, content=content)], after="length")
    benign = chat.extend([Message(role=role, content="#")], after="length")
    prefix, suffix = chat.decode(benign).split("#")
    assert chat.decode(framed) == prefix + content + suffix
    controls = {ids[0] for literal in CONTROLS if len(ids := chat.encode(literal)) == 1}
    assert [token for token in framed if token in controls] == [token for token in benign if token in controls]


@name
@given(contents=st.lists(hostile, min_size=2, max_size=3))
def test_messages_rendered_together_are_those_rendered_alone(name: str, contents: list[str]) -> None:
    chat = FORMATS[name]
    messages = [Message(role="tool", content=content) for content in contents]
    prompt = chat.extend([], after="stop")
    alone = [chat.extend([message], after="stop") for message in messages]
    together = [token for delta in alone for token in delta[: -len(prompt)]] + prompt
    assert chat.extend(messages, after="stop") == together


@name
@given(data=st.data())
def test_any_sample_parses(name: str, data: st.DataObject) -> None:
    chat = FORMATS[name]
    highest = max(chat.stop_token_ids)
    token_ids = data.draw(st.lists(st.integers(0, highest), max_size=40))
    message = chat.parse(token_ids)
    assert message.role == "assistant"
    assert message == chat.parse(token_ids)
    chat.decode(token_ids)


@name
@given(text=st.text())
def test_plain_text_survives(name: str, text: str) -> None:
    chat = FORMATS[name]
    assert chat.decode(chat.encode(text)) == text
