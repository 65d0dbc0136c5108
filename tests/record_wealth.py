"""Record the wealth and the intervals that confseq computes, for `tests/unit/test_intervals.py` to compare with.

    pip download --no-deps --no-binary confseq confseq==0.0.11 && tar xzf confseq-0.0.11.tar.gz
    PYTHONPATH=confseq-0.0.11/src python -m tests.record_wealth > tests/wealth_of_confseq.json

confseq needs Boost to be installed, and its module of betting does not, so it runs from its source with numpy, scipy,
matplotlib and multiprocess. It gets the stakes of `agentrl.core.intervals` as functions of its own and clips none.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import types

import numpy as np

STAKES = (0.05, 0.1, 0.2, 0.4, 0.9)
MEANS = (0.2, 0.5, 0.8)
HALVINGS = 60


def main() -> None:
    """Print the table."""
    np.float_ = np.float64  # type: ignore[attr-defined] # its name before numpy 2
    sys.modules["confseq.boundaries"] = types.ModuleType("confseq.boundaries")  # compiled, and not used here
    martingale = importlib.import_module("confseq.betting").diversified_betting_mart
    above = [lambda x, m, stake=stake: np.repeat(stake / m, len(x)) for stake in STAKES]
    below = [lambda x, m, stake=stake: np.repeat(stake / (1 - m), len(x)) for stake in STAKES]

    def wealth(values: list[float], mean: float, theta: int) -> float:
        return float(martingale(np.array(values), mean, above, below, theta=theta, trunc_scale=1.0)[-1])

    def end(values: list[float], theta: int, refuted: float, error: float) -> float:
        kept = sum(values) / len(values)
        for _ in range(HALVINGS):
            middle = (kept + refuted) / 2
            kept, refuted = (kept, middle) if wealth(values, middle, theta) >= 2 / error else (middle, refuted)
        return refuted

    draw = random.Random("betting")
    cases = {
        "coins": [float(draw.random() < 0.3) for _ in range(60)],
        "shares": [draw.random() ** 2 for _ in range(40)],
        "differences": [(1 + (draw.random() < 0.8) - (draw.random() < 0.6)) / 2 for _ in range(100)],
        "equal": [0.75] * 20,
    }
    table = [
        {
            "name": name,
            "values": values,
            "above": [wealth(values, mean, 1) for mean in MEANS],
            "below": [wealth(values, mean, 0) for mean in MEANS],
            "intervals": [
                [error, end(values, 1, 1e-9, error), end(values, 0, 1 - 1e-9, error)] for error in (0.05, 0.01)
            ],
        }
        for name, values in cases.items()
    ]
    sys.stdout.write(json.dumps({"package": "confseq 0.0.11", "means": MEANS, "cases": table}) + "\n")


if __name__ == "__main__":
    main()
