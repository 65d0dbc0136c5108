"""The environment: one hand of Kuhn poker, and the exploitability of a strategy."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import permutations, product
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import agentrl
from agentrl.core.ids import random_stream
from agentrl.environment.tasks import DrawnTasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agentrl.environment.environment import Split, TaskSource

CARDS = "JQK"
"""The deck, from the lowest card to the highest."""
DEALS = tuple(map("".join, permutations(CARDS, 2)))
"""Cards of the first and the second seat."""
MOVES = ("p", "b")
"""Pass or fold, and bet or call."""
CHIPS = {"pp": 1, "pbp": -1, "pbb": 2, "bp": 1, "bb": 2}
"""Chips by the moves of a finished hand: of the higher card if the last two moves are equal, else of the first seat."""
QUESTIONS = tuple("".join(each) for history in ("", "pb", "p", "b") for each in product(CARDS, [history]))
"""The information sets: a card and the moves so far. The first six are the first seat's."""
ILLEGAL_REWARD = -3.0
"""Reward of a bot's reply that is no move: less than any loss. The other seat gets 0."""


class KuhnPoker(agentrl.Environment):
    """Both seats pay a chip and get one of three cards. They pass (`p`) or bet a second chip (`b`); after a bet, `p`
    folds and `b` calls. The reward is the chips won."""

    seats: ClassVar[tuple[str, ...]] = ("first", "second")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Play the hand."""
        players, moves = [ctx.agent(seat) for seat in self.seats], ""
        while moves not in CHIPS:
            seat = len(moves) % 2
            turn = await players[seat].act(agentrl.user(ctx.task.data["deal"][seat] + moves), choices=MOVES)
            if turn.text not in MOVES:
                players[seat].reward(ILLEGAL_REWARD)
                players[1 - seat].reward(0.0)
                return
            moves += turn.text
        chips = float(chips_of_first(ctx.task.data["deal"], moves))
        players[0].reward(chips)
        players[1].reward(-chips)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """Return deals: random ones to train on, each once to evaluate on."""
        if split == "held_out":
            return [agentrl.Task(id=deal, data={"deal": deal}) for deal in DEALS]

        def draw(index: int, attempt: int) -> agentrl.Task:
            return agentrl.Task(id=f"{index}", data={"deal": random_stream("kuhn", seed, index).choice(DEALS)})

        return DrawnTasks(draw)


def chips_of_first(deal: str, moves: str) -> int:
    """Return the chips that the first seat wins in a finished hand."""
    is_shown = moves[-1] == moves[-2]
    return -CHIPS[moves] if is_shown and CARDS.index(deal[0]) < CARDS.index(deal[1]) else CHIPS[moves]


def exploitability(bets: Mapping[str, float]) -> float:
    """Return how many chips a hand best responses win on average against the two seats: 0 only for a Nash equilibrium.

    It is NashConv / 2 of [Lanctot et al. 2017](https://arxiv.org/abs/1711.00832), by enumeration of all replies.

    Args:
        bets: probability of `b`, for each of `QUESTIONS`.
    """

    def value(plan: Mapping[str, float], deal: str, moves: str) -> float:
        if moves in CHIPS:
            return chips_of_first(deal, moves)
        bet = plan[deal[len(moves) % 2] + moves]
        return bet * value(plan, deal, f"{moves}b") + (1 - bet) * value(plan, deal, f"{moves}p")

    def chips(changed: Mapping[str, float]) -> float:
        return fmean(value({**bets, **changed}, deal, "") for deal in DEALS)

    def plans(questions: Sequence[str]) -> Iterator[Mapping[str, float]]:
        return (dict(zip(questions, plan, strict=True)) for plan in product((0.0, 1.0), repeat=6))

    return (max(map(chips, plans(QUESTIONS[:6]))) - min(map(chips, plans(QUESTIONS[6:])))) / 2


def read_strategy(run: agentrl.RecordedRun, step: int) -> dict[str, float]:
    """Return the probability with which the versions of a step bet, by question, from the log-probabilities of replies.

    Questions that the training games of these versions did not reach are missing.
    """
    bets: defaultdict[str, list[float]] = defaultdict(list)
    question = ""
    for token in run.tokens(f"purpose = train and oldest_step = {step}"):
        if token.loss_mask and token.logprob is not None and (token.version or "").endswith(f".{step}"):
            probability = math.exp(token.logprob)
            bets[question].append(probability if token.text == "b" else 1 - probability)
        question = "" if token.text == "<|user|>" else question + token.text.removeprefix("<|move|>")
    return {each: fmean(bets[each]) for each in QUESTIONS if bets[each]}
