"""Builds the tiny model in this directory: tokenizer, random weights, and a warm-up that ends in random moves.

`python -m agentrl.environments.kuhn_poker.build_model [--seed 0] [--steps 1600] [--output DIR]` takes half a minute on
one core. The result is an ordinary Hugging Face directory (Qwen3 architecture, with a token per byte).
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import agentrl
from agentrl.core.ids import random_stream
from agentrl.environments.frozen_lake.build_model import SPECIAL, TEMPLATE, byte_tokenizer
from agentrl.environments.kuhn_poker.env import MOVES, QUESTIONS
from agentrl.environments.tiny_model import model as tiny_model
from agentrl.rollout.chat.chat_format import TemplateChatFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CONTEXT = 32
STRATEGIES = 8
"""Number of random strategies that the model is taught one after the other. Without them its answers to all questions
would move together, since it would never have had to tell the questions apart."""


def build_undecided(directory: Path, answers: Mapping[str, Sequence[str]], *, seed: int, steps: int) -> None:
    """Write a model that answers each question with any of its answers, equally likely.

    Args:
        directory: an existing directory.
        answers: possible answers by question, a token each.
        seed: seed of the strategies.
        steps: number of supervised steps: those of the strategies, and a quarter of undecided answers.
    """
    tiny_model.write_chat_template(directory, TEMPLATE, pad="<|pad|>", end="<|end|>", context=CONTEXT)
    tokenizer = byte_tokenizer()
    tiny_model.write_tokenizer(directory, tokenizer, special=SPECIAL, markup=())
    chat = TemplateChatFormat.load(directory)
    pad, _, _, end = chat.encode("".join(SPECIAL))
    model = tiny_model.random_model(
        vocabulary=tokenizer.get_vocab_size(), pad_token=pad, stop_token=end, context=CONTEXT, hidden=64, layers=2
    )
    rows = _rows(chat, answers, seed, steps)
    tiny_model.train_supervised(
        model, rows, steps=steps, on_step=tiny_model.progress_printer("warm-up", steps), piece=tiny_model.BATCH
    )
    ends = {token for of_question in answers.values() for answer in of_question for token in chat.encode(answer)}
    tiny_model.save_model(model, directory, stop_tokens=[end, *sorted(ends)])


def _rows(
    chat: TemplateChatFormat, answers: Mapping[str, Sequence[str]], seed: int, steps: int
) -> Iterator[tiny_model.Row]:
    taught = steps * 3 // 4 * tiny_model.BATCH
    prompts = {question: chat.start([agentrl.user(question)], []) for question in answers}
    for number in count():
        random = random_stream("warm-up", seed, number)
        question = random.choice(list(answers))
        replies = answers[question]
        if number < taught:  # of one strategy, seven of eight answers to a question are equal
            strategy = number * STRATEGIES // taught
            usual = random_stream("strategy", seed, strategy, question).choice(replies)
            replies = [*replies, *([usual] * 7 * len(replies))]
        reply = chat.encode(random.choice(replies))
        yield prompts[question] + reply, [False] * len(prompts[question]) + [True] * len(reply)


def build(directory: Path, *, seed: int, steps: int) -> None:
    """Write tokenizer, template, configuration and warmed-up weights into `directory`."""
    build_undecided(directory, dict.fromkeys(QUESTIONS, MOVES), seed=seed, steps=steps)


if __name__ == "__main__":
    tiny_model.build_model_command(
        build, directory=Path(__file__).parent / "model", steps=1600, description=__doc__ or ""
    )
