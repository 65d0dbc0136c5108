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

_spare: list[Any] = []
"""numpy's generators of those that were released: making one takes 0.3 ms, seeding it anew a few microseconds."""


class GlobalRandom:
    """The state of `random` and `numpy.random` as one object sees it; everyone else's stays as it was."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._python: Any = None
        """State of `random`, once it was swapped out."""
        self._numpy: Any = None
        """Generator of `numpy.random`, from the first use on."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within: the object's own state."""
        from numpy.random import MT19937, get_state, set_state
        from numpy.random import seed as seed_numpy
        from numpy.random.mtrand import get_bit_generator, set_bit_generator

        python, numpy, generator = random.getstate(), get_state(legacy=False), get_bit_generator()
        if self._numpy is None:
            self._numpy = _spare.pop() if _spare else MT19937()
            set_bit_generator(self._numpy)  # a hundred times cheaper than setting a state
            seed_numpy(self._seed % (1 << 32))
            random.setstate(random.Random(self._seed).getstate())
        else:
            set_bit_generator(self._numpy)
            random.setstate(self._python)
        try:
            yield
        finally:
            self._python = random.getstate()
            random.setstate(python)
            set_bit_generator(generator)
            if numpy["has_gauss"]:  # the second half of a normal draw, which the swap forgot
                set_state(numpy)

    def release(self) -> None:
        """Nobody draws from it any more."""
        if self._numpy is not None:
            _spare.append(self._numpy)
            self._numpy = None


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
