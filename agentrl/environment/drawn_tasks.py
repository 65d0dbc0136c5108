"""Practically endless training tasks: each is drawn on access and stored nowhere."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.core.errors import InputError
from agentrl.core.records import Task

COUNT = 1 << 32
"""As many as anyone will index."""
MAX_ATTEMPTS = 10_000


class DrawnTasks:
    """A `TaskSource` of tasks that a function draws.

    Args:
        draw: function of (index, attempt) that returns a task, or None if the draw is held out: it is called again with
            the next attempt. Must be deterministic.

    Example:
        >>> held_out = {3, 7}
        >>> def draw(index, attempt):
        ...     number = (index + attempt) % 10
        ...     return None if number in held_out else Task(id=f"train-{index}", data={"number": number})
        >>> [DrawnTasks(draw)[index].data["number"] for index in range(5)]
        [0, 1, 2, 4, 4]
    """

    def __init__(self, draw: Callable[[int, int], Task | None]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int, /) -> Task:
        """Draw a task.

        Raises:
            IndexError: the index is negative, or too large.
            InputError: whatever is drawn is held out.
        """
        if not 0 <= index < COUNT:
            raise IndexError(index)
        for attempt in range(MAX_ATTEMPTS):
            task = self._draw(index, attempt)
            if task is not None:
                return task
        raise InputError(
            f"training task {index}: {MAX_ATTEMPTS:,} draws gave held-out tasks only; hold fewer out, or draw from more"
        )
