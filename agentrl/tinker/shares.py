"""How the owners of a Tinker server share its engine and its trainer: equally, however much each of them asks for.

`EnginePlaces` shares the places of the engine among owners with samples to draw. `TrainingTurns` chooses the model that
trains next. What one owner does not use, others get.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.tinker.tables import ClientModel

REQUEST_TOKENS = 256
"""Tokens that a request of a model costs its owner at least: creating, saving and short passes take time, too."""


@dataclass(slots=True, eq=False)
class EnginePlace:
    """A place while a call holds it."""

    owner: str
    call_id: str | None
    is_given: asyncio.Event = field(default_factory=asyncio.Event)
    is_interrupted: bool = False
    """Whether the call must end, and continue in another place: another owner has too few."""


class EnginePlaces:
    """The places of an engine.

    A free place goes to the waiting owner that holds the fewest. If an owner waits that holds fewer than an equal
    share, the newest call of the owner that holds the most is interrupted.

    Args:
        count: number of calls that the engine runs at once.
        interrupt: ends a call early, by its id.
    """

    def __init__(self, count: int, interrupt: Callable[[str], None]) -> None:
        self.count = count
        self._interrupt = interrupt
        self._held: dict[EnginePlace, None] = {}
        """Oldest first."""
        self._waiting: defaultdict[str, deque[EnginePlace]] = defaultdict(deque)
        self._served: Counter[str] = Counter()
        """Number of the newest place that each owner got."""
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def take(
        self, owner: str, call_id: str | None = None, *, is_resumed: bool = False
    ) -> AsyncIterator[EnginePlace]:
        """Hold a place within the context.

        Args:
            owner: owner of the call.
            call_id: id by which the call can be interrupted; None: it cannot.
            is_resumed: whether the call was interrupted, so that it comes before the owner's others.
        """
        place, queue = EnginePlace(owner, call_id), self._waiting[owner]
        (queue.appendleft if is_resumed else queue.append)(place)
        self._share()
        try:
            await place.is_given.wait()
            yield place
        finally:
            if place in self._held:
                del self._held[place]
            else:
                queue.remove(place)
            self._share()

    def _share(self) -> None:
        """Give free places to those that wait, and interrupt calls for owners that hold too few."""
        waiting = {owner: len(queue) for owner, queue in self._waiting.items() if queue}
        held = Counter(place.owner for place in self._held)
        while waiting and len(self._held) < self.count:
            owner = min(waiting, key=lambda one: (held[one], self._served[one]))
            place = self._waiting[owner].popleft()
            self._held[place] = None
            self._served[owner] = next(self._numbers)
            place.is_given.set()
            held[owner] += 1
            waiting[owner] -= 1
            if not waiting[owner]:
                del waiting[owner]
        share = self.count // len(held.keys() | waiting.keys()) if waiting else 0
        lacking = sum(min(number, max(0, share - held[owner])) for owner, number in waiting.items())
        lacking -= sum(place.is_interrupted for place in self._held)
        for _ in range(lacking):
            held = Counter(place.owner for place in self._held if not place.is_interrupted)
            owner, most = held.most_common(1)[0]
            newest = next(
                (one for one in reversed(self._held) if one.owner == owner and one.call_id and not one.is_interrupted),
                None,
            )
            if most <= share or newest is None:
                break
            newest.is_interrupted = True
            self._interrupt(str(newest.call_id))


class TrainingTurns:
    """Which model trains next: one of the owner that used the fewest tokens.

    An owner that was idle gets no credit for it, and neither does a model.

    Args:
        turn: tokens by which the turns of one owner's models are decided.
    """

    def __init__(self, turn: Callable[[ClientModel], float]) -> None:
        self._turn = turn
        self._ready: defaultdict[str, dict[str, ClientModel]] = defaultdict(dict)
        """Models whose next request is there, by owner and id."""
        self._used: Counter[str] = Counter()
        """Tokens by which the turns of owners are decided."""
        self._served: Counter[str] = Counter()
        """Number of the newest turn of each owner."""
        self._numbers = itertools.count(1)

    def add(self, model: ClientModel) -> None:
        """Note that a model's next request is there."""
        ready = self._ready[model.owner]
        if model.id in ready:
            return
        if ready:
            model.trained_tokens = max(model.trained_tokens, min(other.trained_tokens for other in ready.values()))
        elif others := [self._used[owner] for owner in self._owners()]:
            self._used[model.owner] = max(self._used[model.owner], min(others))
        ready[model.id] = model

    def next(self) -> ClientModel | None:
        """Return the model that trains next; None if none has a request."""
        owner = min(self._owners(), key=lambda one: (self._used[one], self._served[one]), default=None)
        if owner is None:
            return None
        self._served[owner] = next(self._numbers)
        return min(self._ready[owner].values(), key=lambda one: (self._turn(one), one.number))

    def end(self, model: ClientModel, tokens: float) -> None:
        """Count a request of a model that trained on some tokens."""
        self._used[model.owner] += int(max(tokens, REQUEST_TOKENS))
        if not model.is_ready:
            del self._ready[model.owner][model.id]

    def _owners(self) -> Iterable[str]:
        return [owner for owner, ready in self._ready.items() if ready]
