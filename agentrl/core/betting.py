"""Tests and intervals for the mean of bounded values that stay valid when they are read after every value.

A gambler bets against the hypothesis "the mean of values in [0, 1] is at most m". With the share f of the wealth at
stake, a value x multiplies the wealth by 1 + f (x/m − 1). Under the hypothesis the expected wealth never grows,
whatever came before, so the wealth ever reaches 1/α with a probability of at most α (Ville's inequality). The test may
therefore be read after every value, and stop whenever its answer suffices.

This is the capital process of Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting"
(Journal of the Royal Statistical Society B 86, 2024, section 4; arXiv:2010.09686), K_t(m) = Π (1 + λ (x_i − m)), with
λ = f/m. The wealth is divided evenly over the shares in `STAKES` ("diversified Kelly" in their appendix), so no stake
is chosen by the data. Two gamblers bet on the two sides, each with an error of its own ("hedged capital process"). The
wealth depends on which values were seen, and not on their order.

The values may depend on each other in any way as long as each has the same mean given those before it, such as the
rewards of tasks that are drawn at random.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

STAKES = (0.05, 0.1, 0.2, 0.4, 0.9)
"""Shares of the wealth at stake. The best share is about (μ − m) m / σ², which is unknown: a small one suits small
effects, a large one decides clear cases within ten values."""
MAX_ERROR = 0.05
"""Probability with which any answer of a run, or of a comparison, may be wrong."""
EACH_SIDE = (0.025, 0.025)
"""Errors of the two sides of a 95 % interval."""
_HALVINGS = 45
"""Halvings of [0, 1] with which the end of an interval is found."""

MAX_REWARD = 1e9
"""Largest bound of rewards, in either direction; far larger ones overflow."""
Verdict = Literal["not better", "undecided", "better"]
VERDICTS: tuple[Verdict, ...] = ("not better", "undecided", "better")


class AnytimeInterval(NamedTuple):
    """An interval that contains the mean at all times at once, with a probability of at least 1 − error."""

    low: float
    high: float


def verdict_words(interval: AnytimeInterval, margin: float = 0.0) -> str:
    """Return what the interval of a difference shows.

    Example:
        >>> verdict_words(AnytimeInterval(0.1, 0.3), 0.05), verdict_words(AnytimeInterval(-0.3, -0.1))
        ('better by more than 0.05', 'worse')
        >>> verdict_words(AnytimeInterval(-0.1, 0.02), 0.05), verdict_words(AnytimeInterval(-0.1, 0.1))
        ('not better by more than 0.05', 'undecided')
    """
    by = f" by more than {margin:g}" if margin else ""
    if interval.low > margin:
        return f"better{by}"
    if interval.high < 0:
        return "worse"
    return f"not better{by}" if interval.high <= margin else "undecided"


def budget_share(spent: float, remaining: int, error: float = MAX_ERROR) -> float:
    """Return the error of the next one of several questions, so that the errors of all add up to at most `error`,
    however many follow: all answers are right together with a probability of 1 − error.

    Args:
        spent: errors of the questions before.
        remaining: number of questions that are planned, with the next one; one share more is kept for others.
        error: the errors together.
    """
    return max(error - spent, 0.0) / (max(remaining, 1) + 1)


def anytime_interval(
    values: Iterable[float] | Mapping[float, int],
    bounds: tuple[float, float] = (0.0, 1.0),
    errors: tuple[float, float] = EACH_SIDE,
) -> AnytimeInterval:
    """Return the means that neither gambler has refuted.

    Args:
        values: the values, in any order, or their counts.
        bounds: smallest and largest value possible.
        errors: probabilities with which the lower end is ever above the mean, and the upper end below it.

    Raises:
        ValueError: a value is outside the bounds.
    """
    low, high = bounds
    counts = _scaled(values, bounds)
    return AnytimeInterval(
        low + (high - low) * _smallest_mean(counts, errors[0]),
        high - (high - low) * _smallest_mean(_mirrored(counts), errors[1]),
    )


def decide(
    differences: Iterable[float] | Mapping[float, int],
    margin: float = 0.0,
    span: float = 1.0,
    errors: tuple[float, float] = EACH_SIDE,
) -> Verdict:
    """Return whether the mean difference is above a margin, as `anytime_interval` shows.

    Args:
        differences: differences of paired values, in any order, or their counts.
        margin: difference that matters.
        span: largest difference possible, in either direction.
        errors: probabilities with which `better` is ever wrong, and `not better`.

    Returns:
        `better` if the interval is above the margin, `not better` if no part of it is above, else `undecided`.

    Raises:
        ValueError: a difference is larger than `span`.
    """
    counts, mean = _scaled(differences, (-span, span)), (margin / span + 1) / 2
    if log_wealth(counts, mean) >= _needed(errors[0]):
        return "better"
    return "not better" if log_wealth(_mirrored(counts), 1 - mean) >= _needed(errors[1]) else "undecided"


def log_wealth(counts: Mapping[float, int], mean: float) -> float:
    """Return the logarithm of a gambler's wealth, who began with 1 and bet that the mean is above `mean`: the logarithm
    of the mean over f in `STAKES` of Π (1 + f (x/mean − 1)).

    Args:
        counts: values in [0, 1] with their counts.
        mean: the hypothesis, in [0, 1].
    """
    if mean <= 0:
        return math.inf if any(counts) else 0.0
    exponents = [
        math.fsum(count * math.log1p(stake * (value / mean - 1)) for value, count in counts.items()) for stake in STAKES
    ]
    largest = max(exponents)
    return largest + math.log(math.fsum(math.exp(each - largest) for each in exponents) / len(STAKES))


def _smallest_mean(counts: Mapping[float, int], error: float) -> float:
    """Return the largest mean below which every hypothesis is refuted: the wealth falls as the hypothesis rises."""
    needed = _needed(error)
    number = sum(counts.values())
    refuted, kept = 0.0, math.fsum(value * count for value, count in counts.items()) / max(number, 1)
    for _ in range(_HALVINGS):
        middle = (refuted + kept) / 2
        if log_wealth(counts, middle) >= needed:
            refuted = middle
        else:
            kept = middle
    return refuted


def _needed(error: float) -> float:
    """Return the logarithm of the wealth that refutes a hypothesis."""
    return -math.log(error) if error > 0 else math.inf


def _scaled(values: Iterable[float] | Mapping[float, int], bounds: tuple[float, float]) -> Counter[float]:
    """Return the counts of the values, mapped from `bounds` to [0, 1]."""
    low, high = bounds
    counts = Counter[float]()
    for value, count in Counter(values).items():
        if not low <= value <= high:
            raise ValueError(f"the value {value:g} is outside the bounds [{low:g}, {high:g}]")
        counts[(value - low) / (high - low)] += count  # rounding may make values equal
    return counts


def _mirrored(counts: Mapping[float, int]) -> Counter[float]:
    mirrored = Counter[float]()
    for value, count in counts.items():
        mirrored[1 - value] += count
    return mirrored
