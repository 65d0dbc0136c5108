"""The end of a prompt: thinking that only some prompts begin, switches in earlier messages, and text that follows it.

The templates are written in the manner of DeepSeek-R1, Gemma 4, Nemotron Nano 2, SmolLM3, Mistral and Zephyr.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import agentrl
from agentrl.core.records import FinishReason, Message, PolicyVersion
from agentrl.core.tokens import Completion, Tokens
from agentrl.rollout.calls.journal import Prefix
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.rollout.external.token_tree import TokenTree
from agentrl.rollout.turn.agent import AgentTokenRows
from tests.support.template_talks import play
from tests.unit.test_chat_format import ADD, QWEN_MARKUP, QWEN_SPECIAL, render, tool, user, write_model
from tests.unit.test_gateway import Loop, ask
from tests.unit.test_gateway import user as asked

if TYPE_CHECKING:
    import aiohttp

R1 = """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}
{%- elif m.role == 'tool' -%}{{- '<|result|>' + m.content + '<|results_end|>' -}}
{%- elif m.role == 'assistant' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|assistant|>' -}}{%- endif -%}
{{- m.content.split('</think>')[-1] + '<|end|>' -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<|assistant|><think>\\n' -}}{%- endif -%}"""
GEMMA = """{%- for m in messages -%}
{%- if m.role == 'tool' -%}{{- '<|tool_response>' + m.content + '<tool_response|>' -}}
{%- else -%}{{- '<|turn>' + m.role + '\\n' + m.content.split('<channel|>')[-1] + '<turn|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if messages[-1].role != 'tool' -%}{{- '<|turn>assistant\\n' -}}
{%- elif enable_thinking -%}{{- '<|channel>thought\\n' -}}{%- endif -%}
{%- endif -%}"""
NEMOTRON = """{%- set ns = namespace(thinks=true) -%}
{%- for m in messages if m.role in ('user', 'system') -%}
{%- if '/think' in m.content -%}{%- set ns.thinks = true -%}
{%- elif '/no_think' in m.content -%}{%- set ns.thinks = false -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if ns.thinks else '<think></think>') -}}
{%- endif -%}"""
SMOLLM3 = """{%- set mode = '/think' -%}
{%- if messages[0].role == 'system' and '/no_think' in messages[0].content -%}
{%- set mode = '/no_think' -%}{%- endif -%}
{{- '<|im_start|>system\\nMode: ' + mode + '<|im_end|>\\n' -}}
{%- for m in messages if m.role != 'system' -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n' if mode == '/no_think' else '') -}}
{%- endif -%}"""
LAST = """{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{- '<|im_start|>user\\n' + (messages[0].content + '\\n' if loop.last and messages[0].role == 'system' else '') -}}
{{- m.content + '<|im_end|>\\n' -}}
{%- elif m.role != 'system' -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""In the manner of Mistral 7B v0.3: the system message is in the last question."""
SPECIAL = {
    SMOLLM3: QWEN_SPECIAL,
    LAST: QWEN_SPECIAL,
    R1: ("<|user|>", "<|assistant|>", "<|result|>", "<|results_end|>", "<|end|>"),
    GEMMA: ("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>"),
    NEMOTRON: QWEN_SPECIAL,
}


def load(directory: Path, template: str, history: Literal["keep", "fork"] = "keep") -> TemplateChatFormat:
    path = write_model(directory, template, SPECIAL[template], QWEN_MARKUP)
    variables = {"enable_thinking": True} if "enable_thinking" in template else {}
    return TemplateChatFormat.load(path, history=history, template_variables=variables)


class Step(NamedTuple):
    """New messages, the end of the prompt, a reply, its finish reason, and its parts."""

    messages: Sequence[Message]
    prompt_end: str
    reply: str
    thinking: str
    content: str
    after: FinishReason = "stop"


NO_THINK = Message(role="system", content="You add. /no_think")
CONVERSATIONS = {
    "DeepSeek-R1": (
        R1,
        [
            Step([user("2+3?")], "<|user|>2+3?<|assistant|><think>\n", "Hm.\n</think>\n\nAdd.<|end|>", "Hm.", "Add."),
            Step([tool("5")], "<|result|>5<|results_end|>", "5<|end|>", "", "5"),
            Step([user("6?")], "<|user|>6?<|assistant|><think>\n", "Hm.</think>6<|end|>", "Hm.", "6"),
        ],
    ),
    "Gemma 4": (
        GEMMA,
        [
            Step([user("2+3?")], "<turn|>\n<|turn>assistant\n", "Add.<turn|>", "", "Add."),
            Step([tool("5")], "5<tool_response|><|channel>thought\n", "Hm.<channel|>5<turn|>", "Hm.", "5"),
            Step([user("6?")], "<turn|>\n<|turn>assistant\n", "<|channel>thought\nHm.<channel|>6<turn|>", "Hm.", "6"),
        ],
    ),
    "Nemotron Nano 2": (
        NEMOTRON,
        [
            Step([NO_THINK, user("2+3?")], "assistant\n<think></think>", "5<|im_end|>", "", "5"),
            Step([user("6? /think")], "assistant\n<think>\n", "Hm.</think>6<|im_end|>", "Hm.", "6"),
        ],
    ),
}
CONVERSATION = pytest.mark.parametrize("name", CONVERSATIONS)


def completion(token_ids: Sequence[int], after: FinishReason) -> Completion:
    return Completion.of(Tokens.of_version(np.array(token_ids, np.int32), PolicyVersion("solver", 0, 0)), after)


@CONVERSATION
def test_a_reply_is_thinking_only_after_a_prompt_that_begins_it(tmp_path: Path, name: str) -> None:
    template, steps = CONVERSATIONS[name]
    chat = load(tmp_path, template)
    rows, context = AgentTokenRows(chat, ()), list[int]()
    for step in steps:
        context += array("i", rows.ask(step.messages))
        reply = chat.encode(step.reply)
        assert chat.decode(context).endswith(step.prompt_end)
        message = chat.parse(reply, context=context)
        assert (message.thinking, message.content) == (step.thinking, step.content)
        rows.answer(completion(reply, step.after))
        context += reply


def test_a_call_in_another_form_is_found_in_the_answer_alone(tmp_path: Path) -> None:
    chat = load(tmp_path, R1)
    context = chat.start([user("2+3?")], ())
    call = '```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n```'
    assert chat.foreign_call(chat.encode(call), [ADD], context=context) is None
    found = chat.foreign_call(chat.encode(call), [ADD], context=[*context, *chat.extend([tool("5")], after="stop")])
    assert found is not None
    assert found.name == "add"


@pytest.mark.parametrize(("template", "closes"), [(R1, [True, False]), (GEMMA, [False, True])])
def test_a_cut_turn_is_closed_as_its_own_prompt_began_it(tmp_path: Path, template: str, closes: list[bool]) -> None:
    """After a question, and after a tool's result; also in the rows of an outside agent."""
    chat = load(tmp_path, template)
    mark, rows, tree = "</think>" if template == R1 else "<channel|>", AgentTokenRows(chat, ()), TokenTree(chat)
    said, conversation = chat.encode("Adding them"), list[Message]()
    for new, is_closed in zip([user("2+3?"), tool("5")], closes, strict=True):
        conversation.append(new)
        rows.ask([new])
        rows.answer(completion(said, "length"))
        placement = tree.find_row(conversation, ())
        reply = chat.parse(said, context=array("i", placement.context_ids))
        tree.answer(placement, said, "length", reply)
        conversation.append(reply)
        position = rows.position()
        followed = chat.decode(array("i", rows.ask([user("on")])).tolist())
        rows.withdraw(position)
        assert (mark in followed) == is_closed
        following = tree.find_row([*conversation, user("on")], ())
        assert chat.decode(array("i", following.context_ids).tolist()) == followed
        assert tree.count_tokens([*conversation, user("on")], ()) == len(following.context())
        tree.withdraw(following)


def test_a_forked_history_keeps_an_answer_to_a_prompt_without_thinking(tmp_path: Path) -> None:
    chat = load(tmp_path, R1, history="fork")
    rows = AgentTokenRows(chat, ())
    for step in CONVERSATIONS["DeepSeek-R1"][1]:
        rows.ask(step.messages)
        rows.answer(completion(chat.encode(step.reply), step.after))
    assert chat.decode(rows.context().tolist()) == (
        "<|user|>2+3?<|assistant|>Add.<|end|><|result|>5<|results_end|>5<|end|>"
        "<|user|>6?<|assistant|><think>\nHm.</think>6<|end|>"
    )


SWITCHED: dict[str, tuple[str, list[list[Message]]]] = {
    "a system message": (SMOLLM3, [[NO_THINK, user("1+1?")], [user("2+2?")], [tool("4"), tool("5")], [user("3?")]]),
    "no switch": (SMOLLM3, [[Message(role="system", content="Add."), user("1+1?")], [user("2+2? /no_think")]]),
    "a later system message": (SMOLLM3, [[user("1+1?")], [NO_THINK, user("2+2?")], [user("3?")]]),
    "any system message": (NEMOTRON, [[NO_THINK, user("1+1?")], [user("2+2?")], [tool("4")], [user("3? /think")]]),
    "a question": (NEMOTRON, [[user("1+1? /no_think")], [user("2+2?")], [user("3? /think")], [user("4?")]]),
    "a new question": (NEMOTRON, [[user("1+1?")], [user("2+2? /no_think")], [user("3?")]]),
    "a question after a restart": (NEMOTRON, [[user("1+1? /no_think")], [], [user("2+2?")], [user("3?")]]),
}


@pytest.mark.parametrize("switch", SWITCHED)
def test_every_prompt_ends_as_in_a_rendering_of_the_whole_conversation(tmp_path: Path, switch: str) -> None:
    template, requests = SWITCHED[switch]
    chat = load(tmp_path, template)
    rows, tree, conversation, ends = AgentTokenRows(chat, ()), TokenTree(chat), list[Message](), set[str]()
    for messages in requests:
        if not messages:  # a restart
            rows.restart()
            conversation.clear()
            continue
        conversation += messages
        values: list[dict[str, object]] = [{"role": m.role, "content": m.content} for m in conversation]
        whole = render(template, values, add_generation_prompt=True)
        new, placement = array("i", rows.ask(messages)).tolist(), tree.find_row(conversation, ())
        ends.add(whole.rpartition("<|im_start|>")[2])
        assert chat.decode(new).rpartition("<|im_start|>")[2] == whole.rpartition("<|im_start|>")[2]
        assert array("i", placement.context_ids).tolist() == new
        said = chat.encode("4<|im_end|>")
        rows.answer(completion(said, "stop"))
        conversation.append(Message(role="assistant", content="4"))
        tree.answer(placement, said, "stop", conversation[-1])
    assert len(ends) == 1 + (switch not in ("a system message", "no switch", "a later system message"))


def test_only_words_that_change_the_end_of_a_prompt_are_switches(tmp_path: Path) -> None:
    """A system message that a template moves to the last question stays where the conversation has it."""
    chat = load(tmp_path, LAST)
    rows = AgentTokenRows(chat, ())
    rows.ask([Message(role="system", content="A user asks."), user("1+1?")])
    rows.answer(completion(chat.encode("2<|im_end|>"), "stop"))
    new = chat.decode(array("i", rows.ask([user("2+2?")])).tolist())
    assert new == "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


class Recorded(agentrl.Environment):
    """A question, and a tool's result."""

    seats = ("solver",)
    texts: ClassVar[list[str]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        self.texts[:] = [(await agent.act(message)).text for message in (user("2+3?"), tool("5"))]
        agent.reward(1.0)


class Outside(Loop):
    """A question through the gateway."""

    contents: ClassVar[list[str]] = []
    lengths: ClassVar[list[int]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> None:
        system = {"role": "system", "content": NO_THINK.content}
        _, reply = await ask(client, endpoint, [system, asked("2+3?")])
        self.contents[:] = [reply["choices"][0]["message"]["content"]]
        self.lengths[:] = [reply["usage"]["completion_tokens"]]


def test_agents_get_answers_to_prompts_without_thinking(tmp_path: Path) -> None:
    chat = load(tmp_path, R1)
    header, _, wrong = play(Recorded, chat, ["Hm.</think>Add.", "5"])
    assert (header.drop_reason, wrong, Recorded.texts) == (None, {}, ["Add.", "5"])
    header, _, wrong = play(Outside, load(tmp_path / "outside", NEMOTRON), ["5"])
    assert (header.drop_reason, wrong, Outside.contents) == (None, {}, ["5"])


ZEPHYR = """{{- bos_token -}}
{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""
"""Its prompt ends in text, not in a token of its own."""
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


def write_sentencepiece(directory: Path, kind: str) -> TemplateChatFormat:
    """A model directory whose tokenizer puts a space before a text: a normalizer or a pre-tokenizer, which does so also
    behind a control token, or the first one alone."""
    tokenizer = Tokenizer(models.BPE())
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=kind, split=False)
    alphabet = [*map(chr, range(33, 127)), "▁", "\n"]
    trainer = trainers.BpeTrainer(vocab_size=120, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["yes", "no", "user", "assistant"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ENDS.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": ZEPHYR, **ENDS}))
    return TemplateChatFormat.load(directory)


def continued(directory: Path, question: str, text: str) -> list[int]:
    """The tokens of a reply in a rendering that is tokenized in one go."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt = render(ZEPHYR, [{"role": "user", "content": question}], add_generation_prompt=True, **ENDS)
    before, whole = (tokenizer.encode(each, add_special_tokens=False).ids for each in (prompt, prompt + text))
    assert whole[: len(before)] == before
    return whole[len(before) :]


SENTENCEPIECE = pytest.mark.parametrize("kind", ["normalizer", "always", "first"])


@SENTENCEPIECE
def test_a_reply_is_tokenized_as_in_a_rendering(tmp_path: Path, kind: str) -> None:
    chat = write_sentencepiece(tmp_path, kind)
    for question in ("1+1?", " 1+1? ", "It says </s>.", "\n"):
        prompt = chat.start([user(question)], ())
        for text in ("42", " 42", "yes no", "42</s>", "\nno", "<s>no"):
            expected = continued(tmp_path, "1+1?", text)
            assert chat.encode(text, prompt) == expected
            if text[0] not in " <":  # a decoder omits the first space, and shows one after a control token
                assert chat.drift(expected, prompt) is None
    assert chat.encode("42", prompt) != chat.encode("42")
    assert chat.drift(chat.encode("42"), prompt) == "retokenised"
    extended = [*prompt, *chat.encode("2</s>", prompt), *chat.extend([user("2+2?")], after="stop")]
    assert chat.encode("42", extended) == continued(tmp_path, "2+2?", "42")


class Demonstrated(agentrl.Environment):
    """A reply that the environment gives."""

    seats = ("solver",)
    token_ids: ClassVar[list[int]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("solver")
        turn = await agent.act(user("1+1?"), reply="42")
        self.token_ids[:] = turn.completion.token_ids.tolist()
        agent.reward(1.0)


class EditsEverywhere(dict[str, Any]):
    """A fork's edits that answer 42 at every call."""

    def get(self, key: str, default: object = None) -> Any:
        return [{"role": "assistant", "content": "42"}]


def test_demonstrated_and_edited_replies_are_tokenized_as_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = write_sentencepiece(tmp_path, "normalizer")
    header, _, _ = play(Demonstrated, chat, ["y"])
    assert header.drop_reason is None
    assert Demonstrated.token_ids == continued(tmp_path, "1+1?", "42</s>")

    class Edited(Prefix):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.edits, self.is_empty = EditsEverywhere(), False

    with monkeypatch.context() as patch:
        patch.setattr("agentrl.rollout.runner.Prefix", Edited)
        header, _, _ = play(Outside, chat, ["y"])
    assert (header.drop_reason, Outside.contents, Outside.lengths) == (None, ["42"], [len(Demonstrated.token_ids)])
