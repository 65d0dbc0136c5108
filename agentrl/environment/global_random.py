"""The global random generators as one stateful object of an episode sees them.

Games draw from `random` and `numpy.random` while other episodes run in the same process; each object gets a state of
its own, swapped in for its calls and out again, so that its draws are the same on every execution.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any


class GlobalRandom:
    """The state of `random` and `numpy.random` as one object sees it; everyone else's stays as it was."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, Any] | None = None
        """Of `random` and `numpy.random`, from the first use on."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within: the object's own state."""
        from numpy.random import MT19937, get_state, set_state
        from numpy.random.mtrand import get_bit_generator, set_bit_generator

        if self._states is None:
            self._states = random.Random(self._seed).getstate(), MT19937(self._seed)
        own_python, own_numpy = self._states
        python, numpy, generator = random.getstate(), get_state(legacy=False), get_bit_generator()
        random.setstate(own_python)
        set_bit_generator(own_numpy)  # a hundred times cheaper than setting a state
        try:
            yield
        finally:
            self._states = random.getstate(), own_numpy
            random.setstate(python)
            set_bit_generator(generator)
            if numpy["has_gauss"]:  # the second half of a normal draw, which the swap forgot
                set_state(numpy)


async def awaited_under(own: GlobalRandom, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function returns, or what its coroutine does; `own` is swapped out whenever that waits."""
    with own.swapped_in():
        value = function(*arguments, **named)
    return await _Steps(own, value) if inspect.isawaitable(value) else value


class _Steps:
    """An awaitable each of whose steps runs under a global random state."""

    def __init__(self, own: GlobalRandom, awaitable: Awaitable[Any]) -> None:
        self._own = own
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._awaitable.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                with self._own.swapped_in():
                    waits_for = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            thrown = None
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - whatever is thrown in belongs to the coroutine
                thrown = error
