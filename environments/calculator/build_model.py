"""Builds the tiny model in this directory: tokenizer, random weights, and a supervised warm-up on the format.

`python -m agentrl.environments.calculator.build_model [--seed 0] [--steps 800] [--output DIR]` takes about three
minutes on one core. The result is an ordinary Hugging Face directory (Qwen3 architecture, byte-level BPE, chat template
with tools). The skill itself is left to reinforcement learning (see demonstrations.py).
"""

from __future__ import annotations

from itertools import count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.ids import random_stream
from agentrl.core.records import Message
from agentrl.environments.calculator.demonstrations import demonstrate
from agentrl.environments.calculator.env import Calculator
from agentrl.environments.tiny_model import model as tiny_model
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.rollout.chat.chat_template import ChatTemplate

if TYPE_CHECKING:
    from random import Random

    from agentrl.core.records import Task

VOCABULARY = 640
CONTEXT = 1024


def build(directory: Path, *, seed: int, steps: int) -> None:
    """Write tokenizer, template, configuration and warmed-up weights into `directory`."""
    tasks = Calculator.tasks("train", seed=seed)
    tools = [bound.spec for bound in Calculator.tool_table().values()]
    tiny_model.write_chat_template(directory, tiny_model.TEMPLATE, pad="<|pad|>", end="<|im_end|>", context=CONTEXT)
    demonstrations = (
        tiny_model.Demonstration(conversation(tasks[n], random_stream("corpus", n)), tools) for n in range(2000)
    )
    corpus = tiny_model.format_corpus(ChatTemplate(directory), demonstrations)
    tokenizer = tiny_model.train_tokenizer(corpus, vocabulary=VOCABULARY, pieces=tiny_model.LINES)
    tiny_model.write_tokenizer(directory, tokenizer, special=tiny_model.SPECIAL, markup=tiny_model.MARKUP)
    chat = TemplateChatFormat.load(directory)
    pad, stop = chat.encode("<|pad|>")[0], chat.stop_token_ids[0]
    model = tiny_model.random_model(
        vocabulary=tokenizer.get_vocab_size(), pad_token=pad, stop_token=stop, context=CONTEXT, hidden=128, layers=4
    )
    conversations = (conversation(tasks[n], random_stream("warm-up", seed, n)) for n in count())
    rows = (
        tiny_model.tokenise_demonstration(chat, tiny_model.Demonstration(messages, tools)) for messages in conversations
    )
    tiny_model.train_supervised(model, rows, steps=steps, on_step=tiny_model.progress_printer("warm-up", steps))
    tiny_model.save_model(model, directory, stop_tokens=stop)


def conversation(task: Task, random: Random) -> list[Message]:
    """A task and a demonstration for it as messages."""
    question = task.data["question"]
    demonstration = demonstrate(question, random)
    messages = [Message(role="user", content=question)]
    for text, observation in zip_longest(demonstration.replies, demonstration.observed):
        messages.append(Message(role="assistant", content=text))
        if observation is not None:
            messages.append(Message(role="tool", content=observation))
    return messages


if __name__ == "__main__":
    tiny_model.build_model_command(
        build, directory=Path(__file__).parent / "model", steps=800, description=__doc__ or ""
    )
