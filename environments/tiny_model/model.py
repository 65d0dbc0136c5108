"""Tiny models that know the format of an environment's conversations: a small Qwen3, its files, its supervised warm-up.

Shared by `warm_up.py` and the `build_model.py` files of the bundled environments.
Invariant: the same seed gives the same files on the same machine and versions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from agentrl.observe.progress import ProgressLine
from agentrl.rollout.chat.chat_template import AddedToken as AddedText
from agentrl.rollout.chat.chat_template import ChatTemplate, ControlTokens, message_for_template, tool_for_template

if TYPE_CHECKING:
    from agentrl.core.records import Message, ToolSpec
    from agentrl.rollout.chat.chat_format import TemplateChatFormat

BATCH = 48
"""Number of conversations per warm-up step."""
LEARNING_RATE = 3e-3
COOL_DOWN = 30
"""Number of steps in which the learning rate falls to 0 after the model is good enough; before, its weights are
noisy.
"""
Row = tuple[list[int], list[bool]]
"""Token ids of a conversation, and a mask of those to learn."""
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
"""Chat template. It lists each tool on a line, `name(argument: type) description`, to spend few tokens on constant
text."""

PIECES = (
    r'\{"name":"\w+","arguments":\{',  # the head of a tool call
    r'"?,?"\w+":"?',  # the name of an argument
    r"[0-9]",
    r" ?\p{L}+",
    r" ?[^\s\p{L}0-9]+",
    r"\s",
)
"""Text that one token may contain at most. A token that spanned words would split a held-out combination of known words
into tokens that the model never saw."""
LINES = (r"[0-9]", r"[^0-9\n]*\n?")
"""Lines without digits: fewer tokens than with `PIECES`, for environments whose sentences are fixed."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to learn from."""

    messages: Sequence[Message]
    """Messages; those of the assistant contain calls as text."""
    tools: Sequence[ToolSpec] = ()


def build_model_command(build: Callable[..., None], *, directory: Path, steps: int, description: str) -> None:
    """Run the command line of a `build_model.py`: call `build(output, seed=…, steps=…)`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help=f"warm-up steps of {BATCH} conversations")
    parser.add_argument("--output", type=Path, default=directory)
    arguments = parser.parse_args()
    seed_torch(arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    build(arguments.output, seed=arguments.seed, steps=arguments.steps)


def build_from_demonstrations(
    directory: Path, demonstrations: Callable[[int], Iterator[Demonstration]], *, context: int, layers: int, steps: int
) -> None:
    """Write a model of width 64 that imitates demonstrations, with a tokenizer of 400 tokens made from them.

    Args:
        directory: an existing directory for the model.
        demonstrations: endless demonstrations by seed: 500 of seed 1 for the tokenizer, those of seed 2 for training.
        context: tokens that the model reads.
        layers: number of layers.
        steps: number of supervised steps.
    """
    from agentrl.rollout.chat.chat_format import TemplateChatFormat

    seed_torch(0)
    write_chat_template(directory, TEMPLATE, pad="<|pad|>", end="<|im_end|>", context=context)
    corpus = format_corpus(ChatTemplate(directory), islice(demonstrations(1), 500))
    tokenizer = train_tokenizer(corpus, vocabulary=400, pieces=LINES)
    write_tokenizer(directory, tokenizer, special=SPECIAL, markup=MARKUP)
    chat = TemplateChatFormat.load(directory)
    pad, stop = chat.encode("<|pad|>")[0], chat.stop_token_ids[0]
    model = random_model(
        vocabulary=tokenizer.get_vocab_size(), pad_token=pad, stop_token=stop, context=context, hidden=64, layers=layers
    )
    rows = (tokenise_demonstration(chat, demonstration) for demonstration in demonstrations(2))
    train_supervised(model, rows, steps=steps, on_step=progress_printer("warm-up", steps))
    save_model(model, directory, stop_tokens=stop)


def seed_torch(seed: int) -> None:
    """Seed torch, and limit it to one thread: a model this small gains nothing from more."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)


def progress_printer(title: str, steps: int) -> Callable[[int, float], bool]:
    """Return a callback for `train_supervised` that shows steps and loss on the error stream."""
    part = ProgressLine(title, sys.stderr)

    def on_step(step: int, loss: float) -> bool:
        part(f"step {step} of {steps}, loss {loss:.3f}")
        return False

    return on_step


def write_chat_template(directory: Path, template: str, *, pad: str, end: str, context: int) -> None:
    """Write the chat template and the tokenizer's configuration; `pad` and `end` are tokens, `context` is in tokens."""
    special = {"pad_token": pad, "eos_token": end}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(template)


def write_tokenizer(directory: Path, tokenizer: Tokenizer, *, special: Sequence[str], markup: Sequence[str]) -> None:
    """Write the tokenizer with its control tokens: `special` ones cannot be written as text, `markup` ones can."""
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markup])
    tokenizer.save(str(directory / "tokenizer.json"))


