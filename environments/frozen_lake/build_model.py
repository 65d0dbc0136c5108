"""Builds the tiny model beside this file: tokenizer, random weights, and a warm-up on games of random moves.

`python -m environments.frozen_lake.build_model [--seed 0] [--steps 150] [--output DIR]` takes about a minute on one
core. The same seed gives the same files on the same machine and versions. The result is an ordinary Hugging Face
directory (Qwen3 architecture, a token per byte). The warm-up's games are played by chance: they teach how a game is
written down and what a move does, the observations being predicted too, and nothing about which move is good.
"""

from __future__ import annotations

import argparse
import json
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from agentrl.core.records import Message
from agentrl.core.rng import stream
from agentrl.environment.gym import SeededGame
from agentrl.rollout.chat_format import TemplateFormat
from environments.frozen_lake.env import MOVES, FrozenLake
from environments.frozen_lake.tasks import HeldOutTasks, TrainingTasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from agentrl.core.records import Task

DIRECTORY = Path(__file__).parent / "model"
CONTEXT = 256
BATCH = 48
"""Games per step."""
LEARNING_RATE = 3e-3
SPECIAL = ("<|pad|>", "<|user|>", "<|move|>", "<|end|>")
Row = tuple[list[int], int]
"""Token ids of a game, and how many of them are its first message."""

TEMPLATE = """\
{%- for message in messages -%}
    {{- ('<|move|>' if message.role == 'assistant' else '<|user|>') + message.content -}}
    {%- if message.role == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|move|>' -}}{%- endif -%}
"""


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150, help="warm-up steps of 48 games")
    parser.add_argument("--output", type=Path, default=DIRECTORY)
    arguments = parser.parse_args()
    build(arguments.output, seed=arguments.seed, steps=arguments.steps)


def build(directory: Path, *, seed: int = 0, steps: int = 150) -> None:
    """Write tokenizer, template, configuration and warmed-up weights into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    write_tokenizer(directory)
    chat = TemplateFormat.load(directory)
    model = Qwen3ForCausalLM(model_config(chat.encode("".join(SPECIAL))))
    tasks = TrainingTasks(seed, HeldOutTasks(512))
    warm_up(model, (game_row(chat, tasks[n], stream("warm-up", seed, n)) for n in count()), steps=steps)
    stop = [model.config.eos_token_id, *(chat.encode(move)[0] for move in MOVES)]  # a move ends the turn
    pad = model.config.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad, do_sample=True)
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)


def write_tokenizer(directory: Path) -> None:
    """Bytes and nothing merged: lossless on any text, a token per letter of a map, a token per move."""
    special = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))


def model_config(special: Sequence[int]) -> Qwen3Config:
    """0.37 million parameters of the Qwen3 architecture; `special` are the ids of `SPECIAL`."""
    return Qwen3Config(
        vocab_size=256 + len(special),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=288,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.06,  # for this width; at 0.02 copying takes far longer to learn
        bos_token_id=None,
        eos_token_id=special[3],
        pad_token_id=special[0],
    )


def game_row(chat: TemplateFormat, task: Task, random: Random) -> Row:
    """A game of random moves in the tokens that reinforcement learning will see."""
    game = SeededGame(FrozenLake(), task)
    ids = chat.start([Message(role="user", content=game.reset())], [])
    opening = len(ids)
    for _ in range(FrozenLake.max_turns):
        move = random.choice(MOVES)
        step = game.step(move)
        ids += chat.encode(move)
        if step["terminated"]:
            break
        ids += chat.extend([Message(role="user", content=step["observation"])], after="stop")
    return ids, opening


def warm_up(model: Qwen3ForCausalLM, rows: Iterator[Row], *, steps: int) -> None:
    """Supervised steps on all that follows the first message: AdamW with a one-cycle learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for _ in track(range(steps), description="warm-up"):
        loss = loss_of(model, list(islice(rows, BATCH)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


def loss_of(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """Mean cross-entropy of the tokens after each row's first message, in nats."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
    place = torch.arange(1, width)
    counted = torch.stack([(place >= opening) & (place < len(row)) for row, opening in rows])
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[counted]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][counted])


if __name__ == "__main__":
    main()
