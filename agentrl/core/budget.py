"""How often something of the machinery may be lost, and how long to wait before it is tried again."""

from __future__ import annotations

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0


class RetryBudget:
    """Losses in a row, with nothing achieved in between, up to a number; the wait doubles from 1 s to 30 s.

    Args:
        attempts: how many losses in a row are borne.

    Example:
        >>> budget = RetryBudget(3)
        >>> budget.lost(), budget.lost(), budget.lost(), budget.lost()
        (1.0, 2.0, 4.0, None)
    """

    __slots__ = ("_attempts", "_in_a_row")

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._in_a_row = 0

    def lost(self) -> float | None:
        """Count a loss: seconds to wait before the next attempt, None where there is to be none."""
        self._in_a_row += 1
        if self._in_a_row > self._attempts:
            return None
        return min(FIRST_WAIT_S * 2.0 ** (self._in_a_row - 1), LONGEST_WAIT_S)

    def achieved(self) -> None:
        """Something was achieved: the next loss is the first in a row again."""
        self._in_a_row = 0
