"""The global random generators as one stateful object of an episode sees them.

Games draw from `random` and `numpy.random` while other episodes run in the same process; each object gets a state of
its own, swapped in for its calls and out again, so that its draws are the same on every execution.
"""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any


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

    def run(self, call: Callable[[], Any]) -> Any:
        """What `call` returns, with the object's own state swapped in; of a coroutine, whenever it runs."""
        with self.swapped_in():
            value = call()
        return self._driven(value) if inspect.iscoroutine(value) else value

    @types.coroutine
    def _driven(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        sent: Any = None
        raised: BaseException | None = None
        while True:
            with self.swapped_in():
                try:
                    awaited = coroutine.send(sent) if raised is None else coroutine.throw(raised)
                except StopIteration as end:
                    return end.value
            try:
                sent, raised = (yield awaited), None
            except BaseException as error:  # noqa: BLE001 - whatever it is, a cancellation above all, is the coroutine's
                sent, raised = None, error
