"""The intervals of means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from agentrl.core.betting import AnytimeInterval, anytime_interval

STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""97.5 % quantiles of Student's t distribution with 1, 2, … degrees of freedom."""


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


def difference_interval(
    pairs: Sequence[tuple[float, float]], bounds: tuple[float, float], error: float = 0.05
) -> tuple[AnytimeInterval, bool]:
    """Return the interval of the mean difference of paired values, and whether it may be read at any time: if a value
    is outside the bounds, it is the 95 % interval of a fixed number of pairs."""
    low, high = bounds
    differences = [first - second for first, second in pairs]
    if all(low <= value <= high for pair in pairs for value in pair):
        return anytime_interval(differences, (low - high, high - low), (error / 2, error / 2)), True
    mean, half = statistics.fmean(differences), confidence_half_width(differences)
    return AnytimeInterval(mean - half, mean + half), False
