"""The cores of this process, shared by the engine and the trainer that compute in it.

Each may use all of them while it computes alone. If both used as many threads as that while they overlap, every
operation would wait until its last thread gets a core: SmolLM2's steps then took a third longer on two cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_computing = 0
"""Number of parts that compute now."""


@contextmanager
def computing() -> Iterator[None]:
    """Count one more part that computes, within the context."""
    global _computing
    with _lock:
        _computing += 1
    try:
        yield
    finally:
        with _lock:
            _computing -= 1


def threads_now(max_threads: int) -> int:
    """Return a part's share of the cores while others compute in this process, at most `max_threads`."""
    return min(max_threads, max(1, len(os.sched_getaffinity(0)) // max(1, _computing)))


def use_threads(max_threads: int) -> None:
    """Let torch use this part's share of the cores, at most `max_threads`, in the calling thread."""
    if torch.get_num_threads() != (threads := threads_now(max_threads)):
        torch.set_num_threads(threads)
