"""Guess a number between 0 and 1024 in ten guesses, as in the `guess_number` recipe of tinker-cookbook."""

from __future__ import annotations

import random
import re

import agentrl

UPPER_BOUND = 1024
GUESSES = 10
PENALTY = 1.0
SYSTEM = (
    f"Your job is to guess a integer between 0 and {UPPER_BOUND}. You can output your guess with the format Guess: "
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
        news = [agentrl.Message(role="system", content=SYSTEM)]
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

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Return numbers: one in ten is held out, and the seed orders the others."""
        numbers = random.Random(0).sample(range(UPPER_BOUND), UPPER_BOUND)
        held_out, training = numbers[: UPPER_BOUND // 10], numbers[UPPER_BOUND // 10 :]
        random.Random(seed).shuffle(training)
        return [
            agentrl.Task(id=str(number), data={"number": number})
            for number in (training if split == "train" else held_out)
        ]
