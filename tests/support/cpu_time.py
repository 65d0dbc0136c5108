"""CPU time as a count of work, for tests that tell linear from quadratic."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def least_cpu_s(act: Callable[[], object], *, enough: float = 0.0, tries: int = 5) -> float:
    """CPU seconds of this thread in the fastest of some tries, of which the first below `enough` is the last.

    One try alone may pay for others: a collection of all that a thousand tests left, or a neighbour's use of the cache.
    """
    least = float("inf")
    for _ in range(tries):
        gc.collect()
        gc.disable()
        try:
            began = time.thread_time()
            act()
            least = min(least, time.thread_time() - began)
        finally:
            gc.enable()
        if least < enough:
            break
    return least
