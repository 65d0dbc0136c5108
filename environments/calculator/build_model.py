"""Builds the tiny model beside this file: tokenizer, random weights, and a supervised warm-up that teaches the form.

`python -m environments.calculator.build_model [--seed 0] [--steps 800] [--output DIR]` takes about three minutes on one
core. The same seed gives the same files on the same machine and versions. The result is an ordinary Hugging Face
directory (Qwen3 architecture, byte-level BPE, chat template with tools); nothing in it knows the skill that
reinforcement learning has to teach (see demonstrations.py).
"""

from __future__ import annotations

import argparse
import json
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.progress import track
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from agentrl.core.records import Message
from agentrl.core.rng import stream
from agentrl.rollout.chat_format import TemplateFormat
from agentrl.rollout.chat_template import AddedToken as AddedText
from agentrl.rollout.chat_template import ChatTemplate, ControlTokens, message_value, tool_value
from environments.calculator.demonstrations import demonstrate
from environments.calculator.env import Calculator
from environments.calculator.tasks import HeldOutTasks, TrainingTasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from agentrl.core.records import Task, ToolSpec

DIRECTORY = Path(__file__).parent / "model"
VOCABULARY = 640
CONTEXT = 1024
BATCH, PIECE = 48, 16
"""Demonstrations per step, and per forward pass: those of like length together, so that little is padded."""
LEARNING_RATE = 3e-3
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>")
Row = tuple[list[int], list[bool]]
"""Token ids of a conversation, and which of them the model says."""

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


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800, help="warm-up steps of 48 demonstrations")
    parser.add_argument("--output", type=Path, default=DIRECTORY)
    arguments = parser.parse_args()
    build(arguments.output, seed=arguments.seed, steps=arguments.steps)


def build(directory: Path, *, seed: int = 0, steps: int = 800) -> None:
    """Write tokenizer, template, configuration and warmed-up weights into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tasks = TrainingTasks(seed, HeldOutTasks(512))
    tools = [bound.spec for bound in Calculator.tool_table().values()]
    write_tokenizer(directory, tasks, tools)
    chat = TemplateFormat.load(directory)
    size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    model = Qwen3ForCausalLM(model_config(size, chat.stop_token_ids[0], chat.encode("<|pad|>")[0]))
    rows = (demonstrated_row(chat, tasks[n], tools, stream("warm-up", seed, n)) for n in count())
    warm_up(model, rows, steps=steps)
    stop, pad = model.config.eos_token_id, model.config.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad, do_sample=True)
    model.save_pretrained(directory)


def write_tokenizer(directory: Path, tasks: TrainingTasks, tools: Sequence[ToolSpec]) -> None:
    """Byte-level BPE: lossless on any text; digits stand alone, what the format repeats is merged into few tokens."""
    special = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
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
    tokenizer.train_from_iterator(format_corpus(ChatTemplate(directory), tasks, tools), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    tokenizer.save(str(directory / "tokenizer.json"))


def format_corpus(template: ChatTemplate, tasks: TrainingTasks, tools: Sequence[ToolSpec]) -> Iterator[str]:
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


def demonstrated_row(chat: TemplateFormat, task: Task, tools: Sequence[ToolSpec], random: Random) -> Row:
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


def model_config(vocabulary: int, stop_token: int, pad_token: int) -> Qwen3Config:
    """Under a million parameters of the Qwen3 architecture."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.06,  # for this width; at 0.02 copying takes four times as long to learn
        bos_token_id=None,
        eos_token_id=stop_token,
        pad_token_id=pad_token,
    )


def warm_up(model: Qwen3ForCausalLM, rows: Iterator[Row], *, steps: int) -> None:
    """Supervised steps on what demonstrations say: AdamW with a one-cycle learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for _ in track(range(steps), description="warm-up"):
        batch = sorted(islice(rows, BATCH), key=lambda row: len(row[0]))
        total = sum(sum(said) for _, said in batch)
        for start in range(0, BATCH, PIECE):
            (said_loss(model, batch[start : start + PIECE]) / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


def said_loss(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """Cross-entropy summed over what the model says in `rows`, in nats."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
    said = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows])[:, 1:]
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[said]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][said], reduction="sum")


if __name__ == "__main__":
    main()
