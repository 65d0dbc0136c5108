"""Intervals of means, and of the mean difference of paired rewards.

A gambler bets against the hypothesis "the mean of values in [0, 1] is at most m". With the share f of the wealth at
stake, a value x multiplies the wealth by 1 + f (x/m − 1). Under the hypothesis the expected wealth never grows, so it
reaches 1/α with a probability of at most α (Ville's inequality). The interval contains the means that no gambler has
refuted: valid for any distribution within the bounds, for few values, and when it is read again after more of them.

This is the capital process of Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting"
(Journal of the Royal Statistical Society B 86, 2024, section 4; arXiv:2010.09686), K_t(m) = Π (1 + λ (x_i − m)), with
λ = f/m. The wealth is divided evenly over the shares in `STAKES` ("diversified Kelly" in their appendix), so no stake
is chosen by the data. Two gamblers bet on the two sides, each with half of the error ("hedged capital process").
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""97.5 % quantiles of Student's t distribution with 1, 2, … degrees of freedom."""
STAKES = (0.05, 0.1, 0.2, 0.4, 0.9)
"""Shares of the wealth at stake. The best share is about (μ − m) m / σ², which is unknown: a small one suits small
effects, a large one decides clear cases within ten values."""
MAX_REWARD = 1e9
"""Largest reward that can be compared, in either direction; far larger ones overflow."""


class Interval(NamedTuple):
    """An interval of a mean."""

    low: float
    high: float


def confidence_half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean of independent values: 1.96 s / √n, s by n - 1; 0 for one
    value."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def half_width_of_few(values: Sequence[float]) -> float:
    """Do the same for few values of a normal distribution, such as the means of runs with different seeds: with
    Student's t in place of 1.96. For more than 20 values it is a little too wide."""
    if len(values) < 2:
        return 0.0
    return STUDENT[min(len(values) - 2, len(STUDENT) - 1)] * statistics.stdev(values) / math.sqrt(len(values))


def difference_interval(pairs: Sequence[tuple[float, float]], error: float = 0.05) -> Interval:
    """Return the interval of the mean difference of paired rewards: the first minus the second of each pair.

    Rewards are assumed to be between 0 and 1, or between the smallest and the largest of the pairs if one is outside.

    Args:
        pairs: the rewards.
        error: probability with which the interval is wrong.
    """
    span = max(1.0, *itertools.chain(*pairs)) - min(0.0, *itertools.chain(*pairs))
    return betting_interval([first - second for first, second in pairs], (-span, span), error)


def verdict(interval: Interval) -> str:
    """Return what the interval of a difference shows.

    Example:
        >>> verdict(Interval(0.1, 0.3)), verdict(Interval(-0.3, -0.1)), verdict(Interval(-0.1, 0.1))
        ('better', 'worse', 'undecided')
    """
    return "better" if interval.low > 0 else "worse" if interval.high < 0 else "undecided"


def betting_interval(
    values: Iterable[float] | Mapping[float, int], bounds: tuple[float, float] = (0.0, 1.0), error: float = 0.05
) -> Interval:
    """Return the means that neither gambler has refuted.

    Args:
        values: the values, in any order, or their counts.
        bounds: smallest and largest value possible.
        error: probability with which the interval is ever wrong.

    Raises:
        ValueError: a value is outside the bounds.
    """
    low, high = bounds
    counts = Counter[float]()
    for value, count in Counter(values).items():
        if not low <= value <= high:
            raise ValueError(f"the value {value:g} is outside the bounds [{low:g}, {high:g}]")
        counts[(value - low) / (high - low)] += count  # rounding may make values equal
    mirrored = Counter[float]()
    for value, count in counts.items():
        mirrored[1 - value] += count
    needed = math.log(2 / error)
    return Interval(
        low + (high - low) * _smallest_mean(counts, needed), high - (high - low) * _smallest_mean(mirrored, needed)
    )


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


def _smallest_mean(counts: Counter[float], needed: float) -> float:
    """Return the largest mean below which the wealth refutes every hypothesis: it falls as the hypothesis rises."""
    refuted, kept = 0.0, math.fsum(value * count for value, count in counts.items()) / max(counts.total(), 1)
    for _ in range(45):
        middle = (refuted + kept) / 2
        if log_wealth(counts, middle) >= needed:
            refuted = middle
        else:
            kept = middle
    return refuted
