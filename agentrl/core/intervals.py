"""The interval of a mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def confidence_half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean of independent values: 1.96 s / √n, s by n - 1; 0 for one
    value."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
