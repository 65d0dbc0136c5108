"""Which task root group k gets: a seeded permutation per pass over the source. A pure function of k."""

from __future__ import annotations

from agentrl.core.errors import AgentRLError, InputError
from agentrl.core.records import Task
from agentrl.core.rng import stream
from agentrl.environment.base import TaskSource, described

_SHUFFLE_LIMIT = 1_000_000
"""Longer sources are drawn from instead of permuted."""


class Curriculum:
    """Endless tasks from a finite source."""

    def __init__(self, source: TaskSource, *, seed: int) -> None:
        if len(source) == 0:
            raise InputError("the environment's task source is empty; check environment.options")
        self._source = source
        self._seed = seed
        self._pass = -1
        self._order: list[int] = []

    def task(self, number: int) -> Task:
        """The task of root group `number`."""
        try:
            return self._draw(number)
        except AgentRLError:
            raise
        except Exception as error:
            raise InputError(f"the task source raised {described(error)}") from error

    def _draw(self, number: int) -> Task:
        length = len(self._source)
        if length > _SHUFFLE_LIMIT:
            return self._source[stream(self._seed, "task", number).randrange(length)]
        number_of_pass, position = divmod(number, length)
        if number_of_pass != self._pass:
            self._pass = number_of_pass
            self._order = list(range(length))
            stream(self._seed, "tasks", number_of_pass).shuffle(self._order)
        return self._source[self._order[position]]
