"""Checks of the likeliest tokens, by value: processors round differently, so near-equal tokens may change places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check_likeliest(expected: NDArray[Any], tokens: Sequence[int], values: Sequence[float], atol: float) -> None:
    """Check the likeliest tokens of one position.

    Args:
        expected: log-probability of each token of the vocabulary.
        tokens: the likeliest tokens, in order.
        values: their log-probabilities.
        atol: largest difference of a log-probability.
    """
    assert len(tokens) == len(set(tokens)) == len(values)
    assert (np.diff(values) <= 0).all()
    np.testing.assert_allclose(values, expected[np.asarray(tokens, np.int64)], atol=atol)
    np.testing.assert_allclose(values, np.sort(expected)[::-1][: len(tokens)], atol=atol)
