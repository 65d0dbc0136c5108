"""Builds the tiny model in this directory: tokenizer, random weights, and a warm-up on random legal moves.

`python -m agentrl.environments.tictactoe.build_model [--seed 0] [--steps 350] [--output DIR]` takes half a minute on
one core. The result is an ordinary Hugging Face directory (Qwen3 architecture, with a token per byte, per move, and per
possible line of the board). The warm-up shows random starting boards of training games, each with a random free cell.
It teaches the format and the legal moves, but not which move is good.
"""

from __future__ import annotations

from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING

import agentrl
from agentrl.core.ids import random_stream
from agentrl.environments.frozen_lake.build_model import TEMPLATE, byte_tokenizer
from agentrl.environments.tictactoe.env import FREE_MARKS, LINES, OPPONENT_MARKS, OWN_MARKS, TicTacToe, random_player
from agentrl.environments.tiny_model import model as tiny_model
from agentrl.rollout.chat.chat_format import TemplateChatFormat

if TYPE_CHECKING:
    from random import Random

    from agentrl.core.records import Task

CONTEXT = 64
SPECIAL = ("<|pad|>", "<|user|>", "<|move|>", "<|end|>")
WORDS = tuple(
    "".join(letters)
    for line in LINES
    for letters in product(*((FREE_MARKS[cell], OWN_MARKS[cell], OPPONENT_MARKS[cell]) for cell in line))
)
"""All possible lines of the board."""
MOVES = tuple(f"[{cell}]" for cell in FREE_MARKS)


def build(directory: Path, *, seed: int, steps: int) -> None:
    """Write tokenizer, template, configuration and warmed-up weights into `directory`."""
    tokenizer = byte_tokenizer()
    tiny_model.write_chat_template(directory, TEMPLATE, pad="<|pad|>", end="<|end|>", context=CONTEXT)
    tiny_model.write_tokenizer(directory, tokenizer, special=SPECIAL, markup=(*MOVES, *WORDS))
    chat = TemplateChatFormat.load(directory)
    pad, _, _, end = chat.encode("".join(SPECIAL))
    model = tiny_model.random_model(
        vocabulary=tokenizer.get_vocab_size(), pad_token=pad, stop_token=end, context=CONTEXT, hidden=64, layers=1
    )
    tasks = TicTacToe.tasks("train", seed=seed)
    rows = (shown_row(chat, tasks[number], random_stream("warm-up", seed, number)) for number in count())
    tiny_model.train_supervised(model, rows, steps=steps, piece=tiny_model.BATCH)
    tiny_model.save_model(model, directory, stop_tokens=[end, *(chat.encode(move)[0] for move in MOVES)])


def shown_row(chat: TemplateChatFormat, task: Task, random: Random) -> tiny_model.Row:
    """Return a starting board of a training game, and a legal move."""
    message = agentrl.user(TicTacToe().game(task).reset()["observation"])
    ids = chat.start([message], [])
    move = chat.encode(random_player([message], random))
    return ids + move, [False] * len(ids) + [True] * len(move)


if __name__ == "__main__":
    tiny_model.build_model_command(
        build, directory=Path(__file__).parent / "model", steps=350, description=__doc__ or ""
    )
