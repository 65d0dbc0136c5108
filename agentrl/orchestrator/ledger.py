"""The ledger: two equations that prove no episode and no unit is lost or trained twice.

    episodes, children counted:  admitted  = in_flight + ready + trained + dropped
    units of each policy:        committed = ready + consumed + dropped

An episode is ready until its last unit is resolved; trained if one was consumed, dropped otherwise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from agentrl.core.errors import AgentRLError


class LedgerError(AgentRLError):
    """The ledger does not balance: a bug, never a user's mistake."""


@dataclass(slots=True)
class Ledger:
    """Counts behind the equations."""

    admitted: int = 0
    in_flight: int = 0
    ready: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason; `frozen` where nothing of the episode was trainable."""
    units_committed: Counter[str] = field(default_factory=Counter)
    """By policy, as the following."""
    units_ready: Counter[str] = field(default_factory=Counter)
    units_consumed: Counter[str] = field(default_factory=Counter)
    units_dropped: Counter[str] = field(default_factory=Counter)

    def as_data(self) -> dict[str, Any]:
        """The counts as JSON data."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}

    def check(self) -> None:
        """Compare both sides.

        Raises:
            LedgerError: an equation does not hold.
        """
        if self.admitted != self.in_flight + self.ready + self.trained + self.dropped.total():
            raise LedgerError(f"admitted = in_flight + ready + trained + dropped does not hold: {self}")
        for policy, committed in self.units_committed.items():
            resolved = self.units_consumed[policy] + self.units_dropped[policy]
            if committed != self.units_ready[policy] + resolved:
                raise LedgerError(f"policy {policy}: committed = ready + consumed + dropped does not hold: {self}")
