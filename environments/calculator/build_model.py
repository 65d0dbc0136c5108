"""Builds the tiny model beside this file: tokenizer, random weights, and a supervised warm-up that teaches the form.

`python -m environments.calculator.build_model [--seed 0] [--steps 800] [--output DIR]` takes about three minutes on one
core. The result is an ordinary Hugging Face directory (Qwen3 architecture, byte-level BPE, chat template with tools);
nothing in it knows the skill that reinforcement learning has to teach (see demonstrations.py).
"""

from __future__ import annotations

from itertools import count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.core.records import Message
from agentrl.core.rng import stream
from agentrl.rollout.chat_format import TemplateFormat
from agentrl.rollout.chat_template import AddedToken as AddedText
from agentrl.rollout.chat_template import ChatTemplate, ControlTokens, message_value, tool_value
from environments import tiny_model
from environments.calculator.demonstrations import demonstrate
from environments.calculator.env import Calculator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from agentrl.core.records import Task, ToolSpec
    from agentrl.environment.base import TaskSource

VOCABULARY = 640
CONTEXT = 1024
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>")

TEMPLATE = """\
{%- set first = messages[0] if messages[0].role == 'system' else none -%}
{%- if tools or first -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if first -%}{{- first.content + ('\\n' if tools else '') -}}{%- endif -%}
    {%- for tool in tools or [] -%}
        {%- set function = tool.function -%}
        {{- '\\n' if not loop.first else '' -}}
        {{- function.name + '(' -}}
        {%- for name, schema in (function.parameters.properties or {}) | items -%}
            {{- (', ' if not loop.first else '') + name + ': ' -}}
            {%- if schema.enum -%}{{- schema.enum | map('tojson') | join('|') -}}
            {%- elif schema.type is string -%}{{- schema.type -}}
            {%- else -%}{{- schema | tojson(separators=(',', ':')) -}}{%- endif -%}
        {%- endfor -%}
        {{- ')' + (' ' + function.description if function.description else '') -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role != 'system' or not loop.first -%}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function -%}
            {%- set arguments = function.arguments -%}
            {{- '<tool_call>{"name":' + (function.name | tojson) + ',"arguments":' -}}
            {{- arguments if arguments is string else arguments | tojson(separators=(',', ':')) -}}
            {{- '}</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build(directory: Path, *, seed: int, steps: int) -> None:
    """Write tokenizer, template, configuration and warmed-up weights into `directory`."""
    tasks = Calculator.tasks("train", seed=seed)
    tools = [bound.spec for bound in Calculator.tool_table().values()]
    tiny_model.write_chat_template(directory, TEMPLATE, pad="<|pad|>", end="<|im_end|>", context=CONTEXT)
    tokenizer = trained_tokenizer(format_corpus(ChatTemplate(directory), tasks, tools))
    tiny_model.write_tokenizer(directory, tokenizer, special=SPECIAL, markup=MARKUP)
    chat = TemplateFormat.load(directory)
    pad, stop = chat.encode("<|pad|>")[0], chat.stop_token_ids[0]
    model = tiny_model.random_model(
        vocabulary=tokenizer.get_vocab_size(), pad_token=pad, stop_token=stop, context=CONTEXT, hidden=128, layers=4
    )
    rows = (demonstrated_row(chat, tasks[n], tools, stream("warm-up", seed, n)) for n in count())
    tiny_model.warm_up(model, rows, steps=steps)
    tiny_model.save(model, directory, stop_tokens=stop)


def trained_tokenizer(corpus: Iterator[str]) -> Tokenizer:
    """Byte-level BPE: lossless on any text; digits stand alone, what the format repeats is merged into few tokens."""
    tokenizer = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split(Regex(r"\n"), behavior="merged_with_previous")
    digits = pre_tokenizers.Split(Regex(r"[0-9]"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
        min_frequency=15,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def format_corpus(template: ChatTemplate, tasks: TaskSource, tools: Sequence[ToolSpec]) -> Iterator[str]:
    """The plain text between the control tokens of some rendered demonstrations."""
    texts = enumerate(SPECIAL + MARKUP)
    control = ControlTokens([AddedText(number, text, text in SPECIAL, False, False) for number, text in texts])
    specs = [tool_value(tool, control) for tool in tools]
    for number in range(2000):
        messages = [
            message_value(message, control) for message in conversation(tasks[number], stream("corpus", number))
        ]
        for piece in control.split(template.render(messages, specs, prompt=True)):
            if isinstance(piece, str):
                yield piece


def conversation(task: Task, random: Random) -> list[Message]:
    """A task and a demonstration for it as messages."""
    question = task.data["question"]
    shown = demonstrate(question, random)
    messages = [Message(role="user", content=question)]
    for text, observation in zip_longest(shown.said, shown.observed):
        messages.append(Message(role="assistant", content=text))
        if observation is not None:
            messages.append(Message(role="tool", content=observation))
    return messages


def demonstrated_row(chat: TemplateFormat, task: Task, tools: Sequence[ToolSpec], random: Random) -> tiny_model.Row:
    """A demonstration in the tokens that reinforcement learning will see: ids and which of them the model says."""
    first, *rest = conversation(task, random)
    ids = chat.start([first], tools)
    said = [False] * len(ids)
    for message in rest:
        own = message.role == "assistant"
        new = [*chat.encode(message.content), chat.stop_token_ids[0]] if own else chat.extend([message], after="stop")
        ids += new
        said += [own] * len(new)
    return ids, said


if __name__ == "__main__":
    tiny_model.command(build, directory=Path(__file__).parent / "model", steps=800, description=__doc__ or "")
