"""The environment: a speaker names a state by a word, a listener names the state by the word."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import agentrl
from agentrl.core.ids import random_stream
from agentrl.environment.tasks import DrawnTasks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentrl.environment.environment import Split, TaskSource

STATES, WORDS = "01234567", "abcdefghijklmnop"
"""Twice as many words as states. With equally many, learners easily end in a code in which two states share a word, and
no step of one player alone is better ([Huttegger 2007](https://doi.org/10.1086/519477))."""


class Signalling(agentrl.Environment):
    """The speaker sees a state, a digit, and says a word, a letter. The listener hears the word and names the state.
    Both get 1 if it is right. No word means anything at first."""

    seats: ClassVar[tuple[str, ...]] = ("speaker", "listener")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Play one round. A bot's reply that is no word, or no state, is wrong."""
        speaker, listener = ctx.agent("speaker"), ctx.agent("listener")
        state = ctx.task.data["state"]
        word = (await speaker.act(agentrl.user(state), choices=WORDS)).text
        named = (await listener.act(agentrl.user(word), choices=STATES)).text if word in {*WORDS} else ""
        for agent in (speaker, listener):
            agent.reward(float(named == state))

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """Return rounds: random states to train on, each 16 times to evaluate on."""
        if split == "held_out":
            return [agentrl.Task(id=f"{state}.{n}", data={"state": state}) for state in STATES for n in range(16)]

        def draw(index: int, attempt: int) -> agentrl.Task:
            return agentrl.Task(id=f"{index}", data={"state": random_stream("state", seed, index).choice(STATES)})

        return DrawnTasks(draw)


def read_code(run: agentrl.RecordedRun, step: int) -> dict[tuple[str, str], float]:
    """Return the probability of each word in each state, as the speaker's version of a step sampled it.

    Words that it was not heard to say in a state share the rest of the probability.
    """
    code: dict[tuple[str, str], float] = {}
    state = ""
    for token in run.tokens(f"purpose = train and oldest_step = {step}"):
        if token.seat == "speaker" and token.logprob is not None and token.text in {*WORDS}:
            code[state, token.text] = math.exp(token.logprob)
        state = token.text if token.text in {*STATES} else state
    for state in STATES:
        heard = [code[state, word] for word in WORDS if (state, word) in code]
        rest = (1 - min(sum(heard), 1.0)) / max(len(WORDS) - len(heard), 1)
        code |= {(state, word): rest for word in WORDS if (state, word) not in code}
    return code


def mutual_information(code: Mapping[tuple[str, str], float]) -> float:
    """Return how much a word says about the state, in bits, if all states are equally likely: 3 for a perfect code."""
    share = {word: fmean(code[state, word] for state in STATES) for word in WORDS}
    return math.fsum(p * math.log2(p / share[word]) for (_, word), p in code.items() if p) / len(STATES)
