"""The global random generators as one stateful object of an episode sees them.

Games draw from `random` and `numpy.random` while other episodes run in the same process; each object gets a state of
its own, swapped in for its calls and out again, so that its draws are the same on every execution.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


class GlobalRandom:
    """The state of `random` and `numpy.random` as one game sees it; everyone else's stays as it was."""

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._python = random.Random(seed).getstate()
        self._numpy = np.random.MT19937(seed)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within: the game's own state."""
        from numpy.random import get_state, set_state
        from numpy.random.mtrand import get_bit_generator, set_bit_generator

        python, numpy, generator = random.getstate(), get_state(legacy=False), get_bit_generator()
        random.setstate(self._python)
        set_bit_generator(self._numpy)  # a hundred times cheaper than setting a state
        try:
            yield
        finally:
            self._python = random.getstate()
            random.setstate(python)
            set_bit_generator(generator)
            if numpy["has_gauss"]:  # the second half of a normal draw, which the swap forgot
                set_state(numpy)
