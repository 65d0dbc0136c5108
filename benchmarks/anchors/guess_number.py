"""Guess a number in ten guesses, as in the `guess_number` recipe of tinker-cookbook, where it is at most 1024."""

from __future__ import annotations

import random
import re

import agentrl

GUESSES = 10
PENALTY = 1.0
SYSTEM = (
    "Your job is to guess a integer between 0 and {upper_bound}. You can output your guess with the format Guess: "
    "<guess> (without the angle brackets), and say nothing else. Then we will tell you whether you guess is too high, "
    "too low, or correct."
)
UNREADABLE = (
    "Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), and say nothing else."
)


class GuessNumber(agentrl.Environment):
    """The reward is 1 for the right number; each reply that is no guess costs 1."""

    seats = ("player",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Answer each guess with too low, too high or correct."""
        player, number = ctx.agent("player"), ctx.task.data["number"]
        news = [agentrl.system(SYSTEM.format(upper_bound=ctx.task.data["upper_bound"]))]
        for _ in range(GUESSES):
            turn = await player.act(*news)
            guess = re.match(r"Guess: (-?\d{1,9})$", turn.text.strip())
            if guess is None:
                player.reward(-PENALTY)
                news = [agentrl.user(UNREADABLE)]
            elif int(guess[1]) == number:
                player.reward(1.0)
                return
            else:
                news = [agentrl.user("Too low" if int(guess[1]) < number else "Too high")]
        player.reward(0.0)  # without any reward, a game of valid guesses would be dropped

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0, upper_bound: int = 1024) -> agentrl.TaskSource:
        """Return numbers below the bound: one in ten is held out, at least 48, and the seed orders the others."""
        numbers = random.Random(0).sample(range(upper_bound), upper_bound)
        count = max(upper_bound // 10, 48)
        held_out, training = numbers[:count], numbers[count:]
        random.Random(seed).shuffle(training)
        return [
            agentrl.Task(id=str(number), data={"number": number, "upper_bound": upper_bound})
            for number in (training if split == "train" else held_out)
        ]
