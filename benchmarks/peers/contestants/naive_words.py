"""The word problems for the naive loop, and for the sampler that scores all contestants."""

from __future__ import annotations

from pathlib import Path

from agentrl.core.records import Message, Task
from agentrl.environment.environment import TaskSource
from agentrl.environment.registry import resolve
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from benchmarks.naive_loop import Episode, Game, end_turn
from benchmarks.peers.contestants import words

PROBLEMS = resolve(f"{Path(__file__).resolve().parents[3]}/examples/07_smollm2.py:WordProblems")


def tasks(split: str, seed: int) -> TaskSource:
    return PROBLEMS.tasks(split, seed=seed)


def prompt(chat: TemplateChatFormat, task: Task) -> list[int]:
    return chat.start([Message(**message) for message in words.prompt(task.data["question"])], [])


def answer(chat: TemplateChatFormat, episode: Episode, max_turns: int) -> list[int]:
    episode.reward = words.reward(end_turn(chat, episode).content, episode.task.data["answer"])
    return []


WORDS = Game(tasks, prompt, 12, answer)
