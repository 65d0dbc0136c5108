"""Who learns now, where policies learn one after another: a function of their steps alone, so nothing to remember.

Each policy of the schedule takes its number of steps, then the next does, and after the last the first again; those
whose run is over are passed over. Meanwhile the others are frozen: their units of that time are dropped (`frozen`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.orchestrator.versions import PolicyBoard


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The schedule of a run.

    Example:
        >>> from agentrl.core.records import PolicyVersion
        >>> board = PolicyBoard({"a": PolicyVersion("a", 0, 2), "b": PolicyVersion("b", 0, 0)}, ["a", "b"])
        >>> Phases(board=board, steps={"a": 8, "b": 4}, lengths={"a": 2, "b": 1}).frozen()
        {'a'}
    """

    board: PolicyBoard
    steps: Mapping[str, int]
    """The step each policy that learns ends at."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Steps of each policy's phase, in their order; policies that always learn are not here."""

    def frozen(self) -> set[str]:
        """The policies whose turn to learn it is not."""
        waiting = {policy for policy in self.lengths if not self.is_over(policy)}
        if not waiting:
            return set(self.lengths)
        rounds = min(self.board.step(policy) // self.lengths[policy] for policy in waiting)
        for policy, length in self.lengths.items():
            if policy in waiting and self.board.step(policy) < (rounds + 1) * length:
                return self.lengths.keys() - {policy}
        raise AssertionError("the policy with the fewest rounds has steps of this one left")

    def is_over(self, policy: str) -> bool:
        """Whether a policy has taken all its steps."""
        return self.board.step(policy) >= self.steps[policy]

    def left(self, policy: str) -> int:
        """Steps a policy has yet to take."""
        return max(self.steps[policy] - self.board.step(policy), 0)
