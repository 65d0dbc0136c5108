"""What the models that ship with environments have in common: a tiny Qwen3, its files, its supervised warm-up.

For the `build_model.py` of an environment, which owns its tokenizer, its chat template and what the warm-up shows.
Invariant: the same seed gives the same files on the same machine and versions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import AddedToken, Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

BATCH = 48
"""Conversations per warm-up step."""
LEARNING_RATE = 3e-3
Row = tuple[list[int], list[bool]]
"""Token ids of a conversation, and which of them are learned to be said."""


def command(build: Callable[..., None], *, directory: Path, steps: int, description: str) -> None:
    """The command line of a `build_model.py`: calls `build(output, seed=…, steps=…)`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help=f"warm-up steps of {BATCH} conversations")
    parser.add_argument("--output", type=Path, default=directory)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    build(arguments.output, seed=arguments.seed, steps=arguments.steps)


def write_chat_template(directory: Path, template: str, *, pad: str, end: str, context: int) -> None:
    """The template, and what the tokenizer is called; `pad` and `end` are tokens, `context` is in tokens."""
    special = {"pad_token": pad, "eos_token": end}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(template)


def write_tokenizer(directory: Path, tokenizer: Tokenizer, *, special: Sequence[str], markup: Sequence[str]) -> None:
    """The tokenizer with its control tokens: `special` ones nobody may write, `markup` that is text."""
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markup])
    tokenizer.save(str(directory / "tokenizer.json"))


def random_model(
    *, vocabulary: int, pad_token: int, stop_token: int, context: int, hidden: int, layers: int
) -> Qwen3ForCausalLM:
    """A Qwen3 of random weights, with four heads of 32 and a feed-forward layer three times as wide as `hidden`."""
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
        initializer_range=0.06,  # for such a width; at 0.02 copying takes four times as long to learn
        bos_token_id=None,
        eos_token_id=stop_token,
        pad_token_id=pad_token,
    )
    return Qwen3ForCausalLM(config)


def warm_up(model: Qwen3ForCausalLM, rows: Iterator[Row], *, steps: int, piece: int = 16) -> None:
    """Supervised steps: AdamW with a one-cycle learning rate.

    Args:
        model: what learns.
        rows: conversations, `BATCH` for each step.
        steps: how many.
        piece: rows per forward pass; those of like length together, so that little is padded.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for _ in track(range(steps), description="warm-up"):
        batch = sorted(islice(rows, BATCH), key=lambda row: len(row[0]))
        total = sum(sum(said) for _, said in batch)
        for start in range(0, BATCH, piece):
            (_said_loss(model, batch[start : start + piece]) / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


def save(model: Qwen3ForCausalLM, directory: Path, *, stop_tokens: int | list[int]) -> None:
    """An ordinary Hugging Face directory; any of `stop_tokens` ends a turn."""
    pad = model.config.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=stop_tokens, pad_token_id=pad, do_sample=True)
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)


def _said_loss(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """Cross-entropy summed over what is learned to be said in `rows`, in nats."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
    said = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows])[:, 1:]
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[said]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][said], reduction="sum")
