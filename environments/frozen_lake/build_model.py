"""Builds the tiny model in this directory: tokenizer, random weights, and a warm-up on games of random moves.

`python -m agentrl.environments.frozen_lake.build_model [--seed 0] [--steps 150] [--output DIR]` takes about a minute on
one core. The result is an ordinary Hugging Face directory (Qwen3 architecture, a token per byte). The warm-up's games
use random moves and train on observations too. They teach the format and the effect of a move, but not which move is
good.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentrl.core.ids import random_stream
from agentrl.core.records import Message
from agentrl.environment.gym import SeededGame
from agentrl.environments.frozen_lake.env import MOVES, FrozenLake
from agentrl.environments.tiny_model import model as tiny_model
from agentrl.rollout.chat.chat_format import TemplateChatFormat

if TYPE_CHECKING:
    from random import Random

    from agentrl.core.records import Task

CONTEXT = 256
SPECIAL = ("<|pad|>", "<|user|>", "<|move|>", "<|end|>")

TEMPLATE = """\
{%- for message in messages -%}
    {{- ('<|move|>' if message.role == 'assistant' else '<|user|>') + message.content -}}
    {%- if message.role == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|move|>' -}}{%- endif -%}
"""


def build(directory: Path, *, seed: int, steps: int) -> None:
    """Write tokenizer, template, configuration and warmed-up weights into `directory`."""
    tokenizer = byte_tokenizer()
    tiny_model.write_chat_template(directory, TEMPLATE, pad="<|pad|>", end="<|end|>", context=CONTEXT)
    tiny_model.write_tokenizer(directory, tokenizer, special=SPECIAL, markup=())
    chat = TemplateChatFormat.load(directory)
    pad, _, _, end = chat.encode("".join(SPECIAL))
    model = tiny_model.random_model(
        vocabulary=tokenizer.get_vocab_size(), pad_token=pad, stop_token=end, context=CONTEXT, hidden=96, layers=3
    )
    tasks = FrozenLake.tasks("train", seed=seed)
    rows = (game_row(chat, tasks[n], random_stream("warm-up", seed, n)) for n in count())
    tiny_model.train_supervised(model, rows, steps=steps, on_step=tiny_model.progress_printer("warm-up", steps))
    tiny_model.save_model(model, directory, stop_tokens=[end, *(chat.encode(move)[0] for move in MOVES)])


def byte_tokenizer() -> Tokenizer:
    """Write a tokenizer without merges: lossless on any text, with one token per letter of a map and per move."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def game_row(chat: TemplateChatFormat, task: Task, random: Random) -> tiny_model.Row:
    """Return a game of random moves in the tokens of reinforcement learning; all but the first message is trained."""
    game = SeededGame(FrozenLake(), task)
    ids = chat.start([Message(role="user", content=game.reset())], [])
    prompt_length = len(ids)
    for _ in range(FrozenLake.max_turns):
        move = random.choice(MOVES)
        step = game.step(move)
        ids += chat.encode(move)
        if step["terminated"]:
            break
        ids += chat.extend([Message(role="user", content=step["observation"])], after="stop")
    return ids, [False] * prompt_length + [True] * (len(ids) - prompt_length)


if __name__ == "__main__":
    tiny_model.build_model_command(
        build, directory=Path(__file__).parent / "model", steps=150, description=__doc__ or ""
    )
