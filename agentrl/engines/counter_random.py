"""Counter-based random numbers: the n-th number of a seed, independent of order and batch. Pure numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) with 48 random bits, a pure function of (seed, counter), both `[B]`.

    The output function of SplitMix64 (Steele, Lea & Flood, 2014, doi:10.1145/2714064.2660195), applied to the seed
    first, so that neighboring seeds do not share a sequence.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds) + counters.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    hashes: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return hashes