def train_tokenizer(
    corpus: Iterator[str], *, vocabulary: int, min_frequency: int = 15, pieces: Sequence[str] = PIECES
) -> Tokenizer:
    """Train a byte-level BPE tokenizer: lossless on any text, with single digits and few tokens for frequent text.

    Args:
        corpus: plain text, without control tokens.
        vocabulary: maximum number of tokens, including control tokens.
        min_frequency: number of occurrences a pair needs to become a token.
        pieces: regular expressions of the text that one token may contain at most.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex("|".join(pieces)), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL) - len(MARKUP),
        min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def format_corpus(template: ChatTemplate, demonstrations: Iterator[Demonstration]) -> Iterator[str]:
    """Yield the plain text between the control tokens of rendered demonstrations."""
    texts = enumerate(SPECIAL + MARKUP)
    control = ControlTokens([AddedText(number, text, text in SPECIAL, False, False) for number, text in texts])
    for demonstration in demonstrations:
        specs = [tool_for_template(tool, control) for tool in demonstration.tools]
        messages = [message_for_template(message, control) for message in demonstration.messages]
        for piece in control.split(template.render(messages, specs, prompt=True)):
            if isinstance(piece, str):
                yield piece


def tokenise_demonstration(chat: TemplateChatFormat, demonstration: Demonstration) -> Row:
    """Tokenize a demonstration as reinforcement learning will see it: ids, and a mask of the model's tokens."""
    ids: list[int] = []
    mask: list[bool] = []
    new_messages: list[Message] = []
    for message in demonstration.messages:
        if message.role != "assistant":
            new_messages.append(message)
            continue
        context = chat.extend(new_messages, after="stop") if ids else chat.start(new_messages, demonstration.tools)
        reply = [*chat.encode(message.content), chat.stop_token_ids[0]]
        ids += [*context, *reply]
        mask += [False] * len(context) + [True] * len(reply)
        new_messages = []
    return ids, mask


def random_model(
    *, vocabulary: int, pad_token: int, stop_token: int, context: int, hidden: int, layers: int
) -> Qwen3ForCausalLM:
    """Make a Qwen3 with random weights, four heads of 32, and a feed-forward layer three times as wide as `hidden`."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=3 * hidden,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.06,  # suits this width; with 0.02, learning to copy takes four times as long
        bos_token_id=None,
        eos_token_id=stop_token,
        pad_token_id=pad_token,
    )
    return Qwen3ForCausalLM(config)


def train_supervised(
    model: Qwen3ForCausalLM,
    rows: Iterator[Row],
    *,
    steps: int,
    on_step: Callable[[int, float], bool] | None = None,
    piece: int = 16,
) -> None:
    """Train with supervision: AdamW with a one-cycle learning rate.

    Args:
        model: model to train.
        rows: conversations, `BATCH` for each step.
        steps: number of steps.
        on_step: called after each step with the number of steps taken and the loss per learned token, in nats. When it
            returns True, the learning rate falls to 0 over the next `COOL_DOWN` steps, which are the last.
        piece: rows per forward pass; rows of similar length go together, to pad little.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1)
    last = steps
    for step in range(steps):
        batch = sorted(islice(rows, BATCH), key=lambda row: len(row[0]))
        total, loss = sum(sum(mask) for _, mask in batch), 0.0
        for start in range(0, BATCH, piece):
            part = _reply_loss(model, batch[start : start + piece]) / total
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        enough = on_step is not None and on_step(step + 1, loss)
        if last == steps:
            schedule.step()
        if enough and last == steps:
            last = min(step + 1 + COOL_DOWN, steps - 1)
            falls = [group["lr"] / (last - step) for group in optimizer.param_groups]
        elif last < steps:
            for group, fall in zip(optimizer.param_groups, falls, strict=True):
                group["lr"] -= fall
        if step + 1 >= last:
            return


def save_model(model: Qwen3ForCausalLM, directory: Path, *, stop_tokens: int | list[int]) -> None:
    """Write an ordinary Hugging Face directory; any of `stop_tokens` ends a turn.

    Weights are stored in float16, which halves the package; the configuration says float32, so they are computed in it.
    """
    pad = model.config.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=stop_tokens, pad_token_id=pad, do_sample=True)
    transformers_logging.disable_progress_bar()
    half_tensors: dict[int, torch.Tensor] = {}  # tied weights stay one tensor
    weights = {
        name: half_tensors.setdefault(value.data_ptr(), value.half()) for name, value in model.state_dict().items()
    }
    model.save_pretrained(directory, state_dict=weights)
    (directory / "model.safetensors").chmod(0o644)


def _reply_loss(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """Compute the cross-entropy summed over the learned tokens of `rows`, in nats."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
    mask = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows])[:, 1:]
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[mask]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][mask], reduction="sum")
