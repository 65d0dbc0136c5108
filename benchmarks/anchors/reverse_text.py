"""Write a short text backward, as in `reverse-text` of prime-rl: supervised steps first, then steps by reward."""

from __future__ import annotations

import difflib
import random
import re

import agentrl

WORDS = (
    *("apple", "river", "stone", "cloud", "green", "house", "light", "paper", "water", "table", "music", "bread"),
    *("chair", "dance", "early", "flame", "grass", "heart", "island", "juice", "knife", "lemon", "metal", "night"),
    *("ocean", "plant", "queen", "round", "sugar", "tiger", "uncle", "voice", "wheel", "young", "zebra", "beach"),
)
LENGTH = 3


def similarity(reply: str, right: str) -> float:
    """Return twice the length of the matching blocks over both lengths; 0 for a reply with other signs than words."""
    if not re.fullmatch("[a-z ]+", reply):
        return 0.0
    return difflib.SequenceMatcher(None, reply, right, autojunk=False).ratio()


class ReverseText(agentrl.Environment):
    """The reward is the reply's similarity to the reversed text. With `teach`, the policy imitates right replies."""

    seats = ("writer",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Ask once."""
        writer, text = ctx.agent("writer"), ctx.task.data["text"]
        right = text[::-1]
        question = agentrl.user(f"Reverse the text character by character: {text}")
        if ctx.task.data["is_taught"]:
            await writer.act(question, reply=right)
            writer.reward(1.0)
            return
        turn = await writer.act(question)
        writer.reward(similarity(turn.text.strip(), right))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0, teach: bool = False) -> agentrl.TaskSource:
        """Return 4,096 texts of three words per split. A held-out text is in no training set, and never taught."""
        return [_task(split, seed, index, teach=teach and split == "train") for index in range(4096)]


def _task(split: str, seed: int, index: int, *, teach: bool) -> agentrl.Task:
    drawn = random.Random(f"{split} {seed if split == 'train' else 0} {index}")
    while True:
        words = drawn.sample(WORDS, LENGTH)
        if (sum(map(WORDS.index, words)) % 8 == 0) == (split == "held_out"):
            return agentrl.Task(id=f"{split}-{index}", data={"text": " ".join(words), "is_taught": teach})
