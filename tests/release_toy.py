"""A group in which long answers are better and five times slower, gone through exactly: all that can happen, with its
probability. One parameter decides how many answers are long; its gradient under a release rule is compared with the
true one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from agentrl.credit.advantages import leave_one_out
from agentrl.credit.release import against, compared_with

LONG, SHORT = 1, 0
SPEED = {LONG: 1.0, SHORT: 5.0}
"""Rates of exponential durations."""
REWARD = {LONG: 0.9, SHORT: 0.6}
"""Chance of reward 1."""

Rule = Callable[[Sequence[float]], list[float]]
"""From the rewards of a group in the order of finishing to the advantages, in that order."""


def finishing_orders(size: int, share_long: float) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence of answers in the order in which they finish, with its probability."""
    for answers in itertools.product((SHORT, LONG), repeat=size):
        longs = sum(answers)
        probability = math.comb(size, longs) * share_long**longs * (1 - share_long) ** (size - longs)
        left = {LONG: longs, SHORT: size - longs}
        for answer in answers:
            racing = sum(left[kind] * SPEED[kind] for kind in left)
            probability *= left[answer] * SPEED[answer] / racing
            left[answer] -= 1
        yield answers, probability


def true_gradient(size: int, share_long: float) -> float:
    """Of the mean reward, summed over a group."""
    return size * share_long * (1 - share_long) * (REWARD[LONG] - REWARD[SHORT])


def gradient(answers: Sequence[int], advantages: Sequence[float], share_long: float) -> float:
    """Σ score · advantage of a group."""
    return sum((answer - share_long) * value for answer, value in zip(answers, advantages, strict=True))


def gradient_ratio(rule: Rule, size: int = 8, share_long: float = 0.5) -> float:
    """E[Σ score · advantage] over the true gradient; advantages are linear in rewards, so their means are enough."""
    expected = sum(
        probability * gradient(answers, rule([REWARD[answer] for answer in answers]), share_long)
        for answers, probability in finishing_orders(size, share_long)
    )
    return expected / true_gradient(size, share_long)


def gradient_variance(rules: Sequence[Rule], size: int = 8, share_long: float = 0.5) -> float:
    """Var[Σ score · advantage], where each of `rules` is followed as often as the others."""
    squares = 0.0
    for answers, probability in finishing_orders(size, share_long):
        for rewards in itertools.product((0.0, 1.0), repeat=size):
            chance = math.prod(
                REWARD[answer] if reward else 1 - REWARD[answer]
                for answer, reward in zip(answers, rewards, strict=True)
            )
            for rule in rules:
                squares += probability * chance * gradient(answers, rule(rewards), share_long) ** 2 / len(rules)
    mean = sum(gradient_ratio(rule, size, share_long) for rule in rules) / len(rules)
    return squares - (mean * true_gradient(size, share_long)) ** 2


# --- rules ------------------------------------------------------------------------------------------------------------


def late(early: int, earlier: float | None = None) -> Rule:
    """Late credit as it is: `early` members are waited for, and V is `earlier`."""

    def advantages(rewards: Sequence[float]) -> list[float]:
        members = range(len(rewards))
        sets = [compared_with(members[:early], member) for member in members]
        return [
            against(r, [rewards[i] for i in others], earlier).value for r, others in zip(rewards, sets, strict=True)
        ]

    return advantages


def late_with_history(early: int, groups: int = 6, size: int = 8, share_long: float = 0.5) -> list[Rule]:
    """Late credit where V is the mean of some earlier groups: two values with its mean and variance, equally likely,
    which is exact, since first and second moments of a gradient are all that is asked for.
    """
    mean = share_long * REWARD[LONG] + (1 - share_long) * REWARD[SHORT]
    deviation = math.sqrt(mean * (1 - mean) / (groups * size))
    return [late(early, mean - deviation), late(early, mean + deviation)]


def complete(rewards: Sequence[float]) -> list[float]:
    """All are waited for: leave one out."""
    return [advantage.value for advantage in leave_one_out(rewards)]


def all_that_were_there(early: int) -> Rule:
    """As `late`, but a late member is compared with all `early` that had finished: biased."""

    def advantages(rewards: Sequence[float]) -> list[float]:
        first = rewards[:early]
        return [*complete(first), *(reward - sum(first) / early for reward in rewards[early:])]

    return advantages


def dropping_the_late(early: int) -> Rule:
    """The members after the first `early` are thrown away: biased."""
    return lambda rewards: [*complete(rewards[:early]), *[0.0] * (len(rewards) - early)]


def deadline_ratios(deadline: float = 0.8, size: int = 8, share_long: float = 0.5) -> tuple[float, float]:
    """The gradient over the true one where members that take longer than a deadline, in mean lengths of long answers,
    are dropped, and where they are rewarded with 0.
    """
    in_time = {kind: 1 - math.exp(-SPEED[kind] * deadline) for kind in SPEED}
    drop = zero = 0.0
    kinds = [(answer, on_time) for answer in (SHORT, LONG) for on_time in (True, False)]
    for group in itertools.product(kinds, repeat=size):
        chance = math.prod(
            (share_long if answer else 1 - share_long) * (in_time[answer] if on_time else 1 - in_time[answer])
            for answer, on_time in group
        )
        kept = [answer for answer, on_time in group if on_time]
        drop += chance * gradient(kept, complete([REWARD[answer] for answer in kept]), share_long)
        rewards = [REWARD[answer] * on_time for answer, on_time in group]
        zero += chance * gradient([answer for answer, _ in group], complete(rewards), share_long)
    true = true_gradient(size, share_long)
    return drop / true, zero / true
