"""A group in which long answers are better and five times slower, gone through exactly: all that can happen, with its
probability. One parameter decides how many answers are long; its gradient under a release rule is compared with the
true one.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from agentrl.credit.group_baselines import leave_one_out
from agentrl.credit.release import baseline_members, shrunk_advantage

LONG, SHORT = 1, 0
SPEED = {LONG: 1.0, SHORT: 5.0}
"""Rates of exponential durations."""
APART = {LONG: 1.0, SHORT: 1e6}
"""The same where every short one ends before every long one."""
REWARD = {LONG: 0.9, SHORT: 0.6}
"""Chance of reward 1."""
REWARDS = {
    "long 0.9, short 0.6": REWARD,
    "long 0.6, short 0.9": {LONG: 0.6, SHORT: 0.9},
    "the length (1, 0)": {LONG: 1.0, SHORT: 0.0},
    "the brevity (0, 1)": {LONG: 0.0, SHORT: 1.0},
}
"""What is better, by how much."""

Rule = Callable[[Sequence[float]], list[float]]
"""From the rewards of a group in the order of finishing to the advantages, in that order."""


def finishing_orders(
    size: int, share_long: float, slots: int | None = None, speed: Mapping[int, float] = SPEED
) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of answers in the order in which they finish.

    `slots`: how many of the group run at once, where they have slots of their own; None: all, whoever else runs.
    """
    states: dict[tuple[tuple[int, ...], int, int], float] = {}
    running = min(slots or size, size)
    for longs in range(running + 1):
        chance = math.comb(running, longs) * share_long**longs * (1 - share_long) ** (running - longs)
        states[(), longs, running - longs] = chance
    for ended in range(size):
        after: dict[tuple[tuple[int, ...], int, int], float] = defaultdict(float)
        for (order, longs, shorts), probability in states.items():
            racing = longs * speed[LONG] + shorts * speed[SHORT]
            for answer, count in ((LONG, longs), (SHORT, shorts)):
                chance = probability * count * speed[answer] / racing
                left = (longs - (answer == LONG), shorts - (answer == SHORT))
                if not count:
                    continue
                if ended + running >= size:
                    after[(*order, answer), *left] += chance
                else:
                    after[(*order, answer), left[0] + 1, left[1]] += chance * share_long
                    after[(*order, answer), left[0], left[1] + 1] += chance * (1 - share_long)
        states = after
    return {order: probability for (order, _, _), probability in states.items()}


def true_gradient(size: int, share_long: float, reward: Mapping[int, float] = REWARD) -> float:
    """Of the mean reward, summed over a group."""
    return size * share_long * (1 - share_long) * (reward[LONG] - reward[SHORT])


def gradient(answers: Sequence[int], advantages: Sequence[float], share_long: float) -> float:
    """Σ score · advantage of a group."""
    return sum((answer - share_long) * value for answer, value in zip(answers, advantages, strict=True))


def gradient_ratio(
    rule: Rule,
    size: int = 8,
    share_long: float = 0.5,
    *,
    slots: int | None = None,
    reward: Mapping[int, float] = REWARD,
    speed: Mapping[int, float] = SPEED,
) -> float:
    """E[Σ score · advantage] over the true gradient; advantages are linear in rewards, so their means are enough."""
    expected = sum(
        probability * gradient(answers, rule([reward[answer] for answer in answers]), share_long)
        for answers, probability in finishing_orders(size, share_long, slots, speed).items()
    )
    return expected / true_gradient(size, share_long, reward)


def gradient_variance(
    rules: Sequence[Rule],
    size: int = 8,
    share_long: float = 0.5,
    *,
    reward: Mapping[int, float] = REWARD,
    speed: Mapping[int, float] = SPEED,
) -> float:
    """Var[Σ score · advantage], where each of `rules` is followed as often as the others.

    A group's gradient is linear in its rewards, which are 0 or 1 with chances that the answers give: its mean and
    variance follow from the coefficients.
    """
    first = second = 0.0
    for answers, probability in finishing_orders(size, share_long, speed=speed).items():
        chances = [reward[answer] for answer in answers]
        for rule in rules:
            none = gradient(answers, rule([0.0] * size), share_long)
            units = ([float(at == one) for at in range(size)] for one in range(size))
            weights = [gradient(answers, rule(unit), share_long) - none for unit in units]
            mean = none + sum(weight * chance for weight, chance in zip(weights, chances, strict=True))
            spread = sum(w**2 * chance * (1 - chance) for w, chance in zip(weights, chances, strict=True))
            first += probability * mean / len(rules)
            second += probability * (mean**2 + spread) / len(rules)
    return second - first**2


# --- rules ------------------------------------------------------------------------------------------------------------


def late(early: int, earlier: float | None = None) -> Rule:
    """Late credit as it is: `early` members are waited for, and V is `earlier`."""

    def advantages(rewards: Sequence[float]) -> list[float]:
        members = range(len(rewards))
        sets = [baseline_members(members[:early], member) for member in members]
        return [
            shrunk_advantage(r, [rewards[i] for i in others], earlier).value
            for r, others in zip(rewards, sets, strict=True)
        ]

    return advantages


def late_with_history(
    early: int, groups: int = 6, size: int = 8, share_long: float = 0.5, reward: Mapping[int, float] = REWARD
) -> list[Rule]:
    """Late credit where V is the mean of some earlier groups: two values with its mean and variance, equally likely,
    which is exact, since first and second moments of a gradient are all that is asked for.
    """
    mean = share_long * reward[LONG] + (1 - share_long) * reward[SHORT]
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
